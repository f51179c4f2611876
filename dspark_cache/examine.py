"""What of a verified cache is shown to a person: how large its states are, and a few samples as text.

Both come from a bounded number of samples, read once more: verification keeps of states only their magnitudes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.errors import InputError
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.sample_text import Decoder, Span, text_spans
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK
from dspark_cache.tokenizing import TokenizerSource, load_tokenizer
from dspark_cache.verify import real_length

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dspark_cache.cache_files import CacheFolder
    from dspark_cache.supervision import Supervision
    from dspark_cache.verify import Report

NORM_SAMPLES = 16
"""Samples, evenly spread, whose states are measured."""
MAX_SHOWN_TOKENS = 1024
"""A sample is shown up to here."""
HEAD_CHARACTERS, TAIL_CHARACTERS = 700, 300
"""A span with more text than both is shown without its middle: where spans begin and end is what one looks for."""
_DIGITS = 4
_ROWS = 4096
"""Rows that are in memory in double precision at a time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNorms:
    """L2 norms of one state of a token, over the tokens of some samples.

    Attributes:
        state: "layer 3", "last hidden".
        mean: Of all tokens; the others are ranks among them.
    """

    state: str
    mean: float
    min: float
    p5: float
    p50: float
    p95: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSpan:
    """A span as it is shown: of a long text head and tail, and how many characters lie between."""

    head: str
    omitted: int
    tail: str
    supervised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A sample as it is shown.

    Attributes:
        index: Its number in the cache.
        why: What it was chosen for.
        num_tokens: Its real tokens.
        supervised_tokens: How many of them are supervised.
        shown_tokens: How many of them the spans are.
        spans: Text, or ids where there is no tokenizer.
    """

    index: int
    why: str
    num_tokens: int
    supervised_tokens: int
    shown_tokens: int
    spans: Sequence[ShownSpan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What turns ids into text; without a tokenizer ids are shown. `note` says which, and why."""

    tokenizer: Decoder | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What was seen of a cache.

    Attributes:
        norms: Of each captured layer and the last hidden state.
        norm_samples: Samples they are from.
        norm_tokens: Tokens they are from.
        samples: A few samples.
        note: How their ids became text, or why they did not.
    """

    norms: Sequence[StateNorms]
    norm_samples: int
    norm_tokens: int
    samples: Sequence[ShownSample]
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPart:
    """A cache, what was found of it and, where it has samples with sound values, what was seen of them."""

    cache: CacheFolder
    report: Report
    examined: Examined | None


def verified_part(cache: CacheFolder, report: Report, texts: Texts) -> VerifiedPart:
    """Look at the samples of a verified cache, if there are some whose values were checked and are sound."""
    has_samples = report.has_sound_values and report.supervision.num_samples
    examined = examine_cache(cache.path, report.supervision, texts) if has_samples else None
    return VerifiedPart(cache=cache, report=report, examined=examined)


def examine_cache(path: Path, supervision: Supervision, texts: Texts) -> Examined:
    """Read a few samples of a cache whose values are sound.

    Args:
        path: The cache.
        supervision: What was counted in all of its samples; it names those to show.
        texts: What turns ids into text.
    """
    dataset = CachedDSparkDataset(path)
    indices = spread(len(dataset), NORM_SAMPLES)
    norms, num_tokens = state_norms(dataset, indices)
    reasons = reasons_to_show(supervision, len(dataset))
    try:
        samples = [show_sample(dataset, index, why, texts.tokenizer) for index, why in reasons.items()]
    except InputError as error:
        texts = no_texts(str(error))
        samples = [show_sample(dataset, index, why, None) for index, why in reasons.items()]
    return Examined(norms=norms, norm_samples=len(indices), norm_tokens=num_tokens, samples=samples, note=texts.note)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers 0 to `count`, excluded, evenly spread and beginning with 0."""
    chosen = min(count, most)
    return [place * count // chosen for place in range(chosen)]


def reasons_to_show(supervision: Supervision, num_samples: int) -> dict[int, str]:
    """Return samples to show, each with what it was chosen for: the extremes, and the one in the middle."""
    chosen = {name: extreme.index for name, extreme in supervision.extremes.items()}
    chosen["in the middle of the cache"] = num_samples // 2
    reasons: dict[int, list[str]] = {}
    for name, index in chosen.items():
        reasons.setdefault(index, []).append(name)
    return {index: ", ".join(names) for index, names in reasons.items()}


def state_norms(dataset: CachedDSparkDataset, indices: Sequence[int]) -> tuple[list[StateNorms], int]:
    """Measure every state of the tokens of some samples, one sample in memory at a time.

    Returns:
        The norms of each captured layer and of the last hidden state, and the number of tokens.
    """
    layers, hidden_size = dataset.manifest["target_layer_ids"], dataset.manifest["hidden_size"]
    parts: dict[str, list[torch.Tensor]] = {}
    for index in indices:
        sample = dataset[index]
        length = real_length(sample)
        for place, layer in enumerate(layers):
            columns = slice(place * hidden_size, (place + 1) * hidden_size)
            parts.setdefault(f"layer {layer}", []).append(_norms(sample[HIDDEN][:length, columns]))
        parts.setdefault("last hidden", []).append(_norms(sample[LAST_HIDDEN][:length]))
    every = {state: torch.cat(norms) for state, norms in parts.items()}
    summaries = [_summary(state, norms) for state, norms in every.items() if len(norms)]
    return summaries, len(every["last hidden"])


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Return the norm of each row; in double precision the order of adding does not show in the digits kept."""
    parts = torch.split(rows, _ROWS)
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in parts])


def _summary(state: str, norms: torch.Tensor) -> StateNorms:
    ordered = norms.sort().values

    def rank(share: float) -> float:
        return _rounded(float(ordered[round(share * (len(ordered) - 1))]))

    return StateNorms(
        state=state,
        mean=_rounded(float(norms.mean())),
        min=rank(0),
        p5=rank(0.05),
        p50=rank(0.5),
        p95=rank(0.95),
        max=rank(1),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def show_sample(dataset: CachedDSparkDataset, index: int, why: str, tokenizer: Decoder | None) -> ShownSample:
    """Read a sample and turn its first tokens into spans.

    Raises:
        InputError: The tokenizer does not have one of the ids.
    """
    sample = dataset[index]
    length = real_length(sample)
    mask = sample[LOSS_MASK][:length]
    shown = min(length, MAX_SHOWN_TOKENS)
    ids = sample[INPUT_IDS][:shown].tolist()
    spans = text_spans(_Ids() if tokenizer is None else tokenizer, ids, mask[:shown].tolist())
    return ShownSample(
        index=index,
        why=why,
        num_tokens=length,
        supervised_tokens=int(mask.sum()),
        shown_tokens=shown,
        spans=[_shown_span(span) for span in spans],
    )


class _Ids:
    """Shows ids as they are, each followed by a space."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:  # noqa: ARG002
        return "".join(f"{token} " for token in token_ids)

    def convert_ids_to_tokens(self, ids: int) -> str:
        return str(ids)


def _shown_span(span: Span) -> ShownSpan:
    omitted = len(span.text) - HEAD_CHARACTERS - TAIL_CHARACTERS
    if omitted <= 0:
        return ShownSpan(head=span.text, omitted=0, tail="", supervised=span.supervised)
    head, tail = span.text[:HEAD_CHARACTERS], span.text[-TAIL_CHARACTERS:]
    return ShownSpan(head=head, omitted=omitted, tail=tail, supervised=span.supervised)


def tokenizer_texts(folder: Path, found: str, expected: str | None, *, name: str, trust: bool = False) -> Texts:
    """Load a tokenizer if it is the one that the samples were tokenised with; else say why ids are shown.

    Args:
        folder: Where it is.
        found: What identifies its content.
        expected: What identifies the one of the samples; None where nothing is known of it.
        name: What it is called in the note, which is the same wherever the folder is.
        trust: Whether code of its own may run.
    """
    if expected is not None and found != expected:
        return no_texts(f"the tokenizer of {name} is {found}, that of the samples was {expected}")
    try:
        tokenizer = load_tokenizer(TokenizerSource(path=str(folder), trust_remote_code=trust))
    except InputError as error:
        logger.warning("%s", error)
        return no_texts(f"no tokenizer can be loaded from {name}")
    unknown = "" if expected else "; nothing says that it is the one that the samples were tokenised with"
    return Texts(tokenizer=tokenizer, note=f"Text by the tokenizer of {name}, {found}{unknown}.")


def no_texts(reason: str) -> Texts:
    """Return that ids are shown, and why."""
    return Texts(tokenizer=None, note=f"Token ids are shown, since {reason}.")
