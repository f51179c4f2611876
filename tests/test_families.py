"""Every family that transformers has: captured right, refused by name, or listed as not built here."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dspark_cache.errors import CaptureError, InputError
from dspark_cache.forward import Capturer
from dspark_cache.settings import TargetSettings
from dspark_cache.target import UNSUPPORTED_MODEL_TYPES, load_target, read_target_facts
from tests.families import (
    COMMON,
    FURTHER,
    NOT_BUILT,
    build_tiny,
    capture_states,
    hook_states,
    load_tiny,
    make_samples,
    measure,
    worst,
)
from tests.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1e-4
"""Relative L2 of a token's state in fp32 that padding and companions may move; measured at 4e-6 at most."""

APART = 1e-2
"""Relative L2 that neighbouring layers differ by at least, so that a mistaken layer passes no limit."""


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("model_type", [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_states_by_selection_by_hooks_and_by_the_whole_model_agree(model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have the family")
    found = measure(model_type, tmp_path)
    assert found.hooks <= LIMIT
    assert found.whole <= LIMIT
    assert found.prefix <= LIMIT, "a token's state depends on later ones"
    assert found.apart >= APART
    assert found.logits <= LIMIT, "a trainer would not know what changes the logits"


# A default configuration that its own class refuses.
REFUSED_CONFIGS = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 30}
    }
}


@pytest.mark.parametrize("model_type", sorted(UNSUPPORTED_MODEL_TYPES))
def test_a_family_that_cannot_be_captured_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **REFUSED_CONFIGS.get(model_type, {})}))
    with pytest.raises(InputError, match=rf"{re.escape(model_type)} cannot be captured: \w"):
        read_target_facts(tmp_path, trust_remote_code=False)


@pytest.mark.parametrize("model_type", sorted(NOT_BUILT))
def test_a_family_that_is_not_built_here(model_type: str) -> None:
    pytest.skip(NOT_BUILT[model_type])


@pytest.mark.parametrize(("model_type", "value"), [("gemma", True), ("gemma3_text", True), ("gemma4_text", "all")])
def test_a_model_whose_tokens_see_later_ones_is_refused(model_type: str, value: bool | str, tmp_path: Path) -> None:
    config = {"model_type": model_type, "use_bidirectional_attention": value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        read_target_facts(tmp_path, trust_remote_code=False)
    assert str(error.value) == (
        f"target.model: {model_type} cannot be captured: its tokens see later ones (use_bidirectional_attention)"
    )


def test_no_family_has_two_answers() -> None:
    names = [*COMMON, *FURTHER, *UNSUPPORTED_MODEL_TYPES, *NOT_BUILT]
    assert len(names) == len(set(names))


@pytest.mark.slow
def test_every_family_of_transformers_has_an_answer() -> None:
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    assert known - {*COMMON, *FURTHER, *UNSUPPORTED_MODEL_TYPES, *NOT_BUILT} == set()


def test_the_documentation_lists_every_family_and_its_answer() -> None:
    text = (ROOT / "docs/families.md").read_text()
    rows = re.findall(r"^\| (?!model_type)([\w.-]+) \| (.*) \|$", text, re.MULTILINE)
    listed = dict(rows)
    assert len(listed) == len(rows)
    without = {**UNSUPPORTED_MODEL_TYPES, **NOT_BUILT}
    assert {name: listed.pop(name, None) for name in without} == without
    assert set(listed) == {*COMMON, *FURTHER}
    assert f"{len(listed)} families are captured" in text
    assert f"{len(UNSUPPORTED_MODEL_TYPES)} families are refused" in text


@pytest.mark.slow
def test_streams_are_told_from_samples_when_there_are_as_many(tmp_path: Path) -> None:
    build_tiny("gemma3n_text", tmp_path)
    facts, target = load_tiny(tmp_path)
    generator = torch.Generator().manual_seed(2)
    samples = list(torch.randint(0, 100, (4, 4), generator=generator, dtype=torch.int32))
    captured = capture_states(target, facts, samples, [0, 1])
    assert (
        max(
            worst(states, hook_states(target, facts, ids, [0, 1]))
            for ids, states in zip(samples, captured, strict=True)
        )
        <= LIMIT
    )


def test_hidden_states_that_are_not_one_a_layer_are_refused(tmp_path: Path) -> None:
    """So that a family that nobody listed is not captured wrongly; this one is listed."""
    build_tiny("dory", tmp_path)
    target = load_target(tmp_path, TargetSettings(), "fp32", torch.device("cpu"))
    with pytest.raises(CaptureError) as error:
        Capturer(target, [0, 1], target.model.config.hidden_size)(make_samples())
    assert str(error.value) == (
        "expected 5 hidden states, the embedding's and one a layer, the target gave 9: layer ids do not name them"
    )


def test_a_configuration_that_its_family_refuses_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "mamba2", "num_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has no usable configuration: [\s\S]*must equal num_heads"):
        read_target_facts(tmp_path, trust_remote_code=False)
