"""An output of a git and DVC repository at a revision: the files that it has, and DVC fetching some of them.

Only here dvc is asked; it is imported when it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import CacheFormatError, CacheNotFoundError, DsparkCacheError, SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_COMMIT_RE = re.compile(r"[0-9a-f]{40}")
_MD5_RE = re.compile(r"[0-9a-f]{32}")
_URL_RE = re.compile(r"\w[\w+.-]*://|[\w.-]+@[\w.-]+:")


def is_url(text: str) -> bool:
    """Say whether a text is a URL of git, also in the form host:path of ssh."""
    return _URL_RE.match(text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A path of a repository at a revision."""

    url: str
    rev: str | None
    path: str

    def __str__(self) -> str:
        """Name it in messages."""
        return f"{self.path} of {self.place}"

    @property
    def place(self) -> str:
        """Repository and revision, for messages."""
        return _masked(self.url) + (f" at {self.rev}" if self.rev else "")

    @property
    def is_remote(self) -> bool:
        """Whether the repository is named by a URL."""
        return is_url(self.url)

    @property
    def digest(self) -> str:
        """What names repository, revision and path in a file, where a URL with its password must not be."""
        return hashlib.sha256(json.dumps([self.url, self.rev, self.path]).encode()).hexdigest()


def _masked(text: str) -> str:
    """Return a text without what may be a password in a URL."""
    return re.sub(r"//[^/@]*@", "//", text)


@contextmanager
def naming_dvc() -> Iterator[None]:
    """Say what to install where dvc, or what it needs for a remote, cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(
            "a cache of a repository is fetched by dvc, which cannot be imported: pip install dvc, and dvc-s3 or the "
            f"like for its remote ({error})"
        ) from error


@contextmanager
def naming_faults(name: Callable[[str], DsparkCacheError]) -> Iterator[None]:
    """Raise what `name` makes of the reason where DVC, git or a remote's file system raises an error of its own."""
    with naming_dvc():
        try:
            yield
        except (DsparkCacheError, ImportError):
            raise
        except Exception as error:  # they have no base in common
            raise name(_why(error)) from error


class DvcOutput:
    """An output of a repository, as DVC knows it.

    Attributes:
        key: DVC's hash of the folder.
        is_fixed: Whether the revision is a tag or a commit of another's repository, which stays where it is.
        objects: Folder of the objects.
    """

    def __init__(self, address: Address, info: Mapping[str, Any], *, is_fixed: bool) -> None:
        """Take what DVC's file system says of a path.

        Raises:
            CacheFormatError: It is no folder that DVC holds as an output.
        """
        self._address = address
        self._entry = _entry(address, info)
        self._index = info["repo"].index.data["repo"]
        self._odb = self._index.storage_map.get_cache_odb(self._entry)
        self.key = self._entry.hash_info.value.removesuffix(".dir")
        self.is_fixed = is_fixed
        self.objects = Path(self._odb.path)
        self._oids: dict[str, str] | None = None
        self._opened = ExitStack()

    @property
    def oids(self) -> dict[str, str]:
        """Name of each file to that of its object: its md5.

        Raises:
            CacheNotFoundError: The list of files is neither here nor in the remote.
            CacheFormatError: It is not the one that the repository names.
        """
        if self._oids is None:
            self._oids = self._read_oids()
        return self._oids

    def _read_oids(self) -> dict[str, str]:
        with suppress(OSError):  # not here, or damaged: the remote's then
            content = Path(self._odb.oid_to_path(self._entry.hash_info.value)).read_bytes()
            if _md5(content) == self.key:
                return self._parse_list(content)
        with naming_faults(self._without_list), _listening([]):
            self._follow_import()
            content = self._remote_list()
        if _md5(content) != self.key:
            raise CacheFormatError(
                f"{self._address}: the list of its files has md5 {_md5(content)}, the repository says {self.key}: mend "
                "the remote"
            )
        return self._parse_list(content)

    def _parse_list(self, content: bytes) -> dict[str, str]:
        try:
            oids = {str(file["relpath"]): str(file["md5"]) for file in json.loads(content)}
        except (ValueError, TypeError, KeyError):
            oids = {"": ""}
        if not all(map(_MD5_RE.fullmatch, oids.values())):  # which become paths
            raise CacheFormatError(f"{self._address}: the list of its files is none that dvc writes")
        return oids

    def _without_list(self, why: str) -> CacheNotFoundError:
        return CacheNotFoundError(
            f"{self._address}: dvc cannot read the list of its files, {self._entry.hash_info.value}, here or from "
            f"the remote: {why}; dvc push where it was made"
        )

    def _remote_list(self) -> bytes:
        """Return the list of files as the remote has it, or the repository where that names each file.

        DVC itself keeps a list that it has read in an index, also a damaged one.
        """
        from dvc_data.index import ObjectStorage

        remote = self._index.storage_map[self._entry.key].remote
        if isinstance(remote, ObjectStorage):
            odb = remote.odb
            return bytes(odb.fs.cat_file(odb.oid_to_path(self._entry.hash_info.value)))
        depth = len(self._entry.key)
        files = [("/".join(key[depth:]), entry.hash_info) for key, entry in self._index.iteritems(self._entry.key)]
        listing = [{"md5": info.value, "relpath": name} for name, info in sorted(files) if name and info]
        return json.dumps(listing, sort_keys=True).encode()

    def _follow_import(self) -> None:
        """Go on in the repository that an import is from: where it was imported nothing is pushed."""
        from dvc.fs import DVCFileSystem

        while True:
            remote = self._index.storage_map[self._entry.key].remote
            files = getattr(remote, "fs", None)
            if not isinstance(files, DVCFileSystem):
                return
            self._opened.callback(files.close)
            info = files.info(remote.path)
            self._entry, self._index = _entry(self._address, info), info["repo"].index.data["repo"]

    def close(self) -> None:
        """Close what was opened to read lists of files."""
        self._opened.close()

    def object(self, name: str) -> Path:
        """Return where DVC's cache has a file, if it has it."""
        return Path(self._odb.oid_to_path(self.oids[name]))

    def fetch(self, names: Sequence[str]) -> list[str]:
        """Let DVC fetch files into its cache; return what it says of those that it could not."""
        from dvc_data.index import DataIndex
        from dvc_data.index.collect import collect
        from dvc_data.index.fetch import fetch

        part: Any = DataIndex()  # type: ignore[no-untyped-call]  # half typed there
        reasons: list[str] = []
        with naming_faults(self._not_fetched), _listening(reasons):
            self._follow_import()
            part.storage_map = self._index.storage_map
            for name in names:
                part[(*self._entry.key, name)] = self._file_entry(name)
            parts = collect([part], "remote")
            for remote in parts:
                odb = getattr(remote.storage_map[()].data, "odb", None)
                if odb is not None:
                    odb.verify = False  # we compare every byte ourselves
            fetch(parts)
        return reasons if parts else ["the repository has no DVC remote"]

    def _file_entry(self, name: str) -> Any:
        """Return what DVC fetches a file by."""
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.meta import Meta
        from dvc_data.index import DataIndexEntry, ObjectStorage

        key = (*self._entry.key, name)
        if not isinstance(self._index.storage_map[self._entry.key].remote, ObjectStorage):
            return self._index[key]  # with the version that a bucket gave it
        info = HashInfo(self._entry.hash_info.name, self.oids[name])
        return DataIndexEntry(key=key, meta=Meta(), hash_info=info)

    def _not_fetched(self, why: str) -> CacheNotFoundError:
        return CacheNotFoundError(f"{self._address} cannot be fetched: {why}")


