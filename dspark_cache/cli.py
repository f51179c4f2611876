"""`dspark-cache`, the command line for people; the stages have no flags and are run by DVC."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.cache_commands import add_cache_commands
from dspark_cache.console import HelpFormatter, add_command, completion_script, say, say_error, warn
from dspark_cache.errors import DsparkCacheError, Terminated
from dspark_cache.repository_commands import add_repository_commands
from dspark_cache.schema import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHELLS = ("bash", "zsh", "tcsh")
PATHS = (
    *("cache", "source", "destination", "first", "second"),
    *("folder", "folders", "path", "tokenizer", "train_config", "html", "repository"),
)
"""Arguments that a shell completes by files and folders."""
_EPILOG = """\
`dspark-cache COMMAND --help` says more of each, with examples.

exit codes:
  0    done
  1    refused, or something was found; the last line on stderr says what and what to do
  2    wrong usage
  130  interrupted (SIGINT)
  141  nobody reads the output any more (SIGPIPE)
  143  terminated (SIGTERM)

Results go to stdout, progress and errors to stderr. Colours appear on a terminal only, and not if NO_COLOR is set."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code, as `--help` lists them; wrong usage exits with 2 by itself.
    """
    if sys.stderr is None:  # closed; errors of argparse, bars and warnings would end in one of Python's own
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process runs
    parsed = make_parser().parse_args(arguments)
    if sys.stdout is None:
        say_error("stdout is closed, there is nowhere to print to: redirect it to a file, or to /dev/null")
        return 1
    try:
        with _terminated_by_exception():
            parsed.run(parsed)
            sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (DsparkCacheError, OSError) as error:
        say_error(str(error))
        return 1
    except KeyboardInterrupt:
        warn("interrupted")
        return 130
    except Terminated:
        warn("terminated")
        return 143
    return 0


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what was begun is put in order."""

    def terminate(*_: object) -> None:
        raise Terminated

    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # ignored, or handled by whoever calls `main`
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="dspark-cache",
        description="Versioned, verified caches of a frozen LLM's hidden states, from which speculative-decoding\n"
        "drafts are trained. The pipeline is run by `dvc repro`; these commands set it up and look at what it made.",
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    add_repository_commands(commands)
    add_cache_commands(commands)
    completion = add_command(
        commands,
        "completion",
        _complete,
        about="print what a shell completes these commands by",
        examples="""
            dspark-cache completion bash > ~/.local/share/bash-completion/completions/dspark-cache
            dspark-cache completion zsh > ~/.zfunc/_dspark-cache
        """,
    )
    completion.add_argument("shell", choices=SHELLS)
    return parser


def _complete(parsed: argparse.Namespace) -> None:
    say(completion_script(make_parser(), parsed.shell, PATHS))


if __name__ == "__main__":
    sys.exit(main())
