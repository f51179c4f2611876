"""Where conversations come from: the rows of a file, and the order they are taken in.

First module of the tokenize stage's flow: rows -> conversations -> chat_templates -> loss_masks -> tokenizing.
A file is opened as `Rows`, which keep offsets and not rows in memory; `row_order` says which of them are used.
"""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from dspark_cache.errors import InputError, RowError, SettingsError
from dspark_cache.inputs import missing_file

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL_SPLIT: Final = "train"
"""The only split that a local file has."""

_BOM: Final = b"\xef\xbb\xbf"
_PACKED: Final = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"})
_DIGIT_SLICE: Final = re.compile(r"([\w.]+)\[(\d*):(\d*)\]", re.ASCII)


class Rows(Protocol):
    """Rows of one input, read one at a time."""

    def __len__(self) -> int:
        """Count the rows."""

    def read(self, index: int) -> object:
        """Return row `index` as plain Python values; `RowError` if it is no JSON."""

    def where(self, index: int) -> str:
        """Name row `index` for a message: file, and line or position."""


def open_rows(path: Path) -> Rows:
    """Open the rows of `path`: JSON lines, Parquet, or (any other file) one JSON value.

    Raises:
        InputError: No such file, a folder, a packed file, or no value of its format.
    """
    if path.is_dir():
        raise InputError(f"data.path: {path} is a folder; expected one file (.jsonl, .json or .parquet)")
    if not path.exists():
        raise missing_file("data.path", path)
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        raise InputError(f"data.path: {path} is packed ({suffix}); unpack it first")
    if suffix in (".jsonl", ".ndjson"):
        return _JsonLines(path)
    if suffix == ".parquet":
        return _ParquetRows(path)
    return _JsonValue(path)


class _JsonLines:
    """One JSON value a line; lines end at a line feed and nowhere else, so U+2028 may stand in a string."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("Q")
        self._numbers = array("Q")
        with path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, start=1):
                skip = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                if line[skip:].strip():
                    self._offsets.append(start + skip)
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> object:
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        try:
            return json.loads(line.decode("utf-8").strip())
        except UnicodeDecodeError as error:
            raise RowError("bad_encoding", f"expected UTF-8, found {_bad_byte(error)} of the line") from error
        except (ValueError, RecursionError) as error:
            raise RowError("bad_json", f"expected one JSON value, found: {error}") from error

    def where(self, index: int) -> str:
        return f"{self._path}:{self._numbers[index]}"


class _JsonValue:
    """A file that is one JSON value: a list holds the rows, anything else is the only row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            value = json.loads(path.read_bytes().decode("utf-8-sig"))
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

    def read(self, index: int) -> object:
        return self._rows[index]

    def where(self, index: int) -> str:
        return f"{self._path}[{index}]" if self._is_list else str(self._path)


class _ParquetRows:
    """Rows of a Parquet file, memory-mapped from an Arrow file that has no name any more."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = _read_parquet(path)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> object:
        return _without_nulls(self._rows[index])

    def where(self, index: int) -> str:
        return f"{self._path}[{index}]"


def _read_parquet(path: Path) -> Any:
    """Convert to Arrow in a folder that is removed at once; the mapping keeps the file's blocks alive."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars
    from datasets.utils import are_progress_bars_disabled

    was_silent = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with tempfile.TemporaryDirectory(prefix="dspark-parquet-") as folder:
            # A link with a plain name: datasets takes file names for glob patterns.
            link = Path(folder, "rows.parquet")
            link.symlink_to(path.resolve())
            return Dataset.from_parquet(str(link), cache_dir=folder)
    except Exception as error:
        raise InputError(f"data.path: {path} cannot be read as Parquet: {error.__cause__ or error}") from error
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


def default_shuffle(path: Path) -> bool:
    """Say whether the rows of `path` are shuffled when `data.shuffle` is null: Parquet is, JSON is not."""
    return path.suffix.lower() == ".parquet"


def row_order(num_rows: int, *, split: str | None, shuffle: bool, seed: int) -> Sequence[int]:
    """Return the indices of the rows to use, in order.

    A slice in plain digits (`train[2:9]`) is taken after the shuffle and clamped to the rows there are; any other
    split (`train[:95%]`, `train[-3:]`, `train[:2]+train[5:]`) selects before it, by the rules of `datasets`.

    Raises:
        SettingsError: `data.split` is malformed or names a split that a file does not have; negative seed.
        InputError: No row is left.
    """
    if seed < 0:
        raise SettingsError(f"data.shuffle_seed: expected an integer >= 0, found {seed}")
    after = _DIGIT_SLICE.fullmatch(split) if split is not None else None
    rows: Sequence[int]
    if after is not None:
        _check_split_name(after[1], split)
        rows = range(num_rows)
    else:
        rows = _select(num_rows, split)
    if shuffle:
        rows = _shuffled(rows, seed)
    if after is not None:
        rows = rows[slice(*(int(bound) if bound else None for bound in after.groups()[1:]))]
    if not rows:
        raise InputError(
            f"data.split {split!r} selects 0 of {num_rows} rows" if num_rows else "data.path holds no rows"
        )
    return rows


def _check_split_name(name: str, split: str | None) -> None:
    if name != LOCAL_SPLIT:
        raise SettingsError(
            f"data.split: {split!r} names the split {name!r}; the only split of a local file is {LOCAL_SPLIT!r}"
        )


def _shuffled(rows: Sequence[int], seed: int) -> list[int]:
    import numpy as np

    order: list[int] = np.random.default_rng(seed).permutation(len(rows)).tolist()
    return [rows[position] for position in order]


def _select(num_rows: int, split: str | None) -> Sequence[int]:
    """Return the rows of a split that is no slice in plain digits."""
    if split is None or split == LOCAL_SPLIT:
        return range(num_rows)
    from datasets import ReadInstruction

    for name in re.findall(r"(?:^|\+)\s*(\w[\w.]*)", split):
        _check_split_name(name, split)
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({LOCAL_SPLIT: num_rows})
    except (ValueError, AssertionError) as error:
        raise SettingsError(
            f"data.split: {split!r} is no split; write {LOCAL_SPLIT}, {LOCAL_SPLIT}[2:9], "
            f"{LOCAL_SPLIT}[:95%] or a sum of such parts"
        ) from error
    ranges = [range(part.from_, part.to) for part in parts]
    return ranges[0] if len(ranges) == 1 else [row for part in ranges for row in part]
