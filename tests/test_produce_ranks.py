"""The precompute loop of the reference's API in real processes: a collective in every batch, over gloo."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dspark_cache import write_shard
from dspark_cache.offline_cache import write_cache_shards, write_cache_shards_distributed
from tests.test_produce import contents, dspark_batch, loader_of

if TYPE_CHECKING:
    from pathlib import Path

LOGGER = logging.getLogger("tests.produce")
SHARD_SIZE = 3


def sharded_target(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute as a target spread over the ranks does: no rank gets on before all have entered."""
    entered = torch.ones(1)
    dist.all_reduce(entered)
    assert int(entered) == dist.get_world_size()
    return dspark_batch(batch)


def longest(steps: int) -> int:
    most = torch.tensor(steps)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def run_rank(rank: int, world_size: int, num_samples: int, batch_size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}.store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    loader = loader_of(num_samples, batch_size)
    write_cache_shards_distributed(
        loader, folder, SHARD_SIZE, world_size, rank, sharded_target, write_shard, LOGGER, sync_max_steps=longest
    )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "num_samples", "batch_size"),
    [
        (3, 8, 2),  # as many shards as ranks, the last one shorter
        (2, 2, 1),  # one shard: a rank without samples
        pytest.param(4, 17, 4, marks=pytest.mark.slow),
        pytest.param(2, 20, 3, marks=pytest.mark.slow),
    ],
)
def test_real_ranks_write_what_one_process_writes(
    tmp_path: Path, world_size: int, num_samples: int, batch_size: int
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    write_cache_shards(loader_of(num_samples, batch_size), str(alone), SHARD_SIZE, 0, dspark_batch, write_shard, LOGGER)
    mp.spawn(run_rank, args=(world_size, num_samples, batch_size, str(together)), nprocs=world_size)
    assert contents(together) == contents(alone)
