"""What 1.3 million samples take of an 8B, a 70B and a 235B target: measured rates, derived costs, simulated ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.scale --data FILE --target DIR --work EMPTY_DIR --rates RATES.json

Measured on one core and one disk: hashing, writing, verifying, reading, the real `dvc add`. Derived from the targets'
configurations: FLOPs and bytes of a token. Assumed, since no GPU is asked: the share of its peak that a GPU reaches.
Simulated: which rank computes which block, with the library's own cutting of blocks and batches, for the lengths of
the conversations in FILE as the tokenizer in DIR gives them, drawn with replacement. RATES.json is read if it is
there, and written otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.made_caches import MadeRows, Sizes, make_cache
from benchmarks.workspace import logical_bytes, print_table
from dspark_cache import CachedDSparkDataset, build_cached_dspark_dataloader
from dspark_cache.blocks import Block, Slice, cut_batches, longest_first, plan_blocks
from dspark_cache.cache_files import CacheFolder
from dspark_cache.cache_plan import shard_bytes as bytes_of_shard
from dspark_cache.chat_templates import resolve_chat_template
from dspark_cache.files import dump_json, put_file
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.rows import open_source
from dspark_cache.schema import HIDDEN, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardWriter
from dspark_cache.tokenizing import TokenizedSample, TokenizeOptions, TokenizerSource, load_tokenizer, tokenize_rows
from dspark_cache.verify import verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GIB = 1 << 30
SEQ_LENGTH = 4096
SAMPLES = 1_300_000
PAPER_MEAN = 951
"""Tokens of a mean sample in DSpark's paper, of at most 4096."""
CAPTURED_LAYERS = 5
BLOCK_BYTES = 2 * GIB
BATCH_TOKENS = 8192
"""Defaults of `target.block_bytes` and `runtime.max_tokens_per_batch`."""
MACHINE_GPUS = 8
SEED = 0
Rates = dict[str, list[float]]
"""Each measurement with its repetitions: amounts by processor seconds, and by seconds of the clock."""
BY_THE_CLOCK = ", by the clock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What costs follow from; widths and numbers are those of a decoder layer.

    Attributes:
        name: What it is called in the tables.
        hidden: H.
        layers: Decoder layers.
        query: Heads times their width.
        key_value: The same of keys, and of values.
        mlp: Width of the feed-forward part, or of one expert.
        experts: How many experts there are; 0: it is dense.
        active: How many of them a token uses.
    """

    name: str
    hidden: int
    layers: int
    query: int
    key_value: int
    mlp: int
    experts: int = 0
    active: int = 1

    def parameters(self, mlps: int) -> int:
        """Return the parameters of all decoder layers with as many feed-forward parts, norms left out."""
        attention = 2 * self.hidden * (self.query + self.key_value)
        return self.layers * (attention + self.hidden * self.experts + 3 * self.hidden * self.mlp * mlps)

    def flops(self, positions: int, width: int) -> int:
        """Return the FLOPs of a forward over so many positions, rows times width, in rows as wide as `width`.

        Every position attends to the whole width, as it does under a mask. No lm_head: capture does not run it.
        """
        return positions * (2 * self.parameters(self.active) + 4 * self.layers * self.query * width)

    @property
    def layer_bytes(self) -> int:
        """Bytes of all decoder layers in bf16."""
        return 2 * self.parameters(self.experts or 1)

    def form(self, dtype: str = "bf16") -> StatesForm:
        """Return how its states are stored."""
        return StatesForm(dtype=dtype, hidden_dim=CAPTURED_LAYERS * self.hidden, last_dim=self.hidden)


SMALL = Target(name="8B", hidden=4096, layers=36, query=32 * 128, key_value=8 * 128, mlp=12288)
LARGE = Target(name="70B", hidden=8192, layers=80, query=64 * 128, key_value=8 * 128, mlp=28672)
EXPERTS = Target(
    name="235B MoE", hidden=4096, layers=94, query=64 * 128, key_value=4 * 128, mlp=1536, experts=128, active=8
)
TARGETS = (SMALL, LARGE, EXPERTS)


# Simulation


@dataclass(frozen=True, slots=True)
class Load:
    """A planned block, and what its forwards cost.

    Attributes:
        name: The library's name of it.
        lengths: Tokens of its samples.
        positions: Rows times width of all forwards.
        forwards: FLOPs of each forward, in the order in which they are run.
    """

    name: str
    lengths: tuple[int, ...]
    positions: int
    forwards: tuple[int, ...]

    @classmethod
    def of(cls, name: str, lengths: tuple[int, ...], target: Target, max_tokens: int) -> Load:
        """Form the batches of a block; the rows of each are padded to the longest of them."""
        batches = [[lengths[index] for index in batch] for batch in cut_batches(lengths, max_tokens)]
        shapes = [(len(batch) * max(batch), max(batch)) for batch in batches]
        flops = tuple(target.flops(positions, width) for positions, width in shapes)
        return cls(name, lengths, sum(positions for positions, _ in shapes), flops)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(self.lengths)

    @property
    def cost(self) -> int:
        """FLOPs of all forwards."""
        return sum(self.forwards)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What ranks did.

    Attributes:
        ranks: How many.
        busy: Time that each computed, added up.
        makespan: When the last one ended.
    """

    ranks: int
    busy: float
    makespan: float

    @property
    def idle(self) -> float:
        """Share of the ranks' time until the last one ended in which they did not compute."""
        return 1 - self.busy / (self.ranks * self.makespan)


