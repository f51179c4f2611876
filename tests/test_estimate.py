"""Estimated bytes against the bytes of really published caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.estimate import RunShape, estimate_run
from dspark_cache.ledger import read_ledger
from dspark_cache.settings import check_settings
from dspark_cache.tokens import Tokens
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from pathlib import Path

CACHES: list[dict[str, Any]] = [
    {"layout": "padded", "dtype": "bf16", "shard_size": 4},
    {"layout": "padded", "dtype": "fp32", "shard_size": 64},
    {"layout": "ragged", "dtype": "fp16", "shard_bytes": 40_000},
]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    params = {"data": {"seq_length": 64}, "target": {"layer_ids": [1, 3], "block_bytes": 100_000}}
    repository = make_repository(tmp_path_factory.mktemp("estimate") / "repository", num_rows=10, **params)
    repository.run("tokenize", "capture")
    return repository


def sizes(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.glob(pattern))


@pytest.mark.parametrize("cache", CACHES)
def test_the_bytes_of_a_run_are_known_before_it(captured: Repository, cache: dict[str, Any]) -> None:
    captured.set_params(cache=cache)
    captured.run("shards")
    tokens, ledger = Tokens(captured.root / "tokens"), read_ledger(captured.root / "features.json")
    lengths = tokens.offsets.diff().tolist()
    assert len(set(tokens.keys())) == len(lengths)
    shape = RunShape(
        lengths=lengths,
        seq_length=tokens.seq_length,
        vocab_size=ledger.vocab_size,
        hidden_size=ledger.hidden_size,
        num_layers=len(ledger.layer_ids),
        compute_dtype=ledger.compute_dtype,
    )
    found = estimate_run(shape, check_settings({"cache": cache}).cache)
    folder = captured.root / "cache"
    shards = sizes(folder, "shard-*") + sizes(folder, "samples-*")
    assert found.cache_bytes == pytest.approx(shards + sizes(folder, "target_weights.safetensors"), rel=0.01)
    blocks = sum(sizes(folder, "block-*.safetensors") for folder in captured.scratch_folders())
    kept = sum(sizes(folder, "weights.safetensors") for folder in captured.scratch_folders())
    assert found.scratch_bytes == pytest.approx(blocks + kept, rel=0.01)
    empty = len(lengths) * tokens.seq_length - sum(lengths)
    row = ledger.hidden_size * (len(ledger.layer_ids) + 1) * {"fp32": 4}.get(cache["dtype"], 2)
    assert found.cache_bytes - found.held_bytes == (empty * (row + 8) if cache["layout"] == "padded" else 0)
