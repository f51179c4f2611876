"""States of padded batches against plain forwards of each sample alone; blocks, interrupted runs, refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import shutil
import threading
import weakref
from functools import cache, partial
from itertools import chain, count, repeat
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dspark_cache.blocks import Block, BlockStore, PlannedBlock, Slice, block_name
from dspark_cache.capture import (
    BlockCapturer,
    Crew,
    Due,
    Wanted,
    compute_blocks,
    environment_differences,
    holding,
    host_blocks,
    plan_due,
)
from dspark_cache.errors import CaptureError, SettingsError, Terminated
from dspark_cache.forward import Capturer, States, capture_environment, check_state, pick_device
from dspark_cache.ranks import Group, PeerLostError, Peers, Rank, SharedProgress
from dspark_cache.recompute import relative_l2
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.settings import RuntimeSettings, TargetSettings
from dspark_cache.target import Target, load_target
from dspark_cache.tokens import sample_key
from tests.repository import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

MODELS = ("qwen3-tiny", "llama-tied-tiny", "gemma3-text-tiny", "gemma4-tiny")
CPU = torch.device("cpu")
LENGTHS = (5, 1, 40, 17, 2, 40)
"""Sliding windows of the gemma models are 16 wide."""


def load(model: str) -> Target:
    return load_target(GOLDEN / "models" / model, TargetSettings(), "fp32", CPU)


@cache
def shared(model: str) -> Target:
    """A target that no test changes."""
    return load(model)


def make_samples(lengths: Sequence[int] = LENGTHS, vocab: int = 600) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(20, vocab, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def hidden_size(target: Target) -> int:
    return target.embed_weight.shape[1]


def some_layers(target: Target) -> list[int]:
    return [-1, 0, 2, len(target.layers) - 1]


@torch.inference_mode()
def plain_states(target: Target, sample: torch.Tensor, layer_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sample alone and unpadded through the whole model; the last of hidden_states is post-norm."""
    states = target.model(input_ids=sample.long()[None], output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == len(target.layers) + 1
    return torch.cat([states[layer + 1][0] for layer in layer_ids], dim=-1), states[-1][0]


def assert_close(found: torch.Tensor, expected: torch.Tensor, size: int) -> None:
    assert found.shape == expected.shape
    for one, other in zip(found.split(size, dim=-1), expected.split(size, dim=-1), strict=True):
        assert float(relative_l2(one, other).max()) <= 1e-5


# One batch


@pytest.mark.parametrize("order", [range(6), (5, 3, 1, 0, 2, 4), (1,), (2, 5)])
@pytest.mark.parametrize("model", MODELS)
def test_a_padded_batch_gives_what_each_sample_alone_gives(model: str, order: Sequence[int]) -> None:
    target = shared(model)
    layer_ids, size = some_layers(target), hidden_size(target)
    samples = [make_samples()[index] for index in order]
    states = Capturer(target, layer_ids, size)(samples)
    alone = [plain_states(target, sample, layer_ids) for sample in samples]
    assert_close(states.hidden, torch.cat([hidden for hidden, _ in alone]), size)
    assert_close(states.last, torch.cat([last for _, last in alone]), size)
    assert states.finite.tolist() == [True] * sum(len(sample) for sample in samples)
    assert torch.equal(states.hidden[:, -size:], states.last)


def test_a_sample_does_not_depend_on_its_neighbours_or_on_padding() -> None:
    target = shared("qwen3-tiny")
    sample, *others = make_samples([9, 9, 4, 30])
    alone = Capturer(target, [-1, 2], 64)([sample])
    for batch in ([sample, others[0]], [sample, others[1]], [sample, others[2]], [sample, others[2], others[0]]):
        states = Capturer(target, [-1, 2], 64)(batch)
        assert_close(states.hidden[:9], alone.hidden, 64)
        assert_close(states.last[:9], alone.last, 64)


def test_a_model_left_in_training_gives_the_same_states_and_keeps_nothing_of_a_call() -> None:
    expected = Capturer(shared("qwen3-tiny"), [1, 5], 64)(make_samples())
    target = load("qwen3-tiny")
    model = target.model
    for layer in target.layers:
        layer.self_attn.attention_dropout = 0.5
    model.config.use_cache = True
    model.train()
    model.activation_checkpointing_enable()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    capturer = Capturer(target, [1, 5], 64)
    hooks = []
    for _ in range(2):
        states = capturer(make_samples())
        assert torch.equal(states.hidden, expected.hidden)
        assert torch.equal(states.last, expected.last)
        assert not states.hidden.requires_grad
        hooks.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert hooks[0] == hooks[1]  # transformers adds its own at the first call that asks for states, and keeps them


@pytest.mark.parametrize("lengths", [(1,), (2, 2), (3, 1, 2)])
def test_a_batch_as_wide_as_it_is_high(lengths: tuple[int, ...]) -> None:
    target = shared("qwen3-tiny")
    samples = make_samples(lengths)
    states = Capturer(target, [1, 3], 64)(samples)
    alone = [plain_states(target, sample, [1, 3]) for sample in samples]
    assert_close(states.hidden, torch.cat([hidden for hidden, _ in alone]), 64)
    assert_close(states.last, torch.cat([last for _, last in alone]), 64)


@pytest.mark.parametrize("layer_ids", [[-1], [5], [1, 4]])
def test_any_selection_of_layers(layer_ids: list[int]) -> None:
    target = shared("qwen3-tiny")
    (sample,) = make_samples([9])
    states = Capturer(target, layer_ids, 64)([sample])
    hidden, last = plain_states(target, sample, layer_ids)
    assert_close(states.hidden, hidden, 64)
    assert_close(states.last, last, 64)


@pytest.mark.parametrize("model", MODELS)
def test_lm_head_never_runs(model: str) -> None:
    target = shared(model)
    calls: list[object] = []
    hook = target.model.get_output_embeddings().register_forward_pre_hook(lambda *args: calls.append(args))
    Capturer(target, [0, 2], hidden_size(target))(make_samples())
    assert calls == []
    plain_states(target, make_samples()[0], [0])
    hook.remove()
    assert len(calls) == 1


def test_only_the_states_asked_for_are_kept_and_the_last_layer_s_is_the_final_norm_s() -> None:
    """Not every family has the final norm's output as its last hidden state, so that one is not asked for."""
    target = shared("qwen3-tiny")
    asked: list[Any] = []
    hook = target.base.register_forward_pre_hook(
        lambda _module, _args, kwargs: asked.append(kwargs["output_hidden_states"]), with_kwargs=True
    )
    for layer_ids in ([-1, 0, 2, 5], [5]):
        Capturer(target, layer_ids, 64)(make_samples([3]))
    hook.remove()
    assert asked == [[0, 1, 3], False]


def test_no_attention_mask_is_passed_though_rows_differ_in_length() -> None:
    """Padding is on the right; a mask would only be looked at, and keep attention from its fastest kernel."""
    target = shared("qwen3-tiny")
    given: list[dict[str, Any]] = []
    hook = target.base.register_forward_pre_hook(lambda _module, _args, kwargs: given.append(kwargs), with_kwargs=True)
    Capturer(target, [0], 64)(make_samples([3, 5]))
    hook.remove()
    (kwargs,) = given
    assert kwargs.keys() == {"input_ids", "use_cache", "output_hidden_states", "return_dict"}
    assert kwargs["input_ids"].shape == (2, 5)


def test_an_idle_forward_goes_through_the_whole_base() -> None:
    """Every layer, as where they are sharded each is a collective."""
    target = shared("qwen3-tiny")
    widths: list[tuple[int, ...]] = []
    hooks = [
        module.register_forward_hook(lambda _module, args, _output: widths.append(tuple(args[0].shape[:2])))
        for module in target.layers
    ]
    Capturer(target, [0], 64).idle()
    for hook in hooks:
        hook.remove()
    assert widths == [(1, 1)] * len(target.layers)


def test_forwards_keep_nothing_for_gradients_though_weights_ask_for_them() -> None:
    target = load("qwen3-tiny")
    target.model.requires_grad_(True)
    outputs: list[bool] = []
    target.base.register_forward_hook(lambda *args: outputs.append(args[2].last_hidden_state.requires_grad))
    capturer = Capturer(target, [0], 64)
    states = capturer(make_samples([3]))
    assert not states.hidden.requires_grad
    assert not states.last.requires_grad
    capturer.idle()
    assert outputs == [False, False]


# The shape of a state


def test_a_state_of_the_expected_shape_is_taken_as_it_is() -> None:
    state = torch.randn(2, 5, 4)
    assert check_state(state, "layer 1", (2, 5, 4)) is state


def test_parallel_streams_are_averaged_wherever_their_dimension_is() -> None:
    streams = torch.randn(2, 5, 3, 4)
    assert torch.equal(check_state(streams, "layer 1", (2, 5, 4)), streams.mean(dim=2))
    streams = torch.randn(3, 2, 5, 4)
    assert torch.equal(check_state(streams, "layer 1", (2, 5, 4)), streams.mean(dim=0))


@pytest.mark.parametrize("shape", [(2, 4, 4), (5, 2, 4), (2, 5, 8), (10, 4), (2, 5, 3, 8), (3, 7, 2, 4)])
def test_a_state_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CaptureError) as error:
        check_state(torch.zeros(shape), "layer 1", (2, 5, 4))
    found = [2, 5, 8] if shape == (2, 5, 3, 8) else list(shape)
    assert str(error.value) == f"layer 1: expected a state [2, 5, 4], the target gave {found}"