def cut_blocks(lengths: Sequence[int], token_bytes: int, block_bytes: int) -> dict[str, tuple[int, ...]]:
    """Plan the blocks of distinct samples; return the lengths in each by its name, in the order of computing."""
    wanted = {str(number): length for number, length in enumerate(lengths)}
    plan, _ = plan_blocks(wanted, {}, [], bytes_per_token=token_bytes, block_bytes=block_bytes)
    blocks = {block.name: tuple(wanted[key] for key in block.samples) for block in plan}
    return {name: blocks[name] for name in longest_first({name: sum(block) for name, block in blocks.items()})}


def load_blocks(blocks: dict[str, tuple[int, ...]], target: Target, max_tokens: int = BATCH_TOKENS) -> list[Load]:
    """Work out the forwards of each block."""
    return [Load.of(name, lengths, target, max_tokens) for name, lengths in blocks.items()]


def take_turns(costs: Iterable[float], speeds: Sequence[float]) -> list[float]:
    """Give each piece of work, in order, to the rank that is free first; return when each rank ends."""
    free = [(0.0, rank) for rank in range(len(speeds))]
    for cost in costs:
        start, rank = free[0]
        heapq.heapreplace(free, (start + cost / speeds[rank], rank))
    return [end for end, _ in sorted(free, key=lambda item: item[1])]


def replicate(loads: Sequence[Load], speeds: Sequence[float]) -> Schedule:
    """Let each rank hold the target and take the next block when it is free."""
    ends = take_turns((load.cost for load in loads), speeds)
    return Schedule(len(speeds), sum(ends), max(ends))


def fsdp(loads: Sequence[Load], groups: int, size: int) -> Schedule:
    """Let each group take `size` blocks, one a rank; a forward ends for all of them with the slowest."""
    rounds = [lockstep(loads[start : start + size]) for start in range(0, len(loads), size)]
    return Schedule(groups * size, sum(load.cost for load in loads), max(take_turns(rounds, [1.0] * groups)))


def lockstep(loads: Sequence[Load]) -> int:
    """Return how long blocks take whose forwards are collectives; who has fewer of them runs dummies."""
    return sum(max(step) for step in zip_longest(*(load.forwards for load in loads), fillvalue=0))


def tensor(loads: Sequence[Load], groups: int, size: int) -> Schedule:
    """Let each group compute one block at a time, all of its ranks a share of every layer."""
    ends = take_turns((load.cost for load in loads), [float(size)] * groups)
    return Schedule(groups * size, sum(ends) * size, max(ends))


def slices(loads: Sequence[Load], speeds: Sequence[float]) -> Schedule:
    """Let each rank compute a slice of its own, divided beforehand."""
    tokens, costs = {load.name: load.tokens for load in loads}, {load.name: load.cost for load in loads}
    count = len(speeds)
    chosen = [Slice(number, count).choose(tokens) for number in range(1, count + 1)]
    ends = [sum(costs[name] for name in names) / speed for names, speed in zip(chosen, speeds, strict=True)]
    return Schedule(count, sum(ends), max(ends))


