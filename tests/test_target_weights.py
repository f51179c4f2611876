"""The target's embedding and lm_head beside the shards."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from dspark_cache import (
    CacheFormatError,
    CacheNotFoundError,
    SettingsError,
    _target_weights_path,
    read_target_weight_modules,
    target_logits,
    write_target_weights,
)
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.target_weights import TargetWeightsCopy
from tests.families import build_tiny, load_tiny, make_samples

GOLDEN = Path(__file__).parent / "data" / "golden" / "cases" / "q3-one-sample" / "cache"


def modules(vocab: int = 5, hidden: int = 3) -> tuple[torch.nn.Embedding, torch.nn.Linear]:
    return torch.nn.Embedding(vocab, hidden), torch.nn.Linear(hidden, vocab, bias=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_come_back_in_the_dtype_of_the_cache(tmp_path: Path, dtype: torch.dtype) -> None:
    embed, head = modules()
    folder = tmp_path / "made" / "cache"
    path = write_target_weights(folder, embed, head, dtype)
    assert path == _target_weights_path(folder) == str(folder / "target_weights.safetensors")
    read = read_target_weight_modules(folder)
    for module, source in zip(read, (embed.weight, head.weight), strict=True):
        assert torch.equal(module.weight, source.detach().to(dtype))
        assert module.weight.dtype == dtype
    assert [file.name for file in folder.iterdir()] == ["target_weights.safetensors"]


def test_the_file_has_the_bytes_of_save_file(tmp_path: Path) -> None:
    embed, head = modules()
    weights = {"embed_tokens.weight": embed.weight.detach(), "lm_head.weight": head.weight.detach()}
    save_file(weights, tmp_path / "expected")
    path = Path(write_target_weights(tmp_path, embed, head, torch.float32))
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()


def test_tied_weights_are_there_twice(tmp_path: Path) -> None:
    embed, head = modules()
    head.weight = embed.weight
    write_target_weights(tmp_path, embed, head, torch.bfloat16)
    read = read_target_weight_modules(tmp_path)
    assert all(torch.equal(module.weight, embed.weight.detach().bfloat16()) for module in read)
    assert Path(_target_weights_path(tmp_path)).stat().st_size > 2 * 5 * 3 * 2


def test_weights_that_share_memory_without_being_tied_are_kept_apart(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    embed, head = modules()
    embed.weight, head.weight = torch.nn.Parameter(weight), torch.nn.Parameter(weight.T)
    write_target_weights(tmp_path, embed, head, torch.float32)
    embed, head = read_target_weight_modules(tmp_path)
    assert torch.equal(embed.weight, weight)
    assert torch.equal(head.weight, weight.T)


EMBED, HEAD = torch.randn(5, 3), torch.randn(5, 3)
COPIES = [
    ({"embed_tokens.weight": EMBED}, True, {"embed_tokens.weight": EMBED}),
    ({"embed_tokens.weight": EMBED}, False, {"embed_tokens.weight": EMBED, "lm_head.weight": EMBED}),
    ({"embed_tokens.weight": EMBED, "lm_head.weight": EMBED}, True, {"embed_tokens.weight": EMBED}),
    *[
        (
            {"embed_tokens.weight": EMBED, "lm_head.weight": HEAD},
            once,
            {"embed_tokens.weight": EMBED, "lm_head.weight": HEAD},
        )
        for once in (True, False)
    ],
]


@pytest.mark.parametrize(("tensors", "tied_once", "expected"), COPIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_has_tied_weights_once_or_twice_as_asked(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    tied_once: bool,
    expected: dict[str, torch.Tensor],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dspark_cache.target_weights._CHUNK_BYTES", 30)  # two rows and a half
    source, path = tmp_path / "source", tmp_path / "weights"
    source.touch()
    write_tensors(source, tensors)
    weights = TargetWeightsCopy(ShardFile(source), dtype, tied_once=tied_once)
    digest = weights.put(path)
    assert weights.num_bytes == path.stat().st_size
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value.to(dtype)) for key, value in expected.items())


def test_a_bias_has_no_place(tmp_path: Path) -> None:
    embed, _ = modules()
    message = "the target's lm_head has a bias, which target_weights.safetensors has no place for"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        write_target_weights(tmp_path, embed, torch.nn.Linear(3, 5), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_the_reference_are_read() -> None:
    embed, head = read_target_weight_modules(GOLDEN)
    assert embed.weight.shape == head.weight.shape == (768, 64)
    assert embed.weight.dtype == torch.float32
    assert not torch.equal(embed.weight, head.weight)


def test_missing_weights_are_said_to_be_missing(tmp_path: Path) -> None:
    path = _target_weights_path(tmp_path)
    with pytest.raises(CacheNotFoundError, match=f"^no such file: {re.escape(path)}$"):
        read_target_weight_modules(tmp_path)


def test_truncated_weights_are_refused_by_name(tmp_path: Path) -> None:
    path = write_target_weights(tmp_path, *modules(), torch.float32)
    size = Path(path).stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(CacheFormatError, match=f"^{re.escape(path)} has {size - 1} bytes, its header asks for {size}$"):
        read_target_weight_modules(tmp_path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"embed_tokens.weight": torch.ones(5, 3)}, ": missing required keys ['lm_head.weight']"),
        ({"x": torch.ones(5, 3)}, ": missing required keys ['embed_tokens.weight', 'lm_head.weight']"),
        (
            {"embed_tokens.weight": torch.ones(5, 3), "lm_head.weight": torch.ones(4, 3)},
            ": expected two weights [V, H] of one dtype, found ",
        ),
        (
            {"embed_tokens.weight": torch.ones(5, 3), "lm_head.weight": torch.ones(5, 3).half()},
            ": expected two weights [V, H] of one dtype, found ",
        ),
        (
            {"embed_tokens.weight": torch.ones(5), "lm_head.weight": torch.ones(5)},
            ": expected two weights [V, H] of one dtype, found ",
        ),
    ],
)
def test_weights_that_are_missing_or_do_not_fit_are_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], message: str
) -> None:
    path = _target_weights_path(tmp_path)
    save_file(weights, path)
    with pytest.raises(CacheFormatError, match="^" + re.escape(path + message)):
        read_target_weight_modules(tmp_path)


def test_logits_by_an_unknown_rule_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"^rules: expected some of logit_scale, .*, found bend, fold: install"):
        target_logits(torch.ones(1, 2), torch.ones(3, 2), {"logit_scale": 2.0, "fold": 1.0, "bend": 1.0})


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "recurrent_gemma", "xlstm", "cohere", "granite", "falcon_h1", "hyperclovax", "muse_spark"],
)
@torch.no_grad()
def test_logits_are_the_target_s(tmp_path: Path, model_type: str) -> None:
    build_tiny(model_type, tmp_path)
    facts, target = load_tiny(tmp_path)
    ids = make_samples()[0][None].long()
    last = target.base(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state[0]
    expected = target.model(input_ids=ids, use_cache=False).logits[0]
    assert facts.logits
    torch.testing.assert_close(target_logits(last, target.head_weight, facts.logits), expected)
    assert not torch.allclose(F.linear(last, target.head_weight), expected, rtol=1e-5)
