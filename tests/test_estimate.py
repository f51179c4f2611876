"""Estimated bytes against the bytes of really published caches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.estimate import estimate_run, read_samples, samples_of_tokens
from dspark_cache.stage import open_stage
from dspark_cache.tokens import Tokens
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from pathlib import Path

CACHES: list[dict[str, Any]] = [
    {"layout": "padded", "dtype": "bf16", "shard_size": 4},
    {"layout": "padded", "dtype": "fp32", "shard_size": 64},
    {"layout": "padded", "dtype": "bf16", "shard_size": "auto", "shard_bytes": 1_000_000},
    {"layout": "ragged", "dtype": "fp16", "shard_bytes": 400_000},
    {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": 400_000},
    {"layout": "ragged", "dtype": "fp32", "shard_bytes": 400_000},
    {"layout": "ragged", "dtype": "fp32", "shard_bytes": 300_000},
]
ROWS = 32


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    params = {"target": {"layer_ids": [1, 3], "block_bytes": 400_000}}
    repository = make_repository(tmp_path_factory.mktemp("estimate") / "repository", num_rows=ROWS, **params)
    repository.run("tokenize", "capture")
    return repository


def sizes(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


@pytest.mark.parametrize("cache", CACHES)
def test_the_bytes_of_a_run_are_known_before_it_within_one_percent(captured: Repository, cache: dict[str, Any]) -> None:
    captured.set_params(cache=cache)
    captured.run("shards")
    folder = captured.root / "cache"
    with contextlib.chdir(captured.root):
        stage = open_stage("shards")
        found = estimate_run(
            stage, samples_of_tokens(Tokens(captured.root / "tokens")), tokens_per_second=None, link_doubling=None
        )
    metadata = sizes(folder, "*.json")
    assert found["cache_bytes"] == pytest.approx(sizes(folder) - metadata, rel=0.001)
    assert found["cache_bytes"] == pytest.approx(sizes(folder), rel=0.01)
    assert found["shards"] == len(list(folder.glob("shard-*")))
    blocks = sum(sizes(folder, "*.safetensors") for folder in captured.scratch_folders())
    assert found["scratch_bytes"] == pytest.approx(blocks, rel=0.01)
    held = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    are_linked = {path.stat().st_nlink == 2 for path in folder.glob("shard-*")} == {True}
    assert found["shards_are_links_to_blocks"] is are_linked
    slack = 4096 * (2 * found["samples"] + 2 * found["shards"] + 8)
    assert abs(held - found["cache_held_bytes"]) < slack


def test_raw_conversations_give_what_their_tokens_give(captured: Repository) -> None:
    with contextlib.chdir(captured.root):
        stage = open_stage("tokenize")
        known, origin = read_samples(stage, max_rows=None)
        raw, raw_origin = read_samples(stage, max_rows=1000)
        part, _ = read_samples(stage, max_rows=ROWS // 2)
    assert (origin, raw_origin) == ("tokens/", f"{ROWS} of {ROWS} conversations")
    assert (list(known.lengths), list(known.keys)) == (list(raw.lengths), list(raw.keys))
    assert list(part.lengths) == list(known.lengths[::2]) * 2
    assert len(part.distinct()) == ROWS


def test_tokens_of_other_params_are_not_taken(captured: Repository) -> None:
    captured.set_params(data={"seq_length": 32})
    with contextlib.chdir(captured.root):
        samples, origin = read_samples(open_stage("tokenize"), max_rows=None)
    captured.set_params(data={"seq_length": 256})
    assert origin == f"{ROWS} of {ROWS} conversations"
    assert max(samples.lengths) == 32
