"""Blocks in scratch: the plan a resume follows, batches, records that are parsed, and the folder that holds them."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import socket
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from itertools import chain, product
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from dspark_cache.blocks import (
    Block,
    BlockStore,
    PlannedBlock,
    Slice,
    block_name,
    cut_batches,
    identity_hash,
    lock_files,
    lock_folder,
    longest_first,
    plan_blocks,
    scratch_folders,
)
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, LockedError
from dspark_cache.files import FileLock, ensure_unlocked
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.settings import is_slice
from dspark_cache.shard_file import file_bytes, write_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

IDENTITY = {
    "capture_version": 1,
    "weights": "sha256:0",
    "hidden_size": 4,
    "target_layer_ids": [-1, 3],
    "compute_dtype": "fp32",
    "attn_implementation": None,
}


def key(number: int) -> str:
    return f"{number:032x}"


def planned(*samples: int) -> PlannedBlock:
    return PlannedBlock(tuple(map(key, samples)))


def block(samples: Sequence[int] = (1, 2), **values: Any) -> Block:
    """Return a record; of a block without dropped samples unless it is told a name."""
    lengths = values.pop("lengths", tuple(2 + position for position in range(len(samples))))
    record = {"num_bytes": 0, "sha256": "0" * 64, "dropped": {}, "environment": {}, **values}
    return Block(**{"name": planned(*samples).name, **record}, samples=tuple(map(key, samples)), lengths=tuple(lengths))


# Names


def test_a_block_is_named_by_its_samples_in_their_order() -> None:
    """A literal: under another name all blocks that are there would be captured anew."""
    assert planned(1, 2).name == block_name([key(1), key(2)]) == "block-751e52c6956c49c4"
    names = {planned(*samples).name for samples in ((), (1,), (2,), (1, 2), (2, 1), (1, 2, 3))}
    assert len(names) == 6


# The plan


def plan(
    wanted: dict[int, int], finished: Sequence[Block] = (), earlier: Sequence[PlannedBlock] = (), block_bytes: int = 40
) -> tuple[list[PlannedBlock], list[PlannedBlock]]:
    """Plan with 10 bytes a token."""
    return plan_blocks(
        {key(number): length for number, length in wanted.items()},
        {each.name: each for each in finished},
        earlier,
        bytes_per_token=10,
        block_bytes=block_bytes,
    )


@pytest.mark.parametrize(
    ("wanted", "finished", "earlier", "expected_plan", "expected_due"),
    [
        # nothing to do
        ({}, [], [], [], []),
        # cut in the order of the samples where the next one does not fit
        (
            {3: 2, 1: 2, 2: 1},
            [],
            [],
            [planned(3, 1), planned(2)],
            [planned(3, 1), planned(2)],
        ),
        # a huge sample is alone, also between small ones
        (
            {1: 1, 2: 9, 3: 1},
            [],
            [],
            [planned(1), planned(2), planned(3)],
            [planned(1), planned(2), planned(3)],
        ),
        # finished blocks of the plan stay, everything is there
        ({1: 2, 2: 2}, [block([1, 2])], [planned(1, 2)], [planned(1, 2)], []),
        # finished blocks count without a plan
        ({1: 2, 2: 2, 3: 2}, [block([1, 2])], [], [planned(3)], [planned(3)]),
        # a dropped sample is done with
        ({1: 2, 2: 2}, [block([1], dropped={key(2): "x"})], [], [], []),
        # and its block is finished under the name of its plan, which also names the sample that was dropped
        (
            {1: 2, 2: 2},
            [block([1], name=planned(1, 2).name, dropped={key(2): "x"})],
            [planned(1, 2)],
            [planned(1, 2)],
            [],
        ),
        # an earlier unfinished block stays as it was, though its samples would be cut otherwise
        (
            {1: 1, 2: 1, 3: 1, 4: 1},
            [],
            [planned(2), planned(3)],
            [planned(2), planned(3), planned(1, 4)],
            [planned(2), planned(3), planned(1, 4)],
        ),
        # but not if one of its samples is no longer wanted
        ({2: 1}, [], [planned(1, 2)], [planned(2)], [planned(2)]),
        # nor if one of them was captured elsewhere
        ({1: 1, 2: 1}, [block([1])], [planned(1, 2)], [planned(2)], [planned(2)]),
        (
            {1: 1, 2: 1},
            [block([], name=planned(1).name, dropped={key(1): "x"})],
            [planned(1, 2)],
            [planned(2)],
            [planned(2)],
        ),
    ],
)
def test_the_plan_of_blocks(
    wanted: dict[int, int],
    finished: list[Block],
    earlier: list[PlannedBlock],
    expected_plan: list[PlannedBlock],
    expected_due: list[PlannedBlock],
) -> None:
    assert plan(wanted, finished, earlier) == (expected_plan, expected_due)


@pytest.mark.parametrize(("size", "expected"), [(39, [(1,), (2,)]), (40, [(1, 2)]), (41, [(1, 2)])])
def test_a_block_may_be_exactly_full(size: int, expected: list[tuple[int, ...]]) -> None:
    _, due = plan({1: 2, 2: 2}, block_bytes=size)
    assert [each.samples for each in due] == [tuple(map(key, samples)) for samples in expected]


def test_a_resume_makes_the_blocks_that_an_undisturbed_run_makes() -> None:
    lengths = {number: 1 + number % 3 for number in range(12)}
    whole, due = plan(lengths)
    for done in range(len(due) + 1):
        finished = [dataclasses.replace(block(), name=b.name, samples=b.samples) for b in due[:done]]
        assert plan(lengths, finished, whole) == (whole, due[done:])


@settings(deadline=None)
@given(st.data())
def test_every_wanted_sample_is_in_exactly_one_block(data: st.DataObject) -> None:
    numbers = st.integers(0, 12)
    wanted = data.draw(st.dictionaries(numbers, st.integers(1, 6)))
    groups = data.draw(st.dictionaries(numbers, st.integers(0, 3)))
    blocks = [[number for number in groups if groups[number] == group] for group in sorted(set(groups.values()))]
    count = data.draw(st.integers(0, len(blocks)))
    finished = [block(group) for group in blocks[:count]]
    earlier = [planned(*group) for group in blocks]
    size = data.draw(st.integers(1, 80))
    whole, due = plan(wanted, finished, earlier, size)
    done = [sample for each in finished for sample in each.samples]
    todo = [sample for each in due for sample in each.samples]
    assert sorted(todo + [sample for sample in done if sample in set(map(key, wanted))]) == sorted(map(key, wanted))
    names = [each.name for each in whole]
    assert len(set(names)) == len(names)
    assert {each.name for each in due}.isdisjoint(each.name for each in finished)
    assert all(each in whole for each in due)
    for each in due:
        tokens = sum(wanted[int(sample, 16)] for sample in each.samples)
        assert each in earlier or len(each.samples) == 1 or tokens * 10 <= size


# Slices


@pytest.mark.parametrize(("text", "number", "count"), [("1/1", 1, 1), ("3/16", 3, 16), ("16/16", 16, 16)])
def test_a_slice_is_read_from_its_text(text: str, number: int, count: int) -> None:
    assert Slice.parse(text) == Slice(number, count)
    assert Slice.parse(text).lock_name == f"lock-slice-{number}-of-{count}"


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "1/2/3", "a/2", "1/b", "1.5/2"])
def test_a_text_that_is_no_slice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(invalid literal for int|not enough values|too many values)"):
        Slice.parse(text)


@pytest.mark.parametrize(("text", "message"), [("0/2", "0 is not one of 1 to 2"), ("3/2", "3 is not one of 1 to 2")])
def test_a_slice_out_of_range_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Slice.parse(text)


@pytest.mark.parametrize("text", [f"{number}/{count}" for number in range(4) for count in range(4)] + ["x", "1/2/3"])
def test_settings_accept_what_is_a_slice_and_nothing_else(text: str) -> None:
    with suppress(ValueError):
        Slice.parse(text)
        assert is_slice(text)
        return
    assert not is_slice(text)


NAMES = [planned(number).name for number in range(5)]
COUNTS = (1, 2, 3, 6)


def slices(tokens: dict[str, int], count: int) -> list[set[str]]:
    return [Slice(number, count).choose(tokens) for number in range(1, count + 1)]


def loads(tokens: dict[str, int], parts: Iterable[Iterable[str]]) -> list[int]:
    return [sum(tokens[name] for name in part) for part in parts]


@cache
def least_largest_load(lengths: tuple[int, ...], count: int) -> int:
    """Return how much the fullest of `count` slices has at best, by trying every division."""
    divisions = product(range(count), repeat=len(lengths))
    return min(
        max(sum(n for n, owner in zip(lengths, owners, strict=True) if owner == part) for part in range(count))
        for owners in divisions
    )


@pytest.mark.parametrize("count", COUNTS)
def test_slices_divide_every_plan(count: int) -> None:
    for size in range(6):
        for lengths in product((1, 2, 5), repeat=size):
            tokens = dict(zip(NAMES, lengths, strict=False))
            parts = slices(tokens, count)
            assert sorted(chain.from_iterable(parts)) == sorted(tokens)
            # No slice has so much that another one would have less even with its smallest block on top.
            fullest = loads(tokens, parts)
            for part, load in zip(parts, fullest, strict=True):
                assert load - min((tokens[name] for name in part), default=0) <= min(fullest)
            assert parts == slices(dict(reversed(tokens.items())), count)


@pytest.mark.parametrize("count", COUNTS[:3])
def test_the_fullest_slice_is_at_most_a_third_fuller_than_at_best(count: int) -> None:
    """Graham's bound for the longest first: 4/3 - 1/(3 * count)."""
    for lengths in product((2, 3, 5), repeat=5):
        tokens = dict(zip(NAMES, lengths, strict=True))
        best = least_largest_load(tuple(sorted(lengths)), count)
        assert 3 * count * max(loads(tokens, slices(tokens, count))) <= (4 * count - 1) * best


