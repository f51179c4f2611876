"""What a cache will consist of, worked out from the tokens of its samples: shards, manifest and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import SettingsError
from dspark_cache.manifest import MAX_SHARDS, ragged_manifest
from dspark_cache.ragged import StatesForm, feature_specs, samples_specs
from dspark_cache.reader import sample_specs
from dspark_cache.schema import INPUT_IDS
from dspark_cache.shard_file import file_bytes
from dspark_cache.shards import cut_by_bytes, num_shards

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dspark_cache.provenance import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """A cache to be written.

    Attributes:
        manifest: Its manifest, without `complete` and `format_version`.
        shards: Samples of each shard, by their numbers in the source.
        provenance: What it is made from, without files.
    """

    manifest: dict[str, Any]
    shards: Sequence[Sequence[int]]
    provenance: Provenance

    @property
    def layout(self) -> str:
        """ "padded" or "ragged"."""
        return self.provenance.layout

    @property
    def form(self) -> StatesForm:
        """How states are stored."""
        return StatesForm.of(self.manifest)


def plan_cache(
    manifest: Mapping[str, Any], lengths: Mapping[int, int], *, shard_bytes: int, provenance: Provenance
) -> CachePlan:
    """Cut samples into shards, in their order, in the layout that `provenance` says.

    Args:
        manifest: As of a padded cache.
        lengths: Tokens of each sample by its number in the source.
        shard_bytes: Bytes of states at which a ragged shard is full.
        provenance: What the cache is made from.

    Raises:
        SettingsError: More shards than names of six digits.
    """
    is_ragged = provenance.layout == "ragged"
    runs = cut_shards(
        list(lengths.values()),
        StatesForm.of(manifest),
        manifest["seq_length"],
        shard_size=None if is_ragged else manifest["shard_size"],
        shard_bytes=shard_bytes,
    )
    if is_ragged:
        counts = [len(run) for run in runs]
        manifest = ragged_manifest(manifest, pad_token_id=provenance.pad_token_id, shard_samples=counts)
    samples = list(lengths)
    return CachePlan(
        manifest=dict(manifest), shards=[samples[run.start : run.stop] for run in runs], provenance=provenance
    )


def cut_shards(
    lengths: Sequence[int], form: StatesForm, seq_length: int, *, shard_size: int | str | None, shard_bytes: int
) -> list[range]:
    """Cut samples into shards, in their order.

    Args:
        lengths: Tokens of each sample.
        form: How states are stored.
        seq_length: S.
        shard_size: Samples of a padded shard, or "auto"; None: the layout is ragged.
        shard_bytes: Bytes of states at which a ragged shard is full.

    Returns:
        Indices into `lengths` for each shard.

    Raises:
        SettingsError: More shards than names of six digits.
    """
    if shard_size is None:
        runs = cut_by_bytes((length * form.token_bytes for length in lengths), shard_bytes)
        if len(runs) > MAX_SHARDS:
            raise SettingsError(f"cache.shard_bytes: {len(runs)} shards, more than the {MAX_SHARDS} names: raise it")
        return runs
    step = resolve_shard_size(shard_size, form, seq_length, shard_bytes)
    if num_shards(len(lengths), step) > MAX_SHARDS:
        raise SettingsError(
            f"cache.shard_size: {len(lengths)} samples in shards of {step} need more than the {MAX_SHARDS} "
            "shards that names of six digits allow: raise it"
        )
    return [range(start, min(start + step, len(lengths))) for start in range(0, len(lengths), step)]


def resolve_shard_size(shard_size: int | str, form: StatesForm, seq_length: int, shard_bytes: int) -> int:
    """Return the samples of a padded shard; "auto" are as many as `shard_bytes` of states hold, but at least one."""
    if isinstance(shard_size, int):
        return shard_size
    return max(1, shard_bytes // (seq_length * form.token_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBytes:
    """Bytes of the files of one shard.

    Attributes:
        total: Of all of them, as they are read and copied.
        samples: Of the file with ids and masks alone; 0 in the padded layout.
        holes: Of padding, which the disk that wrote them need not hold.
    """

    total: int
    samples: int
    holes: int


def shard_bytes(lengths: Sequence[int], form: StatesForm, seq_length: int, layout: str) -> ShardBytes:
    """Work out the bytes of a shard from the tokens of its samples."""
    tokens, count = sum(lengths), len(lengths)
    if layout == "ragged":
        samples = file_bytes(samples_specs(tokens, count))
        return ShardBytes(total=file_bytes(feature_specs(tokens, count, form)) + samples, samples=samples, holes=0)
    shape = {"seq_length": seq_length, "target_hidden_dim": form.hidden_dim, "target_last_hidden_dim": form.last_dim}
    sample = sample_specs({"dtype": form.dtype, **shape})
    hole = sum(spec.row_bytes for key, spec in sample.items() if key != INPUT_IDS)
    total = file_bytes({key: spec.stacked(count) for key, spec in sample.items()})
    return ShardBytes(total=total, samples=0, holes=(count * seq_length - tokens) * hole)
