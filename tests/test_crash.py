"""Stages as processes of their own, really killed or interrupted, and what they do with blocks that are not whole.

The same at every point at which a stage changes a file: `test_crash_sweep`.
"""

from __future__ import annotations

import os
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.files import FileLock
from tests.repository import Repository, kill, make_repository

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

PARAMS: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 64},
    "target": {"layer_ids": [1, 3], "block_bytes": 1},
    "verify": {"recompute_samples": 0},
}
NUM_ROWS = 24


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repository = make_repository(tmp_path_factory.mktemp("crash") / "repository", num_rows=NUM_ROWS, **PARAMS)
    repository.run()
    return repository


@pytest.fixture
def tokenized(undisturbed: Repository, tmp_path: Path) -> Repository:
    """The same repository as far as tokenize, with nothing captured."""
    shutil.copytree(undisturbed.root, tmp_path / "repository", ignore=shutil.ignore_patterns(".work", "cache"))
    repository = Repository(tmp_path / "repository")
    (repository.root / "features.json").unlink()
    return repository


def started_capture(repository: Repository, finished: int) -> subprocess.Popen[str]:
    """Start capture and wait until it has recorded some blocks."""
    process = repository.start("capture")
    while len(list(repository.root.glob(".work/capture-*/block-*.json"))) < finished:
        assert process.poll() is None, process.communicate()
        os.sched_yield()
    return process


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        pytest.param(signal.SIGKILL, -9, "", marks=pytest.mark.slow),
        pytest.param(
            signal.SIGTERM, 143, "terminated; finished work is kept, run again to go on\n", marks=pytest.mark.slow
        ),
        (signal.SIGINT, 130, "interrupted; finished work is kept, run again to go on\n"),
    ],
)
def test_an_interrupted_capture_goes_on_where_it_was(
    undisturbed: Repository, tokenized: Repository, how: signal.Signals, code: int, words: str
) -> None:
    returned, err = kill(started_capture(tokenized, finished=2), how)
    assert returned == code
    assert err.endswith(words)
    records = list(tokenized.root.glob(".work/capture-*/block-*.json"))
    names = {str(path.relative_to(tokenized.root).with_suffix(".safetensors")) for path in records}
    kept = {name: time for name, time in tokenized.blocks().items() if name in names}
    assert 2 <= len(kept) < NUM_ROWS
    assert not (tokenized.root / "features.json").exists()
    tokenized.run("capture", "shards", "verify")
    assert {name: time for name, time in tokenized.blocks().items() if name in kept} == kept
    assert tokenized.digests() == undisturbed.digests()
    assert not list(tokenized.root.glob(".work/**/.tmp-*"))


def test_a_truncated_block_is_computed_again_and_named(
    undisturbed: Repository, tokenized: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    tokenized.run("capture")
    block = sorted(tokenized.root.glob(".work/capture-*/block-*.safetensors"))[3]
    block.write_bytes(block.read_bytes()[:-1])
    tokenized.run("capture", "shards", "verify")
    assert f"not accepted, computed again: {block.name}" in caplog.text.replace(f"{block.parent}/", "").replace(
        str(block.parent.relative_to(tokenized.root)) + "/", ""
    )
    assert tokenized.digests() == undisturbed.digests()


@pytest.mark.parametrize(("check", "found"), [("digest", True), ("headers", False)])
def test_a_flipped_bit_in_a_block_is_found_if_asked(tokenized: Repository, check: str, found: bool) -> None:
    tokenized.run("capture")
    before = tokenized.blocks()
    block = sorted(tokenized.root.glob(".work/capture-*/block-*.safetensors"))[0]
    content = bytearray(block.read_bytes())
    content[-100] ^= 1
    block.write_bytes(content)
    flipped = tokenized.blocks()
    tokenized.set_params(runtime={"check_blocks": check})
    tokenized.run("capture")
    assert (tokenized.blocks() != flipped) is found
    assert before.keys() == flipped.keys()


def test_a_second_publisher_is_refused(undisturbed: Repository) -> None:
    lock = undisturbed.root / ".cache.building.lock"
    with FileLock(lock):
        second = undisturbed.stage("shards")
    assert second.returncode == 1
    assert f"being written by process {os.getpid()} on host" in second.stderr.splitlines()[-1]