def test_which_blocks_a_slice_has() -> None:
    """A literal: slices of another version would overlap with those of this one."""
    a, b, c, d = sorted(NAMES[:4])
    assert slices({a: 5, b: 5, c: 4, d: 3}, 2) == [{a, c}, {b, d}]
    assert slices({d: 5, c: 5, b: 4, a: 3}, 2) == [{c, b}, {d, a}]
    assert slices({a: 1, b: 7, c: 1, d: 1}, 3) == [{b}, {a, d}, {c}]
    assert longest_first({a: 1, d: 7, c: 1, b: 2}) == [d, b, a, c]


# Batches


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        ([], 8, []),
        ([3], 8, [[0]]),
        ([1, 4, 2, 4], 8, [[1, 3], [2, 0]]),  # longest first, width times rows
        ([9, 9, 1], 8, [[0], [1], [2]]),  # longer than the budget: alone
        ([2, 2, 2, 2, 2], 4, [[0, 1], [2, 3], [4]]),
        ([4, 2], 7, [[0], [1]]),  # 2 rows of width 4 are 8
        ([4, 2], 8, [[0, 1]]),
    ],
)
def test_batches(lengths: list[int], max_tokens: int, expected: list[list[int]]) -> None:
    assert cut_batches(lengths, max_tokens) == expected


