"""Anonymous memory of ranks that hold one target together, against the bound of 1.3 x a rank's share plus one tensor.

    OMP_NUM_THREADS=1 python -m benchmarks.sharded_memory --work EMPTY_DIR [--mb 400] [--sizes 2 4]

A dense and a mixture-of-experts model of random float32 weights are loaded over the ranks, each a process on this
machine's CPU; then two forwards are run and the embedding is gathered, as capture does. What is measured is the
largest RssAnon of any rank, seen from outside, less what it had after doing all of that with a tiny model of the same
family: imports, and buffers of gloo. Parameters that are a mapping of the checkpoint's files are no anonymous memory.
Ends with 1 where a load needs more than the bound. Forwards under FSDP may: beside a rank's share they hold a layer, or
the embedding, about three times (in gloo, as it arrives, and as it is used), a gathered embedding is there twice, and
in models as small as these a layer is a large part of a share.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from benchmarks.workspace import anonymous_bytes, print_table
from dspark_cache.forward import Capturer
from dspark_cache.ranks import Group, Peers, Rank
from dspark_cache.settings import TargetSettings
from dspark_cache.sharding import full_tensor, load_over_group

if TYPE_CHECKING:
    from collections.abc import Callable

MB = 1_000_000
POLL_SECONDS = 0.001
PHASES = ("load", "loaded", "forwards", "gather")
SLACK = 1.3
"""What a rank may take for its share."""


def main() -> int:
    """Measure every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--mb", type=int, default=400, help="size of each model")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    table = [["model", "way", "ranks", "share", "largest tensor", *PHASES, "bound", "load within", "all within"]]
    found: list[dict[str, object]] = []
    for name, make in MODELS.items():
        model = make(parsed.work / name, parsed.mb * MB)
        make(parsed.work / f"{name}-tiny", 0)
        for parallelism in ("fsdp", "tensor"):
            for size in parsed.sizes:
                work = parsed.work / f"{name}-{parallelism}-{size}"
                peaks = measure(model, parsed.work / f"{name}-tiny", work, parallelism, size)
                bound = model.bound(size)
                whether = ["yes" if largest <= bound else "no" for largest in (peaks["load"], max(peaks.values()))]
                sizes = (model.num_bytes // size, model.largest, *peaks.values(), bound)
                share, tensor, *rest = (f"{value / MB:.0f} MB" for value in sizes)
                table.append([name, parallelism, str(size), share, tensor, *rest, *whether])
                found.append({"model": name, "way": parallelism, "ranks": size, **peaks, "bound": bound})
    print_table(table)
    if parsed.json:
        parsed.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(any(row[-2] == "no" for row in table[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A saved model.

    Attributes:
        folder: Where.
        num_bytes: Bytes of its parameters.
        largest: Bytes of the largest one, as the model has it: experts are one tensor.
    """

    folder: Path
    num_bytes: int
    largest: int

    def bound(self, size: int) -> float:
        """Return how much one of `size` ranks may take."""
        return SLACK * self.num_bytes / size + self.largest


def make_dense(folder: Path, num_bytes: int) -> Model:
    """Save a Qwen3 of about this size in several files."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden = 1024 if num_bytes > 200 * MB else 512
    vocab = 12 * hidden if num_bytes else 64
    layer_bytes = 4 * 13 * hidden * hidden
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden if num_bytes else 64,
        num_hidden_layers=max(2, (num_bytes - 8 * vocab * hidden) // layer_bytes),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=False,
    )
    return _save(Qwen3ForCausalLM(config), folder, num_bytes)


def make_experts(folder: Path, num_bytes: int) -> Model:
    """Save a Qwen3-MoE of about this size in several files, in which each expert has tensors of its own."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    hidden = 512 if num_bytes > 200 * MB else 256
    vocab = 16 * hidden if num_bytes else 64
    experts = 16 if num_bytes else 4
    layer_bytes = 4 * hidden * hidden * (experts * 3 // 2 + 4)
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=hidden // 2 if num_bytes else 16,
        num_experts=experts,
        num_experts_per_tok=2,
        num_hidden_layers=max(2, (num_bytes - 8 * vocab * hidden) // layer_bytes),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        tie_word_embeddings=False,
    )
    return _save(Qwen3MoeForCausalLM(config), folder, num_bytes)


MODELS: dict[str, Callable[[Path, int], Model]] = {"dense": make_dense, "experts": make_experts}


def _save(model: torch.nn.Module, folder: Path, num_bytes: int) -> Model:
    model.save_pretrained(folder, max_shard_size=max(num_bytes // 5, MB))  # type: ignore[operator]
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return Model(folder=folder, num_bytes=sum(sizes), largest=max(sizes))


def measure(model: Model, tiny: Path, work: Path, parallelism: str, size: int) -> dict[str, int]:
    """Load a model over ranks and use it.

    Args:
        model: The model.
        tiny: Folder of a tiny one of the same family.
        work: Folder to make.
        parallelism: "fsdp" or "tensor".
        size: Number of ranks.

    Returns:
        For each of `PHASES` the largest RssAnon of any rank over what it had before, in bytes.
    """
    work.mkdir()
    context = multiprocessing.get_context("spawn")
    arguments = [(number, size, work, parallelism, tiny, model.folder) for number in range(size)]
    processes = [context.Process(target=_be_rank, args=of_rank, daemon=True) for of_rank in arguments]
    for process in processes:
        process.start()
    samples: list[list[tuple[float, int]]] = [[] for _ in processes]
    while any(process.is_alive() for process in processes):
        for process, seen in zip(processes, samples, strict=True):
            if process.pid is not None:
                seen.append((time.monotonic(), anonymous_bytes(process.pid)))
        time.sleep(POLL_SECONDS)
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            raise SystemExit(f"a rank ended with {[process.exitcode for process in processes]}")
    peaks = dict.fromkeys(PHASES, 0)
    for number, seen in enumerate(samples):
        before, *times = json.loads((work / f"{number}.json").read_text())
        for phase, (start, end) in zip(PHASES, times, strict=True):
            most = max((size for when, size in seen if start <= when <= end), default=before)
            peaks[phase] = max(peaks[phase], most - before)
    return peaks


def _be_rank(number: int, size: int, work: Path, parallelism: str, tiny: Path, folder: Path) -> None:
    """Be one rank: do all with the tiny model first, then with the other one, and write down when each phase was."""
    torch.set_num_threads(1)
    peers = Peers(Rank(number, size, number, size), FileStore(str(work / "store"), size))
    group = Group.join(peers, size, torch.device("cpu"))
    _use(tiny, parallelism, group)
    gc.collect()
    before = _own_anonymous_bytes()
    dist.barrier()
    times = _use(folder, parallelism, group)
    (work / f"{number}.json").write_text(json.dumps([before, *times]))
    dist.barrier()
    group.leave()


def _own_anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _use(folder: Path, parallelism: str, group: Group) -> list[tuple[float, float]]:
    """Load a model, run two forwards and gather the embedding; return begin and end of each of `PHASES`."""
    marks = [time.monotonic()]
    target = load_over_group(folder, TargetSettings(), "fp32", torch.device("cpu"), group, parallelism)
    marks.append(time.monotonic())
    gc.collect()
    time.sleep(0.3)  # long enough to be seen
    marks.append(time.monotonic())
    capturer = Capturer(target, [0, 1], target.model.config.hidden_size)
    for _ in range(2):
        capturer([torch.zeros(64, dtype=torch.int32), torch.ones(64, dtype=torch.int32)])
    marks.append(time.monotonic())
    full_tensor(target.embed_weight.detach())
    marks.append(time.monotonic())
    return list(pairwise(marks))


if __name__ == "__main__":
    sys.exit(main())
