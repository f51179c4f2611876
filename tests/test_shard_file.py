"""One safetensors file: written as safetensors would, and read without trusting a byte of it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dspark_cache import shard_file
from dspark_cache.dtypes import SAFETENSORS_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.shard_file import (
    ShardFile,
    ShardWriter,
    encode_header,
    file_bytes,
    read_exactly,
    write_tensor_parts,
    write_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

thorough = settings(max_examples=300, derandomize=True, deadline=None, database=None)
PAGE = 4096


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape))


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {key: spec_of(tensor) for key, tensor in tensors.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return an empty file to write into."""
    file = tmp_path / "a.safetensors"
    file.touch()
    return file


# --- writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*SAFETENSORS_DTYPES.values()], ids=str)
def test_one_tensor_gives_the_bytes_of_save_file(path: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    for shape in [(0,), (0, 3), (1,), (5,), (3, 2), (2, 3, 4), (2, 0, 4)]:
        tensors = {"key": random_tensor(shape, dtype)}
        save_file(tensors, tmp_path / "expected")
        digest = write_tensors(path, tensors)
        assert path.read_bytes() == (tmp_path / "expected").read_bytes()
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_size == file_bytes(specs_of(tensors))


@pytest.mark.parametrize(("rows", "length", "dtype"), [*product((1, 2, 3), (1, 7), (torch.bfloat16, torch.float32))])
def test_a_shard_gives_the_bytes_of_save_file(
    path: Path, tmp_path: Path, rows: int, length: int, dtype: torch.dtype
) -> None:
    tensors = {
        "input_ids": random_tensor((rows, length), torch.int64),
        "loss_mask": random_tensor((rows, length), torch.int64),
        "target_hidden_states": random_tensor((rows, length, 6), dtype),
        "target_last_hidden_states": random_tensor((rows, length, 3), dtype),
    }
    save_file(tensors, tmp_path / "expected")
    parts = {key: [tensor[:1], tensor[1:1], tensor[1:]] for key, tensor in tensors.items()}
    for digest in (write_tensors(path, tensors), write_tensor_parts(path, parts)):
        assert path.read_bytes() == (tmp_path / "expected").read_bytes()
        assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_header_is_the_documented_bytes() -> None:
    header = encode_header(
        {"a": TensorSpec(dtype=torch.int64, shape=(2, 3)), "b": TensorSpec(dtype=torch.bool, shape=())}
    )
    text = (
        b'{"a":{"dtype":"I64","shape":[2,3],"data_offsets":[0,48]},'
        b'"b":{"dtype":"BOOL","shape":[],"data_offsets":[48,49]}}'
    )
    assert header == (len(text) + 7 & ~7).to_bytes(8, "little") + text.ljust(len(text) + 7 & ~7)


def test_keys_keep_the_given_order(path: Path) -> None:
    tensors = {"z": torch.ones(3, dtype=torch.int16), "a": torch.ones(2, dtype=torch.int64)}
    write_tensors(path, tensors)
    places = ShardFile(path).places
    assert list(places) == ["z", "a"]
    assert places["a"].offset == places["z"].offset + 6
    assert all(torch.equal(load_file(path)[key], tensor) for key, tensor in tensors.items())


def test_scattered_tensors_are_written_in_their_logical_order(path: Path) -> None:
    tensor = torch.arange(6).reshape(2, 3)
    write_tensors(path, {"a": tensor.T})
    assert torch.equal(load_file(path)["a"], tensor.T)


@pytest.mark.parametrize("tail", [5, 3 * PAGE])
def test_zeros_are_holes_and_the_bytes_are_those_of_the_dense_file(path: Path, tmp_path: Path, tail: int) -> None:
    tensor = torch.zeros(16, 64 * PAGE + tail, dtype=torch.uint8)
    tensor[::2, :PAGE] = 7
    save_file({"a": tensor}, tmp_path / "expected")
    with ShardWriter(path, {"a": spec_of(tensor)}) as writer:
        for row in tensor:
            writer.append_bytes("a", row[:PAGE])
            writer.append_zeros("a", len(row) - PAGE)
        digest = writer.finish()
    assert path.read_bytes() == (tmp_path / "expected").read_bytes()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert path.stat().st_size == (tmp_path / "expected").stat().st_size
    assert path.stat().st_blocks < (tmp_path / "expected").stat().st_blocks / 4


def test_a_hole_longer_than_any_buffer_is_hashed_whole(path: Path) -> None:
    with ShardWriter(path, {"a": TensorSpec(dtype=torch.uint8, shape=(5_000_001,))}) as writer:
        writer.append_zeros("a", 5_000_001)
        digest = writer.finish()
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert not ShardFile(path).read_rows("a", 0, 5_000_001).any()


TWO = {"a": TensorSpec(dtype=torch.int64, shape=(2, 3)), "b": TensorSpec(dtype=torch.bool, shape=(2,))}
ROW = torch.zeros(1, 3, dtype=torch.int64)
FLAG = torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([("b", FLAG)], "b: rows of a are due first"),
        ([("a", ROW), ("b", FLAG)], "b: rows of a are due first"),
        ([("a", ROW), ("a", ROW), ("a", ROW)], f"a: more than the 48 bytes of {TWO['a']}"),
        ([("a", ROW), ("a", ROW), ("b", FLAG), ("a", ROW)], "a: rows of b are due first"),
        ([("a", ROW), ("a", ROW), ("b", FLAG), ("b", FLAG), ("a", ROW)], "a: its rows came before, or "),
        ([("a", ROW.float())], "a: expected rows of [3] torch.int64, found [3] torch.float32"),
        ([("a", ROW[:, :2])], "a: expected rows of [3] torch.int64, found [2] torch.int64"),
        ([("a", ROW[:, :, None])], "a: expected rows of [3] torch.int64, found [3, 1] torch.int64"),
    ],
)
def test_rows_out_of_order_too_many_or_of_another_kind_are_refused(
    path: Path, steps: list[tuple[str, torch.Tensor]], message: str
) -> None:
    with ShardWriter(path, TWO) as writer:
        for key, rows in steps[:-1]:
            writer.append(key, rows)
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            writer.append(*steps[-1])


