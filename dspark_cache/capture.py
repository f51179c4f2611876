"""Capturing the target's states: tokens in, blocks in scratch out.

Batches are formed inside one block from samples of like length, so that block bytes depend neither on where a run was
interrupted nor on how many ranks it has. Only real tokens are stored, in the dtype the target computes in. A thread
hashes and writes finished blocks while the next one is computed.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dspark_cache.blocks import Block, BlockStore, PlannedBlock, block_form, cut_batches, longest_first, plan_blocks
from dspark_cache.errors import CaptureError, SettingsError, Terminated
from dspark_cache.files import ensure_free_disk, put_file
from dspark_cache.forward import Capturer, States
from dspark_cache.memory import empty
from dspark_cache.ragged import feature_specs
from dspark_cache.schema import GIB, HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardWriter, file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from dspark_cache.blocks import Slice
    from dspark_cache.ranks import Group, Peers, SharedProgress
    from dspark_cache.settings import RuntimeSettings

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True)
class _Buffer:
    """States of one block on the host, rows in the order of its samples."""

    hidden: torch.Tensor
    last: torch.Tensor
    offsets: list[int]
    dropped: dict[str, str]


class _ToHost:
    """Copies states to the host; on CUDA on a stream of its own, into one of two pinned buffers in turn.

    A batch must be used before the next but one is started.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._pinned: list[dict[str, torch.Tensor]] = [{}, {}]

    def start(self, states: States) -> tuple[States, Any]:
        """Return where the states will be, and the event after which they are."""
        if self._stream is None:
            return states, None
        self._pinned.reverse()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copies = {name: self._copy(name, getattr(states, name)) for name in ("hidden", "last", "finite")}
            event = self._stream.record_event()
        return States(**copies), event

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        pinned = self._pinned[0].get(name)
        if pinned is None or len(pinned) < len(tensor):
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._pinned[0][name] = pinned
        copy = pinned[: len(tensor)]
        copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # type: ignore[arg-type]  # only called with a stream
        return copy


