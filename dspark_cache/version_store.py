"""The DVC cache that versions of caches are fetched into, and what is kept there beside DVC's objects.

A version is a folder of links to objects. Which files were compared with what is recorded of them is kept with their
state, so that each is read once, and again if it is no longer the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dspark_cache.dvc_output import is_url, naming_dvc, naming_faults
from dspark_cache.errors import CacheFormatError, LockedError, SettingsError
from dspark_cache.files import FileLock, FinishedParts, file_digest, put_json, read_parts
from dspark_cache.manifest import is_ragged, read_manifest
from dspark_cache.provenance import read_provenance
from dspark_cache.ragged import shard_files
from dspark_cache.reader import ensure_share, num_shards_of
from dspark_cache.schema import MANIFEST_NAME, PROVENANCE_NAME, TARGET_WEIGHTS_NAME
from dspark_cache.shards import cut_by_bytes
from dspark_cache.strict_json import read_json_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dspark_cache.dvc_output import Address
    from dspark_cache.manifest import PathLike
    from dspark_cache.provenance import FileRecord


STORE_VARIABLE = "DSPARK_CACHE_DIR"
"""Environment variable that names the DVC cache to fetch into."""
LINKS_FOLDER = "dspark"
"""Name of our folder inside a DVC cache, where `dvc gc` does not look."""
BATCH_BYTES = 1 << 34
"""Fetched or read at a time; what was fetched is then compared while it is still in the page cache."""
HASH_THREADS = 4
GONE = "was removed meanwhile, as dvc gc does"
"""Fault of a file that was there a moment ago."""
_CHECKED_KEY = "1"
_POLL_SECONDS = 0.1


class VersionStore:
    """A DVC cache, and what we keep in it: versions as folders of links, which revisions they are, checked objects."""

    def __init__(self, root: Path) -> None:
        """Take the folder of a DVC cache, which need not exist."""
        self.root = root
        self.folder = root / LINKS_FOLDER
        self._revisions = self.folder / "revisions.json"
        self._checked = self.folder / "checked.jsonl"

    def version(self, key: str) -> Path:
        """Return the folder of a version."""
        return self.folder / "versions" / key

    def known(self, address: Address) -> Path | None:
        """Return the folder of a version whose revision was looked up before."""
        key = self._read_revisions().get(address.digest)
        return self.version(key) if isinstance(key, str) else None

    def read_checked(self) -> Mapping[str, Any]:
        """Return the states of files that were compared, as `turn` gives them to be added to."""
        return read_parts(self._checked, _CHECKED_KEY)

    def remember(self, address: Address, key: str) -> None:
        """Note which version a revision is."""
        revisions = self._read_revisions()
        if revisions.get(address.digest) != key:
            put_json(self._revisions, {**revisions, address.digest: key})

    def _read_revisions(self) -> dict[str, Any]:
        try:
            return read_json_object(self._revisions)
        except (FileNotFoundError, CacheFormatError):
            return {}

    @contextmanager
    def turn(self) -> Iterator[FinishedParts]:
        """Wait until no other process fetches into this store; give the states of files that were compared.

        An object is called by its md5, a file of a version that is no link to the object by VERSION/NAME.
        """
        with ExitStack() as stack:
            is_told = False
            while True:
                try:
                    stack.enter_context(FileLock(self.folder / "lock"))
                    break
                except LockedError as error:
                    if not is_told:
                        named = f" {self.folder}" if str(error).endswith("--break-lock") else ""
                        sys.stderr.write(f"waiting: {error}{named}\n")
                        is_told = True
                    time.sleep(_POLL_SECONDS)
                except OSError as error:
                    raise SettingsError(
                        f"{self.folder} cannot be written to ({error}): name another DVC cache by store_dir= or "
                        f"{STORE_VARIABLE}"
                    ) from error
            yield FinishedParts(self._checked, _CHECKED_KEY)


def store_root(url: str, store_dir: PathLike | None) -> Path:
    """Return the folder of the DVC cache to fetch into."""
    chosen = store_dir or os.environ.get(STORE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().resolve()
    found = None if is_url(url) else _dvc_cache(Path(url))
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return found or _dvc_cache(Path.cwd()) or Path(caches, "dspark-cache").resolve()


def _dvc_cache(folder: Path) -> Path | None:
    """Return the DVC cache of the repository around a folder, None without a repository."""
    with naming_dvc():
        from dvc.exceptions import NotDvcRepoError
        from dvc.repo import Repo

    def not_opened(why: str) -> SettingsError:
        remedy = f"mend it, or name a DVC cache by store_dir= or {STORE_VARIABLE}"
        return SettingsError(f"the DVC repository around {folder} cannot be opened: {why}; {remedy}")

    with naming_faults(not_opened):
        try:
            with Repo(str(folder)) as repo:
                return Path(repo.cache.local_cache_dir)
        except NotDvcRepoError:
            return None


def is_whole(folder: Path, shards: range | None, checked: Mapping[str, Any]) -> bool:
    """Say whether a version's folder has all files of a share, each the very file that was compared.

    Raises:
        SettingsError: `shards` is no share of the cache.
    """
    return _changed(folder, shards, checked) == []


def _changed(folder: Path, shards: range | None, checked: Mapping[str, Any]) -> list[_Changed] | None:
    """Return the files of a share that are not the very ones that were compared; None: some are not there."""
    try:
        provenance, manifest = read_provenance(folder), read_manifest(folder)
        records = provenance.files if provenance else {}
        names = [MANIFEST_NAME, *names_of_share(manifest, shards), *([PROVENANCE_NAME] if provenance else [])]
        files = [_Changed(name, records.get(name), state_of(folder / name, records.get(name))) for name in names]
    except (CacheFormatError, OSError):
        return None
    compared = set(map(_as_text, checked.values()))
    return [file for file in files if _as_text(file.state) not in compared]


class _Changed(NamedTuple):
    """A file of a version, what provenance.json records of it, and what it is now, as `state_of` gives it."""

    name: str
    record: FileRecord | None
    state: dict[str, Any]


def state_of(path: Path, record: FileRecord | None) -> dict[str, Any]:
    """Return what tells whether a file is the very one that was compared with a record."""
    status = path.stat()
    place = {"inode": status.st_ino, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    return {**place, "sha256": record.sha256 if record else None}


def _as_text(state: Any) -> str:
    return json.dumps(state, sort_keys=True)


def compare_again(folder: Path, shards: range | None, checked: FinishedParts) -> bool:
    """Compare files that are not the very ones that were compared, as in a copy of a store, which may have no network.

    Returns:
        Whether all files of the share are there and as recorded.
    """
    changed = _changed(folder, shards, checked.records)
    if changed is None or any(file.record is None and file.name != PROVENANCE_NAME for file in changed):
        return False
    # provenance.json has a digest of itself, which reading it compared.
    recorded = [(folder / file.name, file.record) for file in changed if file.record is not None]
    with bytes_progress("compare", sum(record.num_bytes for _, record in recorded)) as advance:
        for run in cut_by_bytes([record.num_bytes for _, record in recorded], BATCH_BYTES):
            files = [recorded[index] for index in run]
            with ThreadPoolExecutor(HASH_THREADS) as threads:
                faults = list(threads.map(lambda file: fault_of(file[0], file[1], ""), files))
            for (path, record), fault in zip(files, faults, strict=True):
                if fault:
                    sys.stderr.write(f"{path} {fault}: it is fetched again\n")
                    return False
                advance(record.num_bytes)
    for file in changed:
        checked.add(f"{folder.name}/{file.name}", file.state)
    return True


def fault_of(path: Path, record: FileRecord | None, oid: str) -> str:
    """Compare a file with its record, without one with the md5 by which DVC names it; return what is wrong."""
    try:
        return _difference(path, record, oid)
    except FileNotFoundError:
        return GONE


def _difference(path: Path, record: FileRecord | None, oid: str) -> str:
    if record is None:
        with path.open("rb") as stream:
            found, expected = hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest(), oid
        return "" if found == expected else f"has md5 {found}, dvc says {expected}"
    size = path.stat().st_size
    if size != record.num_bytes:
        return f"has {size} bytes, {PROVENANCE_NAME} says {record.num_bytes}"
    found = file_digest(path)
    return "" if found == record.sha256 else f"has sha256 {found}, {PROVENANCE_NAME} says {record.sha256}"


def names_of_share(manifest: dict[str, Any], shards: range | None) -> list[str]:
    """Return the files of a share but manifest and provenance."""
    count = num_shards_of(manifest)
    if shards is not None:
        ensure_share(shards, count)
    ragged = is_ragged(manifest)
    return [
        TARGET_WEIGHTS_NAME,
        *(name for shard in shards or range(count) for name in shard_files(shard, ragged=ragged)),
    ]


@contextmanager
def bytes_progress(name: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are done; give what is told of more."""
    with naming_dvc():
        from dspark_cache.progress import Progress
    with Progress(name, num_bytes or None, "B") as progress:
        yield progress.advance
