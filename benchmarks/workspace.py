"""What the benchmarks share: a folder in which stages run, and runs in fresh processes that count bytes."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.002
"""Seconds between two looks at a process's memory."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder with params.yaml, stages/ and inputs/, as a repository has them."""

    root: Path

    @classmethod
    def make(cls, root: Path, data_file: Path, target_folder: Path, **sections: dict[str, Any]) -> Workspace:
        """Copy the inputs and set params."""
        (root / "inputs").mkdir(parents=True)
        shutil.copytree(ROOT / "stages", root / "stages", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(target_folder, root / "inputs/target")
        (root / "inputs/data").mkdir()
        shutil.copy(data_file, root / "inputs/data")
        shutil.copy(ROOT / "params.yaml", root)
        workspace = cls(root)
        workspace.set_params(**sections)
        workspace.set_params(data={"path": f"inputs/data/{data_file.name}"})
        return workspace

    def set_params(self, **sections: dict[str, Any]) -> None:
        """Change the given keys of params.yaml."""
        yaml, path = YAML(), self.root / "params.yaml"
        params = yaml.load(path)
        for section, values in sections.items():
            params[section].update(values)
        yaml.dump(params, path)

    def run(self, stage: str) -> int:
        """Run a stage in a process of its own, as dvc does; return the largest RssAnon seen, in bytes."""
        process = subprocess.Popen([sys.executable, "-m", f"stages.{stage}"], cwd=self.root)
        largest = 0
        while process.poll() is None:
            largest = max(largest, anonymous_bytes(process.pid))
            time.sleep(POLL_SECONDS)
        if process.returncode:
            raise SystemExit(f"stage {stage} ended with {process.returncode}")
        return largest


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process and of its children; 0 once it has ended."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(anonymous_bytes(int(child)) for child in children)


@dataclass(frozen=True, slots=True)
class Measured:
    """What an action took in a process of its own, after imports.

    Attributes:
        seconds: Wall time.
        written: Bytes given to write calls.
        result: What it returned.
    """

    seconds: float
    written: int
    result: Any


def measure(action: Callable[..., Any], *arguments: Any) -> Measured:
    """Run an importable function in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measured, (action, arguments))


def _measured(action: Callable[..., Any], arguments: tuple[Any, ...]) -> Measured:
    os.sync()
    before, start = bytes_written(), time.perf_counter()
    result = action(*arguments)
    return Measured(seconds=time.perf_counter() - start, written=bytes_written() - before, result=result)


def bytes_written() -> int:
    """Return the bytes that this process has given to write calls."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def held_bytes(folder: Path) -> int:
    """Return the bytes of disk blocks of the files of a folder that have no other name."""
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir() if path.stat().st_nlink == 1)


def logical_bytes(folder: Path) -> int:
    """Return the sizes of a folder's files."""
    return sum(path.stat().st_size for path in folder.iterdir())


def print_table(table: list[list[str]]) -> None:
    """Print rows, the first of them the heads, as a Markdown table."""
    print("\n".join("| " + " | ".join(row) + " |" for row in [table[0], ["---"] * len(table[0]), *table[1:]]))
