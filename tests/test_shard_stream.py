"""A file read once, in pieces of any size: every byte is told of once, and every value kept, or its row's largest."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from dspark_cache.dtypes import STORED_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.shard_file import TensorPlace, encode_header, open_cache_file, write_tensors
from dspark_cache.shard_stream import CHUNK_BYTES, Run, cut_runs, read_values

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 3
"""Of a row: an odd number, so that most rows begin at no multiple of anything."""
SHAPES = [(), (0,), (1,), (5,), (7, WIDTH), (3, 2 * WIDTH), (2, 4, WIDTH), (2, 3, 2 * WIDTH)]
WIDTHS = {"states": WIDTH}


def put(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    with put_file(path) as temporary:
        write_tensors(temporary, tensors)
    return path


def states(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 100).to(dtype)


# How a file is cut


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_every_byte_of_every_tensor_is_in_one_run_and_in_order(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    widths = WIDTHS if len(shape) > 1 else {}
    specs = {"states": TensorSpec(dtype=dtype, shape=shape), "other": TensorSpec(dtype=torch.int16, shape=(5,))}
    row_bytes = {"states": widths.get("states", 1) * dtype.itemsize, "other": 2}
    places, due = {}, 11
    for key, spec in specs.items():
        places[key] = TensorPlace(spec=spec, offset=due)
        due += spec.num_bytes
    last_first = dict(reversed(places.items()))
    for chunk in range(1, specs["states"].num_bytes + 4):
        monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", chunk)
        position = 11
        for run in cut_runs(last_first, widths):
            assert run.offset == position == places[run.key].offset + run.start * row_bytes[run.key]
            assert 0 < run.num_bytes <= max(chunk, row_bytes[run.key])
            assert run.num_bytes % row_bytes[run.key] == 0
            position += run.num_bytes
        assert position == due


def test_a_run_has_as_many_rows_as_go_into_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", 13)
    place = TensorPlace(spec=TensorSpec(dtype=torch.bfloat16, shape=(2, 3 * WIDTH)), offset=8)
    assert list(cut_runs({"states": place}, WIDTHS)) == [
        Run(key="states", start=start, offset=8 + start * 6, num_bytes=12) for start in (0, 2, 4)
    ]


# What is read


@pytest.mark.parametrize("dtype", STORED_DTYPES.values(), ids=STORED_DTYPES)
def test_values_and_bytes_are_those_of_the_file_whatever_the_size_of_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    for number, shape in enumerate(shape for shape in SHAPES if len(shape) > 1):
        tensors = {"ids": torch.arange(5), "states": states(shape, dtype), "mask": torch.tensor([1, 0, 1]).byte()}
        path = put(tmp_path / str(number), tensors)
        content = path.read_bytes()
        largest = tensors["states"].float().abs().view(*shape[:-1], -1, WIDTH).amax(dim=-1)
        for chunk in (1, 2, 3, 7, 12, 13, 100, 1000, CHUNK_BYTES):
            monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", chunk)
            told = bytearray()
            values = read_values(open_cache_file(path), WIDTHS, told.extend)
            assert bytes(told) == content
            assert values.keys() == tensors.keys()
            assert all(torch.equal(values[key], tensors[key]) for key in ("ids", "mask"))
            assert values["states"].dtype == dtype
            assert torch.equal(values["states"].float(), largest)


def test_without_rows_everything_is_kept_and_a_scalar_too(tmp_path: Path) -> None:
    tensors = {"x": torch.tensor(2.5), "none": torch.empty(0, 4), "states": states((2, 4), torch.bfloat16)}
    save_file(tensors, tmp_path / "file")
    values = read_values(open_cache_file(tmp_path / "file"), {}, lambda _: None)
    assert values.keys() == tensors.keys()
    assert all(torch.equal(values[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("chunk", [3, CHUNK_BYTES])
def test_a_file_without_tensors_is_told_of_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", chunk)
    (tmp_path / "file").write_bytes(encode_header({}))
    digest = hashlib.sha256()
    assert read_values(open_cache_file(tmp_path / "file"), {}, digest.update) == {}
    assert digest.hexdigest() == hashlib.sha256(encode_header({})).hexdigest()


def test_no_more_than_a_chunk_of_a_long_header_is_told_of_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", 50)
    sizes: list[int] = []
    path = put(tmp_path / "file", {"x" * 100: torch.zeros(1)})
    read_values(open_cache_file(path), {}, lambda part: sizes.append(len(part)))
    assert sizes[0] == max(sizes) == 50
    assert sum(sizes) == path.stat().st_size


# What is refused


@pytest.mark.parametrize("part", ["header", "tensor"])
def test_a_file_that_is_cut_short_after_it_was_opened_is_refused(tmp_path: Path, part: str) -> None:
    path = put(tmp_path / "file", {"states": states((7, WIDTH), torch.bfloat16)})
    file = open_cache_file(path)
    size = file.places["states"].offset - 1 if part == "header" else path.stat().st_size - 1
    with path.open("r+b") as stream:
        stream.truncate(size)
    with pytest.raises(CacheFormatError) as error:
        read_values(file, WIDTHS, lambda _: None)
    missing = file.places["states"].offset - size if part == "header" else 1
    assert str(error.value) == f"{path} ends at byte {size}, {missing} bytes are missing"


@pytest.mark.parametrize(("memory", "is_refused"), [(5 * 8 + 7 * 2, False), (5 * 8 + 7 * 2 - 1, True)])
def test_values_that_are_more_than_the_memory_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, is_refused: bool
) -> None:
    monkeypatch.setattr("dspark_cache.shard_stream.physical_memory", lambda: memory)
    path = put(tmp_path / "file", {"ids": torch.arange(5), "states": states((7, WIDTH), torch.bfloat16)})
    told: list[memoryview] = []
    if not is_refused:
        assert len(read_values(open_cache_file(path), WIDTHS, told.append)) == 2
        return
    with pytest.raises(CacheFormatError) as error:
        read_values(open_cache_file(path), WIDTHS, told.append)
    assert str(error.value) == (
        f"{path}: 54 bytes of ids, masks and magnitudes are more than the memory of this machine"
    )
    assert told == []


def test_a_link_or_a_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(put(tmp_path / "file", {"x": torch.zeros(1)}))
    with pytest.raises(CacheFormatError, match=r"/link is a link to .*: a cache holds files, copy it there$"):
        open_cache_file(tmp_path / "link")
    with pytest.raises(CacheNotFoundError, match=r"^no such file: .*/none$"):
        open_cache_file(tmp_path / "none")
