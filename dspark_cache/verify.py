"""Verifying a published cache, level by level: files, headers, bytes, values, supervision. Nothing is ever changed.

Files and headers are checked for the whole cache; where they are sound, bytes and values are checked shard by shard,
several at a time, so that a shard's second reading finds it in memory. A level that would stumble over what an earlier
one found is not run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.errors import CacheFormatError, CacheNotFoundError, DsparkCacheError
from dspark_cache.files import file_digest
from dspark_cache.fp8 import are_scales_right
from dspark_cache.manifest import dspark_fields, is_ragged, read_manifest, require_fields
from dspark_cache.provenance import COUNTS, FileRecord, Provenance, read_provenance
from dspark_cache.ragged import RaggedShape, RaggedShard, samples_name
from dspark_cache.reader import CachedDSparkDataset, sample_specs
from dspark_cache.schema import (
    EMBED_KEY,
    FP8,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LM_HEAD_KEY,
    LOSS_MASK,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    READ_DTYPES,
    SCALES_OF,
    TARGET_WEIGHTS_NAME,
    VERIFY_LEVELS,
    TensorSpec,
)
from dspark_cache.shard_file import open_cache_file, physical_memory
from dspark_cache.shards import num_shards, shard_name, shard_rows
from dspark_cache.strict_json import ensure_no_foreign_link, is_same_json, printable
from dspark_cache.supervision import Supervision, supervision_faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from dspark_cache.tokens import Tokens

_WEIGHT_BYTES = 1 << 26
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
        return f"[{self.level}] {printable(self.file)}: {self.message}"


class CacheFolder:
    """A cache to verify.

    Attributes:
        path: Its folder.
        manifest: Its checked manifest.
        provenance: Its provenance, where there is one.
        shard_samples: Samples of each shard.
    """

    def __init__(self, path: Path) -> None:
        """Read manifest and provenance.

        Raises:
            CacheNotFoundError: There is no manifest.
            CacheFormatError: Manifest or provenance are malformed, or the cache is incomplete.
        """
        self.path = path
        self.manifest = read_manifest(path)
        require_fields(self.manifest, tuple(dspark_fields(self.manifest)), name=str(path / MANIFEST_NAME))
        self.provenance = read_provenance(path)
        self.shard_samples = _shard_samples(self.manifest)

    def names_of(self, shard: int) -> list[str]:
        """Return the names of the files of a shard."""
        return [shard_name(shard), samples_name(shard)] if is_ragged(self.manifest) else [shard_name(shard)]

    @property
    def names(self) -> set[str]:
        """Names of all files that the manifest asks for."""
        shards = range(len(self.shard_samples))
        return {MANIFEST_NAME, TARGET_WEIGHTS_NAME, *(name for shard in shards for name in self.names_of(shard))}

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
    specs = sample_specs(manifest)
    for index, rows in enumerate(cache.shard_samples):
        if is_ragged(manifest):
            yield from _ragged_findings(cache, index, rows)
            continue
        stacked = {key: spec.stacked(rows) for key, spec in specs.items()}
        yield from _header_findings(cache.path / shard_name(index), stacked)
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


def _ragged_findings(cache: CacheFolder, index: int, rows: int) -> Iterator[Finding]:
    try:
        RaggedShard(cache.path, index, rows, RaggedShape.of(cache.manifest))
    except (DsparkCacheError, OSError) as error:
        yield Finding(level="headers", file=shard_name(index), message=str(error))


def _header_findings(path: Path, specs: dict[str, TensorSpec]) -> Iterator[Finding]:
    try:
        open_cache_file(path).expect(specs, exactly=True)
    except (DsparkCacheError, OSError) as error:
        yield Finding(level="headers", file=path.name, message=str(error))


def check_bytes(cache: CacheFolder, names: Iterable[str]) -> Iterator[Finding]:
    """Check the sha256 of files against provenance.json."""
    for name in names:
        recorded = cache.recorded(name)
        if recorded is None:
            yield Finding(level="bytes", file=name, message="provenance.json records no sha256 of it")
            continue
        try:
            found = file_digest(cache.path / name)
        except FileNotFoundError:
            yield Finding(level="bytes", file=name, message="went missing while the cache was verified")
            continue
        if found != recorded.sha256:
            message = f"sha256 is {found}, provenance.json says {recorded.sha256}"
            yield Finding(level="bytes", file=name, message=message)


Expected = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Sample index to its ids and mask [T] in `tokens/`."""


