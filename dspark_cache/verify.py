"""Verifying a published cache, level by level: files, headers, bytes, values, supervision. Nothing is changed.

Files and headers are checked for the whole cache; where they are sound, bytes and values are checked shard by shard,
several at a time, each file read once for both. A level that would stumble over what an earlier one found is not run.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cache_files import CacheFolder, Finding, check_bytes, check_files, check_headers, digest_findings
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.fp8 import are_scales_right, dequantise
from dspark_cache.manifest import is_ragged
from dspark_cache.provenance import COUNTS
from dspark_cache.schema import (
    EMBED_KEY,
    FP8,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LM_HEAD_KEY,
    LOSS_MASK,
    MANIFEST_NAME,
    SAMPLE_OFFSETS,
    SCALES_OF,
    TARGET_WEIGHTS_NAME,
    VERIFY_LEVELS,
)
from dspark_cache.shard_file import open_cache_file, physical_memory
from dspark_cache.shard_stream import read_values
from dspark_cache.shards import shard_name
from dspark_cache.supervision import Supervision, supervision_faults
from dspark_cache.threads import torch_threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from dspark_cache.pins import Pin
    from dspark_cache.shard_file import ShardFile
    from dspark_cache.tokens import Tokens

_OTHERS = "and others"
MAX_FINDINGS = 100
"""Of shards so many are listed whole; then only the first of each file: who mends the cache needs all their names."""

Values = dict[str, torch.Tensor]
"""Key to its tensor; of states the largest magnitude of each position and layer, which is as finite and as zero."""


def read_files(cache: CacheFolder, files: Iterable[ShardFile], keys: Iterable[str]) -> tuple[list[Finding], Values]:
    """Read files once: check their sha256 where there is provenance, and return their values.

    Args:
        cache: The cache.
        files: Open files of it.
        keys: Tensors [..., k * H] of which only the largest magnitudes [..., k] are returned.

    Raises:
        CacheFormatError: A file ends early, or its values are more than the memory of this machine.
    """
    widths = dict.fromkeys(keys, cache.manifest["hidden_size"])
    findings: list[Finding] = []
    values: Values = {}
    for file in files:
        digest = hashlib.sha256()
        values |= read_values(file, widths, digest.update if cache.provenance else lambda _: None)
        if cache.provenance:
            findings += digest_findings(cache, Path(file.name).name, digest.hexdigest())
    return findings, values


Expected = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Sample index to its ids and mask [T] in `tokens/`."""


def check_values(
    cache: CacheFolder, shard: int, values: Values, supervision: Supervision, expected: Expected | None
) -> Iterator[Finding]:
    """Check every sample of a shard: ids and mask in range, padding as the format says, states finite.

    Args:
        cache: The cache.
        shard: Index of the shard.
        values: What `read_files` returned of it.
        supervision: Counts of this shard alone, to add to.
        expected: With it, ids, masks and order are compared exactly. Without it a sample of a padded cache is taken to
            end at its last token with a state that is not zero.
    """
    name, first = shard_name(shard), cache.starts[shard]
    for index, sample in enumerate(_samples(values, cache), start=first):
        tokens = expected(index) if expected else None
        length = len(tokens[0]) if tokens else _stored_length(sample, cache)
        supervision.add(index, sample, length, is_cut=length == cache.manifest["seq_length"])
        faults = _range_faults(sample, length, cache) + _scale_faults(sample)
        if tokens:
            faults += _token_faults(sample, *tokens)
        for fault in faults:
            yield Finding(level="values", file=name, message=f"sample {index}: {fault}")
    yield from _count_findings(cache, name, supervision)


def _samples(values: Values, cache: CacheFolder) -> Iterator[Values]:
    """Yield the samples of a shard, [S, ...] or [T, ...] each: ids and masks int64, states in 8 bits decoded."""
    tensors = dict(values)
    if cache.manifest["dtype"] == FP8:
        tensors |= {key: dequantise(values[key], values[scales]) for key, scales in SCALES_OF.items()}
    offsets = tensors.pop(SAMPLE_OFFSETS, None)
    if offsets is None:
        yield from ({key: tensor[row] for key, tensor in tensors.items()} for row in range(len(tensors[INPUT_IDS])))
        return
    for start, stop in pairwise(offsets.tolist()):
        sample = {key: tensor[start:stop] for key, tensor in tensors.items()}
        yield sample | {key: sample[key].to(torch.int64) for key in (INPUT_IDS, LOSS_MASK)}


