"""Geometry of the report's charts: numbers in, coordinates out. The template draws them.

It imports nothing of the library. Coordinates are in units of the charts' view boxes, `WIDTH` of them across, which is
little enough for a telephone: text keeps its size there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH = 340
HEIGHT = 190
MAX_BINS = 24
ROW_HEIGHT = 22
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 12, 24, 36
_TRACK_LEFT, _TRACK_RIGHT = 84, 78


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Samples whose number lies between `low` and `high`, both included."""

    low: int
    high: int
    count: int

    @property
    def label(self) -> str:
        """The range as text."""
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of a histogram."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    place: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Bars of bins with their axes; ticks of `x_ticks` are places across, those of `y_ticks` places down."""

    bins: Sequence[Bin]
    bars: Sequence[Bar]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    left: float = _LEFT
    right: float = WIDTH - _RIGHT
    bottom: float = HEIGHT - _BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A row of a chart of ranges: a line from `start` to `end` with a mark at `middle`."""

    label: str
    value: str
    y: float
    start: float
    middle: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Rows on one logarithmic scale, whose ends are `low` and `high`."""

    rows: Sequence[Range]
    low: str
    high: str
    height: float
    left: float = _TRACK_LEFT
    right: float = WIDTH - _TRACK_RIGHT


def round_step(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is not below `least`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def cut_bins(counts: Mapping[int, int], highest: int) -> list[Bin]:
    """Put numbers from 0 to `highest`, included, into at most `MAX_BINS` bins of one width, which `highest` decides.

    The bins depend on `highest` alone, so that two data sets can be compared. Numbers outside, which values give that
    are not sound, are in the first or the last bin.
    """
    width = round_step((highest + 1) / MAX_BINS)
    sums = [0] * (highest // width + 1)
    for number, count in counts.items():
        sums[min(max(number, 0), highest) // width] += count
    return [
        Bin(low=place * width, high=min((place + 1) * width - 1, highest), count=count)
        for place, count in enumerate(sums)
    ]


def histogram(bins: Sequence[Bin]) -> Histogram:
    """Lay out bins as bars; the tallest fills the chart."""
    most = max(1, *(part.count for part in bins))
    step = (WIDTH - _LEFT - _RIGHT) / len(bins)
    height = HEIGHT - _TOP - _BOTTOM
    every = math.ceil(len(bins) / 5)
    tick = round_step(most / 4)
    return Histogram(
        bins=bins,
        bars=[
            Bar(
                x=round(_LEFT + place * step + 0.5, 2),
                y=round(_TOP + height * (1 - part.count / most), 2),
                width=round(step - 1, 2),
                height=round(height * part.count / most, 2),
            )
            for place, part in enumerate(bins)
        ],
        x_ticks=[
            Tick(place=round(_LEFT + place * step, 2), label=f"{bins[place].low:,}")
            for place in range(0, len(bins), every)
        ],
        y_ticks=[
            Tick(place=round(_TOP + height * (1 - count / most), 2), label=f"{count:,}")
            for count in range(0, most + 1, tick)
        ],
    )


def ranges(rows: Sequence[tuple[str, float, float, float]]) -> Ranges:
    """Lay out rows of a label and a start, a middle and an end that are above 0, on one logarithmic scale."""
    low, high = min(row[1] for row in rows), max(row[3] for row in rows)
    span = math.log(high / low) or 1.0

    def place(value: float) -> float:
        return round(_TRACK_LEFT + (WIDTH - _TRACK_LEFT - _TRACK_RIGHT) * math.log(value / low) / span, 2)

    return Ranges(
        rows=[
            Range(
                label=label,
                value=f"{middle:.4g}",
                y=(number + 1) * ROW_HEIGHT,
                start=place(start),
                middle=place(middle),
                end=place(end),
            )
            for number, (label, start, middle, end) in enumerate(rows)
        ],
        low=f"{low:.3g}",
        high=f"{high:.3g}",
        height=(len(rows) + 2) * ROW_HEIGHT,
    )
