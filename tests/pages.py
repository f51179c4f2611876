"""Reading a page of the docs: its blocks, each of which some test must take and run."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from tests.repository import ROOT

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ("dvc", "git", "dspark-cache", "python", "pip", "make", "torchrun", "srun", "mpirun", "cp", "gto")
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


class Page:
    """A page whose code is taken piece by piece; `left` says what nobody took."""

    def __init__(self, name: str) -> None:
        """Read the page `name`, a path from the root of the repository."""
        self.name = name
        self.text = (ROOT / name).read_text()
        self.blocks = [(language, code) for _, language, code in _BLOCK.findall(self.text)]
        self._left = Counter(line for language, code in self.blocks for line in _lines(language, code))

    def take(self, beginning: str) -> str:
        """Take the first command line that is left and begins so, without its comment."""
        line = next(line for line in self._left if line.startswith(beginning))
        self._left.pop(line)
        return re.sub(r"\s{2,}#.*", "", line)

    def take_block(self, language: str, containing: str) -> str:
        """Take the whole block of a language that contains a text."""
        (code,) = (code for found, code in self.blocks if found == language and containing in code)
        for line in _lines(language, code):
            self._left.pop(line)
        return code

    @property
    def left(self) -> list[str]:
        """Commands and blocks that were not taken."""
        return list(self._left)


def _lines(language: str, code: str) -> list[str]:
    """Return what is taken by itself: each line of a shell's commands, other code as a whole."""
    if language != "sh":
        return [code]
    return [line for line in code.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]


def pages() -> list[Path]:
    """Return every page for people."""
    folders = (ROOT, ROOT / "docs", ROOT / "docs/recipes", ROOT / "inputs/data", ROOT / "inputs/target")
    return [path for folder in folders for path in sorted(folder.glob("*.md"))]
