"""Dataloaders over a cache: collating samples and choosing their order, as the reference does."""

from __future__ import annotations

import copy
import multiprocessing
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, get_worker_info

from dspark_cache.batch_reading import Samples
from dspark_cache.errors import SettingsError
from dspark_cache.reader import READ_THREADS, CachedDSparkDataset, CachedTensorDataset
from dspark_cache.samplers import SHUFFLE_SHARDS, CacheSampler
from dspark_cache.schema import CACHE_KEYS, INPUT_IDS
from dspark_cache.slabs import SlabBatch, Slabs, WorkersDone

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
    from multiprocessing.context import BaseContext

    from torch.utils.data import Dataset

    from dspark_cache.manifest import PathLike

    Sample = dict[str, torch.Tensor]

PAD_TO_SEQ_LENGTH = "seq_length"
PAD_TO_LONGEST = "longest"
_HELD = 2
"""Batches of a worker that training holds at a time: the last one until the next has come."""
LENGTHS = "lengths"
"""Key of a batch's numbers of real tokens, int64 [B]."""


def collate_cached(features: list[Sample], keys: tuple[str, ...]) -> Sample:
    """Stack samples into a batch: each of `keys` becomes [B, ...].

    Raises:
        ValueError: No samples, or a sample lacks keys.
    """
    _ensure_samples(features, keys)
    batch = features.batch(keys) if isinstance(features, Samples) else None
    return batch or {key: torch.stack([feature[key] for feature in features]) for key in keys}


def _ensure_samples(features: list[Sample], keys: tuple[str, ...]) -> None:
    if not features:
        raise ValueError("cannot collate an empty list of samples")
    missing = sorted({key for key in keys for feature in features if key not in feature})
    if missing:
        raise ValueError(f"samples are missing required keys {missing}")


