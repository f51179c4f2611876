"""Recomputing a few samples: the independent second way to the states that a cache holds.

Capture takes transformers' selection from the decoder, in padded batches. Here each sample runs alone, unpadded,
through the whole model, and hooks on the layer list and on lm_head take what really passes by. So the two ways
check each other: a wrong layer, a shift by one, or a state from before the final norm does not agree.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cache_files import Finding
from dspark_cache.errors import CaptureError
from dspark_cache.files import put_file
from dspark_cache.forward import check_state
from dspark_cache.schema import HIDDEN, LAST_HIDDEN
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from dspark_cache.reader import CachedDSparkDataset
    from dspark_cache.target import Target

LOGIT_POSITIONS = 8
"""Positions a sample at which lm_head's raw output is kept: a whole sample's logits would be the largest tensor."""

LOGITS = "logits"

COMPUTE_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
"""Relative L2 of a token's state that another batch composition may move, by compute dtype."""
ROUNDING_TOLERANCE = {"fp32": 0.0, "fp16": 1e-3, "bf16": 4e-3, "fp8_e4m3": 7e-2}
"""Relative L2 that rounding to the cache's dtype may add: half a unit in the last place at most."""


LOGITS_FACTOR = 10
"""Logits are sums of H products of two rounded factors that largely cancel."""
MAX_TOLERANCE = 0.5
"""At 1, states that are all zero would agree."""


def tolerance(compute_dtype: str, cache_dtype: str, state: str) -> float:
    """Return the relative L2 up to which a cached state agrees with a recomputed one."""
    limit = COMPUTE_TOLERANCE[compute_dtype] + ROUNDING_TOLERANCE[cache_dtype]
    return min(LOGITS_FACTOR * limit, MAX_TOLERANCE) if state == LOGITS else limit


