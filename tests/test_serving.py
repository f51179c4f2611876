"""Layer ids in the terms of inference engines: what they cannot serve, and what is written into a draft's config."""

from __future__ import annotations

import pytest

from dspark_cache.serving import CONFIG_KEYS, SGLANG, VLLM, engine_layer_ids, serving_findings


@pytest.mark.parametrize(
    ("layer_ids", "expected"),
    [
        ([], {}),
        ([0, 3, 4], {}),
        ([-1, 3], {SGLANG: [-1]}),  # vLLM captures before the first layer too
        ([3, 5], {SGLANG: [5], VLLM: [5]}),
        ([-1, 0, 5], {SGLANG: [-1, 5], VLLM: [5]}),
    ],
)
def test_embedding_and_last_layer_are_found(layer_ids: list[int], expected: dict[str, list[int]]) -> None:
    assert {finding.engine: finding.layer_ids for finding in serving_findings(layer_ids, 6)} == expected


def test_a_target_of_one_layer_has_only_its_final_norm() -> None:
    assert [finding.layer_ids for finding in serving_findings([0], 1)] == [[0], [0]]


def test_a_finding_says_what_the_engine_does_instead() -> None:
    sglang, vllm = serving_findings([-1, 5], 6)
    assert str(sglang) == (
        "layer ids [-1, 5] cannot be served by SGLang: it captures what enters the decoder layers 1 to 5, neither "
        "the embedding's output nor the final norm's"
    )
    assert str(vllm) == (
        "layer ids [5] cannot be served by vLLM: it hands on the last layer's output before the final norm, the cache "
        "holds it after the norm"
    )
    assert vllm.as_json() == {"engine": "vLLM", "layer_ids": [5], "reason": vllm.reason}


def test_only_one_key_of_vllm_counts_from_the_embedding() -> None:
    assert engine_layer_ids(SGLANG, [1, 9, 17]) == {
        "dflash_config.target_layer_ids": [1, 9, 17],
        "target_layer_ids": [1, 9, 17],
        "eagle_config.eagle_aux_hidden_state_layer_ids": [1, 9, 17],
    }
    assert engine_layer_ids(VLLM, [-1, 9, 17]) == {
        "dflash_config.target_layer_ids": [-1, 9, 17],
        "target_layer_ids": [-1, 9, 17],
        "eagle_aux_hidden_state_layer_ids": [0, 10, 18],
    }
    with pytest.raises(KeyError):
        engine_layer_ids("sglang", [1])
    assert set(CONFIG_KEYS) == {SGLANG, VLLM}