def collate_dspark(features: list[Sample]) -> Sample:
    """Stack samples of a DSpark cache into a batch of `CACHE_KEYS`."""
    return collate_cached(features, CACHE_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToLongest:
    """Collates unpadded samples of a DSpark cache into a batch as long as the longest of them.

    Attributes:
        pad_token_id: Id at padding; masks and states are zero there.
    """

    pad_token_id: int

    def __call__(self, features: list[Sample]) -> Sample:
        """Return `CACHE_KEYS`, each [B, longest, ...], and `lengths` int64 [B].

        Raises:
            ValueError: No samples, or a sample lacks keys.
        """
        _ensure_samples(features, CACHE_KEYS)
        batch = features.batch(CACHE_KEYS, self.pad_token_id) if isinstance(features, Samples) else None
        if batch is None:
            fills = dict.fromkeys(CACHE_KEYS, 0) | {INPUT_IDS: self.pad_token_id}
            batch = {
                key: pad_sequence([feature[key] for feature in features], batch_first=True, padding_value=fill)
                for key, fill in fills.items()
            }
        return {**batch, LENGTHS: torch.tensor([len(feature[INPUT_IDS]) for feature in features])}


class CachedDataLoader(DataLoader["Sample"]):
    """A `DataLoader` that may read ahead on threads, and that says where an epoch stands.

    `state_dict` counts the batches that were delivered, not those that workers or threads have read ahead; it and
    `load_state_dict` need a `CacheSampler`.
    """

    def __init__(self, dataset: Dataset[Sample], *, read_ahead: int = 0, **options: Any) -> None:
        """Build the loader.

        Args:
            dataset: A map-style dataset.
            read_ahead: Batches that threads of this process read ahead, without the shared memory that worker
                processes need. The dataset must be safe to read by two threads, as those of this package are.
            options: Those of `DataLoader`.

        Raises:
            SettingsError: `read_ahead` below 0, or together with `num_workers`.
        """
        if read_ahead < 0 or (read_ahead and options.get("num_workers")):
            raise SettingsError(
                f"read_ahead: expected at least 0, and 0 with worker processes, which read ahead themselves; found "
                f"{read_ahead} and num_workers={options.get('num_workers', 0)}"
            )
        super().__init__(dataset, **options)
        self._read_ahead = read_ahead
        if isinstance(self.sampler, CacheSampler):
            self.sampler.counts_given = False

    def __iter__(self) -> Any:
        """Yield batches."""
        for batch in self._ahead() if self._read_ahead else self._batches():
            if isinstance(self.sampler, CacheSampler):
                self.sampler.consumed += self.batch_size or 1
            yield batch

    def _batches(self) -> Iterator[Sample]:
        """Yield batches as torch does; from workers they come on slabs, if the dataset knows those."""
        if not self.num_workers:
            yield from super().__iter__()
            return
        slabs = self._new_slabs()
        given = self.worker_init_fn, self.collate_fn, self.multiprocessing_context
        try:
            self.multiprocessing_context = _without_locks(given[2])
            if slabs:
                self.worker_init_fn, self.collate_fn = _UseSlabs(slabs, given[0]), _Packed(given[1], slabs)
            batches = super().__iter__()
        finally:
            self.worker_init_fn, self.collate_fn, self.multiprocessing_context = given
        for packed in batches:
            yield self._pinned(slabs.unpack(packed)) if slabs and isinstance(packed, SlabBatch) else packed

    def _new_slabs(self) -> Slabs | None:
        dataset, batch_size, ahead = self.dataset, self.batch_size, self.prefetch_factor
        if not (self.num_workers and batch_size and ahead and isinstance(dataset, CachedTensorDataset)):
            return None
        if self.persistent_workers:
            return None  # they keep what they were started with
        return Slabs(self.num_workers, ahead + _HELD, dataset.batch_bytes(batch_size))

    def _ahead(self) -> Iterator[Sample]:
        # As torch's own iterators draw a seed for workers, before a sampler draws its own.
        torch.empty((), dtype=torch.int64).random_()
        pending: deque[Future[Sample]] = deque()
        # Two, so that the next batch is under way before the last piece of this one has come.
        threads = ThreadPoolExecutor(min(2, self._read_ahead), thread_name_prefix="cache-read-ahead")
        # A generator that is held until the interpreter ends is closed when modules are empty already: too late to
        # call more than a finalizer that has run, as this one has by then.
        shut_down = weakref.finalize(self, threads.shutdown, cancel_futures=True)
        try:
            for indices in self.batch_sampler or ():
                pending.append(threads.submit(self._fetch, indices))
                if len(pending) > self._read_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            shut_down()

    def _fetch(self, indices: Sequence[int]) -> Sample:
        read_all = getattr(self.dataset, "__getitems__", None)
        return self._pinned(self.collate_fn(read_all(indices) if read_all else [self.dataset[i] for i in indices]))

    def _pinned(self, batch: Sample) -> Sample:
        return {key: tensor.pin_memory() for key, tensor in batch.items()} if self.pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands, as `CacheSampler.state_dict`.

        Raises:
            SettingsError: The order is not that of a `CacheSampler`.
        """
        return self._resumable().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin where `state_dict` stood.

        Raises:
            SettingsError: The state is of another order or cache; or the order is not that of a `CacheSampler`.
        """
        self._resumable().load_state_dict(state)

    def _resumable(self) -> CacheSampler:
        if not isinstance(self.sampler, CacheSampler):
            raise SettingsError("this order cannot be resumed: build the loader with a seed, or distributed=True")
        return self.sampler


def _without_locks(context: BaseContext | None) -> BaseContext:
    """Return a way of starting workers, None the usual one, with events that no killed worker leaves locked."""
    found: Any = copy.copy(context or multiprocessing.get_context())
    found.Event = WorkersDone
    return cast("BaseContext", found)


@dataclass(frozen=True, slots=True)
class _UseSlabs:
    """Lets a worker's dataset read into slabs."""

    slabs: Slabs
    then: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        worker: Any = get_worker_info()
        worker.dataset.slabs = self.slabs
        if self.then:
            self.then(worker_id)


@dataclass(frozen=True, slots=True)
class _Packed:
    """Collates in a worker, and packs what is on a slab."""

    collate: Callable[[list[Sample]], Sample]
    slabs: Slabs

    def __call__(self, features: list[Sample]) -> SlabBatch | Sample:
        return self.slabs.pack(self.collate(features))


def build_cached_dataloader(
    dataset: Dataset[Sample],
    batch_size: int,
    shuffle: bool | str,
    collate_fn: Callable[[list[Sample]], Sample],
    num_workers: int = 0,
    distributed: bool = False,
    *,
    seed: int | None = None,
    shuffle_shards: int = SHUFFLE_SHARDS,
    read_ahead: int = 0,
    pin_memory: bool | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> CachedDataLoader:
    """Build a dataloader over a cache; the last, short batch is kept.

    `shuffle=True` draws from torch's global generator. `distributed` gives each rank its share in the order of a
    `DistributedSampler` (padded to equal length): call its `set_epoch` every epoch. With `distributed`, a `seed` or
    `shuffle="shard"` the loader's sampler is a `CacheSampler`, and the loader can be resumed in mid-epoch. Workers are
    spawned once CUDA is initialised, since a forked one would abort there.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples a batch and rank.
        shuffle: Whether the order is random; "shard" mixes the samples of a few shards at a time (see `shard_order`).
        collate_fn: Samples to batch.
        num_workers: Worker processes; 0 reads in this one.
        distributed: Whether each rank reads its share.
        seed: Of the order, together with the epoch; None: 0, or without `distributed` torch's global generator.
        shuffle_shards: How many shards are mixed at a time.
        read_ahead: Batches that threads of this process read ahead; 0 with worker processes.
        pin_memory: Whether batches are page-locked; None: where CUDA is available.
        num_replicas: With `distributed`, the ranks among which the dataset is divided; None: all of torch.distributed.
        rank: Which of them this one is. Both must be said of a dataset that is a part of a cache's shards.

    Raises:
        SettingsError: Another `shuffle`, numbers out of range, or a part of the shards without `num_replicas`.
    """
    sampler = None
    division = _division(dataset, distributed, num_replicas, rank)
    if distributed or seed is not None or isinstance(shuffle, str):
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed or 0, "shuffle_shards": shuffle_shards}
        sampler = CacheSampler(cast("Sized", dataset), num_replicas=division[0], rank=division[1], **options)
    cuda_is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return CachedDataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        drop_last=False,
        multiprocessing_context="forkserver" if num_workers and cuda_is_up else None,
        read_ahead=read_ahead,
    )