class BlockCapturer:
    """Computes whole blocks and hands them to writer threads; holds a bounded number of blocks on the host."""

    def __init__(
        self,
        capturer: Capturer,
        store: BlockStore,
        environment: Mapping[str, Any],
        *,
        drop_nonfinite: bool,
        describe: Callable[[str], str],
        in_lockstep: bool = False,
    ) -> None:
        """Prepare.

        Args:
            capturer: Runs the target.
            store: Where blocks go.
            environment: Recorded with each block; has the batch budget.
            drop_nonfinite: Leave samples out that are not finite, instead of stopping.
            describe: Turns a sample's key into words for messages.
            in_lockstep: Whether forwards are collectives, so that no rank may run another number of them.
        """
        self._capturer = capturer
        self._store = store
        self._environment = dict(environment)
        self._to_host = _ToHost(capturer.device)
        self._drop = drop_nonfinite
        self._describe = describe
        self._in_lockstep = in_lockstep

    @property
    def max_tokens(self) -> int:
        """The batch budget: rows times width."""
        budget: int = self._environment["max_tokens_per_batch"]
        return budget

    @property
    def num_writers(self) -> int:
        """Blocks that are written at a time: a GPU may give more than one thread can hash; a CPU is busy itself."""
        return 2 if self._capturer.device.type == "cuda" else 1

    def num_forwards(self, samples: Sequence[torch.Tensor]) -> int:
        """Return how many forwards a block of these samples takes."""
        return len(cut_batches([len(sample) for sample in samples], self.max_tokens))

    def idle(self, num_forwards: int) -> None:
        """Take part in forwards of other ranks."""
        for _ in range(num_forwards):
            self._capturer.idle()

    def follow(self, samples: Sequence[torch.Tensor]) -> None:
        """Take part in the forwards of a block that another rank writes."""
        for batch in cut_batches([len(sample) for sample in samples], self.max_tokens):
            self._capturer([samples[index] for index in batch])

    def compute(
        self, planned: PlannedBlock, samples: Sequence[torch.Tensor], progress: SharedProgress
    ) -> Callable[[], Block]:
        """Run one block's samples through the target; return what writes and records it.

        On CUDA out-of-memory the block starts again with half the batch budget, unless ranks are in lockstep.

        Raises:
            CaptureError: A sample is not finite; or device memory is too small for ranks in lockstep.
        """
        max_tokens = self.max_tokens
        while True:
            try:
                buffer = self._fill(planned, samples, max_tokens, progress)
                break
            except torch.cuda.OutOfMemoryError as error:
                if self._in_lockstep:
                    raise CaptureError(
                        f"out of device memory with {max_tokens} tokens a batch: set runtime.max_tokens_per_batch to "
                        "less; ranks that share a target cannot do so one by one"
                    ) from error
                if max_tokens <= max(len(sample) for sample in samples):
                    raise
            torch.cuda.empty_cache()
            max_tokens //= 2
            logger.warning("%s: out of device memory, again with %d tokens a batch", planned.name, max_tokens)
        environment = {**self._environment, "used_tokens_per_batch": max_tokens}
        return lambda: self._write(planned, buffer, environment)

    def _fill(
        self, planned: PlannedBlock, samples: Sequence[torch.Tensor], max_tokens: int, progress: SharedProgress
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
        states = {key: empty(spec.shape, spec.dtype) for key, spec in specs.items()}
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
            is_other_dtype = not states.hidden.dtype == states.last.dtype == buffer.hidden.dtype
            if is_other_dtype or not bool(states.finite[start:stop].all()):
                self._ensure_finite(planned.samples[index], buffer, begin, end)
            start = stop

    def _ensure_finite(self, key: str, buffer: _Buffer, begin: int, end: int) -> None:
        """Look at every number of a sample, as it will be stored."""
        if all(bool(torch.isfinite(rows[begin:end]).all()) for rows in (buffer.hidden, buffer.last)):
            return
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
def _writer_threads(count: int, max_pending: int) -> Iterator[Callable[[Callable[[], Block]], None]]:
    """Give a function that runs writes on `count` threads and waits while more than `max_pending` are not done.

    On leaving, what was handed over is written to the end, of an interrupted run only what is being written; a failed
    write raises at the next call or at the end.
    """
    pending: list[Future[Block]] = []

    def finish(at_most: int) -> None:
        while len(pending) > at_most:
            pending.pop(0).result()

    def submit(write: Callable[[], Block]) -> None:
        pending.append(threads.submit(write))
        finish(max_pending)

    with ThreadPoolExecutor(count, thread_name_prefix="block-writer") as threads:
        try:
            yield submit
        except (KeyboardInterrupt, Terminated):
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        finish(0)


def environment_differences(present: Iterable[Mapping[str, Any]], environment: Mapping[str, Any]) -> list[str]:
    """Say in what `environment` differs from those of blocks that are there."""
    return sorted(
        {
            f"{key}: {then.get(key)!r} then, {value!r} now"
            for then in present
            for key, value in environment.items()
            if then.get(key) != value
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The distinct samples of a data set.

    Attributes:
        lengths: Key of each to its number of tokens, in the order of the samples.
        held_out: How many of the first are published as a cache of their own.
    """

    lengths: Mapping[str, int]
    held_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to be computed.

    Attributes:
        blocks: The blocks that are missing, longest first.
        num_tokens: Their tokens.
        present: Finished blocks that hold wanted samples, by name.
    """

    blocks: tuple[PlannedBlock, ...]
    num_tokens: int
    present: dict[str, Block]


def plan_due(
    store: BlockStore, wanted: Wanted, *, block_bytes: int, runtime: RuntimeSettings, part: Slice | None = None
) -> Due:
    """Find out which blocks are missing, and write the plan that a resume follows; the store's lock is held.

    Args:
        store: The capture identity's folder.
        wanted: The samples.
        block_bytes: Size at which a block is full.
        runtime: Bounds on memory and disk, and how finished blocks are checked.
        part: The slice of the blocks to compute; None: all.

    Raises:
        SettingsError: No block fits into memory, or they do not all fit on the disk.
    """
    earlier = store.read_plan()
    finished, refused = store.finished_blocks(earlier, check_digest=runtime.check_blocks == "digest")
    for reason in refused:
        logger.warning("not accepted, computed again: %s", reason)
    form = block_form(store.identity)
    plan, missing = plan_blocks(
        wanted.lengths,
        finished,
        earlier,
        bytes_per_token=form.token_bytes,
        block_bytes=block_bytes,
        held_out=wanted.held_out,
    )
    tokens = {block.name: sum(wanted.lengths.get(key, 0) for key in block.samples) for block in plan}
    chosen = tokens.keys() if part is None else part.choose(tokens)
    due = {block.name: block for block in missing if block.name in chosen}
    order = longest_first({name: tokens[name] for name in due})
    if due:
        host_blocks(runtime.host_memory_gb, tokens[order[0]] * form.token_bytes)
        if runtime.check_disk:
            files = (feature_specs(tokens[name], len(block.samples), form) for name, block in due.items())
            remedy = "set runtime.scratch_dir to another disk, or runtime.check_disk: false"
            ensure_free_disk(store.folder, sum(map(file_bytes, files)), what="captured states", remedy=remedy)
        store.write_plan(plan)
    return Due(
        blocks=tuple(due[name] for name in order),
        num_tokens=sum(tokens[name] for name in order),
        present=holding(finished, wanted.lengths),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The ranks that compute together, as one of them sees them.

    Attributes:
        peers: All ranks.
        group: Those that share a copy of the target with this one.
        parallelism: "replicate", "fsdp" (each rank of a group computes another block, in lockstep) or "tensor" (all
            compute the same block, the first one writes it).
    """

    peers: Peers
    group: Group
    parallelism: str

    def take(self, blocks: Sequence[_T]) -> tuple[_T | None, bool]:
        """Take the next blocks of those that all groups share.

        Returns:
            The block of this rank, None if there is none for it, and whether its group has any.
        """
        self.peers.ensure_no_failure()
        turn = self.group.agree(self.peers.add("turns", 1) - 1 if self.group.rank == 0 else 0)
        count, mine = (self.group.size, self.group.rank) if self.parallelism == "fsdp" else (1, 0)
        taken = blocks[turn * count : (turn + 1) * count]
        return (taken[mine] if mine < len(taken) else None), bool(taken)


def compute_blocks(
    blocks: Sequence[_T],
    read_block: Callable[[_T], tuple[PlannedBlock, list[torch.Tensor]]],
    capturer: BlockCapturer,
    crew: Crew,
    progress: SharedProgress,
    max_pending: int,
) -> None:
    """Compute and write blocks until none is left that no other rank has taken.

    Args:
        blocks: All that are due, the same on each rank.
        read_block: Gives one of them with the ids of its samples, int32 [T] each.
        capturer: Computes.
        crew: The ranks.
        progress: Told of tokens.
        max_pending: How many blocks may wait for the disk.

    Raises:
        CaptureError: The target gave something unusable.
        PeerLostError: Another rank has failed.
    """
    is_writer = crew.parallelism != "tensor" or crew.group.rank == 0
    with _writer_threads(capturer.num_writers, max_pending) as submit:
        while True:
            block, is_left = crew.take(blocks)
            if not is_left:
                return
            planned, samples = (None, []) if block is None else read_block(block)
            forwards = capturer.num_forwards(samples)
            most = crew.group.most(forwards)
            if planned and is_writer:
                submit(capturer.compute(planned, samples, progress))
            elif planned:
                capturer.follow(samples)
            capturer.idle(most - forwards)


def host_blocks(host_memory_gb: float, largest_block: int) -> int:
    """Return how many blocks may be on the host: the one being computed, and those that wait for the disk.

    Raises:
        SettingsError: Not even one block fits.
    """
    blocks = int(host_memory_gb * GIB // max(1, largest_block))
    if blocks < 1:
        raise SettingsError(
            f"runtime.host_memory_gb: {host_memory_gb} GiB hold no block of {largest_block} bytes: raise it, or "
            "lower target.block_bytes"
        )
    return blocks


def holding(finished: Mapping[str, Block], wanted: Mapping[str, int]) -> dict[str, Block]:
    """Return the blocks with at least one wanted sample, kept or dropped."""
    return {
        name: block
        for name, block in sorted(finished.items())
        if any(key in wanted for key in (*block.samples, *block.dropped))
    }
