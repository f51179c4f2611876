"""Dataloaders: the reference's order, shares and batches."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, _collate_cached, build_cached_dspark_dataloader
from dspark_cache.errors import SettingsError
from dspark_cache.loaders import CachedDataLoader
from dspark_cache.offline_cache import build_cached_dataloader, collate_cached
from dspark_cache.schema import INPUT_IDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeCache = Callable[..., Path]


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set whose samples are their indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"a": torch.tensor(index)}


def collate(features: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return collate_cached(features, ("a",))


def batches(loader: Any) -> list[list[int]]:
    return [batch["a"].tolist() for batch in loader]


# --- collating --------------------------------------------------------------------------------------------------


def test_samples_are_stacked_key_by_key() -> None:
    features = [{"b": torch.full((2,), index), "a": torch.tensor(index), "more": "x"} for index in range(3)]
    batch = collate_cached(features, ("a", "b"))  # type: ignore[arg-type]
    assert list(batch) == ["a", "b"]
    assert batch["a"].tolist() == [0, 1, 2]
    assert batch["b"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_dspark_batches_have_the_keys_of_a_shard() -> None:
    sample = {key: torch.ones(2) for key in reversed(CACHE_KEYS)}
    batch = _collate_cached([sample, sample])
    assert tuple(batch) == CACHE_KEYS
    assert all(tensor.shape == (2, 2) for tensor in batch.values())


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cannot collate an empty list of samples$"):
        collate_cached([], ("a",))


def test_samples_that_lack_keys_are_refused_with_all_of_them() -> None:
    features = [{"a": torch.ones(1)}, {"b": torch.ones(1)}]
    with pytest.raises(ValueError, match=f"^{re.escape('samples are missing required keys ')}" + r"\['a', 'b', 'c'\]$"):
        collate_cached(features, ("c", "b", "a"))


# --- order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "batch_size"), [*product((0, 1, 5, 6), (1, 2, 5, 9))])
def test_without_shuffle_the_order_is_that_of_the_cache_and_the_last_batch_may_be_short(
    length: int, batch_size: int
) -> None:
    loader = build_cached_dataloader(Numbers(length), batch_size, False, collate)
    assert isinstance(loader.sampler, SequentialSampler)
    numbers = list(range(length))
    assert batches(loader) == [numbers[at : at + batch_size] for at in range(0, length, batch_size)]
    assert len(loader) == math.ceil(length / batch_size)


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_shuffle_draws_from_torch_s_global_generator_as_the_reference_does(seed: int) -> None:
    torch.manual_seed(seed)
    seeds = [int(torch.empty((), dtype=torch.int64).random_()) for _ in range(4)]
    torch.manual_seed(seed)
    loader = build_cached_dataloader(Numbers(11), 3, True, collate)
    for epoch in range(2):  # an epoch draws two seeds: the workers' and the order's
        generator = torch.Generator().manual_seed(seeds[2 * epoch + 1])
        order = torch.randperm(11, generator=generator).tolist()
        assert batches(loader) == [order[at : at + 3] for at in range(0, 11, 3)]


def test_an_empty_cache_cannot_be_shuffled_but_read(make_cache: MakeCache) -> None:
    folder = make_cache(0, 2)
    assert list(build_cached_dspark_dataloader(folder, 2, False)) == []
    with pytest.raises(ValueError, match="num_samples=0"):
        build_cached_dspark_dataloader(folder, 2, True)


@pytest.mark.parametrize("shuffle", [False, True, "shard"])
def test_machines_divide_their_shares_among_their_processes(make_cache: MakeCache, shuffle: bool | str) -> None:
    """Without torch.distributed, which would divide the cache and not the share."""
    folder = make_cache(15, 2)
    samples = {tuple(sample[INPUT_IDS].tolist()): index for index, sample in enumerate(CachedDSparkDataset(folder))}
    assert len(samples) == 15
    for shards, expected in ((range(5), range(10)), (range(5, 8), range(10, 15))):
        found = []
        for rank in range(2):
            loader = build_cached_dspark_dataloader(
                folder, 2, shuffle, distributed=True, shards=shards, num_replicas=2, rank=rank
            )
            found += [samples[tuple(row.tolist())] for batch in loader for row in batch[INPUT_IDS]]
        assert set(found) == set(expected)
        assert len(found) == 2 * math.ceil(len(expected) / 2)


@pytest.mark.parametrize(
    "given", [{"num_replicas": 2}, {"rank": 0}, {"num_replicas": 2, "rank": 2}, {"num_replicas": 2, "rank": -1}]
)
def test_a_division_that_is_none_is_refused(make_cache: MakeCache, given: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match=r"^num_replicas, rank: expected both, .*distributed=True$"):
        build_cached_dspark_dataloader(make_cache(4, 2), 2, False, distributed=True, **given)


def test_a_division_needs_distributed(make_cache: MakeCache) -> None:
    with pytest.raises(SettingsError, match=r"^num_replicas, rank: .* found 2, 0 and distributed=False$"):
        build_cached_dspark_dataloader(make_cache(4, 2), 2, False, num_replicas=2, rank=0)


def test_ranks_that_may_read_other_shards_are_not_divided_blindly(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A world of one is no question; nor are all shards."""
    folder = make_cache(4, 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for world, shards in ((1, range(1)), (3, range(2)), (3, None)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda world=world: world)
        loader = build_cached_dspark_dataloader(folder, 2, False, distributed=True, shards=shards)
        assert loader.sampler.num_replicas == world
    message = r"^shards: with distributed=True, which of 3 ranks read shards 0 to 0 too\? Say num_replicas, "
    with pytest.raises(SettingsError, match=message):
        build_cached_dspark_dataloader(folder, 2, False, distributed=True, shards=range(1))


SHARES = """
import json, sys
import torch.distributed
from dspark_cache.offline_cache import build_cached_dataloader, collate_cached

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.distributed.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
shares = {}
for length in map(int, sys.argv[4:]):
    for shuffle in (False, True):
        dataset = [{"a": torch.tensor(index)} for index in range(length)]
        loader = build_cached_dataloader(dataset, 2, shuffle, lambda f: collate_cached(f, ("a",)), distributed=True)
        for epoch in (0, 3):
            loader.sampler.set_epoch(epoch)
            shares[f"{length} {shuffle} {epoch}"] = [batch["a"].tolist() for batch in loader]
print(json.dumps(shares))
torch.distributed.destroy_process_group()
"""


def share(length: int, shuffle: bool, epoch: int, world: int, rank: int) -> list[list[int]]:
    """Return the batches of two of one rank's share, by the reference's rule."""
    order = (
        torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist() if shuffle else range(length)
    )
    padded = math.ceil(length / world) * world
    numbers = (list(order) * padded)[:padded][rank::world]
    return [numbers[at : at + 2] for at in range(0, len(numbers), 2)]


def test_each_rank_reads_its_share(tmp_path: Path) -> None:
    lengths = [0, 1, 6, 7]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARES, str(rank), "2", str(tmp_path / "store"), *map(str, lengths)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate()
        assert process.returncode == 0
        assert json.loads(output) == {
            f"{length} {shuffle} {epoch}": share(length, shuffle, epoch, 2, rank)
            for length, shuffle, epoch in product(lengths, (False, True), (0, 3))
        }


# --- a DSpark cache ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_cache_are_its_samples(make_cache: MakeCache, num_workers: int) -> None:
    folder = make_cache(5, 2)
    dataset = CachedDSparkDataset(folder)
    loader = build_cached_dspark_dataloader(folder, 2, False, num_workers)
    found = list(loader)
    assert [len(batch["input_ids"]) for batch in found] == [2, 2, 1]
    for key in CACHE_KEYS:
        assert torch.equal(torch.cat([batch[key] for batch in found]), torch.stack([dataset[i][key] for i in range(5)]))


def test_settings_of_the_loader_are_the_reference_s(make_cache: MakeCache) -> None:
    loader = build_cached_dspark_dataloader(make_cache(3, 2), batch_size=2, shuffle=True, num_workers=1)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (2, False, 1)
    assert (loader.persistent_workers, loader.worker_init_fn, loader.generator) == (False, None, None)
    assert loader.pin_memory == torch.cuda.is_available()
    assert loader.multiprocessing_context is None


# --- reading ahead, and going on in mid-epoch ---------------------------------------------------------------------


WAYS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"read_ahead": 1}, {"read_ahead": 3}]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_reading_ahead_changes_no_order(way: dict[str, Any], shuffle: bool) -> None:
    torch.manual_seed(3)
    expected = [batches(loader) for loader in [build_cached_dataloader(Numbers(11), 3, shuffle, collate)] * 2]
    torch.manual_seed(3)
    made = build_cached_dataloader(Numbers(11), 3, shuffle, collate, **way)
    assert [batches(made), batches(made)] == expected


