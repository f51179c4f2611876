"""Running the target: samples in, states of their real tokens out.

One forward of the target without lm_head gives the selected layers and the final hidden state; nothing is known of
any family's module names. Capture runs batches through it; recompute shares only the check of shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.errors import CaptureError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_cache.ranks import Rank
    from dspark_cache.settings import RuntimeSettings
    from dspark_cache.target import Target


def pick_device(name: str, rank: Rank | None = None) -> torch.device:
    """Return the device that `runtime.device` names; "auto" is CUDA where there is one.

    Args:
        name: The setting.
        rank: Of several ranks, the one that asks: each has a GPU of its own, or sees no other.

    Raises:
        SettingsError: No such device on this machine, or too few.
    """
    device = _named_device(name)
    if rank is None or rank.count == 1 or device.type == "cpu":
        return device
    visible = torch.cuda.device_count()
    ensure_gpus(name, rank.local_count if visible > 1 else 1)  # srun --gpus-per-task=1 shows each process its own
    return torch.device("cuda", rank.local if visible > 1 else 0)


def ensure_gpus(name: str, count: int) -> None:
    """Check that as many processes as `count` have a GPU each, if they are to compute on GPUs.

    Raises:
        SettingsError: There are fewer, or the setting names one.
    """
    if _named_device(name).type == "cpu":
        return
    if ":" in name and count > 1:
        raise SettingsError(f"runtime.device: {count} processes cannot share {name}: expected auto, cpu or cuda")
    if count > torch.cuda.device_count():
        raise SettingsError(
            f"runtime.processes: {count} processes on a machine that shows them {torch.cuda.device_count()} GPUs"
        )


def _named_device(name: str) -> torch.device:
    if name != "auto" and name.partition(":")[0] not in ("cpu", "cuda"):
        raise SettingsError(f"runtime.device: expected auto, cpu, cuda or cuda:N, found {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SettingsError(f"runtime.device: {name!r} cannot be used on this machine: {error}") from error
    return device


def capture_environment(device: torch.device, runtime: RuntimeSettings, group_size: int = 1) -> dict[str, Any]:
    """Return what moves the last bits of states and is no part of their identity.

    Args:
        device: Where the target is.
        runtime: Its batch budget and parallelism.
        group_size: Ranks that share one copy of the target; it counts where they share the arithmetic too.
    """
    import transformers

    on_cpu = device.type == "cpu"
    return {
        "accelerator": "cpu" if on_cpu else torch.cuda.get_device_name(device),
        "instruction_set": torch.backends.cpu.get_cpu_capability() if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "max_tokens_per_batch": runtime.max_tokens_per_batch,
        "parallelism": f"tensor:{group_size}" if runtime.parallelism == "tensor" else runtime.parallelism,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """States of the real tokens of one batch, in memory of their own.

    Attributes:
        hidden: [T, D].
        last: [T, H].
        finite: bool [T], whether the sum of a token's numbers is finite. If it is, so are the numbers; if it is not,
            they may still be, and only large. To look at every number takes thirty times as long.
    """

    hidden: torch.Tensor
    last: torch.Tensor
    finite: torch.Tensor


def check_state(state: torch.Tensor | None, name: str, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return one state [B, W, H]; parallel streams of a 4-D residual are averaged.

    Raises:
        CaptureError: The target did not give it, or gave it in another shape.
    """
    if state is None:
        raise CaptureError(f"{name}: the target gave no such state")
    if state.dim() == 4 and state.shape[:2] == shape[:2]:
        state = state.mean(dim=2)
    elif state.dim() == 4 and state.shape[1:3] == shape[:2]:
        state = state.mean(dim=0)
    if tuple(state.shape) != shape:
        raise CaptureError(f"{name}: expected a state {list(shape)}, the target gave {list(state.shape)}")
    return state


