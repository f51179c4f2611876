"""A git and DVC repository with versions of a small cache and a remote, made without running the pipeline."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dvc.repo import Repo
from ruamel.yaml import YAML

from tests.caches import make_ragged, record_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GOLDEN = Path(__file__).parent / "data" / "golden" / "cases" / "q3-parquet-dir" / "cache"
"""Nine samples in three padded shards, made by the reference."""


def oid(path: Path) -> str:
    """Return the name of a file's object."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


def stored(store: Path) -> set[str]:
    """Return the names of the objects of a DVC cache or a remote."""
    return {path.parent.name + path.name for path in (store / "files" / "md5").glob("??/*")}


def object_path(store: Path, name: str) -> Path:
    return store / "files" / "md5" / name[:2] / name[2:]


@dataclass(frozen=True)
class Published:
    """A repository whose tags are versions of `cache/`; `versions` keeps a plain copy of each."""

    base: Path

    @property
    def root(self) -> Path:
        return self.base / "producer"

    @property
    def remote(self) -> Path:
        return self.base / "remote"

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def version(self, tag: str) -> Path:
        return self.base / "versions" / tag

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    @contextlib.contextmanager
    def repo(self) -> Iterator[Repo]:
        with contextlib.chdir(self.root), Repo() as repo:
            yield repo

    def publish(self, tag: str, source: Path, change: Callable[[Path], object] = lambda _: None) -> None:
        """Make a folder the next version of `cache/`, commit, tag and push it."""
        kept = self.version(tag)
        shutil.copytree(source, kept)
        change(kept)
        cache = self.root / "cache"
        if cache.exists():
            shutil.rmtree(cache)
        shutil.copytree(kept, cache)
        with self.repo() as repo:
            repo.add("cache")
            repo.push()
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", tag)
        self.git("tag", tag)

    def folder_oid(self, tag: str) -> str:
        """Return the name of the object that lists the files of a version."""
        return str(YAML(typ="safe").load(self.git("show", f"{tag}:cache.dvc"))["outs"][0]["md5"])

    def names(self, tag: str, *names: str) -> set[str]:
        """Return the names of the objects of files of a version, of all without `names`."""
        folder = self.version(tag)
        return {oid(path) for path in folder.iterdir() if not names or path.name in names}


def make_published(base: Path, remote: str | None = None, remote_options: str = "") -> Published:
    """Make a repository with the tags v1 (padded) and v2 (ragged, on the branch `main`), and its remote.

    Args:
        base: Folder to make it in.
        remote: URL of the remote; None: a folder beside the repository.
        remote_options: Lines of the remote's section in DVC's configuration.
    """
    made = Published(base)
    made.root.mkdir(parents=True)
    made.git("init", "--quiet", "--initial-branch", "main")
    made.git("config", "user.email", "test@example.invalid")
    made.git("config", "user.name", "test")
    with contextlib.chdir(made.root):
        Repo.init().close()
    (made.root / ".dvc" / "config").write_text(
        "[core]\n    remote = store\n[cache]\n    type = hardlink\n"
        f"['remote \"store\"']\n    url = {remote or made.remote}\n{remote_options}"
    )
    (made.root / "docs").mkdir()
    (made.root / "docs" / "readme").write_text("in git\n")
    made.publish("v1", GOLDEN, record_files)
    ragged = make_ragged(made.version("v1"), [2, 3, 4])
    made.publish("v2", ragged, record_files)
    return made