def test_a_missing_state_is_refused() -> None:
    with pytest.raises(CaptureError) as error:
        check_state(None, "last hidden state", (2, 5, 4))
    assert str(error.value) == "last hidden state: the target gave no such state"


def test_a_target_of_another_width_is_refused() -> None:
    with pytest.raises(CaptureError) as error:
        Capturer(shared("qwen3-tiny"), [0], 32)(make_samples([3]))
    assert str(error.value) == "last hidden state: expected a state [1, 3, 32], the target gave [1, 3, 64]"


def test_fewer_rows_than_tokens_are_refused() -> None:
    """As with prefix caching: the target gives states of the last tokens only."""
    target = load("qwen3-tiny")

    def shorten(_module: object, _args: object, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, 1:]
        return output

    target.base.register_forward_hook(shorten)
    with pytest.raises(CaptureError) as error:
        Capturer(target, [3], 64)(make_samples([5]))
    assert str(error.value) == "last hidden state: expected a state [1, 5, 64], the target gave [1, 4, 64]"


def test_another_number_of_states_than_layers_is_refused() -> None:
    target = load("qwen3-tiny")

    def forget_one(_module: object, _args: object, output: Any) -> Any:
        output.hidden_states = output.hidden_states[:-1]
        return output

    target.base.register_forward_hook(forget_one)
    with pytest.raises(CaptureError) as error:
        Capturer(target, [3], 64)(make_samples([5]))
    assert str(error.value) == (
        "expected 7 hidden states, the embedding's and one a layer, the target gave 6: layer ids do not name them"
    )


