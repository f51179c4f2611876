"""Reading the samples of a batch together: into the batch's own memory, a few pieces at a time.

Between ragged and reader in the flow. The pieces of a batch are read on threads, so that a disk or a network has
several requests to answer at a time, and a page cache several processors to copy with.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    Sample = dict[str, torch.Tensor]

PIECE_BYTES = 1 << 23
"""Read at a time by one thread."""
_ALONE_BELOW_BYTES = 1 << 20
"""Less than this is read sooner than it is handed to threads."""


class Samples(list["Sample"]):
    """Samples that were read together; what each has of a key is a part of one tensor, which collating then returns."""

    def __init__(self, samples: Sequence[Sample], batch: Sample, pad_token_id: int | None = None) -> None:
        """Take samples.

        Args:
            samples: The samples.
            batch: Tensors whose rows they are; or whose rows they are the beginnings of, the rest being padding.
            pad_token_id: In the second case, the id at padding.
        """
        super().__init__(samples)
        self._batch = batch
        self._pad_token_id = pad_token_id
        self._read = [(sample, tuple(sample.items())) for sample in samples]

    def batch(self, keys: tuple[str, ...], pad_token_id: int | None = None) -> Sample | None:
        """Return `keys` of the batch, padded with this id, None: not padded.

        There is none, too, if samples or their tensors were exchanged since they were read.
        """
        is_as_read = len(self) == len(self._read) and all(
            found is sample and all(found.get(key) is tensor for key, tensor in items)
            for found, (sample, items) in zip(self, self._read, strict=True)
        )
        is_there = is_as_read and pad_token_id == self._pad_token_id and self._batch.keys() >= set(keys)
        return {key: self._batch[key] for key in keys} if is_there else None


class OpenShard(Protocol):
    """An open shard."""

    def read_positions(self, key: str, row: int, start: int, into: torch.Tensor) -> None:
        """Fill `into` from position `start` of a sample on."""


class Padding(NamedTuple):
    """What takes the place of a shard where there is nothing to read."""

    fill: int

    def read_positions(self, key: str, row: int, start: int, into: torch.Tensor) -> None:  # noqa: ARG002
        """Fill `into`, wherever it is."""
        into.fill_(self.fill)


class Piece(NamedTuple):
    """Some positions of a key of a sample, and where they are to be."""

    shard: OpenShard
    key: str
    row: int
    start: int
    into: torch.Tensor
    num_bytes: int


def cut_pieces(shard: OpenShard, key: str, row: int, into: torch.Tensor) -> list[Piece]:
    """Cut what is to be read of a sample, from its first position on, at about `PIECE_BYTES`."""
    size = into.nbytes
    if size <= PIECE_BYTES or into.dim() == 0:
        return [Piece(shard, key, row, 0, into, size)]
    step = max(1, len(into) * PIECE_BYTES // size)
    parts = [(start, into[start : start + step]) for start in range(0, len(into), step)]
    return [Piece(shard, key, row, start, part, part.nbytes) for start, part in parts]


def cut_shares(pieces: Sequence[Piece], num_bytes: int) -> list[list[Piece]]:
    """Cut pieces into runs of at least `num_bytes` each, the last one aside."""
    shares: list[list[Piece]] = []
    left = 0
    for piece in pieces:
        if left <= 0:
            shares.append([])
            left = num_bytes
        shares[-1].append(piece)
        left -= piece.num_bytes
    return shares


def _read_all(pieces: Sequence[Piece]) -> None:
    for shard, key, row, start, into, _ in pieces:
        shard.read_positions(key, row, start, into)


class ReadThreads:
    """Threads of this process to read on; they are started when they are needed and cross into no other process."""

    def __init__(self, count: int) -> None:
        """Read on at most `count` threads, the calling one included.

        Raises:
            ValueError: `count` below 1.
        """
        if count < 1:
            raise ValueError(f"read_threads must be at least 1, found {count}")
        self._count = count
        self._pool: ThreadPoolExecutor | None = None
        self._owner = 0

    def __reduce__(self) -> tuple[type[ReadThreads], tuple[int]]:
        """Leave the threads behind."""
        return ReadThreads, (self._count,)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read all pieces; if any fails, the first error is raised once no thread reads any more."""
        total = sum(piece.num_bytes for piece in pieces)
        if self._count == 1 or total < _ALONE_BELOW_BYTES:
            _read_all(pieces)
            return
        own, *others = cut_shares(pieces, max(_ALONE_BELOW_BYTES, min(PIECE_BYTES, total // self._count)))
        reads = [self._threads().submit(_read_all, share) for share in others]
        try:
            _read_all(own)
        finally:
            wait(reads)
        for read in reads:
            read.result()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._owner != os.getpid():
            # A forked process has the pool of its parent, but not its threads.
            self._pool = ThreadPoolExecutor(self._count - 1, thread_name_prefix="cache-read")
            self._owner = os.getpid()
        return self._pool
