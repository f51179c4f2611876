"""Threads that compute: each on one processor, ahead of who takes what they give."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")


@contextmanager
def torch_threads(number: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Give threads in each of which torch computes on one processor, so that together they take that many."""
    everywhere = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(number, name, torch.set_num_threads, (1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(everywhere)  # threads begin with what any thread has set last


@dataclass(frozen=True, slots=True)
class Ahead:
    """Does work ahead of who takes the results: on `threads`, one piece more than `count` at a time."""

    threads: ThreadPoolExecutor
    count: int

    def results(self, work: Iterable[Callable[[], _T]]) -> Iterator[_T]:
        """Yield the results in order; what is pending when this is closed is given up."""
        pending: deque[Future[_T]] = deque()
        try:
            for do in work:
                pending.append(self.threads.submit(do))
                if len(pending) > self.count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
