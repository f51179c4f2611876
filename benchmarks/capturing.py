"""Capturing states, against whole padded forwards, and against the bare base model on the same batches."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer

from benchmarks.plain import capture_plainly, write_plainly
from benchmarks.ratios import Row, in_turn, rate, ratio
from dspark_cache.blocks import BlockStore, PlannedBlock
from dspark_cache.capture import BlockCapturer, Crew, Wanted, compute_blocks, host_blocks, plan_due
from dspark_cache.forward import Capturer, States, capture_environment, pad_batch
from dspark_cache.ranks import Group, Peers, SharedProgress
from dspark_cache.schema import INPUT_IDS, LOSS_MASK
from dspark_cache.settings import RuntimeSettings
from dspark_cache.target import build_target_layer_ids
from dspark_cache.tokens import sample_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dspark_cache.target import Target

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BATCH = 4
MAX_TOKENS = 2048


def capture_samples(
    target: Target,
    samples: Sequence[torch.Tensor],
    folder: Path,
    *,
    max_tokens: int,
    block_bytes: int,
    capturer: Capturer | None = None,
) -> tuple[float, int]:
    """Capture samples into blocks in `folder`, as the stage does; return the seconds that it took, and their bytes.

    Args:
        target: The target.
        samples: Ids int32 [T] of each.
        folder: A new folder.
        max_tokens: Batch budget.
        block_bytes: Size at which a block is full.
        capturer: Runs the target; None: one that takes the usual layers.
    """
    config = target.model.config.get_text_config()
    layer_ids = build_target_layer_ids(config.num_hidden_layers, 5)
    identity = {
        "hidden_size": config.hidden_size,
        "target_layer_ids": layer_ids,
        "compute_dtype": DTYPES[target.model.dtype],
    }
    runtime = RuntimeSettings(max_tokens_per_batch=max_tokens)
    store, by_key = BlockStore(folder, identity), {sample_key(sample): sample for sample in samples}
    writer = BlockCapturer(
        capturer or Capturer(target, layer_ids, config.hidden_size),
        store,
        capture_environment(target.device, runtime),
        drop_nonfinite=False,
        describe=str,
    )

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        return planned, [by_key[key] for key in planned.samples]

    peers = Peers.alone()
    with store.lock():
        store.prepare()
        wanted = Wanted(lengths={key: len(sample) for key, sample in by_key.items()})
        due = plan_due(store, wanted, block_bytes=block_bytes, runtime=runtime)
        crew = Crew(peers=peers, group=Group(), parallelism="replicate")
        begin = time.perf_counter()
        with SharedProgress.of(peers, "capture", due.num_tokens, "tok", done=0) as progress:
            waiting = host_blocks(runtime.host_memory_gb, block_bytes) - 1
            compute_blocks(due.blocks, read_block, writer, crew, progress, waiting)
        seconds = time.perf_counter() - begin
    blocks, _ = store.finished_blocks()
    return seconds, sum(block.num_bytes for block in blocks.values())


class _NotingCapturer(Capturer):
    """Notes the batches that it ran."""

    def __init__(self, target: Target, layer_ids: Sequence[int], hidden_size: int) -> None:
        super().__init__(target, layer_ids, hidden_size)
        self.batches: list[torch.Tensor] = []

    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        self.batches.append(pad_batch(samples))
        return super().__call__(samples)


def rows(work: Path, target: Target, name: str, samples: Sequence[torch.Tensor], rounds: int) -> Iterator[Row]:
    """Measure one target and give the rows.

    Args:
        work: Folder for blocks and shards.
        target: The target.
        name: Of the target.
        samples: Ids int32 [T] of each; S is four times their mean length, or that of the longest.
        rounds: How often.
    """
    tokens = sum(map(len, samples))
    seq_length = max(4 * tokens // len(samples), *map(len, samples))
    layer_ids = build_target_layer_ids(target.model.config.num_hidden_layers, 5)

    capturer = _NotingCapturer(target, layer_ids, target.model.config.hidden_size)

    def ours() -> None:
        folder = work / "blocks"
        capturer.batches.clear()
        block = tokens * target.model.config.hidden_size * (len(layer_ids) + 1) * target.model.dtype.itemsize // 3
        options = {"max_tokens": MAX_TOKENS, "block_bytes": max(1, block)}
        capture_samples(target, samples, folder, capturer=capturer, **options)

    def plain() -> None:
        ids = torch.zeros(len(samples), seq_length, dtype=torch.int64)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = sample
        parts = [ids[start : start + BATCH] for start in range(0, len(ids), BATCH)]
        states = capture_plainly(target.model, parts, layer_ids)
        batches = (
            {INPUT_IDS: part, LOSS_MASK: torch.ones_like(part), **batch}
            for part, batch in zip(parts, states, strict=True)
        )
        write_plainly(work / "plain.safetensors", batches)

    def bare() -> None:
        with torch.no_grad():
            for batch in capturer.batches:
                target.base(input_ids=batch, use_cache=False)

    def clear() -> None:
        shutil.rmtree(work / "blocks", ignore_errors=True)

    seconds = in_turn({"ours": ours, "plain": plain, "bare": bare}, rounds, clear)
    factor = len(samples) * seq_length / tokens
    rates = {way: f"{rate(tokens, taken):,.0f}" for way, taken in seconds.items()}
    detail = f"{rates['ours']} and {{}} real tokens/s"
    yield Row(
        name=f"capture, {name}: plain way",
        ratio=ratio(seconds["plain"], seconds["ours"]),
        target=0.9 * factor,
        detail=f"{detail.format(rates['plain'])}, padding factor {factor:.2f}",
    )
    yield Row(
        name=f"capture, {name}: bare forward of the same batches",
        ratio=ratio(seconds["bare"], seconds["ours"]),
        target=0.95,
        detail=detail.format(rates["bare"]),
    )


def real_samples(conversations: Path, target: Path, count: int, most: int) -> list[torch.Tensor]:
    """Return the ids of conversations, each cut to `most` tokens, as rendered by the target's chat template."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    with conversations.open(encoding="utf-8") as lines:
        messages = [json.loads(line)["messages"] for line, _ in zip(lines, range(count), strict=False)]
    rendered = [tokenizer.apply_chat_template(each, tokenize=True, return_dict=True)["input_ids"] for each in messages]
    return [torch.tensor(ids[:most], dtype=torch.int32) for ids in rendered]
