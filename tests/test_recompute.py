"""The second way to the states: a sound cache agrees, doctored ones are each refused, hooks leave no trace."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CachedDSparkDataset
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError, InputError
from dspark_cache.files import put_file
from dspark_cache.recompute import (
    LOGIT_POSITIONS,
    Comparison,
    Recomputed,
    choose_samples,
    compare_recomputed,
    put_recomputed,
    read_recomputed,
    recompute_sample,
    relative_l2,
    tolerance,
)
from dspark_cache.schema import CACHE_KEYS, HIDDEN, LAST_HIDDEN
from dspark_cache.settings import TargetSettings
from dspark_cache.shard_file import write_tensors
from dspark_cache.target import Target, load_target
from dspark_cache.target_weights import read_target_weight_modules
from dspark_cache.tokens import Tokens
from tests.repository import GOLDEN, Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
LAYERS = [-1, 1, 3]
SIZE = 64
SHARD = "shard-000000.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("recompute") / "repository"
    settings: dict[str, Any] = {"data": {"seq_length": 64}, "target": {"layer_ids": LAYERS}}
    repository = make_repository(root, num_rows=4, **settings)
    repository.run("tokenize", "capture", "shards")
    return repository


@pytest.fixture(scope="module")
def target(published: Repository) -> Target:
    return load_target(published.root / "inputs/target", TargetSettings(), "fp32", CPU)


@pytest.fixture(scope="module")
def samples(published: Repository) -> list[torch.Tensor]:
    tokens = Tokens(published.root / "tokens")
    return [tokens.input_ids(index) for index in range(len(tokens))]


@pytest.fixture(scope="module")
def recomputed(target: Target, samples: list[torch.Tensor]) -> dict[int, Recomputed]:
    return {index: recompute_sample(target, ids, LAYERS, SIZE) for index, ids in enumerate(samples)}


@pytest.fixture
def cache(published: Repository, tmp_path: Path) -> Path:
    """A copy of the cache, to doctor."""
    return shutil.copytree(published.root / "cache", tmp_path / "cache")


def compare(cache: Path, recomputed: dict[int, Recomputed], head: torch.Tensor | None = None) -> Comparison:
    if head is None:
        head = read_target_weight_modules(cache)[1].weight
    return compare_recomputed(CachedDSparkDataset(cache), recomputed, head, LAYERS, "fp32")


def states_in(comparison: Comparison) -> set[str]:
    """Return the states that differ, checking that every finding names shard and sample."""
    assert all(finding.level == "recompute" and finding.file == SHARD for finding in comparison.findings)
    words = [
        finding.message.partition(": ")[2].partition(" differs from the target's")[0] for finding in comparison.findings
    ]
    return set(words)


def doctor(cache: Path, index: int, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of one sample."""
    path = cache / SHARD
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change({key: value[index] for key, value in tensors.items()})
    with put_file(path) as temporary:
        write_tensors(temporary, {key: tensors[key] for key in CACHE_KEYS})