@pytest.mark.parametrize("max_tokens", [1, 5, 12, 100])
@pytest.mark.parametrize("lengths", [*product((1, 3, 7), repeat=3), tuple(range(1, 12)), tuple(range(12, 1, -1))])
def test_batches_hold_every_sample_once_within_the_budget(lengths: tuple[int, ...], max_tokens: int) -> None:
    batches = cut_batches(lengths, max_tokens)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens
    backwards = cut_batches(lengths[::-1], max_tokens)
    widths = [[lengths[index] for index in batch] for batch in batches]
    assert [[lengths[::-1][index] for index in batch] for batch in backwards] == widths


# Records


def test_a_record_round_trips() -> None:
    written = block(num_bytes=7, dropped={key(9): "layer 1 is not finite"}, environment={"threads": 2})
    assert written.num_tokens == 5
    assert Block.parse(json.loads(json.dumps(written.as_json())), name="x") == written


BLOCK_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"name": "block-1"}, "name: expected block-<16 hexadecimal digits>, found 'block-1'"),
    ({"name": "block-000000"}, "name: expected block-<16 hexadecimal digits>, found 'block-000000'"),
    ({"name": f"block-{0:015x}A"}, "name: expected block-<16 hexadecimal digits>, found 'block-000000000000000A'"),
    ({"name": f"block-{0:017x}"}, "name: expected block-<16 hexadecimal digits>, found 'block-00000000000000000'"),
    ({"name": f"../block-{0:016x}"}, "block-<16 hexadecimal digits>, found '../block-0000000000000000'"),
    ({"name": None}, "name: expected a string, found None; name: expected block-<16 hexadecimal digits>, found ''"),
    ({"samples": [key(1)]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"samples": [key(1), "x"]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"samples": [key(1), [key(2)]]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"samples": [key(1), key(2).upper()[:-1] + "F"]}, "expected as many sample keys as positive lengths"),
    ({"lengths": [2, 0]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"lengths": [2, True]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"lengths": [2, 3.0]}, "samples and lengths: expected as many sample keys as positive lengths"),
    ({"bytes": -1}, "bytes: expected an integer >= 0, found -1"),
    ({"sha256": "0"}, "sha256: expected 64 hexadecimal digits, found '0'"),
    ({"dropped": {"x": "why"}}, "dropped: expected sample keys, with the reason of each"),
    ({"dropped": {"0" * 32: 5}}, "dropped: expected sample keys, with the reason of each"),
    ({"dropped": []}, "dropped: expected an object, found []"),
    ({"environment": None}, "environment: expected an object, found None"),
]


