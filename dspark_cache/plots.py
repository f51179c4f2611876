"""The data of the report's charts as rows, for `dvc plots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.charts import cut_bins
from dspark_cache.schema import EVAL, TRAIN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dspark_cache.charts import Bin
    from dspark_cache.examine import VerifiedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a histogram is called, and what it counts samples by."""

    title: str
    unit: str


CHARTS = {
    "lengths": Words(title="Real tokens a sample", unit="tokens"),
    "anchors": Words(title="Anchors a sample", unit="anchors"),
    "supervised": Words(title="Supervised share of a sample's tokens", unit="percent"),
}
"""The histograms, by the names of their files."""


def sample_bins(part: VerifiedPart) -> dict[str, list[Bin]]:
    """Return the bins of each histogram; they depend on `seq_length` alone."""
    seq_length, supervision = part.cache.manifest["seq_length"], part.report.supervision
    return {
        "lengths": cut_bins(supervision.lengths, seq_length),
        "anchors": cut_bins(supervision.anchor_counts, seq_length),
        "supervised": cut_bins(supervision.percents, 100),
    }


def plot_data(parts: Mapping[str, VerifiedPart]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each plot, with columns for both parts, so that one chart shows all; null where unknown.

    Histograms have the share of samples, in percent, at the lower end of each bin. The last hidden state stands at the
    id of the last layer, as which it could be captured too.
    """
    return {
        **{name: _histogram_rows(parts, name) for name in CHARTS},
        "norms": _state_rows(parts, _norm_numbers, ("p5", "p50", "p95")),
        "recompute": _state_rows(parts, _distance_numbers, ("mean", "worst")),
    }


def _histogram_rows(parts: Mapping[str, VerifiedPart], name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{CHARTS[name].unit: part.low} for part in sample_bins(parts[TRAIN])[name]]
    for part in (TRAIN, EVAL):
        known = part in parts and parts[part].examined is not None
        bins = sample_bins(parts[part])[name] if known else []
        total = sum(one.count for one in bins)
        for place, row in enumerate(rows):
            row[part] = round(100 * bins[place].count / total, 3) if known else None
    return rows


def _norm_numbers(part: VerifiedPart) -> dict[str, Any]:
    return {row.state: row for row in part.examined.norms} if part.examined else {}


def _distance_numbers(part: VerifiedPart) -> dict[str, Any]:
    return {row.state: row for row in part.report.distances}


def _state_rows(
    parts: Mapping[str, VerifiedPart], numbers: Callable[[VerifiedPart], dict[str, Any]], columns: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return a row for each captured layer and the last hidden state, with `columns` of what `numbers` knows of it."""
    manifest = parts[TRAIN].cache.manifest
    layers = {f"layer {layer}": layer for layer in manifest["target_layer_ids"]}
    last = manifest["num_hidden_layers"] - 1
    if last not in layers.values():
        layers["last hidden"] = last
    found = {name: numbers(parts[name]) if name in parts else {} for name in (TRAIN, EVAL)}
    return [
        {"state": state, "layer": layer}
        | {f"{name}_{column}": getattr(found[name].get(state), column, None) for name in found for column in columns}
        for state, layer in layers.items()
    ]
