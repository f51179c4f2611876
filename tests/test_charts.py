"""Geometry of charts: bins cover everything once, and what is drawn lies inside."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_cache.charts import HEIGHT, MAX_BINS, WIDTH, Bin, cut_bins, histogram, ranges, round_step


@pytest.mark.parametrize(
    ("least", "step"), [(0, 1), (1, 1), (1.1, 2), (2.5, 5), (5, 5), (6, 10), (10.7, 20), (170.7, 200), (4000, 5000)]
)
def test_a_step_is_a_round_number(least: float, step: int) -> None:
    assert round_step(least) == step


@pytest.mark.parametrize(
    ("highest", "width", "last"), [(1, 1, 1), (8, 1, 8), (23, 1, 23), (24, 2, 24), (256, 20, 240), (4096, 200, 4000)]
)
def test_bins_are_of_one_round_width_and_end_at_the_highest(highest: int, width: int, last: int) -> None:
    bins = cut_bins({}, highest)
    assert {after.low - before.low for before, after in pairwise(bins)} == {width}
    assert (bins[0].low, bins[-1].low, bins[-1].high) == (0, last, highest)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n), max_size=30))))
def test_every_number_is_in_the_one_bin_that_says_so(case: tuple[int, list[int]]) -> None:
    highest, numbers = case
    bins = cut_bins(Counter(numbers), highest)
    assert len(bins) <= MAX_BINS
    assert [part.count for part in bins] == [sum(part.low <= n <= part.high for n in numbers) for part in bins]
    assert all(before.high + 1 == after.low for before, after in pairwise(bins))
    chart = histogram(bins)
    for part, bar in zip(bins, chart.bars, strict=True):
        assert chart.left <= bar.x
        assert bar.x + bar.width <= chart.right + 0.01
        assert bar.y + bar.height == pytest.approx(chart.bottom, abs=0.02)
        assert (bar.height > 0) == (part.count > 0)
    assert all(0 < tick.place < HEIGHT for tick in chart.y_ticks)
    assert 1 <= len(chart.x_ticks) <= 5


def test_numbers_that_cannot_be_are_in_the_outer_bins() -> None:
    assert [part.count for part in cut_bins({-(1 << 62): 2, 0: 1, 2: 1, 1 << 62: 3}, 2)] == [3, 0, 4]


def test_bars_are_as_high_as_their_counts() -> None:
    chart = histogram([Bin(low=0, high=4, count=4), Bin(low=5, high=9, count=1), Bin(low=10, high=10, count=0)])
    assert [bar.height for bar in chart.bars] == [130, 32.5, 0]
    assert [(tick.label, tick.place) for tick in chart.y_ticks][:2] == [("0", chart.bottom), ("1", 121.5)]
    assert [tick.label for tick in chart.x_ticks] == ["0", "5", "10"]


def test_labels_of_bins() -> None:
    assert [Bin(low=7, high=7, count=0).label, Bin(low=1000, high=1999, count=0).label] == ["7", "1,000 to 1,999"]


def test_ranges_lie_on_a_logarithmic_scale() -> None:
    chart = ranges([("a", 1, 10, 100), ("b", 10, 10, 1000)])
    assert (chart.low, chart.high) == ("1", "1e+03")
    third = (chart.right - chart.left) / 3
    first, second = chart.rows
    places = [first.start, first.middle, first.end, second.start, second.middle, second.end]
    assert places == pytest.approx([chart.left + third * number for number in (0, 1, 2, 1, 1, 3)], abs=0.01)
    assert (first.label, first.value, second.y - first.y) == ("a", "10", 22)
    assert chart.right < WIDTH
    assert second.y < chart.height


def test_states_of_one_norm_have_a_place_too() -> None:
    (row,) = ranges([("a", 5, 5, 5)]).rows
    assert row.start == row.middle == row.end
