"""The order in which samples are read, and where in it training was interrupted.

An order is a function of seed and epoch alone, so that to go on in mid-epoch reads nothing, and ranks may be another
number than before: a position counts the samples that all ranks together have consumed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DistributedSampler

from dspark_cache.errors import SettingsError
from dspark_cache.strict_json import is_int

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized

SHUFFLE_BY_SHARD = "shard"
SHUFFLE_SHARDS = 8
"""Default number of shards that are mixed at a time."""


class Sharded(Protocol):
    """A dataset whose samples lie shard by shard."""

    @property
    def shard_samples(self) -> list[int]:
        """Number of samples of each shard."""


def shard_order(shard_samples: list[int], mixed: int, generator: torch.Generator) -> torch.Tensor:
    """Return an order, int64 [n], that reads every shard from front to back, about `mixed` of them at a time.

    Shards follow each other in a random order. A sample's place is that of its shard plus a random number below
    `mixed`; among the samples of a shard the random numbers rise. So at any place samples come from at most
    `mixed + 1` shards.
    """
    counts = torch.tensor(shard_samples, dtype=torch.int64)
    shards = torch.repeat_interleave(torch.arange(len(counts)), counts)
    places = torch.randperm(len(counts), generator=generator)
    shift = torch.rand(len(shards), generator=generator, dtype=torch.float64) * mixed
    by_shift = shift.argsort()
    rising = shift[by_shift[shards[by_shift].argsort(stable=True)]]
    return (places[shards] + rising).argsort(stable=True)


class CacheSampler(DistributedSampler[int]):
    """Give each rank its share of an order that can be resumed in mid-epoch, by the same or another number of ranks.

    Unless shards are mixed, the order of an epoch is that of torch's `DistributedSampler` with the same seed; as
    there, call `set_epoch` every epoch. Iterating again without it repeats the epoch from its start. Ranks that would
    have a sample less than others end with one that was given before, see `is_at_repeat`.

    Attributes:
        consumed: Samples of this rank since its iteration began.
        counts_given: Whether each index that is given counts as consumed. A loader that is ahead of training counts
            what it delivers instead.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool | str = True,
        seed: int = 0,
        shuffle_shards: int = SHUFFLE_SHARDS,
    ) -> None:
        """Prepare the order of a dataset's samples.

        Args:
            dataset: Its length counts; with `shuffle="shard"` also its `shard_samples`.
            num_replicas: Ranks that read.
            rank: This one.
            shuffle: False: the cache's order. True: any order. "shard": any order of shards, of which some are mixed.
            seed: Of the order, together with the epoch.
            shuffle_shards: How many shards are mixed at a time.

        Raises:
            SettingsError: Another `shuffle`, or `shuffle_shards` below 1.
        """
        if not isinstance(shuffle, bool) and shuffle != SHUFFLE_BY_SHARD:
            raise SettingsError(f"shuffle: expected true, false or {SHUFFLE_BY_SHARD!r}, found {shuffle!r}")
        if shuffle_shards < 1:
            raise SettingsError(f"shuffle_shards: expected at least 1, found {shuffle_shards}")
        super().__init__(dataset, num_replicas, rank, shuffle=bool(shuffle), seed=seed)  # type: ignore[arg-type]
        self._shuffle = shuffle
        self._shuffle_shards = shuffle_shards
        self._resume_at = 0
        self._start = 0
        self.consumed = 0
        self.counts_given = True

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices, from the position of a state that was loaded on."""
        self._start, self._resume_at, self.consumed = self._resume_at, 0, 0
        order = self._order()
        rest = order[self._start :]
        missing = -len(rest) % self.num_replicas
        if missing:
            rest = torch.cat([rest, order.repeat(math.ceil(missing / len(order)))[:missing]])
        for index in rest[self.rank :: self.num_replicas].tolist():
            self.consumed += self.counts_given
            yield index

    def _order(self) -> torch.Tensor:
        """Return the order of the whole epoch, int64 [n]."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        if self._shuffle == SHUFFLE_BY_SHARD:
            return shard_order(self.dataset.shard_samples, self._shuffle_shards, generator)  # type: ignore[attr-defined]
        count = len(self.dataset)  # type: ignore[arg-type]
        return torch.randperm(count, generator=generator) if self._shuffle else torch.arange(count)

    @property
    def is_at_repeat(self) -> bool:
        """Whether the sample that this rank consumed last was given before, so that all ranks have as many.

        Only the last one of an epoch can be. A loader that delivers batches counts a batch at a time: its last sample.
        """
        left = len(self.dataset) - self._start  # type: ignore[arg-type]
        missing = -left % self.num_replicas
        return left <= self.consumed * self.num_replicas and self.rank >= self.num_replicas - missing

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; another one than before is read from its start."""
        if epoch != self.epoch:
            self._resume_at = self._start = self.consumed = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands: plain values, the same on every rank that has consumed as much."""
        start = max(self._start, self._resume_at)
        position = min(start + self.consumed * self.num_replicas, len(self.dataset))  # type: ignore[arg-type]
        return {"epoch": self.epoch, "position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` stood: the next iteration begins there.

        Raises:
            SettingsError: It is of another order or another cache; every difference is listed.
        """
        faults = [
            f"{key}: {state.get(key)!r} then, {value!r} now"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        numbers = [state.get("epoch"), state.get("position")]
        if not all(is_int(number) and number >= 0 for number in numbers):
            faults.append(f"expected an epoch and a position, found {numbers}")
        if faults:
            raise SettingsError("this state cannot be resumed: " + "; ".join(faults))
        self.set_epoch(state["epoch"])
        self._resume_at, self._start, self.consumed = state["position"], 0, 0

    def _identity(self) -> dict[str, Any]:
        """Return what the order depends on, the epoch aside."""
        return {
            "num_samples": len(self.dataset),  # type: ignore[arg-type]
            "cache": getattr(self.dataset, "digest", None),
            "shards": getattr(self.dataset, "share", None),
            "shuffle": self._shuffle,
            "shuffle_shards": self._shuffle_shards if self._shuffle == SHUFFLE_BY_SHARD else None,
            "seed": self.seed,
        }