def test_the_first_state_that_is_not_finite_is_named() -> None:
    capturer = Capturer(shared("qwen3-tiny"), [-1, 2], 64)
    states = States(hidden=torch.zeros(3, 128), last=torch.zeros(3, 64), finite=torch.ones(3))
    assert capturer.bad_layer(states) == "last hidden state"
    states.hidden[1, 64] = float("inf")
    assert capturer.bad_layer(states) == "layer 2"
    states.hidden[2, 63] = float("nan")
    assert capturer.bad_layer(states) == "layer -1"


# Devices


def test_devices() -> None:
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert pick_device("cpu") == CPU


@pytest.mark.parametrize("name", ["gpu", "meta", ""])
def test_another_kind_of_device_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^runtime.device: expected auto, cpu, cuda or cuda:N, found '{name}'$"):
        pick_device(name)


@pytest.mark.parametrize("name", ["cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^runtime.device: '{name}' cannot be used on this machine: .+"):
        pick_device(name)


# Blocks

IDENTITY = {"hidden_size": 64, "target_layer_ids": [0, 3], "compute_dtype": "fp32"}
BYTES_PER_TOKEN = 64 * 3 * 4
RUNTIME = RuntimeSettings(max_tokens_per_batch=64)


class Run:
    """One call of `plan_due` and `compute_blocks` on a scratch folder, as one rank alone, noting what it asks for."""

    def __init__(self, scratch: Path, samples: Sequence[torch.Tensor]) -> None:
        self.store = BlockStore(scratch, IDENTITY)
        self.ids = {sample_key(sample): sample for sample in samples}
        self.environment: dict[str, Any] = {"accelerator": "cpu"}
        self.loads = 0
        """How often the target was asked for."""
        self.computed: list[tuple[str, ...]] = []
        """The samples of each block, in the order in which blocks were computed."""
        self.units = 0
        """What progress showed at the end."""

    @property
    def lengths(self) -> dict[str, int]:
        return {key: len(ids) for key, ids in self.ids.items()}

    def __call__(
        self,
        target: Target | None = None,
        *,
        capturer: Capturer | None = None,
        block_bytes: int = 50 * BYTES_PER_TOKEN,
        runtime: RuntimeSettings = RUNTIME,
        drop: bool = False,
        read_ids: Callable[[str], torch.Tensor] | None = None,
    ) -> dict[str, Block]:
        read_ids = read_ids or self.ids.__getitem__

        def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
            self.computed.append(planned.samples)
            return planned, [read_ids(key) for key in planned.samples]

        with self.store.lock():
            self.store.prepare()
            due = plan_due(self.store, Wanted(lengths=self.lengths), block_bytes=block_bytes, runtime=runtime)
            if not due.blocks:
                return due.present
            self.loads += 1
            largest = max(sum(self.lengths[key] for key in block.samples) for block in due.blocks) * BYTES_PER_TOKEN
            peers, total = Peers.alone(), sum(self.lengths.values())
            with SharedProgress.of(peers, "capture", total, "tok", done=total - due.num_tokens) as progress:
                compute_blocks(
                    due.blocks,
                    read_block,
                    self.block_capturer(
                        capturer or Capturer(target or shared("qwen3-tiny"), [0, 3], 64), runtime, drop
                    ),
                    Crew(peers=peers, group=Group(), parallelism="replicate"),
                    progress,
                    host_blocks(runtime.host_memory_gb, largest) - 1,
                )
            self.units = peers.add("units", 0)
            return holding(self.store.finished_blocks()[0], self.lengths)

    def plan(self, **values: Any) -> Due:
        """Ask what is due, as a run does."""
        with self.store.lock():
            self.store.prepare()
            values = {"block_bytes": 50 * BYTES_PER_TOKEN, "runtime": RUNTIME, **values}
            return plan_due(self.store, Wanted(lengths=self.lengths), **values)

    def block_capturer(
        self, capturer: Capturer, runtime: RuntimeSettings, drop: bool = False, *, in_lockstep: bool = False
    ) -> BlockCapturer:
        names = {key: f"sample {index}" for index, key in enumerate(self.ids)}
        return BlockCapturer(
            capturer,
            self.store,
            {**self.environment, "max_tokens_per_batch": runtime.max_tokens_per_batch},
            drop_nonfinite=drop,
            describe=names.__getitem__,
            in_lockstep=in_lockstep,
        )

    def digests(self) -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in self.store.folder.iterdir()}