@torch.inference_mode()
def states_of(target: Target, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the residual after the embedding and each layer [N+1 of [T, H]], pre-norm, and the final norm's output."""
    outputs: list[torch.Tensor] = []
    handles = [layer.register_forward_hook(lambda _m, _a, out: outputs.append(out[0])) for layer in target.layers]
    base = target.base(input_ids=ids.long()[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return [target.embed_weight[ids.long()], *outputs], base.last_hidden_state[0]


# Sound caches


def test_a_sound_cache_agrees(cache: Path, recomputed: dict[int, Recomputed]) -> None:
    comparison = compare(cache, recomputed)
    assert comparison.findings == []
    assert comparison.worst.keys() == {"layer -1", "layer 1", "layer 3", "last hidden", "logits"}
    assert all(0 < difference <= 4e-3 for difference in comparison.worst.values())


@pytest.mark.parametrize("model", ["qwen3-tiny", "llama-tied-tiny", "gemma3-text-tiny", "gemma4-tiny"])
def test_what_passes_by_is_what_the_layers_and_lm_head_give(model: str) -> None:
    target = load_target(GOLDEN / "models" / model, TargetSettings(), "fp32", CPU)
    size, last_layer = target.embed_weight.shape[1], len(target.layers) - 1
    ids = torch.arange(20, 43)
    found = recompute_sample(target, ids, [-1, 0, 2, last_layer], size)
    with torch.inference_mode():
        output = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    expected = [output.hidden_states[index][0] for index in (0, 1, 3, last_layer + 1)]
    assert torch.equal(found.hidden, torch.cat(expected, dim=-1))
    assert torch.equal(found.last, expected[-1])
    assert found.positions.tolist() == [0, 3, 6, 9, 12, 15, 18, 22]
    assert torch.equal(found.logits, output.logits[0, found.positions])


def test_logits_are_those_before_the_soft_cap() -> None:
    """Of a gemma model with a cap: what lm_head gives is kept, not what the model makes of it."""
    target = load_target(GOLDEN / "models" / "gemma3-text-tiny", TargetSettings(), "fp32", CPU)
    target.model.config.final_logit_softcapping = 1e-3
    found = recompute_sample(target, torch.arange(20, 25), [0], 32)
    assert torch.allclose(found.logits, found.last[found.positions] @ target.head_weight.T, rtol=1e-4, atol=1e-6)
    assert float(found.logits.abs().max()) > 1e-3


def test_a_short_sample_keeps_all_its_logits(target: Target) -> None:
    found = recompute_sample(target, torch.tensor([5, 6, 7]), [1], SIZE)
    assert found.positions.tolist() == [0, 1, 2]
    assert found.logits.shape == (3, 1024)
    assert LOGIT_POSITIONS == 8


# Doctored caches


def test_a_last_hidden_state_from_before_the_norm_is_refused(
    cache: Path, target: Target, samples: list[torch.Tensor], recomputed: dict[int, Recomputed]
) -> None:
    residuals, _ = states_of(target, samples[1])
    doctor(cache, 1, lambda sample: sample[LAST_HIDDEN][: len(samples[1])].copy_(residuals[-1]))
    assert states_in(compare(cache, recomputed)) == {"last hidden", "logits"}


@pytest.mark.parametrize("shift", [1, -1])
def test_a_last_hidden_state_shifted_by_one_position_is_refused(
    cache: Path, samples: list[torch.Tensor], recomputed: dict[int, Recomputed], shift: int
) -> None:
    tokens = len(samples[1])
    doctor(cache, 1, lambda sample: sample[LAST_HIDDEN][:tokens].copy_(sample[LAST_HIDDEN][:tokens].roll(shift, 0)))
    assert states_in(compare(cache, recomputed)) == {"last hidden", "logits"}


def test_two_layers_swapped_are_refused(cache: Path, recomputed: dict[int, Recomputed]) -> None:
    def swap(sample: dict[str, torch.Tensor]) -> None:
        first, second, third = sample[HIDDEN].split(SIZE, dim=-1)
        sample[HIDDEN].copy_(torch.cat([first, third, second], dim=-1))

    doctor(cache, 2, swap)
    assert states_in(compare(cache, recomputed)) == {"layer 1", "layer 3"}


def test_ids_off_by_one_layer_are_refused(
    cache: Path, target: Target, samples: list[torch.Tensor], recomputed: dict[int, Recomputed]
) -> None:
    """As where layer id i is taken for hidden_states[i]: -1 would be the last layer."""
    residuals, last = states_of(target, samples[0])
    wrong = torch.cat([last, residuals[1], residuals[3]], dim=-1)
    doctor(cache, 0, lambda sample: sample[HIDDEN][: len(samples[0])].copy_(wrong))
    assert states_in(compare(cache, recomputed)) == {"layer -1", "layer 1", "layer 3"}


def test_states_of_another_sample_are_refused(cache: Path, recomputed: dict[int, Recomputed]) -> None:
    other = CachedDSparkDataset(cache)[3]
    doctor(cache, 1, lambda sample: [sample[key].copy_(other[key]) for key in (HIDDEN, LAST_HIDDEN)])
    assert states_in(compare(cache, recomputed)) == {"layer -1", "layer 1", "layer 3", "last hidden", "logits"}


def test_a_single_wrong_token_is_named(cache: Path, recomputed: dict[int, Recomputed]) -> None:
    doctor(cache, 1, lambda sample: sample[HIDDEN][7, :SIZE].mul_(1.02))
    (finding,) = compare(cache, recomputed).findings
    assert finding.message.startswith("sample 1: layer -1 differs from the target's by a relative L2 of 0.0")
    assert finding.message.endswith(" at token 7, at most 0.005 is expected")


def test_a_state_that_is_not_a_number_is_refused(cache: Path, recomputed: dict[int, Recomputed]) -> None:
    doctor(cache, 1, lambda sample: sample[HIDDEN][7, 0].fill_(float("nan")))
    assert states_in(compare(cache, recomputed)) == {"layer -1"}


def test_foreign_head_weights_are_refused(cache: Path, target: Target, recomputed: dict[int, Recomputed]) -> None:
    assert states_in(compare(cache, recomputed, target.embed_weight)) == {"logits"}
    rows = read_target_weight_modules(cache)[1].weight
    assert states_in(compare(cache, recomputed, rows.roll(1, 0))) == {"logits"}


def test_a_foreign_target_is_refused(cache: Path, samples: list[torch.Tensor]) -> None:
    """The golden model of the same family and sizes, but other weights."""
    other = load_target(GOLDEN / "models" / "qwen3-tiny", TargetSettings(), "fp32", CPU)
    ids = samples[0].clamp_max(700)
    comparison = compare(cache, {0: recompute_sample(other, ids, LAYERS, SIZE)}, other.head_weight)
    assert states_in(comparison) == {"layer -1", "layer 1", "layer 3", "last hidden", "logits"}


# Hooks


def hooks(target: Target) -> int:
    modules = list(target.model.modules())
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def test_hooks_are_removed_also_after_an_error(target: Target) -> None:
    before = hooks(target)
    recompute_sample(target, torch.tensor([5, 6]), LAYERS, SIZE)
    assert hooks(target) == before
    with pytest.raises(IndexError):
        recompute_sample(target, torch.tensor([5, 5000]), LAYERS, SIZE)
    assert hooks(target) == before
    with pytest.raises(CaptureError, match=r"lm_head's input: expected a state \[1, 2, 32\], the target gave"):
        recompute_sample(target, torch.tensor([5, 6]), LAYERS, 32)
    assert hooks(target) == before


@pytest.mark.parametrize(("silent", "layer"), [(0, -1), (1, 1), (3, 3)])
def test_a_layer_that_does_not_fire_is_named(target: Target, silent: int, layer: int) -> None:
    """The list of layers is not the one that runs."""
    layers = list(target.layers)
    layers[silent] = torch.nn.Identity()
    broken = dataclasses.replace(target, layers=torch.nn.ModuleList(layers))
    with pytest.raises(CaptureError) as error:
        recompute_sample(broken, torch.tensor([5, 6]), LAYERS, SIZE)
    assert str(error.value) == f"layer {layer}: the target gave no such state"


class Headless(torch.nn.Module):
    """A model whose lm_head is not asked, or only for the last tokens."""

    def __init__(self, target: Target, *, keep: int) -> None:
        super().__init__()
        self.target, self.keep = target, keep

    def get_output_embeddings(self) -> torch.nn.Module:
        head: torch.nn.Module = self.target.model.get_output_embeddings()
        return head

    def forward(self, **arguments: Any) -> Any:
        if self.keep:
            return self.target.model(logits_to_keep=self.keep, **arguments)
        return self.target.base(**arguments)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0, "lm_head's input: the target gave no such state"),
        (1, "lm_head's input: expected a state [1, 2, 64], the target gave [1, 1, 64]"),
    ],
)
def test_an_lm_head_that_does_not_run_for_every_token_is_refused(target: Target, keep: int, message: str) -> None:
    broken = dataclasses.replace(target, model=Headless(target, keep=keep))
    with pytest.raises(CaptureError) as error:
        recompute_sample(broken, torch.tensor([5, 6]), [1], SIZE)
    assert str(error.value) == message


