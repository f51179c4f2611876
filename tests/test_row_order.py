"""Splits, slices and the seeded shuffle."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dspark_cache.errors import InputError, SettingsError
from dspark_cache.row_order import row_order


def splits(num_rows: int) -> dict[str, range]:
    return {"train": range(num_rows)}


SHUFFLED = [5, 6, 0, 7, 3, 2, 4, 9, 1, 8]


def test_without_split_and_shuffle_the_order_is_the_file_s() -> None:
    assert row_order(splits(7), split=None, shuffle=False, seed=42) == range(7)


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
            row_order(splits(10), split=split, shuffle=False, seed=42)
    else:
        assert list(row_order(splits(10), split=split, shuffle=bool(shuffle), seed=42)) == expected


@pytest.mark.parametrize("split", ["train[2:8:2]", "train[2]", " [2:5]", "[2:5]", "", "train[a:b]", "train+", "tr ain"])
def test_malformed_splits_are_refused(split: str) -> None:
    with pytest.raises(SettingsError, match=r"data\.split: "):
        row_order(splits(10), split=split, shuffle=False, seed=42)


@pytest.mark.parametrize(
    ("split", "name"), [("bogus", "bogus"), ("test[:5]", "test"), ("train+test", "test"), ("valid[:5%]", "valid")]
)
def test_unknown_splits_are_refused_by_name(split: str, name: str) -> None:
    message = f"data.split: {split!r} names the split {name!r}; the data has train"
    with pytest.raises(SettingsError) as caught:
        row_order(splits(10), split=split, shuffle=False, seed=42)
    assert str(caught.value) == message


@pytest.mark.parametrize("split", ["train[5:2]", "train[100:]", "train[0:0]", "train[:0%]"])
def test_an_empty_selection_is_refused_with_counts(split: str) -> None:
    with pytest.raises(InputError) as caught:
        row_order(splits(10), split=split, shuffle=True, seed=42)
    assert str(caught.value) == f"data.split {split!r} selects 0 of 10 rows"


def test_an_input_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"^data\.path holds no rows$"):
        row_order(splits(0), split=None, shuffle=True, seed=42)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"data\.shuffle_seed: expected an integer >= 0, found -1"):
        row_order(splits(10), split=None, shuffle=True, seed=-1)


TWO = {"train": range(4), "test": range(4, 10)}


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("test", [4, 5, 6, 7, 8, 9]),
        ("test[1:3]", [5, 6]),
        ("test[:50%]", [4, 5, 6]),
        ("test[-1:]+train[:1]", [9, 0]),
    ],
)
def test_several_splits_are_told_apart(split: str | None, expected: list[int]) -> None:
    assert list(row_order(TWO, split=split, shuffle=False, seed=0)) == expected


def test_without_a_split_the_only_one_is_taken_and_of_several_one_must_be_named() -> None:
    assert row_order({"validation": range(2)}, split=None, shuffle=False, seed=0) == range(2)
    with pytest.raises(SettingsError, match=r"data\.split: null, and the data has no split 'train'; it has a, b"):
        row_order({"a": range(2), "b": range(2, 4)}, split=None, shuffle=False, seed=0)


def test_plain_splits_of_json_load_neither_datasets_nor_transformers() -> None:
    code = (
        "import sys, dspark_cache.row_order as r; "
        "r.row_order({'train': range(3)}, split='train[1:]', shuffle=False, seed=0); "
        "print([m for m in ('datasets', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
