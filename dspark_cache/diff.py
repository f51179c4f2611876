"""Comparing two caches: what they were made from, which samples they hold, and how far their states are apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cached_rows import CachedRows
from dspark_cache.progress import Advance, ShowProgress, silent
from dspark_cache.recompute import relative_l2
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, LOSS_MASK
from dspark_cache.strict_json import NOTHING, differences

if TYPE_CHECKING:
    from dspark_cache.manifest import PathLike

_SIDES = ("first", "second")
_LAST = "last hidden"
MAX_NAMED = 10
"""Samples that are named by their indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One of the two caches: its rows, and the key of each sample in order."""

    rows: CachedRows
    keys: list[str]

    @classmethod
    def read(cls, cache: Path, pad_token_id: int | None, progress: ShowProgress) -> _Side:
        rows = CachedRows(cache, pad_token_id=pad_token_id)
        keys = []
        with progress(f"ids of {cache}", len(rows.dataset), "samples") as advance:
            for index in range(len(rows.dataset)):
                keys.append(rows.key(index))
                advance(1)
        return cls(rows=rows, keys=keys)

    def origin(self) -> dict[str, Any]:
        """Return manifest and provenance, without what follows from the files."""
        provenance = self.rows.folder.provenance
        manifest = {key: value for key, value in self.rows.manifest.items() if key != "shard_samples"}
        return {"manifest": {"layout": "padded", **manifest}, "provenance": provenance.origin() if provenance else {}}

    def first_index(self) -> dict[str, int]:
        """Return the first sample of each key."""
        found: dict[str, int] = {}
        for index, key in enumerate(self.keys):
            found.setdefault(key, index)
        return found

    def widths(self) -> dict[str, int]:
        """Return how many numbers each state of a token has, by the state's name."""
        width = int(self.rows.manifest["hidden_size"])
        return {**{f"layer {layer}": width for layer in self.rows.manifest["target_layer_ids"]}, _LAST: width}

    def states(self, index: int) -> dict[str, torch.Tensor]:
        """Return the states of a sample's real tokens by name, and its mask."""
        sample, length = self.rows.dataset[index], self.rows.num_tokens(index)
        *layers, _ = self.widths()
        by_layer = torch.split(sample[HIDDEN][:length], self.rows.manifest["hidden_size"], dim=-1)
        named = dict(zip(layers, by_layer, strict=True))
        return {**named, _LAST: sample[LAST_HIDDEN][:length], LOSS_MASK: sample[LOSS_MASK][:length]}