# The choice of samples


@pytest.mark.parametrize(
    ("keys", "lengths", "count", "expected"),
    [
        ("dcba", [3, 9, 1, 5], 4, [1, 2, 3, 0]),  # longest, shortest, then by key
        ("dcba", [3, 9, 1, 5], 2, [1, 2]),
        ("dcba", [3, 9, 1, 5], 1, [1]),
        ("dcba", [3, 9, 1, 5], 9, [1, 2, 3, 0]),
        ("dcba", [3, 9, 1, 5], 0, []),
        ("abab", [3, 9, 3, 9], 4, [1, 0]),  # the same ids once
        ("a", [3], 4, [0]),
        ("ba", [3, 3], 2, [0, 1]),
    ],
)
def test_chosen_samples(keys: str, lengths: list[int], count: int, expected: list[int]) -> None:
    assert choose_samples(list(keys), lengths, count) == expected


def test_the_choice_depends_on_the_samples_and_not_on_their_order() -> None:
    keys, lengths = list("gfedcba"), [4, 1, 7, 3, 3, 2, 5]
    chosen = {keys[index] for index in choose_samples(keys, lengths, 4)}
    backwards = choose_samples(keys[::-1], lengths[::-1], 4)
    assert {keys[::-1][index] for index in backwards} == chosen


