"""Time and memory of every stage against the number of samples: how they grow from n to 4 n and 16 n.

Each stage runs in a process of its own, as DVC runs it. What it takes for a single sample, imports and loading, is
measured too and taken off. Of time the exponent of growth is printed, 1 being linear; memory is to stay what it is.
"""

from __future__ import annotations

import json
import math
import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from benchmarks.ratios import Row
from benchmarks.workspace import ROOT, Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STAGES = ("tokenize", "capture", "shards", "verify")
SIZES = (1, 2000, 8000, 32000)
TURNS, WORDS = 2, 25
SEQ_LENGTH = 256
_SYLLABLES = [f"{start}{end}" for start in ("ka", "lo", "mi", "ru", "te") for end in ("n", "s", "ra", "li", "m")]


def rows(work: Path) -> Iterator[Row]:
    """Run all stages with every number of samples and give two rows a stage."""
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    memory: dict[str, list[int]] = {stage: [] for stage in STAGES}
    for count in SIZES:
        data = work / f"{count}.jsonl"
        write_conversations(data, count)
        workspace = Workspace.make(
            work / f"{count} samples",
            data,
            ROOT / "inputs/target",
            data={"seq_length": SEQ_LENGTH},
            target={"block_bytes": 1 << 24},
            cache={"layout": "ragged", "shard_bytes": 1 << 24},
            verify={"recompute_samples": 0},
        )
        for stage in STAGES:
            start = time.perf_counter()
            memory[stage].append(workspace.run(stage))
            seconds[stage].append(time.perf_counter() - start)
    for stage in STAGES:
        start, *rest = seconds[stage]
        grown = [taken - start for taken in rest]
        steps = [math.log(more / less) / math.log(4) for less, more in pairwise(grown)]
        listed = ", ".join(f"{taken:.1f}" for taken in grown)
        yield Row(
            name=f"{stage}: linear growth by exponent of time, {SIZES[1]:,} to {SIZES[-1]:,} samples",
            ratio=1 / max(steps[-1], 1e-9),
            target=0.9,
            detail=f"exponents {steps[0]:.2f}, {steps[1]:.2f}; {listed} s beyond {start:.1f} s to start",
        )
        megabytes = [size / 1e6 for size in memory[stage]]
        yield Row(
            name=f"{stage}: memory for {SIZES[1]:,} samples by that for {SIZES[-1]:,}",
            ratio=megabytes[1] / megabytes[-1],
            target=0.75,
            detail=", ".join(f"{size:.0f}" for size in megabytes) + f" MB for {', '.join(map(str, SIZES))} samples",
        )


def write_conversations(path: Path, count: int) -> None:
    """Write distinct conversations of random words."""
    generator = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            texts = [" ".join(generator.choices(_SYLLABLES, k=generator.randint(1, 2 * WORDS))) for _ in range(TURNS)]
            messages = [{"role": "user", "content": f"{number} {texts[0]}"}, {"role": "assistant", "content": texts[1]}]
            file.write(json.dumps({"messages": messages}) + "\n")