def speeds_of(ranks: int, spread: float) -> list[float]:
    """Draw the speeds of ranks, evenly from 1 - `spread` to 1 + `spread`."""
    generator = random.Random(SEED)
    return [generator.uniform(1 - spread, 1 + spread) for _ in range(ranks)]


# Lengths


def read_lengths(data: Path, target: Path, scratch: Path) -> list[int]:
    """Return the tokens of each conversation, whole."""
    source = TokenizerSource(path=str(target), trust_remote_code=False)
    template = resolve_chat_template(None, load_tokenizer(source))
    options = TokenizeOptions(seq_length=1 << 20, mask_reasoning_content=False, mask_generation_prompt=False)
    rows = open_source(data, scratch).rows
    samples = tokenize_rows(rows, range(len(rows)), source, template, options, 1)
    return [len(sample.input_ids) for _, sample in samples if isinstance(sample, TokenizedSample)]


def scale_lengths(lengths: Sequence[int], mean: float) -> list[int]:
    """Stretch lengths by the one factor with which their mean, cut to `SEQ_LENGTH`, is `mean`.

    Raises:
        ValueError: No factor gives it.
    """
    low, high = 0.0, float(SEQ_LENGTH)
    if not min(lengths) <= mean < SEQ_LENGTH:
        raise ValueError(f"expected a mean from {min(lengths)} to {SEQ_LENGTH - 1}, found {mean}")
    for _ in range(60):
        factor = (low + high) / 2
        is_less = statistics.fmean(_cut(lengths, factor)) < mean
        low, high = (factor, high) if is_less else (low, factor)
    return _cut(lengths, high)


def _cut(lengths: Sequence[int], factor: float = 1.0) -> list[int]:
    return [min(SEQ_LENGTH, max(1, round(length * factor))) for length in lengths]


def draw(lengths: Sequence[int], count: int) -> list[int]:
    """Draw lengths with replacement."""
    return random.Random(SEED).choices(lengths, k=count)


# Rates of this machine


def sizes_of(lengths: Sequence[int], form: StatesForm) -> Sizes:
    """Return what a cache of samples of these lengths in this form looks like."""
    layers = form.hidden_dim // form.last_dim
    return Sizes(lengths=lengths, seq_length=SEQ_LENGTH, hidden_size=form.last_dim, layers=layers, dtype=form.dtype)


def put_block(path: Path, source: MadeRows, form: StatesForm) -> None:
    """Write a block as capture does: sample by sample, hashed, flushed, renamed."""
    specs = feature_specs(sum(source.lengths), len(source.lengths), form)
    with put_file(path) as temporary, ShardWriter(temporary, specs) as writer:
        for key in (HIDDEN, LAST_HIDDEN):
            for sample, length in enumerate(source.lengths):
                writer.append(key, source.rows(key, sample, 0, length))
        writer.append(SAMPLE_OFFSETS, torch.tensor([0, *source.lengths]).cumsum(0))
        writer.finish()


