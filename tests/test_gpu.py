"""What only a GPU shows: no waiting in the loop, memory without logits, running out of it, NCCL.

`benchmarks/gpu_check.sh` runs them; elsewhere they are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from dspark_cache.blocks import Block, BlockStore, PlannedBlock
from dspark_cache.capture import BlockCapturer, Crew, Wanted, compute_blocks, plan_due
from dspark_cache.forward import Capturer, capture_environment, pick_device
from dspark_cache.ranks import Group, Peers, SharedProgress
from dspark_cache.schema import HIDDEN, LAST_HIDDEN
from dspark_cache.settings import RuntimeSettings, TargetSettings
from dspark_cache.sharding import load_over_group
from dspark_cache.target import Target, as_target, load_target
from dspark_cache.tokens import sample_key
from tests.repository import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.gpu

MODEL = GOLDEN / "models" / "qwen3-tiny"
LAYERS = [0, 3]


def cuda() -> torch.device:
    return torch.device("cuda", 0)


def make_samples(lengths: Sequence[int] = (5, 1, 40, 17, 2, 33), vocab_size: int = 100) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (length,), generator=generator, dtype=torch.int32) for length in lengths]


def big_target(**values: Any) -> Target:
    """Return a random model of some 100 MB in bf16 on the GPU."""
    config = Qwen3Config(
        **{
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 1024,
            "max_position_embeddings": 8192,
            **values,
        }
    )
    torch.manual_seed(0)
    with cuda():
        return as_target(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), cuda())


def capture(
    target: Target, samples: Sequence[torch.Tensor], folder: Path, dtype: str, *, max_tokens: int = 64
) -> tuple[BlockStore, dict[str, Block]]:
    """Capture into blocks as the stage does."""
    hidden_size = target.model.config.hidden_size
    identity = {"hidden_size": hidden_size, "target_layer_ids": LAYERS, "compute_dtype": dtype}
    store, runtime = BlockStore(folder, identity), RuntimeSettings(max_tokens_per_batch=max_tokens)
    by_key = {sample_key(sample): sample for sample in samples}
    writer = BlockCapturer(
        Capturer(target, LAYERS, hidden_size),
        store,
        capture_environment(target.device, runtime),
        drop_nonfinite=False,
        describe=str,
    )

    def read_block(planned: PlannedBlock) -> tuple[PlannedBlock, list[torch.Tensor]]:
        return planned, [by_key[key] for key in planned.samples]

    with store.lock():
        store.prepare()
        wanted = Wanted(lengths={key: len(sample) for key, sample in by_key.items()})
        due = plan_due(store, wanted, block_bytes=1 << 40, runtime=RuntimeSettings(host_memory_gb=16))
        compute_blocks(
            due.blocks,
            read_block,
            writer,
            Crew(peers=Peers.alone(), group=Group(), parallelism="replicate"),
            SharedProgress(Peers.alone(), None),
            0,
        )
    return store, store.finished_blocks()[0]


def test_blocks_hold_the_states_that_the_cpu_gives(tmp_path: Path) -> None:
    """Batches of many shapes, so that both pinned buffers are used again and grow."""
    samples = make_samples((5, 1, 40, 17, 2, 33, 12, 12, 64, 3))
    states = []
    for device in (torch.device("cpu"), cuda()):
        target = load_target(MODEL, TargetSettings(), "fp32", device)
        store, blocks = capture(target, samples, tmp_path / device.type, "fp32", max_tokens=80)
        states.append({name: load_file(store.path(name)) for name in blocks})
    assert states[0].keys() == states[1].keys()
    for name, expected in states[0].items():
        for key in (HIDDEN, LAST_HIDDEN):
            torch.testing.assert_close(states[1][name][key], expected[key], rtol=1e-3, atol=1e-3)


def test_a_forward_and_the_copy_to_the_host_wait_for_nothing() -> None:
    target = big_target()
    capturer = Capturer(target, LAYERS, target.model.config.hidden_size)
    samples = make_samples((50, 20, 20), 1024)
    capturer(samples)  # what is set up once may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            capturer(samples)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_is_ahead_of_the_gpu() -> None:
    """When the call returns the GPU still computes."""
    target = big_target()
    capturer = Capturer(target, LAYERS, target.model.config.hidden_size)
    samples = make_samples((4096,) * 4, 1024)
    capturer(samples)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    for _ in range(4):
        capturer(samples)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()


def test_no_logits_are_made() -> None:
    vocab_size, tokens = 150_000, 8192
    target = big_target(vocab_size=vocab_size, tie_word_embeddings=True)
    capturer = Capturer(target, LAYERS, target.model.config.hidden_size)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    capturer(make_samples((1024,) * (tokens // 1024), vocab_size))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < tokens * vocab_size * 2 // 4


def test_out_of_memory_the_budget_is_halved(tmp_path: Path) -> None:
    target = big_target()
    samples = make_samples((2048,) * 16, 1024)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (400 << 20)) / total)
    try:
        _, blocks = capture(target, samples, tmp_path, "bf16", max_tokens=16 * 2048)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (block,) = blocks.values()
    assert block.num_tokens == 16 * 2048
    assert block.environment["used_tokens_per_batch"] < 16 * 2048


def test_a_sharded_target_of_one_process_gives_the_same_bytes(tmp_path: Path) -> None:
    samples = make_samples()
    whole = load_target(MODEL, TargetSettings(), "fp32", cuda())
    found = [capture(whole, samples, tmp_path / "whole", "fp32")[1]]
    group = Group.join(Peers.alone(), 1, cuda())
    try:
        sharded = load_over_group(MODEL, TargetSettings(), "fp32", cuda(), group, "fsdp")
        found.append(capture(sharded, samples, tmp_path / "sharded", "fp32")[1])
    finally:
        group.leave()
    assert [[block.sha256 for block in blocks.values()] for blocks in found] == [
        [block.sha256 for block in found[0].values()]
    ] * 2


def test_auto_is_the_gpu() -> None:
    assert pick_device("auto").type == "cuda"
