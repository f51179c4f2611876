"""The frozen target: layer ids, what its configuration says, and that a loaded one is the whole checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from itertools import product
from typing import TYPE_CHECKING, Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PhiConfig, PhiForCausalLM

from dspark_cache.errors import InputError, SettingsError
from dspark_cache.inputs import Input
from dspark_cache.serving import serving_findings
from dspark_cache.settings import TargetSettings
from dspark_cache.target import (
    Target,
    TargetFacts,
    build_target_layer_ids,
    find_base,
    find_layers,
    is_tokenizer_file,
    is_weight_file,
    load_target,
    read_target_facts,
    resolve_layer_ids,
    target_folder,
    warn_unservable,
)
from tests.repository import GOLDEN, ROOT

if TYPE_CHECKING:
    from pathlib import Path

MODELS = GOLDEN / "models"
CPU = torch.device("cpu")
UP_PROJ = "model.layers.1.mlp.up_proj.weight"


def facts(folder: Path) -> TargetFacts:
    return read_target_facts(folder, trust_remote_code=False)


def load(folder: Path, compute_dtype: str = "fp32", **settings: Any) -> Target:
    return load_target(folder, TargetSettings(**settings), compute_dtype, CPU)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a golden model, to doctor."""
    return shutil.copytree(MODELS / "qwen3-tiny", tmp_path / "qwen3-tiny")


def set_config(folder: Path, **values: Any) -> Path:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def set_weights(folder: Path, dtype: torch.dtype | None = None, **values: torch.Tensor | None) -> Path:
    """Change tensors of the checkpoint by their last names; None removes one."""
    path = folder / "model.safetensors"
    weights = {key: value.to(dtype or value.dtype) for key, value in load_file(path).items()}
    weights |= {UP_PROJ: values["up_proj"]} if "up_proj" in values else {}  # type: ignore[dict-item]
    save_file({k: v for k, v in weights.items() if v is not None}, path, metadata={"format": "pt"})
    return folder


# Layer ids


@pytest.mark.parametrize(
    ("layers", "draft", "expected"),
    [
        (2, 1, [1]),  # one id is the last layer
        (2, 5, [1]),
        (3, 2, [1, 2]),
        (3, 9, [1, 2]),  # never repeated
        (6, 5, [1, 2, 3, 4, 5]),
        (28, 1, [27]),
        (28, 5, [1, 8, 14, 20, 27]),
        (36, 5, [1, 10, 18, 26, 35]),
    ],
)
def test_default_layer_ids_are_spread_evenly(layers: int, draft: int, expected: list[int]) -> None:
    assert build_target_layer_ids(layers, draft) == expected
    assert resolve_layer_ids(None, draft, layers) == expected


@pytest.mark.parametrize(("layers", "draft"), [(1, 5), (0, 1), (6, 0), (6, -1)])
def test_no_default_layer_ids_of_too_few_layers(layers: int, draft: int) -> None:
    with pytest.raises(SettingsError) as error:
        build_target_layer_ids(layers, draft)
    assert str(error.value) == (
        "default layer ids need a target of at least 2 layers and at least 1 draft layer, found "
        f"{layers} and {draft}; set target.layer_ids"
    )


def test_default_layer_ids_never_repeat_and_say_so_when_there_are_fewer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="dspark_cache.target")
    for layers, draft in product(range(2, 101), range(1, 9)):
        caplog.clear()
        ids = resolve_layer_ids(None, draft, layers)
        assert ids == sorted(set(ids))
        assert len(ids) == min(draft, layers - 1)
        assert len(caplog.messages) == (draft > layers - 1)
    resolve_layer_ids(None, 5, 3)
    assert caplog.messages[-1] == (
        "a target of 3 layers has only the ids [1, 2] to spread, target.draft_num_hidden_layers asks for 5"
    )


@pytest.mark.parametrize("layer_ids", [[-1], [5], [-1, 0, 2, 5], [0]])
def test_explicit_layer_ids_of_the_target_are_taken(layer_ids: list[int]) -> None:
    assert resolve_layer_ids(layer_ids, 5, 6) == layer_ids


@pytest.mark.parametrize("layer_ids", [[], [1, 1], [2, 1], [-2, 0], [6], [0, 6]])
def test_layer_ids_the_target_does_not_have_are_refused_with_the_range(layer_ids: list[int]) -> None:
    with pytest.raises(SettingsError) as error:
        resolve_layer_ids(layer_ids, 5, 6)
    assert str(error.value) == (
        f"target.layer_ids: expected strictly increasing ids from -1 (embedding) to 5 (final norm), found {layer_ids}"
    )


def test_layer_ids_that_cannot_be_served_warn(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="dspark_cache.target")
    warn_unservable([0, 4], 6)
    assert caplog.messages == []
    warn_unservable([-1, 0, 5], 6)
    assert caplog.messages == [f"{finding}; set target.layer_ids" for finding in serving_findings([-1, 0, 5], 6)]
    assert len(caplog.messages) == 2