def time_of(action: Callable[[], object]) -> tuple[float, float]:
    """Return wall and processor seconds of an action, those of its ended children included."""
    os.sync()
    before, start = _cpu_seconds(), time.perf_counter()
    action()
    return time.perf_counter() - start, _cpu_seconds() - before


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_rates(work: Path, lengths: Sequence[int]) -> Rates:
    """Measure everything a few times, on 2 GB of states of the 8B target, and the slow parts on a quarter of them."""
    rates: Rates = {}

    def note(name: str, amount: float, action: Callable[..., object], *arguments: Any, repeats: int = 3) -> None:
        for _ in range(repeats):
            wall, cpu = time_of(lambda: action(*arguments))
            rates.setdefault(name, []).append(amount / cpu)
            rates.setdefault(f"{name}{BY_THE_CLOCK}", []).append(amount / wall)
        print(name, *rates[name], file=sys.stderr)

    form, fp8_form, tiny = SMALL.form(), SMALL.form("fp8_e4m3"), StatesForm(dtype="bf16", hidden_dim=40, last_dim=8)
    drawn = draw(lengths, round(2e9 / form.token_bytes / statistics.fmean(lengths)))
    whole, part = sizes_of(drawn, form), sizes_of(drawn[::4], form)
    tokens = [sum(sizes.lengths) for sizes in (whole, part)]
    sizes = [number * form.token_bytes / 1e9 for number in tokens]
    cache, quarter, fp8, many, empty = folders = [work / name for name in ("cache", "quarter", "fp8", "many", "empty")]
    buffer = bytes(1 << 26)
    for name in ("sha256", "md5"):
        note(f"{name}, GB/s", GIB / 1e9, _hash, name, buffer, repeats=5)
    note("fresh memory, GB/s", GIB / 1e9, lambda: torch.empty(GIB, dtype=torch.uint8).fill_(1), repeats=5)
    note("block, GB/s", sizes[0], put_block, work / "block", MadeRows(whole, "bf16"), form, repeats=5)
    make_cache(cache, whole, "ragged", shard_bytes=1 << 28)
    make_cache(quarter, part, "ragged", shard_bytes=1 << 28)
    options: dict[str, Any] = {"shard_bytes": 1 << 28, "source": MadeRows(part, "bf16")}
    in_fp8 = partial(make_cache, fp8, sizes_of(part.lengths, fp8_form), "ragged", **options)
    note("to fp8, GB/s of bf16", sizes[1], in_fp8)
    note("verify bytes, GB/s", sizes[0], _verify, cache, "bytes")
    note("verify values, GB/s", sizes[1], _verify, quarter, "values")
    note("read samples, tokens/s", tokens[0], _read_samples, cache, repeats=5)
    note("read batches, tokens/s", tokens[0], _read_batches, cache, repeats=5)
    note("read batches of fp8, tokens/s", tokens[1], _read_batches, fp8, repeats=5)
    make_cache(many, sizes_of([8] * 1000, tiny), "ragged", shard_bytes=1)
    note("open, shards/s", 1000, CachedDSparkDataset, many, repeats=5)
    empty.mkdir()
    (empty / "file").write_bytes(b"x")
    start = [statistics.median(each) for each in zip(*(add_with_dvc(empty, work, 1) for _ in range(3)), strict=True)]
    for name, jobs, folder, amount in (
        ("dvc add, GB/s", 1, cache, logical_bytes(cache) / 1e9),
        ("dvc add on 2 threads, GB/s", 2, cache, logical_bytes(cache) / 1e9),
        ("dvc add, small files/s", 1, many, 2000),
    ):
        for _ in range(3):
            wall, cpu = add_with_dvc(folder, work, jobs)
            rates.setdefault(name, []).append(amount / (cpu - start[1]))
            rates.setdefault(f"{name}{BY_THE_CLOCK}", []).append(amount / (wall - start[0]))
    for folder in folders:
        shutil.rmtree(folder)
    (work / "block").unlink()
    return rates