def _count_findings(cache: CacheFolder, name: str, supervision: Supervision) -> Iterator[Finding]:
    recorded = cache.recorded(name)
    counts = (supervision.num_samples, supervision.num_tokens, supervision.supervised_tokens)
    found = dict(zip(COUNTS, counts, strict=True))
    if recorded and recorded.counts != found:
        message = f"provenance.json says {dict(recorded.counts)}, its samples give {found}"
        yield Finding(level="values", file=name, message=message)


def check_weights(cache: CacheFolder) -> Iterator[Finding]:
    """Check sha256 of the target weights, and that lm_head is finite: one row that is not spoils every distribution.

    Raises:
        CacheNotFoundError: The file is missing.
        CacheFormatError: It is not what it was when its header was checked.
    """
    file = open_cache_file(cache.path / TARGET_WEIGHTS_NAME)
    key = LM_HEAD_KEY if LM_HEAD_KEY in file.places else EMBED_KEY
    if file.places[key].spec.num_bytes > physical_memory():
        yield from check_bytes(cache, [TARGET_WEIGHTS_NAME] if cache.provenance else [])
        message = f"{key} is larger than the memory of this machine"
        yield Finding(level="values", file=TARGET_WEIGHTS_NAME, message=message)
        return
    findings, values = read_files(cache, [file], (EMBED_KEY, LM_HEAD_KEY))
    yield from findings
    if not bool(torch.isfinite(values[key]).all()):
        message = f"{key} holds numbers that are not finite"
        yield Finding(level="values", file=TARGET_WEIGHTS_NAME, message=message)


def check_supervision(supervision: Supervision) -> Iterator[Finding]:
    """Judge what is supervised, over the whole cache: what would train badly though it is well-formed."""
    for message in supervision_faults(supervision):
        yield Finding(level="supervision", file=MANIFEST_NAME, message=message)


def _stored_length(sample: Values, cache: CacheFolder) -> int:
    return len(sample[INPUT_IDS]) if is_ragged(cache.manifest) else real_length(sample)


def real_length(sample: Values) -> int:
    """Return the positions of a padded sample up to the last that has a state or is supervised."""
    used = ((sample[LAST_HIDDEN] != 0).any(dim=-1) | (sample[LOSS_MASK] != 0)).nonzero()
    return int(used[-1]) + 1 if len(used) else 0


def _range_faults(sample: Values, length: int, cache: CacheFolder) -> list[str]:
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
    if int((sample[LAST_HIDDEN][:length] != 0).any(dim=-1).sum()) < length:  # a token that is not there is zero too
        faults.append(f"{LAST_HIDDEN} is all zero at a real token")
    return faults


def _scale_faults(sample: Values) -> list[str]:
    return [
        f"{scales} are not the smallest powers of two with which the states fit"
        for key, scales in SCALES_OF.items()
        if scales in sample and not are_scales_right(sample[scales], sample[key])
    ]