# The configuration


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen3-tiny", ("qwen3", 768, 64, 6)),
        ("llama-tied-tiny", ("llama", 640, 32, 4)),
        ("gemma3-text-tiny", ("gemma3_text", 640, 32, 7)),
        ("gemma4-tiny", ("gemma4", 640, 32, 6)),  # sizes of the nested text configuration
    ],
)
def test_facts_of_a_configuration(model: str, expected: tuple[str, int, int, int]) -> None:
    found = facts(MODELS / model)
    assert (found.model_type, found.vocab_size, found.hidden_size, found.num_hidden_layers) == expected
    assert found.dtype == "fp32"
    assert found.logits == {}


def test_facts_need_no_weights(checkpoint: Path) -> None:
    expected = facts(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    assert facts(checkpoint) == expected
    assert facts(ROOT / "inputs/target").model_type == "qwen3"


def test_what_is_done_to_logits_is_recorded(checkpoint: Path) -> None:
    set_config(checkpoint, final_logit_softcapping=30, logit_scale=0.5, logits_scaling=0)
    assert facts(checkpoint).logits == {"final_logit_softcapping": 30.0, "logit_scale": 0.5}


@pytest.mark.parametrize(("configured", "expected"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")])
def test_the_configuration_names_the_checkpoint_s_dtype(checkpoint: Path, configured: str, expected: str) -> None:
    assert facts(set_config(checkpoint, dtype=configured)).dtype == expected


def test_without_a_named_dtype_it_is_that_of_most_bytes(checkpoint: Path) -> None:
    assert facts(set_config(checkpoint, dtype=None)).dtype == "fp32"
    set_weights(checkpoint, torch.bfloat16, up_proj=torch.zeros(128, 64))
    assert facts(checkpoint).dtype == "bf16"
    assert facts(set_config(checkpoint, dtype="float64")).dtype == "bf16"


@pytest.mark.parametrize(("dtype", "found"), [(torch.float64, "F64"), (None, "no weights")])
def test_a_dtype_that_cannot_be_told_is_asked_for(checkpoint: Path, dtype: torch.dtype | None, found: str) -> None:
    set_config(checkpoint, dtype=None)
    if dtype is None:
        (checkpoint / "model.safetensors").unlink()
    else:
        set_weights(checkpoint, dtype)
    with pytest.raises(InputError) as error:
        facts(checkpoint)
    assert str(error.value) == (
        f"target.model: {checkpoint}: cannot tell the checkpoint's dtype ({found}): set target.compute_dtype"
    )


def test_a_quantised_checkpoint_is_refused(checkpoint: Path) -> None:
    set_config(checkpoint, quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError) as error:
        facts(checkpoint)
    assert str(error.value) == (
        f"target.model: {checkpoint} is quantised, which capture refuses: use the unquantised checkpoint"
    )


def test_a_family_whose_states_are_no_layer_outputs_is_refused(checkpoint: Path) -> None:
    set_config(checkpoint, model_type="mamba", layer_types=None)
    with pytest.raises(InputError) as error:
        facts(checkpoint)
    assert str(error.value) == ("target.model: mamba cannot be captured: its hidden_states are not the layers' outputs")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "nosuch"}, "model type `nosuch`"),
        ({"model_type": "nosuch", "auto_map": {"AutoConfig": "configuration_x.X"}}, "custom code"),
    ],
)
def test_unknown_families_and_remote_code_are_refused(checkpoint: Path, values: dict[str, Any], reason: str) -> None:
    (checkpoint / "configuration_x.py").write_text("raise SystemExit('remote code ran')")
    with pytest.raises(InputError) as error:
        facts(set_config(checkpoint, **values))
    assert str(error.value).startswith(f"target.model: {checkpoint} has no usable configuration: ")
    assert reason in str(error.value)
    assert str(error.value).endswith(" (target.trust_remote_code is false)")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_usable_configuration_is_refused(checkpoint: Path, content: str | None) -> None:
    (checkpoint / "config.json").unlink()
    if content is not None:
        (checkpoint / "config.json").write_text(content)
    with pytest.raises(InputError, match="has no usable configuration: "):
        facts(checkpoint)


# Loading


def test_a_golden_model_loads_for_inference() -> None:
    target = load(MODELS / "qwen3-tiny")
    weights = load_file(MODELS / "qwen3-tiny" / "model.safetensors")
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert torch.equal(target.embed_weight, weights["model.embed_tokens.weight"])
    assert torch.equal(target.head_weight, weights["lm_head.weight"])
    assert target.layers is target.model.model.layers
    assert target.base is target.model.model
    assert target.device == CPU


def test_tied_weights_are_one_tensor() -> None:
    target = load(MODELS / "llama-tied-tiny")
    assert target.embed_weight.data_ptr() == target.head_weight.data_ptr()