def check_values(
    cache: CacheFolder, dataset: CachedDSparkDataset, shard: int, supervision: Supervision, expected: Expected | None
) -> Iterator[Finding]:
    """Check every sample of a shard: ids and mask in range, padding as the format says, states finite.

    Args:
        cache: The cache.
        dataset: Reads it.
        shard: Index of the shard.
        supervision: Counts of this shard alone, to add to.
        expected: With it, ids, masks and order are compared exactly. Without it a sample is taken to end at its last
            token with a state that is not zero.
    """
    name = shard_name(shard)
    for index in dataset.samples_of(shard):
        sample = dataset[index]
        length = _real_length(sample) if expected is None else len(expected(index)[0])
        supervision.add(index, sample, length)
        faults = _range_faults(sample, length, cache)
        if cache.manifest["dtype"] == FP8:
            faults += _scale_faults(sample, dataset, index)
        if expected is not None:
            faults += _token_faults(sample, *expected(index))
        for fault in faults:
            yield Finding(level="values", file=name, message=f"sample {index}: {fault}")
    yield from _count_findings(cache, name, supervision)


def _count_findings(cache: CacheFolder, name: str, supervision: Supervision) -> Iterator[Finding]:
    recorded = cache.recorded(name)
    counts = (supervision.num_samples, supervision.num_tokens, supervision.supervised_tokens)
    found = dict(zip(COUNTS, counts, strict=True))
    if recorded and recorded.counts != found:
        message = f"provenance.json says {dict(recorded.counts)}, its samples give {found}"
        yield Finding(level="values", file=name, message=message)


