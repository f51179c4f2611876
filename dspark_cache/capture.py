"""Capturing the target's states: tokens in, blocks in scratch and their ledger out.

One forward of the target without lm_head gives the selected layers and the final hidden state. Batches are
formed inside a block from samples of like length, so that block bytes do not depend on where a run was
interrupted. Only real tokens are stored, in the dtype the target computes in.
"""

from __future__ import annotations

import inspect
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.blocks import Block, BlockStore, PlannedBlock, block_specs, cut_batches, plan_blocks
from dspark_cache.errors import CaptureError, SettingsError
from dspark_cache.files import put_file
from dspark_cache.schema import DTYPE_MAP, HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shard_file import file_bytes, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dspark_cache.progress import Progress
    from dspark_cache.settings import RuntimeSettings
    from dspark_cache.target import Target

logger = logging.getLogger(__name__)

GIB = 1 << 30


def pick_device(name: str) -> torch.device:
    """Return the device that `runtime.device` names; "auto" is CUDA where there is one.

    Raises:
        SettingsError: No such device on this machine.
    """
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


def capture_environment(device: torch.device, runtime: RuntimeSettings) -> dict[str, Any]:
    """Return what moves the last bits of states and is no part of their identity."""
    import transformers

    on_cpu = device.type == "cpu"
    return {
        "accelerator": "cpu" if on_cpu else torch.cuda.get_device_name(device),
        "instruction_set": torch.backends.cpu.get_cpu_capability() if on_cpu else None,
        "threads": torch.get_num_threads() if on_cpu else None,
        "max_tokens_per_batch": runtime.max_tokens_per_batch,
        "parallelism": runtime.parallelism,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """States of the real tokens of one batch, in memory of their own.

    Attributes:
        hidden: [T, D].
        last: [T, H].
        finite: bool [T], whether all numbers of a token are finite.
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


class Capturer:
    """Runs a target, without lm_head, on samples and gives the states of their real tokens."""

    def __init__(self, target: Target, layer_ids: Sequence[int], hidden_size: int) -> None:
        """Prepare to capture `layer_ids` (checked against the target before)."""
        self._target = target
        self._layer_ids = tuple(layer_ids)
        self._hidden_size = hidden_size
        # The last layer's id means the final norm's output, which is last_hidden_state; i is hidden_states[i + 1].
        self._last_id = len(target.layers) - 1
        self._selection = [layer + 1 for layer in layer_ids if layer != self._last_id]
        self._takes_mask = "attention_mask" in inspect.signature(target.base.forward).parameters

    @torch.inference_mode()
    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        """Run one batch, padded on the right.

        Args:
            samples: Ids of each, int32 [T].

        Returns:
            The states of all samples' tokens, one after the other, on the target's device.

        Raises:
            CaptureError: A state is missing or of another shape than the tokens ask for.
        """
        lengths = [len(sample) for sample in samples]
        # In a batch as wide as it is high the shape would not tell which axis of a 4-D residual holds the streams.
        width = max(lengths) + (max(lengths) == len(samples))
        ids = torch.zeros((len(samples), width), dtype=torch.int64)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = sample
        real = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        output = self._forward(ids.to(self._target.device), real.to(self._target.device))
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
        rows = real.to(self._target.device)
        hidden = torch.cat([by_id[layer][rows] for layer in self._layer_ids], dim=-1)
        last = last[rows]
        finite = torch.isfinite(hidden).all(dim=-1) & torch.isfinite(last).all(dim=-1)
        return States(hidden=hidden, last=last, finite=finite)

    def _forward(self, ids: torch.Tensor, real: torch.Tensor) -> Any:
        mask = {"attention_mask": real.long()} if self._takes_mask else {}
        return self._target.base(
            input_ids=ids, use_cache=False, output_hidden_states=self._selection or False, return_dict=True, **mask
        )

    def bad_layer(self, states: States) -> str:
        """Name the first state that holds a number that is not finite."""
        for position, layer in enumerate(self._layer_ids):
            part = states.hidden[:, position * self._hidden_size : (position + 1) * self._hidden_size]
            if not bool(torch.isfinite(part).all()):
                return f"layer {layer}"
        return "last hidden state"


@dataclass(slots=True)
class _Buffer:
    """States of one block on the host, rows in the order of its samples."""

    hidden: torch.Tensor
    last: torch.Tensor
    offsets: list[int]
    dropped: dict[str, str]


class _ToHost:
    """Copies states to the host; on CUDA through pinned memory on a stream of its own, one batch behind."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]

    def start(self, states: States) -> tuple[States, Any]:
        """Return where the states will be, and the event after which they are."""
        if self._stream is None:
            return states, None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = [self._copy(tensor) for tensor in (states.hidden, states.last, states.finite)]
            event = self._stream.record_event()
        return States(hidden=copies[0], last=copies[1], finite=copies[2]), event

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # type: ignore[arg-type]  # only called with a stream
        return copy


class BlockCapturer:
    """Computes whole blocks and hands them to a writer thread; holds a bounded number of blocks on the host."""

    def __init__(
        self,
        capturer: Capturer,
        store: BlockStore,
        environment: Mapping[str, Any],
        *,
        device: torch.device,
        max_tokens: int,
        drop_nonfinite: bool,
        describe: Callable[[str], str],
    ) -> None:
        """Prepare; `describe` turns a sample's key into words for messages."""
        self._capturer = capturer
        self._store = store
        self._environment = dict(environment)
        self._to_host = _ToHost(device)
        self._max_tokens = max_tokens
        self._drop = drop_nonfinite
        self._describe = describe

    def compute(
        self, planned: PlannedBlock, samples: Sequence[torch.Tensor], progress: Progress
    ) -> Callable[[], Block]:
        """Run one block's samples through the target; return what writes and records it.

        On CUDA out-of-memory the block starts again with half the batch budget.
        """
        max_tokens = self._max_tokens
        while True:
            try:
                buffer = self._fill(planned, samples, max_tokens, progress)
                break
            except torch.cuda.OutOfMemoryError:
                if max_tokens <= max(len(sample) for sample in samples):
                    raise
            torch.cuda.empty_cache()
            max_tokens //= 2
            logger.warning("%s: out of device memory, again with %d tokens a batch", planned.name, max_tokens)
        environment = {**self._environment, "used_tokens_per_batch": max_tokens}
        return lambda: self._write(planned, buffer, environment)

    def _fill(
        self, planned: PlannedBlock, samples: Sequence[torch.Tensor], max_tokens: int, progress: Progress
    ) -> _Buffer:
        buffer = self._allocate([len(sample) for sample in samples])
        pending: tuple[list[int], States, Any] | None = None
        done = 0
        try:
            for batch in cut_batches([len(sample) for sample in samples], max_tokens):
                started = (batch, *self._to_host.start(self._capturer([samples[index] for index in batch])))
                if pending is not None:
                    self._place(planned, buffer, *pending)
                pending = started
                tokens = sum(len(samples[index]) for index in batch)
                done += tokens
                progress.advance(tokens)
        except torch.cuda.OutOfMemoryError:
            progress.advance(-done)
            raise
        if pending is not None:
            self._place(planned, buffer, *pending)
        return buffer

    def _allocate(self, lengths: Sequence[int]) -> _Buffer:
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        identity = self._store.identity
        size, layers = identity["hidden_size"], len(identity["target_layer_ids"])
        dtype = DTYPE_MAP[identity["compute_dtype"]]
        hidden = torch.empty((offsets[-1], size * layers), dtype=dtype)
        return _Buffer(hidden=hidden, last=torch.empty((offsets[-1], size), dtype=dtype), offsets=offsets, dropped={})

    def _place(self, planned: PlannedBlock, buffer: _Buffer, batch: list[int], states: States, event: Any) -> None:
        """Copy a batch's rows to where its samples lie in the block."""
        if event is not None:
            event.synchronize()
        start = 0
        for index in batch:
            begin, end = buffer.offsets[index], buffer.offsets[index + 1]
            stop = start + end - begin
            buffer.hidden[begin:end] = states.hidden[start:stop]
            buffer.last[begin:end] = states.last[start:stop]
            if not bool(states.finite[start:stop].all()) or self._overflows(states, buffer, begin, end):
                self._not_finite(planned.samples[index], buffer, begin, end)
            start = stop

    @staticmethod
    def _overflows(states: States, buffer: _Buffer, begin: int, end: int) -> bool:
        """Say whether the block's dtype is too narrow for what the target gave in a wider one."""
        if states.hidden.dtype == states.last.dtype == buffer.hidden.dtype:
            return False
        return not all(bool(torch.isfinite(rows[begin:end]).all()) for rows in (buffer.hidden, buffer.last))

    def _not_finite(self, key: str, buffer: _Buffer, begin: int, end: int) -> None:
        rows = States(hidden=buffer.hidden[begin:end], last=buffer.last[begin:end], finite=torch.empty(0))
        layer = self._capturer.bad_layer(rows)
        if not self._drop:
            raise CaptureError(
                f"{self._describe(key)}: {layer} holds numbers that are not finite ({rows.hidden.dtype}); finished "
                "blocks are kept; try target.compute_dtype: fp32, or target.nonfinite: drop to leave such samples out"
            )
        logger.warning("%s: %s is not finite, the sample is dropped", self._describe(key), layer)
        buffer.dropped[key] = f"{layer} is not finite"

    def _write(self, planned: PlannedBlock, buffer: _Buffer, environment: dict[str, Any]) -> Block:
        """Write the block's file, then its record."""
        kept = [index for index, key in enumerate(planned.samples) if key not in buffer.dropped]
        lengths = [buffer.offsets[index + 1] - buffer.offsets[index] for index in kept]
        hidden, last = buffer.hidden, buffer.last
        if buffer.dropped:
            rows = torch.cat([torch.arange(buffer.offsets[i], buffer.offsets[i + 1]) for i in kept] or [torch.empty(0)])
            hidden, last = hidden[rows.long()], last[rows.long()]
        offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        with put_file(self._store.path(planned.name)) as temporary:
            digest = write_tensors(temporary, {HIDDEN: hidden, LAST_HIDDEN: last, SAMPLE_OFFSETS: offsets})
        specs = block_specs(len(hidden), len(kept), hidden.shape[1], last.shape[1], hidden.dtype)
        block = Block(
            name=planned.name,
            samples=tuple(planned.samples[index] for index in kept),
            lengths=tuple(lengths),
            num_bytes=file_bytes(specs),
            sha256=digest,
            dropped=buffer.dropped,
            environment=environment,
        )
        self._store.record(block)
        return block


@contextmanager
def _writer_thread(max_pending: int) -> Iterator[Callable[[Callable[[], Block]], list[Block]]]:
    """Give a function that runs writes on a thread, `max_pending` at most, and returns finished blocks.

    On leaving, what was handed over is written to the end; a failed write raises at the next call or at the end.
    """
    pending: list[Future[Block]] = []

    def finish(at_most: int) -> list[Block]:
        return [pending.pop(0).result() for _ in range(max(0, len(pending) - at_most))]

    def submit(write: Callable[[], Block]) -> list[Block]:
        pending.append(thread.submit(write))
        return finish(max_pending)

    with ThreadPoolExecutor(1, thread_name_prefix="block-writer") as thread:
        yield submit
        finish(0)


def ensure_unmixed(blocks: Sequence[Block], environment: Mapping[str, Any], *, allow_mixed: bool, folder: str) -> None:
    """Refuse to add blocks to a cache whose blocks were computed in another environment.

    Raises:
        SettingsError: Listing every difference, unless mixing is allowed.
    """
    differing = sorted(
        {
            f"{key}: {block.environment.get(key)!r} then, {value!r} now"
            for block in blocks
            for key, value in environment.items()
            if block.environment.get(key) != value
        }
    )
    if differing and not allow_mixed:
        raise SettingsError(
            f"blocks in {folder} were captured differently: " + "; ".join(differing) + "; last bits would differ "
            "between samples: capture as before, set runtime.allow_mixed: true, or remove the folder to start again"
        )


def capture_blocks(
    store: BlockStore,
    wanted: Mapping[str, int],
    read_ids: Callable[[str], torch.Tensor],
    make_capturer: Callable[[], BlockCapturer],
    environment: Callable[[], Mapping[str, Any]],
    *,
    block_bytes: int,
    runtime: RuntimeSettings,
    make_progress: Callable[[int, int], Progress],
) -> dict[str, Block]:
    """Compute the blocks that are missing; the store's lock is held.

    With every sample present nothing is loaded and nothing is computed.

    Args:
        store: The capture identity's folder.
        wanted: Key of each distinct sample to its number of tokens, in the order of the samples.
        read_ids: Key to the sample's ids.
        make_capturer: Loads the target; called only if there is something to compute.
        environment: What moves last bits; asked only if there is something to compute.
        block_bytes: Size at which a block is full.
        runtime: Memory bound and whether environments may mix.
        make_progress: Given all tokens and those already there.

    Returns:
        The finished blocks that hold wanted samples, by name.
    """
    finished, refused = store.finished_blocks(check_digest=runtime.check_blocks == "digest")
    for reason in refused:
        logger.warning("not accepted, computed again: %s", reason)
    identity = store.identity
    itemsize = DTYPE_MAP[identity["compute_dtype"]].itemsize
    bytes_per_token = identity["hidden_size"] * (len(identity["target_layer_ids"]) + 1) * itemsize
    plan, due = plan_blocks(
        wanted, finished, store.read_plan(), bytes_per_token=bytes_per_token, block_bytes=block_bytes
    )
    if due:
        ensure_unmixed(
            list(_holding(finished, wanted).values()),
            environment(),
            allow_mixed=runtime.allow_mixed,
            folder=str(store.folder),
        )
        largest = max(sum(wanted[key] for key in block.samples) for block in due) * bytes_per_token
        pending = _pending_blocks(runtime.host_memory_gb, largest)
        store.write_plan(plan)
        total = sum(wanted.values())
        with make_progress(total, total - sum(wanted[k] for b in due for k in b.samples)) as progress:
            capturer = make_capturer()
            with _writer_thread(pending) as submit:
                for planned in due:
                    samples = [read_ids(key) for key in planned.samples]
                    for block in submit(capturer.compute(planned, samples, progress)):
                        finished[block.name] = block
        finished, _ = store.finished_blocks()
    return _holding(finished, wanted)


def _pending_blocks(host_memory_gb: float, largest_block: int) -> int:
    """Return how many blocks may wait for the disk beside the one being computed.

    Raises:
        SettingsError: Not even one block fits.
    """
    blocks = int(host_memory_gb * GIB // max(1, largest_block))
    if blocks < 1:
        raise SettingsError(
            f"runtime.host_memory_gb: {host_memory_gb} GiB hold no block of {largest_block} bytes: raise it, or "
            "lower target.block_bytes"
        )
    return blocks - 1


def _holding(finished: Mapping[str, Block], wanted: Mapping[str, int]) -> dict[str, Block]:
    """Return the blocks with at least one wanted sample, kept or dropped."""
    return {
        name: block
        for name, block in sorted(finished.items())
        if any(key in wanted for key in (*block.samples, *block.dropped))
    }