def test_parts_of_a_row_must_have_the_dtype(path: Path) -> None:
    with (
        ShardWriter(path, TWO) as writer,
        pytest.raises(ValueError, match=r"^a: expected torch.int64, found torch.int32$"),
    ):
        writer.append_bytes("a", torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "a: 0 of 48 bytes were written"),
        ([("a", ROW)], "a: 24 of 48 bytes were written"),
        ([("a", ROW), ("a", ROW)], "b: 0 of 2 bytes were written"),
        ([("a", ROW), ("a", ROW), ("b", FLAG)], "b: 1 of 2 bytes were written"),
    ],
)
def test_a_file_is_not_finished_before_every_row_came(
    path: Path, steps: list[tuple[str, torch.Tensor]], message: str
) -> None:
    with ShardWriter(path, TWO) as writer:
        for key, rows in steps:
            writer.append(key, rows)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            writer.finish()


def test_keys_without_rows_need_none(path: Path) -> None:
    empty = TensorSpec(dtype=torch.int64, shape=(0, 3))
    with ShardWriter(path, {"a": empty, "b": TWO["b"], "c": empty, "d": empty}) as writer:
        writer.append("b", torch.ones(2, dtype=torch.bool))
        writer.finish()
    assert ShardFile(path).read_rows("b", 0, 2).all()


# --- reading ----------------------------------------------------------------------------------------------------


@contextmanager
def never_waiting() -> Iterator[None]:
    """Turn an open that waits for ever into a failure."""

    def refuse(*_: object) -> None:
        raise AssertionError("waited")

    before = signal.signal(signal.SIGALRM, refuse)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def small_file(path: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor([True, False])}
    write_tensors(path, tensors)
    return tensors


