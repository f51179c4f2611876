"""Strict JSON: what is refused, with which words, and that nothing else ever comes out."""

from __future__ import annotations

import json
import math
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark_cache.errors import CacheFormatError
from dspark_cache.strict_json import (
    Fields,
    finite_json,
    is_int,
    is_sha256,
    parse_json_object,
    printable,
    read_json_object,
)

if TYPE_CHECKING:
    from pathlib import Path

thorough = settings(max_examples=300, derandomize=True, deadline=None, database=None)
DIGEST = "0123456789abcdef" * 4

texts = st.text(max_size=5)
leaves = st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.floats(-1e300, 1e300) | texts
lists_and_objects = st.lists(leaves, max_size=3) | st.dictionaries(texts, leaves, max_size=3)
objects = st.dictionaries(texts, leaves | st.lists(lists_and_objects, max_size=3), max_size=5)
json_like = st.text(alphabet='{}[]:,"\\u0123456789eE+-.truefalsn NaIity\ud83d\ue000').map(
    lambda text: text.encode(errors="replace")
)


@thorough
@given(st.binary() | json_like | json_like.map(lambda text: b'{"a":' + text + b"}"))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"a":' + b"9" * 10_000 + b"}")
@example(b'{"a":"\\ud800"}')
def test_arbitrary_bytes_give_an_object_or_a_format_error(text: bytes) -> None:
    try:
        value = parse_json_object(text, name="file")
    except CacheFormatError as error:
        assert str(error).startswith("file ")  # noqa: PT017 - both outcomes are right
    else:
        assert isinstance(value, dict)


@thorough
@given(objects)
def test_what_json_writes_is_read_back(value: dict[str, Any]) -> None:
    assert parse_json_object(json.dumps(value).encode(), name="file") == value
    assert parse_json_object(json.dumps(value, ensure_ascii=False).encode(), name="file") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "file is not valid JSON: Expecting value"),
        (b"{", "file is not valid JSON: Expecting property name"),
        (b"{} {}", "file is not valid JSON: Extra data"),
        (b"\xff{}", "file is not valid JSON: 'utf-8' codec can't decode"),
        (b"\xef\xbb\xbf{}", "file is not valid JSON: Unexpected UTF-8 BOM"),
        (b'{"a": 1, "b": 2, "a": 1}', "file is not valid JSON: duplicate keys ['a']"),
        (b'{"x": {"b": 2, "b": 2, "a": 1, "a": 1}}', "file is not valid JSON: duplicate keys ['a', 'b']"),
        (b'{"a": NaN}', "file is not valid JSON: NaN is no JSON number"),
        (b'{"a": Infinity}', "file is not valid JSON: Infinity is no JSON number"),
        (b'{"a": -Infinity}', "file is not valid JSON: -Infinity is no JSON number"),
        (b'{"a": 100000000000000000000}', "file is not valid JSON: an integer of 21 digits"),
        (b"[" * 100_000, "file is not valid JSON: "),
        (b"[]", "file must hold a JSON object, found list"),
        (b"null", "file must hold a JSON object, found NoneType"),
        (b"1", "file must hold a JSON object, found int"),
        (b'"{}"', "file must hold a JSON object, found str"),
    ],
)
def test_refused_texts_are_named_with_their_fault(text: bytes, message: str) -> None:
    with pytest.raises(CacheFormatError, match="^" + re.escape(message)):
        parse_json_object(text, name="file")


def test_integers_of_twenty_digits_are_read() -> None:
    assert parse_json_object(b'{"a": 99999999999999999999}', name="file") == {"a": 10**20 - 1}


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'{"a": 1}')
    assert read_json_object(path, max_bytes=8) == {"a": 1}
    with pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))} has 8 bytes, more than the 7 "):
        read_json_object(path, max_bytes=7)


def test_errors_of_a_file_name_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"[]")
    with pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))} must hold a JSON object"):
        read_json_object(path)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"^no such file: {re.escape(str(tmp_path / 'a.json'))}$"):
        read_json_object(tmp_path / "a.json")


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link"])
def test_what_is_no_regular_file_is_refused_unread(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))} is no regular file$"):
        read_json_object(path)


