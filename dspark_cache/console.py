"""What the commands of `dspark-cache` share: how they are described, print, colour, show progress and ask."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from dspark_cache.errors import SettingsError
from dspark_cache.strict_json import finite_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

QUIET_SECONDS = 2.0
"""A step that takes no longer shows no progress."""
_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keep the lines of descriptions, and names of commands beside their help."""

    def __init__(self, prog: str, max_help_position: int = 26, **options: Any) -> None:
        """Leave more room for names than argparse does."""
        super().__init__(prog, max_help_position=max_help_position, **options)
        self._action_max_length = 16  # argparse forgets that commands are indented twice


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], None], *, about: str, details: str = "", examples: str
) -> argparse.ArgumentParser:
    """Add a command whose help says what it does, more `details` of it, and `examples`, a line each."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.\n\n{details}".strip(),
        epilog="examples:\n" + "".join(f"  {line.strip()}\n" for line in examples.strip().splitlines()),
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_json(parser: argparse.ArgumentParser, content: str = "print JSON, for scripts") -> None:
    """Add the option `--json`."""
    parser.add_argument("--json", action="store_true", help=content)


def positive(text: str) -> int:
    """Parse an integer above 0.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected an integer above 0, found {text}")
    return int(text)


def positive_number(text: str) -> float:
    """Parse a finite number above 0.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text}")
    return value


def integers(text: str) -> list[int]:
    """Parse integers with commas between them.

    Raises:
        argparse.ArgumentTypeError: They are none.
    """
    if not re.fullmatch(r"-?[0-9]+(,-?[0-9]+)*", text):
        raise argparse.ArgumentTypeError(f"expected integers with commas between them, as 1,9,17, found {text}")
    return [int(part) for part in text.split(",")]


def span(text: str) -> tuple[int, int]:
    """Parse START:STOP; START may be missing.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not re.fullmatch(r"[0-9]*:[0-9]+", text):
        raise argparse.ArgumentTypeError(f"expected START:STOP, as 0:1000, found {text}")
    start, _, stop = text.partition(":")
    return int(start or 0), int(stop)


def say(text: str) -> None:
    """Print a result."""
    print(text)


def say_json(content: object) -> None:
    """Print a result for scripts; null is printed for a number that is not finite, for which JSON has no form."""
    print(json.dumps(finite_json(content), indent=2, allow_nan=False))


def warn(text: str) -> None:
    """Print what is no result."""
    print(text, file=sys.stderr)


def has_colours(stream: TextIO | None) -> bool:
    """Say whether a stream is a terminal whose user has not asked for plain text (https://no-color.org)."""
    return (
        stream is not None and stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def paint(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """Return text in styles where `stream` (stdout) shows them, else as it is."""
    if not has_colours(stream or sys.stdout):
        return text
    return "".join(f"\x1b[{_STYLES[style]}m" for style in styles) + text + "\x1b[0m"


def say_error(text: str) -> None:
    """Print why a command refuses."""
    warn(f"{paint('error:', 'bold', 'red', stream=sys.stderr)} {text}")


@contextmanager
def show_progress(name: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
    """Give what is told of finished units; a bar appears after `QUIET_SECONDS`.

    Training machines may lack the extra that draws it.
    """
    from dspark_cache.progress import Progress

    try:
        progress = Progress(name, total, unit, delay=QUIET_SECONDS)
    except ImportError:
        yield lambda _: None
        return
    with progress:
        yield progress.advance


def confirm(question: str) -> bool:
    """Ask whoever sits at the terminal; the end of input (Ctrl-D) is a no.

    Raises:
        SettingsError: Nobody does.
    """
    if sys.stdin is None or not sys.stdin.isatty():  # None: stdin is closed
        raise SettingsError(f"{question} nobody to ask: pass --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        say("")  # ends the line of the question
        return False


def completion_script(parser: argparse.ArgumentParser, shell: str, paths: Sequence[str]) -> str:
    """Return what a shell completes the commands of `parser` by; arguments named in `paths` are files or folders.

    Raises:
        SettingsError: The package that makes it is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise SettingsError("completion needs the package shtab: pip install shtab") from error
    for action in _all_actions(parser):
        if action.dest in paths:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # where shtab looks for it
    return str(shtab.complete(parser, shell))


def _all_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to its arguments
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - nor to its commands
            for command in action.choices.values():
                yield from _all_actions(command)
