"""Targets held by several ranks together: the states of one process, or refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules import module as torch_module
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks import sharded_memory
from dspark_cache import sharding
from dspark_cache.errors import InputError, SettingsError
from dspark_cache.recompute import relative_l2
from dspark_cache.settings import TargetSettings
from dspark_cache.sharding import NOT_SHARDED, ensure_shardable
from dspark_cache.target import load_model, load_target
from tests import sharded_rank
from tests.families import COMMON, FURTHER, VOCAB_SIZE, build_tiny, disturb_norms, tiny_config
from tests.sharded_rank import (
    CPU,
    DISTURBANCES,
    EMBED,
    Found,
    make_batches,
    run_ranks,
    use_target,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT = 1e-5
"""Relative L2 of a token's state in fp32 that sums in another order may move; measured at 5e-6 at most."""

GROUPS = (("fsdp", 2), ("fsdp", 4), ("tensor", 2), ("tensor", 4))
FOUR_HEADS = ("qwen3", "qwen3_moe")
"""Models with as many key and value heads as four ranks need."""
WAYS = ("fsdp", "tensor")
QUERY = "model.layers.0.self_attn.q_proj.weight"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by their names: a dense one, and with tied embeddings another one and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    build_tiny("llama", root / "llama")
    for name in FOUR_HEADS:
        build_tied(name, root / name, vocab_size=123)  # rows that no number of ranks divides
    return {folder.name: folder for folder in root.iterdir()}


def build_tied(model_type: str, folder: Path, vocab_size: int) -> None:
    """Save a tiny model whose lm_head is its embedding."""
    config = tiny_config(model_type)
    config.tie_word_embeddings, config.vocab_size, config.num_key_value_heads = True, vocab_size, 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    disturb_norms(model)
    model.save_pretrained(folder)


