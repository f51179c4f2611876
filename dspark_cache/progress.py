"""Progress of a long step: a bar on a terminal, one line a minute elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from tqdm import tqdm

if TYPE_CHECKING:
    from types import TracebackType

LINE_SECONDS = 60.0


class Progress:
    """Count units of work on stderr, with rate and remaining time."""

    def __init__(self, name: str, total: int | None, unit: str, *, done: int = 0) -> None:
        """Start at `done` of `total` units; None where the total is not known."""
        tqdm.monitor_interval = 0  # a thread of its own, beside which no worker is forked
        self._is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=unit,
            unit_scale=True,
            file=sys.stderr,
            disable=not self._is_terminal,
        )
        self._name, self._total, self._unit = name, total, unit
        self._done = self._initial = done
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the bar, or write the last line."""
        self._bar.close()
        if not self._is_terminal and kind is None:
            self._write_line()

    def advance(self, units: int) -> None:
        """Add finished units."""
        self._done += units
        self._bar.update(units)
        if not self._is_terminal and time.monotonic() - self._last_line >= LINE_SECONDS:
            self._write_line()

    def _write_line(self) -> None:
        self._last_line = time.monotonic()
        line = tqdm.format_meter(
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
