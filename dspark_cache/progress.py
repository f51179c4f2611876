"""Progress of a long step: a bar on a terminal, one line a minute elsewhere; and what a function takes to show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

LINE_SECONDS = 60.0

Advance = Callable[[int], None]
"""Is told of finished units of a step."""
ShowProgress = Callable[[str, int, str], AbstractContextManager[Advance]]
"""Given name, total and unit of a step, returns a context of its `Advance`."""


@contextmanager
def silent(_name: str, _total: int, _unit: str) -> Iterator[Advance]:
    """Show nothing."""
    yield lambda _: None


class Progress:
    """Count units of work on stderr, with rate and remaining time."""

    def __init__(self, name: str, total: int | None, unit: str, *, done: int = 0, delay: float = 0) -> None:
        """Start at `done` of `total` units; None where the total is not known.

        A step of less than `delay` seconds is not shown.

        Raises:
            ImportError: tqdm, which the extra `pipeline` has, is not installed.
        """
        from tqdm import tqdm

        self._format = tqdm.format_meter
        tqdm.monitor_interval = 0  # a thread of its own, beside which no worker is forked
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=unit,
            unit_scale=True,
            file=sys.stderr,
            delay=delay,
            disable=not self._is_terminal,
        )
        self._name, self._total, self._unit = name, total, unit
        self._done = self._initial = done
        self._delay = delay
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar, or write the last line."""
        self._bar.close()
        if not self._is_terminal and kind is None and time.monotonic() - self._start >= self._delay:
            self._write_line()

    def advance(self, units: int) -> None:
        """Add finished units."""
        self._done += units
        self._bar.update(units)
        if not self._is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        line = self._format(
            self._done,
            self._total,  # type: ignore[arg-type]  # None is fine: the total is not known
            self._last_line - self._start,
            prefix=self._name,
            unit=self._unit,
            unit_scale=True,
            initial=self._initial,
            ncols=100,
        )
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
