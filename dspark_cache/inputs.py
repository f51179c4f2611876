"""Where conversations and target are, and by what a change in them is seen.

A path under `inputs/` is watched by DVC. A hub id is pinned by a commit. Any other path is pinned by a content
fingerprint, which is computed again before each run. Whatever DVC would not see is refused.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dspark_cache.errors import InputError, LockedError
from dspark_cache.files import file_digest, put_output
from dspark_cache.strict_json import read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dspark_cache.settings import Settings

INPUTS = Path("inputs")
FINGERPRINT_PREFIX = "sha256:"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".gz", ".txt", ".safetensors")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One input as params.yaml names it.

    Attributes:
        text: The value of the param.
        kind: How a change is seen: by DVC, by a fingerprint, or by the hub's commit.
        revision: Commit or fingerprint; None for what DVC watches.
    """

    text: str
    kind: Literal["watched", "pinned", "hub"]
    revision: str | None


def locate_inputs(settings: Settings, root: Path) -> tuple[Input, Input]:
    """Classify data and target, and check everything that can be checked without reading them.

    Args:
        settings: The checked params.
        root: Root of the repository, from which relative paths are taken.

    Returns:
        The data and the target.

    Raises:
        InputError: Listing every fault of both, and of the chat template's place.
    """
    faults: list[str] = []
    data = _locate("data.path", settings.data.path, settings.data.revision, root, faults)
    target = _locate("target.model", settings.target.model, settings.target.revision, root, faults)
    _check_template_place(settings.target.chat_template, root, faults)
    faults.extend(_link_faults(root))
    if faults:
        raise InputError("the inputs have faults:\n  " + "\n  ".join(faults))
    return data, target


def _locate(key: str, text: str, revision: str | None, root: Path, faults: list[str]) -> Input:
    path = root / text
    section = key.partition(".")[0]
    if _exists(path):
        if is_watched(path, root):
            if revision is not None:
                faults.append(f"{section}.revision: {text} is watched by DVC and needs none, found {revision!r}: null")
            return Input(text=text, kind="watched", revision=None)
        if revision is None or not _FINGERPRINT.fullmatch(revision):
            faults.append(
                f"{key}: {text} lies outside {INPUTS}/, where DVC does not watch it: move it there, or set "
                f"{section}.revision to its fingerprint (dspark-cache fingerprint {text}); found {revision!r}"
            )
        return Input(text=text, kind="pinned", revision=revision)
    if not _may_be_hub_id(text, root):
        faults.append(str(missing_file(key, path)))
    elif revision is None or not _COMMIT.fullmatch(revision):
        faults.append(
            f"{key}: {text} is no local path, and as a hub id it needs {section}.revision to be a commit of 40 "
            f"hexadecimal digits (branches and tags move); found {revision!r}"
        )
    return Input(text=text, kind="hub", revision=revision)


def _exists(path: Path) -> bool:
    """Say whether there is such a path; a text that can be none, for its length or a NUL, is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _may_be_hub_id(text: str, root: Path) -> bool:
    """Say whether a text that names no existing path may be a hub id; a mistyped path is none."""
    first, _, rest = text.partition("/")
    is_path = (
        text.endswith(_FILE_SUFFIXES) or first in (".", "..", INPUTS.name) or bool(rest and (root / first).exists())
    )
    return _HUB_ID.fullmatch(text) is not None and not is_path


def fetch_snapshot(item: Input, *, key: str, repo_type: str, patterns: list[str] | None) -> Path:
    """Return the local folder of a hub repository at its pinned commit, fetching what is not there yet.

    Args:
        item: A hub id with its commit.
        key: Param that names it, for messages.
        repo_type: "model" or "dataset".
        patterns: Files to fetch; None: all.

    Raises:
        InputError: Neither the hub nor its local cache has it.
    """
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(item.text, repo_type=repo_type, revision=item.revision, allow_patterns=patterns)
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: cannot fetch {item.text} at {item.revision}: {error}") from error
    return Path(found)


def data_path(data: Input, root: Path) -> Path:
    """Return the file or folder of the conversations; a hub data set is fetched first.

    Raises:
        InputError: Neither the hub nor its local cache has it.
    """
    if data.kind == "hub":
        return fetch_snapshot(data, key="data.path", repo_type="dataset", patterns=None)
    return root / data.text


def missing_file(key: str, path: Path) -> InputError:
    """Make the error for a `path` that does not exist, with the nearest name beside it."""
    there = path
    while not there.parent.exists() and there != there.parent:
        there = there.parent
    names = sorted(entry.name for entry in there.parent.iterdir()) if there.parent.is_dir() else []
    near = difflib.get_close_matches(there.name, names, n=1)
    hint = f"; did you mean {there.parent / near[0]}?" if near else ""
    return InputError(f"{key}: no such file: {path}{hint}")


def is_watched(path: Path, root: Path) -> bool:
    """Say whether `path` lies under the repository's inputs/ as written, links not followed."""
    written = Path(os.path.normpath(root / path))
    return written.is_relative_to(Path(os.path.normpath(root / INPUTS)))


