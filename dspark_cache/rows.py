"""Where conversations come from: the rows of a file, a folder of files, or a hub data set.

First module of the tokenize stage's flow: rows -> row_order -> conversations -> chat_templates -> loss_masks ->
tokenizing. A `Source` numbers the rows of all its splits; offsets are kept in memory, rows are not.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import weakref
import zlib
from array import array
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

from dspark_cache.errors import InputError, RowError
from dspark_cache.files import make_folder, temporary_folder
from dspark_cache.inputs import input_files, missing_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

TRAIN: Final = "train"
"""The only split of local files that are not Parquet."""

_BOM: Final = b"\xef\xbb\xbf"
_PACKED: Final = frozenset({".bz2", ".xz", ".zst", ".zip", ".tar"})
_JSON_LINES: Final = (".jsonl", ".ndjson")
_DATA_SUFFIXES: Final = (*_JSON_LINES, ".json")


class Rows(Protocol):
    """Rows of one input, fetched one at a time."""

    def __len__(self) -> int:
        """Count the rows."""

    def fetch(self, index: int) -> object:
        """Return row `index` as it lies there, for `parsed_row`: the bytes of a line, or plain Python values."""

    def where(self, index: int) -> str:
        """Name row `index` for a message: file, and line or position."""


def parsed_row(fetched: object) -> object:
    """Return what `Rows.fetch` gave as plain Python values.

    Raises:
        RowError: The bytes of a line that is no JSON.
    """
    if not isinstance(fetched, bytes):
        return fetched
    try:
        return json.loads(fetched.decode("utf-8").strip())
    except UnicodeDecodeError as error:
        raise RowError("bad_encoding", f"expected UTF-8, found {_bad_byte(error)} of the line") from error
    except (ValueError, RecursionError) as error:
        raise RowError("bad_json", f"expected one JSON value, found: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """All rows of one input.

    Attributes:
        rows: The rows of every split, one split after the other.
        splits: Split to the range of its rows.
        is_shuffled: Whether the reference shuffles such an input: Parquet and hub data sets, not JSON.
    """

    rows: Rows
    splits: Mapping[str, range]
    is_shuffled: bool


def open_source(path: Path, scratch: Path, *, is_hub: bool = False) -> Source:
    """Open a file (JSON lines, Parquet, or any other file as one JSON value), or a folder of such files.

    JSON files may be packed with gzip. A folder's JSON files are read in the order of their names; a folder with
    Parquet files, and a hub snapshot, is read by `datasets`, which finds the splits.

    Args:
        path: The file or folder.
        scratch: Where unpacked and converted rows lie while they are read; nothing stays there.
        is_hub: Whether the folder is a snapshot of a hub data set.

    Raises:
        InputError: No such file, an unknown packing, or no value of its format; names the file.
    """
    if not path.exists():
        raise missing_file("data.path", path)
    if is_hub or (path.is_dir() and any(_suffix(file) == ".parquet" for _, file in input_files(path))):
        return _open_data_set(path, scratch)
    if path.is_dir():
        rows: Rows = _open_folder(path, scratch)
        return Source(rows=rows, splits={TRAIN: range(len(rows))}, is_shuffled=False)
    rows = _open_file(path, scratch)
    return Source(rows=rows, splits={TRAIN: range(len(rows))}, is_shuffled=_suffix(path) == ".parquet")


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _open_file(path: Path, scratch: Path) -> Rows:
    if _suffix(path) in _PACKED:
        raise InputError(f"data.path: {path} is packed ({_suffix(path)}); unpack it first, or use gzip")
    is_gzip = _suffix(path) == ".gz"
    suffix = _suffix(path.with_suffix("")) if is_gzip else _suffix(path)
    if suffix in _JSON_LINES:
        return _UnpackedLines(path, scratch) if is_gzip else _JsonLines(path)
    if suffix == ".parquet" and not is_gzip:
        return _ArrowRows(str(path), _read_parquet(path, scratch))
    return _JsonValue(path, _read_gzip(path) if is_gzip else path.read_bytes())


def _open_folder(path: Path, scratch: Path) -> Rows:
    files = [file for _, file in input_files(path) if _suffix(_without_gzip(file)) in _DATA_SUFFIXES]
    if not files:
        raise InputError(f"data.path: {path} holds no .jsonl, .json or .parquet files")
    return _Concatenated([_open_file(file, scratch) for file in files])


def _without_gzip(path: Path) -> Path:
    return path.with_suffix("") if _suffix(path) == ".gz" else path


class _Concatenated:
    """Rows of several sources, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def _find(self, index: int) -> tuple[Rows, int]:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]

    def fetch(self, index: int) -> object:
        rows, position = self._find(index)
        return rows.fetch(position)

    def where(self, index: int) -> str:
        rows, position = self._find(index)
        return rows.where(position)


