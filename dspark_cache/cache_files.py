"""A cache to verify, and the levels that look at whole files: names and sizes, headers, sha256. Nothing is changed."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dspark_cache.dtypes import READ_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, DsparkCacheError
from dspark_cache.files import file_digest
from dspark_cache.manifest import dspark_fields, is_ragged, read_manifest, require_fields
from dspark_cache.pins import Pin, folder_digest
from dspark_cache.provenance import FileRecord, Provenance, read_provenance
from dspark_cache.ragged import RaggedShape, RaggedShard, shard_files
from dspark_cache.reader import ensure_sample_fits, sample_specs
from dspark_cache.schema import (
    EMBED_KEY,
    LM_HEAD_KEY,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    SAMPLES_PREFIX,
    STATES_PREFIX,
    TARGET_WEIGHTS_NAME,
)
from dspark_cache.shard_file import open_cache_file
from dspark_cache.shards import num_shards, shard_name, shard_rows
from dspark_cache.strict_json import ensure_no_foreign_link, is_same_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from dspark_cache.shard_file import ShardFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be.

    Attributes:
        level: Level that found it.
        file: Name of the file inside the cache.
        message: What was expected and found.
    """

    level: str
    file: str
    message: str

    def __str__(self) -> str:
        """Return it as one line."""
        return f"[{self.level}] {printable(self.file)}: {self.message}"


class CacheFolder:
    """A cache to verify.

    Attributes:
        path: Its folder.
        digest: `folder_digest` of what was there when it was opened.
        manifest: Its checked manifest.
        provenance: Its provenance, where there is one.
        shard_samples: Samples of each shard.
        starts: Index of the first sample of each shard.
    """

    def __init__(self, path: Path) -> None:
        """Read manifest and provenance.

        Raises:
            CacheNotFoundError: There is no manifest.
            CacheFormatError: Manifest or provenance are malformed, or the cache is incomplete.
        """
        self.path = path
        self.digest = folder_digest(path)
        self.manifest = read_manifest(path)
        require_fields(self.manifest, tuple(dspark_fields(self.manifest)), name=str(path / MANIFEST_NAME))
        self.provenance = read_provenance(path)
        self.shard_samples = _shard_samples(self.manifest)
        self.starts = [0, *accumulate(self.shard_samples)]

    def names_of(self, shard: int) -> tuple[str, ...]:
        """Return the names of the files of a shard."""
        return shard_files(shard, ragged=is_ragged(self.manifest))

    @property
    def names(self) -> set[str]:
        """Names of all files that the manifest asks for."""
        shards = range(len(self.shard_samples))
        return {MANIFEST_NAME, TARGET_WEIGHTS_NAME, *(name for shard in shards for name in self.names_of(shard))}

    def open_shard(self, shard: int) -> tuple[ShardFile, ...]:
        """Open the files of a shard and check their headers, and the offsets of samples.

        Raises:
            CacheNotFoundError: A file is missing.
            CacheFormatError: A file is not as the manifest says.
        """
        rows = self.shard_samples[shard]
        if is_ragged(self.manifest):
            return RaggedShard(self.path, shard, rows, RaggedShape.of(self.manifest)).files
        file = open_cache_file(self.path / shard_name(shard))
        file.expect({key: spec.stacked(rows) for key, spec in sample_specs(self.manifest).items()}, exactly=True)
        return (file,)

    def pinned(self) -> Pin:
        """Hold on to the manifest that was read and to the files of shards that are there now.

        Raises:
            CacheNotFoundError: A file is missing.
            CacheFormatError: A sample is larger than the memory of this machine, a file is not as the manifest says, or
                the cache was replaced since its manifest was read.
        """
        ensure_sample_fits(sample_specs(self.manifest), str(self.path))
        states = array("Q")
        for shard in range(len(self.shard_samples)):
            for file in self.open_shard(shard):
                states.extend(file.state)
        pin = Pin(self.path, self.digest, states)
        pin.ensure_same_folder()
        return pin

    def recorded(self, name: str) -> FileRecord | None:
        """Return what provenance.json records of a file."""
        return self.provenance.files.get(name) if self.provenance else None


def _shard_samples(manifest: dict[str, Any]) -> list[int]:
    """Return the number of samples of each shard."""
    if is_ragged(manifest):
        return list(manifest["shard_samples"])
    num_samples, shard_size = manifest["num_samples"], manifest["shard_size"]
    return [shard_rows(num_samples, shard_size, index) for index in range(num_shards(num_samples, shard_size))]


def check_files(cache: CacheFolder) -> Iterator[Finding]:
    """Check names, kinds and sizes: nothing missing, nothing left over, no links."""
    required = cache.names
    found = {entry.name for entry in cache.path.iterdir()}
    for name in sorted(required - found):
        yield Finding(level="files", file=name, message="is missing")
    for name in sorted(found - required - {PROVENANCE_NAME}):
        yield Finding(level="files", file=name, message="does not belong into a cache")
    for name in sorted(found & (required | {PROVENANCE_NAME})):
        yield from _file_findings(cache, name)
    if cache.provenance:
        for name in sorted(cache.provenance.files.keys() - required):
            yield Finding(level="files", file=PROVENANCE_NAME, message=f"records {name}, which is no file of the cache")