def alone(folder: Path, seed: int, count: int, compute_dtype: str = "fp32") -> Found:
    """Return what one process has of a target and of a rank's batches."""
    target = load_target(folder, TargetSettings(), compute_dtype, CPU)
    # A copy, as the last bits of a product may depend on where in its file a weight begins (Zaya).
    for parameter in target.model.parameters():
        parameter.data = parameter.data.clone()
    return use_target(target, folder, make_batches(seed, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Models loaded and used by ranks.

    Attributes:
        parallelism: How they share them.
        size: How many.
        counts: Batches of each.
        found: What each has of each model, by its name.
    """

    parallelism: str
    size: int
    counts: tuple[int, ...]
    found: list[dict[str, Found]]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def run(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    parallelism, size = request.param
    # Under FSDP ranks have different numbers of batches, one of them none.
    counts = tuple(range(size)) if parallelism == "fsdp" else (2,) * size
    work = tmp_path_factory.mktemp("ranks") / "group"
    names = FOUR_HEADS if (parallelism, size) == ("tensor", 4) else tuple(models)
    targets = [(models[name], "fp32") for name in names]
    results = run_ranks(size, work, sharded_rank.capture, targets, parallelism, counts)
    found = [dict(zip(names, of_rank, strict=True)) for of_rank in results]
    return Run(parallelism=parallelism, size=size, counts=counts, found=found)


def ensure_same_states(found: Found, expected: Found, parallelism: str) -> None:
    """Assert that states are those of one process: to the bit, or for tensor parallelism as near as it comes."""
    assert len(found.states) == len(expected.states)
    for got, wanted in zip(found.states, expected.states, strict=True):
        for one, other in zip(got, wanted, strict=True):
            if parallelism == "fsdp":
                assert torch.equal(one, other)
            else:
                assert float(relative_l2(one, other).max()) <= LIMIT


def test_states_are_those_of_one_process(run: Run, models: dict[str, Path]) -> None:
    for rank, of_rank in enumerate(run.found):
        for name, found in of_rank.items():
            expected = alone(models[name], rank if run.parallelism == "fsdp" else 0, run.counts[rank])
            ensure_same_states(found, expected, run.parallelism)


def test_embedding_and_lm_head_are_gathered_as_the_checkpoint_has_them(run: Run, models: dict[str, Path]) -> None:
    for of_rank in run.found:
        for name, found in of_rank.items():
            stored = load_file(models[name] / "model.safetensors")
            assert torch.equal(found.embed, stored[EMBED])
            assert torch.equal(found.head, stored.get("lm_head.weight", stored[EMBED]))
            assert found.is_tied == (name != "llama") == ("lm_head.weight" not in stored)


def test_each_rank_holds_its_part_before_and_after_forwards(run: Run) -> None:
    for name, found in run.found[0].items():
        for parameter, (_, rows) in found.held.items():
            held = [of_rank[name].held[parameter][0] for of_rank in run.found]
            assert held == [of_rank[name].held_before[parameter][0] for of_rank in run.found]
            if run.parallelism == "fsdp" or parameter in (EMBED, QUERY):
                assert sum(held) == rows, parameter
                assert max(held) == -(-rows // run.size), parameter


def test_a_sharded_target_is_frozen(run: Run) -> None:
    assert all(found.is_frozen for of_rank in run.found for found in of_rank.values())


# What is stored of tied embeddings


def rewrite(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Copy a checkpoint with its tensors changed."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("parallelism", WAYS)
def test_tied_embeddings_however_the_checkpoint_has_them(parallelism: str, tmp_path: Path) -> None:
    """As one process does: copies that are equal are tied, others are not; either may be the only one."""
    head = "lm_head.weight"
    forms: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
        "both": lambda tensors: tensors.update({head: tensors[EMBED].clone()}),
        "different": lambda tensors: tensors.update({head: tensors[EMBED] + 1}),
        "head": lambda tensors: tensors.update({head: tensors.pop(EMBED)}),
    }
    source = tmp_path / "tied"
    build_tied("qwen3", source, VOCAB_SIZE)
    folders = [rewrite(tmp_path / name, source, change) for name, change in forms.items()]
    targets = [(folder, "fp32") for folder in folders]
    results = run_ranks(2, tmp_path / "ranks", sharded_rank.capture, targets, parallelism, (1, 1))
    for rank, of_rank in enumerate(results):
        for folder, found in zip(folders, of_rank, strict=True):
            expected = alone(folder, rank if parallelism == "fsdp" else 0, 1)
            ensure_same_states(found, expected, parallelism)
            assert torch.equal(found.embed, expected.embed)
            assert torch.equal(found.head, expected.head)
            assert found.is_tied == expected.is_tied == (folder.name != "different")


# The check of what was loaded


def complaint(name: str) -> str:
    return (
        f"target.model: 1 tensors of Qwen3MoeForCausalLM are not those of the checkpoint when they are loaded over "
        f"2 processes, {name} among them; try another runtime.parallelism"
    )


@pytest.mark.parametrize("parallelism", WAYS)
@pytest.mark.parametrize("only", [None, 1], ids=["all ranks", "one rank"])
def test_the_check_names_what_differs(
    parallelism: str, only: int | None, models: dict[str, Path], tmp_path: Path
) -> None:
    texts = run_ranks(2, tmp_path / "ranks", sharded_rank.check_disturbed, models["qwen3_moe"], parallelism, only)
    for words, (name, _) in DISTURBANCES.items():
        said = [complaint(name) if only in (None, rank) else None for rank in range(2)]
        assert [of_rank[words] for of_rank in texts] == said, words
    assert [of_rank["nothing"] for of_rank in texts] == [None, None]


def test_a_load_that_goes_wrong_on_one_rank_is_refused_there(models: dict[str, Path], tmp_path: Path) -> None:
    texts = run_ranks(2, tmp_path / "ranks", sharded_rank.load_disturbed, models["qwen3_moe"])
    assert texts == [None, complaint(EMBED)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tensor"),
    [("kimi_linear", "model.layers.0.self_attn.conv1d.weight"), ("falcon_h1", "model.layers.0.mamba.mup_vector")],
)
def test_the_check_catches_what_transformers_loads_wrongly_itself(model_type: str, tensor: str, tmp_path: Path) -> None:
    """Its own FSDP, transformers 5.24; the reason why `_load_fsdp` is ours."""
    build_tiny(model_type, tmp_path / "target")
    texts = run_ranks(2, tmp_path / "ranks", sharded_rank.check_native_loading, tmp_path / "target")
    assert any(f"{tensor} among them" in (text or "") for text in texts)


# Loading without keeping


def registration_hooks() -> tuple[list[int], list[int]]:
    """Return the keys of the hooks on everything that any module registers."""
    return list(torch_module._global_module_registration_hooks), list(torch_module._global_parameter_registration_hooks)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe"])
def test_what_is_loaded_without_parameters_is_handed_on_by_name(name: str, models: dict[str, Path]) -> None:
    before, handed_on = registration_hooks(), {}
    empty = sharding._load_without_parameters(models[name], TargetSettings(), "bf16", handed_on.__setitem__)
    assert registration_hooks() == before
    expected = dict(load_model(models[name], TargetSettings(), "bf16").named_parameters())
    assert handed_on.keys() == expected.keys()
    assert all(torch.equal(handed_on[key], value) for key, value in expected.items())
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert not any(buffer.is_meta for buffer in empty.buffers())


def test_a_load_that_raises_leaves_no_hook_behind(models: dict[str, Path], tmp_path: Path) -> None:
    def refuse(name: str, parameter: torch.Tensor) -> None:
        raise OverflowError(f"{name} {len(parameter)}")

    before = registration_hooks()
    with pytest.raises(OverflowError, match=r"\w\.weight \d"):
        sharding._load_without_parameters(models["llama"], TargetSettings(), "fp32", refuse)
    (tmp_path / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"has no \*\.safetensors weights$"):
        sharding._load_without_parameters(tmp_path, TargetSettings(), "fp32", refuse)
    assert registration_hooks() == before


# What is refused before loading


def refusal(parallelism: str, size: int, folder: Path, **config: Any) -> str | None:
    """Return why a configuration is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        ensure_shardable(folder, parallelism, size, trust_remote_code=False)
    except (InputError, SettingsError) as error:
        return str(error)
    return None


def test_families_that_fail_are_refused_with_the_reason(tmp_path: Path) -> None:
    for parallelism, reasons in NOT_SHARDED.items():
        for model_type, reason in reasons.items():
            assert (refusal(parallelism, 2, tmp_path, model_type=model_type) or "").startswith(
                f"target.model: {model_type} cannot be sharded by runtime.parallelism: {parallelism}: {reason}; try "
            )


@pytest.mark.parametrize(
    ("parallelism", "model_type", "reason"),
    [
        ("fsdp", "zamba2", "fsdp: its layers share weights, which FSDP2 cannot shard; try replicate"),
        ("tensor", "zamba2", "tensor: transformers has no tensor parallel plan for it; try replicate"),
        ("tensor", "gemma4", "tensor: the embedding of its wrapper mixes sharded and whole tensors; try fsdp"),
        ("tensor", "gpt2", "tensor: transformers has no tensor parallel plan for it; try fsdp"),
        ("fsdp", "gemma4", None),
        ("fsdp", "gpt2", None),
        ("tensor", "gemma4_text", None),
    ],
)
def test_the_other_way_is_named_where_it_works(
    parallelism: str, model_type: str, reason: str | None, tmp_path: Path
) -> None:
    text = f"target.model: {model_type} cannot be sharded by runtime.parallelism: {reason}" if reason else None
    assert refusal(parallelism, 2, tmp_path, model_type=model_type) == text


@pytest.mark.parametrize(
    ("parallelism", "size", "heads", "odd"),
    [
        ("tensor", 4, (8, 2), "{'num_key_value_heads': 2}"),
        ("tensor", 4, (6, 2), "{'num_attention_heads': 6, 'num_key_value_heads': 2}"),
        ("tensor", 4, (8, 4), None),
        ("tensor", 2, (8, 2), None),
        ("fsdp", 4, (6, 2), None),
    ],
)
def test_heads_that_the_ranks_do_not_divide_are_refused(
    parallelism: str, size: int, heads: tuple[int, int], odd: str | None, tmp_path: Path
) -> None:
    numbers = dict(zip(("num_attention_heads", "num_key_value_heads"), heads, strict=True))
    config = {"model_type": "llama", "hidden_size": 96, **numbers}
    text = (
        f"runtime.parallelism: tensor: {size} processes need numbers of heads that they divide, the target has {odd}: "
        "choose another runtime.group_size, or runtime.parallelism: fsdp"
    )
    assert refusal(parallelism, size, tmp_path, **config) == (text if odd else None)


# Every family


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", WAYS)
@pytest.mark.parametrize("model_type", [*COMMON, *FURTHER])
def test_every_family_is_as_one_process_has_it_or_refused(parallelism: str, model_type: str, tmp_path: Path) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this release of transformers does not have the family")
    folder = tmp_path / "target"
    build_tiny(model_type, folder)
    try:
        ensure_shardable(folder, parallelism, 2, trust_remote_code=False)
    except InputError:
        return  # by a reason that other tests know
    dtypes = ("fp32",) if model_type == "xlstm" else ("fp32", "bf16")  # it fails in bf16 in one process too
    targets = [(folder, compute_dtype) for compute_dtype in dtypes]
    for rank, of_rank in enumerate(
        run_ranks(2, tmp_path / "ranks", sharded_rank.capture, targets, parallelism, (1, 1))
    ):
        for (_, compute_dtype), found in zip(targets, of_rank, strict=True):
            expected = alone(folder, rank if parallelism == "fsdp" else 0, 1, compute_dtype)
            assert torch.equal(found.embed, expected.embed)
            assert torch.equal(found.head, expected.head)
            assert found.is_tied == expected.is_tied
            assert found.dtypes == expected.dtypes
            assert found.on_meta == [] or model_type == "kosmos-2.5"  # parts of it lie beside its text decoder
            if parallelism == "fsdp" or compute_dtype == "fp32":  # few bits and another order send tokens elsewhere
                ensure_same_states(found, expected, parallelism)


# Memory


def test_a_plan_that_shares_little_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(8, 8, bias=False)
    sharding.warn_of_little_shared(model, 1)
    assert caplog.messages == []
    sharding.warn_of_little_shared(model, 2)
    assert caplog.messages == [
        "each of 2 processes holds 100 % of the weights: transformers' plan shares little of Linear; "
        "runtime.parallelism: fsdp shares all"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", WAYS)
@pytest.mark.parametrize("name", ["dense", "experts"])
def test_a_load_takes_little_more_than_a_ranks_share(name: str, parallelism: str, tmp_path: Path) -> None:
    make = sharded_memory.MODELS[name]
    model = make(tmp_path / "model", 100 * sharded_memory.MB)
    make(tmp_path / "tiny", 0)
    peaks = sharded_memory.measure(model, tmp_path / "tiny", tmp_path / "ranks", parallelism, 2)
    assert peaks["load"] <= model.bound(2)
    assert peaks["loaded"] <= sharded_memory.SLACK * model.num_bytes / 2
