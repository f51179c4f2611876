"""Targets larger than one device: loading them over the ranks of a group, and checking what was loaded.

`fsdp` shards every parameter by rows with FSDP2; each layer is gathered for its forward and resharded after it.
`tensor` is transformers' tensor parallelism. What either gives is compared with what one process would load.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dspark_cache.errors import InputError, SettingsError
from dspark_cache.launch import environment_variables
from dspark_cache.target import as_target, load_model, load_target

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from dspark_cache.ranks import Group
    from dspark_cache.settings import TargetSettings
    from dspark_cache.target import Target

logger = logging.getLogger(__name__)

NOT_SHARDED = {
    "fsdp": dict.fromkeys(("zamba", "zamba2"), "its layers share weights, which FSDP2 cannot shard"),
    "tensor": {
        "doge": "the mask of its attention is made for all heads",
        "gemma4": "the embedding of its wrapper mixes sharded and whole tensors",
        "glm5_next": "a part of its attention expects sharded states and is given whole ones",
        **dict.fromkeys(
            ("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text", "step3p7"),
            "transformers loads other experts than the checkpoint's",
        ),
        **dict.fromkeys(("muse_glimmer", "muse_spark"), "the norm inside of its embedding fails on sharded states"),
        **dict.fromkeys(("qwen3_vl_moe", "sarvam_moe"), "transformers fails to convert parts of its weights"),
    },
}
"""Parallelism to families that it fails for, and why; measured with transformers 5.24."""


LITTLE_SHARED = 1.5
"""Shares of the weights that a rank may hold before that is said."""
_SEQUENTIAL_LOAD = {"HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""Lets transformers read one parameter after the other: its threads read ahead without a bound."""
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD = 1 << 20


def ensure_shardable(folder: Path, parallelism: str, size: int, *, trust_remote_code: bool) -> None:
    """Refuse what is known to fail, before anything is loaded.

    Args:
        folder: Folder of the target.
        parallelism: "fsdp" or "tensor".
        size: Ranks that share one copy of the target.
        trust_remote_code: Whether the checkpoint's own code may be run.

    Raises:
        InputError: A family that cannot be sharded so.
        SettingsError: Heads that do not divide.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    text = config.get_text_config(decoder=True)
    reasons = {way: names.get(config.model_type) for way, names in NOT_SHARDED.items()}
    if not text.base_model_tp_plan:
        reasons["tensor"] = "transformers has no tensor parallel plan for it"
    if reasons[parallelism]:
        others = [way for way, reason in reasons.items() if reason is None]
        raise InputError(
            f"target.model: {config.model_type} cannot be sharded by runtime.parallelism: {parallelism}: "
            f"{reasons[parallelism]}; try {(*others, 'replicate')[0]}"
        )
    if parallelism == "tensor":
        names = ("num_attention_heads", "num_key_value_heads")
        heads = {name: getattr(text, name, None) or size for name in names}
        odd = {name: number for name, number in heads.items() if number % size}
        if odd:
            raise SettingsError(
                f"runtime.parallelism: tensor: {size} processes need numbers of heads that they divide, "
                f"the target has {odd}: choose another runtime.group_size, or runtime.parallelism: fsdp"
            )


def load_over_group(
    folder: Path, settings: TargetSettings, compute_dtype: str, device: torch.device, group: Group, parallelism: str
) -> Target:
    """Load the target over the ranks of a group; a collective.

    Args:
        folder: Folder of the target.
        settings: Section `target` of the settings.
        compute_dtype: Key of `DTYPE_MAP`.
        device: This rank's.
        group: The ranks.
        parallelism: "replicate", "fsdp" or "tensor".

    Raises:
        InputError: As `load_target`; or what is loaded is not what one process loads.
    """
    if parallelism == "replicate":
        return load_target(folder, settings, compute_dtype, device)
    if device.type == "cpu":
        _give_memory_back()
    load = _load_fsdp if parallelism == "fsdp" else _load_tensor_parallel
    target = load(folder, settings, compute_dtype, device, group)
    _ensure_as_one_process_loads(target, folder, settings, compute_dtype, group)
    if group.rank == 0:
        warn_of_little_shared(target.model, group.size)
    return target


def warn_of_little_shared(model: torch.nn.Module, size: int) -> None:
    """Warn where each of `size` ranks holds much more than its share of the weights, as some plans have it."""
    parameters = [parameter.data for parameter in model.parameters() if parameter.device.type != "meta"]
    held, whole = (sum(p.numel() * p.element_size() for p in part) for part in (map(_local, parameters), parameters))
    if held * size > LITTLE_SHARED * whole:
        logger.warning(
            "each of %d processes holds %.0f %% of the weights: transformers' plan shares little of %s; "
            "runtime.parallelism: fsdp shares all",
            size,
            100 * held / whole,
            type(model).__name__,
        )


def _give_memory_back() -> None:
    """Let freed memory of this size and more go back to the system at once, where the C library is glibc.

    It would keep what FSDP gathers on a CPU: a peak 2 to 6 times higher (measured).
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)


