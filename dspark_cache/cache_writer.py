"""Writing the files of a cache, in either layout, from rows of any source: captured blocks, or another cache.

Rows are streamed: threads read and convert parts of `CHUNK_BYTES`, a few of them ahead, while others are written and
hashed, each byte once; the zeros after a sample's end are holes. The manifest goes down first as incomplete and is
completed last.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from dspark_cache.cache_plan import CachePlan, shard_bytes
from dspark_cache.dtypes import READ_DTYPES, STORED_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, CaptureError
from dspark_cache.files import dump_json, ensure_free_disk, keeps_holes, link_file, put_file
from dspark_cache.fp8 import dequantise, quantise
from dspark_cache.manifest import version_of, write_manifest
from dspark_cache.provenance import FileRecord, Provenance
from dspark_cache.ragged import feature_specs, samples_specs, shard_files
from dspark_cache.reader import sample_specs
from dspark_cache.schema import (
    FP8,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LOSS_MASK,
    MANIFEST_NAME,
    SAMPLE_OFFSETS,
    SCALES_OF,
    STATES_PREFIX,
    TARGET_WEIGHTS_NAME,
)
from dspark_cache.shard_file import ShardWriter, file_bytes
from dspark_cache.shards import shard_name
from dspark_cache.threads import Ahead, torch_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dspark_cache.files import FinishedParts

CHUNK_BYTES = 1 << 24
"""There are at most two more such parts, and what becomes of them, than threads."""
_GROUP_BYTES = 1 << 20
_SAFE_SCALE = 2.0**118
"""With a larger one the largest 8-bit number is more than bf16 has."""

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file elsewhere that holds what a file of the cache must hold.

    Attributes:
        path: Where it is.
        num_bytes: Its size.
        sha256: Its digest.
    """

    path: Path
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows start (included) to stop (excluded) of a key of a sample."""

    key: str
    sample: int
    start: int
    stop: int

    def rows(self, source: RowSource) -> torch.Tensor:
        return source.rows(self.key, self.sample, self.start, self.stop)


def _grouped(parts: Iterable[_Part], token_bytes: int) -> Iterator[list[_Part]]:
    """Yield parts in groups that are worth handing to a thread."""
    group, size = [], 0
    for part in parts:
        group.append(part)
        size += (part.stop - part.start) * token_bytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _to_dtype(dtype: torch.dtype, _key: str, rows: torch.Tensor, _sample: int) -> torch.Tensor:
    return rows.to(dtype)


class RowSource(Protocol):
    """Where the rows of samples come from; a sample is named by a number of the source's own."""

    @property
    def dtype(self) -> str:
        """Key of `STORED_DTYPES` in which states lie here."""

    def num_tokens(self, sample: int) -> int:
        """Return T of a sample."""

    def rows(self, key: str, sample: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded): ids, masks, states as they lie here, scales of fp8."""

    def features_of(self, samples: Sequence[int]) -> SharedFile | None:
        """Return a file of exactly the states of these samples, in the ragged layout and the source's dtype."""


def ensure_room(
    folder: Path,
    plans: Iterable[CachePlan],
    source: RowSource,
    weights_bytes: int,
    finished: FinishedParts | None = None,
    *,
    what: str,
    remedy: str,
) -> None:
    """Refuse to begin caches that the disk has no room for; links on it, holes and what is finished take none.

    Args:
        folder: Where they are built, or will be; it exists and may be written to.
        plans: The caches.
        source: Gives the rows.
        weights_bytes: Bytes of the target weights.
        finished: What an earlier run has finished in `folder`.
        what: Names them in the message.
        remedy: What to do beside making room.

    Raises:
        SettingsError: Less is free than will be written.
    """
    has_holes = keeps_holes(folder)
    needed = weights_bytes
    for plan in plans:
        for number, samples in enumerate(plan.shards):
            lengths = [source.num_tokens(sample) for sample in samples]
            size = shard_bytes(lengths, plan.form, plan.manifest["seq_length"], plan.layout)
            shared = _shared(plan, source, samples)
            is_there = shared and shared.path.stat().st_dev == folder.stat().st_dev
            if not is_there and not _kept(folder / shard_name(number), finished):
                needed += size.total - size.samples - size.holes * has_holes
            needed += size.samples
    ensure_free_disk(folder, needed, what=what, remedy=remedy)


def _shared(plan: CachePlan, source: RowSource, samples: Sequence[int]) -> SharedFile | None:
    """Return the file of the source that is the ragged shard of these samples, if there is one."""
    is_same_form = plan.layout == "ragged" and plan.form.dtype == source.dtype
    return source.features_of(samples) if is_same_form else None


