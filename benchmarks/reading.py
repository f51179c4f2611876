"""Reading a cache, against the plain reader, a memcpy of the same bytes and raw reads of the same extents."""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.made_caches import TOKEN_BYTES, Sizes, evict, make_cache
from benchmarks.plain import PlainDataset, plain_loader
from benchmarks.ratios import Row, fastest, in_turn, rate, ratio
from dspark_cache import CachedDSparkDataset
from dspark_cache.loaders import CachedDataLoader, build_cached_dspark_dataloader, collate_dspark
from dspark_cache.samplers import shard_order
from dspark_cache.schema import HIDDEN, LAST_HIDDEN
from dspark_cache.shard_file import ShardFile
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BATCH = 8
SHARD_BYTES = 1 << 28
RAW_THREADS = (1, 2, 4, 8, 16)
PIECE_BYTES = 1 << 23
MEGABYTE = 1_000_000
SAMPLES = (1, 8, 50)
WORKERS_SAMPLE = 8 * MEGABYTE
_STARTING = 6
"""Batches after which workers run and have touched their memory once."""


def rows(work: Path, total_bytes: int, rounds: int, *, megabytes: Sequence[int] = SAMPLES) -> Iterator[Row]:
    """Measure and give the rows.

    Args:
        work: Empty folder on the disk to read from.
        total_bytes: Size of each cache.
        rounds: How often.
        megabytes: Sizes of samples.
    """
    for size in megabytes:
        cache = _Cache.make(work / f"{size} MB", size * MEGABYTE, total_bytes)
        yield from _hot_rows(cache, size, rounds)
        yield from _cold_rows(cache, size, rounds)
    yield from _worker_rows(_Cache.make(work / "workers", WORKERS_SAMPLE, 4 * total_bytes), rounds)
    yield _longest_row(work, total_bytes, rounds)
    yield from _mix_rows()


class _Cache:
    """A padded cache without padding, the way to read it in any order, and its extents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = CachedDSparkDataset(folder)
        self.in_order = list(range(len(self.dataset)))
        self.shuffled = random.Random(0).sample(self.in_order, len(self.in_order))
        generator = torch.Generator().manual_seed(0)
        self.by_shard: list[int] = shard_order(self.dataset.shard_samples, 2, generator).tolist()

    @classmethod
    def make(cls, folder: Path, sample_bytes: int, total_bytes: int) -> _Cache:
        length = max(1, sample_bytes // TOKEN_BYTES)
        count = max(2 * BATCH, total_bytes // sample_bytes)
        sizes = Sizes(lengths=[length] * count, seq_length=length)
        make_cache(folder, sizes, "padded", shard_bytes=SHARD_BYTES)
        return cls(folder)

    @property
    def num_bytes(self) -> int:
        specs = self.dataset._sample_specs.values()  # noqa: SLF001
        return len(self.dataset) * sum(spec.num_bytes for spec in specs)

    def evict(self) -> None:
        evict(self.folder)

    def read(self, order: Sequence[int], **options: Any) -> None:
        for _ in CachedDataLoader(self.dataset, batch_size=BATCH, sampler=order, collate_fn=collate_dspark, **options):
            pass

    def keep(self, order: Sequence[int]) -> None:
        """Read, and hold all batches to the end: each goes into memory that was never used."""
        list(CachedDataLoader(self.dataset, batch_size=BATCH, sampler=order, collate_fn=collate_dspark))

    def pace(self, pause: float, **options: Any) -> float:
        """Return the seconds from one batch to the next for a consumer that sleeps, once all has started."""
        loader = CachedDataLoader(
            self.dataset, batch_size=BATCH, sampler=self.in_order, collate_fn=collate_dspark, **options
        )
        stamps = []
        for _ in loader:
            stamps.append(time.perf_counter())
            time.sleep(pause)
        return (stamps[-1] - stamps[_STARTING]) / (len(stamps) - 1 - _STARTING)

    def read_plainly(self, order: Sequence[int], num_workers: int = 0) -> None:
        plain = PlainDataset(self.folder, len(self.dataset), self.dataset.shard_size)
        for _ in plain_loader(plain, order, BATCH, num_workers):
            pass

    def read_raw(self, order: Sequence[int], threads: int) -> None:
        """Read the states' extents in this order into memory that is used again."""
        files = {shard: ShardFile(self.folder / shard_name(shard)) for shard in {self._shard(i) for i in order}}
        descriptors = {shard: os.open(file.name, os.O_RDONLY) for shard, file in files.items()}
        pieces = []
        for index in order:
            shard = self._shard(index)
            for key in (HIDDEN, LAST_HIDDEN):
                place = files[shard].places[key]
                size = place.spec.row_bytes
                start = place.offset + (index % self.dataset.shard_size) * size
                pieces += [
                    (descriptors[shard], start + at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)
                ]
        buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in range(threads)]

        def read(number: int) -> None:
            for descriptor, offset, size in pieces[number::threads]:
                done = 0
                while done < size:
                    done += os.preadv(descriptor, [buffers[number][done:size]], offset + done)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
        for descriptor in descriptors.values():
            os.close(descriptor)

    def _shard(self, index: int) -> int:
        return index // self.dataset.shard_size