def full_tensor(weight: torch.Tensor) -> torch.Tensor:
    """Return all of a weight that may be sharded; a collective of its ranks."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def _load_fsdp(
    folder: Path, settings: TargetSettings, compute_dtype: str, device: torch.device, group: Group
) -> Target:
    """Load a target of which each rank keeps its rows of every parameter."""
    rows: dict[str, torch.Tensor] = {}

    def keep_rows(name: str, parameter: torch.Tensor) -> None:
        # FSDP2 cuts as torch.chunk does; a copy, as a view would keep all of a tensor
        parts = parameter.detach().chunk(group.size)
        part = parts[group.rank] if group.rank < len(parts) else parameter.detach()[:0]
        rows[name] = part.to(device, copy=True, memory_format=torch.contiguous_format)

    with environment_variables(_SEQUENTIAL_LOAD):
        model = _load_without_parameters(folder, settings, compute_dtype, keep_rows)
    _tie_equal(model, rows, group)
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    target = _fully_shard(as_target(model, device), group)
    for names in tied.values():
        _put_rows(model, names, rows)
    return target


def _put_rows(model: Any, names: list[str], rows: dict[str, torch.Tensor]) -> None:
    """Give this rank's rows to a parameter, of which nothing is there, under each of its names."""
    from torch.distributed.tensor import DTensor

    part = next((rows.pop(name) for name in names if name in rows), None)
    sharded = next((p for p in map(model.get_parameter, names) if isinstance(p, DTensor)), None)
    if part is None or sharded is None:
        return  # it lies outside of the base and lm_head, where no forward reads it
    # The rows themselves: room for a copy of them would be as much memory again.
    whole = DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )
    parameter = torch.nn.Parameter(whole, requires_grad=False)
    for name in names:
        _set(model, name, parameter)


def _set(model: Any, name: str, value: torch.Tensor) -> None:
    """Set a parameter or a buffer."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, value)


def _tie_equal(model: Any, rows: dict[str, torch.Tensor], group: Group) -> None:
    """Tie parameters of which the checkpoint has two equal copies; transformers does, where it has their values.

    A collective.
    """
    for name, source in model.all_tied_weights_keys.items():
        if name in rows and source in rows:
            is_equal = _is_equal(rows[name], rows[source])
            if group.most(int(not is_equal)) == 0:
                del rows[name]
                _set(model, name, model.get_parameter(source))


class _Root(torch.nn.Module):
    """The root for FSDP2, in place of the base, as it changes the root's class, by which transformers knows models."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base

    def forward(self, **arguments: Any) -> Any:
        """Run the base."""
        return self.base(**arguments)


def _fully_shard(target: Target, group: Group) -> Target:
    """Shard a model of which only the buffers are there yet."""
    # Here, as they take a second, and most runs shard nothing.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, root = target.model, _Root(target.base)
    mesh = init_device_mesh(target.device.type, (group.size,))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Alone an embedding is whole only while it runs: the wrapper of a decoder may read its weight later (gemma4).
    alone = [embedding] if any(child is target.layers for child in target.base.children()) else []
    heads = [head] if head.weight is not embedding.weight else []
    for module in (*target.layers, *alone, root, *heads):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        _set(model, name, buffer.to(target.device))
    return replace(target, base=root)


def _load_tensor_parallel(
    folder: Path, settings: TargetSettings, compute_dtype: str, device: torch.device, group: Group
) -> Target:
    from transformers.distributed.configuration_utils import DistributedConfig

    config = DistributedConfig(tp_size=group.size)
    model = load_model(folder, settings, compute_dtype, distributed_config=config)
    return as_target(model, device)


