"""Verifying a published cache, level by level: files, headers, bytes, values. Nothing is ever changed.

Each level is a function from a `CacheFolder` to findings; `verify_cache` runs them up to the level asked for. A
level that would stumble over what an earlier one found is not run.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.errors import DsparkCacheError
from dspark_cache.files import file_digest
from dspark_cache.manifest import dspark_fields, is_ragged, read_manifest, require_fields
from dspark_cache.ragged import RaggedShape, RaggedShard, samples_name
from dspark_cache.reader import CachedDSparkDataset, sample_specs
from dspark_cache.schema import (
    DTYPE_MAP,
    EMBED_KEY,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LM_HEAD_KEY,
    LOSS_MASK,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    TARGET_WEIGHTS_NAME,
    TensorSpec,
)
from dspark_cache.settings import VERIFY_LEVELS
from dspark_cache.shard_file import ShardFile
from dspark_cache.shards import num_shards, shard_name, shard_rows
from dspark_cache.strict_json import is_int, is_sha256, read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dspark_cache.tokens import Tokens

MAX_FINDINGS = 100
"""A level stops after so many: the cache is wrong, the rest adds nothing."""


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
        return f"[{self.level}] {self.file}: {self.message}"


class CacheFolder:
    """A cache to verify: its folder, its checked manifest and, where there is one, its provenance."""

    def __init__(self, path: Path) -> None:
        """Read manifest and provenance.

        Raises:
            CacheNotFoundError: There is no manifest.
            CacheFormatError: Manifest or provenance are malformed, or the cache is incomplete.
        """
        self.path = path
        self.manifest = read_manifest(path)
        require_fields(self.manifest, tuple(dspark_fields(self.manifest)), name=str(path / MANIFEST_NAME))
        self.provenance: dict[str, Any] | None = None
        if (path / PROVENANCE_NAME).exists():
            self.provenance = read_json_object(path / PROVENANCE_NAME)

    @property
    def shard_samples(self) -> list[int]:
        """Samples of each shard."""
        if is_ragged(self.manifest):
            return list(self.manifest["shard_samples"])
        num_samples, shard_size = self.manifest["num_samples"], self.manifest["shard_size"]
        return [shard_rows(num_samples, shard_size, index) for index in range(num_shards(num_samples, shard_size))]

    @property
    def shard_names(self) -> list[str]:
        """Names of the files with samples that the manifest asks for."""
        indices = range(len(self.shard_samples))
        names = [shard_name(index) for index in indices]
        return names + [samples_name(index) for index in indices] if is_ragged(self.manifest) else names

    def recorded(self, name: str) -> dict[str, Any]:
        """Return what provenance.json records of a file, or nothing."""
        files = (self.provenance or {}).get("files")
        entry = files.get(name) if isinstance(files, dict) else None
        return entry if isinstance(entry, dict) else {}


def check_files(cache: CacheFolder) -> Iterator[Finding]:
    """Check names, kinds and sizes: nothing missing, nothing left over, no links."""
    required = {MANIFEST_NAME, TARGET_WEIGHTS_NAME, *cache.shard_names}
    found = {entry.name: entry.lstat() for entry in cache.path.iterdir()}
    for name in sorted(required - found.keys()):
        yield Finding(level="files", file=name, message="is missing")
    for name in sorted(found.keys() - required - {PROVENANCE_NAME}):
        yield Finding(level="files", file=name, message="does not belong into a cache")
    for name in sorted(found.keys() & (required | {PROVENANCE_NAME})):
        size = cache.recorded(name).get("bytes", found[name].st_size)
        if not stat.S_ISREG(found[name].st_mode) and not _is_dvc_link(cache.path / name):
            yield Finding(level="files", file=name, message="is no regular file")
        elif (cache.path / name).stat().st_size != size:
            actual = (cache.path / name).stat().st_size
            yield Finding(level="files", file=name, message=f"has {actual} bytes, provenance.json says {size}")


def _is_dvc_link(path: Path) -> bool:
    """Say whether `path` is a link into a DVC cache, as `cache.type = symlink` makes them."""
    return path.is_symlink() and path.is_file() and path.resolve().parts[-4:-2] == ("files", "md5")


def check_headers(cache: CacheFolder) -> Iterator[Finding]:
    """Check keys, dtypes, shapes and rows of every file against the manifest."""
    manifest = cache.manifest
    specs = sample_specs(manifest)
    for index, rows in enumerate(cache.shard_samples):
        if is_ragged(manifest):
            yield from _ragged_findings(cache, index, rows)
            continue
        stacked = {key: spec.stacked(rows) for key, spec in specs.items()}
        yield from _header_findings(cache.path / shard_name(index), stacked)
    weight = TensorSpec(
        dtype=DTYPE_MAP[manifest["dtype"]],
        shape=(manifest["target_vocab_size"], manifest["hidden_size"]),
    )
    weights = {EMBED_KEY: weight, LM_HEAD_KEY: weight}
    if is_ragged(manifest) and LM_HEAD_KEY not in _keys(cache.path / TARGET_WEIGHTS_NAME):
        del weights[LM_HEAD_KEY]  # tied
    yield from _header_findings(cache.path / TARGET_WEIGHTS_NAME, weights)


def _keys(path: Path) -> set[str]:
    """Return the keys of a file; of one that cannot be read, all that are asked for."""
    try:
        return set(ShardFile(path).places)
    except (DsparkCacheError, OSError):
        return {EMBED_KEY, LM_HEAD_KEY}


def _ragged_findings(cache: CacheFolder, index: int, rows: int) -> Iterator[Finding]:
    shape = RaggedShape(sample=sample_specs(cache.manifest), pad_token_id=cache.manifest["pad_token_id"])
    try:
        RaggedShard(cache.path, index, rows, shape)
    except (DsparkCacheError, OSError) as error:
        yield Finding(level="headers", file=shard_name(index), message=str(error))


def _header_findings(path: Path, specs: dict[str, TensorSpec]) -> Iterator[Finding]:
    try:
        ShardFile(path).expect(specs, exactly=True)
    except (DsparkCacheError, OSError) as error:
        yield Finding(level="headers", file=path.name, message=str(error))


def check_bytes(cache: CacheFolder) -> Iterator[Finding]:
    """Check the sha256 of every file against provenance.json."""
    for name in [MANIFEST_NAME, TARGET_WEIGHTS_NAME, *cache.shard_names]:
        recorded = cache.recorded(name).get("sha256")
        if not is_sha256(recorded):
            yield Finding(level="bytes", file=name, message="provenance.json records no sha256 of it")
        elif (found := file_digest(cache.path / name)) != recorded:
            yield Finding(level="bytes", file=name, message=f"sha256 is {found}, provenance.json says {recorded}")


@dataclass(slots=True)
class Supervision:
    """Counts over the samples of a cache, gathered while their values are checked."""

    num_samples: int = 0
    num_tokens: int = 0
    supervised_tokens: int = 0
    anchors: int = 0
    """Positions p with mask 1 at p and p+1."""
    unsupervised_samples: int = 0
    samples_without_anchor: int = 0

    def add(self, mask: torch.Tensor, length: int) -> None:
        """Count one sample by its mask [S] and its number of real tokens."""
        supervised = int(mask.sum())
        anchors = int((mask[:-1] * mask[1:]).sum())
        self.num_samples += 1
        self.num_tokens += length
        self.supervised_tokens += supervised
        self.anchors += anchors
        self.unsupervised_samples += supervised == 0
        self.samples_without_anchor += anchors == 0

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the supervised share."""
        return {
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "supervised_tokens": self.supervised_tokens,
            "supervised_fraction": round(self.supervised_tokens / max(1, self.num_tokens), 6),
            "anchors": self.anchors,
            "unsupervised_samples": self.unsupervised_samples,
            "samples_without_anchor": self.samples_without_anchor,
        }