def _gathered(states: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Return the given rows of states [B * W, H] side by side, [T, D], each copied once."""
    dtype = reduce(torch.promote_types, (state.dtype for state in states))
    width = states[0].shape[1]
    gathered = torch.empty((len(rows), len(states) * width), dtype=dtype, device=rows.device)
    for number, state in enumerate(states):
        into = gathered[:, number * width : (number + 1) * width]
        torch.index_select(state.to(dtype), 0, rows, out=into)
    return gathered


def pad_batch(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ids int64 [B, W], each sample followed by zeros."""
    longest = max(map(len, samples))
    # In a batch as wide as it is high the shape would not tell which axis of a 4-D residual holds the streams.
    ids = torch.zeros((len(samples), longest + (longest == len(samples))), dtype=torch.int64)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample)] = sample
    return ids


class Capturer:
    """Runs a target, without lm_head, on samples and gives the states of their real tokens."""

    def __init__(self, target: Target, layer_ids: Sequence[int], hidden_size: int) -> None:
        """Prepare to capture `layer_ids` (checked against the target before)."""
        self._target = target
        target.model.eval()  # whatever its owner did: dropout would be noise in every state
        self._layer_ids = tuple(layer_ids)
        self._hidden_size = hidden_size
        # The last layer's id means the final norm's output, which is last_hidden_state; i is hidden_states[i + 1].
        self._last_id = len(target.layers) - 1
        self._selection = [layer + 1 for layer in layer_ids if layer != self._last_id]

    @property
    def device(self) -> torch.device:
        """Where the target is."""
        return self._target.device

    @torch.no_grad()  # FSDP2 does not know inference mode: with one rank it fails
    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        """Run one batch, padded on the right.

        Args:
            samples: Ids of each, int32 [T].

        Returns:
            The states of all samples' tokens, one after the other, on the target's device.

        Raises:
            CaptureError: A state is missing or of another shape than the tokens ask for.
        """
        ids = pad_batch(samples)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(sample) for sample in samples])[:, None]
        rows = self._to_device(real.flatten().nonzero().flatten())
        output = self._forward(self._to_device(ids))
        shape = (*ids.shape, self._hidden_size)
        if self._selection and len(output.hidden_states) != self._last_id + 2:
            raise CaptureError(
                f"expected {self._last_id + 2} hidden states, the embedding's and one a layer, the target gave "
                f"{len(output.hidden_states)}: layer ids do not name them"
            )
        last = check_state(output.last_hidden_state, "last hidden state", shape)
        by_id = {self._last_id: last} | {
            index - 1: check_state(output.hidden_states[index], f"layer {index - 1}", shape)
            for index in self._selection
        }
        hidden = _gathered([by_id[layer].flatten(0, 1) for layer in self._layer_ids], rows)
        last = last.flatten(0, 1)[rows]
        sums = [state.sum(dim=-1, dtype=torch.float32) for state in (hidden, last)]
        return States(hidden=hidden, last=last, finite=torch.isfinite(sums[0]) & torch.isfinite(sums[1]))

    @torch.no_grad()
    def idle(self) -> None:
        """Run a forward whose states nobody wants, where forwards are collectives and another rank runs one."""
        self._forward(torch.zeros((1, 1), dtype=torch.int64, device=self._target.device))

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the device; on CUDA without waiting for what runs there."""
        if self._target.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._target.device, non_blocking=True)

    def _forward(self, ids: torch.Tensor) -> Any:
        """Run the target without lm_head.

        There is no attention mask: padding is on the right, where no real token of a causal model sees it, and
        without a mask attention takes its fastest kernel and waits for no comparison of mask values.
        """
        with torch.autocast(self._target.device.type, enabled=False):  # whatever the caller does
            return self._target.base(
                input_ids=ids, use_cache=False, output_hidden_states=self._selection or False, return_dict=True
            )

    def bad_layer(self, states: States) -> str:
        """Name the first state that holds a number that is not finite."""
        for position, layer in enumerate(self._layer_ids):
            part = states.hidden[:, position * self._hidden_size : (position + 1) * self._hidden_size]
            if not bool(torch.isfinite(part).all()):
                return f"layer {layer}"
        return "last hidden state"
