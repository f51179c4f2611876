"""Writing shards, against a raw write and a digest of the same bytes, and against `save_file` of a whole shard."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.made_caches import TOKEN_BYTES, MadeRows, Sizes, make_cache
from benchmarks.plain import write_plainly
from benchmarks.ratios import Row, in_turn, rate, ratio
from benchmarks.workspace import bytes_written
from dspark_cache.files import file_digest
from dspark_cache.schema import CACHE_KEYS, HIDDEN, LAST_HIDDEN
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEQ_LENGTH = 1024
_PART_BYTES = 1 << 24


def rows(work: Path, total_bytes: int, rounds: int) -> Iterator[Row]:
    """Measure and give the rows.

    Args:
        work: Folder on the disk to write to.
        total_bytes: Size of the shard.
        rounds: How often.
    """
    sizes = Sizes(lengths=[SEQ_LENGTH] * (total_bytes // TOKEN_BYTES // SEQ_LENGTH), seq_length=SEQ_LENGTH)
    cache, fp8, copy = work / "written", work / "fp8", work / "copy"
    source = MadeRows(sizes, "bf16")
    options: dict[str, Any] = {"shard_bytes": 1 << 40, "source": source}
    make_cache(cache, sizes, "ragged", **options)
    content = (cache / shard_name(0)).read_bytes()

    def clear() -> None:
        for folder in (cache, fp8):
            shutil.rmtree(folder, ignore_errors=True)
        copy.unlink(missing_ok=True)
        os.sync()

    def raw() -> None:
        descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for start in range(0, len(content), _PART_BYTES):
            os.pwrite(descriptor, memoryview(content)[start : start + _PART_BYTES], start)
        os.fsync(descriptor)
        os.close(descriptor)

    def plain() -> None:
        states = source.rows(HIDDEN, 0, 0, SEQ_LENGTH)[None]
        last = source.rows(LAST_HIDDEN, 0, 0, SEQ_LENGTH)[None]
        ids = torch.zeros(1, SEQ_LENGTH, dtype=torch.int64)
        batch = dict(zip(CACHE_KEYS, (ids, ids, states, last), strict=True))
        write_plainly(copy, [batch] * len(sizes.lengths))
        _sync(copy)
        file_digest(copy)

    seconds = in_turn(
        {
            "ours": lambda: make_cache(cache, sizes, "ragged", **options),
            "raw": raw,
            "sha256": lambda: hashlib.sha256(content).hexdigest(),
            "plain": plain,
            "to fp8": lambda: make_cache(fp8, replace(sizes, dtype="fp8_e4m3"), "ragged", **options),
        },
        rounds,
        clear,
    )
    gigabytes = len(content) / 1e9
    rates = {way: rate(gigabytes, taken) for way, taken in seconds.items()}
    slower = min(("raw", "sha256"), key=lambda way: rates[way])
    yield Row(
        name="write, ragged: slower of raw write with fsync and sha256",
        ratio=ratio(seconds[slower], seconds["ours"]),
        target=0.8,
        detail=f"{rates['ours']:.2f}; raw {rates['raw']:.2f}, sha256 {rates['sha256']:.2f} GB/s",
    )
    yield Row(
        name="write, ragged: concatenated shard, save_file, digest",
        ratio=ratio(seconds["plain"], seconds["ours"]),
        target=1.3,
        detail=f"{rates['ours']:.2f} and {rates['plain']:.2f} GB/s",
    )
    yield Row(
        name="write, ragged to fp8: ragged bf16 (of the same bytes read)",
        ratio=ratio(seconds["ours"], seconds["to fp8"]),
        target=None,
        detail=f"{rates['to fp8']:.2f} GB/s of bf16",
    )
    clear()
    before = bytes_written()
    make_cache(cache, sizes, "ragged", **options)
    written = bytes_written() - before
    there = sum(path.stat().st_size for path in cache.iterdir())
    yield Row(
        name="write, ragged: size of the cache by bytes given to write calls",
        ratio=there / written,
        target=0.999,
        detail=f"{there / 1e6:.1f} and {written / 1e6:.1f} MB",
    )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
