"""Names of shards, who writes which, what a folder must hold, and writing one."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import CACHE_KEYS, CacheFormatError, CacheNotFoundError, write_shard
from dspark_cache.offline_cache import (
    atomic_write,
    existing_shard_indices,
    partition_cache_shards,
    resume_start_sample,
    shard_path,
    validate_contiguous_shards,
    write_tensor_shard,
)
from dspark_cache.shards import cut_by_bytes, num_shards, shard_name, shard_rows

# --- partition --------------------------------------------------------------------------------------------------


def dealt(num_samples: int, shard_size: int, world_size: int) -> list[list[tuple[int, list[int]]]]:
    """Cut the samples into shards and deal them out, the plain way: (index, samples) of each shard, by rank."""
    samples = list(range(num_samples))
    shards = [(at // shard_size, samples[at : at + shard_size]) for at in range(0, num_samples, shard_size)]
    hands: list[list[tuple[int, list[int]]]] = []
    for rank in range(world_size):
        take = len(shards) // world_size + (1 if rank < len(shards) % world_size else 0)
        at = sum(len(hand) for hand in hands)
        hands.append(shards[at : at + take])
    return hands


@pytest.mark.parametrize("shard_size", range(1, 6))
def test_partition_is_the_plainly_dealt_one(shard_size: int) -> None:
    for num_samples, world_size in product(range(14), range(1, 9)):
        for rank, hand in enumerate(dealt(num_samples, shard_size, world_size)):
            first_shard, start, count = partition_cache_shards(num_samples, shard_size, world_size, rank)
            samples = [sample for _, shard in hand for sample in shard]
            assert list(range(start, start + count)) == samples
            assert not hand or first_shard == hand[0][0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((0, 4, 2, 0), (0, 0, 0)),
        ((1, 4, 2, 0), (0, 0, 1)),
        ((1, 4, 2, 1), (1, 1, 0)),  # beyond the shards: nothing, from the end on
        ((10, 4, 2, 0), (0, 0, 8)),  # three shards: the first rank has the odd one
        ((10, 4, 2, 1), (2, 8, 2)),
    ],
)
def test_partition_by_example(arguments: tuple[int, int, int, int], expected: tuple[int, int, int]) -> None:
    assert partition_cache_shards(*arguments) == expected


@pytest.mark.parametrize(
    "arguments", [(-1, 4, 2, 0), (10, 0, 2, 0), (10, -4, 2, 0), (10, 4, 0, 0), (10, 4, 2, 2), (10, 4, 2, -1)]
)
def test_partition_of_the_impossible_is_refused(arguments: tuple[int, int, int, int]) -> None:
    message = (
        "expected num_samples >= 0, shard_size >= 1, world_size >= 1 and 0 <= rank < world_size, found "
        + ", ".join(map(str, arguments))
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        partition_cache_shards(*arguments)


@pytest.mark.parametrize("shard_size", range(1, 6))
def test_shards_have_the_plainly_cut_rows(shard_size: int) -> None:
    for num_samples in range(14):
        (shards,) = dealt(num_samples, shard_size, 1)
        assert num_shards(num_samples, shard_size) == len(shards)
        assert [shard_rows(num_samples, shard_size, index) for index, _ in shards] == [len(rows) for _, rows in shards]


# --- names ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "name"),
    [(0, "shard-000000.safetensors"), (41, "shard-000041.safetensors"), (999_999, "shard-999999.safetensors")],
)
def test_names_have_six_digits(tmp_path: Path, index: int, name: str) -> None:
    assert shard_name(index) == name
    assert shard_path(tmp_path, index) == str(tmp_path / name)
    (tmp_path / name).touch()
    assert existing_shard_indices(tmp_path) == {index}


@pytest.mark.parametrize("index", [-1, 1_000_000])
def test_an_index_that_no_reader_would_see_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"^shard index must be from 0 to 999999, found {index}$"):
        shard_name(index)


@pytest.mark.parametrize(
    "name",
    [
        "shard-1.safetensors",
        "shard-0000001.safetensors",
        "shard-000001.safetensors.tmp",
        ".tmp-shard-000001.safetensors-0123",
        "xshard-000001.safetensors",
        "shard-00000a.safetensors",
        "Shard-000001.safetensors",
        "shard-000001.safetensors\n",
        "shard-٠٠٠٠٠١.safetensors",
        "manifest.json",
    ],
)
def test_other_names_are_no_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert existing_shard_indices(tmp_path) == set()


def test_an_absent_folder_has_no_shards(tmp_path: Path) -> None:
    assert existing_shard_indices(tmp_path / "nowhere") == set()


# --- what a folder must hold ------------------------------------------------------------------------------------


def touch(folder: Path, indices: set[int]) -> None:
    for index in indices:
        Path(shard_path(folder, index)).touch()


@pytest.mark.parametrize(
    ("num_samples", "shard_size", "found", "missing", "surplus"),
    [
        (0, 4, set(), None, None),
        (1, 4, {0}, None, None),
        (8, 4, {0, 1}, None, None),
        (9, 4, {0, 1, 2}, None, None),
        (9, 4, set(), [0, 1, 2], []),
        (9, 4, {0, 1}, [2], []),
        (9, 4, {0, 2}, [1], []),
        (9, 4, {1, 2}, [0], []),
        (8, 4, {0, 1, 2}, [], [2]),
        (9, 4, {0, 1, 5}, [2], [5]),
        (0, 4, {0}, [], [0]),
        (48, 2, set(range(0, 24, 2)), [1, 3, 5, 7, 9, 11, 13, 15, 17, 19], []),
    ],
)
def test_shards_must_be_exactly_those_of_the_manifest(
    tmp_path: Path,
    num_samples: int,
    shard_size: int,
    found: set[int],
    missing: list[int] | None,
    surplus: list[int] | None,
) -> None:
    touch(tmp_path, found)
    expected = -(-num_samples // shard_size)
    if missing is None:
        assert validate_contiguous_shards(tmp_path, "X", num_samples, shard_size) == list(range(expected))
        return
    with pytest.raises(CacheFormatError) as caught:
        validate_contiguous_shards(tmp_path, "X", num_samples, shard_size)
    text = str(caught.value)
    assert text.startswith(
        f"the X cache in {tmp_path} must have shard indices 0..{expected - 1} " if expected else "the X"
    )
    assert f"for {num_samples} samples in shards of {shard_size}; it has {len(found)} shards; " in text
    assert text.endswith(f"missing shard indices {missing}, unexpected shard indices {surplus}")


def test_an_absurd_number_of_samples_is_refused_at_once(tmp_path: Path) -> None:
    touch(tmp_path, {0})
    with pytest.raises(CacheFormatError, match=r"missing shard indices \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10\], unexpected"):
        validate_contiguous_shards(tmp_path, "X", 1 << 48, 1)


def test_an_absent_folder_is_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    with pytest.raises(CacheNotFoundError, match=f"^no X cache: {re.escape(str(path))} is no folder$"):
        validate_contiguous_shards(path, "X", 0, 4)


@pytest.mark.parametrize(("shards", "start"), [(set(), 0), ({0}, 3), ({2, 0, 1}, 9)])
def test_a_resume_starts_after_the_prefix(shards: set[int], start: int) -> None:
    assert resume_start_sample(shards, 3) == start


@pytest.mark.parametrize("shards", [{1}, {0, 2}, {1, 2}, set(range(1, 40))])
def test_a_resume_over_a_gap_is_refused(shards: set[int]) -> None:
    message = (
        f"cannot resume: existing shards must be a contiguous prefix 0..{len(shards) - 1}, found shard indices "
        f"{sorted(shards)[:10]}; remove the shards after the gap"
    )
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        resume_start_sample(shards, 3)


# --- writing ----------------------------------------------------------------------------------------------------


def samples(rows: int = 2) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(rows * 3).reshape(rows, 3),
        "loss_mask": torch.ones(rows, 3, dtype=torch.int64),
        "target_hidden_states": torch.randn(rows, 3, 4),
        "target_last_hidden_states": torch.randn(rows, 3, 2),
    }


def test_a_dspark_shard_has_the_bytes_of_save_file_and_no_further_key(tmp_path: Path) -> None:
    tensors = samples()
    folder = tmp_path / "made" / "cache"
    path = write_shard(folder, 3, {"attention_mask": torch.ones(2, 3), **tensors})
    assert path == str(folder / "shard-000003.safetensors")
    save_file(tensors, tmp_path / "expected")
    assert Path(path).read_bytes() == (tmp_path / "expected").read_bytes()
    assert [file.name for file in folder.iterdir()] == ["shard-000003.safetensors"]


def test_a_shard_is_replaced(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, samples(2))
    tensors = samples(1)
    path = write_shard(tmp_path, 0, tensors)
    assert all(torch.equal(load_file(path)[key], tensors[key]) for key in CACHE_KEYS)


def test_scattered_tensors_with_gradients_are_written(tmp_path: Path) -> None:
    tensor = torch.randn(3, 2, requires_grad=True).T
    path = write_tensor_shard(tmp_path, 0, {"a": tensor}, ("a",), "X")
    assert torch.equal(load_file(path)["a"], tensor.detach())


@pytest.mark.parametrize(
    ("changes", "keys", "message"),
    [
        ({}, ("a", "x", "y"), "X shard 5: missing required keys ['x', 'y']"),
        ({"b": torch.ones(3)}, ("a", "b"), "X shard 5: sample counts differ between keys: {'a': 2, 'b': 3}"),
        ({"b": torch.tensor(1.0)}, ("b",), "X shard 5: sample counts differ between keys: {'b': None}"),
    ],
)
def test_a_shard_that_no_reader_could_use_is_not_written(
    tmp_path: Path, changes: dict[str, torch.Tensor], keys: tuple[str, ...], message: str
) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2), **changes}
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        write_tensor_shard(tmp_path, 5, tensors, keys, "X")
    assert list(tmp_path.iterdir()) == []


def test_keys_that_differ_outside_the_file_do_not_matter(tmp_path: Path) -> None:
    write_tensor_shard(tmp_path, 0, {"a": torch.ones(2), "b": torch.ones(3)}, ("a",), "X")
    assert existing_shard_indices(tmp_path) == {0}


def test_atomic_write_puts_what_the_function_wrote_in_place(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def write(temporary: str) -> None:
        assert isinstance(temporary, str)
        assert path.read_text() == "old"
        Path(temporary).write_text("new")

    assert atomic_write(path, write) == str(path)
    assert path.read_text() == "new"


def test_atomic_write_keeps_the_old_file_when_the_function_fails(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail(temporary: str) -> None:
        Path(temporary).write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        atomic_write(str(path), fail)
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("length", range(7))
def test_runs_are_cut_greedily_and_stay_when_items_are_appended(length: int) -> None:
    for sizes, limit in product(product([1, 3, 5], repeat=length), (1, 3, 4, 6, 100)):
        runs = cut_by_bytes(sizes, limit)
        assert [index for run in runs for index in run] == list(range(len(sizes)))
        totals = [sum(sizes[index] for index in run) for run in runs]
        assert all(total <= limit or len(run) == 1 for run, total in zip(runs, totals, strict=True))
        following = [sizes[run.start] for run in runs[1:]]
        assert all(total + size > limit for total, size in zip(totals, following, strict=False))
        assert runs[:-1] == cut_by_bytes((*sizes, 2), limit)[: len(runs) - 1]


def test_nothing_is_cut_into_no_runs() -> None:
    assert cut_by_bytes([], 1) == []
