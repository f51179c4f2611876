"""The sweeps are worth something: without any single line that syncs, renames or locks, they fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

LINES = re.compile(
    r"^ +(_sync\(|os\.fsync\(|make_folder\(|fcntl\.flock\(|_lock\(|with FileLock\(|with store\.lock\(\)"
    r"|\w+\.(rename|replace)\((path|_aside\(path\))\)|_settle\(|remove_temporaries\()"
)
MODULES = ("files", "capture_run", "publish")
ELSEWHERE = {
    "break_lock": "tests/test_files.py",  # `dspark-cache clean` alone breaks locks
    "ensure_unlocked": "tests/test_blocks.py",  # of slices and ranks
    "temporary_folder": "tests/test_files.py",
}
"""Function whose lines no sweep reaches, to the tests that hold them."""


WITHOUT_LOCK = {
    "with FileLock(": "if not make_folder(path.parent):",
    "with store.lock()": "if not store.folder.mkdir(parents=True, exist_ok=True):",
}
"""What a lock does besides locking: it makes its folder."""


def mutants() -> list[tuple[str, int, str]]:
    """Return module, number and function of each line to do without."""
    found = []
    for module in MODULES:
        function = ""
        for number, line in enumerate((ROOT / f"dspark_cache/{module}.py").read_text().splitlines()):
            if match := re.match(r" *def (\w+)", line):
                function = match[1]
            if LINES.match(line):
                found.append((module, number, function))
    return found


@pytest.mark.parametrize(("module", "number", "function"), mutants())
def test_without_this_line_a_sweep_fails(tmp_path: Path, module: str, number: int, function: str) -> None:
    for name in ("dspark_cache", "stages", "tests", "inputs", ".dvc"):
        ignore = shutil.ignore_patterns("__pycache__", "tmp", "cache")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("dvc.yaml", "params.yaml", ".dvcignore", ".gitignore", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    path = tmp_path / f"dspark_cache/{module}.py"
    lines = path.read_text().splitlines()
    indent = re.match(r" *", lines[number])[0]  # type: ignore[index]  # always matches
    lines[number] = indent + next((new for old, new in WITHOUT_LOCK.items() if old in lines[number]), "pass")
    path.write_text("\n".join(lines) + "\n")
    tests = ELSEWHERE.get(function, "tests/test_crash_sweep.py")
    options = ["-o", "addopts=", "-m", "not slow", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout[-2000:]
    assert "1 failed" in done.stdout or "1 error" in done.stdout
