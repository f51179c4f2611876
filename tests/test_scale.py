"""The arithmetic of benchmarks/scale.py: block schedules, costs of targets, lengths and bytes."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise, product
from typing import TYPE_CHECKING

import pytest

from benchmarks.made_caches import MadeRows, make_cache
from benchmarks.scale import (
    BATCH_TOKENS,
    EXPERTS,
    LARGE,
    MACHINE_GPUS,
    SEQ_LENGTH,
    SMALL,
    Demand,
    Load,
    Schedule,
    Target,
    add_with_dvc,
    block_bytes_tables,
    cut_blocks,
    demand_tables,
    draw,
    fsdp,
    links_table,
    load_blocks,
    lockstep,
    padding_of,
    plan_loads,
    positions_a_token,
    put_block,
    read_lengths,
    readers_table,
    replicate,
    scale_lengths,
    schedule_tables,
    sizes_of,
    slices,
    speeds_of,
    take_turns,
    tensor,
    time_of,
)
from benchmarks.workspace import ROOT
from dspark_cache.cache_files import CacheFolder
from dspark_cache.ragged import feature_specs
from dspark_cache.shard_file import ShardFile
from dspark_cache.verify import verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TINY = Target(name="tiny", hidden=8, layers=3, query=16, key_value=4, mlp=32)
GRID = [costs for count in range(1, 6) for costs in product((1, 2, 5), repeat=count)]


def loads_of(*costs: int) -> list[Load]:
    """Return blocks of one forward each."""
    return [Load(f"block-{number:016x}", (cost,), cost, (cost,)) for number, cost in enumerate(costs)]


def block_of(*forwards: int) -> Load:
    return Load("block-0", (1,), 1, forwards)


@lru_cache
def best_makespan(costs: tuple[int, ...], ranks: int) -> int:
    """Return the makespan of the best of all divisions."""
    divisions = product(range(ranks), repeat=len(costs))
    return min(
        max(sum(cost for cost, rank in zip(costs, chosen, strict=True) if rank == each) for each in range(ranks))
        for chosen in divisions
    )


# Schedules


def test_idle_is_the_share_of_all_ranks_time_up_to_the_last_end() -> None:
    assert Schedule(ranks=4, busy=6.0, makespan=2.0).idle == 0.25
    assert Schedule(ranks=1, busy=2.0, makespan=2.0).idle == 0


@pytest.mark.parametrize(
    "divide",
    [
        lambda loads: replicate(loads, [1.0]),
        lambda loads: replicate(loads, [0.5]),
        lambda loads: fsdp(loads, 1, 1),
        lambda loads: tensor(loads, 1, 1),
        lambda loads: tensor(loads, 1, 8),
        lambda loads: slices(loads, [1.0]),
    ],
)
def test_one_rank_or_one_tensor_group_is_never_idle(divide: Callable[[Sequence[Load]], Schedule]) -> None:
    assert divide(loads_of(5, 3, 3, 1)).idle == pytest.approx(0)


@pytest.mark.parametrize(("blocks", "ranks"), [(1, 2), (3, 4), (5, 1024)])
def test_ranks_beyond_equal_blocks_are_idle_for_the_whole_run(blocks: int, ranks: int) -> None:
    loads = loads_of(*[7] * blocks)
    for schedule in (replicate(loads, [1.0] * ranks), slices(loads, [1.0] * ranks)):
        assert schedule.makespan == 7
        assert schedule.idle == pytest.approx(1 - blocks / ranks)


def test_a_free_rank_takes_the_next_block() -> None:
    assert take_turns([4, 3, 2, 1], [1.0, 1.0]) == [5, 5]
    assert take_turns([1, 1, 4], [1.0, 1.0]) == [5, 1]  # in the order given, not the best one
    assert take_turns([], [1.0, 1.0]) == [0, 0]


def test_a_faster_rank_ends_sooner_and_takes_more() -> None:
    assert take_turns([6, 6, 6], [1.0, 3.0]) == [6, 4]
    schedule = replicate(loads_of(6, 6, 6), [1.0, 3.0])
    assert (schedule.busy, schedule.makespan) == (10, 6)
    assert schedule.idle == pytest.approx(1 - 10 / 12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_no_order_is_worse_than_list_scheduling_may_be(ranks: int) -> None:
    for costs in GRID:
        ends = take_turns(costs, [1.0] * ranks)
        best = best_makespan(tuple(sorted(costs)), ranks)
        assert sum(ends) == sum(costs)
        assert max(ends) >= max(max(costs), sum(costs) / ranks)
        assert best <= max(ends) <= (2 - 1 / ranks) * best  # Graham 1966
        longest_first = max(take_turns(sorted(costs, reverse=True), [1.0] * ranks))
        assert longest_first <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9  # Graham 1969


def test_lockstep_counts_forwards_and_waits_for_the_slowest_of_each() -> None:
    assert lockstep([block_of(5, 1), block_of(2, 2, 2), block_of(3)]) == 5 + 2 + 2
    assert lockstep([block_of(5, 1)]) == 6


def test_fsdp_groups_take_as_many_blocks_as_they_have_ranks() -> None:
    loads = loads_of(9, 8, 7, 6, 5)
    schedule = fsdp(loads, groups=2, size=2)  # 9 and 8; 7 and 6, then 5 and nothing
    assert (schedule.ranks, schedule.busy, schedule.makespan) == (4, 35, 12)
    assert fsdp(loads, groups=1, size=2).makespan == 9 + 7 + 5
    assert fsdp(loads, groups=1, size=8).makespan == 9


def test_fsdp_is_idle_where_forwards_differ_in_number_or_cost() -> None:
    assert fsdp([block_of(2, 2), block_of(2, 2)], 1, 2).idle == 0
    assert fsdp([block_of(2, 2), block_of(4)], 1, 2).idle == pytest.approx(1 - 8 / 12)


def test_tensor_groups_share_each_block() -> None:
    schedule = tensor(loads_of(8, 8, 4), groups=2, size=4)
    assert (schedule.ranks, schedule.makespan) == (8, 3)
    assert schedule.busy == 20
    assert schedule.idle == pytest.approx(1 - 20 / 24)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_hold_each_block_once(count: int) -> None:
    for costs in GRID[::7]:
        schedule = slices(loads_of(*costs), [1.0] * count)
        assert (schedule.ranks, schedule.busy) == (count, sum(costs))
        assert schedule.makespan >= max(max(costs), sum(costs) / count)


def test_a_slow_rank_cannot_give_its_slice_away() -> None:
    loads = loads_of(4, 4, 4, 4)
    assert slices(loads, [1.0, 0.5]).makespan == 16
    assert replicate(loads, [1.0, 0.5]).makespan == 12


def test_slices_are_divided_by_tokens_and_take_what_forwards_cost() -> None:
    loads = [Load(f"{number}", (tokens,), tokens, (10 * tokens,)) for number, tokens in enumerate((3, 2, 1))]
    schedule = slices(loads, [1.0, 2.0])
    assert (schedule.makespan, schedule.busy) == (30, 30 + 15)


def test_speeds_are_drawn_once_and_lie_in_their_range() -> None:
    assert speeds_of(3, 0) == [1.0, 1.0, 1.0]
    speeds = speeds_of(200, 0.1)
    assert speeds == speeds_of(200, 0.1)
    assert 0.9 <= min(speeds) < 0.91
    assert 1.09 < max(speeds) <= 1.1


# Blocks and forwards


def test_blocks_hold_every_sample_once_and_come_longest_first() -> None:
    lengths = [3, 9, 1, 30, 4, 4, 2]
    blocks = cut_blocks(lengths, token_bytes=10, block_bytes=120)
    assert sorted(length for block in blocks.values() for length in block) == sorted(lengths)
    assert list(blocks.values()) == [(30,), (3, 9), (4, 4, 2), (1,)]
    assert all(first >= second for first, second in pairwise(sum(block) for block in blocks.values()))


def test_samples_of_equal_length_are_distinct() -> None:
    assert list(cut_blocks([5, 5, 5], token_bytes=1, block_bytes=10).values()) in ([(5, 5), (5,)], [(5,), (5, 5)])


def test_a_block_costs_its_padded_forwards() -> None:
    load = Load.of("block-0", (2, 8, 4, 7), TINY, 16)  # rows of 8 and 7 in one forward, of 4 and 2 in another
    assert load.positions == 2 * 8 + 2 * 4
    assert load.forwards == (TINY.flops(16, 8), TINY.flops(8, 4))
    assert (load.tokens, load.cost) == (21, sum(load.forwards))
    assert padding_of([load]) == pytest.approx(24 / 21 - 1)


def test_batches_are_bounded_by_their_tokens() -> None:
    blocks = {"block-0": (4, 4, 4, 4)}
    assert len(load_blocks(blocks, TINY, 8)[0].forwards) == 2
    assert len(load_blocks(blocks, TINY, 16)[0].forwards) == 1
    assert plan_loads([BATCH_TOKENS] * 2, TINY)[0].forwards == (TINY.flops(BATCH_TOKENS, BATCH_TOKENS),) * 2


# Targets


def test_parameters_of_a_layer_are_counted_part_by_part() -> None:
    attention, mlp = 8 * 16 + 2 * 8 * 4 + 16 * 8, 3 * 8 * 32
    assert TINY.parameters(1) == 3 * (attention + mlp)
    sparse = Target(name="sparse", hidden=8, layers=3, query=16, key_value=4, mlp=32, experts=6, active=2)
    assert sparse.parameters(sparse.active) == 3 * (attention + 8 * 6 + 2 * mlp)
    assert sparse.layer_bytes == 2 * 3 * (attention + 8 * 6 + 6 * mlp)
    assert TINY.layer_bytes == 2 * TINY.parameters(1)


@pytest.mark.parametrize(
    ("target", "total", "active", "vocab_size"),
    [(SMALL, 8.2e9, 8.2e9, 151936), (LARGE, 70.6e9, 70.6e9, 128256), (EXPERTS, 235e9, 22e9, 151936)],
)
def test_targets_have_the_parameters_in_their_names(
    target: Target, total: float, active: float, vocab_size: int
) -> None:
    weights = 2 * vocab_size * target.hidden
    assert target.layer_bytes / 2 + weights == pytest.approx(total, rel=0.02)
    assert target.parameters(target.active) + weights == pytest.approx(active, rel=0.02)


def test_flops_are_two_a_parameter_and_attention_over_the_width() -> None:
    assert TINY.flops(1, 0) == 2 * TINY.parameters(1)
    assert EXPERTS.flops(1, 0) == 2 * EXPERTS.parameters(8)
    assert TINY.flops(10, 7) == 10 * (2 * TINY.parameters(1) + 3 * 2 * 2 * 16 * 7)  # scores and sums, 2 a product


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", 2 * 8 * 6), ("fp8_e4m3", 8 * 6 + 4 * 6)])
def test_states_are_five_layers_and_the_last(dtype: str, expected: int) -> None:
    assert TINY.form(dtype).token_bytes == expected


# Lengths


@pytest.mark.parametrize("mean", [40, 951, 2500])
def test_stretched_lengths_have_the_mean_that_is_asked_for(mean: int) -> None:
    lengths = [30, 50, 90, 200, 400, 3000]
    found = scale_lengths(lengths, mean)
    assert sum(found) / len(found) == pytest.approx(mean, abs=1)
    assert found == sorted(found)
    assert max(found) <= SEQ_LENGTH
    assert scale_lengths([lengths[0], 1 << 20], 3000)[1] == SEQ_LENGTH


@pytest.mark.parametrize("mean", [29, SEQ_LENGTH])
def test_a_mean_that_no_factor_gives_is_refused(mean: int) -> None:
    with pytest.raises(ValueError, match=f"expected a mean from 30 to 4095, found {mean}"):
        scale_lengths([30, 60], mean)


def test_lengths_are_drawn_with_a_fixed_seed() -> None:
    drawn = draw([1, 2, 3], 1000)
    assert drawn == draw([1, 2, 3], 1000)
    assert set(drawn) == {1, 2, 3}
    assert len(drawn) == 1000
    assert all(280 < drawn.count(number) < 390 for number in (1, 2, 3))


def test_lengths_are_those_of_the_tokenizer_uncut(tmp_path: Path) -> None:
    inputs = ROOT / "inputs"
    lengths = read_lengths(inputs / "data/conversations.jsonl", inputs / "target", tmp_path)
    assert len(lengths) == 64
    assert max(lengths) > 256 > min(lengths)


# What is measured


def test_the_measured_cache_is_sound_and_has_the_bytes_that_are_derived(tmp_path: Path) -> None:
    lengths, form = [5, 3, 9, 1], TINY.form()
    make_cache(tmp_path / "cache", sizes_of(lengths, form), "ragged", shard_bytes=10 * form.token_bytes)
    assert verify_cache(CacheFolder(tmp_path / "cache"), "values").findings == []
    files = [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(("shard-", "samples-"))]
    loads = load_blocks(cut_blocks(lengths, form.token_bytes, 10 * form.token_bytes), TINY)
    demand = Demand(TINY, loads)
    assert len(files) == 2 * len(loads) == 4
    assert demand.num_bytes() == sum(path.stat().st_size for path in files)
    assert demand.tokens == 18
    assert demand.flops == sum(load.cost for load in loads)


def test_the_measured_block_is_what_capture_writes(tmp_path: Path) -> None:
    source = MadeRows(sizes_of([5, 3], TINY.form()), "bf16")
    put_block(tmp_path / "block", source, TINY.form())
    ShardFile(tmp_path / "block").expect(feature_specs(8, 2, TINY.form()), exactly=True)


@pytest.mark.dvc
@pytest.mark.slow
def test_the_real_dvc_is_timed_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files/one").write_bytes(b"1")
    wall, cpu = add_with_dvc(tmp_path / "files", tmp_path, 1)
    assert 0.1 < cpu < wall + 60
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    assert (tmp_path / "files/one").read_bytes() == b"1"


def test_time_is_taken_of_the_whole_action() -> None:
    wall, cpu = time_of(lambda: sum(range(2_000_000)))
    assert 0.005 < cpu < 5
    assert wall > 0.005


# Tables

RATES = {
    "block, GB/s": 0.5,
    "to fp8, GB/s of bf16": 0.25,
    "verify bytes, GB/s": 1.0,
    "verify values, GB/s": 0.125,
    "dvc add, GB/s": 0.5,
    "open, shards/s": 2.0,
}


def row_of(table: list[list[str]], name: str, column: int = 1) -> float:
    (row,) = (row for row in table if row[0] == name)
    return float(row[column].replace(",", ""))


def test_costs_and_hours_follow_from_bytes_flops_and_rates() -> None:
    demand = Demand(SMALL, plan_loads([1000] * 20_000, SMALL))
    size, gpu_flops = demand.num_bytes(), 4e14
    costs, steps = demand_tables([demand], RATES, gpu_flops)
    assert row_of(costs, "tokens, 10^9") == 0.02
    assert row_of(costs, "bytes a token") == round(size / 2e7) == 2 * 4096 * 6 + 5
    assert row_of(costs, "cache in bf16, TB") == pytest.approx(0.98, abs=0.05)
    assert row_of(costs, "cache in fp8, TB") == pytest.approx(0.49, abs=0.05)
    assert row_of(costs, "GPU hours (assumed)") == pytest.approx(demand.flops / gpu_flops / 3600, abs=0.05)
    made = size / (demand.flops / gpu_flops) / 1e9
    assert row_of(costs, "GB/s of states a GPU makes (assumed)") == pytest.approx(made, abs=0.005)
    assert row_of(costs, "cores to hash and write them") == pytest.approx(made / 0.5, abs=0.005)
    assert row_of(costs, "GB/s to the disk of 8 GPUs") == pytest.approx(8 * made, abs=0.05)
    assert row_of(costs, "shards, and as many samples files") == len(demand.loads)
    hours = size / 1e9 / 3600
    assert row_of(steps, "capture, 8 GPUs (assumed)") == pytest.approx(demand.flops / gpu_flops / 3600 / 8, abs=0.05)
    assert row_of(steps, "capture, 8 writer threads") == pytest.approx(hours / (8 * 0.5), abs=0.05)
    assert row_of(steps, "capture, 1 writer thread (tensor)") == pytest.approx(hours / 0.5, abs=0.05)
    assert row_of(steps, "shards to fp8, 1 thread") == pytest.approx(hours / 0.25, abs=0.05)
    assert row_of(steps, "verify bytes, 32 threads") == pytest.approx(hours / 32, abs=0.05)
    assert row_of(steps, "verify values, 2 threads") == pytest.approx(hours / (2 * 0.125), abs=0.05)
    assert row_of(steps, "DVC hashes, 4 threads") == pytest.approx(hours / (4 * 0.5), abs=0.05)
    assert row_of(steps, "push at 10 Gbit/s") == pytest.approx(hours / 1.25, abs=0.05)
    assert row_of(steps, "opening the cache, seconds") == round(len(demand.loads) / 2)


def test_the_ledger_is_as_large_as_its_records() -> None:
    demand = Demand(SMALL, plan_loads([1000] * 1000, SMALL))
    assert 1000 * 50 < demand.ledger_bytes() < 1000 * 100


def test_gpus_that_share_a_target_gather_seven_eighths_of_it() -> None:
    table = links_table(4e14)
    seconds = LARGE.flops(BATCH_TOKENS, 951) / 4e14
    expected = LARGE.layer_bytes * 7 / 8 / seconds / 1e9
    assert row_of(table, "fsdp, all layers in a forward of 8192 tokens") == pytest.approx(expected, abs=0.5)
    assert row_of(table, "fsdp, all layers in a forward of 32768 tokens") == pytest.approx(expected / 4, abs=0.5)
    # Ring: each sum of H 16-bit numbers goes out and comes back but for the rank's own eighth; 8 ranks share a token.
    moved = 80 * 2 * 2 * (2 * 8192) * 7 / 8
    tokens = MACHINE_GPUS * 4e14 / LARGE.flops(1, 951)
    assert row_of(table, "tensor, two sums of each token in each layer") == pytest.approx(moved * tokens / 1e9, abs=0.5)


def test_trainers_read_bytes_a_token_times_tokens_times_gpus() -> None:
    demands = [Demand(target, plan_loads([1000] * 1000, target)) for target in (SMALL, LARGE)]
    table = readers_table(demands, 20_000)
    assert table[0][1:] == ["8B bf16", "8B fp8_e4m3", "70B bf16", "70B fp8_e4m3"]
    assert ["64", "62.9", "31.5", "125.8", "63.0"] in table
    assert [row[0] for row in table[1:]] == [f"{8 << exponent}" for exponent in range(7)]


def test_a_batch_has_the_positions_of_its_longest_sample() -> None:
    assert positions_a_token([1, 3, 2, 2, 4], 2) == pytest.approx((2 * 3 + 2 * 2 + 4) / 12)


def test_every_division_is_simulated_from_one_rank_to_1024() -> None:
    lengths = draw([100, 900, 2000], 300)
    plan = {target.name: plan_loads(lengths, target, 1 << 26) for target in (SMALL, LARGE, EXPERTS)}
    replicated, sliced, grouped = schedule_tables({"all": plan})
    assert replicated[1] == ["1", "0.00 %", "0.00 %"]
    assert [row[0] for row in replicated[1:]] == [f"{1 << exponent}" for exponent in range(11)]
    idle = replicate(plan[SMALL.name], [1.0] * 64).idle
    assert replicated[7][:2] == ["64", f"{100 * idle:.2f} %"]
    assert [row[0] for row in sliced[1:]] == ["2", "8", "32", "64"]
    assert [row[0] for row in grouped[1:]] == [f"{8 << exponent}" for exponent in range(8)]
    assert grouped[1][2] == "0.00 %"
    idle = fsdp(plan[EXPERTS.name], 2, 8).idle
    assert grouped[2][3] == f"{100 * idle:.2f} %"


def test_larger_blocks_are_fewer_and_padded_less() -> None:
    lengths = draw([100, 900, 2000], 2000)
    small, large = block_bytes_tables(lengths)
    assert [row[0] for row in small[1:]] == [f"{1 << exponent} MiB" for exponent in range(8, 14)]
    counts = [int(row[1].replace(",", "")) for row in small[1:]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 20 * counts[-1]
    two_gib = load_blocks(cut_blocks(lengths, SMALL.form().token_bytes, 2 << 30), SMALL, 4096)
    assert small[4][4] == f"{100 * padding_of(two_gib):.1f} %"
    assert float(small[1][-1][:-2]) > float(small[-1][-1][:-2])
    two_gib = load_blocks(cut_blocks(lengths, LARGE.form().token_bytes, 2 << 30), LARGE, 32768)
    assert large[4][6] == f"{100 * fsdp(two_gib, 8, 8).idle:.2f} %"
    assert len({len(row) for row in large}) == 1
