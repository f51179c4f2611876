"""What an open dataset holds on to, so that it never mixes samples of two caches.

A cache may be replaced in mid-epoch, by `dvc repro` or `dvc checkout`, while shards are still to be opened. A shard is
accepted if its files are the very ones that were there when the dataset was opened, or hold the same bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.provenance import MAX_PROVENANCE_BYTES, read_provenance
from dspark_cache.schema import MANIFEST_NAME, PROVENANCE_NAME
from dspark_cache.strict_json import ensure_no_foreign_link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dspark_cache.shard_file import ShardFile


def folder_digest(cache_dir: Path) -> str:
    """Return the sha256 of manifest and provenance, which between them name every byte of a cache of ours."""
    digest = hashlib.sha256()
    for name in (MANIFEST_NAME, PROVENANCE_NAME):
        path = cache_dir / name
        ensure_no_foreign_link(path)
        digest.update(_content(path))
    return digest.hexdigest()


def _content(path: Path) -> bytes:
    """Return a file's size and content, but the size alone of one that no parser would read."""
    try:
        size = path.stat().st_size if path.is_file() else -1
        content = path.read_bytes() if 0 <= size <= MAX_PROVENANCE_BYTES else b""
    except FileNotFoundError:
        size, content = -1, b""
    return b"%d\0" % size + content


class Pin:
    """What was there when a dataset was opened.

    Attributes:
        digest: The cache's `folder_digest`.
    """

    def __init__(self, cache_dir: Path, digest: str, states: array[int]) -> None:
        """Hold on to a cache.

        Args:
            cache_dir: Folder of the cache.
            digest: Its `folder_digest`, taken before its manifest was read.
            states: `ShardFile.state` of every file of every shard that is read, one after the other.
        """
        self._cache_dir = cache_dir
        self.digest = digest
        self._states = states

    def ensure_same_folder(self) -> None:
        """Compare manifest and provenance with those that were there.

        Raises:
            CacheFormatError: They are others.
        """
        if folder_digest(self._cache_dir) != self.digest:
            raise CacheFormatError(
                f"{self._cache_dir} was replaced while it was in use: {MANIFEST_NAME} or {PROVENANCE_NAME} is another; "
                "open the cache again"
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say of a shard that cannot be opened any more that it could when the dataset was opened."""
        try:
            yield
        except (CacheFormatError, CacheNotFoundError) as error:
            raise type(error)(f"{self._cache_dir} was changed while it was in use: {error}; open it again") from error

    def ensure_same(self, place: int, files: Sequence[ShardFile]) -> None:
        """Compare a shard's files with those that were there; a file with another state must have the same bytes.

        Args:
            place: Which of the shards that are read it is, the first being 0.
            files: Its open files.

        Raises:
            CacheFormatError: The cache or one of the files is another.
        """
        for number, file in enumerate(files, start=place * len(files)):
            numbers = slice(number * len(file.state), (number + 1) * len(file.state))
            if tuple(self._states[numbers]) != file.state:
                self._ensure_same_bytes(file)
                self._states[numbers] = array("Q", file.state)

    def _ensure_same_bytes(self, file: ShardFile) -> None:
        self.ensure_same_folder()
        provenance = read_provenance(self._cache_dir)
        record = provenance.files.get(Path(file.name).name) if provenance else None
        is_same = record is not None and file.sha256() == record.sha256
        self.ensure_same_folder()  # the record is of the cache that was opened, whatever came in between
        if not is_same:
            why = f"another sha256 than {PROVENANCE_NAME} records" if record else "no recorded sha256 to compare"
            raise CacheFormatError(
                f"{self._cache_dir} was changed while it was in use: {file.name} is another file with {why}; open the "
                "cache again"
            )
