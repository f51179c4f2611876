"""One safetensors file: its header, a streaming writer that hashes as it writes, a positional reader.

The writer gives the same bytes as safetensors' `save_file` without metadata and with the keys in the given
order, but holds no more than the rows it is handed, and leaves zeros as holes. The reader trusts nothing: the
header is bounded and compared with the file's size before anything is allocated by it.

Format (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length, JSON header padded with
spaces to a multiple of 8, then the tensors' bytes, contiguous.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dspark_cache.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES, TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import byte_view, start_writeback, write_exactly
from dspark_cache.memory import empty
from dspark_cache.strict_json import ensure_no_foreign_link, is_int, parse_json_object, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path
    from types import TracebackType

    import torch

MAX_HEADER_BYTES = 100_000_000
"""As safetensors' own limit."""
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8
_ZEROS = bytes(1 << 20)
_HASH_BYTES = 1 << 22
_WRITEBACK_BYTES = 1 << 25
"""The disk begins to write after so many, while more are hashed."""
_HASHED_HERE_BYTES = 1 << 17
"""Less than this is hashed sooner than it is handed to a thread."""
_READ_BYTES = 1 << 30
"""A read of Linux gives at most 2 GiB at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where one tensor lies in a file: `offset` counts from the file's first byte."""

    spec: TensorSpec
    offset: int


def encode_header(specs: Mapping[str, TensorSpec]) -> bytes:
    """Return the length and header bytes of a file that holds `specs` in this order."""
    return Header.of(specs).text


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a file that holds certain tensors begins with.

    Attributes:
        text: Length and header bytes.
        places: Key to where its tensor lies.
        num_bytes: Size of the whole file.
    """

    text: bytes
    places: dict[str, TensorPlace]
    num_bytes: int

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> Header:
        """Return the header that this project, and `save_file` without metadata, write for `specs` in this order."""
        entries, ends = [], [0]
        for key, spec in specs.items():
            ends.append(ends[-1] + spec.num_bytes)
            shape = ",".join(map(str, spec.shape))
            entries.append(
                f'{_quoted(key)}:{{"dtype":"{SAFETENSORS_NAMES[spec.dtype]}","shape":[{shape}],'
                f'"data_offsets":[{ends[-2]},{ends[-1]}]}}'
            )
        text = f"{{{','.join(entries)}}}".encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        places = {
            key: TensorPlace(spec=spec, offset=len(text) + start)
            for (key, spec), start in zip(specs.items(), ends[:-1], strict=True)
        }
        return cls(text=text, places=places, num_bytes=len(text) + ends[-1])


@cache
def _quoted(key: str) -> str:
    return json.dumps(key, ensure_ascii=False)


def file_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the size of a file that holds `specs`."""
    return Header.of(specs).num_bytes


