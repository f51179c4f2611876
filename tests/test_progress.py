"""Progress of a long step: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import sys
import termios
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from dspark_cache.progress import LINE_SECONDS, Progress

if TYPE_CHECKING:
    from collections.abc import Callable


def test_without_a_terminal_one_line_is_written_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("shards", 3000, "B") as progress:
        progress.advance(1000)
        assert capsys.readouterr().err == ""
        progress.advance(2000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shards: 100%|")
    assert "| 3.00k/3.00k [" in captured.err
    assert "B/s]" in captured.err
    assert captured.err.count("\n") == 1
    assert "\r" not in captured.err
    assert len(captured.err) <= 101


def test_work_that_was_done_before_counts_but_not_in_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("capture", 4000, "tok", done=4000):
        pass
    line = capsys.readouterr().err
    assert "| 4.00k/4.00k [" in line
    assert "?tok/s" in line


def test_a_step_that_is_shorter_than_the_delay_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("shards", 1, "B", delay=3600) as progress:
        progress.advance(1)
    assert capsys.readouterr().err == ""


def test_steps_back_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("capture", 400, "tok") as progress:
        for units in (300, -300, 100):
            progress.advance(units)
    assert capsys.readouterr().err.startswith("capture:  25%|")


def test_an_unknown_total_is_counted_without_a_share(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("rows", None, "row") as progress:
        progress.advance(5)
    assert capsys.readouterr().err.startswith("rows: 5.00row [")


def test_a_failed_step_writes_no_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), Progress("shards", 3, "B"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_a_line_is_written_once_so_many_seconds_are_over(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress("shards", 4, "B")
    progress.advance(1)
    assert capsys.readouterr().err == ""
    progress._last_line -= LINE_SECONDS  # as if it had been written a minute ago
    progress.advance(1)
    assert capsys.readouterr().err.startswith("shards:  50%|")
    progress.advance(1)
    assert capsys.readouterr().err == ""


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> str:
    """Run with stderr on a pseudo-terminal; return what it shows."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 80))
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        work()
    shown = b""
    with os.fdopen(master, "rb", buffering=0) as screen, suppress(OSError):  # EIO is the end of a terminal
        while part := screen.read(1 << 16):
            shown += part
    return shown.decode()


def test_on_a_terminal_a_bar_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with Progress("shards", 4, "B", done=1) as progress:
            progress.advance(3)

    shown = on_a_terminal(monkeypatch, work)
    assert "\rshards:  25%|" in shown
    assert "\rshards: 100%|" in shown
    assert "| 4.00/4.00 [" in shown
    assert shown.count("\n") == 1


def test_on_a_terminal_an_interrupted_bar_is_left_with_a_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        with pytest.raises(KeyboardInterrupt), Progress("shards", 4, "B"):
            raise KeyboardInterrupt

    shown = on_a_terminal(monkeypatch, work)
    assert "shards:   0%|" in shown
    assert shown.endswith("\n")
