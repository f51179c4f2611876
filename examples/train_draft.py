"""Trains a small DSpark-shaped draft from a cache: an example of how a cache is used, and nothing of the library.

    python examples/train_draft.py --cache cache --checkpoint draft.pt
    torchrun --nproc-per-node 2 examples/train_draft.py --cache cache --batch-size 4

The draft guesses the next K tokens after an anchor at once: a block of the anchor's token and K - 1 masks attends to
itself and to the target's states before the anchor, as one that serves would see them. Read from the top it is what a
draft is, what it learns from, and how training goes on where it was. Shapes: B samples, S positions, D and H widths of
features and last hidden states, V vocabulary, A anchors a sample, K block size, M = A * K, N slots with a target.
"""

from __future__ import annotations

import argparse
import os
from collections import deque
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dspark_cache import build_cached_dspark_dataloader, read_manifest, read_target_weight_modules, target_logits
from dspark_cache.files import put_file
from dspark_cache.provenance import read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dspark_cache.loaders import CachedDataLoader

    Batch = dict[str, torch.Tensor]

TERMS = {"ce": 0.1, "tv": 0.9, "confidence": 1.0}
"""The loss's terms and their weights: cross-entropy, total variation distance to the target, acceptance foretold."""
DECAY = 4.0
"""Slot j of a block counts exp(-j / DECAY): a token is of use only where all before it were accepted."""
MARKOV_RANK = 64