def diff_caches(
    first: PathLike,
    second: PathLike,
    *,
    max_samples: int | None = None,
    pad_token_id: int | None = None,
    progress: ShowProgress = silent,
) -> dict[str, Any]:
    """Compare two caches; samples are the same if their token ids are.

    Args:
        first: Folder of a cache.
        second: Folder of another.
        max_samples: Common samples whose states and masks are compared, spread evenly; None: all.
        pad_token_id: Id at padding, of caches that do not say.
        progress: Shows the progress of each step.

    Returns:
        `identity`: full key to the values in the `first` and the `second`, of what differs in manifest and
        provenance, without one that is absent; `samples`: counts of `added`,
        `removed` and `common` ones, indices of the first few, and whether common ones are in the same order; `masks`:
        how many of the compared samples have another mask; `drift`: state to mean and largest relative L2 of a token,
        not a number where a state holds one that is none; and where there are such states `not_compared`: state to
        its width in the `first` and the `second`, of those that only one has, or both in other widths.

    Raises:
        CacheNotFoundError, CacheFormatError: A cache is not whole.
        SettingsError: A cache does not say how it is padded.
    """
    old, new = (_Side.read(Path(path), pad_token_id, progress) for path in (first, second))
    widths, new_widths = old.widths(), new.widths()
    names = [name for name in widths if widths[name] == new_widths.get(name)]
    others = {
        name: {side: found[name] for side, found in zip(_SIDES, (widths, new_widths), strict=True) if name in found}
        for name in {**widths, **new_widths}
        if name not in names
    }
    places, new_places = old.first_index(), new.first_index()
    common = [key for key in places if key in new_places]
    step = 1 if max_samples is None else max(1, -(-len(common) // max(1, max_samples)))
    pairs = [(places[key], new_places[key]) for key in common[::step]]
    with progress("compare", len(pairs), "samples") as advance:
        masks, drift = _compare(old, new, pairs, names, advance)
    return {
        "identity": {
            key: {side: value for side, value in zip(_SIDES, pair, strict=True) if value is not NOTHING}
            for key, *pair in differences(old.origin(), new.origin())
        },
        "samples": {
            **_changed("removed", old, new),
            **_changed("added", new, old),
            "common": (Counter(old.keys) & Counter(new.keys)).total(),
            "same_order": common == [key for key in new_places if key in places],
        },
        "masks": {"compared": len(pairs), "different": masks},
        "drift": drift,
        **({"not_compared": others} if others else {}),
    }


def _changed(name: str, side: _Side, other: _Side) -> dict[str, Any]:
    """Count the samples of one side that the other has not, or has less often, and name the first few."""
    left = Counter(other.keys)
    indices = []
    for index, key in enumerate(side.keys):
        if left[key] > 0:
            left[key] -= 1
        else:
            indices.append(index)
    return {name: len(indices), f"{name}_first": indices[:MAX_NAMED]}


def _compare(
    old: _Side, new: _Side, pairs: list[tuple[int, int]], names: list[str], advance: Advance
) -> tuple[int, dict[str, dict[str, float]]]:
    """Return how many pairs have different masks, and mean and largest relative L2 of each named state."""
    masks = tokens = 0
    sums: dict[str, float] = {}
    largest: dict[str, torch.Tensor] = {}
    for left, right in pairs:
        before, after = old.states(left), new.states(right)
        masks += not torch.equal(before[LOSS_MASK], after[LOSS_MASK])
        tokens += old.rows.num_tokens(left)
        for name in names:
            distances = relative_l2(after[name], before[name])
            sums[name] = sums.get(name, 0.0) + float(distances.sum())
            worst = distances.max()
            largest[name] = torch.maximum(largest.get(name, worst), worst)  # unlike max, it keeps what is no number
        advance(1)
    drift = {name: (sums[name] / tokens, float(largest[name])) for name in sorted(largest)}
    return masks, {
        name: {"mean_relative_l2": float(f"{mean:.3g}"), "worst_relative_l2": float(f"{worst:.3g}")}
        for name, (mean, worst) in drift.items()
    }


def describe(found: dict[str, Any]) -> str:
    """Return what `diff_caches` gave as text for people."""
    lines = [
        f"{key}: " + " -> ".join(f"{values.get(side, NOTHING)!r:.100}" for side in _SIDES)
        for key, values in found["identity"].items()
    ]
    samples, masks = found["samples"], found["masks"]
    for name in ("removed", "added"):
        first = samples[f"{name}_first"]
        more = ", the first: " + ", ".join(map(str, first)) if first else ""
        lines.append(f"samples {name}: {samples[name]}{more}")
    order = "in the same order" if samples["same_order"] else "in another order"
    lines.append(f"samples in both: {samples['common']}, {order}")
    lines.append(f"masks of common samples: {masks['different']} of {masks['compared']} differ")
    for name, distance in found["drift"].items():
        mean, worst = distance["mean_relative_l2"], distance["worst_relative_l2"]
        lines.append(f"{name}: relative L2 of a token {mean:g} in the mean, {worst:g} at most")
    lines += [f"{name}: not compared, {_why_not(widths)}" for name, widths in found.get("not_compared", {}).items()]
    return "\n".join(lines)


def _why_not(widths: dict[str, int]) -> str:
    if len(widths) == 1:
        return f"only the {next(iter(widths))} has it"
    return "since widths differ: " + ", ".join(f"{width} in the {side}" for side, width in widths.items())
