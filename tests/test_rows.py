"""Rows of files and their order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark_cache.conversations import parse_row
from dspark_cache.errors import InputError, RowError, SettingsError
from dspark_cache.rows import Rows, default_shuffle, open_rows, row_order

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parent / "data" / "golden" / "data"
CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def message_row(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"} | message]}


def call_row(**call: Any) -> dict[str, Any]:
    return message_row(tool_calls=[{"function": {"name": "f", "arguments": "{}"}} | call])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes | str], Path]:
    def make(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def contents(rows: Rows) -> list[Any]:
    return [rows.read(index) for index in range(len(rows))]


# --- rows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL", "ünï côde.NdJson"])
def test_json_lines_skip_blank_lines_and_count_them_in_line_numbers(write: Any, name: str) -> None:
    path = write(name, '\n{"a": 1}\r\n   \n\t{"a": 2}  \n\n3')
    rows = open_rows(path)
    assert contents(rows) == [{"a": 1}, {"a": 2}, 3]
    assert [rows.where(i) for i in range(3)] == [f"{path}:2", f"{path}:4", f"{path}:6"]


def test_line_separators_inside_json_strings_do_not_split_a_line(write: Any) -> None:
    text = "a\u2028b\u2029c\u0085d\u000be\u001cf"
    path = write("a.jsonl", json.dumps({"t": text}, ensure_ascii=False) + "\n" + '{"t": "next"}\n')
    rows = open_rows(path)
    assert contents(rows) == [{"t": text}, {"t": "next"}]
    assert rows.where(1) == f"{path}:2"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_byte_order_mark_is_accepted(write: Any, name: str) -> None:
    assert contents(open_rows(write(name, b'\xef\xbb\xbf{"a": "\xc3\xbc"}'))) == [{"a": "ü"}]


def test_a_bad_line_is_named_and_does_not_hinder_the_others(write: Any) -> None:
    path = write("a.jsonl", '{"a": 1}\n\n{"a": \n{"a": 3}\n')
    rows = open_rows(path)
    assert rows.read(0) == {"a": 1}
    assert rows.read(2) == {"a": 3}
    with pytest.raises(RowError, match="expected one JSON value, found: Expecting value") as caught:
        rows.read(1)
    assert caught.value.reason == "bad_json"
    assert rows.where(1) == f"{path}:3"


@pytest.mark.parametrize("line", ['{"a": 1} {"a": 2}', "[" * 100_000, "1" * 5000, "\u00a0"])
def test_odd_lines_are_row_errors(write: Any, line: str) -> None:
    with pytest.raises(RowError, match="expected one JSON value"):
        open_rows(write("a.jsonl", line)).read(0)


def test_a_line_that_is_not_utf8_is_a_row_error(write: Any) -> None:
    rows = open_rows(write("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n'))
    with pytest.raises(RowError, match="expected UTF-8, found byte 0xe9 at offset 7 of the line") as caught:
        rows.read(1)
    assert caught.value.reason == "bad_encoding"


def test_the_last_of_repeated_keys_wins_and_nan_is_a_number(write: Any) -> None:
    rows = open_rows(write("a.jsonl", '{"a": 1, "a": 2}\n[NaN]\n'))
    assert rows.read(0) == {"a": 2}
    assert str(rows.read(1)) == "[nan]"


@pytest.mark.parametrize("name", ["a.json", "a.txt", "plain"])
def test_any_other_file_is_one_json_value(write: Any, name: str) -> None:
    path = write(name, "[1, 2]")
    rows = open_rows(path)
    assert contents(rows) == [1, 2]
    assert rows.where(1) == f"{path}[1]"
    path.write_text('{"data": [1, 2]}')
    rows = open_rows(path)
    assert contents(rows) == [{"data": [1, 2]}]
    assert rows.where(0) == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1}\n{"a": 2}', r"is not one JSON value: Extra data.*; one value a line needs the suffix \.jsonl"),
        (b"", "is not one JSON value: Expecting value"),
        (b'{"a": "\xe9"}', "is not UTF-8: byte 0xe9 at offset 7"),
    ],
)
def test_a_file_that_is_no_json_value_is_refused_by_name(write: Any, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=rf"data\.path: .*a\.json {message}"):
        open_rows(write("a.json", content))


def test_a_missing_file_is_refused_with_the_nearest_name(write: Any, tmp_path: Path) -> None:
    path = write("conversations.jsonl", "")
    with pytest.raises(InputError) as caught:
        open_rows(tmp_path / "conversation.jsonl")
    missing = tmp_path / "conversation.jsonl"
    assert str(caught.value) == f"data.path: no such file: {missing}; did you mean {path}?"


def test_a_missing_folder_is_refused_with_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inputs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        open_rows(Path("input/data/x.jsonl"))
    assert str(caught.value) == "data.path: no such file: input/data/x.jsonl; did you mean inputs?"
    with pytest.raises(InputError) as caught:
        open_rows(Path("org/name"))
    assert str(caught.value) == "data.path: no such file: org/name"


def test_folders_and_packed_files_are_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; expected one file"):
        open_rows(tmp_path)
    with pytest.raises(InputError, match=r"is packed \(\.gz\); unpack it first"):
        open_rows(write("a.jsonl.gz", b""))


def test_parquet_gives_the_rows_of_the_same_json_lines(capfd: pytest.CaptureFixture[str]) -> None:
    rows = open_rows(DATA / "plain.parquet")
    expected = contents(open_rows(DATA / "plain.jsonl"))
    assert contents(rows) == expected[: len(rows)]
    assert rows.where(5) == f"{DATA / 'plain.parquet'}[5]"
    assert capfd.readouterr().err == ""


def test_parquet_works_under_a_bare_name_and_under_one_that_looks_like_a_pattern(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bare.parquet", "a[1]*?.PARQUET", ".hidden.parquet"):
        Path(name).write_bytes((DATA / "plain.parquet").read_bytes())
        assert len(open_rows(Path(name))) == len(open_rows(DATA / "plain.parquet"))


def test_parquet_with_tool_calls_in_one_row_only_reads_as_its_json(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}
    other = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {"when": "now"}}}
    called = [{"role": "user", "content": "w"}, {"role": "assistant", "tool_calls": [call, other]}]
    table = [{"messages": called, "tools": [{"name": "f"}, {"kind": "g"}]}, CHAT]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "calls.parquet")
    rows = open_rows(tmp_path / "calls.parquet")
    assert [parse_row(row) for row in contents(rows)] == [parse_row(row) for row in table]


def test_a_broken_parquet_file_is_refused(write: Any) -> None:
    with pytest.raises(InputError, match=r"data\.path: .*broken\.parquet cannot be read as Parquet: "):
        open_rows(write("broken.parquet", b"PAR1 no"))


# --- order ------------------------------------------------------------------------------------------------------

SHUFFLED = [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]


def test_without_split_and_shuffle_the_order_is_the_file_s() -> None:
    assert row_order(7, split=None, shuffle=False, seed=42) == range(7)


@pytest.mark.parametrize(
    ("split", "shuffle", "expected"),
    [
        (None, True, SHUFFLED),
        ("train", True, SHUFFLED),
        ("train", False, list(range(10))),
        # Plain digits: after the shuffle, clamped.
        ("train[2:9]", True, SHUFFLED[2:9]),
        ("train[2:9]", False, [2, 3, 4, 5, 6, 7, 8]),
        ("train[:3]", True, SHUFFLED[:3]),
        ("train[7:]", True, SHUFFLED[7:]),
        ("train[:]", True, SHUFFLED),
        ("train[8:100]", True, SHUFFLED[8:]),
        # Anything else: before it.
        ("train[:50%]", False, [0, 1, 2, 3, 4]),
        ("train[:50%]", True, [4, 2, 3, 1, 0]),
        ("train[-3:]", False, [7, 8, 9]),
        ("train[:-8]", False, [0, 1]),
        ("train[:1%](closest)", None, None),
        ("train+train", False, [*range(10), *range(10)]),
        ("train[8:]+train[:2]", False, [8, 9, 0, 1]),
    ],
)
def test_split_and_shuffle(split: str | None, shuffle: bool | None, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(InputError, match=r"selects 0 of 10 rows"):
            row_order(10, split=split, shuffle=False, seed=42)
    else:
        assert list(row_order(10, split=split, shuffle=bool(shuffle), seed=42)) == expected


@pytest.mark.parametrize("split", ["train[2:8:2]", "train[2]", " [2:5]", "[2:5]", "", "train[a:b]", "train+", "tr ain"])
def test_malformed_splits_are_refused(split: str) -> None:
    with pytest.raises(SettingsError, match=r"data\.split: "):
        row_order(10, split=split, shuffle=False, seed=42)


@pytest.mark.parametrize(
    ("split", "name"), [("bogus", "bogus"), ("test[:5]", "test"), ("train+test", "test"), ("valid[:5%]", "valid")]
)
def test_unknown_splits_are_refused_by_name(split: str, name: str) -> None:
    message = f"data.split: {split!r} names the split {name!r}; the only split of a local file is 'train'"
    with pytest.raises(SettingsError) as caught:
        row_order(10, split=split, shuffle=False, seed=42)
    assert str(caught.value) == message


@pytest.mark.parametrize("split", ["train[5:2]", "train[100:]", "train[0:0]", "train[:0%]"])
def test_an_empty_selection_is_refused_with_counts(split: str) -> None:
    with pytest.raises(InputError) as caught:
        row_order(10, split=split, shuffle=True, seed=42)
    assert str(caught.value) == f"data.split {split!r} selects 0 of 10 rows"


def test_an_input_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"^data\.path holds no rows$"):
        row_order(0, split=None, shuffle=True, seed=42)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"data\.shuffle_seed: expected an integer >= 0, found -1"):
        row_order(10, split=None, shuffle=True, seed=-1)


def test_only_parquet_is_shuffled_by_default() -> None:
    assert default_shuffle(Path("a/b.PARQUET"))
    assert not any(default_shuffle(Path(name)) for name in ("b.jsonl", "b.json", "b"))


def test_plain_splits_of_json_load_neither_datasets_nor_transformers() -> None:
    code = (
        "import sys, dspark_cache.rows as r; r.row_order(3, split='train[1:]', shuffle=False, seed=0); "
        "print([m for m in ('datasets', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
