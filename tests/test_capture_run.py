"""What the process that coordinates a capture decides: processes, groups, threads, and what it tells the ranks."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dspark_cache.blocks import BlockStore, block_name
from dspark_cache.capture_rank import Work, compute_work
from dspark_cache.capture_run import _coordinate, _count_processes, _group_size, _num_threads
from dspark_cache.errors import CaptureError, SettingsError
from dspark_cache.ranks import Peers, Rank
from dspark_cache.settings import RuntimeSettings
from dspark_cache.stage import StageContext, open_stage
from dspark_cache.tokens import Tokens
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from pathlib import Path

    from dspark_cache.ledger import Ledger

FOUR_OF_EIGHT = Rank(5, 8, 1, 4)
"""A rank of two machines."""


@pytest.mark.parametrize(
    ("processes", "device", "gpus", "expected"),
    [
        ("auto", "auto", 0, 1),
        ("auto", "auto", 1, 1),
        ("auto", "auto", 8, 8),
        ("auto", "cuda", 8, 8),
        ("auto", "cuda:3", 8, 1),  # one GPU is named
        ("auto", "cpu", 8, 1),
        (1, "auto", 8, 1),
        (3, "auto", 8, 3),
        (16, "cpu", 0, 16),
        (16, "auto", 8, 16),  # refused where they are started, if there is something to compute
    ],
)
def test_how_many_processes_capture(
    monkeypatch: pytest.MonkeyPatch, processes: int | str, device: str, gpus: int, expected: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert _count_processes(RuntimeSettings(processes=processes, device=device)) == expected


@pytest.mark.parametrize(
    ("parallelism", "group_size", "rank", "expected"),
    [
        ("replicate", "auto", FOUR_OF_EIGHT, 1),
        ("replicate", 3, FOUR_OF_EIGHT, 1),
        ("fsdp", "auto", FOUR_OF_EIGHT, 4),  # those of one machine
        ("tensor", "auto", FOUR_OF_EIGHT, 4),
        ("fsdp", "auto", Rank(0, 2, 0, 2), 2),
        ("fsdp", "auto", Rank(), 1),
        ("fsdp", 1, FOUR_OF_EIGHT, 1),
        ("fsdp", 2, FOUR_OF_EIGHT, 2),
        ("tensor", 8, FOUR_OF_EIGHT, 8),
    ],
)
def test_how_many_ranks_share_a_target(parallelism: str, group_size: int | str, rank: Rank, expected: int) -> None:
    assert _group_size(RuntimeSettings(parallelism=parallelism, group_size=group_size), rank) == expected


@pytest.mark.parametrize(
    ("parallelism", "group_size", "rank", "size"),
    [("fsdp", 3, FOUR_OF_EIGHT, 3), ("tensor", 16, FOUR_OF_EIGHT, 16), ("fsdp", "auto", Rank(0, 5, 0, 2), 2)],
)
def test_ranks_that_cannot_be_divided_are_refused(
    parallelism: str, group_size: int | str, rank: Rank, size: int
) -> None:
    with pytest.raises(SettingsError) as error:
        _group_size(RuntimeSettings(parallelism=parallelism, group_size=group_size), rank)
    assert str(error.value) == (
        f"runtime.group_size: {rank.count} processes cannot be divided into groups of {size}: choose a divisor"
    )


@pytest.mark.parametrize(
    ("recorded", "omp", "own", "rank", "expected"),
    [
        ([], None, 8, Rank(), 8),
        ([], None, 8, Rank(0, 4, 0, 4), 2),  # the machine's are shared
        ([], None, 8, FOUR_OF_EIGHT, 2),
        ([], None, 8, Rank(0, 3, 0, 3), 2),
        ([], None, 2, Rank(0, 4, 0, 4), 1),
        ([], "8", 8, Rank(0, 4, 0, 4), 8),  # whoever says so means each process
        ([6], None, 8, Rank(0, 4, 0, 4), 6),  # as for the blocks that are there
        ([6, 6], None, 8, Rank(), 6),
        ([6], "8", 8, Rank(), 6),
        ([6, 3], None, 8, Rank(), 8),  # mixed already
        ([None], None, 8, Rank(0, 2, 0, 2), 4),  # they are of a GPU
        ([None, 6], None, 8, Rank(), 8),
        (["6"], None, 8, Rank(), 8),
        ([True], None, 8, Rank(), 8),
    ],
)
def test_how_many_threads_a_process_has(
    monkeypatch: pytest.MonkeyPatch, recorded: list[Any], omp: str | None, own: int, rank: Rank, expected: int
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: own)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    present = [{"threads": number, "torch": str(index)} for index, number in enumerate(recorded)]
    assert _num_threads(present, rank) == expected


def test_blocks_that_do_not_say_their_threads_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    assert _num_threads([{"torch": "2"}], Rank()) == 8


# What the ranks are told


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("run") / "repository"
    target = {"layer_ids": [1, 3], "block_bytes": 1}
    repository = make_repository(root, num_rows=5, data={"seq_length": 32}, target=target)
    data = root / "inputs/data/conversations.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True) * 2))  # each conversation twice
    repository.run("tokenize")
    return repository


class Coordinator:
    """Runs captures, and notes what the ranks are told."""

    def __init__(self, root: Path) -> None:
        self.repository = Repository(root)
        self.told: list[Work | None] = []

    @property
    def stage(self) -> StageContext:
        return open_stage("capture", self.repository.root)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.repository.root / "tokens")

    def __call__(self, rank: Rank = Rank(), **runtime: Any) -> Ledger | None:  # noqa: B008 - it is frozen
        self.repository.set_params(runtime=runtime)
        return _coordinate(self.stage, self.tokens, rank, self._run)

    def _run(self, work: Work | None) -> None:
        self.told.append(work)
        if work is not None:
            compute_work(self.stage, self.tokens, work, Peers.alone())


@pytest.fixture
def coordinator(tokenized: Repository, tmp_path: Path) -> Coordinator:
    return Coordinator(shutil.copytree(tokenized.root, tmp_path / "repository"))


def test_the_ranks_are_told_everything_in_plain_values(coordinator: Coordinator) -> None:
    ledger = coordinator()
    (work,) = coordinator.told
    assert work is not None
    assert ledger is not None
    assert Work(**json.loads(json.dumps(dataclasses.asdict(work)))).identity == work.identity == ledger.identity
    assert work.target == dataclasses.asdict(coordinator.stage.settings.target)
    keys, tokens = coordinator.tokens.keys(), coordinator.tokens
    assert sorted(work.blocks) == sorted((block_name([key]), [index]) for index, key in enumerate(keys[:5]))
    lengths = [tokens.length(index) for _, (index,) in work.blocks]
    assert lengths == sorted(lengths, reverse=True)
    assert work.num_tokens == work.num_due == sum(lengths)
    assert (work.present, work.group_size, work.keeps_weights) == ([], 1, True)
    assert work.num_threads == torch.get_num_threads()
    assert [block.name for block in ledger.blocks] == sorted(name for name, _ in work.blocks)


def test_with_everything_there_the_ranks_are_told_to_go(coordinator: Coordinator) -> None:
    ledger = coordinator()
    assert coordinator() == ledger
    assert coordinator.told[1:] == [None]


def test_what_is_missing_is_told_with_how_the_rest_was_made(coordinator: Coordinator) -> None:
    ledger = coordinator()
    assert ledger is not None
    store = BlockStore(coordinator.stage.scratch, ledger.identity)
    store.remove_blocks(ledger.blocks[1:3])
    assert coordinator() == ledger
    work = coordinator.told[1]
    assert work is not None
    assert {name for name, _ in work.blocks} == {block.name for block in ledger.blocks[1:3]}
    assert work.num_due == sum(block.num_tokens for block in ledger.blocks[1:3])
    assert work.num_tokens == sum(block.num_tokens for block in ledger.blocks)
    assert work.present == [block.environment for block in ledger.blocks[:1]]
    assert not work.keeps_weights


def test_weights_alone_that_are_missing_are_asked_for(coordinator: Coordinator) -> None:
    ledger = coordinator()
    assert ledger is not None
    (BlockStore(coordinator.stage.scratch, ledger.identity).folder / "weights.json").unlink()
    assert coordinator() == ledger
    work = coordinator.told[1]
    assert work is not None
    assert (work.blocks, work.num_due, work.keeps_weights) == ([], 0, True)


def test_slices_write_no_ledger_and_the_first_keeps_the_weights(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert coordinator(slice="2/2") is None
    assert "slice 2/2 is there: without runtime.slice, a run writes features.json" in caplog.messages
    assert coordinator(slice="1/2") is None
    assert coordinator(slice="1/2") is None
    second, first, again = coordinator.told
    assert first is not None
    assert second is not None
    assert again is None
    assert (first.keeps_weights, second.keeps_weights) == (True, False)
    assert sorted(index for work in (first, second) for _, (index,) in work.blocks) == list(range(5))
    ledger = coordinator(slice=None)
    assert ledger is not None
    assert coordinator.told[3:] == [None]
    assert len(ledger.blocks) == 5


def test_ranks_that_leave_something_undone_are_found_out(coordinator: Coordinator) -> None:
    """As where a network file system does not show yet what another machine wrote."""
    with pytest.raises(CaptureError) as error:
        _coordinate(coordinator.stage, coordinator.tokens, Rank(), coordinator.told.append)
    (work,) = coordinator.told
    assert work is not None
    folder = BlockStore(coordinator.stage.scratch, work.identity).folder
    assert str(error.value) == f"5 blocks are not in {folder}, {work.blocks[0][0]} among them: run again"


def test_weights_that_were_not_kept_are_found_out(coordinator: Coordinator) -> None:
    def run(work: Work | None) -> None:
        assert work is not None
        left_out = dataclasses.replace(work, keeps_weights=False)
        compute_work(coordinator.stage, coordinator.tokens, left_out, Peers.alone())

    with pytest.raises(CaptureError, match=r"/weights\.safetensors was not kept: run again$"):
        _coordinate(coordinator.stage, coordinator.tokens, Rank(), run)


def test_groups_that_cannot_be_are_refused_before_anything_is_locked(coordinator: Coordinator) -> None:
    with pytest.raises(SettingsError, match=r"^runtime\.group_size: 4 processes cannot be divided into groups of 3"):
        coordinator(Rank(0, 4, 0, 4), parallelism="fsdp", group_size=3)
    assert not list(coordinator.stage.scratch.glob("capture-*"))
