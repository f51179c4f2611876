"""All ratios in one command: a table, and JSON that `benchmarks.compare` reads.

    python -m benchmarks --work EMPTY_DIR [--target DIR --data FILE] [--json FILE] [--only reading,capture] [--curves]

Ratios are against the plain way to do the same (`benchmarks.plain`) and against the machine's limits, measured in turn
in one run; the median of `--rounds` rounds counts. `--target` and `--data` are a real target and its conversations,
beside the tiny ones that are shipped. `--curves` also runs every stage with 2,000, 8,000 and 32,000 samples.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import capturing, curves, opening, reading, starting, tokenising, verifying, writing
from benchmarks.ratios import Row, table
from benchmarks.workspace import ROOT, print_table
from dspark_cache.settings import TargetSettings
from dspark_cache.shard_file import physical_memory
from dspark_cache.target import load_target

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECTIONS = ("capture", "writing", "tokenise", "reading", "opening", "verify", "starting")
SHIPPED = ROOT / "inputs/target", ROOT / "inputs/data/conversations.jsonl"


def main() -> int:
    """Measure and print; return 1 if a target is not met."""
    parsed = _arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    real = (parsed.target, parsed.data) if parsed.target and parsed.data else None
    inputs = real or SHIPPED
    size = int(parsed.gb * 1e9)
    sections: dict[str, Callable[[Path], Iterator[Row]]] = {
        "capture": lambda work: _capture_rows(work, real, parsed.rounds),
        "writing": lambda work: writing.rows(work, size, parsed.rounds),
        "tokenise": lambda work: tokenising.rows(work, inputs[0], inputs[1], parsed.rounds),
        "reading": lambda work: reading.rows(work, size, parsed.rounds),
        "opening": lambda work: opening.rows(work, parsed.rounds),
        "verify": lambda work: verifying.rows(work, 2 * size, parsed.rounds),
        "starting": lambda _: starting.rows(parsed.rounds),
    }
    chosen = parsed.only.split(",") if parsed.only else list(SECTIONS)
    if parsed.curves:
        sections["curves"] = curves.rows
        chosen.append("curves")
    found = []
    for name in chosen:
        work = parsed.work / name
        work.mkdir(parents=True)
        for row in sections[name](work):
            found.append(row)
            print(f"{row.ratio:8.2f}  {row.name}: {row.detail}", file=sys.stderr, flush=True)
        shutil.rmtree(work)
    print_table(table(found))
    if parsed.json:
        parsed.json.write_text(json.dumps({"machine": machine(), "rows": [row.as_json() for row in found]}, indent=2))
    return int(not all(row.is_met for row in found))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", help=f"sections, with commas: {','.join(SECTIONS)}")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--gb", type=float, default=0.5, help="size of a cache that is written and read")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _capture_rows(work: Path, real: tuple[Path, Path] | None, rounds: int) -> Iterator[Row]:
    """Measure the shipped target, and the real one if there is any."""
    settings = TargetSettings()
    for name, inputs, count in (("tiny", SHIPPED, 64), ("real", real, 16)):
        if inputs:
            target = load_target(inputs[0], settings, "fp32", torch.device("cpu"))
            samples = capturing.real_samples(inputs[1], inputs[0], count, 128)
            yield from capturing.rows(work, target, f"{name} target", samples, rounds)


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "processor": cpu.partition(":")[2].strip(),
        "processors": os.cpu_count(),
        "memory_bytes": physical_memory(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