def test_blocks_hold_the_states_of_their_samples(tmp_path: Path) -> None:
    run = Run(tmp_path, make_samples())
    blocks = run()
    keys = list(run.ids)
    samples = {(5, 1, 40): tuple(keys[:3]), (17, 2): tuple(keys[3:5]), (40,): tuple(keys[5:])}
    assert {block.lengths: block.samples for block in blocks.values()} == samples
    assert list(blocks) == sorted(map(block_name, samples.values()))
    assert all(name == block.name == block_name(block.samples) for name, block in blocks.items())
    assert run.computed == [samples[5, 1, 40], samples[(40,)], samples[17, 2]]  # the longest first
    assert run.units == sum(LENGTHS)
    for name, block in blocks.items():
        path = run.store.path(name)
        content = load_file(path)
        assert content.keys() == {HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS}
        assert content[SAMPLE_OFFSETS].diff().tolist() == list(block.lengths)
        alone = [plain_states(shared("qwen3-tiny"), run.ids[key], [0, 3]) for key in block.samples]
        assert_close(content[HIDDEN], torch.cat([hidden for hidden, _ in alone]), 64)
        assert_close(content[LAST_HIDDEN], torch.cat([last for _, last in alone]), 64)
        assert block.num_bytes == path.stat().st_size
        assert block.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        budgets = {"max_tokens_per_batch": 64, "used_tokens_per_batch": 64}
        assert block.environment == {"accelerator": "cpu", **budgets}
        assert Block.parse(json.loads(path.with_suffix(".json").read_text()), name=name) == block


def test_with_everything_present_nothing_is_loaded_or_asked(tmp_path: Path) -> None:
    run = Run(tmp_path, make_samples())
    blocks, before = run(), run.digests()
    assert run.loads == 1
    assert run(block_bytes=1) == blocks
    assert run.loads == 1
    assert run.digests() == before


def test_appended_samples_alone_are_computed_and_others_leave_no_trace(tmp_path: Path) -> None:
    samples = make_samples()
    blocks = Run(tmp_path, samples[:3])()
    more = Run(tmp_path, samples)
    with_more = more()
    assert {name: with_more[name] for name in blocks} == blocks
    added = [key for name, block in with_more.items() if name not in blocks for key in block.samples]
    keys = list(more.ids)
    assert sorted(added) == sorted(keys[3:])
    assert more.units == sum(LENGTHS[3:])
    assert list(Run(tmp_path, samples[4:5])()) == [block_name(keys[3:5])]


@pytest.mark.parametrize("interrupted_at", range(4))
def test_a_resumed_run_gives_the_bytes_of_an_undisturbed_one(tmp_path: Path, interrupted_at: int) -> None:
    lengths = (5, 9, 4, 7)
    undisturbed = Run(tmp_path / "whole", make_samples(lengths))
    undisturbed(block_bytes=1)
    run = Run(tmp_path / "resumed", make_samples(lengths))
    keys = sorted(run.ids, key=lambda key: -run.lengths[key])  # the longest is computed first

    def read_ids(key: str) -> torch.Tensor:
        if key == keys[interrupted_at]:
            raise KeyboardInterrupt
        return run.ids[key]

    one_block = RuntimeSettings(host_memory_gb=9 * BYTES_PER_TOKEN / 2**30, max_tokens_per_batch=64)
    with pytest.raises(KeyboardInterrupt):
        run(block_bytes=1, read_ids=read_ids, runtime=one_block)
    kept, _ = run.store.finished_blocks()
    assert {block.samples for block in kept.values()} == {(key,) for key in keys[:interrupted_at]}
    times = {name: run.store.path(name).stat().st_mtime_ns for name in kept}
    run(block_bytes=10**9)  # another size: the plan of the first run is followed
    assert {name: run.store.path(name).stat().st_mtime_ns for name in kept} == times
    assert run.digests() == undisturbed.digests()