class ShardWriter:
    """Write one safetensors file key by key, hashing each byte once from memory, on a thread while it is written.

    Rows are appended in the order of the file: all rows of the first key, then the second, and so on. `finish`
    checks that every row came. Zeros appended by `append_zeros` are hashed but not written: they stay holes. What was
    appended may be changed once `append` has returned.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Prepare to write `specs` into the existing file `path`."""
        self._path = path
        self._specs = dict(specs)
        self._keys = list(specs)
        self._key_index = 0
        self._key_bytes = 0
        self._digest = hashlib.sha256()
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shard-hash")
        self._hashed: Future[None] | None = None
        self._descriptor = -1
        self._position = self._written_back = 0

    def __enter__(self) -> ShardWriter:
        """Open the file, empty it, and write the header.

        Raises:
            OSError: The file cannot be opened or written.
        """
        self._descriptor = os.open(self._path, os.O_WRONLY)
        try:
            # What the file held would show through the holes.
            os.ftruncate(self._descriptor, 0)
            self._write(memoryview(encode_header(self._specs)))
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._descriptor)
        self._hashing.shutdown()

    def append(self, key: str, rows: torch.Tensor) -> None:
        """Append rows of `key`: a tensor [any, ...] whose further dimensions and dtype are those of the spec.

        Raises:
            ValueError: Another key is due, or dtype or shape are not the spec's.
        """
        spec = self._spec(key)
        if rows.dtype != spec.dtype or tuple(rows.shape[1:]) != spec.shape[1:]:
            found = f"{list(rows.shape[1:])} {rows.dtype}"
            raise ValueError(f"{key}: expected rows of {list(spec.shape[1:])} {spec.dtype}, found {found}")
        self.append_bytes(key, rows)

    def append_bytes(self, key: str, part: torch.Tensor) -> None:
        """Append the bytes of a tensor that is a part of one row, in the spec's dtype.

        Raises:
            ValueError: Another key is due, or the dtype is not the spec's.
        """
        if part.dtype != self._spec(key).dtype:
            raise ValueError(f"{key}: expected {self._spec(key).dtype}, found {part.dtype}")
        part = part.contiguous()
        view = byte_view(part)
        self._advance(key, len(view))
        self._write(view)

    def append_zeros(self, key: str, num_bytes: int) -> None:
        """Append zero bytes of `key` as a hole."""
        self._advance(key, num_bytes)
        self._hash(self._hash_zeros, num_bytes)
        self._position += num_bytes

    def finish(self) -> str:
        """Give the file its full length and return the sha256 of all of its bytes, holes counted as zeros.

        Raises:
            ValueError: Rows are missing.
        """
        while self._key_index < len(self._keys) and self._key_bytes == self._due_bytes():
            self._next_key()
        if self._key_index < len(self._keys):
            raise ValueError(
                f"{self._keys[self._key_index]}: {self._key_bytes} of {self._due_bytes()} bytes were written"
            )
        os.ftruncate(self._descriptor, self._position)
        self._wait()
        return self._digest.hexdigest()

    def _spec(self, key: str) -> TensorSpec:
        if key not in self._specs:
            raise ValueError(f"{key}: the file has the keys {list(self._specs)} only")
        return self._specs[key]

    def _due_bytes(self) -> int:
        return self._specs[self._keys[self._key_index]].num_bytes

    def _next_key(self) -> None:
        self._key_index += 1
        self._key_bytes = 0

    def _advance(self, key: str, num_bytes: int) -> None:
        while self._key_index < len(self._keys) and self._keys[self._key_index] != key:
            if self._key_bytes != self._due_bytes():
                raise ValueError(f"{key}: rows of {self._keys[self._key_index]} are due first")
            self._next_key()
        if self._key_index == len(self._keys):
            raise ValueError(f"{key}: its rows came before, or the file has no such key")
        self._key_bytes += num_bytes
        if self._key_bytes > self._due_bytes():
            raise ValueError(f"{key}: more than the {self._due_bytes()} bytes of {self._specs[key]}")

    def _write(self, view: memoryview) -> None:
        self._hash(self._digest.update, view)
        try:
            write_exactly(self._descriptor, view, self._position)
        finally:
            self._wait()
        self._position += len(view)
        if self._position - self._written_back >= _WRITEBACK_BYTES:
            start_writeback(self._descriptor, self._written_back, self._position - self._written_back)
            self._written_back = self._position

    def _hash(self, step: Callable[[Any], None], value: Any) -> None:
        """Hash after all that is being hashed; large parts on the thread."""
        size = value if isinstance(value, int) else len(value)
        if size < _HASHED_HERE_BYTES:
            self._wait()
            step(value)
        else:
            self._hashed = self._hashing.submit(step, value)

    def _wait(self) -> None:
        """Wait until all is hashed."""
        if self._hashed is not None:
            self._hashed.result()
            self._hashed = None

    def _hash_zeros(self, num_bytes: int) -> None:
        for start in range(0, num_bytes, len(_ZEROS)):
            self._digest.update(memoryview(_ZEROS)[: num_bytes - start])


def physical_memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_exactly(descriptor: int, into: memoryview, offset: int, *, name: str) -> None:
    """Fill `into` from `offset` of an open file, in one copy.

    Raises:
        CacheFormatError: The file ends before; `name` is the file in the message.
    """
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done : done + _READ_BYTES]], offset + done)
        if count == 0:
            raise CacheFormatError(f"{name} ends at byte {offset + done}, {len(into) - done} bytes are missing")
        done += count


