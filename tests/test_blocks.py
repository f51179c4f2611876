"""Blocks in scratch: the plan a resume follows, batches, records that are parsed, and the folder that holds them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from contextlib import suppress
from itertools import product
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
    cut_batches,
    identity_hash,
    plan_blocks,
    scratch_folders,
)
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, LockedError
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shard_file import file_bytes, write_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence
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


def block(name: str = "block-000000", samples: Sequence[int] = (1, 2), **values: Any) -> Block:
    lengths = values.pop("lengths", tuple(2 + position for position in range(len(samples))))
    record = {"num_bytes": 0, "sha256": "0" * 64, "dropped": {}, "environment": {}, **values}
    return Block(name=name, samples=tuple(map(key, samples)), lengths=tuple(lengths), **record)


def planned(name: str, *samples: int) -> PlannedBlock:
    return PlannedBlock(name=name, samples=tuple(map(key, samples)))


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


B0, B1, B2, B7, B8 = (f"block-{number:06d}" for number in (0, 1, 2, 7, 8))


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
            [planned(B0, 3, 1), planned(B1, 2)],
            [planned(B0, 3, 1), planned(B1, 2)],
        ),
        # a huge sample is alone, also between small ones
        (
            {1: 1, 2: 9, 3: 1},
            [],
            [],
            [planned(B0, 1), planned(B1, 2), planned(B2, 3)],
            [planned(B0, 1), planned(B1, 2), planned(B2, 3)],
        ),
        # finished blocks of the plan stay, everything is there
        ({1: 2, 2: 2}, [block(B0, [1, 2])], [planned(B0, 1, 2)], [planned(B0, 1, 2)], []),
        # finished blocks count without a plan, and their names are taken
        ({1: 2, 2: 2, 3: 2}, [block(B7, [1, 2])], [], [planned(B8, 3)], [planned(B8, 3)]),
        # a dropped sample is done with
        ({1: 2, 2: 2}, [block(B0, [1], dropped={key(2): "x"})], [], [], []),
        # an earlier unfinished block stays as it was, though its samples would be cut otherwise
        (
            {1: 1, 2: 1, 3: 1, 4: 1},
            [],
            [planned(B1, 2), planned(B2, 3)],
            [planned(B1, 2), planned(B2, 3), planned("block-000003", 1, 4)],
            [planned(B1, 2), planned(B2, 3), planned("block-000003", 1, 4)],
        ),
        # but not if one of its samples is no longer wanted
        ({2: 1}, [], [planned(B0, 1, 2)], [planned(B0, 2)], [planned(B0, 2)]),
        # nor if one of them was captured elsewhere
        (
            {1: 1, 2: 1},
            [block(B7, [1])],
            [planned(B0, 1, 2)],
            [planned(B8, 2)],
            [planned(B8, 2)],
        ),
        (
            {1: 1, 2: 1},
            [block(B7, [], dropped={key(1): "x"})],
            [planned(B0, 1, 2)],
            [planned(B8, 2)],
            [planned(B8, 2)],
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
        finished = [dataclasses.replace(block(b.name, []), samples=b.samples) for b in due[:done]]
        assert plan(lengths, finished, whole) == (whole, due[done:])


@settings(deadline=None)
@given(st.data())
def test_every_wanted_sample_is_in_exactly_one_block(data: st.DataObject) -> None:
    numbers = st.integers(0, 12)
    wanted = data.draw(st.dictionaries(numbers, st.integers(1, 6)))
    groups = data.draw(st.dictionaries(numbers, st.integers(0, 3)))
    blocks = [
        (f"block-{group:06d}", [number for number in groups if groups[number] == group])
        for group in sorted(set(groups.values()))
    ]
    count = data.draw(st.integers(0, len(blocks)))
    finished = [block(name, group) for name, group in blocks[:count]]
    earlier = [planned(name, *group) for name, group in blocks]
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
    ({"name": "block-1"}, "name: expected block-NNNNNN, found 'block-1'"),
    ({"name": "../block-000000"}, "name: expected block-NNNNNN, found '../block-000000'"),
    ({"name": None}, "name: expected a string, found None; name: expected block-NNNNNN, found ''"),
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
        "name: expected block-NNNNNN, found ''"
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


def finish(store: BlockStore, name: str, samples: Sequence[int] = (1, 2)) -> Block:
    """Write a small block as capture does."""
    record = block(name, samples)
    tensors = {
        HIDDEN: torch.ones(record.num_tokens, 8),
        LAST_HIDDEN: torch.ones(record.num_tokens, 4),
        SAMPLE_OFFSETS: torch.tensor([0, *record.lengths]).cumsum(0),
    }
    store.path(name).touch()
    digest = write_tensors(store.path(name), tensors)
    size = file_bytes(
        feature_specs(record.num_tokens, len(samples), StatesForm(dtype="fp32", hidden_dim=8, last_dim=4))
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
    blocks = {name: finish(store, name, samples) for name, samples in ((B0, [1]), (B7, [2, 3]))}
    assert store.finished_blocks() == (blocks, [])
    assert store.open(blocks[B7]).read_rows(SAMPLE_OFFSETS, 0, 3).tolist() == [0, 2, 5]


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
    good, bad = finish(store, B0, [3]), finish(store, B1)
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
        for name in (".tmp-block-000001.safetensors-a1", ".tmp-plan.json-b2"):
            (store.folder / name).write_text("half")
        assert store.prepare() == [".tmp-block-000001.safetensors-a1", ".tmp-plan.json-b2"]
    assert store.finished_blocks() == ({B0: kept}, [])
    names = [f"{B0}.json", f"{B0}.safetensors", "identity.json", "lock"]
    assert sorted(path.name for path in store.folder.iterdir()) == names
    assert json.loads((store.folder / "identity.json").read_text()) == IDENTITY


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
    written = [planned(B0, 2, 1), planned(B7, 3)]
    store.write_plan(written)
    assert store.read_plan() == written


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"blocks": 5}', '{"blocks": [5]}', '{"blocks": [{"name": "x"}]}'])
def test_an_unusable_plan_is_none(store: BlockStore, content: str) -> None:
    (store.folder / "plan.json").write_text(content)
    assert store.read_plan() == []


@pytest.mark.parametrize("item", [{"name": "x", "samples": [key(1)]}, {"name": 5, "samples": [key(1)]}])
def test_a_plan_with_odd_names_is_none(store: BlockStore, item: dict[str, Any]) -> None:
    (store.folder / "plan.json").write_text(json.dumps({"blocks": [item]}))
    assert plan({1: 1}, earlier=store.read_plan())[1] == [planned(B0, 1)]


def test_scratch_folders_come_with_their_sizes(store: BlockStore) -> None:
    other = store.folder.with_name("capture-0000")
    other.mkdir()
    (other / "block-000000.safetensors").write_bytes(bytes(100))
    (store.folder.parent / "capture-file").write_text("no folder")
    (store.folder.parent / "fingerprints.json").write_text("{}")
    size = sum(path.stat().st_size for path in store.folder.iterdir())
    assert scratch_folders(store.folder.parent) == [(other, 100), (store.folder, size)]
    assert scratch_folders(store.folder / "none") == []


def test_a_second_process_is_refused_while_the_lock_is_held(store: BlockStore) -> None:
    program = (
        "import json, sys; from pathlib import Path; from dspark_cache.blocks import BlockStore\n"
        "with BlockStore(Path(sys.argv[1]), json.loads(sys.argv[2])).lock(): print('mine', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(store.folder.parent), json.dumps(IDENTITY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(LockedError, match=f"is being written by process {holder.pid} on host "), store.lock():
            pass
        holder.communicate("\n")
    with store.lock():
        pass