def _hot_rows(cache: _Cache, megabytes: int, rounds: int) -> Iterator[Row]:
    batches = [cache.in_order[start : start + BATCH] for start in range(0, len(cache.in_order), BATCH)]
    sizes = [len(batch) * cache.num_bytes // len(cache.in_order) for batch in batches]
    source = torch.ones(sum(sizes), dtype=torch.uint8)
    again = torch.ones(max(sizes), dtype=torch.uint8)

    def copy(kept: list[torch.Tensor] | None) -> None:
        start = 0
        for size in sizes:
            into = again if kept is None else torch.empty(size, dtype=torch.uint8)
            ctypes.memmove(into.data_ptr(), source.data_ptr() + start, size)
            start += size
            if kept is not None:
                kept.append(into)

    seconds = in_turn(
        {
            "ours": lambda: cache.read(cache.in_order),
            "ours, kept": lambda: cache.keep(cache.in_order),
            "ours shuffled": lambda: cache.read(cache.shuffled),
            "memcpy": lambda: copy(None),
            "memcpy, kept": lambda: copy([]),
            "plain": lambda: cache.read_plainly(cache.in_order),
            "plain shuffled": lambda: cache.read_plainly(cache.shuffled),
        },
        rounds,
    )
    name = f"read, hot, samples of {megabytes} MB"
    for words, other, ours, target in (
        ("memcpy to the same memory again", "memcpy", "ours", 0.85),
        ("memcpy to fresh memory, batches kept", "memcpy, kept", "ours, kept", 0.85),
        ("plain reader", "plain", "ours", 1.0),
        ("plain reader, shuffled", "plain shuffled", "ours shuffled", 1.0),
    ):
        rates = [f"{rate(cache.num_bytes / 1e9, seconds[way]):.2f}" for way in (ours, other)]
        yield _row(f"{name}: {words}", seconds, other, ours, target, " and ".join(rates) + " GB/s")


def _row(name: str, seconds: dict[str, list[float]], other: str, ours: str, target: float, detail: str) -> Row:
    return Row(name=name, ratio=ratio(seconds[other], seconds[ours]), target=target, detail=detail)


def _cold_rows(cache: _Cache, megabytes: int, rounds: int) -> Iterator[Row]:
    for word, order in (("in order", cache.in_order), ("shuffled", cache.shuffled), ("by shard", cache.by_shard)):
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda order=order: cache.read(order, read_ahead=2),  # type: ignore[misc]
            "plain": lambda order=order: cache.read_plainly(order),  # type: ignore[misc]
        }
        for threads in RAW_THREADS:
            ways[f"raw {threads}"] = lambda order=order, threads=threads: cache.read_raw(order, threads)  # type: ignore[misc]
        seconds = in_turn(ways, rounds, cache.evict)
        best = fastest(seconds, "raw")
        rates = {way: rate(cache.num_bytes / 1e9, taken) for way, taken in seconds.items()}
        name = f"read, cold, samples of {megabytes} MB, {word}"
        detail = f"{rates['ours']:.2f} and {rates[best]:.2f} GB/s ({best[4:]} threads)"
        yield _row(f"{name}: best raw read", seconds, best, "ours", 0.9, detail)
        detail = f"{rates['ours']:.2f} and {rates['plain']:.2f} GB/s"
        yield _row(f"{name}: plain reader", seconds, "plain", "ours", 1.0, detail)