def test_a_truncated_block_is_computed_again_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, make_samples())
    run()
    before = run.digests()
    path = run.store.path(block_name(list(run.ids)[3:5]))
    path.write_bytes(path.read_bytes()[:-1])
    caplog.set_level(logging.WARNING, logger="dspark_cache.capture")
    run()
    assert run.digests() == before
    (message,) = caplog.messages
    assert message.startswith(f"not accepted, computed again: {path} has ")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_slices_share_out_what_is_due_whenever_they_start(tmp_path: Path, count: int) -> None:
    run = Run(tmp_path, make_samples((5, 9, 4, 7, 12)))
    parts = [Slice(number, count) for number in range(1, count + 1)]
    whole = run.plan(block_bytes=1)
    (run.store.folder / "plan.json").unlink()
    dues = [run.plan(block_bytes=1, part=part) for part in parts]
    assert sorted(block.name for due in dues for block in due.blocks) == sorted(block.name for block in whole.blocks)
    assert [due.num_tokens for due in dues] == [
        sum(run.lengths[key] for block in due.blocks for key in block.samples) for due in dues
    ]
    done = whole.blocks[0]  # the longest; then others begin
    run.ids, rest = {key: run.ids[key] for key in done.samples}, run.ids
    assert list(run(block_bytes=1)) == [done.name]
    run.ids = rest
    later = [run.plan(block_bytes=1, part=part).blocks for part in parts]
    assert later == [tuple(block for block in due.blocks if block != done) for due in dues]


def test_what_is_due_comes_longest_first_and_then_by_name(tmp_path: Path) -> None:
    run = Run(tmp_path, make_samples((5, 9, 5, 7, 5)))
    due = run.plan(block_bytes=1)
    assert [run.lengths[block.samples[0]] for block in due.blocks] == [9, 7, 5, 5, 5]
    assert [block.name for block in due.blocks[2:]] == sorted(block.name for block in due.blocks[2:])
    assert due.num_tokens == 31


def test_the_order_of_samples_decides_the_blocks_and_not_their_states(tmp_path: Path) -> None:
    samples = make_samples()
    forward, backward = Run(tmp_path / "a", samples), Run(tmp_path / "b", samples[::-1])
    states = [states_by_sample(run, run()) for run in (forward, backward)]
    assert states[0].keys() == states[1].keys()
    for key, (hidden, last) in states[0].items():
        assert_close(hidden, states[1][key][0], 64)
        assert_close(last, states[1][key][1], 64)


def states_by_sample(run: Run, blocks: Mapping[str, Block]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for name, block in blocks.items():
        content = load_file(run.store.path(name))
        parts = zip(content[HIDDEN].split(block.lengths), content[LAST_HIDDEN].split(block.lengths), strict=True)
        found.update(zip(block.samples, parts, strict=True))
    return found


# Numbers that are not finite


@pytest.fixture
def broken() -> Target:
    """A target whose embedding of token 7 is not a number."""
    target = load("qwen3-tiny")
    target.embed_weight[7] = float("nan")
    return target


def with_token_7(lengths: Sequence[int], *bad: int) -> list[torch.Tensor]:
    samples = make_samples(lengths)
    for index in bad:
        samples[index][-1] = 7
    return samples


def test_a_sample_that_is_not_finite_stops_the_run_by_name_and_keeps_earlier_blocks(
    tmp_path: Path, broken: Target
) -> None:
    run = Run(tmp_path, with_token_7((5, 9, 4), 2))
    with pytest.raises(CaptureError) as error:
        run(broken, block_bytes=10 * BYTES_PER_TOKEN)
    assert str(error.value) == (
        "sample 2: layer 0 holds numbers that are not finite (torch.float32); finished blocks are kept; try "
        "target.compute_dtype: fp32, or target.nonfinite: drop to leave such samples out"
    )
    keys = list(run.ids)
    assert {block.samples for block in run.store.finished_blocks()[0].values()} == {(keys[0],), (keys[1],)}


def test_a_last_hidden_state_alone_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    target = load("qwen3-tiny")
    target.model.model.norm.weight[3] = float("inf")
    with pytest.raises(CaptureError, match=r"^sample 0: last hidden state holds numbers that are not finite"):
        Run(tmp_path, make_samples((5,)))(target)


def test_numbers_that_are_large_but_finite_are_captured(tmp_path: Path) -> None:
    """Their sum, which is looked at first, is not finite."""
    target = load("qwen3-tiny")
    target.model.model.norm.weight *= 3e37
    run = Run(tmp_path, make_samples((17, 9)))
    (block,) = run(target).values()
    last = torch.cat([last for _, last in states_by_sample(run, {block.name: block}).values()])
    assert bool(torch.isfinite(last).all())
    assert not bool(torch.isfinite(last.sum(dim=-1)).all())
    assert block.dropped == {}


def test_dropped_samples_are_listed_and_their_neighbours_are_sound(
    tmp_path: Path, broken: Target, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="dspark_cache.capture")
    run = Run(tmp_path, with_token_7((5, 9, 4, 6), 1, 2))
    (block,) = run(broken, drop=True).values()
    keys = list(run.ids)
    assert block.name == block_name(keys)  # what was planned, whatever is dropped of it
    assert block.samples == (keys[0], keys[3])
    assert block.lengths == (5, 6)
    assert block.dropped == {keys[1]: "layer 0 is not finite", keys[2]: "layer 0 is not finite"}
    assert sorted(caplog.messages) == [
        "sample 1: layer 0 is not finite, the sample is dropped",
        "sample 2: layer 0 is not finite, the sample is dropped",
    ]
    for key, (hidden, last) in states_by_sample(run, {block.name: block}).items():
        expected = plain_states(shared("qwen3-tiny"), run.ids[key], [0, 3])
        assert_close(hidden, expected[0], 64)
        assert_close(last, expected[1], 64)
    assert run(broken, drop=True) == {block.name: block}
    assert run.loads == 1


def test_a_block_of_which_every_sample_was_dropped_is_finished(tmp_path: Path, broken: Target) -> None:
    run = Run(tmp_path, with_token_7((5, 9), 0, 1))
    (block,) = run(broken, drop=True).values()
    assert (block.samples, block.lengths, len(block.dropped)) == ((), (), 2)
    assert run.store.finished_blocks() == ({block.name: block}, [])


# Memory


@pytest.mark.parametrize("gib", [0.0, 1e-6])
def test_too_little_host_memory_is_refused_before_the_target_is_loaded(tmp_path: Path, gib: float) -> None:
    run = Run(tmp_path, make_samples())
    with pytest.raises(SettingsError) as error:
        run(runtime=RuntimeSettings(host_memory_gb=gib))
    assert str(error.value) == (
        f"runtime.host_memory_gb: {gib} GiB hold no block of {46 * BYTES_PER_TOKEN} bytes: raise it, or lower "
        "target.block_bytes"
    )
    assert run.loads == 0


def test_one_block_of_host_memory_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, make_samples())
    blocks = run(runtime=RuntimeSettings(host_memory_gb=46 * BYTES_PER_TOKEN / 2**30, max_tokens_per_batch=64))
    assert len(blocks) == 3


