"""Opening a cache of very many shards: time, memory and open files of a fresh process."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from benchmarks.made_caches import VOCAB, Sizes, made_plan
from benchmarks.ratios import Row
from dspark_cache.manifest import write_manifest
from dspark_cache.ragged import samples_name
from dspark_cache.schema import CACHE_KEYS, HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS
from dspark_cache.shard_file import write_tensors
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_SHARDS = 10_000
SAMPLES = 10
LENGTH, HIDDEN_SIZE, LAYERS = 16, 8, 2
MOST_SECONDS, MOST_BYTES = 1.5, 200
OPEN = """
import gc, json, os, sys, time
import torch
def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024
begin, before, files = time.perf_counter(), anonymous(), len(os.listdir("/proc/self/fd"))
from dspark_cache import CachedDSparkDataset
dataset = CachedDSparkDataset(sys.argv[1])
seconds = time.perf_counter() - begin
gc.collect()
size = (anonymous() - before) / len(dataset)
for index in range(0, len(dataset), 97):
    dataset[index]
print(json.dumps([seconds, size, len(os.listdir("/proc/self/fd")) - files]))
"""


def rows(work: Path, rounds: int) -> Iterator[Row]:
    """Measure both layouts and give the rows."""
    for layout in ("padded", "ragged"):
        folder = work / f"{layout}, many shards"
        _make(folder, layout)
        found = []
        for _ in range(rounds + 1):
            done = subprocess.run([sys.executable, "-c", OPEN, folder], capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout))
        seconds, size, files = (statistics.median(column) for column in zip(*found[1:], strict=True))
        name = f"open {NUM_SHARDS:,} {layout} shards"
        yield Row(
            name=f"{name}: {MOST_SECONDS} s beyond import torch",
            ratio=MOST_SECONDS / seconds,
            target=1.0,
            detail=f"{seconds:.2f} s",
        )
        yield Row(
            name=f"{name}: {MOST_BYTES} bytes a sample",
            ratio=MOST_BYTES / max(size, 1),
            target=1.0,
            detail=f"{size:.0f} bytes; {files:.0f} files open after {NUM_SHARDS * SAMPLES // 97} samples all over it",
        )


def _make(folder: Path, layout: str) -> None:
    """Write a cache without flushing each of its files to the disk."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, LENGTH + 1, (NUM_SHARDS, SAMPLES), generator=generator)
    sizes = Sizes(lengths=lengths.flatten().tolist(), seq_length=LENGTH, hidden_size=HIDDEN_SIZE, layers=LAYERS)
    manifest = made_plan(sizes, layout, shard_size=SAMPLES, shard_bytes=1).manifest
    if layout == "ragged":
        manifest = {**manifest, "shard_samples": [SAMPLES] * NUM_SHARDS}
    for number, of_shard in enumerate(lengths):
        if layout == "padded":
            _put(folder / shard_name(number), _padded())
        else:
            tokens = int(of_shard.sum())
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of_shard.cumsum(0)])
            states = {HIDDEN: torch.ones(tokens, HIDDEN_SIZE * LAYERS), LAST_HIDDEN: torch.ones(tokens, HIDDEN_SIZE)}
            in_bf16 = {key: state.to(torch.bfloat16) for key, state in states.items()}
            ids = torch.randint(0, VOCAB, (tokens,), generator=generator, dtype=torch.int32)
            mask = torch.ones(tokens, dtype=torch.uint8)
            _put(folder / shard_name(number), {**in_bf16, SAMPLE_OFFSETS: offsets})
            _put(folder / samples_name(number), {INPUT_IDS: ids, LOSS_MASK: mask, SAMPLE_OFFSETS: offsets})
    write_manifest(folder, {**manifest, "complete": True})


def _padded() -> dict[str, torch.Tensor]:
    ids = torch.ones(SAMPLES, LENGTH, dtype=torch.int64)
    states = torch.ones(SAMPLES, LENGTH, HIDDEN_SIZE * LAYERS, dtype=torch.bfloat16)
    return dict(zip(CACHE_KEYS, (ids, ids, states, states[..., :HIDDEN_SIZE].contiguous()), strict=True))


def _put(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    path.touch()
    write_tensors(path, tensors)
