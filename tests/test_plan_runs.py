"""The plan of blocks on an exhaustive grid: runs that are wholly missing become blocks, which may then be shards."""

from __future__ import annotations

from functools import cache
from itertools import chain, product
from typing import TYPE_CHECKING

import pytest

from dspark_cache.blocks import Block, PlannedBlock, block_name, plan_blocks
from dspark_cache.shards import cut_by_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.conftest import Tally

TOKEN_BYTES = 10
LENGTHS = [lengths for count in range(6) for lengths in product((1, 2, 5), repeat=count)]
"""Tokens of each of 0 to 5 samples; 5 tokens are more than the small blocks hold."""
LIMITS = (20, 60)

Run = tuple[str, ...]


KEYS = [f"{number:032x}" for number in range(5)]


def wanted_of(lengths: Sequence[int]) -> dict[str, int]:
    return dict(zip(KEYS, lengths, strict=False))


def finished(block: PlannedBlock) -> Block:
    """Return a planned block as capture records it."""
    return Block(
        name=block.name, samples=block.samples, lengths=(), num_bytes=0, sha256="0" * 64, dropped={}, environment={}
    )


def plan(
    wanted: dict[str, int], done: Sequence[PlannedBlock], earlier: Sequence[PlannedBlock], limit: int, held_out: int
) -> tuple[list[PlannedBlock], list[PlannedBlock]]:
    return plan_blocks(
        wanted,
        {block.name: finished(block) for block in done},
        earlier,
        bytes_per_token=TOKEN_BYTES,
        block_bytes=limit,
        held_out=held_out,
    )


@cache
def fresh(lengths: tuple[int, ...], limit: int, held_out: int) -> list[PlannedBlock]:
    return plan(wanted_of(lengths), [], [], limit, held_out)[1]


def runs(wanted: dict[str, int], limit: int, held_out: int) -> list[Run]:
    """Return the samples of each ragged shard of what is held out, and of what is not."""
    keys, found = list(wanted), []
    for part in (keys[:held_out], keys[held_out:]):
        cut = cut_by_bytes((wanted[key] * TOKEN_BYTES for key in part), limit)
        found += [tuple(part[run.start : run.stop]) for run in cut]
    return found


def samples(blocks: Sequence[PlannedBlock]) -> list[str]:
    return list(chain.from_iterable(block.samples for block in blocks))


def growths(lengths: tuple[int, ...], limit: int, held_out: int) -> Iterator[tuple[list[PlannedBlock], int]]:
    """Yield every plan that an earlier run of the first samples made, and how many of its blocks it finished."""
    for count in range(len(lengths) + 1):
        earlier = fresh(lengths[:count], limit, held_out)
        for done in range(len(earlier) + 1):
            yield earlier, done


GRID = pytest.mark.parametrize(("limit", "held_out"), [*product(LIMITS, (0, 1, 2))])


@GRID
def test_a_fresh_plan_has_the_runs_of_both_parts_as_its_blocks(limit: int, held_out: int, tally: Tally) -> None:
    for lengths in LENGTHS:
        wanted = wanted_of(lengths)
        whole, due = plan(wanted, [], [], limit, held_out)
        assert whole == due
        assert [block.samples for block in due] == runs(wanted, limit, held_out)
        assert [block.name for block in due] == [block_name(block.samples) for block in due]
        assert len({block.name for block in due}) == len(due)
    tally("plans", len(LENGTHS))


@GRID
def test_every_wanted_sample_is_in_one_block_after_every_interrupted_and_grown_run(
    limit: int, held_out: int, tally: Tally
) -> None:
    plans = 0
    for lengths in LENGTHS:
        wanted = wanted_of(lengths)
        for earlier, done in growths(lengths, limit, held_out):
            whole, due = plan(wanted, earlier[:done], earlier, limit, held_out)
            assert sorted(samples(whole)) == sorted(wanted)
            assert whole[: len(earlier)] == earlier
            assert due == whole[done:]
            assert len({block.name for block in whole}) == len(whole)
            assert all(block.samples for block in whole)
            plans += 1
    tally("plans", plans)


@GRID
def test_new_blocks_hold_the_appended_samples_and_no_other(limit: int, held_out: int) -> None:
    for lengths in LENGTHS:
        wanted = wanted_of(lengths)
        for count in range(len(lengths) + 1):
            captured = fresh(lengths[:count], limit, held_out)
            for earlier in (captured, []):  # with a plan, and where it is lost
                _, due = plan(wanted, captured, earlier, limit, held_out)
                assert sorted(samples(due)) == sorted(wanted)[count:]


@GRID
def test_runs_of_which_nothing_is_there_become_blocks(limit: int, held_out: int, tally: Tally) -> None:
    """What else is missing is cut at the same size by itself, as full as it gets, and mixed with no other part."""
    whole = 0
    for lengths in LENGTHS:
        wanted = wanted_of(lengths)
        cut = runs(wanted, limit, held_out)
        for count in range(len(lengths) + 1):
            captured = fresh(lengths[:count], limit, held_out)
            _, new = plan(wanted, captured, captured, limit, held_out)
            there = set(KEYS[:count])
            missing = [run for run in cut if there.isdisjoint(run)]
            assert [block.samples for block in new if block.samples in cut] == missing
            rest = [key for run in cut for key in run if not there.isdisjoint(run) and key not in there]
            pieces = [block.samples for block in new if block.samples not in cut]
            assert pieces == runs({key: wanted[key] for key in rest}, limit, 0)
            held = set(KEYS[:held_out])
            assert all(len({key in held for key in block.samples}) == 1 for block in new)
            whole += len(missing)
    tally("whole runs", whole)
    assert whole


@GRID
def test_what_is_held_out_changes_nothing_that_was_captured(limit: int, held_out: int) -> None:
    for lengths, before in product(LENGTHS, (0, 1, 2)):
        wanted = wanted_of(lengths)
        captured = fresh(lengths, limit, before)
        assert plan(wanted, captured, captured, limit, held_out) == (captured, [])


def test_what_is_left_of_both_parts_is_not_mixed() -> None:
    done = PlannedBlock((KEYS[0], KEYS[2]))
    _, due = plan(wanted_of((1, 1, 1, 1)), [done], [done], 2 * TOKEN_BYTES, 2)
    assert [block.samples for block in due] == [(KEYS[1],), (KEYS[3],)]
