"""Publishing: captured blocks and tokens in, a padded or ragged cache out, put in place by one rename.

Rows are streamed from the blocks into the shards, one sample at a time, each byte hashed once as it is written;
the zeros after a sample's end are holes. The manifest goes down first as incomplete and is completed last.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.blocks import WEIGHTS_NAME, Block, BlockStore
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError, SettingsError
from dspark_cache.files import dump_json, file_digest, put_file, put_folder
from dspark_cache.ledger import Ledger, Place, place_samples
from dspark_cache.manifest import MAX_SHARDS, build_cache_manifest, ragged_manifest, version_of, write_manifest
from dspark_cache.provenance import FileRecord, Provenance
from dspark_cache.ragged import feature_specs, samples_name, samples_specs
from dspark_cache.reader import sample_specs
from dspark_cache.schema import (
    DTYPE_MAP,
    EMBED_KEY,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LM_HEAD_KEY,
    LOSS_MASK,
    MANIFEST_NAME,
    SAMPLE_OFFSETS,
    STAGE_VERSIONS,
    TARGET_WEIGHTS_NAME,
    TensorSpec,
)
from dspark_cache.shard_file import ShardFile, ShardWriter
from dspark_cache.shards import cut_by_bytes, num_shards, shard_name
from dspark_cache.target_weights import put_target_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dspark_cache.progress import Progress
    from dspark_cache.settings import CacheSettings, Settings
    from dspark_cache.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a cache is published from.

    Attributes:
        tokens: The samples.
        ledger: What was captured.
        store: The blocks.
    """

    tokens: Tokens
    ledger: Ledger
    store: BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSample:
    """One sample of the cache: its index in `tokens/`, its key, and where its states lie."""

    index: int
    key: str
    place: Place

    @property
    def num_tokens(self) -> int:
        """T of this sample."""
        return self.place.stop - self.place.start


class _Source:
    """Reads samples' rows from tokens and blocks; one block file is open at a time."""

    def __init__(self, captured: Captured, dtype_name: str) -> None:
        self._tokens = captured.tokens
        self._store = captured.store
        self._layer_ids = captured.ledger.layer_ids
        self._hidden_size = captured.ledger.hidden_size
        self._dtype_name = dtype_name
        self._dtype = DTYPE_MAP[dtype_name]
        self.pad_token_id = captured.tokens.pad_token_id
        self._open: tuple[str, ShardFile] | None = None

    def rows(self, key: str, sample: PlacedSample) -> torch.Tensor:
        """Return the rows [T, ...] of a sample's real tokens: ids int32, mask uint8, states in the cache's dtype."""
        if key == INPUT_IDS:
            return self._tokens.input_ids(sample.index)
        if key == LOSS_MASK:
            return self._tokens.loss_mask(sample.index)
        rows = self._block(sample.place.block).read_rows(key, sample.place.start, sample.place.stop)
        cast = rows.to(self._dtype)
        if cast is not rows and not bool(torch.isfinite(cast).all()):
            raise CaptureError(
                f"sample {sample.index}: {self._overflowing(key, rows, cast)} does not fit into cache.dtype "
                f"{self._dtype_name}: use cache.dtype: bf16 or fp32"
            )
        return cast

    def counts(self, samples: Sequence[PlacedSample]) -> dict[str, int]:
        """Return samples, tokens and supervised tokens of a shard."""
        return {
            "samples": len(samples),
            "tokens": sum(sample.num_tokens for sample in samples),
            "supervised_tokens": sum(int(self._tokens.loss_mask(sample.index).sum()) for sample in samples),
        }

    def _overflowing(self, key: str, rows: torch.Tensor, cast: torch.Tensor) -> str:
        """Name the first state that is too large, and its largest value."""
        column = int(torch.isfinite(cast).all(dim=0).logical_not().nonzero()[0])
        layer = column // self._hidden_size
        name = f"layer {self._layer_ids[layer]}" if key == HIDDEN else "the last hidden state"
        state = rows[:, layer * self._hidden_size : (layer + 1) * self._hidden_size]
        return f"{name}, with values up to {float(state.abs().max()):.6g},"

    def _block(self, block: Block) -> ShardFile:
        if self._open is None or self._open[0] != block.name:
            self._open = (block.name, self._store.open(block))
        return self._open[1]