def write_cache(
    folder: Path,
    plan: CachePlan,
    source: RowSource,
    put_weights: Callable[[Path], str],
    advance: Callable[[int], None],
    finished: FinishedParts | None = None,
    *,
    num_threads: int = 1,
) -> Provenance:
    """Write all files of a cache into an empty folder, or one that holds those of `finished`; return its provenance.

    Args:
        folder: Where.
        plan: What.
        source: Gives the rows.
        put_weights: Puts the target weights at a path and returns their sha256.
        advance: Told of tokens that were written.
        finished: What an earlier run has finished; told of each shard.
        num_threads: Threads that read and convert, beside the one that writes and the one that hashes.

    Raises:
        CaptureError: A state that does not fit into the cache's dtype.
    """
    write_manifest(folder, {**plan.manifest, "complete": False})
    files: dict[str, FileRecord] = {}
    with torch_threads(num_threads, "cache-rows") as threads:
        writer = _Writer(folder, plan, source, Ahead(threads, num_threads))
        for number, samples in enumerate(plan.shards):
            for name in writer.names(number):
                record = _kept(folder / name, finished)
                if record is None:
                    record = writer.write(name, samples)
                    if finished is not None:
                        finished.add(name, record.as_json())
                files[name] = record
            advance(sum(source.num_tokens(sample) for sample in samples))
    weights = folder / TARGET_WEIGHTS_NAME
    digest = put_weights(weights)
    files[TARGET_WEIGHTS_NAME] = FileRecord(num_bytes=weights.stat().st_size, sha256=digest, counts={})
    final = dump_json({**plan.manifest, "complete": True, "format_version": version_of(plan.manifest)}).encode()
    files[MANIFEST_NAME] = FileRecord(num_bytes=len(final), sha256=hashlib.sha256(final).hexdigest(), counts={})
    provenance = replace(plan.provenance, files=files)
    provenance.put(folder)
    write_manifest(folder, {**plan.manifest, "complete": True})
    return provenance


def _kept(path: Path, finished: FinishedParts | None) -> FileRecord | None:
    """Return the record of a file that an earlier run has finished and that is still there."""
    if finished is None or path.name not in finished.records:
        return None
    try:
        record = FileRecord.parse(path.name, finished.records[path.name])
    except CacheFormatError:
        return None
    is_there = path.is_file() and path.stat().st_size == record.num_bytes
    return record if is_there else None


