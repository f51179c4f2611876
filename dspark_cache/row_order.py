"""Which rows are used, in which order: splits, slices and the seeded shuffle.

Stands between rows and conversations in the tokenize stage; the rules are the reference's.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from dspark_cache.errors import InputError, SettingsError
from dspark_cache.rows import TRAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DIGIT_SLICE: Final = re.compile(r"([\w.]+)\[(\d*):(\d*)\]", re.ASCII)


def row_order(splits: Mapping[str, range], *, split: str | None, shuffle: bool, seed: int) -> Sequence[int]:
    """Return the indices of the rows to use, in order.

    A slice in plain digits (`train[2:9]`) is taken after the shuffle and clamped to the rows there are; any other
    split (`train[:95%]`, `train[-3:]`, `train[:2]+train[5:]`) selects before it, by the rules of `datasets`.

    Args:
        splits: Split to the range of its rows.
        split: `data.split`; None is `train`, or the only split there is.
        shuffle: Whether to shuffle.
        seed: Seed of the shuffle.

    Raises:
        SettingsError: `data.split` is malformed or names a split that the data does not have; negative seed.
        InputError: No row is left.
    """
    if seed < 0:
        raise SettingsError(f"data.shuffle_seed: expected an integer >= 0, found {seed}")
    after = _DIGIT_SLICE.fullmatch(split) if split is not None else None
    if after is not None:
        _check_split_name(after[1], split, splits)
        rows: Sequence[int] = splits[after[1]]
    else:
        rows = _select(splits, split)
    selected = len(rows)
    if shuffle:
        rows = _shuffled(rows, seed)
    if after is not None:
        rows = rows[slice(*(int(bound) if bound else None for bound in after.groups()[1:]))]
    if not rows:
        total = sum(map(len, splits.values()))
        named = f"data.split {split!r} selects 0 of {selected or total} rows" if total else "data.path holds no rows"
        raise InputError(named)
    return rows


def _check_split_name(name: str, split: str | None, splits: Mapping[str, range]) -> None:
    if name not in splits:
        raise SettingsError(f"data.split: {split!r} names the split {name!r}; the data has {', '.join(splits)}")


def _shuffled(rows: Sequence[int], seed: int) -> list[int]:
    import numpy as np

    order: list[int] = np.random.default_rng(seed).permutation(len(rows)).tolist()
    return [rows[position] for position in order]


def _select(splits: Mapping[str, range], split: str | None) -> Sequence[int]:
    """Return the rows of a split that is no slice in plain digits."""
    if split is None:
        if TRAIN not in splits and len(splits) != 1:
            raise SettingsError(f"data.split: null, and the data has no split {TRAIN!r}; it has {', '.join(splits)}")
        return splits[TRAIN if TRAIN in splits else next(iter(splits))]
    if split in splits:
        return splits[split]
    from datasets import ReadInstruction

    for name in re.findall(r"(?:^|\+)\s*(\w[\w.]*)", split):
        _check_split_name(name, split, splits)
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise SettingsError(
            f"data.split: {split!r} is no split; write {TRAIN}, {TRAIN}[2:9], {TRAIN}[:95%] or a sum of such parts"
        ) from error
    ranges = [splits[part.splitname][part.from_ : part.to] for part in parts]
    return ranges[0] if len(ranges) == 1 else [row for rows in ranges for row in rows]