def write_raw(path: Path, entries: object, data: bytes = b"", *, length: int | None = None) -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def test_rows_are_read_by_position_into_memory_of_their_own(path: Path) -> None:
    tensors = small_file(path)
    file = ShardFile(path)
    for start, stop in [(0, 0), (0, 1), (1, 2), (0, 2)]:
        rows = file.read_rows("a", start, stop)
        assert torch.equal(rows, tensors["a"][start:stop])
        assert rows.untyped_storage().nbytes() == (stop - start) * 24
    assert file.read_rows("b", 1, 2).tolist() == [False]
    into = torch.zeros(1, 3, dtype=torch.int64)
    file.read_into("a", 1, into)
    assert into.tolist() == [[3, 4, 5]]


def test_what_safetensors_writes_is_read(path: Path) -> None:
    tensors = {"f": torch.randn(3, 2), "i": torch.arange(3), "scalar": torch.tensor(2.0)}
    save_file(tensors, path, metadata={"format": "pt"})
    file = ShardFile(path)
    assert {key: place.spec for key, place in file.places.items()} == specs_of(tensors)
    assert all(torch.equal(file.read_rows(key, 0, 3), tensors[key]) for key in ("f", "i"))


def opened() -> list[Path]:
    return [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]


def test_a_writer_closes_its_file(path: Path) -> None:
    with ShardWriter(path, {}) as writer:
        assert path in opened()
        writer.finish()
    assert path not in opened()


def test_a_file_closes_with_its_last_user(path: Path) -> None:
    small_file(path)

    file = ShardFile(path)
    assert path in opened()
    del file
    assert path not in opened()
    path.write_bytes(b"junk")
    with pytest.raises(CacheFormatError):
        ShardFile(path)
    assert path not in opened()


def test_a_file_cut_anywhere_is_refused_by_name(path: Path) -> None:
    small_file(path)
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(
            CacheFormatError, match=f"^{re.escape(str(path))} (ends at byte|has {size} bytes, its header)"
        ):
            ShardFile(path)


def test_a_longer_file_is_refused_by_name(path: Path) -> None:
    small_file(path)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(
        CacheFormatError, match=f"^{re.escape(str(path))} has {size + 1} bytes, its header asks for {size}$"
    ):
        ShardFile(path)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(path: Path) -> None:
    small_file(path)
    file = ShardFile(path)
    os.truncate(path, file.size - 1)
    with pytest.raises(
        CacheFormatError, match=f"^{re.escape(str(path))} ends at byte {file.size - 1}, 1 bytes are missing$"
    ):
        file.read_rows("b", 0, 2)


def test_bytes_past_the_end_are_counted_as_missing(path: Path) -> None:
    path.write_bytes(b"0123456789")
    into = bytearray(4)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        read_exactly(descriptor, memoryview(into), 6, name="a")
        with pytest.raises(CacheFormatError, match=r"^a ends at byte 10, 1 bytes are missing$"):
            read_exactly(descriptor, memoryview(into), 7, name="a")
    finally:
        os.close(descriptor)
    assert into == b"7899"


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001, 3, 1 << 20])
def test_an_absurd_header_length_is_refused_before_anything_is_allocated(path: Path, length: int) -> None:
    write_raw(path, b"{}", length=length)
    with pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))} has 10 bytes, its header claims {length}$"):
        ShardFile(path)


def test_a_header_over_the_limit_is_refused_though_the_file_has_it(path: Path) -> None:
    write_raw(path, b"{}", length=100_000_001)
    os.truncate(path, 200_000_000)
    with pytest.raises(CacheFormatError, match=r"has 200000000 bytes, its header claims 100000001$"):
        ShardFile(path)


GOOD: dict[str, Any] = {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}
DEEP = b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"