def _ensure_as_one_process_loads(
    target: Target, folder: Path, settings: TargetSettings, compute_dtype: str, group: Group
) -> None:
    """Compare parameters and buffers of a sharded target with the checkpoint as one process loads it.

    Sharded loading has been wrong without a word (transformers 5.24: 2 of 29 families). So the checkpoint is read
    once more, through the way that is known to be right; each rank compares what it has of the parameters.

    Raises:
        InputError: Naming those that differ.
    """
    sharded = dict(target.model.named_parameters(remove_duplicate=False))
    compared: set[str] = set()
    differing: list[str] = []

    def compare(name: str, parameter: torch.Tensor) -> None:
        part = sharded.get(name)
        is_unread = part is not None and part.device.type == "meta"  # no forward could run with it
        if part is None or not (is_unread or _is_equal(_local(part.detach()), _own_part(parameter.detach(), part))):
            differing.append(name)
        compared.add(name)

    with environment_variables(_SEQUENTIAL_LOAD):
        alone = _load_without_parameters(folder, settings, compute_dtype, compare)
    # A parameter that is tied to another one was compared under that one's name.
    whole = dict(alone.named_parameters(remove_duplicate=False))
    found = {id(whole[name]): sharded.get(name) for name in compared & whole.keys()}
    tied = {name for name, p in whole.items() if id(p) in found and found[id(p)] is sharded.get(name)}
    differing += sorted((sharded.keys() | whole.keys()) - tied - compared)
    buffers = dict(target.model.named_buffers(remove_duplicate=False))
    for name, buffer in alone.named_buffers(remove_duplicate=False):
        if name not in buffers or not _is_equal(buffers[name], buffer):
            differing.append(name)
    if differing:
        raise InputError(
            f"target.model: {len(differing)} tensors of {type(target.model).__name__} are not those of the checkpoint "
            f"when they are loaded over {group.size} processes, {differing[0]} among them; try another "
            "runtime.parallelism"
        )


def _is_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two tensors have the same bits of the same dtype; numbers that are not finite count too."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    bits = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, expected.to(found.device)))
    return torch.equal(*bits)


def _own_part(whole: torch.Tensor, sharded: Any) -> torch.Tensor:
    """Cut from a whole tensor what this rank has of a sharded one."""
    placements = [placement for placement in getattr(sharded, "placements", ()) if not placement.is_replicate()]
    if not placements:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # The numbers of rows, or columns, are cut as the tensor is: unevenly or interleaved as that may be.
    (placement,) = placements
    shape = [1] * whole.dim()
    shape[placement.dim] = whole.shape[placement.dim]
    numbers = distribute_tensor(
        torch.arange(whole.shape[placement.dim]).view(shape), sharded.device_mesh, placements, src_data_rank=None
    )
    return whole.index_select(placement.dim, numbers.to_local().flatten().to(whole.device))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def _load_without_parameters(
    folder: Path, settings: TargetSettings, compute_dtype: str, consume: Callable[[str, torch.Tensor], None]
) -> Any:
    """Load the model as one process does, but hand each parameter to `consume` and keep none of them.

    Only what `consume` keeps takes memory, beside one parameter at a time: those whose bytes are stored as they are
    needed are a mapping of the file.

    Args:
        folder: As for `load_model`.
        settings: As for `load_model`.
        compute_dtype: As for `load_model`.
        consume: Given the name and the parameter, in an order that depends on the checkpoint alone.

    Returns:
        The model, its parameters on the meta device, its buffers loaded.
    """
    parents: dict[nn.Module, tuple[nn.Module, str]] = {}

    def note_parent(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None:
            parents[child] = (module, name)

    def take(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # By its mark: what a module begins with is none of it, and has no place in a model yet.
        is_loaded = getattr(parameter, "_is_hf_initialized", False)
        if parameter is None or parameter.device.type == "meta" or not is_loaded:
            return None  # it stays as it is
        path = [name]
        while module in parents:
            module, part = parents[module]
            path.append(part)
        consume(".".join(reversed(path)), parameter)
        empty = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
        empty._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001 - so transformers initialises nothing
        return empty

    handles = (
        register_module_module_registration_hook(note_parent),
        register_module_parameter_registration_hook(take),  # type: ignore[arg-type]  # it may return what to register
    )
    try:
        return load_model(folder, settings, compute_dtype)
    finally:
        for handle in handles:
            handle.remove()