def _hash(name: str, buffer: bytes) -> None:
    digest = hashlib.new(name)
    for _ in range(GIB // len(buffer)):
        digest.update(buffer)


def _verify(cache: Path, level: str) -> None:
    if findings := verify_cache(CacheFolder(cache), level).findings:
        raise SystemExit(f"the measured cache is not sound: {findings[0]}")


def _read_samples(cache: Path) -> None:
    dataset = CachedDSparkDataset(cache, padded=False)
    for index in torch.randperm(len(dataset)).tolist():
        dataset[index]


def _read_batches(cache: Path) -> None:
    for _ in build_cached_dspark_dataloader(str(cache), batch_size=8, shuffle=True, pad_to="longest"):
        pass


def add_with_dvc(folder: Path, work: Path, jobs: int) -> tuple[float, float]:
    """Have the real dvc add a folder's files, under second names, in a new repository; return as `time_of`."""
    root = work / "dvc"
    (root / "cache").mkdir(parents=True)
    for path in folder.iterdir():
        (root / "cache" / path.name).hardlink_to(path)
    places = {f"DVC_{name}_DIR": str(root / name) for name in ("SITE_CACHE", "GLOBAL_CONFIG", "SYSTEM_CONFIG")}
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", **places}

    def dvc(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=root, env=environment, check=True)

    dvc("init", "--no-scm", "--quiet")
    dvc("config", "cache.type", "hardlink,symlink")
    dvc("config", "core.checksum_jobs", str(jobs))
    taken = time_of(lambda: dvc("add", "--quiet", "cache"))
    shutil.rmtree(root)
    return taken


# Tables


@dataclass(frozen=True, slots=True)
class Demand:
    """What all samples take of one target, from its planned blocks, each of which becomes a shard."""

    target: Target
    loads: Sequence[Load]

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return sum(load.tokens for load in self.loads)

    @property
    def flops(self) -> int:
        """FLOPs of all forwards, padding inside batches included."""
        return sum(load.cost for load in self.loads)

    def num_bytes(self, dtype: str = "bf16") -> int:
        """Return the bytes of the shards of a ragged cache."""
        form = self.target.form(dtype)
        return sum(bytes_of_shard(load.lengths, form, SEQ_LENGTH, "ragged").total for load in self.loads)

    def ledger_bytes(self) -> int:
        """Return the bytes of features.json, environments of the blocks left out."""
        records: dict[str, Any] = {"num_bytes": BLOCK_BYTES, "sha256": "0" * 64, "dropped": {}, "environment": {}}
        blocks = (
            Block(name=load.name, samples=("0" * 32,) * len(load.lengths), lengths=load.lengths, **records)
            for load in self.loads
        )
        return sum(len(dump_json({"blocks": [block.as_json()]})) for block in blocks)


def padding_of(loads: Sequence[Load]) -> float:
    """Return the positions computed that are no token, as a share of the tokens."""
    return sum(load.positions for load in loads) / sum(load.tokens for load in loads) - 1


def rates_table(rates: Rates) -> list[list[str]]:
    """Return the measured rates: median and range of what a core does in a second, and the median by the clock."""
    rows = [["measured, of one core", "median", "lowest", "highest", "by the clock"]]
    for name in (name for name in rates if f"{name}{BY_THE_CLOCK}" in rates):
        found = (statistics.median(rates[name]), min(rates[name]), max(rates[name]))
        clock = statistics.median(rates[f"{name}{BY_THE_CLOCK}"])
        rows.append([name, *(f"{value:,.0f}" if value > 100 else f"{value:.2f}" for value in (*found, clock))])
    return rows


def demand_tables(demands: Sequence[Demand], rate: dict[str, float], gpu_flops: float) -> list[list[list[str]]]:
    """Return costs and bytes of each target, and the hours of each step on one machine."""
    size = {demand.target.name: demand.num_bytes() for demand in demands}
    names = list(size)
    made = {d.target.name: size[d.target.name] / d.flops * gpu_flops / 1e9 for d in demands}

    def rows(*lines: tuple[str, Callable[[Demand], float], str]) -> list[list[str]]:
        return [[name, *(format(value(demand), form) for demand in demands)] for name, value, form in lines]

    def hours(threads: int, name: str) -> tuple[Callable[[Demand], float], str]:
        return lambda d: size[d.target.name] / 1e9 / (threads * rate[name]) / 3600, ",.1f"

    costs = rows(
        ("tokens, 10^9", lambda d: d.tokens / 1e9, ".2f"),
        ("padding computed, % of tokens", lambda d: 100 * padding_of(d.loads), ".1f"),
        ("GFLOPs a token, padding included", lambda d: d.flops / d.tokens / 1e9, ",.1f"),
        ("tokens/s a GPU (assumed)", lambda d: gpu_flops * d.tokens / d.flops, ",.0f"),
        ("GPU hours (assumed)", lambda d: d.flops / gpu_flops / 3600, ",.1f"),
        ("bytes a token", lambda d: size[d.target.name] / d.tokens, ",.0f"),
        ("cache in bf16, TB", lambda d: size[d.target.name] / 1e12, ",.1f"),
        ("cache in fp8, TB", lambda d: d.num_bytes("fp8_e4m3") / 1e12, ",.1f"),
        ("shards, and as many samples files", lambda d: len(d.loads), ",d"),
        ("features.json, MB", lambda d: d.ledger_bytes() / 1e6, ",.0f"),
        ("GB/s of states a GPU makes (assumed)", lambda d: made[d.target.name], ".2f"),
        ("cores to hash and write them", lambda d: made[d.target.name] / rate["block, GB/s"], ".2f"),
        (f"GB/s to the disk of {MACHINE_GPUS} GPUs", lambda d: MACHINE_GPUS * made[d.target.name], ".1f"),
    )
    steps = rows(
        (f"capture, {MACHINE_GPUS} GPUs (assumed)", lambda d: d.flops / gpu_flops / 3600 / MACHINE_GPUS, ",.1f"),
        (f"capture, {MACHINE_GPUS} writer threads", *hours(MACHINE_GPUS, "block, GB/s")),
        ("capture, 1 writer thread (tensor)", *hours(1, "block, GB/s")),
        ("shards to fp8, 1 thread", *hours(1, "to fp8, GB/s of bf16")),
        ("verify bytes, 32 threads", *hours(32, "verify bytes, GB/s")),
        *((f"verify values, {n} threads", *hours(n, "verify values, GB/s")) for n in (2, 32)),
        *((f"DVC hashes, {n} threads", *hours(n, "dvc add, GB/s")) for n in (4, 32)),
        *((f"push at {n} Gbit/s", lambda d, n=n: size[d.target.name] * 8e-9 / n / 3600, ",.1f") for n in (1, 10, 100)),
        ("opening the cache, seconds", lambda d: len(d.loads) / rate["open, shards/s"], ",.0f"),
    )
    return [[["", *names], *costs], [["hours of one machine", *names], *steps]]


def links_table(gpu_flops: float) -> list[list[str]]:
    """Return the GB/s into each of the GPUs that share a target, if they are not to wait for each other's."""
    rows = [["GB/s into a GPU", "70B", "235B MoE"]]
    others = 1 - 1 / MACHINE_GPUS
    for tokens in (BATCH_TOKENS, 4 * BATCH_TOKENS):
        seconds = [target.flops(tokens, PAPER_MEAN) / gpu_flops for target in TARGETS[1:]]
        rates = [t.layer_bytes * others / each / 1e9 for t, each in zip(TARGETS[1:], seconds, strict=True)]
        rows.append([f"fsdp, all layers in a forward of {tokens} tokens", *(f"{rate:.0f}" for rate in rates)])
    summed = [2 * 2 * t.layers * 2 * t.hidden * others for t in TARGETS[1:]]
    seconds = [t.flops(1, PAPER_MEAN) / gpu_flops / MACHINE_GPUS for t in TARGETS[1:]]
    rates = [num_bytes / each / 1e9 for num_bytes, each in zip(summed, seconds, strict=True)]
    return [*rows, ["tensor, two sums of each token in each layer", *(f"{rate:.0f}" for rate in rates)]]


def readers_table(demands: Sequence[Demand], speed: float) -> list[list[str]]:
    """Return the GB/s that trainers read if each GPU trains on `speed` tokens a second."""
    forms = [(demand, dtype) for demand in demands for dtype in ("bf16", "fp8_e4m3")]
    rows = [["GPUs", *(f"{demand.target.name} {dtype}" for demand, dtype in forms)]]
    each = [demand.num_bytes(dtype) / demand.tokens / 1e9 for demand, dtype in forms]
    for gpus in (8, 16, 32, 64, 128, 256, 512):
        rows.append([f"{gpus}", *(f"{gpus * speed * size:,.1f}" for size in each)])
    return rows


def positions_a_token(lengths: Sequence[int], batch_size: int) -> float:
    """Return how many positions a batch has for each token if it is as long as its longest sample."""
    batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(lengths)


def schedule_tables(plans: dict[str, dict[str, list[Load]]]) -> list[list[list[str]]]:
    """Simulate every way to divide the work, of each target for each kind of lengths; return idle shares."""
    paper = list(plans.values())[-1]
    replicated = [["8B, ranks", *(f"{name}, {kind}" for name in plans for kind in ("equal", "+-10 %"))]]
    for ranks in (1 << exponent for exponent in range(11)):
        speeds = [speeds_of(ranks, spread) for spread in (0, 0.1)]
        found = [replicate(plan[SMALL.name], each) for plan in plans.values() for each in speeds]
        replicated.append([f"{ranks}", *map(_percent, found)])
    sliced = [["8B, slices of one rank", "equal", "+-10 %"]]
    for count in (2, 8, 32, 64):
        found = [slices(paper[SMALL.name], speeds_of(count, spread)) for spread in (0, 0.1)]
        sliced.append([f"{count}", *map(_percent, found)])
    names = (LARGE.name, EXPERTS.name)
    grouped = [["ranks", *(f"{name} {kind}" for name in names for kind in ("fsdp", "tensor"))]]
    for groups in (1 << exponent for exponent in range(8)):
        found = [kind(paper[name], groups, MACHINE_GPUS) for name in names for kind in (fsdp, tensor)]
        grouped.append([f"{groups * MACHINE_GPUS}", *map(_percent, found)])
    return [replicated, sliced, grouped]


def plan_loads(lengths: Sequence[int], target: Target, block_bytes: int = BLOCK_BYTES) -> list[Load]:
    """Plan blocks and batches as the defaults of params.yaml have them."""
    return load_blocks(cut_blocks(lengths, target.form().token_bytes, block_bytes), target)


def _percent(schedule: Schedule) -> str:
    return f"{100 * schedule.idle:.2f} %"


def block_bytes_tables(lengths: Sequence[int]) -> list[list[list[str]]]:
    """Return what `target.block_bytes` and the tokens of a batch change: idle shares, and the padding computed."""
    batches = [BATCH_TOKENS // 2, BATCH_TOKENS, 2 * BATCH_TOKENS, 4 * BATCH_TOKENS]
    small = [["8B", "blocks", "64 ranks", "1024 ranks", *(f"padding, {tokens}" for tokens in batches)]]
    large = [["70B", "blocks", *(f"fsdp, {ranks}, {tokens}" for tokens in batches[1:] for ranks in (64, 1024))]]
    large[0].append("tensor, 1024")
    for mebibytes in (256, 512, 1024, 2048, 4096, 8192):
        plans = [cut_blocks(lengths, target.form().token_bytes, mebibytes << 20) for target in (SMALL, LARGE)]
        starts = [[f"{mebibytes} MiB", f"{len(plan):,}"] for plan in plans]
        by_batch = [load_blocks(plans[0], SMALL, tokens) for tokens in batches]
        found = [replicate(by_batch[1], [1.0] * ranks) for ranks in (64, 1024)]
        padding = [f"{100 * padding_of(loads):.1f} %" for loads in by_batch]
        small.append([*starts[0], *map(_percent, found), *padding])
        by_batch = [load_blocks(plans[1], LARGE, tokens) for tokens in batches[1:]]
        found = [fsdp(loads, groups, MACHINE_GPUS) for loads in by_batch for groups in (8, 128)]
        large.append([*starts[1], *map(_percent, [*found, tensor(by_batch[0], 128, MACHINE_GPUS)])])
    return [small, large]


def main() -> None:
    """Measure or read the rates, simulate, and print the tables."""
    parsed = _arguments()
    torch.manual_seed(SEED)
    whole = read_lengths(parsed.data, parsed.target, parsed.work)
    by_name = {"as they are": _cut(whole), f"mean {PAPER_MEAN}": scale_lengths(whole, PAPER_MEAN)}
    if not parsed.rates.exists():
        rates = measure_rates(parsed.work, by_name[f"mean {PAPER_MEAN}"])
        parsed.rates.write_text(json.dumps(rates, indent=2) + "\n")
    rates = json.loads(parsed.rates.read_text())
    rate = {name: statistics.median(values) for name, values in rates.items()}
    gpu_flops = parsed.peak_tflops * 1e12 * parsed.peak_share
    lengths = {name: draw(found, parsed.samples) for name, found in by_name.items()}
    plans = {name: {t.name: plan_loads(drawn, t) for t in TARGETS} for name, drawn in lengths.items()}
    tables = [rates_table(rates)]
    for name, drawn in lengths.items():
        print(f"{name}: {len(whole)} conversations, {len(drawn)} drawn, mean {statistics.fmean(drawn):.1f} tokens,")
        print(f"batches of 8 have {positions_a_token(drawn, 8):.2f} positions a token")
        demands = [Demand(target, plans[name][target.name]) for target in TARGETS]
        tables += demand_tables(demands, rate, gpu_flops)
    tables += [links_table(gpu_flops), readers_table(demands[:2], parsed.trainer_tokens), *schedule_tables(plans)]
    tables += block_bytes_tables(lengths[f"mean {PAPER_MEAN}"])
    for table in tables:
        print()
        print_table(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="conversations whose lengths are drawn from")
    parser.add_argument("--target", type=Path, required=True, help="folder with their tokenizer")
    parser.add_argument("--work", type=Path, required=True, help="empty folder on the disk that is measured")
    parser.add_argument("--rates", type=Path, required=True, help="measured rates: read if there, else written")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--peak-tflops", type=float, default=989, help="dense bf16, of the GPU's data sheet")
    parser.add_argument("--peak-share", type=float, default=0.4, help="share of it that is assumed to be reached")
    parser.add_argument("--trainer-tokens", type=float, default=20_000, help="tokens/s that a GPU trains on")
    return parser.parse_args()


if __name__ == "__main__":
    main()
