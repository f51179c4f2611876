"""Precompute loops: any batch size, shard size, world size or interruption gives the same shards."""

from __future__ import annotations

import logging
import multiprocessing
import re
from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from dspark_cache import CACHE_KEYS, compute_batch_cache, write_shard
from dspark_cache.offline_cache import (
    _sequential_subset_loader,
    _ShardAccumulator,
    dataloader_from_sample,
    existing_shard_indices,
    partition_cache_shards,
    resume_start_sample,
    write_cache_shards,
    write_cache_shards_distributed,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOGGER = logging.getLogger("tests.produce")


class Recorder:
    """Keep shards in memory, as a `write_shard_fn` of a caller's own."""

    def __init__(self) -> None:
        self.shards: dict[int, list[int]] = {}

    def __call__(self, output_dir: str, shard_index: int, samples: dict[str, torch.Tensor]) -> str:
        assert set(samples) == {"a", "b"}
        assert torch.equal(samples["a"].float() * 2, samples["b"])
        self.shards[shard_index] = samples["a"].tolist()
        return f"{output_dir}/{shard_index}"


def batch_of(numbers: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(numbers, dtype=torch.int64)
    return {"a": ids, "b": ids.float() * 2}


def cut(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


def collate(items: list[tuple[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {"ids": torch.stack([item for (item,) in items])}


def loader_of(num_samples: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(num_samples)), batch_size=batch_size, collate_fn=collate)


def compute(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch_of(batch["ids"].tolist())


def steps_of(num_samples: int, shard_size: int, world_size: int, batch_size: int) -> list[int]:
    counts = [partition_cache_shards(num_samples, shard_size, world_size, rank)[2] for rank in range(world_size)]
    return [-(-samples // batch_size) for samples in counts]


# --- accumulator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", range(1, 6))
def test_any_batches_give_the_same_shards(shard_size: int) -> None:
    for sizes in product((0, 1, 2, 5, 11), repeat=3):
        recorder = Recorder()
        accumulator = _ShardAccumulator("out", shard_size, 7, recorder, LOGGER)
        numbers = list(range(sum(sizes)))
        at = 0
        for size in sizes:
            accumulator.add(batch_of(numbers[at : at + size]))
            at += size
            assert accumulator._buffered == at % shard_size
            assert len(recorder.shards) == at // shard_size
        accumulator.finalize()
        accumulator.finalize()
        assert recorder.shards == dict(enumerate(cut(numbers, shard_size), start=7))


def test_what_is_left_of_a_batch_does_not_keep_its_memory() -> None:
    accumulator = _ShardAccumulator("out", 3, 0, Recorder(), LOGGER)
    accumulator.add(batch_of(list(range(10))))
    (chunk,) = accumulator._chunks
    assert chunk["a"].tolist() == [9]
    assert chunk["a"].untyped_storage().nbytes() == 8


def test_each_shard_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    accumulator = _ShardAccumulator("out", 2, 5, Recorder(), LOGGER)
    accumulator.add(batch_of([1, 2, 3]))
    accumulator.finalize()
    assert caplog.messages == ["wrote out/5 (2 samples)", "wrote out/6 (1 samples)"]


def test_batches_that_do_not_fit_together_are_refused() -> None:
    accumulator = _ShardAccumulator("out", 2, 0, Recorder(), LOGGER)
    message = "a batch needs tensors with the same number of samples, found {'a': 2, 'b': 3}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        accumulator.add({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(ValueError, match=r"^a batch needs tensors with the same number of samples, found {}$"):
        accumulator.add({})


@pytest.mark.parametrize("shard_size", [0, -1])
def test_shards_of_nothing_are_refused(shard_size: int) -> None:
    with pytest.raises(ValueError, match=f"^shard_size must be at least 1, found {shard_size}$"):
        _ShardAccumulator("out", shard_size, 0, Recorder(), LOGGER)


# --- loops ------------------------------------------------------------------------------------------------------

GRID = [*product(range(10), (1, 2, 3, 7), (1, 2, 4))]


@pytest.mark.parametrize(("num_samples", "shard_size", "batch_size"), GRID)
def test_ranks_together_write_what_one_process_writes(num_samples: int, shard_size: int, batch_size: int) -> None:
    loader = loader_of(num_samples, batch_size)
    alone = Recorder()
    write_cache_shards(loader, "out", shard_size, 0, compute, alone, LOGGER)
    assert alone.shards == dict(enumerate(cut(list(range(num_samples)), shard_size)))
    for world_size in range(1, 5):
        steps = steps_of(num_samples, shard_size, world_size, batch_size)
        together: dict[int, list[int]] = {}
        for rank in range(world_size):
            recorder = Recorder()
            calls: list[Any] = []
            synced: list[int] = []

            def counted(batch: dict[str, torch.Tensor], calls: list[Any] = calls) -> dict[str, torch.Tensor]:
                calls.append(batch)
                return compute(batch)

            def sync(own: int, synced: list[int] = synced, most: int = max(steps)) -> int:
                synced.append(own)
                return most

            write_cache_shards_distributed(
                loader, "out", shard_size, world_size, rank, counted, recorder, LOGGER, sync_max_steps=sync
            )
            assert synced == [steps[rank]]
            assert len(calls) == max(steps)
            assert not together.keys() & recorder.shards.keys()
            together |= recorder.shards
        assert together == alone.shards


def test_one_process_needs_no_synchronisation() -> None:
    recorder = Recorder()
    write_cache_shards_distributed(loader_of(5, 2), "out", 2, 1, 0, compute, recorder, LOGGER)
    assert recorder.shards == {0: [0, 1], 1: [2, 3], 2: [4]}


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1]]),  # a rank repeats its own first batch
        (2, [[0], [0], [0], [0], [0]]),  # one without samples takes the data set's first sample
    ],
)
def test_dummy_forwards_repeat_a_real_batch_and_are_dropped(rank: int, expected: list[list[int]]) -> None:
    calls: list[list[int]] = []
    recorder = Recorder()

    def counted(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append(batch["ids"].tolist())
        return compute(batch)

    write_cache_shards_distributed(
        loader_of(12, 2), "out", 6, 3, rank, counted, recorder, LOGGER, sync_max_steps=lambda _: 5
    )
    assert calls == expected
    assert recorder.shards == ({0: [0, 1, 2, 3, 4, 5]} if rank == 0 else {})


def test_fewer_steps_than_a_rank_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^sync_max_steps gave 1 for rank 0, which has 2 steps$"):
        write_cache_shards_distributed(
            loader_of(4, 2), "out", 4, 1, 0, compute, Recorder(), LOGGER, sync_max_steps=lambda _: 1
        )


def test_an_impossible_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^expected num_samples >= 0, .* found 4, 2, 2, 2$"):
        write_cache_shards_distributed(loader_of(4, 2), "out", 2, 2, 2, compute, Recorder(), LOGGER)


def test_no_gradient_is_recorded() -> None:
    seen = []

    def look(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append(torch.is_grad_enabled())
        return compute(batch)

    write_cache_shards(loader_of(2, 2), "out", 2, 0, look, Recorder(), LOGGER)
    write_cache_shards_distributed(loader_of(2, 2), "out", 2, 1, 0, look, Recorder(), LOGGER)
    assert seen == [False, False]


# --- files ------------------------------------------------------------------------------------------------------


def dspark_batch(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = batch["ids"]
    generators = [torch.Generator().manual_seed(int(index)) for index in ids]
    captured = {
        "input_ids": ids[:, None].expand(-1, 3),
        "loss_mask": torch.ones(len(ids), 3, dtype=torch.bool),
        "target_hidden_states": torch.stack([torch.randn(3, 4, generator=g) for g in generators]),
        "target_last_hidden_states": torch.stack([torch.randn(3, 2, generator=g) for g in generators]),
    }
    return compute_batch_cache(captured, torch.bfloat16)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shards of 8 samples by 3, written by one process with batches of 4."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_cache_shards(loader_of(8, 4), str(folder), 3, 0, dspark_batch, write_shard, LOGGER)
    return folder


def test_shards_hold_the_samples_in_order(undisturbed: Path) -> None:
    shards = [load_file(path) for path in sorted(undisturbed.iterdir())]
    assert [shard["input_ids"][:, 0].tolist() for shard in shards] == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(("world_size", "batch_size"), [*product((1, 2, 4), (1, 2, 5))])
def test_files_of_ranks_are_those_of_one_process(
    undisturbed: Path, tmp_path: Path, world_size: int, batch_size: int
) -> None:
    most = max(steps_of(8, 3, world_size, batch_size))
    for rank in range(world_size):
        write_cache_shards_distributed(
            loader_of(8, batch_size),
            str(tmp_path),
            3,
            world_size,
            rank,
            dspark_batch,
            write_shard,
            LOGGER,
            lambda _: most,
        )
    assert contents(tmp_path) == contents(undisturbed)


def interrupted_after(batches: int) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    left = [None] * batches

    def compute_or_die(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return dspark_batch(batch)

    return compute_or_die


@pytest.mark.parametrize(
    ("batch_size", "batches"), [(size, done) for size in (1, 2, 4, 5) for done in range(-(-8 // size))]
)
def test_an_interrupted_and_resumed_run_gives_the_same_bytes(
    undisturbed: Path, tmp_path: Path, batch_size: int, batches: int
) -> None:
    out, loader = str(tmp_path), loader_of(8, batch_size)
    with pytest.raises(KeyboardInterrupt):
        write_cache_shards(loader, out, 3, 0, interrupted_after(batches), write_shard, LOGGER)
    done = existing_shard_indices(out)
    assert done == set(range(batches * batch_size // 3))
    rest = dataloader_from_sample(loader, resume_start_sample(done, 3))
    write_cache_shards(rest, out, 3, len(done), dspark_batch, write_shard, LOGGER)
    assert contents(tmp_path) == contents(undisturbed)


# --- loaders over a part ----------------------------------------------------------------------------------------


def numbers_of(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch["ids"].tolist() for batch in loader]


@pytest.mark.parametrize(("start", "end"), [*product(range(6), range(6))])
def test_a_part_is_read_in_order_whatever_the_source_s_order(start: int, end: int) -> None:
    source = DataLoader(TensorDataset(torch.arange(5)), batch_size=2, shuffle=True, drop_last=True, collate_fn=collate)
    assert numbers_of(_sequential_subset_loader(source, start, end)) == cut(list(range(5))[start:end], 2)


@pytest.mark.parametrize("start", range(8))
def test_a_resumed_loader_goes_on_to_the_end(start: int) -> None:
    assert numbers_of(dataloader_from_sample(loader_of(5, 2), start)) == cut(list(range(5))[start:], 2)


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^start_sample must be at least 0, found -1$"):
        dataloader_from_sample(loader_of(5, 2), -1)


def test_a_loader_without_a_batch_size_is_refused() -> None:
    source = DataLoader(TensorDataset(torch.arange(5)), batch_sampler=[[0, 1], [4]])
    with pytest.raises(ValueError, match=r"^the dataloader must have a batch_size: with a batch_sampler there is no"):
        _sequential_subset_loader(source, 0, 5)


def test_worker_settings_are_the_source_s() -> None:
    source = DataLoader(
        TensorDataset(torch.arange(5)),
        batch_size=2,
        collate_fn=collate,
        num_workers=1,
        prefetch_factor=5,
        persistent_workers=True,
        multiprocessing_context=multiprocessing.get_context("spawn"),
        pin_memory=True,
        timeout=7,
        worker_init_fn=print,
        generator=torch.Generator(),
    )
    mirrored = [
        "batch_size",
        "collate_fn",
        "generator",
        "multiprocessing_context",
        "num_workers",
        "persistent_workers",
        "pin_memory",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
    ]
    for loader in (_sequential_subset_loader(source, 1, 3), dataloader_from_sample(source, 1)):
        assert {name: getattr(loader, name) for name in mirrored} == {name: getattr(source, name) for name in mirrored}


# --- batches ----------------------------------------------------------------------------------------------------


def captured_batch() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(6, dtype=torch.int32).reshape(2, 3),
        "loss_mask": torch.tensor([[True, False, True], [False, False, True]]),
        "target_hidden_states": torch.randn(2, 3, 4, requires_grad=True),
        "target_last_hidden_states": torch.randn(2, 3, 2, dtype=torch.float64),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wrap", [dict, lambda batch: SimpleNamespace(**batch, attention_mask=None)])
def test_a_captured_batch_becomes_the_tensors_of_a_shard(dtype: torch.dtype, wrap: Callable[[Any], Any]) -> None:
    captured = captured_batch()
    batch = compute_batch_cache(wrap(captured), dtype)
    assert tuple(batch) == CACHE_KEYS
    assert [tensor.dtype for tensor in batch.values()] == [torch.int64, torch.int64, dtype, dtype]
    assert not any(tensor.requires_grad for tensor in batch.values())
    assert batch["loss_mask"].tolist() == [[1, 0, 1], [0, 0, 1]]
    assert all(torch.equal(batch[key], captured[key].detach().to(batch[key].dtype)) for key in CACHE_KEYS)


@pytest.mark.parametrize(("dtype", "ulp"), [(torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)], ids=["bf16", "fp16"])
def test_states_are_rounded_to_nearest_even(dtype: torch.dtype, ulp: float) -> None:
    values = torch.tensor([1 + ulp / 2, 1 + ulp * 3 / 2, 1 + ulp / 2 + 2.0**-20, -1 - ulp / 2])
    states = values.reshape(1, 1, 4)
    batch = compute_batch_cache(
        captured_batch() | {"target_hidden_states": states, "target_last_hidden_states": states}, dtype
    )
    for key in ("target_hidden_states", "target_last_hidden_states"):
        assert batch[key].flatten().tolist() == [1, 1 + 2 * ulp, 1 + ulp, -1]


def test_missing_fields_are_all_named() -> None:
    message = "the captured batch is missing required fields ['loss_mask', 'target_last_hidden_states']"
    captured = captured_batch() | {"loss_mask": None}
    del captured["target_last_hidden_states"]
    for batch in (captured, SimpleNamespace(**captured)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            compute_batch_cache(batch, torch.bfloat16)
