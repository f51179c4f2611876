"""Capture on one GPU (or, in a small size, on the CPU): rates, the share of the device that is used, and memory.

`python -m benchmarks.gpu --work EMPTY_DIR` makes a randomly initialised Qwen3 and samples of random ids, whose lengths
are spread as those of conversations. `benchmarks/gpu_check.sh` runs the tests that need a GPU, and then this.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.capturing import capture_samples
from dspark_cache.forward import Capturer, States, pick_device
from dspark_cache.target import as_target, build_target_layer_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_cache.target import Target

SIZES: dict[str, dict[str, int]] = {
    # the shape of Qwen3-1.7B
    "gpu": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096},
}  # fmt: skip
SAMPLES = {"gpu": 1024, "cpu": 24}
MEAN_TOKENS, MAX_TOKENS = {"gpu": 951, "cpu": 120}, {"gpu": 4096, "cpu": 512}
BLOCK_BYTES = {"gpu": 1 << 30, "cpu": 4 << 20}
MATRIX = {"gpu": 8192, "cpu": 1024}


class TimedCapturer(Capturer):
    """Notes how long the device computes on each batch."""

    def __init__(self, target: Target, layer_ids: Sequence[int], hidden_size: int) -> None:
        """Begin with nothing noted."""
        super().__init__(target, layer_ids, hidden_size)
        self._marks: list[tuple[Any, Any]] = []

    def __call__(self, samples: Sequence[torch.Tensor]) -> States:
        """Run one batch."""
        begin = self._mark()
        states = super().__call__(samples)
        self._marks.append((begin, self._mark()))
        return states

    def _mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def busy_seconds(self) -> float:
        """Return the seconds that the device has computed; all batches have ended."""
        if self.device.type == "cpu":
            return float(sum(end - begin for begin, end in self._marks))
        return float(sum(begin.elapsed_time(end) for begin, end in self._marks)) / 1000


def make_target(size: str, device: torch.device) -> Target:
    """Return a random Qwen3, in bf16 on a GPU and fp32 on a CPU."""
    values: dict[str, Any] = {**SIZES[size], "max_position_embeddings": MAX_TOKENS[size]}
    config = Qwen3Config(**values)
    torch.manual_seed(0)
    with device:
        dtype = torch.bfloat16 if size == "gpu" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return as_target(model, device)


def make_samples(size: str) -> list[torch.Tensor]:
    """Return random ids; lengths are log-normal, as those of conversations nearly are, around the given mean."""
    generator = torch.Generator().manual_seed(0)
    spread = 0.8
    center = math.log(MEAN_TOKENS[size]) - spread**2 / 2
    lengths = torch.exp(center + spread * torch.randn(SAMPLES[size], generator=generator)).long()
    return [
        torch.randint(0, SIZES[size]["vocab_size"], (int(length),), generator=generator, dtype=torch.int32)
        for length in lengths.clamp(8, MAX_TOKENS[size])
    ]


def peak_flops(size: str, device: torch.device) -> float:
    """Return the FLOP/s of a large matrix product in the dtype that the target computes in, the best of a few."""
    side = MATRIX[size]
    matrix = torch.randn(side, side, device=device, dtype=torch.bfloat16 if size == "gpu" else torch.float32)
    best = math.inf
    for _ in range(10):
        begin = time.perf_counter()
        product = matrix @ matrix
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - begin)
    return float(2 * side**3 / best)


def flops(target: Target, samples: Sequence[torch.Tensor]) -> float:
    """Return the FLOPs that the samples need without lm_head: two a weight and token, and those of causal attention."""
    config = target.model.config
    weights = sum(parameter.numel() for parameter in target.layers.parameters())
    width = config.num_attention_heads * config.head_dim
    attention = sum(2 * width * len(sample) ** 2 for sample in samples) * config.num_hidden_layers
    return float(2 * weights * sum(map(len, samples)) + attention)


@dataclass(frozen=True, slots=True)
class Captured:
    """What one capture took."""

    seconds: float
    busy_seconds: float
    num_bytes: int


def capture(target: Target, samples: Sequence[torch.Tensor], folder: Path, size: str, max_tokens: int) -> Captured:
    """Capture all samples into blocks in `folder`, as the stage does."""
    layers, hidden_size = target.model.config.num_hidden_layers, target.model.config.hidden_size
    capturer = TimedCapturer(target, build_target_layer_ids(layers, 5), hidden_size)
    options: dict[str, Any] = {"max_tokens": max_tokens, "block_bytes": BLOCK_BYTES[size], "capturer": capturer}
    seconds, num_bytes = capture_samples(target, samples, folder, **options)
    return Captured(seconds, capturer.busy_seconds(), num_bytes)


def measure(work: Path, size: str, device: torch.device, max_tokens: int) -> dict[str, Any]:
    """Return all figures."""
    target, samples = make_target(size, device), make_samples(size)
    capture(target, samples[:8], work / "warm", size, max_tokens)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found = capture(target, samples, work / "measured", size, max_tokens)
    tokens, peak = sum(map(len, samples)), peak_flops(size, device)
    used = flops(target, samples)
    on_gpu = device.type == "cuda"
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else None
    vocab = SIZES[size]["vocab_size"]
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "samples": len(samples),
        "tokens": tokens,
        "max_tokens_per_batch": max_tokens,
        "tokens_per_second": round(tokens / found.seconds, 1),
        "matrix_peak_tflops": round(peak / 1e12, 2),
        "share_of_matrix_peak": round(used / found.seconds / peak, 4),
        "share_of_matrix_peak_while_computing": round(used / found.busy_seconds / peak, 4),
        "idle_share_while_writing": round(1 - found.busy_seconds / found.seconds, 4),
        "bytes_per_second_written": round(found.num_bytes / found.seconds),
        "peak_device_bytes": memory,
        "weight_bytes": sum(p.numel() * p.element_size() for p in target.model.parameters()),
        "logits_bytes_of_a_batch": max_tokens * vocab * target.model.dtype.itemsize,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="empty folder for blocks")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--max-tokens", type=int, nargs="+", help="batch budgets to try")
    parsed = parser.parse_args()
    device = pick_device(parsed.device)
    size = "gpu" if device.type == "cuda" else "cpu"
    for max_tokens in parsed.max_tokens or ([8192, 32768] if size == "gpu" else [512]):
        print(json.dumps(measure(parsed.work / str(max_tokens), size, device, max_tokens), indent=2))


if __name__ == "__main__":
    main()