class BlockLayer(nn.Module):
    """Transformer layer of blocks whose attention takes the context's keys and values beside their own."""

    def __init__(self, width: int) -> None:
        """Make a layer of `width`, with heads of 64 where that divides it."""
        super().__init__()
        self.heads = width // 64 if width % 64 == 0 else 1
        self.norm, self.query, self.out = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        wide = nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.RMSNorm(width), *wide)

    def forward(
        self, block: torch.Tensor, context: torch.Tensor, places: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """Take blocks [B, M, H], context [B, S, H], positions [B, S + M] and bool [B, 1, M, S + M]; return blocks."""
        normed = self.norm(block)
        query = self.split(self.query(normed), places[:, context.shape[1] :])
        key, value = self.key_value(torch.cat([context, normed], dim=1)).chunk(2, dim=-1)
        mixed = F.scaled_dot_product_attention(query, self.split(key, places), self.split(value), attn_mask=sees)
        attended: torch.Tensor = block + self.out(mixed.transpose(1, 2).flatten(2))
        return attended.add(self.mlp(attended))

    def split(self, states: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Return heads [B, heads, positions, width of one], rotated by their positions if those are given."""
        states = states.view(*states.shape[:2], self.heads, states.shape[2] // self.heads).transpose(1, 2)
        if places is None:
            return states
        first, second = states.chunk(2, dim=-1)
        angles = places[:, None, :, None] / 10000 ** torch.linspace(0, 1, first.shape[-1], device=states.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Draft(nn.Module):
    """A draft, and its loss against what a cache holds of the target."""

    def __init__(
        self, cache: Path, block_size: int, num_anchors: int, device: str = "cpu", num_layers: int = 2
    ) -> None:
        """Take sizes, frozen embedding and lm_head from the cache."""
        super().__init__()
        manifest, provenance = read_manifest(cache), read_provenance(cache)
        width, vocabulary = manifest["target_last_hidden_dim"], manifest["target_vocab_size"]
        self.block_size, self.num_anchors = block_size, num_anchors
        self.logit_rules = provenance.capture.get("logits", {}) if provenance else {}
        embed, lm_head = read_target_weight_modules(cache)
        # No buffers: they are in no checkpoint, and DDP would send them round in every step.
        self.embed, self.lm_head = embed.weight.to(device), lm_head.weight.to(device).float()
        self.fuse = nn.Sequential(nn.Linear(manifest["target_hidden_dim"], width, bias=False), nn.RMSNorm(width))
        self.mask = nn.Parameter(torch.randn(width) * 0.02)
        self.layers = nn.ModuleList(BlockLayer(width) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.previous = nn.Embedding(vocabulary, MARKOV_RANK)  # the Markov head: a bias by the token before
        self.markov = nn.Linear(MARKOV_RANK, vocabulary, bias=False)
        self.confidence = nn.Linear(width + MARKOV_RANK, 1)
        self.to(device)

    def hidden(self, features: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return states [B, A, K, H] of the blocks at positions `places` [B, A, K], the first of each its anchor's.

        Args:
            features: The target's states [B, S, D].
            ids: Tokens [B, S].
            places: Those of a block follow each other; they may lie beyond S.
        """
        anchors = places[:, :, 0]
        block = self.mask.expand(*places.shape, -1).clone()
        block[:, :, 0] = F.embedding(ids.gather(1, anchors), self.embed).float()
        context = self.fuse(features.float())
        positions = torch.arange(features.shape[1], device=ids.device).expand(len(ids), -1)
        owner = torch.arange(anchors.shape[1], device=ids.device).repeat_interleave(self.block_size)
        before = positions[:, None, :] < anchors.repeat_interleave(self.block_size, dim=1)[:, :, None]
        own = (owner[:, None] == owner).expand(len(ids), -1, -1)
        sees, states = torch.cat([before, own], dim=2)[:, None], block.flatten(1, 2)
        for layer in self.layers:
            states = layer(states, context, torch.cat([positions, places.flatten(1)], dim=1), sees)
        out: torch.Tensor = self.norm(states)
        return out.view(block.shape)

    def forward(self, batch: Batch, draws: torch.Tensor) -> torch.Tensor:
        """Return the sums over all slots of their weights and of each of `TERMS`, [4].

        Args:
            batch: What the loader gives.
            draws: Random numbers [B, S] or longer; a sample's A largest at possible anchors choose them.
        """
        ids, supervised = batch["input_ids"], batch["loss_mask"]
        is_anchor = (supervised[:, :-1] * supervised[:, 1:]).bool()  # position p with mask 1 at p and p + 1
        ranked = draws[:, : is_anchor.shape[1]].masked_fill(~is_anchor, -1)
        best, anchors = ranked.topk(min(self.num_anchors, is_anchor.shape[1]))
        slots = torch.arange(self.block_size, device=ids.device)
        places = anchors[:, :, None] + slots
        # Slot j foretells the token at place + 1; a block ends with its answer.
        next_mask = F.pad(supervised, (0, self.block_size)).gather(1, places.flatten(1) + 1).view(places.shape)
        taken = (next_mask.cumprod(dim=2) * (best >= 0)[:, :, None]).bool()
        sample, place, slot = taken.nonzero()[:, 0], places[taken], slots.expand(places.shape)[taken]

        hidden = self.hidden(batch["target_hidden_states"], ids, places)[taken]
        before = self.previous(ids[sample, place])
        logits = target_logits(hidden, self.lm_head, self.logit_rules) + self.markov(before)
        last = batch["target_last_hidden_states"][sample, place].float()
        teacher = target_logits(last, self.lm_head, self.logit_rules).softmax(dim=-1)
        ce = F.cross_entropy(logits, ids[sample, place + 1], reduction="none")
        tv = (logits.softmax(dim=-1) - teacher).abs().sum(dim=-1) / 2
        foretold = self.confidence(torch.cat([hidden, before], dim=-1))[:, 0]
        confidence = F.binary_cross_entropy_with_logits(foretold, 1 - tv.detach(), reduction="none")
        return (torch.stack([torch.ones_like(ce), ce, tv, confidence]) * (-slot / DECAY).exp()).sum(dim=1)


def world() -> tuple[int, int]:
    """Return the number of processes that train together, and which of them this one is."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def draw(seed: int, step: int, samples: int, positions: int) -> torch.Tensor:
    """Return a step's random numbers [samples, positions] for this process.

    They are dealt to processes as samples are, so that anchors are the same however many there are.
    """
    count, rank = world()
    generator = torch.Generator().manual_seed((seed << 32) + step)
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


def means(sums: torch.Tensor) -> dict[str, float]:
    """Return the mean loss, each term, and 1 - tv: the share of drafted tokens that the target would accept."""
    terms = dict(zip(TERMS, (sums[1:] / sums[0].clamp_min(1e-9)).tolist(), strict=True))
    return {"loss": sum(TERMS[name] * terms[name] for name in TERMS), **terms, "acceptance": 1 - terms["tv"]}


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
    parser.add_argument("--every", type=int, default=20, help="steps a line and checkpoint")
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
        yield from loader


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
    positions, recent = read_manifest(options.cache)["seq_length"], deque[torch.Tensor](maxlen=options.every)
    for step, batch in zip(range(done + 1, options.steps + 1), batches(loader, epoch), strict=False):
        draws = draw(options.seed, step, options.batch_size, positions)[: len(batch["input_ids"])]
        recent.append(train_step(model, optimizer, batch, draws))
        if is_first and (step % options.every == 0 or step == options.steps):
            report(f"step {step}", torch.stack([*recent]).sum(dim=0))
            if options.checkpoint:
                with put_file(options.checkpoint) as temporary:  # whole, or the earlier one stays
                    torch.save({"step": step} | {name: part.state_dict() for name, part in parts.items()}, temporary)
        yield recent[-1]
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