def ensure_blocks(ledger: Ledger, store: BlockStore, *, check_digest: bool) -> None:
    """Check that the blocks of the ledger and the weights are in scratch, before anything is written.

    Raises:
        CacheNotFoundError: Some are gone or are others; the folder and the ways out are named.
    """
    faults = []
    for block in ledger.blocks:
        try:
            store.open(block, check_digest=check_digest)
        except (CacheNotFoundError, CacheFormatError) as error:
            faults.append(str(error))
    weights = store.folder / WEIGHTS_NAME
    if not weights.is_file() or file_digest(weights) != ledger.weights_sha256:
        faults.append(f"{weights} is gone or not the one of the ledger")
    if faults:
        raise CacheNotFoundError(
            f"{len(faults)} files of captured states in {store.folder} are gone or changed, the first: {faults[0]}; "
            "either revert the param (dvc repro restores the old cache), or capture again with "
            "dvc repro -f -s capture && dvc repro"
        )


def publish_cache(captured: Captured, settings: Settings, path: Path, make_progress: Callable[[int], Progress]) -> None:
    """Write the cache at `path`; it appears there complete or not at all.

    Args:
        captured: Tokens, ledger and blocks.
        settings: Section `cache` says what to write, `runtime.check_blocks` how to check the blocks.
        path: Folder of the cache; an earlier one is replaced.
        make_progress: Given the number of bytes to write.

    Raises:
        CacheNotFoundError: Blocks are gone.
        CacheFormatError: A sample is in no block.
        CaptureError: A value does not fit into the cache's dtype.
        SettingsError: More shards than names.
        LockedError: Another process is writing the same cache, or capturing the same states.
    """
    ledger, store = captured.ledger, captured.store
    with store.lock():
        ensure_blocks(ledger, store, check_digest=settings.runtime.check_blocks == "digest")
        _publish(captured, settings.cache, path, make_progress)


def _publish(captured: Captured, settings: CacheSettings, path: Path, make_progress: Callable[[int], Progress]) -> None:
    tokens, ledger = captured.tokens, captured.ledger
    shards = cut_shards(placed_samples(tokens, ledger), ledger, settings)
    manifest = build_manifest(tokens, ledger, settings, [len(shard) for shard in shards])
    specs = sample_specs(manifest)
    source = _Source(captured, settings.dtype)
    total = sum(_shard_bytes(shard, specs, settings) for shard in shards)
    with put_folder(path) as folder, make_progress(total) as progress:
        write_manifest(folder, {**manifest, "complete": False})
        files: dict[str, FileRecord] = {}
        write = _write_padded if settings.layout == "padded" else _write_ragged
        for number, shard in enumerate(shards):
            files |= write(folder, number, shard, _Job(specs=specs, source=source, progress=progress))
        files[TARGET_WEIGHTS_NAME] = _write_weights(folder / TARGET_WEIGHTS_NAME, captured, settings)
        final = dump_json({**manifest, "complete": True, "format_version": version_of(manifest)}).encode()
        files[MANIFEST_NAME] = FileRecord(num_bytes=len(final), sha256=hashlib.sha256(final).hexdigest(), counts={})
        build_provenance(tokens, ledger, settings, files).put(folder)
        write_manifest(folder, {**manifest, "complete": True})


