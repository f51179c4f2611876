"""Slabs: a batch crosses from a worker without a copy, and no slab is used while anybody holds a part of it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import _utils

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, build_cached_dspark_dataloader, slabs
from dspark_cache.dtypes import TensorSpec
from dspark_cache.errors import SettingsError
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN
from dspark_cache.slabs import SlabBatch, Slabs, slab_bytes
from tests.caches import make_ragged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    MakeCache = Callable[..., Path]

LARGE = TensorSpec(dtype=torch.float32, shape=(1 << 18,))
SMALL = TensorSpec(dtype=torch.int64, shape=(3,))
SPECS = {"ids": SMALL, "states": LARGE, "last": LARGE}


@pytest.fixture
def as_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], None]]:
    """Return a function after which this process is taken for a worker (torch's own state of one)."""

    def become(worker: int | None) -> None:
        info = None if worker is None else _utils.worker.WorkerInfo(id=worker, num_workers=2, seed=0, dataset=None)
        monkeypatch.setattr(_utils.worker, "_worker_info", info)

    return become


def filled(made: Slabs, value: float) -> dict[str, torch.Tensor]:
    tensors = made.tensors(SPECS)
    assert tensors is not None
    return {key: tensor.fill_(value) for key, tensor in tensors.items()}


def test_a_batch_comes_out_as_it_went_in(as_worker: Any) -> None:
    made = Slabs(2, 2, slab_bytes(SPECS))
    as_worker(1)
    packed = made.pack({**filled(made, 5), "lengths": torch.tensor([1, 2])})
    assert isinstance(packed, SlabBatch)
    assert len(pickle.dumps(packed)) < 2000
    batch = made.unpack(pickle.loads(pickle.dumps(packed)))
    assert list(batch) == ["ids", "states", "last", "lengths"]
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in batch.items() if key in SPECS} == {
        key: (spec.dtype, spec.shape) for key, spec in SPECS.items()
    }
    assert all(bool((batch[key] == 5).all()) for key in SPECS)
    assert batch["lengths"].tolist() == [1, 2]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in batch.values())


@pytest.mark.parametrize("held", [("states",), ("last",), ("states", "last")])
def test_a_slab_is_used_again_when_the_last_large_tensor_is_gone(as_worker: Any, held: tuple[str, ...]) -> None:
    made = Slabs(1, 1, slab_bytes(SPECS))
    as_worker(0)
    batch = made.unpack(made.pack(filled(made, 5)))  # type: ignore[arg-type]
    parts = [batch[key][7:9] for key in held]
    ids = batch["ids"]
    del batch
    assert made.tensors(SPECS) is None
    while parts:
        assert bool((parts.pop() == 5).all())
        assert (made.tensors(SPECS) is None) is bool(parts)
    assert ids.tolist() == [5, 5, 5]  # small ones hold no slab


def test_a_batch_of_small_tensors_holds_no_slab(as_worker: Any) -> None:
    made = Slabs(1, 1, slab_bytes(SPECS))
    as_worker(0)
    packed = made.pack({"ids": filled(made, 5)["ids"]})
    batch = made.unpack(packed)  # type: ignore[arg-type]
    assert made.tensors(SPECS) is not None
    assert batch["ids"].tolist() == [5, 5, 5]


def test_what_a_worker_still_holds_is_not_overwritten(as_worker: Any) -> None:
    made = Slabs(1, 1, slab_bytes(SPECS))
    as_worker(0)
    tensors = filled(made, 5)
    kept = tensors["states"][3:4]
    batch = made.unpack(made.pack(tensors))  # type: ignore[arg-type]
    del tensors, batch
    assert made.tensors(SPECS) is None
    assert kept.tolist() == [5]
    del kept
    assert made.tensors(SPECS) is not None


def test_a_batch_that_is_not_on_the_slab_lets_go_of_it(as_worker: Any) -> None:
    made = Slabs(1, 1, slab_bytes(SPECS))
    as_worker(0)
    batch = {key: tensor.clone() for key, tensor in filled(made, 5).items()}
    assert made.pack(batch) is batch
    assert made.tensors(SPECS) is not None