def check_weights(cache: CacheFolder) -> Iterator[Finding]:
    """Check that lm_head is finite: one row that is not spoils every teacher distribution."""
    file = open_cache_file(cache.path / TARGET_WEIGHTS_NAME)
    key = LM_HEAD_KEY if LM_HEAD_KEY in file.places else EMBED_KEY
    rows = file.places[key].spec.shape[0]
    if file.places[key].spec.num_bytes > physical_memory():
        message = f"{key} is larger than the memory of this machine"
        yield Finding(level="values", file=TARGET_WEIGHTS_NAME, message=message)
        return
    step = max(1, _WEIGHT_BYTES // max(1, file.places[key].spec.row_bytes))
    parts = (file.read_rows(key, row, min(row + step, rows)) for row in range(0, rows, step))
    if not all(bool(torch.isfinite(part).all()) for part in parts):
        message = f"{key} holds numbers that are not finite"
        yield Finding(level="values", file=TARGET_WEIGHTS_NAME, message=message)


def check_supervision(supervision: Supervision) -> Iterator[Finding]:
    """Judge what is supervised, over the whole cache: what would train badly though it is well-formed."""
    for message in supervision_faults(supervision):
        yield Finding(level="supervision", file=MANIFEST_NAME, message=message)


def _real_length(sample: dict[str, torch.Tensor]) -> int:
    used = (sample[LAST_HIDDEN] != 0).any(dim=-1) | (sample[LOSS_MASK] != 0)
    positions = used.nonzero()
    return int(positions[-1]) + 1 if len(positions) else 0


def _range_faults(sample: dict[str, torch.Tensor], length: int, cache: CacheFolder) -> list[str]:
    ids, mask = sample[INPUT_IDS], sample[LOSS_MASK]
    vocab_size = cache.manifest["target_vocab_size"]
    pad = cache.provenance.pad_token_id if cache.provenance else None
    faults = []
    if bool(((ids < 0) | (ids >= vocab_size)).any()):
        faults.append(f"ids outside 0..{vocab_size - 1}")
    if bool(((mask != 0) & (mask != 1)).any()):
        faults.append("loss mask values other than 0 and 1")
    if bool(mask[length:].any()):
        faults.append("padding is supervised")
    if pad is not None and bool((ids[length:] != pad).any()):
        faults.append(f"padding holds ids other than {pad}")
    for key in (HIDDEN, LAST_HIDDEN):
        if not bool(torch.isfinite(sample[key]).all()):
            faults.append(f"{key} holds numbers that are not finite")
        if pad is not None and bool(sample[key][length:].any()):
            faults.append(f"{key} is not zero at padding")
    if bool((sample[LAST_HIDDEN][:length] == 0).all(dim=-1).any()):
        faults.append(f"{LAST_HIDDEN} is all zero at a real token")
    return faults


def _scale_faults(sample: dict[str, torch.Tensor], dataset: CachedDSparkDataset, index: int) -> list[str]:
    length = dataset.stored_length(index)
    return [
        f"{scales} are not the smallest powers of two with which the states fit"
        for key, scales in SCALES_OF.items()
        if not are_scales_right(dataset.stored_rows(scales, index, 0, length), sample[key][:length])
    ]


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


def verify_cache(
    cache: CacheFolder,
    level: str,
    *,
    tokens: Tokens | None = None,
    kept: list[int] | None = None,
    num_threads: int = 1,
    advance: Callable[[int], None] = lambda _: None,
) -> Report:
    """Run the levels up to `level`; without provenance there are no digests, and the level `bytes` is left out.

    Args:
        cache: The cache.
        level: One of `VERIFY_LEVELS`.
        tokens: The tokens it was made from, where they are at hand.
        kept: Index in `tokens` of each sample of the cache; None: all of them, in order.
        num_threads: Shards checked at a time; each holds one sample and a few MiB in memory.
        advance: Told of each shard that was checked.

    Raises:
        CacheFormatError: The cache was replaced by another one between two levels.
    """
    report = Report(level=level)
    wanted = VERIFY_LEVELS[: VERIFY_LEVELS.index(level) + 1]
    sound = report.collect(check_files(cache))
    if cache.provenance and "bytes" in wanted:
        # First: with another manifest everything else would be said to be wrong.
        sound &= report.collect(check_bytes(cache, [MANIFEST_NAME]))
    if sound and "headers" in wanted:
        sound = report.collect(check_headers(cache))
    if sound and "bytes" in wanted:
        has_values = "values" in wanted
        task = _ShardTask(
            cache=cache,
            dataset=CachedDSparkDataset(cache.path) if has_values else None,
            expected=_expected(cache, tokens, kept, report) if has_values else None,
        )
        report.collect(task.findings_of_others())
        _check_shards(task, report, num_threads, advance)
    if "supervision" in wanted and not report.findings:
        report.collect(check_supervision(report.supervision))
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardTask:
    """Checks what is checked shard by shard.

    Attributes:
        cache: The cache.
        dataset: Reads samples; None: their values are not checked.
        expected: What ids and masks must be.
    """

    cache: CacheFolder
    dataset: CachedDSparkDataset | None
    expected: Expected | None

    def findings_of_others(self) -> Iterator[Finding]:
        """Check the files that are no shards."""
        if self.cache.provenance:
            yield from check_bytes(self.cache, [TARGET_WEIGHTS_NAME])
        if self.dataset:
            try:
                yield from check_weights(self.cache)
            except (CacheFormatError, CacheNotFoundError) as error:
                yield Finding(level="values", file=TARGET_WEIGHTS_NAME, message=str(error))

    def __call__(self, shard: int) -> tuple[list[Finding], Supervision]:
        supervision = Supervision()
        findings: list[Finding] = []
        if self.cache.provenance:
            findings += check_bytes(self.cache, self.cache.names_of(shard))
        if self.dataset:
            values = check_values(self.cache, self.dataset, shard, supervision, self.expected)
            try:
                findings += islice(values, MAX_FINDINGS)
            except (CacheFormatError, CacheNotFoundError) as error:
                findings.append(Finding(level="values", file=shard_name(shard), message=str(error)))
        return findings, supervision


def _check_shards(task: _ShardTask, report: Report, num_threads: int, advance: Callable[[int], None]) -> None:
    """Check shards on threads, which hashing and torch leave free to run; take the results in the shards' order."""
    before = len(report.findings)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as threads:
        pending: deque[Future[tuple[list[Finding], Supervision]]] = deque()
        shards = iter(range(len(task.cache.shard_samples)))
        try:
            while len(report.findings) - before < MAX_FINDINGS:
                pending.extend(threads.submit(task, shard) for shard in islice(shards, 2 * num_threads - len(pending)))
                if not pending:
                    break
                findings, supervision = pending.popleft().result()
                report.findings += findings
                report.supervision.merge(supervision)
                advance(1)
        finally:
            threads.shutdown(cancel_futures=True)


def _expected(cache: CacheFolder, tokens: Tokens | None, kept: list[int] | None, report: Report) -> Expected | None:
    """Return what gives the expected ids and mask of a sample; a wrong number of samples is a finding."""
    if tokens is None:
        return None
    indices = list(range(len(tokens))) if kept is None else kept
    if len(indices) != cache.manifest["num_samples"]:
        message = f"num_samples is {cache.manifest['num_samples']}, tokens/ gives {len(indices)}"
        report.findings.append(Finding(level="values", file=MANIFEST_NAME, message=message))
        return None
    return lambda index: (tokens.input_ids(indices[index]), tokens.loss_mask(indices[index]))