def placed_samples(tokens: Tokens, ledger: Ledger) -> list[PlacedSample]:
    """Find the states of every sample that was not dropped, in order."""
    lengths = [tokens.length(index) for index in range(len(tokens))]
    keys = tokens.keys()
    places = place_samples(ledger, keys, lengths)
    return [
        PlacedSample(index=index, key=key, place=place)
        for index, (key, place) in enumerate(zip(keys, places, strict=True))
        if place is not None
    ]


def cut_shards(samples: Sequence[PlacedSample], ledger: Ledger, settings: CacheSettings) -> list[list[PlacedSample]]:
    """Cut samples into shards: padded ones by number, ragged ones greedily by the bytes of their states.

    Raises:
        SettingsError: More shards than names of six digits.
    """
    if settings.layout == "padded":
        _check_shard_count(len(samples), settings.shard_size)
        step = settings.shard_size
        return [list(samples[start : start + step]) for start in range(0, len(samples), step)]
    row_bytes = ledger.hidden_size * (len(ledger.layer_ids) + 1) * DTYPE_MAP[settings.dtype].itemsize
    runs = cut_by_bytes((sample.num_tokens * row_bytes for sample in samples), settings.shard_bytes)
    if len(runs) > MAX_SHARDS:
        raise SettingsError(f"cache.shard_bytes: {len(runs)} shards, more than the {MAX_SHARDS} names: raise it")
    return [list(samples[run.start : run.stop]) for run in runs]


def _check_shard_count(num_samples: int, shard_size: int) -> None:
    if num_shards(num_samples, shard_size) > MAX_SHARDS:
        raise SettingsError(
            f"cache.shard_size: {num_samples} samples in shards of {shard_size} need more than the {MAX_SHARDS} "
            "shards that names of six digits allow: raise it"
        )