def test_layers_and_base_of_a_nested_model() -> None:
    """The base is the multimodal wrapper, not the text decoder inside it."""
    target = load(MODELS / "gemma4-tiny")
    assert type(target.base).__name__ == "Gemma4Model"
    assert target.layers is target.model.model.language_model.layers
    assert len(target.layers) == 6


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_target_loads_in_the_compute_dtype(name: str, dtype: torch.dtype) -> None:
    assert {parameter.dtype for parameter in load(MODELS / "llama-tied-tiny", name).model.parameters()} == {dtype}


def test_the_attention_implementation_is_passed_on() -> None:
    target = load(MODELS / "llama-tied-tiny", attn_implementation="eager")
    assert target.model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match=r"cannot be loaded: .*nosuch"):
        load(MODELS / "llama-tied-tiny", attn_implementation="nosuch")


def test_pickled_weights_never_load(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InputError) as error:
        load(checkpoint)
    assert str(error.value) == f"target.model: {checkpoint} has no *.safetensors weights"
    torch.save(weights, checkpoint / "pytorch_model.bin")
    with pytest.raises(InputError) as error:
        load(checkpoint)
    assert str(error.value) == (
        f"target.model: {checkpoint} has no *.safetensors weights; pytorch_model.bin is pickled and never loaded, "
        "convert it with save_pretrained"
    )


def test_safetensors_are_taken_where_pickled_weights_lie_beside_them(checkpoint: Path) -> None:
    expected = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    (checkpoint / "pytorch_model.bin").write_bytes(b"no pickle at all")
    assert torch.equal(load(checkpoint).head_weight, expected)


def test_a_missing_tensor_is_refused_by_name(checkpoint: Path) -> None:
    set_weights(checkpoint, up_proj=None)
    with pytest.raises(InputError) as error:
        load(checkpoint)
    assert str(error.value) == (
        f'target.model: the checkpoint in {checkpoint} does not fit the model: {{"missing_keys": ["{UP_PROJ}"]}}'
    )


def test_a_tensor_of_another_shape_is_refused(checkpoint: Path) -> None:
    set_weights(checkpoint, up_proj=torch.zeros(127, 64))
    with pytest.raises(InputError, match=f"target.model: .*{checkpoint}"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    set_weights(checkpoint, up_proj=torch.zeros(127, 64))
    with pytest.raises(InputError, match=UP_PROJ):
        load(checkpoint)


def test_a_truncated_checkpoint_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load(checkpoint)


def test_an_lm_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    config = PhiConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    PhiForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(InputError) as error:
        load(tmp_path)
    assert str(error.value) == "target.model: lm_head has a bias, which the cache format has no place for"


# The decoder inside a model


def test_a_second_list_of_as_many_layers_is_refused() -> None:
    model = load(MODELS / "llama-tied-tiny").model
    model.model.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
    find_layers(model)
    model.model.more.append(torch.nn.Identity())
    with pytest.raises(InputError) as error:
        find_layers(model)
    assert str(error.value) == "target.model: LlamaForCausalLM: expected one decoder with 4 layers, found 2"
    del model.model.more, model.model.layers
    with pytest.raises(InputError, match="expected one decoder with 4 layers, found 0"):
        find_layers(model)


def test_a_model_whose_decoder_holds_lm_head_has_no_base() -> None:
    target = load(MODELS / "llama-tied-tiny")
    target.model.model.head = target.model.lm_head
    with pytest.raises(InputError) as error:
        find_base(target.model, target.layers)
    assert str(error.value) == ("target.model: LlamaForCausalLM has no part that gives hidden states without lm_head")


# Its files


@pytest.mark.parametrize(
    ("name", "weight", "tokenizer"),
    [
        ("config.json", True, False),
        ("model.safetensors", True, False),
        ("model-00001-of-00002.safetensors", True, False),
        ("model.safetensors.index.json", True, False),
        ("modeling_x.py", True, True),
        ("tokenizer.json", False, True),
        ("chat_template.jinja", False, True),
        ("special_tokens_map.json", False, True),
        ("generation_config.json", False, False),
        ("pytorch_model.bin", False, False),
        ("model.gguf", False, False),
    ],
)
def test_which_files_decide_states_and_ids(name: str, weight: bool, tokenizer: bool) -> None:
    assert (is_weight_file(name), is_tokenizer_file(name)) == (weight, tokenizer)


def test_the_folder_of_a_local_target_is_below_the_root(tmp_path: Path) -> None:
    local = Input(text="inputs/target", kind="watched", revision=None)
    assert target_folder(local, tmp_path, trust_remote_code=False, weights=True) == tmp_path / "inputs/target"


def test_a_hub_target_is_found_in_the_hub_s_cache_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    hub = Input(text="nobody/nothing", kind="hub", revision=commit)
    with pytest.raises(InputError, match=f"target.model: cannot fetch nobody/nothing at {commit}: "):
        target_folder(hub, tmp_path, trust_remote_code=False, weights=True)
    snapshot = tmp_path / "models--nobody--nothing" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert target_folder(hub, tmp_path, trust_remote_code=True, weights=False) == snapshot