class _Writer:
    """Writes the files of shards one by one."""

    def __init__(self, folder: Path, plan: CachePlan, source: RowSource, ahead: Ahead) -> None:
        self._ahead = ahead
        self._folder = folder
        self._plan = plan
        self._source = source
        self._form = plan.form
        self._layer_ids: list[int] = plan.manifest["target_layer_ids"]
        self._pad_token_id = plan.provenance.pad_token_id
        self._padded = {} if plan.layout == "ragged" else sample_specs(plan.manifest)
        self._links = True

    def names(self, number: int) -> tuple[str, ...]:
        """Return the names of the files of a shard."""
        return shard_files(number, ragged=not self._padded)

    def write(self, name: str, samples: Sequence[int]) -> FileRecord:
        """Write one file of a shard."""
        path, counts = self._folder / name, {}
        is_states = name.startswith(STATES_PREFIX)
        if is_states:
            counts = self._counts(samples)
            if shared := self._link(path, samples):
                return FileRecord(num_bytes=shared.num_bytes, sha256=shared.sha256, counts=counts)
        tokens = sum(self._source.num_tokens(sample) for sample in samples)
        if self._padded:
            specs = {key: spec.stacked(len(samples)) for key, spec in self._padded.items()}
            fill = self._fill_padded
        elif is_states:
            specs, fill = feature_specs(tokens, len(samples), self._form), self._fill_features
        else:
            specs, fill = samples_specs(tokens, len(samples)), self._fill_samples
        with put_file(path) as temporary, ShardWriter(temporary, specs) as writer:
            fill(writer, specs, samples)
            digest = writer.finish()
        return FileRecord(num_bytes=file_bytes(specs), sha256=digest, counts=counts)

    def _link(self, path: Path, samples: Sequence[int]) -> SharedFile | None:
        """Give a file of the source that is this one a second name, if there is one and that is allowed."""
        shared = _shared(self._plan, self._source, samples) if self._links else None
        if shared is None:
            return None
        if link_file(shared.path, path):
            return shared
        self._links = False
        logger.info("%s cannot be linked into %s: states are copied", shared.path, self._folder)
        return None

    def _counts(self, samples: Sequence[int]) -> dict[str, int]:
        supervised = 0
        for sample in samples:
            supervised += sum(int(part.sum(dtype=torch.int64)) for part in self._parts(LOSS_MASK, sample, 1))
        tokens = sum(self._source.num_tokens(sample) for sample in samples)
        return {"samples": len(samples), "tokens": tokens, "supervised_tokens": supervised}

    def _parts(self, key: str, sample: int, token_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the rows of a sample, at most `CHUNK_BYTES` at a time."""
        return (part.rows(self._source) for part in self._cut(key, [sample], token_bytes))

    def _cut(self, key: str, samples: Iterable[int], token_bytes: int) -> Iterator[_Part]:
        """Yield what is to be read of samples, at most `CHUNK_BYTES` at a time."""
        step = max(1, CHUNK_BYTES // token_bytes)
        for sample in samples:
            length = self._source.num_tokens(sample)
            for start in range(0, length, step):
                yield _Part(key, sample, start, min(start + step, length))

    def _read(
        self,
        key: str,
        samples: Iterable[int],
        token_bytes: int,
        convert: Callable[[str, torch.Tensor, int], _T],
    ) -> Iterator[tuple[int, _T]]:
        """Yield the samples' parts, each with its sample, converted."""

        def work(parts: list[_Part]) -> Callable[[], list[tuple[int, _T]]]:
            return lambda: [(part.sample, convert(key, part.rows(self._source), part.sample)) for part in parts]

        groups = _grouped(self._cut(key, samples, token_bytes), token_bytes)
        return chain.from_iterable(self._ahead.results(map(work, groups)))

    def _fill_padded(self, writer: ShardWriter, specs: dict[str, TensorSpec], samples: Sequence[int]) -> None:
        for key in specs:
            spec = self._padded[key]
            is_state = key in SCALES_OF
            convert = self._cast if is_state else partial(_to_dtype, spec.dtype)
            parts = self._read(key, samples, spec.row_bytes, convert)
            for sample, of_sample in groupby(parts, key=itemgetter(0)):
                for _, rows in of_sample:
                    writer.append_bytes(key, rows)
                self._pad(writer, key, spec, self._source.num_tokens(sample))

    def _pad(self, writer: ShardWriter, key: str, spec: TensorSpec, length: int) -> None:
        """Fill a sample's positions after its `length` tokens: ids with the pad token, all else with zeros."""
        missing = spec.shape[0] - length
        if key == INPUT_IDS and self._pad_token_id:
            writer.append_bytes(key, torch.full((missing,), self._pad_token_id, dtype=spec.dtype))
        else:
            writer.append_zeros(key, missing * spec.row_bytes)

    def _fill_samples(self, writer: ShardWriter, specs: dict[str, TensorSpec], samples: Sequence[int]) -> None:
        for key in (INPUT_IDS, LOSS_MASK):
            for _, rows in self._read(key, samples, specs[key].row_bytes, partial(_to_dtype, specs[key].dtype)):
                writer.append(key, rows)
        self._append_offsets(writer, samples)

    def _fill_features(self, writer: ShardWriter, specs: dict[str, TensorSpec], samples: Sequence[int]) -> None:
        scales: dict[str, list[torch.Tensor]] = {HIDDEN: [], LAST_HIDDEN: []}
        quantises = self._form.dtype == FP8 != self._source.dtype
        for key, kept in scales.items():
            if quantises:
                for _, (numbers, part) in self._read(key, samples, specs[key].row_bytes, self._quantise):
                    kept.append(part)
                    writer.append(key, numbers)
            else:
                for _, rows in self._read(key, samples, specs[key].row_bytes, self._cast):
                    writer.append(key, rows)
        for key, kept in scales.items() if self._form.dtype == FP8 else ():
            name = SCALES_OF[key]
            as_stored = self._read(name, samples, specs[name].row_bytes, lambda _key, rows, _sample: rows)
            for part in kept if quantises else (rows for _, rows in as_stored):
                writer.append(name, part)
        self._append_offsets(writer, samples)

    def _append_offsets(self, writer: ShardWriter, samples: Sequence[int]) -> None:
        lengths = [self._source.num_tokens(sample) for sample in samples]
        writer.append(SAMPLE_OFFSETS, torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0))

    def _cast(self, key: str, rows: torch.Tensor, sample: int) -> torch.Tensor:
        cast = rows.to(STORED_DTYPES[self._form.dtype])
        if cast is not rows:
            self._ensure_fits(key, rows, cast, sample)
        return cast

    def _quantise(self, key: str, rows: torch.Tensor, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = rows.to(READ_DTYPES[FP8])
        numbers, scales = quantise(rounded, rows.shape[1] // self._form.last_dim)
        is_near_the_end = bool((scales > _SAFE_SCALE).any()) and bool(torch.isfinite(rounded).all())
        self._ensure_fits(key, rows, dequantise(numbers, scales) if is_near_the_end else rounded, sample)
        return numbers, scales

    def _ensure_fits(self, key: str, rows: torch.Tensor, cast: torch.Tensor, sample: int) -> None:
        """Refuse states that are not finite once they are stored, naming the first layer that has any."""
        if bool(torch.isfinite(cast.sum(dtype=torch.float32))):
            return  # thirty times as fast as a look at every number, and finite only if all are
        bad = torch.isfinite(cast).all(dim=0).logical_not().nonzero()
        if not len(bad):
            return
        layer = int(bad[0]) // self._form.last_dim
        name = f"layer {self._layer_ids[layer]}" if key == HIDDEN else "the last hidden state"
        largest = float(rows[:, layer * self._form.last_dim : (layer + 1) * self._form.last_dim].abs().max())
        raise CaptureError(
            f"sample {sample}: {name}, with values up to {largest:.6g}, does not fit into cache.dtype "
            f"{self._form.dtype}: use cache.dtype: bf16 or fp32"
        )
