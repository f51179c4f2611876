"""The generic offline-cache API under the names of the reference; EAGLE-3 and other caches come in here.

Nothing is implemented here: every name is a function of the modules before it. The underscored names are part of
the reference's contract.
"""

from __future__ import annotations

from typing import Any

from dspark_cache.errors import DsparkCacheError
from dspark_cache.loaders import build_cached_dataloader, collate_cached
from dspark_cache.manifest import ensure_supervision_options_match, manifest_path
from dspark_cache.manifest import read_offline_manifest as read_manifest
from dspark_cache.manifest import write_offline_manifest as write_manifest
from dspark_cache.produce import ShardAccumulator as _ShardAccumulator
from dspark_cache.produce import dataloader_from_sample, write_cache_shards, write_cache_shards_distributed
from dspark_cache.produce import sequential_subset_loader as _sequential_subset_loader
from dspark_cache.reader import CachedTensorDataset
from dspark_cache.schema import MANIFEST_NAME
from dspark_cache.shards import (
    SHARD_RE,
    atomic_write,
    existing_shard_indices,
    partition_cache_shards,
    resume_start_sample,
    shard_path,
    validate_contiguous_shards,
    write_tensor_shard,
)

__all__ = [
    "MANIFEST_NAME",
    "SHARD_RE",
    "CachedTensorDataset",
    "_ShardAccumulator",
    "_sequential_subset_loader",
    "atomic_write",
    "build_cached_dataloader",
    "collate_cached",
    "dataloader_from_sample",
    "ensure_supervision_options_match",
    "existing_shard_indices",
    "load_safetensors",
    "manifest_path",
    "partition_cache_shards",
    "read_manifest",
    "resume_start_sample",
    "shard_path",
    "validate_contiguous_shards",
    "write_cache_shards",
    "write_cache_shards_distributed",
    "write_manifest",
    "write_tensor_shard",
]


def load_safetensors(cache_name: str) -> tuple[Any, Any]:
    """Return safetensors' `(save_file, safe_open)` for torch.

    Raises:
        DsparkCacheError: safetensors is not installed.
    """
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise DsparkCacheError(f"{cache_name} caches need safetensors: pip install safetensors") from error
    return save_file, safe_open
