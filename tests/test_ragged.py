"""The ragged layout: the same samples as the padded one in fewer bytes, refused by readers of version 1."""

from __future__ import annotations

import json
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import CachedDSparkDataset, read_manifest, read_target_weight_modules
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, VerificationError
from dspark_cache.offline_cache import read_manifest as read_version
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from pathlib import Path

PARAMS: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 64},
    "target": {"layer_ids": [1, 3]},
    "verify": {"recompute_samples": 2},
}
ROW_BYTES = 64 * 3 * 2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository whose padded cache stands aside as `padded/`, and whose `cache/` is ragged."""
    repository = make_repository(tmp_path_factory.mktemp("ragged") / "repository", num_rows=12, **PARAMS)
    repository.run("tokenize", "capture", "shards")
    (repository.root / "cache").rename(repository.root / "padded")
    repository.set_params(cache={"layout": "ragged", "shard_bytes": 150 * ROW_BYTES})
    repository.run("shards", "verify")
    return repository


@pytest.fixture
def repository(made: Repository, tmp_path: Path) -> Repository:
    shutil.copytree(made.root, tmp_path / "repository")
    return Repository(tmp_path / "repository")


def test_it_gives_the_samples_of_the_padded_cache(made: Repository) -> None:
    padded = CachedDSparkDataset(made.root / "padded")
    ragged = CachedDSparkDataset(made.root / "cache", expect=made.root / "params.yaml")
    assert len(ragged) == len(padded) == 12
    for index in (*range(12), -1, -12):
        sample, expected = ragged[index], padded[index]
        assert sample.keys() == expected.keys()
        for key, value in expected.items():
            assert sample[key].dtype == value.dtype
            assert torch.equal(sample[key], value)
            assert sample[key].untyped_storage().nbytes() == sample[key].numel() * sample[key].element_size()


def test_its_files_hold_real_tokens_only(made: Repository) -> None:
    manifest = read_manifest(made.root / "cache")
    assert (manifest["format_version"], manifest["layout"]) == (2, "ragged")
    assert sum(manifest["shard_samples"]) == 12
    assert len(manifest["shard_samples"]) > 2
    assert "shard_size" not in manifest
    lengths = load_file(made.root / "tokens/tokens.safetensors")[SAMPLE_OFFSETS].diff().tolist()
    start = 0
    for number, count in enumerate(manifest["shard_samples"]):
        states = load_file(made.root / f"cache/shard-{number:06d}.safetensors")
        samples = load_file(made.root / f"cache/samples-{number:06d}.safetensors")
        assert list(states) == [HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS]
        assert (samples[INPUT_IDS].dtype, samples[LOSS_MASK].dtype) == (torch.int32, torch.uint8)
        assert states[SAMPLE_OFFSETS].diff().tolist() == lengths[start : start + count]
        assert torch.equal(states[SAMPLE_OFFSETS], samples[SAMPLE_OFFSETS])
        tokens = sum(lengths[start : start + count])
        assert states[HIDDEN].shape == (tokens, 128)
        assert tokens <= 150
        start += count
    ragged, padded = (
        sum(file.stat().st_size for file in (made.root / name).glob("s*-*.safetensors")) for name in ("cache", "padded")
    )
    assert ragged < padded


@pytest.mark.parametrize(("max_open_files", "shards"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_both_files_of_a_shard_count_as_open(made: Repository, max_open_files: int, shards: int) -> None:
    dataset = CachedDSparkDataset(made.root / "cache", max_open_files=max_open_files)
    for index in range(len(dataset)):
        assert len(dataset[index]) == 4
        assert len(dataset._open_handles) <= shards
    assert len(dataset._open_handles) == shards


def test_shards_are_cut_greedily_by_bytes_and_a_huge_sample_is_alone(repository: Repository) -> None:
    lengths = load_file(repository.root / "tokens/tokens.safetensors")[SAMPLE_OFFSETS].diff().tolist()
    for limit in (1, 64, 100, 10**6):
        repository.set_params(cache={"shard_bytes": limit * ROW_BYTES})
        repository.run("shards")
        cut: list[list[int]] = []
        for length in lengths:
            if not cut or sum(cut[-1]) + length > limit:
                cut.append([])
            cut[-1].append(length)
        assert read_manifest(repository.root / "cache")["shard_samples"] == [len(part) for part in cut]
        repository.run("verify")


def test_a_changed_mask_leaves_the_large_files_as_they_are(repository: Repository) -> None:
    before = repository.digests("cache")
    repository.set_params(data={"mask_generation_prompt": True})
    template = repository.root / "inputs/target/chat_template.jinja"
    template.write_text(template.read_text().replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    repository.run()
    changed = {name for name, digest in repository.digests("cache").items() if before[name] != digest}
    assert changed
    assert all("samples-" in name or name.endswith(".json") for name in changed)


def test_readers_of_version_1_refuse_it_by_version(made: Repository) -> None:
    with pytest.raises(CacheFormatError, match=r"format_version is 2, this reader of DSpark caches knows 1$"):
        read_version(str(made.root / "cache"), "DSpark", 1)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_stored_once(tmp_path: Path, tied: bool) -> None:
    repository = make_repository(tmp_path / "repository", num_rows=2, **PARAMS, cache={"layout": "ragged"})
    if tied:
        config = repository.root / "inputs/target/config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
        path = repository.root / "inputs/target/model.safetensors"
        weights = load_file(path)
        del weights["lm_head.weight"]
        save_file(weights, path, metadata={"format": "pt"})
    repository.run()
    stored = load_file(repository.root / "cache/target_weights.safetensors")
    assert list(stored) == ["embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
    embed, head = read_target_weight_modules(repository.root / "cache")
    assert torch.equal(embed.weight, stored["embed_tokens.weight"])
    assert torch.equal(embed.weight, head.weight) is tied


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layout": "padded"}, "layout: expected 'ragged', found 'padded'"),
        ({"shard_samples": [12, 0]}, "shard_samples: expected a list of integers from 1 to 16777216"),
        ({"shard_samples": [1]}, "shard_samples add up to 1, num_samples is 12"),
        ({"pad_token_id": -1}, "pad_token_id: expected an integer from 0"),
        ({"shard_samples": [12]}, "must have shard indices 0..0"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(repository: Repository, values: dict[str, Any], message: str) -> None:
    change_json(repository.root / "cache/manifest.json", **values)
    with pytest.raises(CacheFormatError, match=message):
        CachedDSparkDataset(repository.root / "cache")


@pytest.mark.parametrize(("kind", "damage"), [*product(("shard", "samples"), ("missing", "short", "long", "offsets"))])
def test_damaged_files_are_refused_at_open_and_by_verify(repository: Repository, kind: str, damage: str) -> None:
    path = repository.root / f"cache/{kind}-000001.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "offsets":
        tensors = load_file(path)
        tensors[SAMPLE_OFFSETS][1] += 1
        save_file(tensors, path)
    else:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if damage == "short" else content + b"\0")
    with pytest.raises((CacheFormatError, CacheNotFoundError), match=r"000001|shard indices \[1\]|sample_offsets"):
        CachedDSparkDataset(repository.root / "cache")
    with pytest.raises((VerificationError, CacheFormatError), match=r"000001"):
        repository.run("verify")


def test_verify_finds_surplus_and_foreign_samples(repository: Repository) -> None:
    cache = repository.root / "cache"
    shutil.copy(cache / "samples-000000.safetensors", cache / "samples-000099.safetensors")
    with pytest.raises(VerificationError, match=r"samples-000099\.safetensors: does not belong into a cache"):
        repository.run("verify")
    (cache / "samples-000099.safetensors").unlink()
    path = cache / "samples-000000.safetensors"
    content = bytearray(path.read_bytes())
    content[-8 * (read_manifest(cache)["shard_samples"][0] + 1) - 1] ^= 1  # the last mask
    path.write_bytes(content)
    with pytest.raises(VerificationError, match=r"\[bytes\] samples-000000\.safetensors: sha256 is .*"):
        repository.run("verify")
