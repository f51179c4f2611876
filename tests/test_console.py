"""What commands share: help, usage errors, colours on a real terminal, progress after two seconds, completion."""

from __future__ import annotations

import argparse
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dspark_cache.cli import SHELLS, main, make_parser
from dspark_cache.console import integers, positive, positive_number, show_progress, span
from tests.caches import record_files

if TYPE_CHECKING:
    from collections.abc import Callable

COMMAND = Path(sys.executable).parent / "dspark-cache"
COMMANDS = (
    *("init", "doctor", "estimate", "fingerprint", "clean"),
    *("inspect", "verify", "check", "convert", "diff", "fetch", "completion"),
)


def on_terminal(*arguments: str | Path, **environment: str) -> tuple[int, str]:
    """Run the command with a terminal for stdout and stderr; return exit code and what it showed."""
    ours, theirs = pty.openpty()
    variables = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
    with subprocess.Popen(
        [COMMAND, *arguments], stdout=theirs, stderr=theirs, env={**variables, "TERM": "xterm", **environment}
    ) as process:
        os.close(theirs)
        shown = bytearray()
        while True:
            try:
                read = os.read(ours, 4096)
            except OSError:  # Linux says that nobody writes any more so
                break
            if not read:
                break
            shown += read
    os.close(ours)
    return process.returncode, shown.decode().replace("\r\n", "\n")


# help


def test_every_command_is_listed_with_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    listed = shown.partition("  COMMAND\n")[2].partition("\n\n")[0].splitlines()
    assert tuple(line.split()[0] for line in listed if line.startswith("    ") and line[4] != " ") == COMMANDS
    for code in (0, 1, 2, 130, 141, 143):
        assert f"\n  {code:<4} " in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_says_what_it_does_and_shows_examples_that_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    shown = capsys.readouterr().out
    examples = shown.partition("examples:\n")[2].splitlines()
    assert examples
    for example in examples:
        words = example.partition(">")[0].split()
        assert words[:2] == ["dspark-cache", name]
        make_parser().parse_args(words[1:])


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])
def test_every_command_has_json_for_scripts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "²"])
def test_numbers_that_must_be_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected an integer above 0, found {text}$"):
        positive(text)
    assert positive("12") == 12


@pytest.mark.parametrize("text", ["0", "-0.5", "", "x", "nan", "inf"])
def test_rates_that_must_be_above_zero(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected a number above 0, found {text}$"):
        positive_number(text)
    assert positive_number("0.5") == 0.5


@pytest.mark.parametrize("text", ["", "1,", ",1", "1 2", "x", "1:2"])
def test_integers_with_commas(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected integers .* found {text}$"):
        integers(text)
    assert integers("-1,9,17") == [-1, 9, 17]


@pytest.mark.parametrize("text", ["", ":", "1", "1:", "-1:2", "1:x", "1:2:3"])
def test_a_span_has_an_end(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"expected START:STOP, as 0:1000, found {text}$"):
        span(text)
    assert (span(":5"), span("2:5")) == ((0, 5), (2, 5))


# colours


def test_colours_are_for_terminals_that_want_them(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    text = f"{cache} is sound up to the level values\n"
    assert on_terminal("verify", cache) == (0, text.replace("sound", "\x1b[32msound\x1b[0m"))
    assert on_terminal("verify", cache, NO_COLOR="1") == (0, text)
    assert on_terminal("verify", cache, TERM="dumb") == (0, text)
    piped = subprocess.run([COMMAND, "verify", cache], capture_output=True, text=True, check=True)
    assert (piped.stdout, piped.stderr) == (text, "")


def test_findings_and_errors_are_red(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    (cache / "more").touch()
    code, shown = on_terminal("verify", cache, "--level", "files")
    assert code == 1
    assert shown == (
        "\x1b[31m[files] more: does not belong into a cache\x1b[0m\n"
        f"\x1b[1m\x1b[31merror:\x1b[0m {cache} has 1 finding(s)\n"
    )


# progress and pipes


def test_a_step_of_less_than_two_seconds_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("verify", 2, "shards") as advance:
        advance(2)
    assert capsys.readouterr().err == ""


def test_a_longer_step_shows_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_cache.console.QUIET_SECONDS", 0.0)
    with show_progress("verify", 2, "shards") as advance:
        advance(2)
    assert capsys.readouterr().err.startswith("verify: 100%|")


def test_a_reader_that_has_enough_ends_the_command_quietly(make_cache: Callable[..., Path]) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([COMMAND, "inspect", make_cache(5, 2)], stdout=theirs, stderr=subprocess.PIPE, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b"")


# completion

needs = {shell: pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed") for shell in SHELLS}


@pytest.mark.parametrize("shell", [pytest.param(shell, marks=needs[shell]) for shell in SHELLS])
def test_a_shell_takes_its_completion(shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(subprocess.run([COMMAND, "completion", shell], capture_output=True, text=True, check=True).stdout)
    flag = ["-n"] if shell != "tcsh" else ["-f"]
    subprocess.run([shell, *flag, script], check=True, capture_output=True)


@needs["bash"]
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dspark-cache ", set(COMMANDS)),
        ("dspark-cache ver", {"verify"}),
        ("dspark-cache verify --level ", {"files", "headers", "bytes", "values", "supervision"}),
        ("dspark-cache completion ", set(SHELLS)),
        ("dspark-cache verify ca", {"cache", "cache-eval"}),
    ],
)
def test_bash_completes_commands_options_and_folders(line: str, expected: set[str], tmp_path: Path) -> None:
    for name in ("cache", "cache-eval", "other"):
        (tmp_path / name).mkdir()
    script = tmp_path / "script"
    script.write_text(
        subprocess.run([COMMAND, "completion", "bash"], capture_output=True, text=True, check=True).stdout
    )
    words = line.split(" ")
    code = f"""
        source {script}
        COMP_WORDS=({" ".join(repr(word) for word in words)}) COMP_CWORD={len(words) - 1}
        complete -p dspark-cache
        $(complete -p dspark-cache | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert expected <= set(done.stdout.split("\n")[1:])
    assert "other" not in done.stdout.split("\n")[1:]


def test_completion_without_the_package_that_makes_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == "error: completion needs the package shtab: pip install shtab\n"