def check_values(
    cache: CacheFolder, supervision: Supervision, expected: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None
) -> Iterator[Finding]:
    """Check every sample: ids and mask in range, padding as the format says, states finite.

    Args:
        cache: The cache.
        supervision: Counts to add to.
        expected: Sample index to its ids and mask [T] in `tokens/`; with it, ids, masks and order are compared
            exactly. Without it a sample is taken to end at its last token with a state that is not zero.
    """
    dataset = CachedDSparkDataset(cache.path)
    pad = (cache.provenance or {}).get("pad_token_id")
    for index in range(len(dataset)):
        sample = dataset[index]
        name = shard_name(dataset.shard_of(index))
        length = _real_length(sample) if expected is None else len(expected(index)[0])
        supervision.add(sample[LOSS_MASK], length)
        faults = _range_faults(sample, length, cache.manifest["target_vocab_size"], pad)
        if expected is not None:
            faults += _token_faults(sample, *expected(index))
        for fault in faults:
            yield Finding(level="values", file=name, message=f"sample {index}: {fault}")


def _real_length(sample: dict[str, torch.Tensor]) -> int:
    used = (sample[LAST_HIDDEN] != 0).any(dim=-1) | (sample[LOSS_MASK] != 0)
    positions = used.nonzero()
    return int(positions[-1]) + 1 if len(positions) else 0