def test_too_little_disk_is_refused_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, make_samples())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(SettingsError) as error:
        run()
    found = re.fullmatch(
        rf"(\d+) bytes of captured states are to be written to {run.store.folder}, where 1 are free: make room, set "
        "runtime.scratch_dir to another disk, or runtime.check_disk: false",
        str(error.value),
    )
    assert found is not None
    assert run.loads == 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=int(found[1])))
    blocks = run()
    assert sum(run.store.path(name).stat().st_size for name in blocks) == int(found[1])
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=0))
    assert run() == blocks  # nothing is missing
    unchecked = Run(tmp_path / "other", make_samples())
    assert len(unchecked(runtime=RuntimeSettings(max_tokens_per_batch=64, check_disk=False))) == len(blocks)


class SmallDevice(Capturer):
    """A capturer that is out of memory beyond so many tokens a batch."""

    limit = 20

    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        if len(samples) * max(len(sample) for sample in samples) > self.limit:
            raise torch.cuda.OutOfMemoryError
        return super().__call__(samples)


def test_out_of_device_memory_the_block_starts_again_with_half_the_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="dspark_cache.capture")
    run = Run(tmp_path, make_samples((5, 9, 4, 6)))
    (block,) = run(capturer=SmallDevice(shared("qwen3-tiny"), [0, 3], 64)).values()
    assert block.environment["used_tokens_per_batch"] == 16
    assert caplog.messages == [
        f"{block.name}: out of device memory, again with 32 tokens a batch",
        f"{block.name}: out of device memory, again with 16 tokens a batch",
    ]
    for key, (hidden, _) in states_by_sample(run, {block.name: block}).items():
        assert_close(hidden, plain_states(shared("qwen3-tiny"), run.ids[key], [0, 3])[0], 64)


def test_what_an_attempt_without_enough_memory_did_is_taken_back(tmp_path: Path) -> None:
    """The first batch fits, the second does not."""
    run = Run(tmp_path, make_samples((20, 7, 7, 7)))
    runtime = RuntimeSettings(max_tokens_per_batch=24)
    (block,) = run(capturer=SmallDevice(shared("qwen3-tiny"), [0, 3], 64), runtime=runtime).values()
    assert block.environment["used_tokens_per_batch"] == 12
    assert run.units == 41


def test_ranks_in_lockstep_do_not_start_again_with_less(tmp_path: Path) -> None:
    """Another number of forwards would leave the others waiting."""
    run = Run(tmp_path, make_samples((5, 9, 4, 6)))
    capturer = run.block_capturer(SmallDevice(shared("qwen3-tiny"), [0, 3], 64), RUNTIME, in_lockstep=True)
    progress = SharedProgress(Peers.alone(), None)
    with pytest.raises(CaptureError) as error:
        capturer.compute(PlannedBlock(tuple(run.ids)), list(run.ids.values()), progress)
    assert str(error.value) == (
        "out of device memory with 64 tokens a batch: set runtime.max_tokens_per_batch to less; ranks that share a "
        "target cannot do so one by one"
    )


def test_a_sample_that_alone_does_not_fit_the_device_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Run(tmp_path, make_samples((5, 21)))(capturer=SmallDevice(shared("qwen3-tiny"), [0, 3], 64))


