"""Shards of a cache: their names, which samples lie in which, who writes them, and writing one from tensors."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.manifest import MAX_SHARDS, PathLike
from dspark_cache.schema import CACHE_KEYS, DSPARK_NAME, STATES_PREFIX
from dspark_cache.shard_file import write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

SHARD_RE = re.compile(rf"^{STATES_PREFIX}(\d{{6}})\.safetensors$")


def shard_name(shard_index: int) -> str:
    """Return the file name of a shard.

    Raises:
        ValueError: The index has more than six digits, so no reader would see the file.
    """
    if not 0 <= shard_index < MAX_SHARDS:
        raise ValueError(f"shard index must be from 0 to {MAX_SHARDS - 1}, found {shard_index}")
    return f"{STATES_PREFIX}{shard_index:06d}.safetensors"


def shard_path(cache_dir: PathLike, shard_index: int) -> str:
    """Return the path of shard `shard_index` inside `cache_dir`."""
    return str(Path(cache_dir) / shard_name(shard_index))


def existing_shard_indices(cache_dir: PathLike) -> set[int]:
    """Return the indices of the shard names in `cache_dir`; an absent folder has none."""
    try:
        names = os.listdir(cache_dir)  # noqa: PTH208 - names only; iterdir would build 10,000 Paths
    except FileNotFoundError:
        return set()
    matches = [match for match in map(SHARD_RE.match, names) if match]
    # The pattern also takes other scripts' digits and a line feed at the end, which no writer writes.
    return {int(match[1]) for match in matches if match.string == shard_name(int(match[1]))}


def cut_by_bytes(sizes: Iterable[int], limit: int) -> list[range]:
    """Cut a sequence into runs, greedily: a run is full where the next item would take it over `limit` bytes.

    An item larger than that has a run of its own. Items appended later leave all runs but the last as they are.

    Returns:
        Indices of each run.
    """
    runs: list[range] = []
    total = 0
    for index, size in enumerate(sizes):
        if not runs or total + size > limit:
            runs.append(range(index, index))
            total = 0
        runs[-1] = range(runs[-1].start, index + 1)
        total += size
    return runs


def num_shards(num_samples: int, shard_size: int) -> int:
    """Return how many shards hold `num_samples` samples: all full but the last."""
    return -(-num_samples // shard_size)


def shard_rows(num_samples: int, shard_size: int, shard_index: int) -> int:
    """Return how many samples shard `shard_index` holds."""
    return min(shard_size, num_samples - shard_index * shard_size)


def validate_contiguous_shards(cache_dir: PathLike, cache_name: str, num_samples: int, shard_size: int) -> list[int]:
    """Return the shard indices 0..N-1, refusing a cache that has others or too few.

    Raises:
        CacheNotFoundError: There is no such folder.
        CacheFormatError: Shards are missing or too many; some of both are named.
        ValueError: Negative `num_samples`, or `shard_size` below 1.
    """
    if not Path(cache_dir).is_dir():
        raise CacheNotFoundError(f"no {cache_name} cache: {cache_dir} is no folder")
    if num_samples < 0 or shard_size < 1:
        raise ValueError(f"expected num_samples >= 0 and shard_size >= 1, found {num_samples} and {shard_size}")
    expected = num_shards(num_samples, shard_size)
    found = existing_shard_indices(cache_dir)
    if len(found) == expected and (not found or max(found) == expected - 1):
        return list(range(expected))
    surplus = sorted(index for index in found if index >= expected)
    missing = [index for index in range(min(expected, len(found) + 10)) if index not in found]
    raise CacheFormatError(
        f"the {cache_name} cache in {cache_dir} must have shard indices 0..{expected - 1} for {num_samples} samples "
        f"in shards of {shard_size}; it has {len(found)} shards; missing shard indices {missing[:10]}, "
        f"unexpected shard indices {surplus[:10]}"
    )


def resume_start_sample(existing_shards: set[int], shard_size: int) -> int:
    """Return the first sample that a sequential resume has still to write.

    Raises:
        CacheFormatError: The shards are no contiguous prefix 0..k-1.
    """
    count = len(existing_shards)
    if existing_shards != set(range(count)):
        raise CacheFormatError(
            f"cannot resume: existing shards must be a contiguous prefix 0..{count - 1}, found shard indices "
            f"{sorted(existing_shards)[:10]}; remove the shards after the gap"
        )
    return count * shard_size


def partition_cache_shards(num_samples: int, shard_size: int, world_size: int, rank: int) -> tuple[int, int, int]:
    """Give `rank` its contiguous run of whole shards.

    The first (shards % world_size) ranks have one shard more; a rank beyond the shards has none.

    Returns:
        Index of its first shard, of its first sample, and the number of its samples.

    Raises:
        ValueError: `shard_size` or `world_size` below 1, `rank` outside 0..world_size-1, negative `num_samples`.
    """
    if num_samples < 0 or shard_size < 1 or world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            "expected num_samples >= 0, shard_size >= 1, world_size >= 1 and 0 <= rank < world_size, found "
            f"{num_samples}, {shard_size}, {world_size}, {rank}"
        )
    each, extra = divmod(num_shards(num_samples, shard_size), world_size)
    first_shard = rank * each + min(rank, extra)
    last_shard = first_shard + each + (rank < extra)
    start = min(first_shard * shard_size, num_samples)
    return first_shard, start, min(last_shard * shard_size, num_samples) - start


def atomic_write(path: PathLike, write_fn: Callable[[str], None]) -> str:
    """Have `write_fn` write a temporary file beside `path`, then put it in place durably; return the path.

    Permissions follow the umask, whatever `write_fn` sets. If it raises, `path` is as it was.
    """
    with put_file(Path(path)) as temporary:
        write_fn(str(temporary))
    return str(path)


def write_tensor_shard(
    cache_dir: PathLike, shard_index: int, samples: Mapping[str, torch.Tensor], keys: tuple[str, ...], cache_name: str
) -> str:
    """Write one shard that holds exactly `keys`, in this order; return its path.

    Args:
        cache_dir: Folder of the cache; made if absent.
        shard_index: Number of the shard.
        samples: Key to a tensor [n, ...]; further keys are left out.
        keys: Keys of the file.
        cache_name: Kind of cache, for messages.

    Raises:
        CacheFormatError: Keys are missing, or tensors have different numbers of samples.
    """
    missing = [key for key in keys if key not in samples]
    if missing:
        raise CacheFormatError(f"{cache_name} shard {shard_index}: missing required keys {missing}")
    counts = {key: samples[key].shape[0] if samples[key].dim() else None for key in keys}
    if len(set(counts.values())) > 1 or None in counts.values():
        raise CacheFormatError(f"{cache_name} shard {shard_index}: sample counts differ between keys: {counts}")
    path = Path(shard_path(cache_dir, shard_index))
    path.parent.mkdir(parents=True, exist_ok=True)
    with put_file(path) as temporary:
        write_tensors(temporary, {key: samples[key].detach().cpu().contiguous() for key in keys})
    return str(path)


def write_shard(cache_dir: PathLike, shard_index: int, samples: Mapping[str, torch.Tensor]) -> str:
    """Write one DSpark shard of the tensors `CACHE_KEYS`, each [n, S, ...]; return its path.

    Raises:
        CacheFormatError: Keys are missing, or tensors have different numbers of samples.
    """
    return write_tensor_shard(cache_dir, shard_index, samples, CACHE_KEYS, DSPARK_NAME)