def _worker_rows(cache: _Cache, rounds: int) -> Iterator[Row]:
    seconds = in_turn(
        {
            "ours": lambda: cache.read(cache.in_order, num_workers=2),
            "plain": lambda: cache.read_plainly(cache.in_order, num_workers=2),
        },
        rounds,
    )
    detail = " and ".join(f"{rate(cache.num_bytes / 1e9, seconds[way]):.2f}" for way in ("ours", "plain")) + " GB/s"
    yield _row("read, hot, two workers each: plain reader", seconds, "plain", "ours", 2.0, detail)
    for words, prepare in (("hot", _nothing), ("cold", cache.evict)):
        for name, options in (("two workers", {"num_workers": 2}), ("read_ahead=2", {"read_ahead": 2})):
            hidden, pauses = [], []
            for _ in range(rounds):
                prepare()
                pauses.append(cache.pace(0.0))
                prepare()
                hidden.append(2 - cache.pace(pauses[-1], **options) / pauses[-1])
            yield Row(
                name=f"read, {words}, share hidden behind a consumer as slow, {name}",
                ratio=statistics.median(hidden),
                target=0.8 if "workers" in name and words == "cold" else None,
                detail=f"{statistics.median(pauses) * 1e3:.1f} ms a batch",
            )


def _mix_rows() -> Iterator[Row]:
    """Give how random orders by shard are: the distinct shards of a batch by those of one that is wholly shuffled."""
    shards, samples = 1000, 45
    of_shard = torch.arange(shards * samples) // samples
    generator = torch.Generator().manual_seed(0)

    def measured(order: torch.Tensor) -> tuple[float, float, float]:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order))
        batches = of_shard[order][: len(order) // BATCH * BATCH].view(-1, BATCH).tolist()
        displacement = float((places - torch.arange(len(order))).abs().double().mean()) / len(order)
        apart = float((places[1:] - places[:-1])[of_shard[1:] == of_shard[:-1]].abs().double().median())
        return statistics.fmean(len(set(batch)) for batch in batches), displacement, apart

    whole = measured(torch.randperm(len(of_shard), generator=generator))
    for mixed in (1, 4, 8, 16, 64):
        found = measured(shard_order([samples] * shards, mixed, generator))
        yield Row(
            name=f"shuffle by shard, {mixed} mixed: shards in a batch of {BATCH}, by a whole shuffle",
            ratio=found[0] / whole[0],
            target=None,
            detail=f"{found[0]:.2f} and {whole[0]:.2f} shards; mean displacement {found[1]:.2f} and {whole[1]:.2f} of "
            f"all; neighbours of a shard come {found[2]:.0f} and {whole[2]:.0f} samples apart",
        )


def _nothing() -> None:
    pass


def _longest_row(work: Path, total_bytes: int, rounds: int) -> Row:
    seq_length = 1024
    generator = random.Random(0)
    mean_bytes = TOKEN_BYTES * seq_length // 4
    lengths = [
        min(seq_length, max(1, int(generator.expovariate(1 / 250)))) for _ in range(2 * total_bytes // mean_bytes)
    ]
    sizes = Sizes(lengths=lengths, seq_length=seq_length)
    for layout in ("padded", "ragged"):
        make_cache(work / layout, sizes, layout, shard_bytes=SHARD_BYTES)
    padded = _Cache(work / "padded")

    def read() -> None:
        for _ in build_cached_dspark_dataloader(str(work / "ragged"), BATCH, False, pad_to="longest"):
            pass

    seconds = in_turn({"ours": read, "plain": lambda: padded.read_plainly(padded.in_order)}, rounds)
    detail = f"{rate(sum(lengths), seconds['ours']):,.0f} and {rate(sum(lengths), seconds['plain']):,.0f} real tokens/s"
    detail += f", mean length {sum(lengths) / len(lengths):.0f} of {seq_length}"
    return _row("read, hot, ragged, pad_to longest: plain reader", seconds, "plain", "ours", 3.0, detail)