@pytest.mark.parametrize("number", range(3))
def test_a_block_that_cannot_be_written_fails_the_run(tmp_path: Path, number: int) -> None:
    """Also the last one, whose write nothing else waits for; the others stay."""
    run = Run(tmp_path, make_samples())
    keys = list(run.ids)
    name = block_name((keys[:3], keys[5:], keys[3:5])[number])  # in the order in which they are computed
    run.store.path(name).mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        run()
    assert name not in run.store.finished_blocks()[0]
    run.store.path(name).rmdir()
    assert len(run()) == 3


# Ranks


class Counting(Capturer):
    """A capturer that counts its forwards by their number of samples, 0 for an idle one."""

    def __init__(self) -> None:
        super().__init__(shared("qwen3-tiny"), [0, 3], 64)
        self.forwards: list[int] = []

    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        self.forwards.append(len(samples))
        return super().__call__(samples)

    def idle(self) -> None:
        self.forwards.append(0)
        super().idle()


def test_whoever_follows_or_idles_runs_the_forwards_of_a_block_and_writes_nothing(tmp_path: Path) -> None:
    run, counting = Run(tmp_path, make_samples((20, 7, 7, 7, 3))), Counting()
    capturer = run.block_capturer(counting, RuntimeSettings(max_tokens_per_batch=24))
    samples = list(run.ids.values())
    assert capturer.num_forwards(samples) == 3
    capturer.compute(PlannedBlock(tuple(run.ids)), samples, SharedProgress(Peers.alone(), None))
    capturer.follow(samples)
    capturer.idle(3)
    assert counting.forwards == [1, 3, 1] * 2 + [0] * 3
    assert capturer.num_forwards([]) == 0
    assert not run.store.folder.exists()


def test_a_rank_by_itself_never_idles(tmp_path: Path) -> None:
    counting = Counting()
    Run(tmp_path, make_samples())(capturer=counting)
    assert counting.forwards == [1, 2, 1, 2]  # 40, 5 and 1; 40; 17 and 2


@dataclasses.dataclass(frozen=True)
class Lockstep(Group):
    """A group whose collectives give what the others would: their turns, and the most forwards of each."""

    turns: Iterator[int] = dataclasses.field(default_factory=count)
    forwards: Iterator[int] = dataclasses.field(default_factory=partial(repeat, 4))

    def agree(self, value: int) -> int:
        return value if self.rank == 0 else next(self.turns)

    def most(self, value: int) -> int:
        return max(value, next(self.forwards))