def test_of_several_slabs_one_goes_and_the_others_are_let_go(as_worker: Any) -> None:
    made = Slabs(1, 2, slab_bytes(SPECS))
    as_worker(0)
    first, second = filled(made, 5), filled(made, 6)
    packed = made.pack({**first, "last": second["last"]})
    assert isinstance(packed, SlabBatch)
    assert set(packed.others) == {"last"}
    assert packed.others["last"] is second["last"]
    del first, second
    batch = made.unpack(packed)
    assert bool((batch["last"] == 6).all())


def test_workers_have_slabs_of_their_own_and_others_none(as_worker: Any) -> None:
    made = Slabs(2, 1, slab_bytes(SPECS))
    places = []
    for worker in (0, 1):
        as_worker(worker)
        tensors = made.tensors(SPECS)
        assert tensors is not None
        places.append(tensors["states"].data_ptr())
        assert made.tensors(SPECS) is None
    assert len(set(places)) == 2
    as_worker(None)
    assert made.tensors(SPECS) is None


def test_what_is_larger_than_a_slab_goes_elsewhere(as_worker: Any) -> None:
    made = Slabs(1, 1, slab_bytes(SPECS) - 1)
    as_worker(0)
    assert made.tensors(SPECS) is None


def test_too_little_shared_memory_is_refused_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = slabs.shutil.disk_usage(slabs._SHARED_MEMORY).free
    with pytest.raises(SettingsError, match=r"^num_workers: 3 workers need \d+ bytes .* read_ahead=2, which needs no"):
        Slabs(3, 2, free)
    monkeypatch.setattr(slabs, "_SHARED_MEMORY", tmp_path / "none")
    Slabs(1, 1, 100)


# --- through a loader -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.parametrize("pad_to", ["seq_length", "longest"])
def test_workers_give_what_one_process_gives(make_cache: MakeCache, start: str, pad_to: str) -> None:
    folder = make_ragged(make_cache(9, 2, 8, 1 << 14), [4, 1, 4])
    expected = list(build_cached_dspark_dataloader(folder, 2, False, pad_to=pad_to))
    loader = build_cached_dspark_dataloader(folder, 2, False, num_workers=2, pad_to=pad_to)
    loader.multiprocessing_context = start
    for _ in range(2):
        found = [{key: tensor.clone() for key, tensor in batch.items()} for batch in loader]
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_batches_that_are_all_kept_stay_as_they_are(make_cache: MakeCache) -> None:
    """More than there are slabs: the rest goes torch's own way."""
    folder = make_cache(24, 2, 8, 1 << 14)
    expected = list(build_cached_dspark_dataloader(folder, 1, False))
    found = list(build_cached_dspark_dataloader(folder, 1, False, num_workers=1))
    assert all(
        torch.equal(one[key], other[key]) for one, other in zip(found, expected, strict=True) for key in CACHE_KEYS
    )


def test_batches_of_workers_lie_on_the_loader_s_slabs(make_cache: MakeCache) -> None:
    folder = make_cache(24, 2, 8, 1 << 14)
    loader = build_cached_dspark_dataloader(folder, 2, False, num_workers=1)
    places = [batch[HIDDEN].data_ptr() for batch in loader]
    assert len(set(places)) < len(places)
    assert CachedDSparkDataset(folder).slabs is None
    assert loader.dataset.slabs is None  # type: ignore[attr-defined]


def test_the_size_of_a_slab_is_that_of_the_largest_batch(make_cache: MakeCache) -> None:
    folder = make_ragged(make_cache(9, 2), [4, 1, 4])
    padded, unpadded = CachedDSparkDataset(folder), CachedDSparkDataset(folder, padded=False)
    batch = padded.__getitems__([5, 6])
    assert padded.batch_bytes(2) == sum(-(-2 * batch[0][key].nbytes // 64) * 64 for key in CACHE_KEYS)
    longest = max(len(unpadded[index][INPUT_IDS]) for index in range(9))
    assert unpadded.batch_bytes(2) <= padded.batch_bytes(2)
    assert unpadded.batch_bytes(1) == sum(
        -(-longest * padded[0][key][0].nbytes // 64) * 64 for key in (*CACHE_KEYS[:2], HIDDEN, LAST_HIDDEN)
    )
