"""Rows of files, of folders of files, and of data sets."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dspark_cache.conversations import parse_row
from dspark_cache.errors import InputError, RowError
from dspark_cache.rows import Rows, Source, open_source, parsed_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = Path(__file__).parent / "data" / "golden" / "data"
CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, bytes | str], Path]:
    def make(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def open_rows(path: Path) -> Rows:
    return opened(path).rows


def opened(path: Path) -> Source:
    return open_source(path, Path(os.environ["PYTEST_SCRATCH"]))


@pytest.fixture(autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scratch folder in which nothing may stay."""
    path = tmp_path_factory.mktemp("scratch")
    monkeypatch.setenv("PYTEST_SCRATCH", str(path))
    yield path
    assert list(path.iterdir()) == []


def contents(rows: Rows) -> list[Any]:
    return [read(rows, index) for index in range(len(rows))]


def read(rows: Rows, index: int) -> Any:
    return parsed_row(rows.fetch(index))


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


def test_lines_are_fetched_as_they_lie_there_and_parsed_elsewhere(write: Any) -> None:
    rows = open_rows(write("a.jsonl", '{"a": 1}\n{"a": \n'))
    assert [rows.fetch(0), rows.fetch(1)] == [b'{"a": 1}\n', b'{"a": \n']
    assert open_rows(write("a.json", '[{"a": 1}]')).fetch(0) == {"a": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_byte_order_mark_is_accepted(write: Any, name: str) -> None:
    assert contents(open_rows(write(name, b'\xef\xbb\xbf{"a": "\xc3\xbc"}'))) == [{"a": "ü"}]


def test_a_bad_line_is_named_and_does_not_hinder_the_others(write: Any) -> None:
    path = write("a.jsonl", '{"a": 1}\n\n{"a": \n{"a": 3}\n')
    rows = open_rows(path)
    assert read(rows, 0) == {"a": 1}
    assert read(rows, 2) == {"a": 3}
    with pytest.raises(RowError, match="expected one JSON value, found: Expecting value") as caught:
        read(rows, 1)
    assert caught.value.reason == "bad_json"
    assert rows.where(1) == f"{path}:3"


@pytest.mark.parametrize("line", ['{"a": 1} {"a": 2}', "[" * 100_000, "1" * 5000, "\u00a0"])
def test_odd_lines_are_row_errors(write: Any, line: str) -> None:
    with pytest.raises(RowError, match="expected one JSON value"):
        read(open_rows(write("a.jsonl", line)), 0)


def test_a_line_that_is_not_utf8_is_a_row_error(write: Any) -> None:
    rows = open_rows(write("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n'))
    with pytest.raises(RowError, match="expected UTF-8, found byte 0xe9 at offset 7 of the line") as caught:
        read(rows, 1)
    assert caught.value.reason == "bad_encoding"


def test_the_last_of_repeated_keys_wins_and_nan_is_a_number(write: Any) -> None:
    rows = open_rows(write("a.jsonl", '{"a": 1, "a": 2}\n[NaN]\n'))
    assert read(rows, 0) == {"a": 2}
    assert str(read(rows, 1)) == "[nan]"


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


def test_unknown_packings_and_folders_without_data_are_refused(write: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is packed \(\.zst\); unpack it first, or use gzip"):
        open_rows(write("a.jsonl.zst", b""))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/README.md").write_text("no data")
    with pytest.raises(InputError, match=r"empty holds no \.jsonl, \.json or \.parquet files"):
        open_rows(tmp_path / "empty")


def test_gzip_is_unpacked(write: Any) -> None:
    path = write("a.jsonl.gz", gzip.compress(b'{"a": 1}\n\n{"a": 2}\n'))
    rows = open_rows(path)
    assert contents(rows) == [{"a": 1}, {"a": 2}]
    assert rows.where(1) == f"{path}:3"
    assert contents(open_rows(write("b.JSON.GZ", gzip.compress(b"[1, 2]")))) == [1, 2]
    for content in (b"no gzip", gzip.compress(b'{"a": 1}\n' * 999)[:-20]):
        with pytest.raises(InputError, match=r"broken\.jsonl\.gz cannot be unpacked: "):
            open_rows(write("broken.jsonl.gz", content))


def test_a_folder_gives_its_files_in_the_order_of_their_names(write: Any, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write("b.jsonl", "1\n2\n")
    write("a.json", "[3, 4]")
    write("sub/c.jsonl.gz", gzip.compress(b"5\n"))
    write("README.md", "6")
    write("notes.txt", "7")
    write(".hidden.jsonl", "8")
    source = opened(tmp_path)
    assert contents(source.rows) == [3, 4, 1, 2, 5]
    assert [source.rows.where(i) for i in (1, 3, 4)] == [
        f"{tmp_path}/a.json[1]",
        f"{tmp_path}/b.jsonl:2",
        f"{tmp_path}/sub/c.jsonl.gz:1",
    ]
    assert source.splits == {"train": range(5)}
    assert not source.is_shuffled


def test_a_folder_of_parquet_files_has_the_splits_that_datasets_finds() -> None:
    source = opened(DATA / "parquet_two_splits")
    files = {name: pq.read_table(DATA / f"parquet_two_splits/{name}-00000.parquet") for name in source.splits}
    assert {name: len(rows) for name, rows in source.splits.items()} == {n: f.num_rows for n, f in files.items()}
    assert source.is_shuffled
    start = source.splits["validation"].start
    assert source.rows.where(start) == f"{DATA / 'parquet_two_splits'}[validation][0]"
    assert parse_row(read(source.rows, start)) == parse_row(files["validation"].to_pylist()[0])
    assert sorted(path.name for path in (DATA / "parquet_two_splits").iterdir()) == [
        "train-00000.parquet",
        "validation-00000.parquet",
    ]
    both = opened(DATA / "parquet_train")
    assert len(both.rows) == sum(pq.read_table(p).num_rows for p in (DATA / "parquet_train").iterdir())


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
    with pytest.raises(InputError, match=r"data\.path: .*broken\.parquet cannot be read: "):
        open_rows(write("broken.parquet", b"PAR1 no"))


def test_only_parquet_is_shuffled_by_default(write: Any) -> None:
    assert opened(DATA / "plain.parquet").is_shuffled
    assert not any(opened(write(name, "1")).is_shuffled for name in ("b.jsonl", "b.json", "b"))