def is_inline_template(text: str) -> bool:
    """Say whether `target.chat_template` holds Jinja itself and no path."""
    return "{%" in text or "{{" in text


def _check_template_place(text: str | None, root: Path, faults: list[str]) -> None:
    if text is None or is_inline_template(text):
        return
    if not _exists(root / text) or not (root / text).is_file():
        faults.append(str(missing_file("target.chat_template", root / text)))
    elif not is_watched(Path(text), root):
        faults.append(
            f"target.chat_template: {text} lies outside {INPUTS}/, where DVC does not watch it: move it there"
        )


def _link_faults(root: Path) -> list[str]:
    """Refuse links that DVC does not see through: to folders, and out of the repository."""
    faults = []
    if (root / INPUTS).is_symlink():
        faults.append(f"{INPUTS} links to a folder, which DVC does not look into: put the folder itself there")
    for folder, folders, names in os.walk(root / INPUTS):
        for name in sorted(folders + names):
            entry = Path(folder, name)
            if not entry.is_symlink():
                continue
            shown = entry.relative_to(root)
            if entry.is_dir():
                faults.append(f"{shown} links to a folder, which DVC does not look into: put the folder itself there")
            elif not entry.resolve().is_relative_to(root.resolve()):
                faults.append(f"{shown} links out of the repository: put the file itself there")
    return faults


def input_files(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield name (relative to `path`) and path of each file that is input, sorted by name.

    READMEs, dot-files and `*.dvc` are none.

    Raises:
        InputError: A link to a folder, whose content would go unseen.
    """
    if path.is_file():
        yield path.name, path
        return
    found = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        linked = [name for name in folders if Path(folder, name).is_symlink()]
        if linked:
            raise InputError(f"{Path(folder, linked[0])} links to a folder: put the folder itself there")
        found += [Path(folder, name) for name in names if _is_input_name(name)]
    for file in sorted(found, key=lambda file: file.relative_to(path).as_posix()):
        yield file.relative_to(path).as_posix(), file


def _is_input_name(name: str) -> bool:
    return not (name.startswith(".") or name.endswith(".dvc") or name.upper().startswith("README"))


class Fingerprints:
    """Content fingerprints; the digest of a file is remembered by its path, inode, size and mtime."""

    def __init__(self, memo_path: Path | None, advance: Callable[[int], None] = lambda _: None) -> None:
        """Remember digests in `memo_path` (None: nowhere); an unreadable memo is forgotten.

        `advance` is told of the bytes that are hashed.
        """
        self._advance = advance
        self._memo_path = memo_path
        self._memo: dict[str, object] = {}
        self._is_changed = False
        if memo_path is not None and memo_path.exists():
            try:
                self._memo = read_json_object(memo_path)
            except ValueError:
                self._memo = {}

    def of(self, path: Path, *, accept: Callable[[str], bool] = lambda _: True) -> str:
        """Return "sha256:..." over names and contents of the input files of `path` whose name is accepted.

        A file's fingerprint is the sha256 of its content. A folder's is that of the lines "digest  name", as
        `sha256sum` prints them, in the order of the names.

        Raises:
            InputError: There is no accepted file.
        """
        files = [(name, file) for name, file in input_files(path) if accept(name)]
        if not files:
            raise InputError(f"{path} holds no input files")
        digests = [(self._file_digest(file), name) for name, file in files]
        self._save()
        if path.is_file():
            return FINGERPRINT_PREFIX + digests[0][0]
        listing = "".join(f"{digest}  {name}\n" for digest, name in digests)
        return FINGERPRINT_PREFIX + hashlib.sha256(listing.encode()).hexdigest()

    def of_input(self, item: Input, path: Path, *, accept: Callable[[str], bool] = lambda _: True) -> str:
        """Return what identifies an input's content: a hub commit as it is, else the fingerprint of `path`."""
        return f"hub:{item.text}@{item.revision}" if item.kind == "hub" else self.of(path, accept=accept)

    def _file_digest(self, file: Path) -> str:
        status = file.stat()
        key = str(file.resolve())
        state = [status.st_ino, status.st_size, status.st_mtime_ns]
        known = self._memo.get(key)
        if isinstance(known, list) and len(known) == 4 and known[:3] == state:
            return str(known[3])
        digest = file_digest(file, self._advance)
        self._memo[key] = [*state, digest]
        self._is_changed = True
        return digest

    def _save(self) -> None:
        if self._memo_path is not None and self._is_changed:
            with suppress(LockedError):  # what another run remembers at this moment is as good
                put_output(self._memo_path, self._memo)
            self._is_changed = False


def ensure_pinned(item: Input, path: Path, fingerprints: Fingerprints, *, key: str) -> None:
    """Compare a pinned input with its revision; other kinds pass.

    Raises:
        InputError: The content is another; the value to write is in the message.
    """
    if item.kind == "pinned":
        found = fingerprints.of(path)
        if found != item.revision:
            raise InputError(f"{key}: {item.text} has changed: expected {item.revision}, found revision: {found}")