@pytest.mark.parametrize(("changes", "message"), BLOCK_FAULTS)
def test_a_fault_of_a_record_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CacheFormatError) as error:
        Block.parse({**block().as_json(), **changes}, name="block.json")
    assert str(error.value).startswith("block.json: ")
    assert str(error.value).endswith(message)


def test_all_faults_of_a_record_come_at_once() -> None:
    with pytest.raises(CacheFormatError) as error:
        Block.parse({"name": 1, "samples": [], "bytes": "x"}, name="block.json")
    assert str(error.value) == (
        "block.json: missing required keys ['dropped', 'environment', 'lengths', 'sha256']; "
        "name: expected a string, found 1; bytes: expected an integer >= 0, found 'x'; "
        "name: expected block-<16 hexadecimal digits>, found ''"
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(key(1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just(key(2)), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*block().as_json(), "x"]), JSON))
def test_nothing_but_a_format_error_comes_out_of_the_parser(changes: dict[str, Any]) -> None:
    for values in (changes, {**block().as_json(), **changes}):
        with suppress(CacheFormatError):
            assert Block.parse(values, name="x").as_json() == {key: values[key] for key in block().as_json()}


# The folder


B0, B1, B7 = planned(1, 2).name, planned(3, 4).name, planned(5, 6, 7).name
SAMPLES = {B0: (1, 2), B1: (3, 4), B7: (5, 6, 7)}


def finish(store: BlockStore, name: str) -> Block:
    """Write a small block as capture does."""
    record = block(SAMPLES[name])
    tensors = {
        HIDDEN: torch.ones(record.num_tokens, 8),
        LAST_HIDDEN: torch.ones(record.num_tokens, 4),
        SAMPLE_OFFSETS: torch.tensor([0, *record.lengths]).cumsum(0),
    }
    store.path(name).touch()
    digest = write_tensors(store.path(name), tensors)
    size = file_bytes(
        feature_specs(record.num_tokens, len(record.samples), StatesForm(dtype="fp32", hidden_dim=8, last_dim=4))
    )
    record = dataclasses.replace(record, num_bytes=size, sha256=digest)
    store.record(record)
    return record


def small_file() -> bytes:
    """A sound safetensors file."""
    return save({"x": torch.ones(3)})


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    store = BlockStore(tmp_path / "scratch", IDENTITY)
    with store.lock():
        store.prepare()
    return store