def _division(dataset: object, distributed: bool, num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return among how many ranks a dataset is divided, and which of them this one is."""
    if num_replicas is not None or rank is not None:
        if not distributed or num_replicas is None or rank is None or not 0 <= rank < num_replicas:
            raise SettingsError(
                "num_replicas, rank: expected both, rank below num_replicas, and distributed=True; found "
                f"{num_replicas}, {rank} and distributed={distributed}"
            )
        return num_replicas, rank
    if not distributed:
        return 1, 0
    world = torch.distributed.get_world_size(), torch.distributed.get_rank()
    shards = getattr(dataset, "share", None)
    if shards and world[0] > 1:
        raise SettingsError(
            f"shards: with distributed=True, which of {world[0]} ranks read shards {shards[0]} to {shards[1] - 1} too? "
            "Say num_replicas, how many do (LOCAL_WORLD_SIZE, if those of a machine do), and rank, this one among them"
        )
    return world


def build_cached_dspark_dataloader(
    cache_dir: PathLike,
    batch_size: int,
    shuffle: bool | str,
    num_workers: int = 0,
    distributed: bool = False,
    *,
    expect: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    shards: range | None = None,
    pad_to: str = PAD_TO_SEQ_LENGTH,
    seed: int | None = None,
    shuffle_shards: int = SHUFFLE_SHARDS,
    read_ahead: int = 0,
    read_threads: int = READ_THREADS,
    pin_memory: bool | None = None,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> CachedDataLoader:
    """Build a dataloader over a DSpark cache; batches are dicts of `CACHE_KEYS`, each [B, S, ...].

    With `pad_to="longest"` a batch is as long as its longest sample, and has `lengths` int64 [B] as well.

    Args:
        cache_dir: Folder of the cache.
        batch_size: Samples a batch and rank.
        shuffle: Whether the order is random; "shard" mixes the samples of a few shards at a time.
        num_workers: Worker processes; 0 reads in this one.
        distributed: Whether each rank reads its share.
        expect: See `CachedDSparkDataset`.
        shards: The shards to read, see there. With `distributed` say `num_replicas` and `rank` too.
        pad_to: "seq_length" or, of a ragged cache, "longest".
        seed: See `build_cached_dataloader`, as for what follows.
        shuffle_shards: How many shards are mixed at a time.
        read_ahead: Batches that threads of this process read ahead.
        read_threads: Threads of each process that read at a time.
        pin_memory: Whether batches are page-locked; without workers files are read straight into such memory.
        num_replicas: See `build_cached_dataloader`, as for `rank`.
        rank: See there.

    Raises:
        CacheNotFoundError: No manifest or no such folder.
        CacheFormatError: The cache is not as its manifest or `expect` says.
        SettingsError: Another `pad_to` or `shuffle`, numbers or shards out of range, or "longest" of a padded cache.
    """
    if pad_to not in (PAD_TO_SEQ_LENGTH, PAD_TO_LONGEST):
        raise SettingsError(f"pad_to: expected {PAD_TO_SEQ_LENGTH!r} or {PAD_TO_LONGEST!r}, found {pad_to!r}")
    pins = torch.cuda.is_available() if pin_memory is None else pin_memory
    dataset = CachedDSparkDataset(
        cache_dir,
        expect=expect,
        shards=shards,
        padded=pad_to == PAD_TO_SEQ_LENGTH,
        read_threads=read_threads,
        pin_memory=pins,
    )
    collate: Callable[[list[Sample]], Sample] = collate_dspark
    if pad_to == PAD_TO_LONGEST:
        collate = PadToLongest(pad_token_id=dataset.manifest["pad_token_id"])
    return build_cached_dataloader(
        dataset,
        batch_size,
        shuffle,
        collate,
        num_workers,
        distributed,
        seed=seed,
        shuffle_shards=shuffle_shards,
        read_ahead=read_ahead,
        pin_memory=pins,
        num_replicas=num_replicas,
        rank=rank,
    )
