"""Orders: torch's own, or shard by shard; resumed in mid-epoch by any ranks, no sample lost or given twice."""

from __future__ import annotations

import re
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from dspark_cache.errors import SettingsError
from dspark_cache.samplers import CacheSampler, shard_order


class Samples:
    """A dataset of which only lengths matter."""

    digest = "d"

    def __init__(self, shard_samples: list[int]) -> None:
        self.shard_samples = shard_samples

    def __len__(self) -> int:
        return sum(self.shard_samples)


def sampler(count: int = 13, **options: Any) -> CacheSampler:
    shards = options.pop("shards", None) or [count]
    return CacheSampler(Samples(shards), **options)


# --- the order of DistributedSampler -----------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "ranks"), [*product((0, 1, 5, 12, 13), (1, 2, 3, 7))])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_is_shared_as_torch_does(count: int, ranks: int, shuffle: bool) -> None:
    for rank, epoch in product(range(ranks), (0, 3)):
        expected = DistributedSampler(range(count), ranks, rank, shuffle=shuffle, seed=5)
        found = sampler(count, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=5)
        for each in (expected, found):
            each.set_epoch(epoch)
        assert list(found) == list(expected)
        assert len(found) == len(expected)


@pytest.mark.parametrize("shuffle", ["shards", "", None, 1, "SHARD"])
def test_another_shuffle_is_refused(shuffle: Any) -> None:
    message = f"^shuffle: expected true, false or 'shard', found {re.escape(repr(shuffle))}$"
    with pytest.raises(SettingsError, match=message):
        sampler(shuffle=shuffle)


def test_no_shard_to_mix_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^shuffle_shards: expected at least 1, found 0$"):
        sampler(shuffle="shard", shuffle_shards=0)


# --- shard by shard ----------------------------------------------------------------------------------------------


def shard_of(shards: list[int]) -> list[int]:
    return [number for number, count in enumerate(shards) for _ in range(count)]


@pytest.mark.parametrize("shards", [[], [1], [0, 3, 0], [4] * 9, [1, 7, 2, 30, 5, 5]])
@pytest.mark.parametrize("mixed", [1, 2, 5, 100])
def test_every_sample_comes_once_and_shards_from_front_to_back(shards: list[int], mixed: int) -> None:
    order = shard_order(shards, mixed, torch.Generator().manual_seed(1)).tolist()
    assert sorted(order) == list(range(sum(shards)))
    place = {index: position for position, index in enumerate(order)}
    for start, count in zip(accumulate([0, *shards]), shards, strict=False):
        places = [place[index] for index in range(start, start + count)]
        assert places == sorted(places)


@pytest.mark.parametrize("mixed", [1, 2, 5])
def test_no_more_shards_than_said_are_read_at_a_time(mixed: int) -> None:
    shards = [20] * 40
    of = shard_of(shards)
    order = [of[index] for index in shard_order(shards, mixed, torch.Generator().manual_seed(2)).tolist()]
    first = {shard: order.index(shard) for shard in set(order)}
    last = {shard: len(order) - 1 - order[::-1].index(shard) for shard in set(order)}
    most = max(sum(first[shard] <= at <= last[shard] for shard in first) for at in range(len(order)))
    assert mixed <= most <= mixed + 1
    assert list(dict.fromkeys(order)) != sorted(set(order))  # in no particular order


def test_a_batch_that_is_larger_than_shards_has_samples_of_more() -> None:
    shards = [2] * 40
    of = shard_of(shards)
    order = shard_order(shards, 1, torch.Generator().manual_seed(2)).tolist()
    assert {len({of[index] for index in order[at : at + 8]}) for at in range(0, 80, 8)} == {4}


def test_an_order_of_shards_depends_on_seed_and_epoch() -> None:
    made = [sampler(shards=[5] * 8, shuffle="shard", shuffle_shards=2, seed=seed) for seed in (0, 0, 1)]
    orders = [list(each) for each in made]
    assert orders[0] == orders[1] != orders[2]
    made[1].set_epoch(1)
    assert list(made[1]) == orders[2]  # as torch, which adds the two