@pytest.mark.parametrize(
    ("value", "integer", "digest"),
    [
        (0, True, False),
        (-1, True, False),
        (10**30, True, False),
        (True, False, False),
        (1.0, False, False),
        ("1", False, False),
        (None, False, False),
        (DIGEST, False, True),
        (DIGEST.upper(), False, False),
        (DIGEST[:-1], False, False),
        (DIGEST + "0", False, False),
        (DIGEST[:-1] + "g", False, False),
        (list(DIGEST), False, False),
    ],
)
def test_integers_and_digests_are_told_from_what_looks_like_them(value: object, integer: bool, digest: bool) -> None:
    assert (is_int(value), is_sha256(value)) == (integer, digest)


GOOD = {"count": 3, "text": "x", "flag": False, "digest": DIGEST, "mapping": {"a": 1}, "items": [1]}


def take_all(fields: Fields) -> dict[str, Any]:
    return {
        "count": fields.count("count", minimum=2),
        "text": fields.text("text"),
        "flag": fields.flag("flag"),
        "digest": fields.sha256("digest"),
        "mapping": fields.mapping("mapping"),
        "items": fields.items("items"),
    }


def test_fields_give_values_of_the_right_type() -> None:
    fields = Fields(GOOD, name="file")
    assert take_all(fields) == GOOD
    fields.finish()


def test_fields_report_all_missing_keys_at_once_and_give_harmless_values() -> None:
    fields = Fields({}, name="file")
    assert take_all(fields) == {"count": 2, "text": "", "flag": False, "digest": "", "mapping": {}, "items": []}
    message = "file: missing required keys ['count', 'digest', 'flag', 'items', 'mapping', 'text']"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        fields.finish()


def test_fields_report_all_faults_at_once() -> None:
    fields = Fields(
        {"count": 1, "text": 5, "flag": 0, "digest": "ab", "mapping": [], "items": {}, "long": "x" * 200}, name="file"
    )
    take_all(fields)
    fields.take("long", "nothing", lambda _: False)
    fields.text("absent")
    fields.fault("a fault of its own")
    with pytest.raises(CacheFormatError) as caught:
        fields.finish()
    assert str(caught.value).split("; ") == [
        "file: missing required keys ['absent']",
        "count: expected an integer >= 2, found 1",
        "text: expected a string, found 5",
        "flag: expected true or false, found 0",
        "digest: expected 64 hexadecimal digits, found 'ab'",
        "mapping: expected an object, found []",
        "items: expected a list, found {}",
        "long: expected nothing, found '" + "x" * 79,
        "a fault of its own",
    ]


@pytest.mark.parametrize("value", [True, 1.0, "3", None, 1 << 63, -1])
def test_a_count_is_an_integer_that_fits_in_63_bits(value: object) -> None:
    fields = Fields({"a": value}, name="file")
    assert fields.count("a") == 0
    with pytest.raises(CacheFormatError, match=r"^file: a: expected an integer >= 0, found "):
        fields.finish()


def test_the_largest_count_is_accepted() -> None:
    fields = Fields({"a": (1 << 63) - 1}, name="file")
    assert fields.count("a") == (1 << 63) - 1
    fields.finish()


def test_what_does_not_show_is_spelled_in_a_line_for_a_terminal() -> None:
    assert printable("a\u3164\u2800\U000e0100\n\x1b b\u00e4\u2764\ufe0f") == (
        "a\\u3164\\u2800\\U000e0100\\n\\x1b b\u00e4\u2764\ufe0f"
    )


@pytest.mark.parametrize("value", [1.5, None, "x", True, 3, {"a": [1, {"b": 2.0}]}])
def test_what_json_has_a_form_for_stays(value: object) -> None:
    assert finite_json(value) == value


def test_numbers_that_json_has_no_form_for_are_null() -> None:
    assert finite_json({"a": [math.nan, (math.inf, 1.0)], "b": -math.inf}) == {"a": [None, [None, 1.0]], "b": None}
