"""Caches of any size, written without a target: states that nobody computed, in the project's own formats."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from dspark_cache.cache_plan import plan_cache
from dspark_cache.cache_writer import write_cache
from dspark_cache.dtypes import STORED_DTYPES
from dspark_cache.files import put_file
from dspark_cache.manifest import build_cache_manifest
from dspark_cache.provenance import Provenance
from dspark_cache.schema import EMBED_KEY, HIDDEN, INPUT_IDS, LOSS_MASK, STAGE_VERSIONS
from dspark_cache.shard_file import write_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dspark_cache.cache_plan import CachePlan

VOCAB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a made cache looks like.

    Attributes:
        lengths: Tokens of each sample.
        seq_length: S.
        hidden_size: H.
        layers: L.
        dtype: Of the cache.
    """

    lengths: Sequence[int]
    seq_length: int
    hidden_size: int = 1024
    layers: int = 5
    dtype: str = "bf16"

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        return self.hidden_size * (self.layers + 1) * STORED_DTYPES[self.dtype].itemsize


TOKEN_BYTES = Sizes(lengths=(), seq_length=1).token_bytes
"""Of the usual sizes."""


class MadeRows:
    """Rows of states that are cut from one random tensor.

    Attributes:
        lengths: Tokens of each sample.
    """

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        """Make the rows of samples of these sizes, in `dtype`."""
        self.dtype = dtype
        self.lengths = sizes.lengths
        generator = torch.Generator().manual_seed(0)
        width = sizes.hidden_size * sizes.layers
        self._states = torch.randn(sizes.seq_length, width, generator=generator).to(STORED_DTYPES[dtype])
        self._last = self._states[:, : sizes.hidden_size].contiguous()
        self._ids = torch.randint(1, VOCAB, (sizes.seq_length,), generator=generator, dtype=torch.int32)
        self._mask = torch.ones(sizes.seq_length, dtype=torch.uint8)

    def num_tokens(self, sample: int) -> int:
        """Return T of a sample."""
        return self.lengths[sample]

    def rows(self, key: str, sample: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded); `sample` makes no difference."""
        del sample
        by_key = {INPUT_IDS: self._ids, LOSS_MASK: self._mask, HIDDEN: self._states}
        return by_key.get(key, self._last)[start:stop]

    def features_of(self, samples: Sequence[int]) -> None:
        """Return nothing: no file holds them."""


def made_plan(sizes: Sizes, layout: str, *, shard_size: int, shard_bytes: int) -> CachePlan:
    """Return the plan of a cache of these sizes."""
    config = SimpleNamespace(hidden_size=sizes.hidden_size, num_hidden_layers=sizes.layers + 1, vocab_size=VOCAB)
    manifest = build_cache_manifest(
        target_model="made",
        target_model_type="qwen3",
        target_text_config=config,
        seq_length=sizes.seq_length,
        dtype=sizes.dtype,
        num_samples=len(sizes.lengths),
        shard_size=shard_size,
        target_layer_ids=list(range(sizes.layers)),
        train_data_path="made",
        train_split=None,
        shuffle_seed=0,
        mask_reasoning_content=False,
        chat_template_sha256=hashlib.sha256(b"").hexdigest(),
        mask_generation_prompt=False,
    )
    provenance = Provenance(
        layout=layout, shards_version=STAGE_VERSIONS["shards"], pad_token_id=0, tokens={}, capture={}, held_out={}
    )
    return plan_cache(manifest, dict(enumerate(sizes.lengths)), shard_bytes=shard_bytes, provenance=provenance)


def make_cache(folder: Path, sizes: Sizes, layout: str, *, shard_bytes: int, source: MadeRows | None = None) -> None:
    """Write a cache as the stage does from captured states in bf16, over an earlier one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shard_size = max(1, shard_bytes // (sizes.token_bytes * sizes.seq_length))
    plan = made_plan(sizes, layout, shard_size=shard_size, shard_bytes=shard_bytes)
    source = source or MadeRows(sizes, "bf16")
    write_cache(folder, plan, source, lambda path: _put_weights(path, sizes), lambda _: None)


def evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _put_weights(path: Path, sizes: Sizes) -> str:
    weight = torch.ones(VOCAB, sizes.hidden_size, dtype=torch.bfloat16)
    with put_file(path) as temporary:
        return write_tensors(temporary, {EMBED_KEY: weight, "lm_head.weight": weight})