class _JsonLines:
    """One JSON value a line; lines end at a line feed and nowhere else, so U+2028 may stand in a string."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._numbers = array("Q")
        with self._open() as file:
            start = 0
            for number, line in enumerate(file, start=1):
                skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                if line[skip:].strip():
                    self._offsets.append(start + skip)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        with self._path.open("rb") as file:
            yield file

    def fetch(self, index: int) -> bytes:
        with self._open() as file:
            file.seek(self._offsets[index])
            return file.readline()

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


class _UnpackedLines(_JsonLines):
    """JSON lines of a gzip file, unpacked once into a file without a name."""

    def __init__(self, path: Path, scratch: Path) -> None:
        make_folder(scratch)
        self._unpacked = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed with this object
        weakref.finalize(self, self._unpacked.close)
        with _unpacking(path), gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, self._unpacked, 1 << 20)
        super().__init__(path)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        self._unpacked.seek(0)
        yield self._unpacked


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"data.path: {path} cannot be unpacked: {error}") from error


def _read_gzip(path: Path) -> bytes:
    with _unpacking(path), gzip.open(path, "rb") as packed:
        return packed.read()


class _JsonValue:
    """A file that is one JSON value: a list holds the rows, anything else is the only row."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        try:
            value = json.loads(content.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise InputError(f"data.path: {path} is not UTF-8: {_bad_byte(error)}") from error
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"data.path: {path} is not one JSON value: {error}; one value a line needs the suffix .jsonl"
            ) from error
        self._is_list = isinstance(value, list)
        self._rows = value if self._is_list else [value]

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, index: int) -> object:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._path}[{index}]" if self._is_list else str(self._path)


class _ArrowRows:
    """Rows of a `datasets.Dataset`, memory-mapped from Arrow files that have no name any more."""

    def __init__(self, name: str, data: Any) -> None:
        self._name = name
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, index: int) -> object:
        return _without_nulls(self._data[index])

    def where(self, index: int) -> str:
        return f"{self._name}[{index}]"


def _read_parquet(path: Path, scratch: Path) -> Any:
    from datasets import Dataset

    # Not load_dataset, which takes a bare file name for the name of a data set.
    return _load(path, scratch, lambda link, cache: Dataset.from_parquet(f"{link}.parquet", cache_dir=cache))


def _open_data_set(path: Path, scratch: Path) -> Source:
    from datasets import load_dataset

    found = _load(path, scratch, lambda link, cache: load_dataset(link, cache_dir=cache))
    splits, start = {}, 0
    for name, data in found.items():
        splits[str(name)] = range(start, start + len(data))
        start += len(data)
    rows = _Concatenated([_ArrowRows(f"{path}[{name}]", data) for name, data in found.items()])
    return Source(rows=rows, splits=splits, is_shuffled=True)


def _load(path: Path, scratch: Path, load: Callable[[str, str], Any]) -> Any:
    """Convert to Arrow in a folder that is removed at once; the mapping keeps the files' blocks alive.

    `load` gets a link to the input with a plain name, since `datasets` takes names for glob patterns.
    """
    from datasets import disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    was_silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with temporary_folder(scratch, "rows") as folder:
            # The link lies apart from the cache, whose folders take the name of what is loaded.
            link = folder / "links" / ("rows" if path.is_dir() else "rows.parquet")
            link.parent.mkdir()
            link.symlink_to(path.resolve())
            return load(str(link.with_suffix("")), str(folder / "cache"))
    except Exception as error:
        raise InputError(f"data.path: {path} cannot be read: {error.__cause__ or error}") from error
    finally:
        if not was_silent:
            enable_progress_bars()


def _without_nulls(value: Any) -> Any:
    """Drop the null fields of structs: Arrow gives each struct every field that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