def _file_findings(cache: CacheFolder, name: str) -> Iterator[Finding]:
    path, recorded = cache.path / name, cache.recorded(name)
    try:
        ensure_no_foreign_link(path)
    except CacheFormatError as error:
        yield Finding(level="files", file=name, message=str(error))
        return
    if not path.is_file():
        yield Finding(level="files", file=name, message="is no regular file")
    elif recorded and (size := path.stat().st_size) != recorded.num_bytes:
        yield Finding(level="files", file=name, message=f"has {size} bytes, provenance.json says {recorded.num_bytes}")


def _provenance_findings(cache: CacheFolder, provenance: Provenance) -> Iterator[Finding]:
    """Compare what provenance.json and the manifest both say."""
    expected = {"layout": "padded", **cache.manifest}
    converted = {key: value for step in provenance.conversions for key, value in step["changes"].items()}
    identity = provenance.capture.get("identity", {})
    if not isinstance(identity, dict):
        yield Finding(level="headers", file=PROVENANCE_NAME, message=f"capture.identity is {identity!r:.80}, no object")
    sections = {
        "": {"layout": provenance.layout, "pad_token_id": provenance.pad_token_id},
        "tokens.": {**provenance.tokens, **_shared(converted, provenance.tokens)},
        "capture.identity.": {**identity, **_shared(converted, identity)} if isinstance(identity, dict) else {},
        "conversions.changes.": converted,
    }
    for section, values in sections.items():
        for key in sorted(values.keys() & expected.keys()):
            if not is_same_json(values[key], expected[key]):
                message = f"{section}{key} is {values[key]!r:.200}, manifest.json says {expected[key]!r:.200}"
                yield Finding(level="headers", file=PROVENANCE_NAME, message=message)


def _shared(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key in others}


def check_headers(cache: CacheFolder) -> Iterator[Finding]:
    """Check keys, dtypes, shapes and rows of every file against the manifest, and provenance against it too."""
    if cache.provenance:
        yield from _provenance_findings(cache, cache.provenance)
    manifest = cache.manifest
    for shard in range(len(cache.shard_samples)):
        try:
            cache.open_shard(shard)
        except (DsparkCacheError, OSError) as error:
            yield Finding(level="headers", file=shard_name(shard), message=str(error))
    weight = TensorSpec(
        dtype=READ_DTYPES[manifest["dtype"]],
        shape=(manifest["target_vocab_size"], manifest["hidden_size"]),
    )
    weights = {EMBED_KEY: weight, LM_HEAD_KEY: weight}
    if is_ragged(manifest) and LM_HEAD_KEY not in _keys(cache.path / TARGET_WEIGHTS_NAME):
        del weights[LM_HEAD_KEY]  # tied
    yield from _header_findings(cache.path / TARGET_WEIGHTS_NAME, weights)


def _keys(path: Path) -> set[str]:
    """Return the keys of a file; of one that cannot be read, all that are asked for."""
    try:
        return set(open_cache_file(path).places)
    except (DsparkCacheError, OSError):
        return {EMBED_KEY, LM_HEAD_KEY}


def _header_findings(path: Path, specs: dict[str, TensorSpec]) -> Iterator[Finding]:
    try:
        open_cache_file(path).expect(specs, exactly=True)
    except (DsparkCacheError, OSError) as error:
        yield Finding(level="headers", file=path.name, message=str(error))


def check_bytes(cache: CacheFolder, names: Iterable[str]) -> Iterator[Finding]:
    """Check the sha256 of files against provenance.json."""
    for name in names:
        try:
            found = file_digest(cache.path / name) if cache.recorded(name) else ""
        except FileNotFoundError:
            yield Finding(level="bytes", file=name, message="went missing while the cache was verified")
            continue
        yield from digest_findings(cache, name, found)


def digest_findings(cache: CacheFolder, name: str, found: str) -> Iterator[Finding]:
    """Compare the sha256 of a file with provenance.json."""
    recorded = cache.recorded(name)
    if recorded is None:
        yield Finding(level="bytes", file=name, message="provenance.json records no sha256 of it")
    elif found != recorded.sha256:
        message = f"sha256 is {found}, provenance.json says {recorded.sha256}"
        yield Finding(level="bytes", file=name, message=message)


_KINDS = {
    "states": STATES_PREFIX,
    "ids_and_masks": SAMPLES_PREFIX,
    "target_weights": TARGET_WEIGHTS_NAME,
    "manifest": MANIFEST_NAME,
    "provenance": PROVENANCE_NAME,
}
"""Kind of file to what its name begins with; in padded caches ids and masks lie with the states."""


def bytes_by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    """Add up sizes of a cache's files, by name, of each kind that is there; "other" is what belongs into no cache."""
    found = {
        kind: sum(size for name, size in sizes.items() if name.startswith(prefix)) for kind, prefix in _KINDS.items()
    }
    found["other"] = sum(sizes.values()) - sum(found.values())
    return {kind: size for kind, size in found.items() if size}
