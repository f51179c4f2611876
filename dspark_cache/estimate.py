"""How many bytes a run will take, worked out from token counts and the target's configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dspark_cache.blocks import block_specs
from dspark_cache.ragged import feature_specs, samples_specs
from dspark_cache.reader import sample_specs
from dspark_cache.schema import CACHE_KEYS, DTYPE_MAP, EMBED_KEY, INPUT_IDS, LM_HEAD_KEY, TensorSpec
from dspark_cache.shard_file import file_bytes
from dspark_cache.shards import cut_by_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_cache.settings import CacheSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShape:
    """What the bytes of a run follow from.

    Attributes:
        lengths: Tokens of each sample.
        seq_length: S.
        vocab_size: V.
        hidden_size: H.
        num_layers: L.
        compute_dtype: Key of `DTYPE_MAP` in which blocks are stored.
    """

    lengths: Sequence[int]
    seq_length: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    compute_dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes of one run, upper bounds: samples with the same ids and tied weights are counted twice.

    Attributes:
        scratch_bytes: Blocks of captured states, and the weights kept beside them.
        cache_bytes: All files of the published cache, as they are read and copied.
        held_bytes: The same on the disk that wrote them, where padding is holes.
    """

    scratch_bytes: int
    cache_bytes: int
    held_bytes: int


def estimate_run(shape: RunShape, settings: CacheSettings) -> Estimate:
    """Work out the bytes of a run whose section `cache` is `settings`."""
    tokens, compute = sum(shape.lengths), DTYPE_MAP[shape.compute_dtype]
    states = shape.hidden_size * shape.num_layers
    blocks = file_bytes(block_specs(tokens, len(shape.lengths), states, shape.hidden_size, compute))
    shards, padding = _shard_bytes(shape, settings)
    weights = _weight_bytes(shape, settings.dtype)
    return Estimate(
        scratch_bytes=blocks + _weight_bytes(shape, shape.compute_dtype),
        cache_bytes=shards + weights,
        held_bytes=shards - padding + weights,
    )


def _weight_bytes(shape: RunShape, dtype: str) -> int:
    weight = TensorSpec(dtype=DTYPE_MAP[dtype], shape=(shape.vocab_size, shape.hidden_size))
    return file_bytes({EMBED_KEY: weight, LM_HEAD_KEY: weight})


def _shard_bytes(shape: RunShape, settings: CacheSettings) -> tuple[int, int]:
    """Return the bytes of all shards, and how many of them are holes."""
    sample = sample_specs(
        {
            "seq_length": shape.seq_length,
            "dtype": settings.dtype,
            "target_hidden_dim": shape.hidden_size * shape.num_layers,
            "target_last_hidden_dim": shape.hidden_size,
        }
    )
    lengths, count = shape.lengths, len(shape.lengths)
    if settings.layout == "padded":
        full, rest = divmod(count, settings.shard_size)
        rows = [settings.shard_size] * full + [rest] * bool(rest)
        sizes = {number: file_bytes({key: sample[key].stacked(number) for key in CACHE_KEYS}) for number in set(rows)}
        empty = count * shape.seq_length - sum(lengths)
        hole = sum(spec.row_bytes for key, spec in sample.items() if key != INPUT_IDS)
        return sum(sizes[number] for number in rows), empty * hole
    row_bytes = shape.hidden_size * (shape.num_layers + 1) * DTYPE_MAP[settings.dtype].itemsize
    total = 0
    for run in cut_by_bytes((length * row_bytes for length in lengths), settings.shard_bytes):
        tokens = sum(lengths[run.start : run.stop])
        total += file_bytes(feature_specs(tokens, len(run), sample)) + file_bytes(samples_specs(tokens, len(run)))
    return total, 0