def test_a_good_header_is_read_so_that_the_table_below_is_about_its_faults(path: Path) -> None:
    write_raw(path, {"a": GOOD}, bytes(6))
    assert ShardFile(path).places["a"].spec == TensorSpec(dtype=torch.uint8, shape=(2, 3))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (b"", " (header) is not valid JSON: "),
        (b"[]", " (header) must hold a JSON object, found list"),
        (b'{"a":{},"a":{}}', " (header) is not valid JSON: duplicate keys ['a']"),
        (b'{"a":{"dtype":"U8","dtype":"U8"}}', " (header) is not valid JSON: duplicate keys ['dtype']"),
        (DEEP, " (header) is not valid JSON: nested too deep"),
        ({"a": None}, ": header entry 'a' is malformed: None"),
        ({"a": []}, ": header entry 'a' is malformed: []"),
        ({"a": {}}, ": header entry 'a' is malformed: {}"),
        ({"a": GOOD | {"more": 1}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"dtype": "U9"}}, ": header entry 'a' is malformed: {'dtype': 'U9'"),
        ({"a": GOOD | {"dtype": ["U8"]}}, ": header entry 'a' is malformed: {'dtype': ['U8']"),
        ({"a": GOOD | {"shape": 6}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": None}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": "23"}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": [2, 3.0]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": [2, True]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": [-2, -3]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"shape": [2, None]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"data_offsets": [0]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"data_offsets": [0, 6, 6]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"data_offsets": [-6, 0]}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"data_offsets": {"0": 6}}}, ": header entry 'a' is malformed: {"),
        ({"a": GOOD | {"data_offsets": [0, 5]}}, ": 'a' has 5 bytes, its shape 6"),
        ({"a": GOOD | {"data_offsets": [6, 0]}}, ": 'a' has -6 bytes, its shape 6"),
        ({"a": GOOD | {"shape": [1 << 40, 1 << 40]}}, f": 'a' has 6 bytes, its shape {1 << 80}"),
        ({"a": GOOD, "b": GOOD}, ": tensors overlap or leave a gap at byte 6 of the data"),
        ({"a": GOOD | {"data_offsets": [1, 7]}}, ": tensors overlap or leave a gap at byte 0 of the data"),
        (
            {"a": GOOD, "b": GOOD | {"data_offsets": [7, 13]}},
            ": tensors overlap or leave a gap at byte 6 of the data",
        ),
        (
            {"a": GOOD, "b": GOOD | {"data_offsets": [5, 11]}},
            ": tensors overlap or leave a gap at byte 6 of the data",
        ),
        ({"a": GOOD, "b": GOOD | {"data_offsets": [6, 12]}}, " has "),
        ({}, " has 16 bytes, its header asks for 10"),
    ],
)
def test_a_faulty_header_is_refused_by_file_and_entry(path: Path, entries: object, message: str) -> None:
    write_raw(path, entries, bytes(6))
    with pytest.raises(CacheFormatError, match="^" + re.escape(str(path) + message)):
        ShardFile(path)


def test_a_shape_whose_product_has_thousands_of_digits_is_refused_by_name(path: Path) -> None:
    write_raw(path, {"a": GOOD | {"shape": [10**19] * 300}}, bytes(6))
    with pytest.raises(CacheFormatError, match="^" + re.escape(str(path))):
        ShardFile(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "a"
    make(path)
    with never_waiting(), pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))} is no regular file$"):
        ShardFile(path)


def test_a_device_is_refused() -> None:
    with pytest.raises(CacheFormatError, match=r"^/dev/zero is no regular file$"):
        ShardFile(Path("/dev/zero"))


@pytest.mark.parametrize("linked", [False, True])
def test_a_missing_file_is_said_to_be_missing(tmp_path: Path, linked: bool) -> None:
    path = tmp_path / "a"
    if linked:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CacheNotFoundError, match=f"^no such file: {re.escape(str(path))}$"):
        ShardFile(path)


