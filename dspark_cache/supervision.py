"""What is supervised over the samples of a cache: counts, and what of them would train badly."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_cache.schema import INPUT_IDS, LOSS_MASK
from dspark_cache.tokens import MAX_PLAUSIBLE_PERCENT, SpanPrefix

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@dataclass(slots=True)
class Extreme:
    """The first sample of which a value is largest, or smallest."""

    value: float
    index: int


@dataclass(slots=True)
class Supervision:
    """Counts over samples, gathered while their values are checked."""

    num_samples: int = 0
    num_tokens: int = 0
    supervised_tokens: int = 0
    anchors: int = 0
    """Positions p with mask 1 at p and p+1."""
    unsupervised: array[int] = field(default_factory=lambda: array("Q"))
    """Indices of samples without a supervised token."""
    without_anchor: array[int] = field(default_factory=lambda: array("Q"))
    """Indices of samples without an anchor, those without a supervised token too."""
    spans: SpanPrefix = field(default_factory=SpanPrefix)
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of a sample to how many samples have so many; as the next two, no larger than a sample has positions."""
    anchor_counts: Counter[int] = field(default_factory=Counter)
    """Anchors of a sample to how many samples have so many."""
    percents: Counter[int] = field(default_factory=Counter)
    """Share of a sample's tokens that are supervised, in percent rounded down, to how many samples have it."""
    extremes: dict[str, Extreme] = field(default_factory=dict)
    """The samples to look at first, by what they are."""

    def add(self, index: int, sample: dict[str, torch.Tensor], length: int, *, is_cut: bool) -> None:
        """Count sample `index`, of which the first `length` positions are real tokens.

        Args:
            index: Its number.
            sample: Its `input_ids` and `loss_mask`, int64, with or without positions past its end.
            length: Its tokens.
            is_cut: Whether it fills the window, so that its last span may have lost its end.
        """
        mask = sample[LOSS_MASK]
        supervised = int(mask.sum())
        anchors = int((mask[:-1] * mask[1:]).sum())
        self.num_samples += 1
        self.num_tokens += length
        self.supervised_tokens += supervised
        self.anchors += anchors
        self.lengths[length] += 1
        self.anchor_counts[anchors] += 1
        self.percents[100 * supervised // max(1, length)] += 1
        share = supervised / max(1, length)
        self._note("longest", length, index)
        self._note("shortest", -length, index)
        self._note("most supervised", share, index)
        self._note("least supervised", -share, index)
        if not supervised:
            self.unsupervised.append(index)
        if not anchors:
            self.without_anchor.append(index)
        self.spans.add(sample[INPUT_IDS][:length].tolist(), mask[:length].tolist(), is_cut=is_cut)

    def merge(self, other: Supervision) -> None:
        """Take the counts of samples that come after these."""
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens
        self.supervised_tokens += other.supervised_tokens
        self.anchors += other.anchors
        self.unsupervised += other.unsupervised
        self.without_anchor += other.without_anchor
        self.spans.merge(other.spans)
        self.lengths.update(other.lengths)
        self.anchor_counts.update(other.anchor_counts)
        self.percents.update(other.percents)
        for name, extreme in other.extremes.items():
            self._note(name, extreme.value, extreme.index)

    def _note(self, name: str, value: float, index: int) -> None:
        """Take a sample as an extreme if no earlier one has a value as large."""
        if name not in self.extremes or value > self.extremes[name].value:
            self.extremes[name] = Extreme(value=value, index=index)

    @property
    def percent(self) -> float:
        """Share of real tokens that are supervised."""
        return 100 * self.supervised_tokens / max(1, self.num_tokens)

    def as_json(self) -> dict[str, Any]:
        """Return the counts and the supervised share."""
        return {
            "num_samples": self.num_samples,
            "num_tokens": self.num_tokens,
            "supervised_tokens": self.supervised_tokens,
            "supervised_fraction": round(self.percent / 100, 6),
            "anchors": self.anchors,
            "unsupervised_samples": len(self.unsupervised),
            "samples_without_anchor": len(self.without_anchor),
            "common_span_prefix_tokens": len(self.spans.ids) if self.spans.num_spans > 1 else 0,
        }


def supervision_faults(supervision: Supervision) -> Iterator[str]:
    """Yield what would train badly though it is well-formed, judged over all samples, each with a remedy."""
    if not supervision.supervised_tokens:
        yield "no token of any sample is supervised: does the chat template mark the answers?"
        return
    every = supervision.num_samples
    if supervision.unsupervised:
        named = supervision.unsupervised[:10].tolist()
        yield (
            f"{len(supervision.unsupervised)} of {every} samples have no supervised token, the first: {named}; "
            "data.min_loss_tokens: 1 leaves them out"
        )
    single = sorted(set(supervision.without_anchor) - set(supervision.unsupervised))
    if single:
        yield (
            f"{len(single)} of {every} samples have no two supervised tokens in a row, where a draft could begin, the "
            f"first: {single[:10]}; data.min_loss_tokens leaves out short answers"
        )
    if supervision.percent > MAX_PLAUSIBLE_PERCENT:
        yield f"{supervision.percent:.1f} % of all tokens are supervised: does the chat template mark only answers?"
    if supervision.spans.num_spans > 1 and supervision.spans.ids:
        yield (
            f"all {supervision.spans.num_spans} supervised spans begin with the same ids {supervision.spans.ids[:10]}, "
            "which the chat template puts there; data.mask_generation_prompt: true leaves them out"
        )