# --- going on in mid-epoch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [*product((1, 2, 3), (1, 2, 4))])
@pytest.mark.parametrize("shuffle", [False, True, "shard"])
def test_any_number_of_ranks_goes_on_with_what_is_left(before: int, after: int, shuffle: bool | str) -> None:
    shards = [3, 1, 4, 5]
    whole = list(sampler(shards=shards, shuffle=shuffle, seed=3))
    for consumed in range(-(-13 // before) + 1):
        states = []
        for rank in range(before):
            first = sampler(shards=shards, shuffle=shuffle, seed=3, num_replicas=before, rank=rank)
            given = iter(first)
            taken = [next(given) for _ in range(consumed)]
            assert taken == [whole[at % 13] for at in range(rank, before * consumed, before)]
            states.append(first.state_dict())
        assert all(state == states[0] for state in states)
        rest = whole[min(13, before * consumed) :]
        rest += whole[: -len(rest) % after]
        for rank in range(after):
            second = sampler(shards=shards, shuffle=shuffle, seed=3, num_replicas=after, rank=rank)
            second.load_state_dict(states[0])
            assert second.state_dict() == states[0]
            assert list(second) == rest[rank::after]


@pytest.mark.parametrize(("count", "before", "after"), [*product((0, 1, 2, 5, 6, 12, 13), (1, 2, 3), (1, 2, 4, 7))])
@pytest.mark.parametrize("shuffle", [False, "shard"])
def test_what_is_given_but_for_equal_numbers_is_told(count: int, before: int, after: int, shuffle: bool | str) -> None:
    """Without repeats, ranks together give what is left once each; also after a resume."""
    options = {"shards": [count // 2, count - count // 2], "shuffle": shuffle, "seed": 3}
    whole = list(sampler(**options))
    for consumed in range(count // before + 1):
        first = sampler(**options, num_replicas=before)
        for _ in zip(range(consumed), first, strict=False):
            pass
        given = []
        for rank in range(after):
            second = sampler(**options, num_replicas=after, rank=rank)
            second.load_state_dict({**first.state_dict(), "position": consumed * before})
            assert not second.is_at_repeat
            given += [index for index in second if not second.is_at_repeat]
            second.set_epoch(1)
            assert not second.is_at_repeat
        assert sorted(given) == sorted(whole[consumed * before :])


def test_an_epoch_that_is_resumed_twice_is_where_it_is() -> None:
    first = sampler(20, seed=1)
    whole = list(first)
    given = iter(first)
    for _ in range(4):
        next(given)
    second = sampler(20, seed=1)
    second.load_state_dict(first.state_dict())
    given = iter(second)
    assert [next(given) for _ in range(3)] == whole[4:7]
    assert second.state_dict()["position"] == 7
    third = sampler(20, seed=1)
    third.load_state_dict(second.state_dict())
    assert list(third) == whole[7:]


def test_who_is_ahead_counts_what_it_delivers() -> None:
    made = sampler(20, num_replicas=2)
    made.counts_given = False
    given = iter(made)
    for _ in range(6):
        next(given)
    assert made.state_dict()["position"] == 0
    made.consumed += 4
    assert made.state_dict()["position"] == 8


def test_the_next_iteration_and_the_next_epoch_begin_at_their_start() -> None:
    made = sampler(6, seed=1)
    whole = list(made)
    made.load_state_dict({**made.state_dict(), "position": 4, "epoch": 2})
    made.set_epoch(2)
    assert made.state_dict()["position"] == 4
    second = list(made)
    assert len(second) == 2
    assert len(list(made)) == 6
    made.load_state_dict({**made.state_dict(), "position": 4, "epoch": 2})
    made.set_epoch(0)
    assert made.state_dict()["position"] == 0
    assert list(made) == whole


def test_a_finished_epoch_has_nothing_left() -> None:
    made = sampler(5, num_replicas=2, rank=1)
    list(made)
    state = made.state_dict()
    assert state["position"] == 5
    made.load_state_dict(state)
    assert list(made) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"seed": 1}, "seed: 1 then, 0 now"),
        ({"num_samples": 12}, "num_samples: 12 then, 13 now"),
        ({"cache": "e"}, "cache: 'e' then, 'd' now"),
        ({"shuffle": "shard"}, "shuffle: 'shard' then, True now"),
        ({"shuffle_shards": 8}, "shuffle_shards: 8 then, None now"),
        ({"position": -1}, r"expected an epoch and a position, found [0, -1]"),
        ({"epoch": True}, r"expected an epoch and a position, found [True, 0]"),
        ({"epoch": None, "seed": 2}, "seed: 2 then, 0 now; expected an epoch and a position, found [None, 0]"),
    ],
)
def test_a_state_of_another_order_is_refused(changes: dict[str, Any], fault: str) -> None:
    made = sampler()
    with pytest.raises(SettingsError, match=f"^{re.escape('this state cannot be resumed: ' + fault)}$"):
        made.load_state_dict(made.state_dict() | changes)
    assert len(list(made)) == 13


def test_of_shards_the_number_that_is_mixed_counts() -> None:
    made = sampler(shuffle="shard", shuffle_shards=3)
    assert made.state_dict()["shuffle_shards"] == 3
    with pytest.raises(SettingsError, match="shuffle_shards: 3 then, 4 now"):
        sampler(shuffle="shard", shuffle_shards=4).load_state_dict(made.state_dict())