def build_manifest(tokens: Tokens, ledger: Ledger, settings: CacheSettings, shard_samples: list[int]) -> dict[str, Any]:
    """Return the manifest of the cache, without its `complete` marker.

    Args:
        tokens: The samples.
        ledger: What was captured.
        settings: Section `cache`.
        shard_samples: Samples of each shard.
    """
    made_from = tokens.identity
    manifest = build_cache_manifest(
        target_model=ledger.target_model,
        target_model_type=ledger.target_model_type,
        target_text_config=ledger,
        seq_length=tokens.seq_length,
        dtype=settings.dtype,
        num_samples=sum(shard_samples),
        shard_size=settings.shard_size,
        target_layer_ids=ledger.layer_ids,
        train_data_path=made_from["train_data_path"],
        train_split=made_from["train_split"],
        shuffle_seed=made_from["shuffle_seed"],
        mask_reasoning_content=made_from["mask_reasoning_content"],
        chat_template_sha256=made_from["chat_template_sha256"],
        mask_generation_prompt=made_from["mask_generation_prompt"],
    )
    if settings.layout == "padded":
        return manifest
    return ragged_manifest(manifest, pad_token_id=tokens.pad_token_id, shard_samples=shard_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the shards of one cache have in common.

    Attributes:
        specs: Dtype and shape of a padded sample's tensors.
        source: Where rows come from.
        progress: Told of written bytes.
    """

    specs: dict[str, TensorSpec]
    source: _Source
    progress: Progress


def _shard_bytes(samples: Sequence[PlacedSample], specs: dict[str, TensorSpec], settings: CacheSettings) -> int:
    """Return the bytes of a shard's tensors that progress counts: padding too, offsets not."""
    if settings.layout == "padded":
        return len(samples) * sum(spec.num_bytes for spec in specs.values())
    tokens = sum(sample.num_tokens for sample in samples)
    return tokens * (specs[HIDDEN].row_bytes + specs[LAST_HIDDEN].row_bytes)


def _write_padded(folder: Path, number: int, samples: Sequence[PlacedSample], job: _Job) -> dict[str, FileRecord]:
    """Write one padded shard; return its file's record."""
    path = folder / shard_name(number)
    stacked = {key: spec.stacked(len(samples)) for key, spec in job.specs.items()}
    with put_file(path) as temporary, ShardWriter(temporary, stacked) as writer:
        for key, spec in job.specs.items():
            for sample in samples:
                writer.append_bytes(key, job.source.rows(key, sample).to(spec.dtype))
                _pad(writer, key, spec, sample.num_tokens, job.source.pad_token_id)
                job.progress.advance(spec.num_bytes)
        digest = writer.finish()
    return {path.name: _record(path, digest, job.source.counts(samples))}


def _write_ragged(folder: Path, number: int, samples: Sequence[PlacedSample], job: _Job) -> dict[str, FileRecord]:
    """Write the two files of one ragged shard; return their records."""
    lengths = [sample.num_tokens for sample in samples]
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    parts = {
        folder / shard_name(number): feature_specs(sum(lengths), len(samples), job.specs),
        folder / samples_name(number): samples_specs(sum(lengths), len(samples)),
    }
    records = {}
    for path, tensors in parts.items():
        with put_file(path) as temporary, ShardWriter(temporary, tensors) as writer:
            for key, spec in tensors.items():
                for sample in samples if key != SAMPLE_OFFSETS else ():
                    writer.append(key, job.source.rows(key, sample))
                    job.progress.advance(sample.num_tokens * spec.row_bytes if key in (HIDDEN, LAST_HIDDEN) else 0)
            writer.append(SAMPLE_OFFSETS, offsets)
            digest = writer.finish()
        counts = job.source.counts(samples) if path.name == shard_name(number) else {}
        records[path.name] = _record(path, digest, counts)
    return records


def _record(path: Path, digest: str, counts: dict[str, int]) -> FileRecord:
    return FileRecord(num_bytes=path.stat().st_size, sha256=digest, counts=counts)


def _pad(writer: ShardWriter, key: str, spec: TensorSpec, length: int, pad_token_id: int) -> None:
    """Fill a sample's positions after its `length` tokens: ids with the pad token, all else with zeros."""
    missing = spec.shape[0] - length
    if key == INPUT_IDS and pad_token_id:
        writer.append_bytes(key, torch.full((missing,), pad_token_id, dtype=spec.dtype))
    else:
        writer.append_zeros(key, missing * spec.row_bytes)


def _write_weights(path: Path, captured: Captured, settings: CacheSettings) -> FileRecord:
    """Write embedding and lm_head in the cache's dtype; tied ones under both names in format 1, once in format 2."""
    ledger = captured.ledger
    file = ShardFile(captured.store.folder / WEIGHTS_NAME)
    spec = TensorSpec(dtype=DTYPE_MAP[ledger.compute_dtype], shape=(ledger.vocab_size, ledger.hidden_size))
    file.expect({EMBED_KEY: spec}, exactly=False)
    embed = file.read_rows(EMBED_KEY, 0, spec.shape[0])
    head = file.read_rows(LM_HEAD_KEY, 0, spec.shape[0]) if LM_HEAD_KEY in file.places else embed
    tied_once = settings.layout == "ragged"
    digest = put_target_weights(path, embed, head, DTYPE_MAP[settings.dtype], tied_once=tied_once)
    return _record(path, digest, {})


def build_provenance(
    tokens: Tokens, ledger: Ledger, settings: CacheSettings, files: dict[str, FileRecord]
) -> Provenance:
    """Return what the cache was made from, with the records of its files."""
    counts = ("num_samples", "num_tokens", "supervised_tokens", "truncated_samples", "unsupervised_samples")
    return Provenance(
        layout=settings.layout,
        shards_version=STAGE_VERSIONS["shards"],
        pad_token_id=tokens.pad_token_id,
        tokens={key: value for key, value in tokens.identity.items() if key not in counts},
        capture={
            "identity": ledger.identity,
            "environments": ledger.environments(),
            "dropped": ledger.dropped,
            "logits": ledger.logits,
        },
        files=files,
    )
