"""Ranks of a real gloo group, each a process of its own, and what the tests of sharding let them do.

The processes are forked by a server that has imported torch and transformers, so that a group starts at once.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers.distributed.configuration_utils import DistributedConfig

from dspark_cache import sharding
from dspark_cache.errors import InputError
from dspark_cache.forward import Capturer
from dspark_cache.ranks import Group, Peers, Rank
from dspark_cache.settings import TargetSettings
from dspark_cache.target import Target, as_target, load_model, read_target_facts
from tests.families import NUM_TEXT_IDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from torch import nn

CPU = torch.device("cpu")

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.fsdp", "transformers.modeling_utils", "accelerate"])


def run_ranks(size: int, folder: Path, task: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Run `task(group, *arguments)` in `size` processes that form a group; return what each of them returned.

    Args:
        size: How many.
        folder: A folder for their store, results and outputs.
        task: Function of a module.
        arguments: Its arguments after the group.
        timeout: Seconds that they may take.

    Raises:
        AssertionError: One failed, with its output, or they took too long.
    """
    folder.mkdir(parents=True)
    processes = [
        _CONTEXT.Process(target=_be_rank, args=(number, size, folder, task, arguments), daemon=True)
        for number in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    running = {process.sentinel: process for process in processes}
    try:
        while running and not any(process.exitcode for process in processes):
            ended = wait(list(running), max(0.0, end - time.monotonic()))
            if not ended:
                for process in running.values():
                    os.kill(process.ident, signal.SIGUSR1)  # it says where it stands
                time.sleep(1)
                raise AssertionError(f"{size} ranks took more than {timeout} s\n{_outputs(folder, range(size))}")
            for sentinel in ended:
                running.pop(sentinel).join()
        failed = [number for number, process in enumerate(processes) if process.exitcode]
    finally:
        for process in processes:
            process.kill()
            process.join()
    if failed:
        raise AssertionError(f"ranks {failed} of {size} failed\n{_outputs(folder, failed)}")
    return [pickle.loads((folder / f"{number}.pickle").read_bytes()) for number in range(size)]


def _outputs(folder: Path, numbers: Iterable[int]) -> str:
    paths = {number: folder / f"{number}.out" for number in numbers}
    return "\n".join(f"rank {n}: {path.read_text()[-4000:]}" for n, path in paths.items() if path.exists())


def _be_rank(number: int, size: int, folder: Path, task: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Be one rank: join the group, run the task, write what it returns, leave."""
    with (folder / f"{number}.out").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.register(signal.SIGUSR1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        peers = Peers(Rank(number, size, number, size), dist.FileStore(str(folder / "store"), size))
        group = Group.join(peers, size, CPU)
        result = task(group, *arguments)
        (folder / f"{number}.pickle").write_bytes(pickle.dumps(result))
        dist.barrier()
        group.leave()
    except BaseException:
        # At once, and without a word to the others: they would report that they lost this one.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def make_batches(number: int, count: int) -> list[list[torch.Tensor]]:
    """Return the batches of a rank: its own samples, each batch of another height and width."""
    generator = torch.Generator().manual_seed(number)
    return [
        [
            torch.randint(0, NUM_TEXT_IDS, (length + number,), generator=generator, dtype=torch.int32)
            for length in (11, 7, 3)[: 1 + (batch + number) % 3]
        ]
        for batch in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one process, or one rank of several, has of a target.

    Attributes:
        states: Hidden and last states of each batch.
        embed: The whole weight of the embedding.
        head: The whole weight of lm_head.
        is_tied: Whether the two are one parameter.
        held: Rows that are here and all rows of each parameter of at least one dimension, after the last forward.
        held_before: The same before the first one.
        is_frozen: Whether no parameter wants a gradient and the model is in evaluation mode.
        dtypes: Those of the parameters.
        on_meta: Names of the parameters that were left without memory.
    """

    states: list[tuple[torch.Tensor, torch.Tensor]]
    embed: torch.Tensor
    head: torch.Tensor
    is_tied: bool
    held: dict[str, tuple[int, int]]
    held_before: dict[str, tuple[int, int]]
    is_frozen: bool
    dtypes: set[torch.dtype]
    on_meta: list[str]


def use_target(
    target: Target, folder: Path, batches: Sequence[list[torch.Tensor]], *, forwards: int | None = None
) -> Found:
    """Run batches through a loaded target, then forwards without a batch until there were `forwards`."""
    facts = read_target_facts(folder, trust_remote_code=False)
    capturer = Capturer(target, [-1, 0, 1, facts.num_hidden_layers - 1], facts.hidden_size)
    before = _held(target.model)
    states = [capturer(batch) for batch in batches]
    for _ in range(len(batches), forwards or 0):
        capturer.idle()
    parameters = dict(target.model.named_parameters())
    return Found(
        states=[(each.hidden, each.last) for each in states],
        embed=sharding.full_tensor(target.embed_weight.detach()).clone(),
        head=sharding.full_tensor(target.head_weight.detach()).clone(),
        is_tied=target.head_weight is target.embed_weight,
        held=_held(target.model),
        held_before=before,
        is_frozen=not target.model.training and not any(p.requires_grad for p in parameters.values()),
        dtypes={parameter.dtype for parameter in parameters.values()},
        on_meta=[name for name, parameter in parameters.items() if parameter.is_meta],
    )


def _held(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (len(sharding._local(p)), len(p)) for name, p in model.named_parameters() if p.dim()}


def load(folder: Path, compute_dtype: str, group: Group, parallelism: str) -> Target:
    """Load a target as capture does."""
    return sharding.load_over_group(folder, TargetSettings(), compute_dtype, CPU, group, parallelism)


# Tasks: each is what one rank of a group does.


def capture(group: Group, targets: Sequence[tuple[Path, str]], parallelism: str, counts: Sequence[int]) -> list[Found]:
    """Load targets, each in a dtype, one after the other, and run `counts[rank]` batches through each.

    Under FSDP each rank has samples of its own and runs empty forwards while others still have some.
    """
    seed = group.rank if parallelism == "fsdp" else 0
    batches = make_batches(seed, counts[group.rank])
    return [
        use_target(load(folder, compute_dtype, group, parallelism), folder, batches, forwards=max(counts))
        for folder, compute_dtype in targets
    ]


Disturbance = tuple["Callable[[nn.Module], None]", "Callable[[nn.Module], None]"]
"""What changes a model, and what undoes that."""


def _local_of(model: nn.Module, name: str) -> torch.Tensor:
    return sharding._local(model.get_parameter(name).detach())


def _flip_a_bit(name: str) -> Disturbance:
    def flip(model: nn.Module) -> None:
        _local_of(model, name).flatten()[-1:].view(torch.int32).bitwise_xor_(1)

    return flip, flip


def _swap_rows(name: str) -> Disturbance:
    def swap(model: nn.Module) -> None:
        local = _local_of(model, name)
        local[:2] = local[:2].flip(0)

    return swap, swap


def _swap_halves(name: str) -> Disturbance:
    """Take the second half of a fused tensor for the first one."""

    def swap(model: nn.Module) -> None:
        local = _local_of(model, name)
        local.copy_(local.roll(local.shape[1] // 2, 1))

    return swap, swap


def _change_buffer(name: str) -> Disturbance:
    def negate(model: nn.Module) -> None:
        model.get_buffer(name)[-1].neg_()

    return negate, negate


def _drop(name: str, kind: str) -> Disturbance:
    path, _, attribute = name.rpartition(".")
    kept: list[Any] = []

    def drop(model: nn.Module) -> None:
        kept.append(getattr(model.get_submodule(path), kind).pop(attribute))

    def put_back(model: nn.Module) -> None:
        getattr(model.get_submodule(path), kind)[attribute] = kept.pop()

    return drop, put_back


def _add(name: str) -> Disturbance:
    path, _, attribute = name.rpartition(".")

    def add(model: nn.Module) -> None:
        model.get_submodule(path).register_parameter(attribute, torch.nn.Parameter(torch.zeros(2)))

    def remove(model: nn.Module) -> None:
        delattr(model.get_submodule(path), attribute)

    return add, remove


def _untie(name: str, source: str) -> Disturbance:
    path, _, attribute = name.rpartition(".")

    def untie(model: nn.Module) -> None:
        copy = torch.nn.Parameter(model.get_parameter(source).detach().clone())
        setattr(model.get_submodule(path), attribute, copy)

    def tie(model: nn.Module) -> None:
        setattr(model.get_submodule(path), attribute, model.get_parameter(source))

    return untie, tie


NORM, EMBED, HEAD, FUSED, ROPE = (
    "model.norm.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.rotary_emb.inv_freq",
)
DISTURBANCES: dict[str, tuple[str, Disturbance]] = {
    "a bit of a norm": (NORM, _flip_a_bit(NORM)),
    "a bit of a fused tensor": (FUSED, _flip_a_bit(FUSED)),
    "two rows": (EMBED, _swap_rows(EMBED)),
    "a fused tensor permuted": (FUSED, _swap_halves(FUSED)),
    "lm_head no longer tied": (HEAD, _untie(HEAD, EMBED)),
    "a buffer": (ROPE, _change_buffer(ROPE)),
    "a parameter missing": (NORM, _drop(NORM, "_parameters")),
    "a parameter more": ("model.norm.bias", _add("model.norm.bias")),
    "a buffer missing": (ROPE, _drop(ROPE, "_buffers")),
}
"""What may go wrong with a Qwen3-MoE: the name of the tensor, and how."""


def check_disturbed(group: Group, folder: Path, parallelism: str, only: int | None) -> dict[str, str | None]:
    """Disturb a loaded target in every way on all ranks, or on one; return what the check says of each on this rank."""
    target = load(folder, "fp32", group, parallelism)
    texts = {}
    for words, (_, (disturb, undo)) in DISTURBANCES.items():
        if only in (None, group.rank):
            disturb(target.model)
        texts[words] = _check(target, folder, group)
        if only in (None, group.rank):
            undo(target.model)
    return {**texts, "nothing": _check(target, folder, group)}


def _check(target: Target, folder: Path, group: Group) -> str | None:
    try:
        sharding._ensure_as_one_process_loads(target, folder, TargetSettings(), "fp32", group)
    except InputError as error:
        return str(error)
    return None


def load_disturbed(group: Group, folder: Path) -> str | None:
    """Load a target by a way that goes wrong on rank 1; return why that is refused on this rank."""
    load_rightly = sharding._load_fsdp

    def load_wrongly(*arguments: Any) -> Target:
        target = load_rightly(*arguments)
        if group.rank == 1:
            _swap_rows(EMBED)[0](target.model)
        return target

    sharding._load_fsdp = load_wrongly
    try:
        load(folder, "fp32", group, "fsdp")
    except InputError as error:
        return str(error)
    return None


def check_native_loading(group: Group, folder: Path) -> str | None:
    """Load a target by transformers' own FSDP; return what the check says of it."""
    config = DistributedConfig(fsdp_size=group.size)
    model = load_model(folder, TargetSettings(), "fp32", distributed_config=config)
    return _check(as_target(model, CPU), folder, group)
