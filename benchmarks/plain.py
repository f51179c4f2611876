"""The plain ways that this project is compared with, written after what the reference does.

Samples padded to S; a whole forward with logits; batches collected to a shard, one `save_file`; a handle a shard kept
for ever, one `get_slice` a key and sample, `torch.stack`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

from dspark_cache.schema import CACHE_KEYS, HIDDEN, LAST_HIDDEN
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    Sample = dict[str, torch.Tensor]


class PlainDataset(Dataset["Sample"]):
    """Reads a padded cache sample by sample through safetensors' own reader."""

    def __init__(self, folder: Path, num_samples: int, shard_size: int) -> None:
        """Read the shards of `folder`."""
        self._folder = folder
        self._num_samples = num_samples
        self._shard_size = shard_size
        self._handles: dict[int, Any] = {}

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Read one sample."""
        shard, row = divmod(index, self._shard_size)
        if shard not in self._handles:
            self._handles[shard] = safe_open(self._folder / shard_name(shard), "pt")
        return {key: self._handles[shard].get_slice(key)[row : row + 1][0] for key in CACHE_KEYS}


def plain_loader(dataset: Dataset[Sample], order: Sequence[int], batch_size: int, num_workers: int = 0) -> Any:
    """Return batches of `CACHE_KEYS` in the given order."""
    return DataLoader(
        dataset, batch_size=batch_size, sampler=order, num_workers=num_workers, collate_fn=_stack, drop_last=False
    )


def _stack(samples: list[Sample]) -> Sample:
    return {key: torch.stack([sample[key] for sample in samples]) for key in CACHE_KEYS}


def write_plainly(path: Path, batches: Iterable[Sample]) -> None:
    """Write a shard from its batches."""
    collected: dict[str, list[torch.Tensor]] = {key: [] for key in CACHE_KEYS}
    for batch in batches:
        for key in CACHE_KEYS:
            collected[key].append(batch[key].cpu())
    save_file({key: torch.cat(parts) for key, parts in collected.items()}, path)


@torch.no_grad()
def capture_plainly(model: Any, batches: Iterable[torch.Tensor], layer_ids: Sequence[int]) -> list[Sample]:
    """Run whole forwards, logits and all states included, on padded batches of ids int64 [B, S]."""
    kept = []
    for ids in batches:
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        hidden = torch.cat([states[layer + 1] for layer in layer_ids], dim=-1)
        kept.append({HIDDEN: hidden, LAST_HIDDEN: states[-1]})
    return kept
