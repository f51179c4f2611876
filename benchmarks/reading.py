"""Reading a cache, against the plain reader, a memcpy of the same bytes and raw reads of the same extents."""

from __future__ import annotations

import ctypes
import math
import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.made_caches import Sizes, make_cache
from benchmarks.plain import PlainDataset, plain_loader
from benchmarks.ratios import Row, in_turn, rate, ratio
from dspark_cache import CachedDSparkDataset
from dspark_cache.loaders import CachedDataLoader, build_cached_dspark_dataloader, collate_dspark
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


def rows(work: Path, total_bytes: int, rounds: int) -> Iterator[Row]:
    """Measure and give the rows.

    Args:
        work: Empty folder on the disk to read from.
        total_bytes: Size of each cache.
        rounds: How often.
    """
    for megabytes in (1, 8, 50):
        cache = _Cache.make(work / f"{megabytes} MB", megabytes * MEGABYTE, total_bytes)
        yield from _hot_rows(cache, megabytes, rounds)
        yield from _cold_rows(cache, megabytes, rounds)
    yield from _worker_rows(_Cache(work / "8 MB"), rounds)
    yield _longest_row(work, total_bytes, rounds)


class _Cache:
    """A padded cache without padding, the way to read it in any order, and its extents."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = CachedDSparkDataset(folder)
        self.in_order = list(range(len(self.dataset)))
        self.shuffled = random.Random(0).sample(self.in_order, len(self.in_order))

    @classmethod
    def make(cls, folder: Path, sample_bytes: int, total_bytes: int) -> _Cache:
        length = max(1, sample_bytes // Sizes(lengths=[], seq_length=1).token_bytes)
        count = max(2 * BATCH, total_bytes // sample_bytes)
        sizes = Sizes(lengths=[length] * count, seq_length=length)
        make_cache(folder, sizes, "padded", shard_bytes=SHARD_BYTES)
        return cls(folder)

    @property
    def num_bytes(self) -> int:
        specs = self.dataset._sample_specs.values()  # noqa: SLF001
        return len(self.dataset) * sum(spec.num_bytes for spec in specs)

    def evict(self) -> None:
        """Drop the cache's files from the page cache."""
        for path in self.folder.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def read(self, order: Sequence[int], **options: Any) -> None:
        for _ in CachedDataLoader(self.dataset, batch_size=BATCH, sampler=order, collate_fn=collate_dspark, **options):
            pass

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
    batch = cache.dataset.__getitems__(list(range(BATCH)))
    tensors = list((batch.batch((HIDDEN, LAST_HIDDEN)) or {}).values())
    repeats = math.ceil(len(cache.dataset) / BATCH)

    def copy() -> None:
        for _ in range(repeats):
            for tensor in tensors:
                fresh = torch.empty_like(tensor)
                ctypes.memmove(fresh.data_ptr(), tensor.data_ptr(), tensor.nbytes)

    seconds = in_turn(
        {
            "ours": lambda: cache.read(cache.in_order),
            "ours shuffled": lambda: cache.read(cache.shuffled),
            "memcpy": copy,
            "plain": lambda: cache.read_plainly(cache.in_order),
            "plain shuffled": lambda: cache.read_plainly(cache.shuffled),
        },
        rounds,
    )
    name = f"read, hot, samples of {megabytes} MB"
    rates = {way: f"{rate(cache.num_bytes / 1e9, taken):.2f}" for way, taken in seconds.items()}
    detail = f"{rates['ours']} and {{}} GB/s"
    yield _row(f"{name}: memcpy to fresh memory", seconds, "memcpy", "ours", 0.85, detail.format(rates["memcpy"]))
    yield _row(f"{name}: plain reader", seconds, "plain", "ours", 1.0, detail.format(rates["plain"]))
    shuffled = f"{rates['ours shuffled']} and {rates['plain shuffled']} GB/s"
    yield _row(f"{name}, shuffled: plain reader", seconds, "plain shuffled", "ours shuffled", 1.0, shuffled)


