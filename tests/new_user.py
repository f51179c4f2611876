"""What a new user has: a copy of this repository, and a virtual environment with its wheel and nothing of the checkout.

Dependencies are those of the tests' own environment, seen through a `.pth` file, so that no network is needed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.repository import ROOT


def copy_of_repository(folder: Path) -> Path:
    """Copy what a clone with the present changes would have, as a git repository of one commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True, env={**os.environ, **GIT})
    return folder


GIT = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "user"), ("EMAIL", "user@example.invalid"))
}


@dataclass(frozen=True)
class Shell:
    """A shell in which the commands of `commands`, the `bin` of a virtual environment, come first."""

    commands: Path

    def environment(self, **more: str) -> dict[str, str]:
        """Return its variables; pip takes what is installed, and hatchling makes the wheel."""
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {
            **kept,
            **GIT,
            "PATH": f"{self.commands}:{os.environ['PATH']}",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the option's value: build isolation is 0, off
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **more,
        }

    def run(self, commands: str, folder: Path, *, code: int = 0, **environment: str) -> str:
        """Run lines, of which the first that fails ends them; return what they print."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


DEVELOPER = Shell(Path(sys.executable).parent)
"""Whoever runs the tests: the package is that of the checkout."""


def new_environment(folder: Path) -> Shell:
    """Make a virtual environment in which dependencies can be imported, and the package not yet."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for old in site.glob("setuptools*"):  # Python 3.11 brings one that is too old for torch
        shutil.rmtree(old)
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("dvc", "torchrun"):  # scripts of dependencies, which name their own interpreter
        script = (DEVELOPER.commands / name).read_text().splitlines(keepends=True)
        (folder / "bin" / name).write_text("".join([f"#!{folder}/bin/python\n", *script[1:]]))
        (folder / "bin" / name).chmod(0o755)
    return Shell(folder / "bin")