def test_no_more_is_read_ahead_than_was_said() -> None:
    read: list[int] = []

    class Noted(Numbers):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            read.append(index)
            return super().__getitem__(index)

    given = iter(build_cached_dataloader(Noted(20), 2, False, collate, read_ahead=3))
    next(given)
    given.close()  # waits for what is being read
    assert 2 <= len(read) <= 8


def test_an_error_of_reading_ahead_comes_at_its_batch() -> None:
    class Failing(Numbers):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            if index == 4:
                raise OSError("sample 4")
            return super().__getitem__(index)

    given = iter(build_cached_dataloader(Failing(20), 2, False, collate, read_ahead=4))
    assert [next(given)["a"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(OSError, match=r"^sample 4$"):
        next(given)


UNFINISHED = """
import sys
from dspark_cache import build_cached_dspark_dataloader

batches = iter(build_cached_dspark_dataloader(sys.argv[1], 2, True, seed=3, read_ahead=int(sys.argv[2])))
for _ in range(3):
    next(batches)
"""


@pytest.mark.parametrize("read_ahead", [1, 2, 20])
def test_an_interpreter_ends_in_mid_epoch_without_a_word(make_cache: MakeCache, read_ahead: int) -> None:
    """Also with more to be read, or with the epoch read to its end."""
    done = subprocess.run(
        [sys.executable, "-c", UNFINISHED, str(make_cache(20, 2)), str(read_ahead)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("count", "batch_size"), [(7, 2), (5, 2), (3, 4), (4, 2)])
def test_the_batch_with_a_repeat_is_known(way: dict[str, Any], count: int, batch_size: int) -> None:
    """In a short batch and in a full one; of the second rank, where two do not divide the samples."""
    for rank in range(2):
        options: dict[str, Any] = {"num_replicas": 2, "rank": rank, **way}
        loader: Any = build_cached_dataloader(Numbers(count), batch_size, False, collate, distributed=True, **options)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            found = [(batch["a"].tolist(), loader.sampler.is_at_repeat) for batch in loader]
            last = [False] * (len(loader) - 1) + [rank == 1 and count % 2 == 1]
            assert [is_at_repeat for _, is_at_repeat in found] == last
            assert (found[-1][0][-1] == 0) == last[-1]


@pytest.mark.parametrize(("read_ahead", "num_workers"), [(-1, 0), (1, 1)])
def test_reading_ahead_is_for_one_process(read_ahead: int, num_workers: int) -> None:
    message = f"^read_ahead: expected at least 0, .* found {read_ahead} and num_workers={num_workers}$"
    with pytest.raises(SettingsError, match=message):
        build_cached_dataloader(Numbers(3), 2, False, collate, num_workers, read_ahead=read_ahead)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [True, "shard"])
def test_training_goes_on_after_the_last_batch_that_it_was_given(
    make_cache: MakeCache, way: dict[str, Any], shuffle: bool | str
) -> None:
    folder = make_cache(11, 2)

    def build(**options: Any) -> Any:
        return build_cached_dspark_dataloader(folder, 2, shuffle, seed=5, shuffle_shards=2, **options)

    whole = [batch["input_ids"].tolist() for batch in build()]
    first = build(**way)
    given = iter(first)
    taken = [next(given)["input_ids"].tolist() for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    given.close()
    second = build(**way)
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert taken + [batch["input_ids"].tolist() for batch in second] == whole
    assert second.state_dict()["position"] == 11


@pytest.mark.parametrize("way", WAYS)
def test_between_epochs_nothing_of_the_next_one_is_consumed(make_cache: MakeCache, way: dict[str, Any]) -> None:
    loader: Any = build_cached_dspark_dataloader(make_cache(11, 2), 2, True, seed=5, **way)
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        assert loader.state_dict()["position"] == 0
        positions = [loader.state_dict()["position"] for _ in loader]
        assert positions == [2, 4, 6, 8, 10, 11]
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (epoch, 11)


def test_workers_that_live_on_read_every_epoch(make_cache: MakeCache) -> None:
    folder = make_cache(9, 2, 8, 1 << 14)
    dataset = CachedDSparkDataset(folder)
    expected = [dataset[index]["input_ids"].tolist() for index in range(9)]
    loader = CachedDataLoader(dataset, batch_size=1, num_workers=1, persistent_workers=True, collate_fn=_collate_cached)
    for _ in range(2):
        assert [batch["input_ids"][0].tolist() for batch in loader] == expected
    del loader


def test_a_state_of_another_cache_is_refused(make_cache: MakeCache) -> None:
    first, other = (build_cached_dspark_dataloader(make_cache(4, 2, hidden=h), 2, True, seed=0) for h in (4, 6))
    with pytest.raises(SettingsError, match=r"^this state cannot be resumed: cache: '[0-9a-f]{64}' then, '"):
        other.load_state_dict(first.state_dict())


def test_an_order_of_torch_s_global_generator_cannot_be_resumed() -> None:
    message = r"^this order cannot be resumed: build the loader with a seed, or distributed=True$"
    loader = build_cached_dataloader(Numbers(3), 2, True, collate)
    with pytest.raises(SettingsError, match=message):
        loader.state_dict()
    with pytest.raises(SettingsError, match=message):
        loader.load_state_dict({})


def test_another_word_for_shuffle_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^shuffle: expected true, false or 'shard', found 'shards'"):
        build_cached_dataloader(Numbers(3), 2, "shards", collate)


def test_a_resume_reads_nothing_of_what_was_consumed(make_cache: MakeCache) -> None:
    folder = make_cache(40, 2)
    loader = build_cached_dspark_dataloader(folder, 2, True, seed=1)
    read: list[int] = []
    dataset: Any = loader.dataset
    original = dataset.__getitems__
    dataset.__class__ = type("Noted", (type(dataset),), {"__getitems__": lambda _, i: (read.extend(i), original(i))[1]})
    loader.load_state_dict({**loader.state_dict(), "position": 36})
    assert len(list(loader)) == 2
    assert len(read) == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_page_locked_memory_needs_cuda(make_cache: MakeCache) -> None:
    with pytest.raises(SettingsError, match=r"^pin_memory: page-locked memory needs CUDA"):
        build_cached_dspark_dataloader(make_cache(2, 2), 2, False, pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_page_locked(make_cache: MakeCache, way: dict[str, Any]) -> None:
    folder = make_cache(9, 2, 8, 1 << 14)
    expected = list(build_cached_dspark_dataloader(folder, 2, False, pin_memory=False))
    for one, other in zip(build_cached_dspark_dataloader(folder, 2, False, **way), expected, strict=True):
        assert all(one[key].is_pinned() and torch.equal(one[key], other[key]) for key in CACHE_KEYS)