def _parse_entry(name: str, key: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """Check one header entry; return its spec and byte range within the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CacheFormatError(f"{name}: header entry {shortened(key)} is malformed: {shortened(entry)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    dtype = SAFETENSORS_DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    lists = [shape, offsets] if isinstance(shape, list) and isinstance(offsets, list) else [[], []]
    numbers_fit = all(is_int(value) and 0 <= value < 1 << 63 for values in lists for value in values)
    if dtype is None or len(lists[1]) != 2 or len(lists[0]) > MAX_DIMENSIONS or not numbers_fit:
        raise CacheFormatError(f"{name}: header entry {shortened(key)} is malformed: {shortened(entry)}")
    spec = TensorSpec(dtype=dtype, shape=tuple(shape))
    if offsets[1] - offsets[0] != spec.num_bytes:
        found, expected = offsets[1] - offsets[0], spec.num_bytes
        raise CacheFormatError(f"{name}: {shortened(key)} has {found} bytes, its shape {shortened(expected)}")
    # A tensor without elements may have any other extents, but none that torch could not count.
    if math.prod(max(extent, 1) for extent in shape) >= 1 << 63:
        raise CacheFormatError(f"{name}: header entry {shortened(key)} is malformed: {shortened(entry)}")
    return spec, offsets[0], offsets[1]


def _parse_header(text: bytes, *, name: str, data_start: int, size: int) -> dict[str, TensorPlace]:
    entries = parse_json_object(text, name=f"{name} (header)")
    entries.pop("__metadata__", None)
    places: dict[str, TensorPlace] = {}
    ranges = []
    for key, entry in entries.items():
        spec, start, end = _parse_entry(name, key, entry)
        places[key] = TensorPlace(spec=spec, offset=data_start + start)
        ranges.append((start, end))
    due = 0
    for start, end in sorted(ranges):
        if start != due:
            raise CacheFormatError(f"{name}: tensors overlap or leave a gap at byte {due} of the data")
        due = end
    if data_start + due != size:
        raise CacheFormatError(f"{name} has {size} bytes, its header asks for {data_start + due}")
    return places


class ShardFile:
    """An open safetensors file, read by position. The file closes when the last user lets go of it.

    Attributes:
        name: Path of the file, for messages.
        size: Its bytes.
        state: Inode, size and mtime in nanoseconds, by which another file in its place is noticed.
        places: Key to where its tensor lies.
        is_likely: Whether it has the header that was likely.
    """

    def __init__(self, path: str | os.PathLike[str], likely: Callable[[int], Header | None] = lambda _: None) -> None:
        """Open `path` and check its header against its size.

        Args:
            path: The file.
            likely: Given the file's size, the header that it should have. If it has that, byte for byte, it need not
                be parsed, which is most of the time that a cache of many shards takes to open.

        Raises:
            CacheNotFoundError: There is no such file.
            CacheFormatError: No regular file, truncated, too long, or a malformed header.
        """
        self.name = os.fspath(path)
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise CacheNotFoundError(f"no such file: {path}") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # links in a circle, a socket
                raise CacheFormatError(f"{path} is no regular file") from error
            raise
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CacheFormatError(f"{path} is no regular file")
        self.size = status.st_size
        self.state = (status.st_ino, status.st_size, status.st_mtime_ns % (1 << 64))
        header = likely(self.size)
        self.is_likely = header is not None and header.num_bytes == self.size and self._begins_with(header.text)
        self.places = header.places if header and self.is_likely else self._read_header()

    def _begins_with(self, text: bytes) -> bool:
        return os.pread(self._descriptor, len(text), 0) == text

    def _read_header(self) -> dict[str, TensorPlace]:
        prefix = bytearray(_LENGTH_BYTES)
        self.read_at(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_HEADER_BYTES, self.size - _LENGTH_BYTES):
            raise CacheFormatError(f"{self.name} has {self.size} bytes, its header claims {length}")
        text = bytearray(length)
        self.read_at(_LENGTH_BYTES, memoryview(text))
        return _parse_header(bytes(text), name=self.name, data_start=_LENGTH_BYTES + length, size=self.size)

    def read_at(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the file's bytes from `offset` on, in one copy.

        Raises:
            CacheFormatError: The file ends before.
        """
        read_exactly(self._descriptor, into, offset, name=self.name)

    def __del__(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def sha256(self) -> str:
        """Return the digest of the file's content, read through this open file."""
        digest, chunk = hashlib.sha256(), memoryview(bytearray(min(self.size, _HASH_BYTES)))
        for offset in range(0, self.size, _HASH_BYTES):
            part = chunk[: self.size - offset]
            self.read_at(offset, part)
            digest.update(part)
        return digest.hexdigest()

    def expect(self, specs: Mapping[str, TensorSpec], *, exactly: bool) -> None:
        """Compare the header with `specs`, all keys at once; `exactly` also refuses further keys.

        Raises:
            CacheFormatError: Naming every key that differs.
        """
        faults = [
            f"{key}: expected {_describe(spec)}, found {_describe(self.places[key].spec)}"
            if key in self.places
            else f"{key} is missing"
            for key, spec in specs.items()
            if key not in self.places or self.places[key].spec != spec
        ]
        surplus = sorted(set(self.places) - set(specs)) if exactly else []
        if surplus:
            faults.append(f"unexpected keys {shortened(surplus)}")
        if faults:
            raise CacheFormatError(f"{self.name}: " + "; ".join(faults))

    def require(self, keys: Iterable[str]) -> None:
        """Refuse a file that lacks any of `keys`.

        Raises:
            CacheFormatError: Naming every missing key.
        """
        missing = [key for key in keys if key not in self.places]
        if missing:
            raise CacheFormatError(f"{self.name}: missing required keys {missing}")

    def read_rows(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return rows start (included) to stop (excluded) of `key` in memory of their own.

        Raises:
            CacheFormatError: More bytes than this machine has memory: the header may be anybody's.
        """
        place = self.places[key]
        self._ensure_fits(key, (stop - start) * place.spec.row_bytes)
        rows = empty((stop - start, *place.spec.shape[1:]), place.spec.dtype)
        self.read_into(key, start, rows)
        return rows

    def read_bytes(self, key: str) -> bytearray:
        """Return all bytes of a small tensor.

        Raises:
            CacheFormatError: More bytes than this machine has memory: the header may be anybody's.
        """
        place = self.places[key]
        self._ensure_fits(key, place.spec.num_bytes)
        content = bytearray(place.spec.num_bytes)
        self.read_at(place.offset, memoryview(content))
        return content

    def _ensure_fits(self, key: str, size: int) -> None:
        if size > physical_memory():
            raise CacheFormatError(f"{self.name}: {size} bytes of {key} are more than the memory of this machine")

    def read_into(self, key: str, start: int, rows: torch.Tensor) -> None:
        """Fill the contiguous tensor `rows` from row `start` of `key` on."""
        place = self.places[key]
        offset = place.offset + start * place.spec.row_bytes
        self.read_at(offset, byte_view(rows))

    def read_positions(self, key: str, row: int, start: int, into: torch.Tensor) -> None:
        """Fill the contiguous tensor `into` from position `start` of one row of a tensor [n, S, ...] on."""
        place = self.places[key]
        position_bytes = place.spec.row_bytes // place.spec.shape[1] if start else 0
        offset = place.offset + row * place.spec.row_bytes + start * position_bytes
        self.read_at(offset, byte_view(into))


def open_cache_file(path: str | os.PathLike[str], likely: Callable[[int], Header | None] = lambda _: None) -> ShardFile:
    """Open a file inside a cache, which may come from elsewhere.

    Raises:
        CacheNotFoundError: There is no such file.
        CacheFormatError: A link out of the cache, or refused by `ShardFile`.
    """
    ensure_no_foreign_link(path)
    return ShardFile(path, likely)


def _describe(spec: TensorSpec) -> str:
    return f"{SAFETENSORS_NAMES[spec.dtype]}{list(spec.shape)}"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write whole tensors into the existing file `path` in the given key order; return its sha256."""
    return write_tensor_parts(path, {key: [tensor] for key, tensor in tensors.items()})


def write_tensor_parts(path: Path, parts: Mapping[str, Iterable[torch.Tensor]]) -> str:
    """Write tensors given in parts along the first dimension, without joining them in memory."""
    lists = {key: list(tensors) for key, tensors in parts.items()}
    specs = {
        key: TensorSpec(dtype=rows[0].dtype, shape=(sum(part.shape[0] for part in rows), *rows[0].shape[1:]))
        for key, rows in lists.items()
    }
    with ShardWriter(path, specs) as writer:
        for key, rows in lists.items():
            for part in rows:
                writer.append(key, part)
        return writer.finish()
