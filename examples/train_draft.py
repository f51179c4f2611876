"""Trains the small draft of dspark_draft.py from a cache; whoever has a draft of their own starts here.

    python examples/train_draft.py --cache cache --checkpoint draft.pt
    torchrun --nproc-per-node 2 examples/train_draft.py --cache cache --batch-size 4

Losses are the same with any number of processes, and those of a run that was cut and resumed are those of one that was
not. Read from the top it is a step, how a cache is opened, and how training goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dspark_cache import build_cached_dspark_dataloader, read_manifest
from dspark_cache.files import put_file
from dspark_draft import TERMS, Draft, means

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dspark_cache.loaders import CachedDataLoader
    from dspark_draft import Batch


def world() -> tuple[int, int]:
    """Return the number of processes that train together, and which of them this one is."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def draw(seed: int, step: int, samples: int, positions: int) -> torch.Tensor:
    """Return a step's random numbers [samples, positions] for this process.

    They are dealt to processes as samples are, so that anchors are the same however many there are.
    """
    count, rank = world()
    mixed = hashlib.sha256(f"{seed} {step}".encode()).digest()[:4]  # the generator takes 32 bits
    generator = torch.Generator().manual_seed(int.from_bytes(mixed))
    return torch.rand(samples * count, positions, generator=generator)[rank::count]


def train_step(draft: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, draws: torch.Tensor) -> torch.Tensor:
    """Train on one batch; return what `Draft.forward` does, of all processes together."""
    device = next(draft.parameters()).device
    sums: torch.Tensor = draft(
        {key: value.to(device, non_blocking=True) for key, value in batch.items()}, draws.to(device)
    )
    total = sums.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    # Processes have other numbers of slots, and DDP takes the mean of their gradients.
    loss = (sums[1:] * sums.new_tensor(list(TERMS.values()))).sum() * world()[0] / total[0].clamp_min(1e-9)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch declares it so
    optimizer.step()
    return total


@torch.no_grad()
def evaluate(draft: Draft, cache: Path, batch_size: int) -> torch.Tensor:
    """Return the sums of `Draft.forward` over a cache; anchors are the same each time."""
    device, total = draft.mask.device, torch.zeros(1 + len(TERMS))
    for step, batch in enumerate(build_cached_dspark_dataloader(cache, batch_size, shuffle=False)):
        draws = torch.rand(batch["input_ids"].shape, generator=torch.Generator().manual_seed(step))
        total += draft({key: value.to(device) for key, value in batch.items()}, draws.to(device)).cpu()
    return total


def report(what: str, sums: torch.Tensor) -> None:
    """Print a line."""
    print(f"{what}: " + ", ".join(f"{name} {value:.4f}" for name, value in means(sums).items()), flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small DSpark-shaped draft from a cache.")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="its folder; CACHE-eval is held out")
    parser.add_argument("--expect", type=Path, help="params.yaml that the cache must be made from")
    parser.add_argument("--steps", type=int, default=200, help="in all, those before a resume included")
    parser.add_argument("--batch-size", type=int, default=8, help="samples a step and process")
    parser.add_argument("--block-size", type=int, default=4, help="tokens drafted at once")
    parser.add_argument("--anchors", type=int, default=16, help="blocks a sample and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and anchors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=Path, help="file that is replaced every --every steps and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from --checkpoint")
    parser.add_argument("--every", type=int, default=20, help="steps a checkpoint and a line: means since the last one")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that read")
    parser.add_argument("--read-ahead", type=int, default=0, help="batches that threads read ahead, without workers")
    options = parser.parse_args(arguments)
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint")
    return options


def open_loader(options: argparse.Namespace) -> CachedDataLoader:
    """Open the cache; of a ragged one batches are as long as their longest sample."""
    is_ragged = read_manifest(options.cache).get("layout") == "ragged"
    loader = build_cached_dspark_dataloader(
        options.cache,
        options.batch_size,
        shuffle="shard",
        num_workers=options.num_workers,
        distributed=dist.is_initialized(),
        expect=options.expect,
        pad_to="longest" if is_ragged else "seq_length",
        seed=options.seed,
        read_ahead=options.read_ahead,
    )
    if not len(loader):
        raise SystemExit(f"{options.cache} has no samples to train on")
    return loader


def batches(loader: Any, epoch: int) -> Iterator[Batch]:
    """Yield batches for ever; of the epoch that a resumed loader is in, the rest."""
    for current in count(epoch):
        loader.sampler.set_epoch(current)
        for batch in loader:
            if loader.sampler.is_at_repeat:
                batch["loss_mask"][-1] = 0  # read again so that all processes have as many, it must not count twice
            yield batch


def resume(checkpoint: Path, parts: Mapping[str, Any], device: str) -> tuple[int, int]:
    """Give each part the state that it was saved with; return the steps that were done, and the epoch."""
    saved = torch.load(checkpoint, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["step"], saved["loader"]["epoch"]


def train(options: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Train; yield what each `train_step` returns. The first process prints and saves."""
    loader, is_first = open_loader(options), world()[1] == 0
    torch.manual_seed(options.seed)
    draft = Draft(options.cache, options.block_size, options.anchors, options.device)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=options.lr)
    parts: dict[str, Any] = {"draft": draft, "optimizer": optimizer, "loader": loader}
    done, epoch = resume(options.checkpoint, parts, options.device) if options.resume else (0, 0)
    model = nn.parallel.DistributedDataParallel(draft) if dist.is_initialized() else draft
    positions, recent = read_manifest(options.cache)["seq_length"], list[torch.Tensor]()
    for step, batch in zip(range(done + 1, options.steps + 1), batches(loader, epoch), strict=False):
        draws = draw(options.seed, step, options.batch_size, positions)[: len(batch["input_ids"])]
        recent.append(sums := train_step(model, optimizer, batch, draws))
        if step % options.every == 0 or step == options.steps:
            if is_first:
                report(f"step {step}", torch.stack(recent).sum(dim=0))
            if is_first and options.checkpoint:
                with put_file(options.checkpoint) as temporary:  # whole, or the earlier one stays
                    torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, temporary)
            recent.clear()
        yield sums
    held_out = options.cache.with_name(f"{options.cache.name}-eval")
    if is_first and (held_out / "manifest.json").exists():
        report("held out", evaluate(draft, held_out, options.batch_size))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says, below torchrun as one of its processes."""
    options = parse(arguments)
    is_one_of_many = "RANK" in os.environ
    if is_one_of_many and options.device == "cuda":
        options.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(options.device)
    if is_one_of_many:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    for _ in train(options):
        pass
    if is_one_of_many:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
