"""Writing on threads: parts in order, worth a hand-over, and the first error of the order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from dspark_cache import cache_writer
from dspark_cache.cache_writer import _grouped, _Part
from dspark_cache.threads import Ahead, torch_threads

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([], []), ([1], [1]), ([4], [1]), ([2, 1, 1, 1], [3, 1]), ([9, 9, 1], [1, 1, 1]), ([1] * 9, [4, 4, 1])],
)
def test_small_parts_go_to_a_thread_together(
    monkeypatch: pytest.MonkeyPatch, tokens: list[int], expected: list[int]
) -> None:
    monkeypatch.setattr(cache_writer, "_GROUP_BYTES", 40)
    parts = [_Part("a", sample, 3, 3 + count) for sample, count in enumerate(tokens)]
    groups = list(_grouped(parts, 10))
    assert [len(group) for group in groups] == expected
    assert [part for group in groups for part in group] == parts


def test_results_come_in_order_and_no_more_are_made_ahead_than_was_said() -> None:
    made: list[int] = []

    def work(number: int) -> Callable[[], int]:
        return lambda: (made.append(number), number)[1]

    with ThreadPoolExecutor(2) as threads:
        results = Ahead(threads, 3).results(map(work, range(20)))
        assert next(results) == 0
        assert len(made) <= 4
        assert list(results) == list(range(1, 20))


def test_an_error_comes_in_its_place_and_what_is_pending_is_given_up() -> None:
    held, begun = threading.Event(), []

    def work(number: int) -> Callable[[], int]:
        def do() -> int:
            begun.append(number)
            if number == 1:
                raise ValueError("part 1")
            if number:
                held.wait(30)
            return number

        return do

    with ThreadPoolExecutor(1) as threads:
        results = Ahead(threads, 5).results(map(work, range(20)))
        assert next(results) == 0
        with pytest.raises(ValueError, match=r"^part 1$"):
            next(results)
        held.set()
    assert len(begun) < 6


def test_torch_computes_on_one_processor_in_each_thread_and_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch_threads(2, "some") as threads:
            assert [threads.submit(torch.get_num_threads).result() for _ in range(4)] == [1] * 4
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
