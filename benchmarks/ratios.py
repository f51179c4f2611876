"""Ratios of ways to do the same thing, measured in turn in one run, and the table of them."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Way = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One ratio.

    Attributes:
        name: What is compared with what; the key by which two runs are compared.
        ratio: Median of the ratios of the rounds; larger is better.
        target: What it is to be at least; None: only reported.
        detail: The absolute figures, of this machine at this time.
    """

    name: str
    ratio: float
    target: float | None
    detail: str

    @property
    def is_met(self) -> bool:
        """Whether the target is reached."""
        return self.target is None or self.ratio >= self.target

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


def in_turn(ways: Mapping[str, Way], rounds: int, prepare: Way = lambda: None) -> dict[str, list[float]]:
    """Return the seconds of each way, round by round; one more round, first, warms up.

    Args:
        ways: What to time.
        rounds: How often.
        prepare: Called before each way, not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            prepare()
            start = time.perf_counter()
            way()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slower: list[float], faster: list[float]) -> float:
    """Return by what factor the second way is faster: the median over the rounds."""
    return statistics.median(one / other for one, other in zip(slower, faster, strict=True))


def rate(amount: float, seconds: list[float]) -> float:
    """Return amount a second, of the median round."""
    return amount / statistics.median(seconds)


def fastest(seconds: Mapping[str, list[float]], prefix: str) -> str:
    """Return the fastest of the ways whose names begin so."""
    return min((way for way in seconds if way.startswith(prefix)), key=lambda way: statistics.median(seconds[way]))


def table(rows: list[Row]) -> list[list[str]]:
    """Return the rows as a table."""
    lines = [["", "ratio", "target", "met", "measured"]]
    for row in rows:
        target = "" if row.target is None else f"{row.target:g}"
        met = "" if row.target is None else ("yes" if row.is_met else "no")
        lines.append([row.name, f"{row.ratio:.2f}", target, met, row.detail])
    return lines