@contextmanager
def open_output(address: Address, store_root: Path) -> Iterator[DvcOutput]:
    """Open a repository at a revision and find the output in it. Errors: `_find`."""
    with naming_dvc():
        from dvc.fs import DVCFileSystem

    def not_opened(why: str) -> CacheNotFoundError:
        return CacheNotFoundError(f"{address} cannot be opened: {why}")

    with _temporary_clones(), ExitStack() as stack:
        config = {"cache": {"dir": str(store_root)}}
        with naming_faults(not_opened):
            files = DVCFileSystem(repo=address.url, rev=address.rev, subrepos=True, config=config)
            stack.enter_context(closing(files))
            output = stack.enter_context(closing(_find(address, files)))
        yield output


def _find(address: Address, files: Any) -> DvcOutput:
    """Find an output in the files of a repository.

    Raises:
        CacheNotFoundError: No such repository, or no such path in it.
        SettingsError: No such revision, or the remote needs a package that is not installed.
        CacheFormatError: The path is no folder that DVC holds as an output of its own.
    """
    from dvc.scm import RevError

    try:
        info = files.info(address.path)
    except FileNotFoundError as error:
        raise CacheNotFoundError(f"{address}: there is no such path, in git or as an output of DVC") from error
    except RevError as error:
        raise SettingsError(f"{address}: {error}: expected a tag, a branch or a commit") from error
    is_fixed = address.rev is not None and address.is_remote and _is_fixed(address.rev, files.repo)
    return DvcOutput(address, info, is_fixed=is_fixed)


def path_in_git(folder: Path, path: str) -> str:
    """Return a path of the local DVC project around a folder as one of its git repository.

    With a revision DVC takes paths from there, without one from the project, which may be a folder in it.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from dvc.scm import SCM

    try:
        project = Path(Repo.find_root(str(folder)))
        with closing(SCM(str(project))) as git:
            return (project.relative_to(Path(git.root_dir).resolve()) / path).as_posix()
    except DvcException:  # found again, and named, when it is opened
        return path


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _entry(address: Address, info: Mapping[str, Any]) -> Any:
    entry = info.get("dvc_info", {}).get("entry")
    key = entry.hash_info.value if entry and entry.hash_info else ""
    if not _MD5_RE.fullmatch(key.removesuffix(".dir")) or not key.endswith(".dir"):
        raise CacheFormatError(f"{address}: expected a folder that is an output of DVC, found another file or folder")
    return entry


def _is_fixed(rev: str, repo: Any) -> bool:
    return bool(_COMMIT_RE.fullmatch(rev)) or repo.scm.get_ref(f"refs/tags/{rev}") is not None


@contextmanager
def _temporary_clones() -> Iterator[None]:
    """Remove the clones that DVC makes, which it leaves to its command line to remove."""
    from dvc.repo.open_repo import CLONES, clean_repos

    are_ours = not CLONES
    try:
        yield
    finally:
        if are_ours:
            clean_repos()


@contextmanager
def _listening(reasons: list[str]) -> Iterator[None]:
    """Take what DVC logs, since it does not raise why something cannot be fetched."""
    handler = _Reasons(reasons)
    loggers = [logging.getLogger(name) for name in ("dvc", "dvc_data", "dvc_objects")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _Reasons(logging.Handler):
    def __init__(self, reasons: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._reasons = reasons

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the first line of a message, and the error that it is about."""
        error = record.exc_info[1] if record.exc_info else None
        line = record.getMessage().partition("\n")[0]
        self._reasons.append(f"{line}: {_why(error)}" if error else line)


def _why(error: BaseException) -> str:
    """Return what the first cause of an error says."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _masked(f"{type(error).__name__}: {error}")
