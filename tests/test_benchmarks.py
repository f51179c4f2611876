"""The benchmarks run, and two runs of them are compared; how fast anything is, no test says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks import capturing, curves, opening, reading, tokenising, verifying, writing
from benchmarks.__main__ import machine
from benchmarks.compare import compare, main
from benchmarks.made_caches import Sizes, make_cache
from benchmarks.ratios import Row, in_turn, rate, ratio, table
from benchmarks.workspace import ROOT
from dspark_cache.cache_files import CacheFolder
from dspark_cache.settings import TargetSettings
from dspark_cache.target import load_target
from dspark_cache.verify import verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MEGABYTE = 1_000_000
CONVERSATIONS = ROOT / "inputs/data/conversations.jsonl"
TARGET = ROOT / "inputs/target"


def run(**ratios: float) -> dict[str, Any]:
    return {"rows": [{"name": name, "ratio": value} for name, value in ratios.items()]}


@pytest.mark.parametrize(
    ("old", "new", "fallen"),
    [
        ({}, {}, []),
        ({"a": 1.0}, {"a": 0.9}, []),
        ({"a": 1.0}, {"a": 0.899}, ["a"]),
        ({"a": 2.0, "b": 1.0}, {"a": 1.79, "b": 5.0}, ["a"]),
        ({"a": 1.0}, {}, ["a"]),
        ({}, {"a": 0.1}, []),
    ],
)
def test_a_ratio_may_lose_a_tenth(
    tmp_path: Path, old: dict[str, float], new: dict[str, float], fallen: list[str]
) -> None:
    found, names = compare(run(**old), run(**new))
    assert names == fallen
    assert [line[0] for line in found[1:]] == sorted({*old, *new})
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, ratios in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps(run(**ratios)))
    assert main([str(path) for path in paths]) == bool(fallen)


def test_the_guard_names_what_fell_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps(run(slow=2.0)))
    (tmp_path / "new.json").write_text(json.dumps(run(slow=1.0)))
    command = [sys.executable, "-m", "benchmarks.compare", tmp_path / "old.json", tmp_path / "new.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "| slow | 2.00 | 1.00 | 0.50 |" in done.stdout
    assert done.stderr == "fell by more than 10%, or is gone: slow\n"


def test_ways_are_timed_in_turn_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    seconds = in_turn({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2, lambda: calls.append("-"))
    assert calls == ["-", "a", "-", "b"] * 3
    assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2}


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    assert ratio([2.0, 9.0, 3.0], [1.0, 1.0, 1.0]) == 3.0
    assert rate(10.0, [5.0, 2.0, 1.0]) == 5.0


def test_a_row_says_whether_its_target_is_met() -> None:
    rows = [Row(name=str(goal), ratio=1.0, target=goal, detail="d") for goal in (None, 1.0, 1.01)]
    assert [line[1:4] for line in table(rows)[1:]] == [["1.00", "", ""], ["1.00", "1", "yes"], ["1.00", "1.01", "no"]]


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_a_made_cache_is_sound(tmp_path: Path, layout: str) -> None:
    sizes = Sizes(lengths=[5, 1, 8, 3], seq_length=8, hidden_size=4, layers=2)
    make_cache(tmp_path / "cache", sizes, layout, shard_bytes=300)
    assert verify_cache(CacheFolder(tmp_path / "cache"), "values").findings == []


def tiny_capture(work: Path) -> Iterator[Row]:
    target = load_target(TARGET, TargetSettings(), "fp32", torch.device("cpu"))
    return capturing.rows(work, target, "tiny", capturing.real_samples(CONVERSATIONS, TARGET, 6, 32), 1)


SECTIONS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "capture": tiny_capture,
    "writing": lambda work: writing.rows(work, 20 * MEGABYTE, 1),
    "tokenise": lambda work: tokenising.rows(work, TARGET, CONVERSATIONS, 1),
    "reading": lambda work: reading.rows(work, 8 * MEGABYTE, 1, megabytes=(1,)),
    "opening": lambda work: opening.rows(work, 1),
    "verify": lambda work: verifying.rows(work, 20 * MEGABYTE, 1),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_gives_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    monkeypatch.setattr(tokenising, "ROWS", 60)
    monkeypatch.setattr(tokenising, "FEW_ROWS", 20)
    monkeypatch.setattr(opening, "NUM_SHARDS", 20)
    monkeypatch.setattr(reading, "WORKERS_SAMPLE", MEGABYTE // 4)
    rows = list(SECTIONS[section](tmp_path))
    assert len({row.name for row in rows}) == len(rows) >= 2
    assert all(row.ratio > 0 or "hidden" in row.name for row in rows)
    assert json.loads(json.dumps([row.as_json() for row in rows]))[0]["name"] == rows[0].name


@pytest.mark.slow
def test_curves_give_two_rows_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SIZES", (1, 20, 80, 320))
    rows = list(curves.rows(tmp_path))
    assert [row.name.partition(":")[0] for row in rows] == [stage for stage in curves.STAGES for _ in range(2)]


def test_the_machine_is_described() -> None:
    assert {"processor", "processors", "memory_bytes", "kernel", "python", "torch"} <= machine().keys()
