"""Reading a batch together: whole, into its own memory, on threads of this process."""

from __future__ import annotations

import os
import pickle
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, batch_reading
from dspark_cache.batch_reading import PIECE_BYTES, Piece, ReadThreads, Samples, cut_pieces, cut_shares
from dspark_cache.loaders import PadToLongest, collate_cached, collate_dspark
from dspark_cache.schema import HIDDEN, INPUT_IDS
from tests.caches import make_ragged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeCache = Callable[..., Path]


class Shard:
    """Gives numbers that say which position they are of; notes the threads that ask."""

    def __init__(self, *, fails_at: int | None = None) -> None:
        self.threads: set[str] = set()
        self.asked: list[tuple[str, int, int, int]] = []
        self._fails_at = fails_at

    def read_positions(self, key: str, row: int, start: int, into: torch.Tensor) -> None:
        self.threads.add(threading.current_thread().name)
        self.asked.append((key, row, start, len(into)))
        if start == self._fails_at:
            raise OSError(f"position {start}")
        into.copy_((torch.arange(start, start + len(into)) + 1000 * row).to(into.dtype)[:, None].expand_as(into))


# --- pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("size", [1, 3, 4, 5, 100])
def test_pieces_cover_every_position_once(monkeypatch: pytest.MonkeyPatch, length: int, size: int) -> None:
    monkeypatch.setattr(batch_reading, "PIECE_BYTES", 4 * size)
    into, shard = torch.full((length, 1), -1, dtype=torch.int32), Shard()
    pieces = list(cut_pieces(shard, "a", 2, into))
    ReadThreads(1).read(pieces)
    assert into[:, 0].tolist() == [2000 + position for position in range(length)]
    assert [(start, start + count) for _, _, start, count in shard.asked] == list(
        pairwise([*range(0, length, size if size < length else length), length])
    )


def test_a_sample_that_is_one_number_is_one_piece() -> None:
    number, shard = torch.zeros((), dtype=torch.int64), Shard()
    assert cut_pieces(shard, "a", 3, number) == [Piece(shard, "a", 3, 0, number, 8)]


def test_a_piece_is_some_megabytes() -> None:
    into = torch.empty(3 * PIECE_BYTES // 100, 100, dtype=torch.uint8)
    assert cut_pieces(Shard(), "a", 0, into)[0].num_bytes == PIECE_BYTES // 100 * 100


@pytest.mark.parametrize("sizes", [[], [5], [1] * 7, [4, 1, 1, 1, 9, 2], [3, 3, 3]])
@pytest.mark.parametrize("share", [1, 3, 4, 100])
def test_shares_hold_all_pieces_in_order_and_enough_of_them(sizes: list[int], share: int) -> None:
    pieces = [Piece(Shard(), "a", 0, 0, torch.empty(0), size) for size in sizes]
    shares = cut_shares(pieces, share)
    assert all(one is other for one, other in zip((p for each in shares for p in each), pieces, strict=True))
    assert all(sum(piece.num_bytes for piece in each) >= share for each in shares[:-1])
    assert all(sum(piece.num_bytes for piece in each[:-1]) < share for each in shares)


# --- threads ----------------------------------------------------------------------------------------------------


def pieces_of(shard: Shard, num_bytes: int) -> list[Piece]:
    size = num_bytes // 4
    return [Piece(shard, "a", 0, start, torch.zeros(1, size, dtype=torch.uint8), size) for start in range(4)]


@pytest.mark.parametrize(
    ("count", "num_bytes", "on_threads"), [(1, 4 << 20, False), (2, (1 << 20) - 4, False), (2, 4 << 20, True)]
)
def test_what_is_small_and_what_has_one_thread_is_read_by_the_caller(
    count: int, num_bytes: int, on_threads: bool
) -> None:
    shard = Shard()
    ReadThreads(count).read(pieces_of(shard, num_bytes))
    others = shard.threads - {threading.current_thread().name}
    assert len(shard.threads) - len(others) == 1
    assert bool(others) is on_threads
    assert all(name.startswith("cache-read") for name in others)
    assert len(others) < max(count, 1)


@pytest.mark.parametrize("fails_at", range(4))
def test_an_error_is_raised_when_all_have_ended(fails_at: int) -> None:
    shard = Shard(fails_at=fails_at)
    with pytest.raises(OSError, match=rf"^position {fails_at}$"):
        ReadThreads(3).read(pieces_of(shard, 4 << 20))
    assert {start for _, _, start, _ in shard.asked} >= {0, 1, 2, 3} - {fails_at + 1}


@pytest.mark.parametrize("count", [0, -1])
def test_no_thread_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"^read_threads must be at least 1, found {count}$"):
        ReadThreads(count)


