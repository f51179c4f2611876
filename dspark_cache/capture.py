"""Capturing the target's states: tokens in, blocks in scratch out.

Batches are formed inside one block from samples of like length, so that block bytes do not depend on where a run was
interrupted. Only real tokens are stored, in the dtype the target computes in. A thread hashes and writes finished
blocks while the next one is computed.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.blocks import Block, BlockStore, PlannedBlock, block_form, cut_batches, plan_blocks
from dspark_cache.errors import CaptureError, SettingsError
from dspark_cache.files import ensure_free_disk, put_file
from dspark_cache.forward import Capturer, States
from dspark_cache.ragged import feature_specs
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardWriter, file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from dspark_cache.progress import Progress
    from dspark_cache.settings import RuntimeSettings

logger = logging.getLogger(__name__)

GIB = 1 << 30


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
        drop_nonfinite: bool,
        describe: Callable[[str], str],
    ) -> None:
        """Prepare; `environment` has the batch budget, `describe` turns a sample's key into words for messages."""
        self._capturer = capturer
        self._store = store
        self._environment = dict(environment)
        self._to_host = _ToHost(capturer.device)
        self._drop = drop_nonfinite
        self._describe = describe

    def compute(
        self, planned: PlannedBlock, samples: Sequence[torch.Tensor], progress: Progress
    ) -> Callable[[], Block]:
        """Run one block's samples through the target; return what writes and records it.

        On CUDA out-of-memory the block starts again with half the batch budget.
        """
        max_tokens = self._environment["max_tokens_per_batch"]
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
        specs = block_form(self._store.identity).states(offsets[-1])
        states = {key: torch.empty(spec.shape, dtype=spec.dtype) for key, spec in specs.items()}
        return _Buffer(hidden=states[HIDDEN], last=states[LAST_HIDDEN], offsets=offsets, dropped={})

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
        rows = [slice(*buffer.offsets[index : index + 2]) for index in kept]
        lengths = [buffer.offsets[index + 1] - buffer.offsets[index] for index in kept]
        specs = feature_specs(sum(lengths), len(kept), block_form(self._store.identity))
        with put_file(self._store.path(planned.name)) as temporary, ShardWriter(temporary, specs) as writer:
            for key, states in ((HIDDEN, buffer.hidden), (LAST_HIDDEN, buffer.last)):
                for part in rows:
                    writer.append(key, states[part])
            writer.append(SAMPLE_OFFSETS, torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0))
            digest = writer.finish()
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
def _writer_thread(max_pending: int) -> Iterator[Callable[[Callable[[], Block]], None]]:
    """Give a function that runs writes on a thread and waits while more than `max_pending` are not done.

    On leaving, what was handed over is written to the end; a failed write raises at the next call or at the end.
    """
    pending: list[Future[Block]] = []

    def finish(at_most: int) -> None:
        while len(pending) > at_most:
            pending.pop(0).result()

    def submit(write: Callable[[], Block]) -> None:
        pending.append(thread.submit(write))
        finish(max_pending)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The distinct samples of a data set.

    Attributes:
        lengths: Key of each to its number of tokens, in the order of the samples.
        read_ids: Key to its ids, int32 [T].
        held_out: How many of the first are published as a cache of their own.
    """

    lengths: Mapping[str, int]
    read_ids: Callable[[str], torch.Tensor]
    held_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What computes; asked only if there is something to compute.

    Attributes:
        environment: What moves last bits of states here and now.
        load: Loads the target.
        progress: Given all tokens and those already there.
    """

    environment: Callable[[], Mapping[str, Any]]
    load: Callable[[], BlockCapturer]
    progress: Callable[[int, int], Progress]


def capture_blocks(
    store: BlockStore, wanted: Wanted, engine: Engine, *, block_bytes: int, runtime: RuntimeSettings
) -> dict[str, Block]:
    """Compute the blocks that are missing; the store's lock is held.

    With every sample present nothing is loaded and nothing is computed.

    Args:
        store: The capture identity's folder.
        wanted: The samples.
        engine: What computes.
        block_bytes: Size at which a block is full.
        runtime: Bounds on memory and disk, how finished blocks are checked, and whether environments may mix.

    Returns:
        The finished blocks that hold wanted samples, by name.

    Raises:
        SettingsError: No block fits into memory, they do not all fit on the disk, or environments would mix.
        CaptureError: The target gave something unusable.
    """
    finished, refused = store.finished_blocks(check_digest=runtime.check_blocks == "digest")
    for reason in refused:
        logger.warning("not accepted, computed again: %s", reason)
    form = block_form(store.identity)
    plan, due = plan_blocks(
        wanted.lengths,
        finished,
        store.read_plan(),
        bytes_per_token=form.token_bytes,
        block_bytes=block_bytes,
        held_out=wanted.held_out,
    )
    if due:
        present = list(_holding(finished, wanted.lengths).values())
        ensure_unmixed(present, engine.environment(), allow_mixed=runtime.allow_mixed, folder=str(store.folder))
        tokens = [sum(wanted.lengths[key] for key in block.samples) for block in due]
        max_pending = _pending_blocks(runtime.host_memory_gb, max(tokens) * form.token_bytes)
        if runtime.check_disk:
            files = (feature_specs(num, len(block.samples), form) for num, block in zip(tokens, due, strict=True))
            remedy = "set runtime.scratch_dir to another disk, or runtime.check_disk: false"
            ensure_free_disk(store.folder, sum(map(file_bytes, files)), what="captured states", remedy=remedy)
        store.write_plan(plan)
        _compute(due, wanted, engine, max_pending)
        finished, _ = store.finished_blocks()
    return _holding(finished, wanted.lengths)


def _compute(due: Sequence[PlannedBlock], wanted: Wanted, engine: Engine, max_pending: int) -> None:
    """Compute and write the blocks that are due, in their order."""
    total = sum(wanted.lengths.values())
    missing = sum(wanted.lengths[key] for block in due for key in block.samples)
    with engine.progress(total, total - missing) as progress:
        capturer = engine.load()
        with _writer_thread(max_pending) as submit:
            for planned in due:
                submit(capturer.compute(planned, [wanted.read_ids(key) for key in planned.samples], progress))


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