def choose_samples(keys: Sequence[str], lengths: Sequence[int], count: int) -> list[int]:
    """Choose samples to recompute: the longest, the shortest, then by key, which is as good as random.

    The choice depends on the samples alone. Samples with the same ids are chosen once.
    """
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    indices = sorted(first.values(), key=lambda index: keys[index])
    by_length = sorted(indices, key=lambda index: lengths[index])
    ordered = dict.fromkeys([by_length[-1], by_length[0], *indices])
    return list(ordered)[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """States of one sample as they passed by.

    Attributes:
        hidden: [T, D].
        last: What went into lm_head, [T, H].
        positions: Where `logits` were kept, int64 [P].
        logits: What came out of lm_head, before soft cap and scale, [P, V].
    """

    hidden: torch.Tensor
    last: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor


def _first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


@contextmanager
def _watch(target: Target, layer_ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Record layer outputs, the first layer's input, and lm_head's input and output; the hooks are removed."""
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        seen[name] = value[0] if isinstance(value, tuple | list) else value

    with ExitStack() as stack:
        for layer in layer_ids:
            if layer >= 0:
                output = target.layers[layer].register_forward_hook(
                    lambda _m, _a, out, layer=layer: keep(f"layer {layer}", out)
                )
                stack.callback(output.remove)
        embedded = target.layers[0].register_forward_pre_hook(
            lambda _m, args, kwargs: keep("layer -1", _first_input(args, kwargs)), with_kwargs=True
        )
        stack.callback(embedded.remove)
        head = target.model.get_output_embeddings()
        taken = head.register_forward_pre_hook(lambda _m, args: keep("lm_head input", args[0]))
        stack.callback(taken.remove)
        given = head.register_forward_hook(lambda _m, _a, out: keep("lm_head output", out))
        stack.callback(given.remove)
        yield seen


@torch.inference_mode()
def recompute_sample(target: Target, ids: torch.Tensor, layer_ids: Sequence[int], hidden_size: int) -> Recomputed:
    """Run one sample alone, unpadded, through the whole model.

    Args:
        target: The target.
        ids: Ids of the sample, [T].
        layer_ids: Captured layers.
        hidden_size: H.

    Raises:
        CaptureError: A layer or lm_head did not fire, or gave another shape.
    """
    with _watch(target, layer_ids) as seen:
        target.model(input_ids=ids.to(device=target.device, dtype=torch.int64)[None], use_cache=False)
    shape = (1, len(ids), hidden_size)
    last = check_state(seen.get("lm_head input"), "lm_head's input", shape)
    parts = []
    for layer in layer_ids:
        if layer == len(target.layers) - 1:
            parts.append(last)
        else:
            parts.append(check_state(seen.get(f"layer {layer}"), f"layer {layer}", shape))
    logits = seen.get("lm_head output")
    if logits is None or logits.shape[:2] != (1, len(ids)):
        raise CaptureError("lm_head gave no output for every token")
    positions = torch.linspace(0, len(ids) - 1, min(LOGIT_POSITIONS, len(ids))).long()
    return Recomputed(
        hidden=torch.cat(parts, dim=-1)[0].cpu(),
        last=last[0].cpu(),
        positions=positions,
        logits=logits[0, positions.to(logits.device)].cpu(),
    )


_PARTS = ("hidden", "last", "positions", "logits")


def put_recomputed(path: Path, recomputed: Recomputed) -> None:
    """Keep a recomputed sample in scratch, so that a later verification of the same states needs no target."""
    with put_file(path) as temporary:
        write_tensors(temporary, {name: getattr(recomputed, name).contiguous() for name in _PARTS})


def read_recomputed(path: Path) -> Recomputed:
    """Read what `put_recomputed` kept.

    Raises:
        CacheNotFoundError: Nothing is kept there.
        CacheFormatError: Malformed.
    """
    file = ShardFile(path)
    file.require(_PARTS)
    return Recomputed(**{name: file.read_rows(name, 0, file.places[name].spec.shape[0]) for name in _PARTS})


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return |found - expected| / |expected| of each row, [T]."""
    found, expected = found.double(), expected.double()
    errors = torch.linalg.vector_norm(found - expected, dim=-1)
    return torch.div(errors, torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-30))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a cache is from what was recomputed.

    Attributes:
        findings: Samples beyond the tolerance, or with other ids.
        worst: State ("layer 3", "last hidden", "logits") to the largest relative L2 of any token.
        mean: State to the mean relative L2 of all tokens.
    """

    findings: list[Finding]
    worst: dict[str, float]
    mean: dict[str, float]


def compare_recomputed(
    dataset: CachedDSparkDataset,
    recomputed: Mapping[int, Recomputed],
    head_weight: torch.Tensor,
    layer_ids: Sequence[int],
    compute_dtype: str,
) -> Comparison:
    """Compare cached samples with recomputed ones, token by token and layer by layer.

    Args:
        dataset: The cache.
        recomputed: Sample index in the cache to its states.
        head_weight: lm_head's weight [V, H] of the cache.
        layer_ids: Layers that were recomputed, in the order of their columns.
        compute_dtype: Key of `DTYPE_MAP` the states were computed in.
    """
    findings: list[Finding] = []
    seen: dict[str, list[torch.Tensor]] = {}
    for index, expected in recomputed.items():
        file = shard_name(dataset.shard_of(index))
        for state, differences in _differences(dataset, index, expected, head_weight, layer_ids).items():
            limit = tolerance(compute_dtype, dataset.manifest["dtype"], state)
            largest = float(differences.max())
            seen.setdefault(state, []).append(differences)
            if not largest <= limit:
                message = (
                    f"sample {index}: {state} differs from the target's by a relative L2 of {largest:.3g} at token "
                    f"{int(differences.argmax())}, at most {limit:.3g} is expected"
                )
                findings.append(Finding(level="recompute", file=file, message=message))
    every = {state: torch.cat(parts) for state, parts in seen.items()}
    return Comparison(
        findings=findings,
        worst={state: float(f"{float(values.max()):.3g}") for state, values in every.items()},
        mean={state: float(f"{float(values.mean()):.3g}") for state, values in every.items()},
    )


def _differences(
    dataset: CachedDSparkDataset, index: int, expected: Recomputed, head_weight: torch.Tensor, layer_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the relative L2 [T] of each state of one sample, and of the logits its last hidden state gives."""
    sample = dataset[index]
    tokens = len(expected.last)
    size = expected.last.shape[1]
    found = {}
    for position, layer in enumerate(layer_ids):
        columns = slice(position * size, (position + 1) * size)
        found[f"layer {layer}"] = relative_l2(sample[HIDDEN][:tokens, columns], expected.hidden[:, columns])
    last = sample[LAST_HIDDEN][:tokens]
    found["last hidden"] = relative_l2(last, expected.last)
    logits = last[expected.positions].float() @ head_weight.float().T
    found[LOGITS] = relative_l2(logits, expected.logits)
    return found
