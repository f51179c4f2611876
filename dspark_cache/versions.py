"""Opening a cache by repository and revision: `open_cache`.

DVC says which files a version has and fetches those that are missing, into its own cache. Each is compared once with
the sha256 that provenance.json records, and linked into a folder named by DVC's hash of the cache, which a dataset
then opens like any other. Stands after the reader and `progress`; dvc is imported only to look into a repository.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.dvc_output import Address, DvcOutput, is_url, naming_dvc, open_output, path_in_git
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, SettingsError
from dspark_cache.files import ensure_free_disk, link_file, make_folder, put_file
from dspark_cache.identity import ensure_expected
from dspark_cache.manifest import read_manifest
from dspark_cache.provenance import read_provenance
from dspark_cache.reader import CachedDSparkDataset, ensure_share, num_shards_of
from dspark_cache.schema import MANIFEST_NAME, PROVENANCE_NAME
from dspark_cache.shards import SHARD_RE, cut_by_bytes
from dspark_cache.version_store import (
    BATCH_BYTES,
    GONE,
    HASH_THREADS,
    STORE_VARIABLE,
    VersionStore,
    bytes_progress,
    compare_again,
    fault_of,
    is_whole,
    names_of_share,
    state_of,
    store_root,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dspark_cache.files import FinishedParts
    from dspark_cache.manifest import PathLike
    from dspark_cache.provenance import FileRecord

    Expected = Mapping[str, Any] | str | os.PathLike[str]


_NAMED = 10


def open_cache(
    path_or_repo: PathLike,
    rev: str | None = None,
    expect: Expected | None = None,
    *,
    path: str = "cache",
    shards: range | None = None,
    store_dir: PathLike | None = None,
    **options: Any,
) -> CachedDSparkDataset:
    """Open a version of a cache, fetching what is not there yet. Its folder is the dataset's `cache_dir`.

    Processes of a machine may call it at the same time: one fetches, the others wait.

    Args:
        path_or_repo: Folder of a cache; or a git repository with DVC, by URL or local path.
        rev: Tag, branch or commit of the repository. None: of a URL its default branch, of a local repository what its
            dvc.lock says now, committed or not; the only choice for a folder.
        expect: See `CachedDSparkDataset`; compared before any shard is fetched.
        path: The cache's path in the repository; of a local folder, in the DVC project that it is in.
        shards: See there; no other shard is fetched.
        store_dir: Folder of the DVC cache to fetch into. None: the one that `DSPARK_CACHE_DIR` names; else that of a
            local repository; else that of the repository around the working directory; else `~/.cache/dspark-cache`.
        options: Others of `CachedDSparkDataset`.

    Raises:
        CacheNotFoundError: No such folder, repository or path in it, or files are neither here nor in the remote.
        CacheFormatError: No cache, not as its manifest says, another one than `expect`, or a fetched file has other
            bytes than were recorded.
        SettingsError: No such revision, one of a folder, dvc is not installed, too little disk is free, or as
            `CachedDSparkDataset`.
    """
    folder = fetch_cache(path_or_repo, rev, expect, path=path, shards=shards, store_dir=store_dir)
    return CachedDSparkDataset(folder, expect=expect, shards=shards, **options)


def fetch_cache(
    path_or_repo: PathLike,
    rev: str | None = None,
    expect: Expected | None = None,
    *,
    path: str = "cache",
    shards: range | None = None,
    store_dir: PathLike | None = None,
) -> Path:
    """Return the folder of a version of a cache, fetching what is not there yet. Arguments and errors: `open_cache`."""
    text, folder = os.fspath(path_or_repo), Path(path_or_repo)
    if not is_url(text) and not folder.is_dir():
        raise CacheNotFoundError(f"no such folder: {text}; expected that of a cache or of a repository, or a URL")
    if rev is not None and not rev.strip():
        raise SettingsError(f"rev: expected a tag, a branch or a commit, or None, found {rev!r}")
    if not is_url(text) and (folder / MANIFEST_NAME).is_file():
        return _own_folder(folder, rev, expect, shards)
    url, path = text if is_url(text) else str(folder.resolve()), path.strip("/")
    if rev is not None and not is_url(text):
        with naming_dvc():
            path = path_in_git(Path(url), path)
    wanted = _Wanted(url=url, rev=rev, path=path, expect=expect, shards=shards)
    folder = _fetch(wanted, VersionStore(store_root(url, store_dir)))
    if expect is not None:
        ensure_expected(read_manifest(folder), expect, cache_dir=wanted.place)
    return folder


def _own_folder(folder: Path, rev: str | None, expect: Expected | None, shards: range | None) -> Path:
    """Return the folder of a cache that was given as one, if it can be what was asked for."""
    if rev is not None:
        raise SettingsError(
            f"rev: {folder} is a cache, which has no revisions, found {rev!r}: give the repository that it is from"
        )
    manifest = read_manifest(folder)
    if shards is not None:
        ensure_share(shards, num_shards_of(manifest))
    if expect is not None:
        ensure_expected(manifest, expect, cache_dir=str(folder))
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted(Address):
    """A cache of a repository, and what the caller asked for of it."""

    expect: Expected | None
    shards: range | None


def _fetch(wanted: _Wanted, store: VersionStore) -> Path:
    """Return the folder of a version, with all that is wanted in it."""
    folder = store.known(wanted)
    if folder is None or not is_whole(folder, wanted.shards, store.read_checked()):
        with store.turn() as checked:
            folder = store.known(wanted)  # another process may have fetched it meanwhile
            if folder is None or not compare_again(folder, wanted.shards, checked):
                folder = _look_up(wanted, store, checked)
    return folder


def _look_up(wanted: _Wanted, store: VersionStore, checked: FinishedParts) -> Path:
    """Ask the repository for the version, and fill its folder."""
    with open_output(wanted, store.root) as output:
        folder = store.version(output.key)
        if not is_whole(folder, wanted.shards, checked.records):
            _fill(_Version(wanted, output, folder, checked))
        if output.is_fixed:
            store.remember(wanted, output.key)
    return folder


def _fill(version: _Version) -> None:
    """Put provenance and manifest in place, check what they say, then weights and shards."""
    wanted, folder, names = version.wanted, version.folder, version.output.oids.keys()
    if MANIFEST_NAME not in names:
        raise CacheFormatError(f"{wanted} is no cache: it has no {MANIFEST_NAME}, but {sorted(names)[:_NAMED]}")
    make_folder(folder)
    version.put([name for name in (PROVENANCE_NAME,) if name in names])
    provenance = read_provenance(folder)
    version.records = provenance.files if provenance else {}
    version.put([MANIFEST_NAME])
    manifest = read_manifest(folder)
    if wanted.expect is not None:
        ensure_expected(manifest, wanted.expect, cache_dir=wanted.place)
    required, every = names_of_share(manifest, wanted.shards), set(names_of_share(manifest, None))
    missing = sorted(every - names)
    surplus = sorted(name for name in names if SHARD_RE.match(name) and name not in every)
    if missing or surplus:
        raise CacheFormatError(
            f"{wanted} is not what its {MANIFEST_NAME} says: missing {missing[:_NAMED]}, surplus {surplus[:_NAMED]}"
        )
    _put_all(version, required)


def _put_all(version: _Version, names: Sequence[str]) -> None:
    """Put many files in place, as many at a time as a page cache holds, and show how far it is."""
    sizes = [version.records[name].num_bytes if name in version.records else 0 for name in names]
    missing = sum(size for name, size in zip(names, sizes, strict=True) if not version.has(name))
    remedy = f"or name another DVC cache by store_dir= or {STORE_VARIABLE}"
    ensure_free_disk(version.folder, missing, what=str(version.wanted), remedy=remedy)
    with bytes_progress(f"fetch {version.wanted.path}", sum(sizes)) as advance:
        for run in cut_by_bytes(sizes, BATCH_BYTES):
            version.put([names[index] for index in run])
            advance(sum(sizes[index] for index in run))


class _Version:
    """A version whose folder is being filled.

    Attributes:
        records: What provenance.json records of each file, once that is known.
    """

    def __init__(self, wanted: _Wanted, output: DvcOutput, folder: Path, checked: FinishedParts) -> None:
        self.wanted = wanted
        self.output = output
        self.folder = folder
        self.records: Mapping[str, FileRecord] = {}
        self._checked = checked

    def put(self, names: Sequence[str]) -> None:
        """Link files that are in DVC's cache, fetch the others, each compared unless it was before.

        A damaged object in DVC's cache is replaced by a fetched one; where none can be had it stays as it is, since it
        may be all that is left.

        Raises:
            CacheNotFoundError: Files are neither here, or damaged, nor in the remote.
            CacheFormatError: A file in the remote has other bytes than recorded. What was fetched of it is removed.
        """
        left = [name for name in names if not self._is_checked(self.folder / name, name)]
        there = {name for name in left if self.output.object(name).exists()}
        damaged = self._link(sorted(there))
        missing = [name for name in left if name not in there or name in damaged]
        if missing:
            with self._aside(damaged):
                self._fetch(missing, damaged)

    def has(self, name: str) -> bool:
        """Say whether a file need not be fetched, as far as one can tell without reading it."""
        return (self.folder / name).exists() or self.output.object(name).exists()

    @contextmanager
    def _aside(self, names: Iterable[str]) -> Iterator[None]:
        """Move objects out of the way while they are fetched again; those that are not come back."""
        sources = [source for source in map(self.output.object, names) if source.exists()]
        places = {source: source.with_name(f"{source.name}.damaged") for source in sources}
        for source, aside in places.items():
            source.rename(aside)
        try:
            yield
        finally:
            for source, aside in places.items():
                if source.exists():
                    aside.unlink()
                else:
                    aside.rename(source)

    def _fetch(self, names: Sequence[str], damaged: Mapping[str, str]) -> None:
        """Fetch files, some of which are here, damaged: name to what is wrong."""
        reasons = self.output.fetch(names)
        missing = [name for name in names if not self.output.object(name).exists()]
        if missing:
            why = f": {reasons[-1]}" if reasons else "; dvc push where it was made"
            here = [f"{name} {damaged[name]}" for name in missing if name in damaged]
            raise CacheNotFoundError(
                f"{self.wanted}: {len(missing)} of its files are neither in {self.output.objects} nor could they be "
                f"fetched, {missing[:_NAMED]}{why}" + (f"; damaged here: {'; '.join(here[:_NAMED])}" if here else "")
            )
        fetched = self._link(names)
        gone = [name for name, fault in fetched.items() if fault == GONE]
        if gone:
            raise CacheNotFoundError(
                f"{self.wanted}: files were removed from {self.output.objects} while they were fetched, as dvc gc "
                f"does, {gone[:_NAMED]}: open it again when that has ended"
            )
        if fetched:
            for name in fetched:
                self.output.object(name).unlink(missing_ok=True)  # two names may have one object
            faults = [f"{name} {fault}" for name, fault in fetched.items()]
            raise CacheFormatError(
                f"{self.wanted}: the remote has damaged files, which were not kept in {self.output.objects}; mend the "
                "remote: " + "; ".join(faults[:_NAMED])
            )

    def _link(self, names: Sequence[str]) -> dict[str, str]:
        """Compare objects with what is recorded of them and link them; return the faults of damaged ones."""
        new = [name for name in names if not self._is_checked(self.output.object(name), name)]
        with ThreadPoolExecutor(HASH_THREADS) as threads:
            faults = dict(zip(new, threads.map(self._fault, new), strict=True))
        damaged = {name: fault for name, fault in faults.items() if fault}
        for name in names:
            source, link = self.output.object(name), self.folder / name
            if name in damaged:
                link.unlink(missing_ok=True)
                continue
            try:
                if name in faults:
                    self._checked.add(self.output.oids[name], self._state(source, name))
                if not _put_link(source, link):
                    self._checked.add(self._own_name(name), self._state(link, name))
            except FileNotFoundError:
                damaged[name] = GONE
        return damaged

    def _is_checked(self, path: Path, name: str) -> bool:
        """Say whether a file is the very one that was compared before."""
        with suppress(FileNotFoundError):
            checked, state = self._checked.records, self._state(path, name)
            return state in (checked.get(self.output.oids[name]), checked.get(self._own_name(name)))
        return False

    def _own_name(self, name: str) -> str:
        return f"{self.folder.name}/{name}"

    def _state(self, path: Path, name: str) -> dict[str, Any]:
        return state_of(path, self.records.get(name))

    def _fault(self, name: str) -> str:
        """Return what is wrong with an object; DVC does not flush what it fetches to the disk, so that is done here."""
        source = self.output.object(name)
        with suppress(FileNotFoundError), source.open("rb") as stream:
            os.fsync(stream.fileno())
        return fault_of(source, self.records.get(name), self.output.oids[name])


def _put_link(source: Path, link: Path) -> bool:
    """Give an object a name in a version's folder: a hard link, else a symbolic one, and a copy only where neither is.

    A hard link keeps the file when DVC's cache is cleaned.

    Returns:
        Whether it is a link.
    """
    link.unlink(missing_ok=True)
    if link_file(source, link):
        return True
    try:
        link.symlink_to(source)
    except OSError as error:
        sys.stderr.write(f"{link} is copied, since it cannot be a link ({error}): its bytes are on the disk twice\n")
        with put_file(link) as temporary:
            shutil.copyfile(source, temporary)
        return False
    return True