# Tolerance


def test_relative_l2_is_per_token() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    found = torch.tensor([[3.0, 4.5], [0.0, 0.0], [0.0, 0.0]], dtype=torch.bfloat16)
    assert relative_l2(found, expected).tolist() == pytest.approx([0.1, 1.0, 0.0])


@pytest.mark.parametrize(
    ("compute", "stored", "state", "expected"),
    [
        ("fp32", "fp32", "layer 1", 1e-3),
        ("fp32", "bf16", "last hidden", 5e-3),
        ("bf16", "bf16", "layer 1", 5.4e-2),
        ("fp16", "fp16", "layer 1", 1.1e-2),
        ("fp32", "fp32", "logits", 1e-2),
    ],
)
def test_tolerances(compute: str, stored: str, state: str, expected: float) -> None:
    assert tolerance(compute, stored, state) == pytest.approx(expected)


# What is kept in scratch


def test_a_recomputed_sample_is_kept_and_read_back(tmp_path: Path, recomputed: dict[int, Recomputed]) -> None:
    path = tmp_path / "recomputed.safetensors"
    with pytest.raises(CacheNotFoundError):
        read_recomputed(path)
    put_recomputed(path, recomputed[0])
    found = read_recomputed(path)
    for field in dataclasses.fields(Recomputed):
        assert torch.equal(getattr(found, field.name), getattr(recomputed[0], field.name))
    path.unlink()
    path.touch()
    write_tensors(path, {"hidden": torch.zeros(1)})
    with pytest.raises(CacheFormatError, match=r"missing required keys \['last', 'positions', 'logits'\]"):
        read_recomputed(path)


@pytest.fixture
def repository(published: Repository, tmp_path: Path) -> Repository:
    return Repository(shutil.copytree(published.root, tmp_path / "repository"))


def test_a_second_verification_of_the_same_states_needs_no_target(repository: Repository) -> None:
    repository.run("verify")
    first = repository.digests("reports")
    kept = list(repository.root.glob(".work/capture-*/recomputed-*.safetensors"))
    assert len(kept) == 4
    (repository.root / "inputs/target/model.safetensors").unlink()
    repository.run("verify")
    assert repository.digests("reports") == first


def test_a_target_that_is_no_longer_the_captured_one_is_refused(repository: Repository) -> None:
    path = repository.root / "inputs/target/model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(InputError, match=r"^the target is not the one that was captured: "):
        repository.run("verify")
    repository.set_params(verify={"recompute_samples": 0})
    repository.run("verify")
