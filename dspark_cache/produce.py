"""Precompute loops for callers of the reference's API: batches of a dataloader in, fixed-size shards out.

The DVC pipeline does not come this way (it streams rows from captured blocks); other producers, EAGLE-3 ones
included, do. `compute_batch` and `write_shard_fn` are theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Subset

from dspark_cache.schema import CACHE_KEYS, HIDDEN, LAST_HIDDEN
from dspark_cache.shards import partition_cache_shards

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    Batch = dict[str, torch.Tensor]
    ComputeBatch = Callable[[Batch], Batch]
    WriteShard = Callable[[str, int, Batch], str]


class ShardAccumulator:
    """Collect computed batches and hand whole shards to `write_shard_fn`, counting up from a first index.

    Holds less than one shard and one batch. `finalize` writes the last, partial shard.
    """

    def __init__(
        self,
        output_dir: str,
        shard_size: int,
        start_shard_index: int,
        write_shard_fn: WriteShard,
        logger: logging.Logger,
    ) -> None:
        """Start empty; nothing is written before the first shard is full.

        Raises:
            ValueError: `shard_size` below 1.
        """
        if shard_size < 1:
            raise ValueError(f"shard_size must be at least 1, found {shard_size}")
        self._output_dir = output_dir
        self._shard_size = shard_size
        self._shard_index = start_shard_index
        self._write_shard_fn = write_shard_fn
        self._logger = logger
        self._chunks: list[Batch] = []
        self._buffered = 0

    def add(self, batch_cache: Batch) -> None:
        """Append one computed batch, a dict of tensors [B, ...], and write the shards that it fills.

        Raises:
            ValueError: The tensors have different numbers of samples.
        """
        counts = {key: tensor.shape[0] for key, tensor in batch_cache.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"a batch needs tensors with the same number of samples, found {counts}")
        self._chunks.append(batch_cache)
        self._buffered += next(iter(counts.values()))
        while self._buffered >= self._shard_size:
            self._flush(self._shard_size)

    def finalize(self) -> None:
        """Write what is left, if anything is."""
        if self._buffered:
            self._flush()

    def _flush(self, max_samples: int | None = None) -> None:
        """Write the first `max_samples` samples held (None: all) as one shard."""
        due = self._buffered if max_samples is None else max_samples
        taken = self._take(due)
        samples = {key: torch.cat([chunk[key] for chunk in taken]) for key in taken[0]}
        self._buffered -= due
        path = self._write_shard_fn(self._output_dir, self._shard_index, samples)
        self._logger.info("wrote %s (%d samples)", path, due)
        self._shard_index += 1

    def _tail(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """Return what is left of a batch's tensor; less than a shard of it does not keep the whole batch's memory."""
        tail = tensor[start:]
        return tail.clone() if len(tail) < self._shard_size else tail

    def _take(self, due: int) -> list[Batch]:
        """Remove the first `due` samples from the chunks held, splitting the last one if need be."""
        taken: list[Batch] = []
        while due:
            chunk = self._chunks.pop(0)
            size = next(iter(chunk.values())).shape[0]
            if size > due:
                self._chunks.insert(0, {key: self._tail(tensor, due) for key, tensor in chunk.items()})
                chunk = {key: tensor[:due] for key, tensor in chunk.items()}
                size = due
            taken.append(chunk)
            due -= size
        return taken


def sequential_subset_loader(dataloader: DataLoader[Any], start: int, end: int) -> DataLoader[Any]:
    """Return a sequential loader over samples start (included) to end (excluded) of the loader's dataset.

    Batch size, collate function and worker settings are the source's, its multiprocessing context included: a
    worker that is forked after CUDA came up aborts.

    Raises:
        ValueError: The source has no fixed batch size.
    """
    if dataloader.batch_size is None:
        raise ValueError("the dataloader must have a batch_size: with a batch_sampler there is no order to resume")
    with_workers: dict[str, Any] = {}
    if dataloader.num_workers:
        with_workers["prefetch_factor"] = dataloader.prefetch_factor
        with_workers["persistent_workers"] = dataloader.persistent_workers
        with_workers["multiprocessing_context"] = dataloader.multiprocessing_context
    return DataLoader(
        Subset(dataloader.dataset, range(start, end)),
        batch_size=dataloader.batch_size,
        shuffle=False,
        num_workers=dataloader.num_workers,
        collate_fn=dataloader.collate_fn,
        pin_memory=dataloader.pin_memory,
        drop_last=False,
        timeout=dataloader.timeout,
        worker_init_fn=dataloader.worker_init_fn,
        generator=dataloader.generator,
        **with_workers,
    )


def _num_samples(dataloader: DataLoader[Any]) -> int:
    return len(dataloader.dataset)  # type: ignore[arg-type]  # Dataset has no __len__; map-style ones do


def dataloader_from_sample(dataloader: DataLoader[Any], start_sample: int) -> DataLoader[Any]:
    """Return an equivalent sequential loader that begins at `start_sample`; past the end it is empty.

    Raises:
        ValueError: `start_sample` is negative, or the source has no fixed batch size.
    """
    if start_sample < 0:
        raise ValueError(f"start_sample must be at least 0, found {start_sample}")
    end = _num_samples(dataloader)
    return sequential_subset_loader(dataloader, min(start_sample, end), end)


@torch.no_grad()
def write_cache_shards(
    dataloader: DataLoader[Any],
    output_dir: str,
    shard_size: int,
    start_shard_index: int,
    compute_batch: ComputeBatch,
    write_shard_fn: WriteShard,
    logger: logging.Logger,
) -> None:
    """Compute every batch of `dataloader` and write sequential shards from `start_shard_index` on.

    A resume passes `dataloader_from_sample(dataloader, resume_start_sample(...))`.
    """
    accumulator = ShardAccumulator(output_dir, shard_size, start_shard_index, write_shard_fn, logger)
    for batch in dataloader:
        accumulator.add(compute_batch(batch))
    accumulator.finalize()


@torch.no_grad()
def write_cache_shards_distributed(
    dataloader: DataLoader[Any],
    output_dir: str,
    shard_size: int,
    world_size: int,
    rank: int,
    compute_batch: ComputeBatch,
    write_shard_fn: WriteShard,
    logger: logging.Logger,
    sync_max_steps: Callable[[int], int] | None = None,
) -> None:
    """Compute and write this rank's contiguous run of shards, in lockstep with the other ranks.

    Where `compute_batch` is a collective (a sharded target), every rank must enter it equally often: a rank with
    fewer batches than the most loaded one repeats forwards of its first batch (the data set's, if it has none)
    and drops what they give.

    Args:
        dataloader: Loader over the whole data set; its order is that of the samples.
        output_dir: Folder shared by all ranks.
        shard_size: Samples a shard.
        world_size: Number of ranks.
        rank: This rank.
        compute_batch: Batch to cache tensors.
        write_shard_fn: Writes one shard; must replace an existing file at once, as re-runs write again.
        logger: Told of each shard.
        sync_max_steps: Reduces this rank's number of steps to the maximum over ranks; None: a single process.

    Raises:
        ValueError: See `partition_cache_shards`; or `sync_max_steps` gives less than this rank's own steps.
    """
    total = _num_samples(dataloader)
    first_shard, start, count = partition_cache_shards(total, shard_size, world_size, rank)
    loader = sequential_subset_loader(dataloader, start, start + count)
    steps = len(loader)
    max_steps = steps if sync_max_steps is None else sync_max_steps(steps)
    if max_steps < steps:
        raise ValueError(f"sync_max_steps gave {max_steps} for rank {rank}, which has {steps} steps")
    accumulator = ShardAccumulator(output_dir, shard_size, first_shard, write_shard_fn, logger)
    dummy = None
    for batch in loader:
        dummy = batch if dummy is None and max_steps > steps else dummy
        accumulator.add(compute_batch(batch))
    accumulator.finalize()
    if max_steps > steps:
        if dummy is None:
            dummy = next(iter(sequential_subset_loader(dataloader, 0, min(1, total))))
        for _ in range(max_steps - steps):
            compute_batch(dummy)


def compute_batch_cache(target_batch: Any, cache_dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Turn one captured batch into the tensors of a padded shard, on the CPU.

    Args:
        target_batch: Has `input_ids` [B, S], `loss_mask` [B, S], `target_hidden_states` [B, S, D] and
            `target_last_hidden_states` [B, S, H], as attributes or as items.
        cache_dtype: Dtype of the hidden states in the cache.

    Returns:
        `CACHE_KEYS`; ids and mask int64, states in `cache_dtype`, rounded to nearest even.

    Raises:
        ValueError: Fields are missing.
    """
    fields: Mapping[str, torch.Tensor | None] = {
        key: target_batch.get(key) if isinstance(target_batch, dict) else getattr(target_batch, key, None)
        for key in CACHE_KEYS
    }
    missing = [key for key, value in fields.items() if value is None]
    if missing:
        raise ValueError(f"the captured batch is missing required fields {missing}")
    return {
        key: value.detach().to(device="cpu", dtype=cache_dtype if key in (HIDDEN, LAST_HIDDEN) else torch.int64)
        for key, value in fields.items()
        if value is not None
    }