def test_the_folder_s_name_is_the_hash_of_the_identity(tmp_path: Path) -> None:
    """A literal: another hash would capture everything anew."""
    assert identity_hash(IDENTITY) == "c38eb47d58551a66"
    assert identity_hash(dict(reversed(IDENTITY.items()))) == identity_hash(IDENTITY)
    for name in IDENTITY:
        assert identity_hash({**IDENTITY, name: "x"}) != identity_hash(IDENTITY), name
    folder = BlockStore(tmp_path, IDENTITY).folder
    assert folder == tmp_path / "capture-c38eb47d58551a66"
    assert not folder.exists()


def test_finished_blocks_are_found_and_opened(store: BlockStore) -> None:
    blocks = {name: finish(store, name) for name in (B0, B7)}
    assert store.finished_blocks() == (blocks, [])
    assert store.open(blocks[B7]).read_rows(SAMPLE_OFFSETS, 0, 4).tolist() == [0, 2, 5, 9]


def test_a_block_without_a_record_is_not_finished(store: BlockStore) -> None:
    finish(store, B0)
    (store.folder / f"{B0}.json").unlink()
    assert store.finished_blocks() == ({}, [])


@pytest.mark.parametrize(
    ("doctor", "reason"),
    [
        (lambda path: path.unlink(), "no such file: {path}"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "{path} has {less} bytes, its header asks for {size}"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "{path} has {more} bytes, its header asks for"),
        (lambda path: path.write_bytes(b""), "{path} ends at byte 0, 8 bytes are missing"),
        (lambda path: path.write_bytes(small_file()), "{path} has {short} bytes, its record says {size}"),
    ],
)
def test_a_file_that_is_not_what_its_record_says_is_refused(store: BlockStore, doctor: Any, reason: str) -> None:
    good, bad = finish(store, B0), finish(store, B1)
    path = store.path(B1)
    doctor(path)
    size = bad.num_bytes
    blocks, (refused,) = store.finished_blocks()
    assert blocks == {B0: good}
    assert refused.startswith(
        reason.format(path=path, size=size, less=size - 1, more=size + 1, short=len(small_file()))
    )


def test_a_file_of_another_identity_is_refused(store: BlockStore) -> None:
    """Of the same size, so that only the header tells."""
    finish(store, B0)
    other = BlockStore(store.folder.parent, {**IDENTITY, "target_layer_ids": [0], "hidden_size": 6})
    other.folder.mkdir()
    for name in (f"{B0}.json", f"{B0}.safetensors"):
        (store.folder / name).rename(other.folder / name)
    blocks, (refused,) = other.finished_blocks()
    assert blocks == {}
    assert refused == (
        f"{other.path(B0)}: {HIDDEN}: expected F32[5, 6], found F32[5, 8]; "
        f"{LAST_HIDDEN}: expected F32[5, 6], found F32[5, 4]"
    )


def test_a_malformed_record_is_refused(store: BlockStore) -> None:
    finish(store, B0)
    path = store.folder / f"{B0}.json"
    path.write_text("{")
    _, (refused,) = store.finished_blocks()
    assert refused.startswith(f"{path} is not valid JSON: ")
    path.write_text("{}")
    assert store.finished_blocks()[1][0].startswith(f"{path}: missing required keys ['bytes',")


def test_a_record_counts_under_the_name_of_its_file(store: BlockStore) -> None:
    finish(store, B0)
    (store.folder / f"{B0}.json").rename(store.folder / f"{B7}.json")
    assert store.finished_blocks() == ({}, [f"no such file: {store.path(B7)}"])


def test_preparing_removes_what_a_killed_run_left_half_written(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, IDENTITY)
    with store.lock():
        assert store.prepare() == []
        kept = finish(store, B0)
        half = [f".tmp-{B1}.safetensors-a1", ".tmp-plan.json-b2"]
        for name in half:
            (store.folder / name).write_text("half")
        assert store.prepare() == half
    assert store.finished_blocks() == ({B0: kept}, [])
    names = [f"{B0}.json", f"{B0}.safetensors", "identity.json", "lock"]
    assert sorted(path.name for path in store.folder.iterdir()) == names
    assert json.loads((store.folder / "identity.json").read_text()) == IDENTITY