def test_threads_are_started_once_and_left_behind_by_pickling() -> None:
    threads, shard = ReadThreads(2), Shard()
    for _ in range(3):
        threads.read(pieces_of(shard, 4 << 20))
    assert len(shard.threads) <= 2
    other, there = pickle.loads(pickle.dumps(threads)), Shard()
    other.read(pieces_of(there, 4 << 20))
    assert len(there.asked) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_starts_its_own() -> None:
    threads = ReadThreads(2)
    threads.read(pieces_of(Shard(), 4 << 20))
    pid = os.fork()
    if pid == 0:
        shard = Shard()
        threads.read(pieces_of(shard, 4 << 20))
        os._exit(7 if len(shard.asked) == 4 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


# --- samples of a batch -----------------------------------------------------------------------------------------


def test_a_batch_is_read_as_its_samples_are(make_cache: MakeCache) -> None:
    folder = make_cache(9, 2)
    for dataset in (
        CachedDSparkDataset(folder),
        CachedDSparkDataset(make_ragged(folder, [4, 1, 4])),
        CachedDSparkDataset(folder, max_open_files=1),
    ):
        samples = dataset.__getitems__([8, 0, -1, 3, 3])
        for sample, index in zip(samples, (8, 0, 8, 3, 3), strict=True):
            assert list(sample) == list(CACHE_KEYS)
            assert all(torch.equal(sample[key], dataset[index][key]) for key in CACHE_KEYS)
        batch = collate_dspark(samples)
        assert all(torch.equal(batch[key], torch.stack([sample[key] for sample in samples])) for key in CACHE_KEYS)


def test_collating_returns_the_memory_that_was_read_into(make_cache: MakeCache) -> None:
    samples = CachedDSparkDataset(make_cache(4, 2)).__getitems__([1, 2])
    batch = collate_dspark(samples)
    assert {key: batch[key].data_ptr() for key in CACHE_KEYS} == {key: samples[0][key].data_ptr() for key in CACHE_KEYS}
    assert list(collate_cached(samples, (HIDDEN,))) == [HIDDEN]


def test_a_loader_reads_whole_batches_also_of_a_subset(make_cache: MakeCache) -> None:
    dataset = CachedDSparkDataset(make_cache(6, 2))
    loader = DataLoader(Subset(dataset, [5, 1, 3]), batch_size=2, collate_fn=lambda samples: samples)
    first = next(iter(loader))
    assert isinstance(first, Samples)
    assert all(torch.equal(sample[HIDDEN], dataset[index][HIDDEN]) for sample, index in zip(first, (5, 1), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda samples: samples.reverse(),
        lambda samples: samples.pop(),
        lambda samples: samples.append(samples[0]),
        lambda samples: samples.__setitem__(0, dict(samples[0])),
        lambda samples: samples[1].__setitem__(INPUT_IDS, samples[1][INPUT_IDS] + 1),
    ],
)
def test_samples_that_were_exchanged_are_stacked_as_they_are_now(
    make_cache: MakeCache, change: Callable[[Samples], object]
) -> None:
    samples = CachedDSparkDataset(make_cache(4, 2)).__getitems__([1, 2, 3])
    change(samples)
    batch = collate_dspark(samples)
    assert all(torch.equal(batch[key], torch.stack([sample[key] for sample in samples])) for key in CACHE_KEYS)


def test_what_is_written_into_a_sample_is_in_the_batch(make_cache: MakeCache) -> None:
    samples = CachedDSparkDataset(make_cache(4, 2)).__getitems__([1, 2])
    samples[1][INPUT_IDS][0] = 77
    assert collate_dspark(samples)[INPUT_IDS][1, 0] == 77


def test_unpadded_samples_are_padded_by_the_batch_they_were_read_into(make_cache: MakeCache) -> None:
    dataset = CachedDSparkDataset(make_ragged(make_cache(6, 2), [2, 4]), padded=False)
    samples = dataset.__getitems__([0, 3])
    pad = dataset.manifest["pad_token_id"]
    batch = PadToLongest(pad_token_id=pad)(samples)
    assert batch[HIDDEN].data_ptr() == samples[0][HIDDEN].data_ptr()
    other = PadToLongest(pad_token_id=pad + 1)(samples)
    length = len(samples[0][INPUT_IDS])
    assert other[INPUT_IDS][0, length:].tolist() == [pad + 1] * (other[INPUT_IDS].shape[1] - length)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate_dspark(samples)


def test_memory_that_is_used_again_holds_nothing_of_the_earlier_batch(make_cache: MakeCache) -> None:
    """A batch large enough for pages of its own, whose second sample is shorter than the first one's."""
    folder = make_ragged(make_cache(6, 2, 8, 1 << 16, 2), [2, 4])
    for padded in (True, False):
        dataset = CachedDSparkDataset(folder, padded=padded)
        expected = {index: dataset[index] for index in range(6)}
        expected = {i: {key: tensor.clone() for key, tensor in sample.items()} for i, sample in expected.items()}
        places = set()
        for index in (5, 0, 4, 1):
            batch = dataset.__getitems__([index])
            places.add(batch[0][HIDDEN].data_ptr())
            whole = batch.batch(CACHE_KEYS, None if padded else dataset.manifest["pad_token_id"])
            assert whole is not None
            for key in CACHE_KEYS:
                assert torch.equal(batch[0][key], expected[index][key])
            del batch, whole
        assert len(places) < 4 or not padded  # the shortest come from the heap