@pytest.mark.parametrize(
    ("rank", "parallelism", "written", "forwards"),
    [
        (0, "fsdp", [0, 2], [[1, 2, 0, 0], [1, 0, 0, 0]]),  # each rank has a block of its own
        (1, "fsdp", [1], [[1, 0, 0, 0], [0, 0, 0, 0]]),  # then there is none for it, but one for the other
        (0, "tensor", [0, 1, 2], [[1, 2, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),  # all have the same, the first writes
        (1, "tensor", [], [[1, 2, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]),
    ],
)
def test_ranks_in_lockstep_run_as_many_forwards_as_the_one_with_the_most(
    tmp_path: Path, rank: int, parallelism: str, written: list[int], forwards: list[list[int]]
) -> None:
    run, counting = Run(tmp_path, make_samples((40, 5, 1, 40, 17))), Counting()
    due = run.plan(block_bytes=46 * BYTES_PER_TOKEN)
    assert [sum(run.lengths[key] for key in block.samples) for block in due.blocks] == [46, 40, 17]
    crew = Crew(peers=Peers.alone(), group=Lockstep(rank, 2), parallelism=parallelism)

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        return planned, [run.ids[key] for key in planned.samples]

    capturer = run.block_capturer(counting, RUNTIME, in_lockstep=True)
    compute_blocks(due.blocks, read_block, capturer, crew, SharedProgress(crew.peers, None), 1)
    assert counting.forwards == list(chain.from_iterable(forwards))
    assert run.store.finished_blocks()[0].keys() == {due.blocks[number].name for number in written}


def crews(count: int, parallelism: str = "replicate") -> list[Crew]:
    """Return ranks with a copy of the target each, who share a store."""
    store = dist.HashStore()
    return [
        Crew(peers=Peers(Rank(number, count, number, count), store), group=Group(), parallelism=parallelism)
        for number in range(count)
    ]


@pytest.mark.parametrize("parallelism", ["replicate", "fsdp", "tensor"])
@pytest.mark.parametrize("turns", [(0, 0, 0, 0), (0, 1, 2, 0), (2, 2, 1, 2)])
def test_each_block_is_taken_once_whoever_is_quicker(parallelism: str, turns: Sequence[int]) -> None:
    ranks = crews(3, parallelism)
    assert [ranks[number].take("abc") for number in turns] == [("a", True), ("b", True), ("c", True), (None, False)]
    assert [rank.take("abc") for rank in ranks] == [(None, False)] * 3


def test_ranks_that_share_the_blocks_write_what_one_writes(tmp_path: Path) -> None:
    """One after the other in one process: the first stops after two blocks, the second takes what is left."""
    alone, run = Run(tmp_path / "alone", make_samples()), Run(tmp_path / "two", make_samples())
    alone(block_bytes=1)
    due = run.plan(block_bytes=1)
    first, second = crews(2)
    taken: list[str] = []

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        taken.append(planned.name)
        if taken == [block.name for block in due.blocks[:2]]:
            compute(second)
        return planned, [run.ids[key] for key in planned.samples]

    def compute(crew: Crew) -> None:
        progress = SharedProgress(crew.peers, None)
        capturer = run.block_capturer(Capturer(shared("qwen3-tiny"), [0, 3], 64), RUNTIME)
        compute_blocks(due.blocks, read_block, capturer, crew, progress, 1)

    compute(first)
    assert taken == [block.name for block in due.blocks]
    assert first.peers.add("units", 0) == due.num_tokens
    assert run.digests() == alone.digests()


def test_a_rank_takes_no_block_more_once_another_has_failed(tmp_path: Path) -> None:
    run = Run(tmp_path, make_samples())
    due = run.plan(block_bytes=1)
    mine, other = crews(2)

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        other.peers.fail("rank 1 on host: no")
        return planned, [run.ids[key] for key in planned.samples]

    capturer = run.block_capturer(Capturer(shared("qwen3-tiny"), [0, 3], 64), RUNTIME)
    with pytest.raises(PeerLostError, match=r"^rank 1 on host: no$"):
        compute_blocks(due.blocks, read_block, capturer, mine, SharedProgress(mine.peers, None), 5)
    assert list(run.store.finished_blocks()[0]) == [due.blocks[0].name]  # what was computed is kept


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_a_run_that_is_told_to_stop_writes_what_is_being_written_and_no_more(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    """A disk that is slow: the second block waits for it until the run is told to stop."""
    run = Run(tmp_path, make_samples())
    due = run.plan(block_bytes=1)
    begun, dropped = threading.Event(), threading.Event()

    class SlowDisk(BlockCapturer):
        def compute(self, planned: PlannedBlock, *arguments: Any) -> Callable[[], Block]:
            write = super().compute(planned, *arguments)

            def wait_and_write() -> Block:
                begun.set()
                assert dropped.wait(60)
                return write()

            if planned != due.blocks[0]:
                weakref.finalize(write, dropped.set)  # nobody will call it any more
                return write
            return wait_and_write

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        if planned == due.blocks[2]:
            assert begun.wait(60)
            raise stop
        return planned, [run.ids[key] for key in planned.samples]

    capturer = SlowDisk(
        Capturer(shared("qwen3-tiny"), [0, 3], 64),
        run.store,
        {"max_tokens_per_batch": 64},
        drop_nonfinite=False,
        describe=str,
    )
    (crew,) = crews(1)
    with pytest.raises(stop):
        compute_blocks(due.blocks, read_block, capturer, crew, SharedProgress(crew.peers, None), 5)
    assert list(run.store.finished_blocks()[0]) == [due.blocks[0].name]


# Environments


def test_differences_of_environments_are_listed_once_and_sorted() -> None:
    present = [
        {"torch": "2.12", "threads": 2, "used_tokens_per_batch": 8},
        {"torch": "2.12"},
        {"torch": "2.12", "threads": 3},
    ]
    assert environment_differences(present, {"torch": "2.13", "threads": 2}) == [
        "threads: 3 then, 2 now",
        "threads: None then, 2 now",
        "torch: '2.12' then, '2.13' now",
    ]
    assert environment_differences(present, {"torch": "2.12"}) == []
    assert environment_differences([], {"torch": "2.12"}) == []


def test_blocks_of_samples_that_are_no_longer_wanted_do_not_count_as_present(tmp_path: Path) -> None:
    """So that a capture that goes on elsewhere is not held to what nobody reads any more."""
    samples = make_samples()
    Run(tmp_path, samples[:2])()
    run = Run(tmp_path, samples[2:])
    assert run.plan().present == {}
    run.environment = {"accelerator": "other"}
    assert {block.environment["accelerator"] for block in run().values()} == {"other"}
    assert len(run.store.finished_blocks()[0]) == 1 + len(run.plan().present)


def test_what_moves_last_bits_is_recorded() -> None:
    environment = capture_environment(CPU, RuntimeSettings(max_tokens_per_batch=5))
    assert environment.pop("transformers")
    assert environment == {
        "accelerator": "cpu",
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "max_tokens_per_batch": 5,
        "parallelism": "replicate",
        "torch": torch.__version__,
    }


def test_how_the_target_is_sharded_is_recorded_where_it_moves_last_bits() -> None:
    """FSDP gathers whole layers, so that the number of ranks does not count."""
    recorded = {
        (parallelism, size): capture_environment(CPU, RuntimeSettings(parallelism=parallelism), size)["parallelism"]
        for parallelism in ("replicate", "fsdp", "tensor")
        for size in (1, 2)
    }
    assert recorded == {
        ("replicate", 1): "replicate",
        ("replicate", 2): "replicate",
        ("fsdp", 1): "fsdp",
        ("fsdp", 2): "fsdp",
        ("tensor", 1): "tensor:1",
        ("tensor", 2): "tensor:2",
    }