def test_a_slice_leaves_what_another_one_may_be_writing(store: BlockStore) -> None:
    half = store.folder / f".tmp-{B1}.safetensors-a1"
    half.write_text("half")
    (store.folder / "identity.json").unlink()
    assert store.prepare(is_alone=False) == []
    assert half.exists()
    assert json.loads((store.folder / "identity.json").read_text()) == IDENTITY


def test_a_block_that_the_folder_does_not_list_yet_is_found_by_its_name(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [finish(store, B0), finish(store, B1)]
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: iter([store.folder / f"{B1}.json"]))
    assert store.finished_blocks() == ({B1: blocks[1]}, [])
    plan = [planned(*SAMPLES[name]) for name in (B0, B1, B7)]
    assert store.finished_blocks(plan) == ({block.name: block for block in sorted(blocks, key=lambda b: b.name)}, [])
    assert list(store.finished_blocks(plan)[0]) == sorted((B0, B1))


def test_removed_blocks_are_gone_with_their_records(store: BlockStore) -> None:
    blocks = [finish(store, B0), finish(store, B1)]
    store.remove_blocks(blocks[:1])
    store.remove_blocks(blocks[:1])
    assert store.finished_blocks() == ({B1: blocks[1]}, [])
    assert not store.path(B0).exists()
    with pytest.raises(CacheNotFoundError):
        store.open(blocks[0])


def test_the_plan_is_read_as_it_was_written(store: BlockStore) -> None:
    assert store.read_plan() == []
    written = [planned(2, 1), planned(3)]
    store.write_plan(written)
    assert store.read_plan() == written
    assert json.loads((store.folder / "plan.json").read_text()) == {"blocks": [[key(2), key(1)], [key(3)]]}


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"blocks": 5}', '{"blocks": [5]}', '{"blocks": [[5]]}', '{"blocks": [{"name": "x"}]}']
)
def test_an_unusable_plan_is_none(store: BlockStore, content: str) -> None:
    (store.folder / "plan.json").write_text(content)
    assert store.read_plan() == []


@pytest.mark.parametrize("item", [{"name": "block-000000", "samples": [key(1)]}, {key(1): 2}, [key(1), "x"], key(1)])
def test_a_plan_of_anything_but_lists_of_keys_is_none(store: BlockStore, item: Any) -> None:
    """Also one of an earlier version, and one that is right apart from one block."""
    (store.folder / "plan.json").write_text(json.dumps({"blocks": [[key(1)], item]}))
    assert store.read_plan() == []


def test_scratch_folders_come_with_their_sizes(store: BlockStore) -> None:
    other = store.folder.with_name("capture-0000")
    other.mkdir()
    (other / f"{B0}.safetensors").write_bytes(bytes(100))
    (store.folder.parent / "capture-file").write_text("no folder")
    (store.folder.parent / "fingerprints.json").write_text("{}")
    size = sum(path.stat().st_size for path in store.folder.iterdir())
    assert scratch_folders(store.folder.parent) == [(other, 100), (store.folder, size)]
    assert scratch_folders(store.folder / "none") == []


# Locks

ONE, TWO, OTHER = Slice(1, 2), Slice(2, 2), Slice(1, 3)
LOCKS: dict[str, Callable[[BlockStore], AbstractContextManager[object]]] = {
    "run": lambda store: store.lock(),
    "slice 1/2": lambda store: store.slice_lock(ONE),
    "slice 2/2": lambda store: store.slice_lock(TWO),
    "slice 1/3": lambda store: store.slice_lock(OTHER),
    "clean": lambda store: lock_folder(store.folder),
}
HELD: dict[str, tuple[str, Callable[[BlockStore], AbstractContextManager[object]]]] = {
    "run": ("lock", LOCKS["run"]),
    "slice 1/2": ("lock-slice-1-of-2", LOCKS["slice 1/2"]),
    "slice 1/3": ("lock-slice-1-of-3", LOCKS["slice 1/3"]),
    "rank of a run": ("lock-rank-7", lambda store: store.rank_lock(None, 7)),
    "rank of slice 1/2": ("lock-slice-1-of-2-rank-7", lambda store: store.rank_lock(ONE, 7)),
}
"""The file that each holder locks, and how."""
BESIDE = {
    ("slice 1/2", "slice 2/2"),
    ("rank of slice 1/2", "slice 1/2"),  # its new rank 7 is refused
    ("rank of slice 1/2", "slice 2/2"),
}
"""Who may write while whom holds a lock."""
CASES = [(held, asker) for held in HELD for asker in LOCKS]


