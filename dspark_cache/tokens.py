"""The output of the tokenize stage: ragged ids and masks of every sample, and what they were made from.

`tokens/tokens.safetensors` holds `input_ids` int32 [T], `loss_mask` uint8 [T] and `sample_offsets` int64 [n+1];
`tokens/tokens.json` the identity of the inputs and the counts.
"""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.dtypes import TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, InputError, RowError, SettingsError
from dspark_cache.files import byte_view, naming, put_file, put_json
from dspark_cache.loss_masks import common_prefix
from dspark_cache.schema import INPUT_IDS, LOSS_MASK, SAMPLE_OFFSETS, STAGE_VERSIONS
from dspark_cache.shard_file import ShardFile, ShardWriter
from dspark_cache.strict_json import Fields, read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from dspark_cache.tokenizing import TokenizedSample

TOKENS_FILE = "tokens.safetensors"
TOKENS_JSON = "tokens.json"
SAMPLE_KEY_DIGITS = 32
"""Hexadecimal digits of the sha256 by which a sample's states are found: 128 bits."""
_COPY_TOKENS = 1 << 20
MAX_PLAUSIBLE_PERCENT = 98

logger = logging.getLogger(__name__)


def sample_key(input_ids: torch.Tensor) -> str:
    """Return the key of a sample's states: the hash of its ids, as little-endian int32 [T]."""
    return hashlib.sha256(byte_view(input_ids.to(torch.int32).contiguous())).hexdigest()[:SAMPLE_KEY_DIGITS]


def hold_out(keys: Iterable[str], count: int) -> set[str]:
    """Return the keys of the samples to hold out: the first `count` distinct ones.

    Chosen by place, so that appended samples change nothing; by key, so that samples with the same ids stay together.

    Raises:
        SettingsError: No other sample is left.
    """
    distinct = list(dict.fromkeys(keys))
    if count and len(distinct) <= count:
        raise SettingsError(f"data.eval_samples: {count} of {len(distinct)} distinct samples leave none to train on")
    return set(distinct[:count])


@dataclass(slots=True)
class SpanPrefix:
    """The ids that all supervised spans begin with: what a chat template puts there, if there are many spans."""

    num_spans: int = 0
    """Runs of supervised tokens that end before a cut."""
    ids: list[int] = field(default_factory=list)

    def add(self, input_ids: list[int], loss_mask: list[int], *, is_cut: bool) -> None:
        """Take the spans of one sample; the last one of a sample that `is_cut` may have lost its end."""
        for start, end in _spans(loss_mask):
            if end < len(loss_mask) or not is_cut:
                compared = min(end, start + len(self.ids)) if self.num_spans else end
                self.merge(SpanPrefix(num_spans=1, ids=input_ids[start:compared]))

    def merge(self, other: SpanPrefix) -> None:
        """Take the spans that `other` has seen."""
        if not self.num_spans:
            self.ids = other.ids
        elif other.num_spans:
            self.ids = self.ids[: common_prefix(self.ids, other.ids)]
        self.num_spans += other.num_spans


@dataclass(slots=True)
class TokenCounts:
    """What was kept, cut and dropped, counted while the samples come by."""

    num_samples: int = 0
    num_tokens: int = 0
    supervised_tokens: int = 0
    truncated_samples: int = 0
    unsupervised_samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    spans: SpanPrefix = field(default_factory=SpanPrefix)

    def add(self, sample: TokenizedSample) -> None:
        """Count one kept sample."""
        supervised = sum(sample.loss_mask)
        self.num_samples += 1
        self.num_tokens += len(sample.input_ids)
        self.supervised_tokens += supervised
        self.truncated_samples += sample.truncated
        self.unsupervised_samples += supervised == 0
        self.notes.update(sample.notes)
        self.spans.add(sample.input_ids, sample.loss_mask, is_cut=sample.truncated)

    def as_json(self) -> dict[str, Any]:
        """Return the counts under their names, reasons sorted."""
        return {
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "supervised_tokens": self.supervised_tokens,
            "truncated_samples": self.truncated_samples,
            "unsupervised_samples": self.unsupervised_samples,
            "dropped": dict(sorted(self.dropped.items())),
            "notes": dict(sorted(self.notes.items())),
        }


def _spans(mask: list[int]) -> Iterator[tuple[int, int]]:
    """Yield start (included) and end (excluded) of each run of values that are not zero."""
    bits = bytes(map(bool, mask)) + b"\0"
    end = 0
    while (start := bits.find(1, end)) >= 0:
        end = bits.find(0, start)
        yield start, end


