"""Dataloaders over a cache: collating samples and choosing their order, as the reference does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from dspark_cache.errors import SettingsError
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.schema import CACHE_KEYS, INPUT_IDS

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from torch.utils.data import Dataset

    from dspark_cache.manifest import PathLike

    Sample = dict[str, torch.Tensor]

PAD_TO_SEQ_LENGTH = "seq_length"
PAD_TO_LONGEST = "longest"
LENGTHS = "lengths"
"""Key of a batch's numbers of real tokens, int64 [B]."""


def collate_cached(features: list[Sample], keys: tuple[str, ...]) -> Sample:
    """Stack samples into a batch: each of `keys` becomes [B, ...].

    Raises:
        ValueError: No samples, or a sample lacks keys.
    """
    _ensure_samples(features, keys)
    return {key: torch.stack([feature[key] for feature in features]) for key in keys}


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
        fills = dict.fromkeys(CACHE_KEYS, 0) | {INPUT_IDS: self.pad_token_id}
        batch = {
            key: pad_sequence([feature[key] for feature in features], batch_first=True, padding_value=fill)
            for key, fill in fills.items()
        }
        return {**batch, LENGTHS: torch.tensor([len(feature[INPUT_IDS]) for feature in features])}


def build_cached_dataloader(
    dataset: Dataset[Sample],
    batch_size: int,
    shuffle: bool,
    collate_fn: Callable[[list[Sample]], Sample],
    num_workers: int = 0,
    distributed: bool = False,
) -> DataLoader[Sample]:
    """Build a dataloader over a cache; the last, short batch is kept.

    `shuffle` draws from torch's global generator. `distributed` gives each rank its share through a
    `DistributedSampler` (seed 0, padded to equal length): call its `set_epoch` every epoch. Workers are spawned
    once CUDA is initialised, since a forked one would abort there.

    Args:
        dataset: A map-style dataset.
        batch_size: Samples a batch and rank.
        shuffle: Whether the order is random.
        collate_fn: Samples to batch.
        num_workers: Worker processes; 0 reads in this one.
        distributed: Whether torch.distributed is initialised and each rank reads its share.
    """
    sampler: DistributedSampler[Sample] | None = None
    if distributed:
        sampler = DistributedSampler(dataset, shuffle=shuffle, seed=0, drop_last=False)
    cuda_is_up = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=shuffle if sampler is None else None,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate_fn,
        pin_memory=torch.cuda.is_available(),
        drop_last=False,
        multiprocessing_context="forkserver" if num_workers and cuda_is_up else None,
    )


def build_cached_dspark_dataloader(
    cache_dir: PathLike,
    batch_size: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    *,
    expect: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    pad_to: str = PAD_TO_SEQ_LENGTH,
) -> DataLoader[Sample]:
    """Build a dataloader over a DSpark cache; batches are dicts of `CACHE_KEYS`, each [B, S, ...].

    With `pad_to="longest"` a batch is as long as its longest sample, and has `lengths` int64 [B] as well.

    Args:
        cache_dir: Folder of the cache.
        batch_size: Samples a batch and rank.
        shuffle: Whether the order is random.
        num_workers: Worker processes; 0 reads in this one.
        distributed: Whether each rank reads its share.
        expect: See `CachedDSparkDataset`.
        pad_to: "seq_length" or, of a ragged cache, "longest".

    Raises:
        CacheNotFoundError: No manifest or no such folder.
        CacheFormatError: The cache is not as its manifest or `expect` says.
        SettingsError: Another `pad_to`, or "longest" of a padded cache.
    """
    if pad_to not in (PAD_TO_SEQ_LENGTH, PAD_TO_LONGEST):
        raise SettingsError(f"pad_to: expected {PAD_TO_SEQ_LENGTH!r} or {PAD_TO_LONGEST!r}, found {pad_to!r}")
    dataset = CachedDSparkDataset(cache_dir, expect=expect, padded=pad_to == PAD_TO_SEQ_LENGTH)
    collate: Callable[[list[Sample]], Sample] = collate_dspark
    if pad_to == PAD_TO_LONGEST:
        collate = PadToLongest(pad_token_id=dataset.manifest["pad_token_id"])
    return build_cached_dataloader(dataset, batch_size, shuffle, collate, num_workers, distributed)