def _row(name: str, seconds: dict[str, list[float]], other: str, ours: str, target: float, detail: str) -> Row:
    return Row(name=name, ratio=ratio(seconds[other], seconds[ours]), target=target, detail=detail)


def _cold_rows(cache: _Cache, megabytes: int, rounds: int) -> Iterator[Row]:
    for word, order in (("in order", cache.in_order), ("shuffled", cache.shuffled)):
        ways: dict[str, Callable[[], object]] = {
            "ours": lambda order=order: cache.read(order),  # type: ignore[misc]
            "plain": lambda order=order: cache.read_plainly(order),  # type: ignore[misc]
        }
        for threads in RAW_THREADS:
            ways[f"raw {threads}"] = lambda order=order, threads=threads: cache.read_raw(order, threads)  # type: ignore[misc]
        seconds = in_turn(ways, rounds, cache.evict)
        best = max((way for way in seconds if way.startswith("raw")), key=lambda way: rate(1, seconds[way]))
        rates = {way: rate(cache.num_bytes / 1e9, taken) for way, taken in seconds.items()}
        name = f"read, cold, samples of {megabytes} MB, {word}"
        detail = f"{rates['ours']:.2f} and {rates[best]:.2f} GB/s ({best[4:]} threads)"
        yield _row(f"{name}: best raw read", seconds, best, "ours", 0.9, detail)
        detail = f"{rates['ours']:.2f} and {rates['plain']:.2f} GB/s"
        yield _row(f"{name}: plain reader", seconds, "plain", "ours", 1.0, detail)


def _worker_rows(cache: _Cache, rounds: int) -> Iterator[Row]:
    def consume(seconds: float, **options: Any) -> None:
        loader = CachedDataLoader(
            cache.dataset, batch_size=BATCH, sampler=cache.in_order, collate_fn=collate_dspark, **options
        )
        for _ in loader:
            time.sleep(seconds)

    seconds = in_turn(
        {
            "ours": lambda: cache.read(cache.in_order, num_workers=2),
            "plain": lambda: cache.read_plainly(cache.in_order, num_workers=2),
            "alone": lambda: cache.read(cache.in_order),
        },
        rounds,
    )
    detail = " and ".join(f"{rate(cache.num_bytes / 1e9, seconds[way]):.2f}" for way in ("ours", "plain")) + " GB/s"
    yield _row("read, hot, two workers each: plain reader", seconds, "plain", "ours", 2.0, detail)
    batches = math.ceil(len(cache.dataset) / BATCH)
    yield from _hiding_rows(cache, consume, batches, rounds)


def _sleeping(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


def _hiding_rows(cache: _Cache, consume: Callable[..., None], batches: int, rounds: int) -> Iterator[Row]:
    """Give the share of the reading that is hidden behind a consumer that takes as long."""
    alone = in_turn({"read": lambda: cache.read(cache.in_order)}, rounds)["read"]
    pause = statistics.median(alone) / batches
    for name, options in (("two workers", {"num_workers": 2}), ("read_ahead=2", {"read_ahead": 2})):
        seconds = in_turn(
            {
                "read": lambda: cache.read(cache.in_order),
                "consume": _sleeping(pause * batches),
                "both": lambda options=options: consume(pause, **options),  # type: ignore[misc]
            },
            rounds,
        )
        hidden = statistics.median(
            1 - (both - consumed) / read
            for read, consumed, both in zip(seconds["read"], seconds["consume"], seconds["both"], strict=True)
        )
        target = 0.8 if "workers" in name else None
        yield Row(
            name=f"read, hot, hidden by {name}", ratio=hidden, target=target, detail=f"{pause * 1e3:.1f} ms a batch"
        )


def _longest_row(work: Path, total_bytes: int, rounds: int) -> Row:
    seq_length = 1024
    generator = random.Random(0)
    mean_bytes = Sizes(lengths=[], seq_length=1).token_bytes * seq_length // 4
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