def _token_faults(sample: Values, ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
    faults = []
    if not torch.equal(sample[INPUT_IDS][: len(ids)], ids.to(torch.int64)):
        faults.append("input_ids are not those of tokens/")
    if not torch.equal(sample[LOSS_MASK][: len(mask)], mask.to(torch.int64)):
        faults.append("loss_mask is not that of tokens/")
    return faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Relative L2 of a token of a cached state to the recomputed one, over some samples.

    Attributes:
        state: "layer 3", "last hidden", "logits".
        mean: Of all tokens.
        worst: Of the token farthest off.
        limit: Up to which a state agrees.
    """

    state: str
    mean: float
    worst: float
    limit: float


@dataclass(slots=True)
class Report:
    """What a verification found.

    Attributes:
        level: How far was checked.
        findings: What is not as it must be.
        supervision: Counts of the samples whose values were checked.
        has_sound_values: Whether the values of every sample were checked, and nothing was found up to there.
        num_recomputed: Samples that ran through the target once more.
        distances: How far each of their states is from what the target gave.
    """

    level: str
    findings: list[Finding] = field(default_factory=list)
    supervision: Supervision = field(default_factory=Supervision)
    has_sound_values: bool = False
    num_recomputed: int = 0
    distances: list[Distance] = field(default_factory=list)

    @property
    def lists_all(self) -> bool:
        """Whether there are no findings but those that are listed."""
        return all(finding.message != _OTHERS for finding in self.findings)

    @property
    def count(self) -> str:
        """How many findings there are, in words: at least so many where not all are listed."""
        return f"{'' if self.lists_all else 'at least '}{len(self.findings)}"

    def collect(self, findings: Iterable[Finding]) -> bool:
        """Take the findings of one level; say whether there were none."""
        before = len(self.findings)
        self.findings += findings
        return len(self.findings) == before

    def as_json(self) -> dict[str, Any]:
        """Return the report as DVC metrics: numbers in nested objects, findings as text."""
        return {
            "level": self.level,
            "num_findings": len(self.findings),
            "findings": [str(finding) for finding in self.findings],
            "supervision": self.supervision.as_json(),
            "recompute": self._recompute_json(),
        }

    def _recompute_json(self) -> dict[str, Any]:
        """Return the worst of all states: as it is, and as a share of what its state allows."""
        if not self.distances:
            return {}
        shares = [distance.worst / distance.limit for distance in self.distances]
        return {
            "num_samples": self.num_recomputed,
            "worst_relative_l2": max(distance.worst for distance in self.distances),
            "worst_share_of_tolerance": float(f"{max(shares):.3g}"),
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
        num_threads: Processors to use. Twice as many shards are checked at a time, each of which takes 2 MiB of
            memory, and for each of its positions 5 to 16 bytes and 2 to 7 for each layer.
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
            pin=cache.pinned() if has_values else None,
            expected=_expected(cache, tokens, kept, report) if has_values else None,
        )
        report.collect(task.findings_of_others())
        _check_shards(task, report, num_threads, advance)
    report.has_sound_values = "values" in wanted and not report.findings
    if "supervision" in wanted and not report.findings:
        report.collect(check_supervision(report.supervision))
    return report


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardTask:
    """Checks what is checked file by file.

    Attributes:
        cache: The cache.
        pin: The files that are to be checked; None: their values are not.
        expected: What ids and masks must be.
    """

    cache: CacheFolder
    pin: Pin | None
    expected: Expected | None

    def findings_of_others(self) -> list[Finding]:
        """Check the files that are no shards."""
        return self._read([TARGET_WEIGHTS_NAME], lambda _: check_weights(self.cache))

    def __call__(self, shard: int) -> tuple[list[Finding], Supervision]:
        supervision = Supervision()
        findings = self._read(self.cache.names_of(shard), lambda pin: self._shard_findings(pin, shard, supervision))
        return findings, supervision

    def _read(self, names: Sequence[str], check: Callable[[Pin], Iterable[Finding]]) -> list[Finding]:
        """Return what a check of values finds; of files that it cannot read, or where there is none, what bytes say."""
        values: list[Finding] = []
        if self.pin:
            try:
                return list(check(self.pin))
            except (CacheFormatError, CacheNotFoundError) as error:
                values = [Finding(level="values", file=names[0], message=str(error))]
        return [*(check_bytes(self.cache, names) if self.cache.provenance else ()), *values]

    def _shard_findings(self, pin: Pin, shard: int, supervision: Supervision) -> list[Finding]:
        with pin.explaining():
            files = self.cache.open_shard(shard)
        pin.ensure_same(shard, files)
        findings, values = read_files(self.cache, files, SCALES_OF)
        return [*findings, *_limited(check_values(self.cache, shard, values, supervision, self.expected), MAX_FINDINGS)]


def _check_shards(task: _ShardTask, report: Report, num_threads: int, advance: Callable[[int], None]) -> None:
    """Check shards on threads, which hashing and torch leave free to run; take the results in the shards' order.

    There are twice as many as are to compute: while one waits for the disk, another has the processor.
    """
    before = len(report.findings)
    with torch_threads(2 * num_threads, "verify") as threads:
        pending: deque[Future[tuple[list[Finding], Supervision]]] = deque()
        shards = iter(range(len(task.cache.shard_samples)))
        try:
            while True:
                pending.extend(threads.submit(task, shard) for shard in islice(shards, 3 * num_threads - len(pending)))
                if not pending:
                    break
                findings, supervision = pending.popleft().result()
                report.findings += _limited(findings, MAX_FINDINGS - (len(report.findings) - before))
                report.supervision.merge(supervision)
                advance(1)
        finally:
            threads.shutdown(cancel_futures=True)


def _limited(findings: Iterable[Finding], limit: int) -> list[Finding]:
    """Return `limit` findings; of the rest the first of each file, and a last one that says there are others."""
    listed: list[Finding] = []
    others: dict[str, Finding] = {}
    named: set[str] = set()
    for finding in findings:
        if len(listed) < limit or finding.file not in named:
            listed.append(finding)
            named.add(finding.file)
        else:
            others.setdefault(finding.file, finding)
    return [*listed, *(replace(finding, message=_OTHERS) for finding in others.values())]


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
