"""Verifying a cache with all checks of bytes and values on, against raw reads and digests of the same files."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.made_caches import TOKEN_BYTES, Sizes, evict, make_cache
from benchmarks.ratios import Row, fastest, in_turn, rate, ratio
from dspark_cache.cache_files import CacheFolder
from dspark_cache.verify import verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SEQ_LENGTH = 1024
SHARDS = 8
THREADS = 2
_PART_BYTES = 1 << 21


def rows(work: Path, total_bytes: int, rounds: int) -> Iterator[Row]:
    """Measure and give the rows.

    Args:
        work: Folder on the disk to read from.
        total_bytes: Size of the cache.
        rounds: How often.
    """
    count = total_bytes // TOKEN_BYTES // SEQ_LENGTH * 2
    lengths = [SEQ_LENGTH // 2 + number * 7919 % (SEQ_LENGTH // 2) - SEQ_LENGTH // 4 for number in range(count)]
    cache = work / "verified"
    make_cache(cache, Sizes(lengths=lengths, seq_length=SEQ_LENGTH), "ragged", shard_bytes=total_bytes // SHARDS)
    files = sorted(cache.iterdir())
    size = sum(path.stat().st_size for path in files)

    def ours() -> None:
        report = verify_cache(CacheFolder(cache), "values", num_threads=THREADS)
        if report.findings:
            raise SystemExit(f"the cache has findings: {report.findings[0]}")

    for words, prepare in (("cold", lambda: evict(cache)), ("hot", lambda: None)):
        ways: dict[str, Callable[[], object]] = {"ours": ours, "read and sha256": lambda: _read(files, THREADS, True)}
        for threads in (1, 2, 4):
            ways[f"raw {threads}"] = lambda threads=threads: _read(files, threads, False)  # type: ignore[misc]
        seconds = in_turn(ways, rounds, prepare)
        best = fastest(seconds, "raw")
        rates = {way: rate(size / 1e9, taken) for way, taken in seconds.items()}
        yield Row(
            name=f"verify values, {words}, {THREADS} threads: best raw read",
            ratio=ratio(seconds[best], seconds["ours"]),
            target=0.8 if words == "cold" else None,
            detail=f"{rates['ours']:.2f} and {rates[best]:.2f} GB/s ({best[4:]} threads)",
        )
        yield Row(
            name=f"verify values, {words}, {THREADS} threads: reading and sha256 alone, as many threads",
            ratio=ratio(seconds["read and sha256"], seconds["ours"]),
            target=None,
            detail=f"{rates['ours']:.2f} and {rates['read and sha256']:.2f} GB/s",
        )


def _read(files: Sequence[Path], threads: int, with_digest: bool) -> None:
    def read(path: Path) -> None:
        buffer, digest = memoryview(bytearray(_PART_BYTES)), hashlib.sha256()
        descriptor = os.open(path, os.O_RDONLY)
        while count := os.readv(descriptor, [buffer]):
            if with_digest:
                digest.update(buffer[:count])
        os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, files))
