"""JSON of files that may come from elsewhere: parsed strictly, bounded in size and depth, never trusted.

Used for manifests, provenance, ledgers and safetensors headers. The second half is `Fields`, by which every
parser takes checked values out of an untrusted object and reports all faults at once. What is shown of such values, and
printed as JSON ourselves, is made harmless here too.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from dspark_cache.errors import CacheFormatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

MAX_JSON_BYTES = 1 << 30
MAX_SHOWN = 200
MAX_DEPTH = 64
"""Objects and lists inside one another. Nothing of ours has ten; a thousand would be too deep for pickle."""
MAX_INTEGER_DIGITS = 20
"""Longer integers are no size of anything; parsing them takes quadratic time."""
_BLANK = (
    *((0x034F, 0x034F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065), (0x2800, 0x2800)),
    *((0x3164, 0x3164), (0xFE00, 0xFE0E), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF)),
)
"""First and last of the characters that Unicode lets be ignored where they are drawn (Default_Ignorable_Code_Point) and
that are letters, marks or not assigned, without U+FE0F; and the Braille pattern without dots."""


def is_int(value: object) -> TypeGuard[int]:
    """Say whether `value` is an integer and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """Return the representation of an untrusted value, cut so that a message stays one."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def is_same_json(one: Any, other: Any) -> bool:
    """Say whether two values are the same in JSON, where 0 is neither false nor 0.0."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


class _Nothing:
    """Stands for a value that is not there."""

    def __repr__(self) -> str:
        """Show it in messages."""
        return "nothing"


NOTHING: Any = _Nothing()


def differences(
    found: Mapping[str, Any], expected: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield full key and both values of everything that differs inside objects; `NOTHING` stands for an absent one."""
    for key in sorted({*found, *expected}):
        pair = [values.get(key, NOTHING) for values in (found, expected)]
        if all(isinstance(value, dict) for value in pair):
            yield from differences(pair[0], pair[1], f"{prefix}{key}.")
        elif NOTHING in pair or not is_same_json(*pair):
            yield f"{prefix}{key}", pair[0], pair[1]


def finite_json(value: Any) -> Any:
    """Return a value as JSON has one for it: numbers that are not finite, for which there is none, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    return [finite_json(item) for item in value] if isinstance(value, list | tuple) else value


def is_blank(char: str) -> bool:
    """Say whether a character is one of those that show nothing though their category does not say so.

    Not the selector that makes a character before it an emoji.
    """
    return any(first <= ord(char) <= last for first, last in _BLANK)


def printable(text: str) -> str:
    """Return an untrusted text as one line without control characters, which could forge what a terminal shows.

    What shows nothing is spelled out too.
    """
    return "".join(
        char if char.isprintable() and (char.isascii() or not is_blank(char)) else _escaped(char) for char in text
    )


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            inner += [child for child in children if isinstance(child, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate keys {shortened(twice)}")
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON number")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _parse_integer(text: str) -> int:
    if len(text) > MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def parse_json_object(text: bytes, *, name: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose value must be an object.

    Args:
        text: The bytes to parse.
        name: File (and part of it) that error messages name.

    Raises:
        CacheFormatError: Not UTF-8, not JSON, duplicate keys, NaN or infinity, nested too deep, no object.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object_of_pairs,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
            parse_float=_parse_float,
        )
    except ValueError as error:
        raise CacheFormatError(f"{name} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise CacheFormatError(f"{name} is not valid JSON: nested too deep") from error
    if not isinstance(value, dict):
        raise CacheFormatError(f"{name} must hold a JSON object, found {type(value).__name__}")
    if _is_too_deep(value):
        raise CacheFormatError(f"{name} is not valid JSON: nested too deep")
    return value


def ensure_no_foreign_link(path: str | os.PathLike[str]) -> None:
    """Refuse a link inside a cache, which may come from elsewhere, unless it leads into a content-addressed store.

    DVC links a cache's files to `.../files/md5/XX/...`, Hugging Face's hub its snapshots' to `.../blobs/...`.

    Raises:
        CacheFormatError: `path` is another link.
    """
    if not os.path.islink(path):  # noqa: PTH114 - asked for every file of a cache, and in half the time
        return
    parts = Path(os.path.realpath(path)).parts
    if parts[-4:-2] != ("files", "md5") and parts[-2:-1] != ("blobs",):
        raise CacheFormatError(f"{path} is a link to {Path(path).readlink()}: a cache holds files, copy it there")


def read_json_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file of at most `max_bytes` bytes.

    Raises:
        CacheFormatError: No regular file, larger than `max_bytes`, or refused by `parse_json_object`.
        FileNotFoundError: There is no such file.
    """
    if not path.is_file():
        if path.exists() or path.is_symlink():
            raise CacheFormatError(f"{path} is no regular file")
        raise FileNotFoundError(f"no such file: {path}")
    size = path.stat().st_size
    if size > max_bytes:
        raise CacheFormatError(f"{path} has {size} bytes, more than the {max_bytes} that such a file may have")
    return parse_json_object(path.read_bytes(), name=str(path))


class Fields:
    """Checked access to the fields of an untrusted object; faults are collected, `finish` raises them all."""

    def __init__(self, values: Mapping[str, Any], *, name: str) -> None:
        """Read from `values`; `name` is the file that messages name."""
        self._values = values
        self._name = name
        self._missing: list[str] = []
        self._faults: list[str] = []

    def take(self, key: str, expected: str, accept: Callable[[Any], bool]) -> Any:
        """Return the value of `key`, noting a fault if it is missing or `accept` says no."""
        if key not in self._values:
            self._missing.append(key)
            return None
        value = self._values[key]
        if not accept(value):
            self._faults.append(f"{key}: expected {expected}, found {value!r:.80}")
            return None
        return value

    def count(self, key: str, *, minimum: int = 0) -> int:
        """Take an integer of at least `minimum` that fits in 63 bits."""
        value: int | None = self.take(key, f"an integer >= {minimum}", lambda v: is_int(v) and minimum <= v < 1 << 63)
        return minimum if value is None else value

    def text(self, key: str) -> str:
        """Take a string."""
        return self.take(key, "a string", lambda v: isinstance(v, str)) or ""

    def flag(self, key: str) -> bool:
        """Take a bool."""
        return bool(self.take(key, "true or false", lambda v: isinstance(v, bool)))

    def sha256(self, key: str) -> str:
        """Take a digest of 64 lower-case hexadecimal digits."""
        return self.take(key, "64 hexadecimal digits", is_sha256) or ""

    def mapping(self, key: str) -> dict[str, Any]:
        """Take an object."""
        return self.take(key, "an object", lambda v: isinstance(v, dict)) or {}

    def items(self, key: str) -> list[Any]:
        """Take a list."""
        return self.take(key, "a list", lambda v: isinstance(v, list)) or []

    def fault(self, text: str) -> None:
        """Note a fault that a parser found by itself."""
        self._faults.append(text)

    def finish(self) -> None:
        """Raise `CacheFormatError` with every fault noted so far, if there is any."""
        faults = list(self._faults)
        if self._missing:
            faults.insert(0, f"missing required keys {sorted(self._missing)}")
        if faults:
            raise CacheFormatError(f"{self._name}: " + "; ".join(faults))


def is_sha256(value: object) -> bool:
    """Say whether `value` is a digest in lower-case hexadecimal."""
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