@contextmanager
def holder(lock: AbstractContextManager[object]) -> Iterator[int]:
    """Fork a process that holds a lock until the block is left; then it ends without releasing it."""
    tell, told = Pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException), lock:
            told.send("held")
            told.recv()
        os._exit(0)
    try:
        assert tell.recv() == "held"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tell.close()
        told.close()


def refusal(store: BlockStore, asker: str) -> str | None:
    """Ask for a lock; return why it is refused."""
    try:
        with LOCKS[asker](store):
            return None
    except LockedError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("held", HELD)
def test_who_writes_beside_whom(store: BlockStore, held: str) -> None:
    """A live holder, which is then killed: whoever comes next takes over."""
    name, lock = HELD[held]
    with holder(lock(store)) as pid:
        expected = (
            f"{store.folder} is being written by process {pid} on host {socket.gethostname()} "
            f"(lock {store.folder / name})"
        )
        for asker in LOCKS:
            assert refusal(store, asker) == (None if (held, asker) in BESIDE else expected), asker
    assert json.loads((store.folder / name).read_text())["pid"] == pid
    for asker in LOCKS:
        assert refusal(store, asker) is None, asker


@pytest.mark.parametrize(("held", "asker"), CASES)
def test_whoever_is_on_another_host_is_never_taken_over(store: BlockStore, held: str, asker: str) -> None:
    path = store.folder / HELD[held][0]
    path.write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    expected = (
        f"{store.folder} is being written by process 5 on host gone.invalid (lock {path}); "
        "if that host is gone for good: dspark-cache clean --break-lock"
    )
    for _ in range(2):
        assert refusal(store, asker) == (None if (held, asker) in BESIDE else expected)
    assert json.loads(path.read_text())["host"] == "gone.invalid"


def test_who_is_refused_holds_nothing_afterwards(store: BlockStore) -> None:
    for held, asker in CASES:
        with HELD[held][1](store):
            refusal(store, asker)
    for path in lock_files(store.folder):
        assert path.read_bytes() == b"", path
        with FileLock(path):
            pass


def test_who_only_asks_at_the_same_time_is_not_in_the_way(store: BlockStore) -> None:
    """What asks opens the lock shared; two slices may look at a run's lock at once."""
    for path in (store.folder / "lock", store.folder / "lock-slice-1-of-3"):
        path.touch()
        with path.open() as asking:
            fcntl.flock(asking, fcntl.LOCK_SH)
            assert refusal(store, "slice 1/2") is None
            ensure_unlocked(path)


def test_all_slices_of_a_division_and_their_ranks_hold_locks_of_their_own(store: BlockStore) -> None:
    with ExitStack() as stack:
        for part in (ONE, TWO):
            stack.enter_context(store.slice_lock(part))
            for rank in range(3):
                stack.enter_context(store.rank_lock(part, rank))
        for part in (ONE, TWO):
            for rank in range(3):
                with pytest.raises(LockedError), store.rank_lock(part, rank):
                    pass
    with store.lock(), store.rank_lock(None, 0), store.rank_lock(None, 1):
        pass


def test_which_files_are_locks(store: BlockStore) -> None:
    locks = ["lock", *(name for name, _ in HELD.values() if name != "lock")]
    for name in (*locks, "lock.json", "lock-", "lock-slice-1", "lock-rank-", "lock-rank-1-of-2", "locksmith", "a-lock"):
        (store.folder / name).touch()
    assert [path.name for path in lock_files(store.folder)] == sorted(locks)
    assert lock_files(store.folder / "none") == []


def test_asking_makes_and_changes_nothing(tmp_path: Path) -> None:
    ensure_unlocked(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lock").write_text("junk")
    ensure_unlocked(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == "junk"
    with FileLock(tmp_path / "lock"):
        pass
    (tmp_path / "link").symlink_to("lock")
    with pytest.raises(OSError, match="symbolic link"):
        ensure_unlocked(tmp_path / "link")