def _range_faults(sample: dict[str, torch.Tensor], length: int, vocab_size: int, pad: object) -> list[str]:
    ids, mask = sample[INPUT_IDS], sample[LOSS_MASK]
    faults = []
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        faults.append(f"ids outside 0..{vocab_size - 1}")
    if bool(((mask != 0) & (mask != 1)).any()):
        faults.append("loss mask values other than 0 and 1")
    if bool(mask[length:].any()):
        faults.append("padding is supervised")
    if is_int(pad) and bool((ids[length:] != pad).any()):
        faults.append(f"padding holds ids other than {pad}")
    for key in (HIDDEN, LAST_HIDDEN):
        if not bool(torch.isfinite(sample[key]).all()):
            faults.append(f"{key} holds numbers that are not finite")
        if is_int(pad) and bool(sample[key][length:].any()):
            faults.append(f"{key} is not zero at padding")
    if bool((sample[LAST_HIDDEN][:length] == 0).all(dim=-1).any()):
        faults.append(f"{LAST_HIDDEN} is all zero at a real token")
    return faults


def _token_faults(sample: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
    faults = []
    if not torch.equal(sample[INPUT_IDS][: len(ids)], ids.to(torch.int64)):
        faults.append("input_ids are not those of tokens/")
    if not torch.equal(sample[LOSS_MASK][: len(mask)], mask.to(torch.int64)):
        faults.append("loss_mask is not that of tokens/")
    return faults


@dataclass(slots=True)
class Report:
    """What a verification found."""

    level: str
    findings: list[Finding] = field(default_factory=list)
    supervision: Supervision = field(default_factory=Supervision)
    recompute: dict[str, Any] = field(default_factory=dict)

    def collect(self, findings: Iterator[Finding]) -> bool:
        """Take the findings of one level; say whether there were none."""
        before = len(self.findings)
        for finding in findings:
            self.findings.append(finding)
            if len(self.findings) - before >= MAX_FINDINGS:
                break
        return len(self.findings) == before

    def as_json(self) -> dict[str, Any]:
        """Return the report as DVC metrics: numbers in nested objects, findings as text."""
        return {
            "level": self.level,
            "num_findings": len(self.findings),
            "findings": [str(finding) for finding in self.findings],
            "supervision": self.supervision.as_json(),
            "recompute": self.recompute,
        }


def verify_cache(cache: CacheFolder, level: str, *, tokens: Tokens | None, kept: list[int] | None = None) -> Report:
    """Run the levels up to `level`.

    Args:
        cache: The cache.
        level: One of `VERIFY_LEVELS`.
        tokens: The tokens it was made from, where they are at hand.
        kept: Index in `tokens` of each sample of the cache; None: all of them, in order.
    """
    report = Report(level=level)
    wanted = VERIFY_LEVELS[: VERIFY_LEVELS.index(level) + 1]
    sound = report.collect(check_files(cache))
    if sound and "headers" in wanted:
        sound = report.collect(check_headers(cache))
    if sound and "bytes" in wanted:
        report.collect(check_bytes(cache))
    if sound and "values" in wanted:
        report.collect(check_values(cache, report.supervision, _expected(cache, tokens, kept, report)))
    return report


def _expected(
    cache: CacheFolder, tokens: Tokens | None, kept: list[int] | None, report: Report
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None:
    """Return what gives the expected ids and mask of a sample; a wrong number of samples is a finding."""
    if tokens is None:
        return None
    indices = list(range(len(tokens))) if kept is None else kept
    if len(indices) != cache.manifest["num_samples"]:
        message = f"num_samples is {cache.manifest['num_samples']}, tokens/ gives {len(indices)}"
        report.findings.append(Finding(level="values", file=MANIFEST_NAME, message=message))
        return None
    return lambda index: (tokens.input_ids(indices[index]), tokens.loss_mask(indices[index]))