def test_a_link_to_a_file_is_read(path: Path, tmp_path: Path) -> None:
    small_file(path)
    (tmp_path / "link").symlink_to(path)
    assert list(ShardFile(tmp_path / "link").places) == ["a", "b"]


@pytest.mark.parametrize(
    ("specs", "exactly", "faults"),
    [
        (TWO, True, None),
        ({"a": TWO["a"]}, False, None),
        ({"a": TWO["a"]}, True, ["unexpected keys ['b']"]),
        ({}, True, ["unexpected keys ['a', 'b']"]),
        (
            {"a": TWO["b"], "b": TensorSpec(dtype=torch.bool, shape=(3,)), "c": TWO["a"]},
            True,
            ["a: expected BOOL[2], found I64[2, 3]", "b: expected BOOL[3], found BOOL[2]", "c is missing"],
        ),
    ],
)
def test_a_header_is_compared_whole(
    path: Path, specs: dict[str, TensorSpec], exactly: bool, faults: list[str] | None
) -> None:
    small_file(path)
    file = ShardFile(path)
    if faults is None:
        file.expect(specs, exactly=exactly)
        return
    with pytest.raises(CacheFormatError, match=f"^{re.escape(f'{path}: ' + '; '.join(faults))}$"):
        file.expect(specs, exactly=exactly)


def test_all_missing_keys_are_named(path: Path) -> None:
    small_file(path)
    file = ShardFile(path)
    file.require(("b", "a"))
    with pytest.raises(CacheFormatError, match=f"^{re.escape(str(path))}: missing required keys \\['x', 'y'\\]$"):
        file.require(("x", "a", "y"))


numbers = st.integers(0, 8) | st.integers(-(2**70), 2**70) | st.booleans() | st.none() | st.floats(0, 9)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "I64", "F99"]) | st.none(),
        "shape": st.lists(numbers, max_size=3) | numbers,
        "data_offsets": st.lists(numbers, max_size=3) | numbers,
    }
)
headers = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries, max_size=3)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.safetensors"


@thorough
@given(
    text=st.binary(max_size=64) | headers.map(lambda value: json.dumps(value).encode()),
    length=st.none() | st.integers(0, 2**64 - 1),
    data=st.binary(max_size=16),
)
@example(text=b'{"a":' * 5000, length=None, data=b"")
@example(text=b"", length=None, data=b"")
def test_arbitrary_files_are_refused_or_add_up(fuzzed: Path, text: bytes, length: int | None, data: bytes) -> None:
    write_raw(fuzzed, text, data, length=length)
    try:
        file = ShardFile(fuzzed)
    except CacheFormatError as error:
        assert str(error).startswith(str(fuzzed))  # noqa: PT017 - both outcomes are right
    else:
        assert sum(place.spec.num_bytes for place in file.places.values()) == len(data)


@thorough
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_no_size(fuzzed: Path, position: int, value: int) -> None:
    fuzzed.touch()
    small_file(fuzzed)
    content = bytearray(fuzzed.read_bytes())
    content[position % len(content)] = value
    fuzzed.write_bytes(content)
    try:
        file = ShardFile(fuzzed)
    except CacheFormatError as error:
        assert str(error).startswith(str(fuzzed))  # noqa: PT017 - both outcomes are right
    else:
        assert sum(place.spec.num_bytes for place in file.places.values()) == 50


def test_the_disk_begins_to_write_while_more_is_hashed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(shard_file, "start_writeback", lambda _, offset, size: told.append((offset, size)))
    monkeypatch.setattr(shard_file, "_WRITEBACK_BYTES", 1 << 20)
    specs = {"a": TensorSpec(dtype=torch.uint8, shape=(5 << 18,))}
    with ShardWriter(path, specs) as writer:
        for _ in range(5):
            writer.append("a", torch.ones(1 << 18, dtype=torch.uint8))
        writer.finish()
    assert [offset for offset, _ in told] == [0]
    assert 1 << 20 <= told[0][1] < (1 << 20) + (1 << 18)