class TokensWriter:
    """Collect samples and write `tokens/`. Ids and masks wait in two plain files, not in memory.

    They are copied once more into the final file, whose header must say how many there are; at 5 bytes a token
    this is a thousandth of the states' bytes.
    """

    def __init__(self, folder: Path) -> None:
        """Write into the existing `folder`."""
        self._folder = folder
        self._ids_path, self._mask_path = folder / "ids.part", folder / "mask.part"
        self._ids = self._ids_path.open("w+b")
        self._mask = self._mask_path.open("w+b")
        self._offsets = array("q", [0])
        self.counts = TokenCounts()

    def __enter__(self) -> TokensWriter:
        """Return the writer."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the plain files; what could not be flushed to them is an error of `add` or `finish`."""
        for part in (self._ids, self._mask):
            with suppress(OSError):
                part.close()

    def add(self, sample: TokenizedSample) -> None:
        """Append one sample."""
        with naming(self._ids_path):
            self._ids.write(array("i", sample.input_ids).tobytes())
        with naming(self._mask_path):
            self._mask.write(bytes(sample.loss_mask))
        self._offsets.append(self._offsets[-1] + len(sample.input_ids))
        self.counts.add(sample)

    def finish(self, identity: dict[str, Any]) -> None:
        """Write both files of `tokens/`; `identity` is what the samples were made from."""
        offsets = torch.frombuffer(self._offsets, dtype=torch.int64)
        total = int(offsets[-1])
        specs = {
            INPUT_IDS: TensorSpec(dtype=torch.int32, shape=(total,)),
            LOSS_MASK: TensorSpec(dtype=torch.uint8, shape=(total,)),
            SAMPLE_OFFSETS: TensorSpec(dtype=torch.int64, shape=(len(offsets),)),
        }
        with put_file(self._folder / TOKENS_FILE) as temporary, ShardWriter(temporary, specs) as writer:
            for key, part in ((INPUT_IDS, self._ids), (LOSS_MASK, self._mask)):
                part.seek(0)
                while chunk := part.read(_COPY_TOKENS * specs[key].row_bytes):
                    writer.append(key, torch.frombuffer(bytearray(chunk), dtype=specs[key].dtype))
            writer.append(SAMPLE_OFFSETS, offsets)
            digest = writer.finish()
        self._ids_path.unlink()
        self._mask_path.unlink()
        content = {
            **identity,
            **self.counts.as_json(),
            "sha256": digest,
            "tokenize_version": STAGE_VERSIONS["tokenize"],
        }
        put_json(self._folder / TOKENS_JSON, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepRules:
    """Which rows become samples."""

    min_loss_tokens: int
    skip_invalid: bool
    limit: int | None


def keep_samples(
    results: Iterator[tuple[str, TokenizedSample | RowError]], rules: KeepRules, counts: TokenCounts
) -> Iterator[TokenizedSample]:
    """Yield the samples to keep, counting in `counts.dropped` why others are not.

    Args:
        results: Place of each row ("file:line") with its sample or what is wrong with it.
        rules: What to keep.
        counts: Updated as rows come by.

    Raises:
        InputError: A row is no conversation and `skip_invalid` is off; it is named.
    """
    kept = 0
    for place, result in results:
        if isinstance(result, RowError):
            if not rules.skip_invalid:
                raise InputError(f"{place}: {result}; data.skip_invalid: true skips and counts such rows")
            counts.dropped[result.reason] += 1
        elif sum(result.loss_mask) < rules.min_loss_tokens:
            counts.dropped["min_loss_tokens"] += 1
        else:
            yield result
            kept += 1
            if kept == rules.limit:
                return


def ensure_supervision(counts: TokenCounts, *, path: str) -> None:
    """Refuse a data set with nothing to learn from.

    Raises:
        InputError: No samples, or no supervised token in any of them; with the counts and the likely cause.
    """
    dropped = dict(sorted(counts.dropped.items()))
    if counts.num_samples == 0:
        raise InputError(
            f"{path}: no usable samples, dropped by reason: {dropped}; "
            "check data.split, data.min_loss_tokens and the rows"
        )
    if counts.supervised_tokens == 0:
        raise InputError(
            f"{path}: no supervised token in any of {counts.num_samples} samples ({counts.truncated_samples} cut at "
            "data.seq_length): is the chat template without generation markers around the answers "
            "(target.chat_template), or data.seq_length shorter than the prompts?"
        )


def report_supervision(
    counts: TokenCounts, *, has_markers: bool, masks_prompt: bool, decode: Callable[[list[int]], str]
) -> None:
    """Log the counts, and warn of masks that look wrong.

    Args:
        counts: What was tokenised.
        has_markers: Whether the template marks the answers.
        masks_prompt: Whether `data.mask_generation_prompt` is on.
        decode: Token ids to text.
    """
    percent = 100 * counts.supervised_tokens / counts.num_tokens
    logger.info(
        "%d samples, %d tokens, %.1f %% supervised; %d cut at data.seq_length; dropped %s",
        counts.num_samples,
        counts.num_tokens,
        percent,
        counts.truncated_samples,
        dict(counts.dropped) or "none",
    )
    if not has_markers:
        logger.warning("the chat template has no generation markers: whole assistant turns count, %.1f %%", percent)
    if counts.spans.num_spans > 1 and counts.spans.ids:
        remedy = "" if masks_prompt else ": data.mask_generation_prompt: true leaves out what the template puts there"
        logger.warning(
            "all %d supervised spans begin with the same %d token(s) %r%s",
            counts.spans.num_spans,
            len(counts.spans.ids),
            decode(counts.spans.ids),
            remedy,
        )
    for note, count in sorted(counts.notes.items()):
        logger.warning("%s in %d of %d samples, %.1f %% supervised", note, count, counts.num_samples, percent)
    if counts.unsupervised_samples:
        logger.warning("%d samples without supervision, data.min_loss_tokens drops them", counts.unsupervised_samples)
    if percent > MAX_PLAUSIBLE_PERCENT:
        logger.warning("%.1f %% of all tokens are supervised: does the chat template mark only answers?", percent)


class Tokens:
    """The samples of a finished `tokens/` folder, read by index.

    Attributes:
        identity: The content of tokens.json.
        offsets: int64 [n+1].
    """

    def __init__(self, folder: Path) -> None:
        """Open `folder` and check it.

        Raises:
            CacheNotFoundError: A file is missing; run dvc repro tokenize.
            CacheFormatError: A file is not what the tokenize stage writes.
        """
        self.folder = folder
        try:
            self.identity = read_json_object(folder / TOKENS_JSON)
        except FileNotFoundError as error:
            raise CacheNotFoundError(f"no tokens in {folder}: run dvc repro tokenize") from error
        fields = Fields(self.identity, name=str(folder / TOKENS_JSON))
        self.num_samples = fields.count("num_samples", minimum=1)
        self.num_tokens = fields.count("num_tokens", minimum=1)
        self.seq_length = fields.count("seq_length", minimum=1)
        self.pad_token_id = fields.count("pad_token_id")
        self.sha256 = fields.sha256("sha256")
        for key in ("train_data_path", "chat_template_sha256"):
            fields.text(key)
        for key in ("mask_reasoning_content", "mask_generation_prompt"):
            fields.flag(key)
        fields.count("shuffle_seed")
        fields.take("train_split", "a string or null", lambda v: v is None or isinstance(v, str))
        fields.finish()
        self._file = ShardFile(folder / TOKENS_FILE)
        self._file.expect(
            {
                INPUT_IDS: TensorSpec(dtype=torch.int32, shape=(self.num_tokens,)),
                LOSS_MASK: TensorSpec(dtype=torch.uint8, shape=(self.num_tokens,)),
                SAMPLE_OFFSETS: TensorSpec(dtype=torch.int64, shape=(self.num_samples + 1,)),
            },
            exactly=True,
        )
        self.offsets = self._file.read_rows(SAMPLE_OFFSETS, 0, self.num_samples + 1)
        lengths = self.offsets.diff()
        if self.offsets[0] != 0 or self.offsets[-1] != self.num_tokens or bool((lengths < 1).any()):
            raise CacheFormatError(f"{self._file.name}: sample_offsets do not cover the {self.num_tokens} tokens")
        if bool((lengths > self.seq_length).any()):
            raise CacheFormatError(f"{self._file.name}: a sample is longer than seq_length {self.seq_length}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def length(self, index: int) -> int:
        """Return the number of tokens of a sample."""
        return int(self.offsets[index + 1] - self.offsets[index])

    def input_ids(self, index: int) -> torch.Tensor:
        """Return the ids of a sample, int32 [T]."""
        return self._rows(INPUT_IDS, index)

    def loss_mask(self, index: int) -> torch.Tensor:
        """Return the loss mask of a sample, uint8 [T]."""
        return self._rows(LOSS_MASK, index)

    def keys(self) -> list[str]:
        """Return the key of each sample, in order; samples with the same ids have the same key."""
        return [sample_key(self.input_ids(index)) for index in range(len(self))]

    def _rows(self, key: str, index: int) -> torch.Tensor:
        return self._file.read_rows(key, int(self.offsets[index]), int(self.offsets[index + 1]))
