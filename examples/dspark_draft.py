"""A small DSpark-shaped draft and its loss: an example of what learns from a cache, and nothing of the library.

The draft guesses the next K tokens after an anchor at once: a block of the anchor's token and K - 1 masks attends to
itself and to the target's states before the anchor, as one that serves would see them. Shapes: B samples, S positions,
D and H widths of features and last hidden states, V vocabulary, A anchors a sample, K block size, M = A * K.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from dspark_cache import read_manifest, read_target_weight_modules, target_logits
from dspark_cache.provenance import read_provenance

if TYPE_CHECKING:
    from pathlib import Path

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


def means(sums: torch.Tensor) -> dict[str, float]:
    """Return the mean loss, each term, and 1 - tv: the share of drafted tokens that the target would accept."""
    terms = dict(zip(TERMS, (sums[1:] / sums[0].clamp_min(1e-9)).tolist(), strict=True))
    return {"loss": sum(TERMS[name] * terms[name] for name in TERMS), **terms, "acceptance": 1 - terms["tv"]}
