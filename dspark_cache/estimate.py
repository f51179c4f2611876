"""What a run will take, worked out before it: bytes, files, memory and time, from token counts and a configuration.

The counts come from `tokens/`, or from tokenising the conversations; of the target only its configuration is read.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cache_plan import cut_shards, shard_bytes
from dspark_cache.dtypes import DTYPE_MAP, READ_DTYPES, STORED_DTYPES, TensorSpec
from dspark_cache.errors import CacheNotFoundError, InputError
from dspark_cache.files import nearest_existing
from dspark_cache.progress import ShowProgress, silent
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import EMBED_KEY, GIB, LM_HEAD_KEY
from dspark_cache.shard_file import file_bytes
from dspark_cache.stage import TOKENS_PATH, StageContext
from dspark_cache.target import read_model_size, read_target_facts, resolve_layer_ids, target_folder
from dspark_cache.tokenize_run import open_conversations, params_identity
from dspark_cache.tokens import TokenCounts, Tokens, hold_out, sample_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_cache.settings import CacheSettings

FORMS = tuple(("padded", dtype) for dtype in DTYPE_MAP) + tuple(("ragged", dtype) for dtype in STORED_DTYPES)
"""Layouts and dtypes that a cache can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples that a run will capture.

    Attributes:
        lengths: Tokens of each, in order.
        keys: Key of each; samples with the same ids have the same one.
        seq_length: S.
    """

    lengths: Sequence[int]
    keys: Sequence[str]
    seq_length: int

    def distinct(self) -> dict[str, int]:
        """Return the tokens of each distinct sample by its key."""
        return dict(zip(self.keys, self.lengths, strict=True))

    def parts(self, eval_samples: int) -> list[list[int]]:
        """Return the lengths of the samples of each cache that is published."""
        held = hold_out(self.keys, eval_samples)
        pairs = list(zip(self.keys, self.lengths, strict=True))
        parts = [[length for key, length in pairs if (key in held) is is_held] for is_held in (False, True)]
        return [part for part in parts if part]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What the bytes of a target's states follow from.

    Attributes:
        vocab_size: V.
        hidden_size: H.
        num_layers: L.
        compute_dtype: Key of `DTYPE_MAP` in which blocks are stored.
        ties_weights: Whether lm_head is the embedding.
        model_bytes: Bytes of all of its parameters.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    compute_dtype: str
    ties_weights: bool
    model_bytes: int

    def form(self, dtype: str) -> StatesForm:
        """Return how states are stored in `dtype`."""
        return StatesForm(dtype=dtype, hidden_dim=self.hidden_size * self.num_layers, last_dim=self.hidden_size)

    def weight_bytes(self, dtype: str, *, tied_once: bool) -> int:
        """Return the bytes of a file with embedding and lm_head."""
        weight = TensorSpec(dtype=READ_DTYPES[dtype], shape=(self.vocab_size, self.hidden_size))
        keys = (EMBED_KEY,) if self.ties_weights and tied_once else (EMBED_KEY, LM_HEAD_KEY)
        return file_bytes(dict.fromkeys(keys, weight))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Bytes of what is published in one form, `cache/` and `cache-eval/` together.

    Attributes:
        total: All files, as they are read, hashed, pushed and copied.
        held: The same on a disk that keeps padding as holes.
        shards: How many shards.
    """

    total: int
    held: int
    shards: int


def scratch_bytes(samples: Samples, target: TargetShape) -> int:
    """Return the bytes of all blocks, and of the weights kept beside them."""
    distinct = samples.distinct()
    blocks = file_bytes(feature_specs(sum(distinct.values()), len(distinct), target.form(target.compute_dtype)))
    return blocks + target.weight_bytes(target.compute_dtype, tied_once=True)


def cache_bytes(
    samples: Samples, target: TargetShape, settings: CacheSettings, form: tuple[str, str], eval_samples: int
) -> CacheBytes:
    """Return the bytes of a cache in layout and dtype `form`, with the shards that `settings` asks for."""
    layout, dtype = form
    states, is_ragged = target.form(dtype), layout == "ragged"
    total = holes = shards = 0
    for lengths in samples.parts(eval_samples):
        cut = cut_shards(
            lengths,
            states,
            samples.seq_length,
            shard_size=None if is_ragged else settings.shard_size,
            shard_bytes=settings.shard_bytes,
        )
        for run in cut:
            size = shard_bytes(lengths[run.start : run.stop], states, samples.seq_length, layout)
            total, holes = total + size.total, holes + size.holes
        total += target.weight_bytes(dtype, tied_once=is_ragged)
        shards += len(cut)
    return CacheBytes(total=total, held=total - holes, shards=shards)


def target_shape(stage: StageContext) -> TargetShape:
    """Read what is needed of the target, from its configuration alone.

    Raises:
        InputError: It cannot be read, or cannot be captured.
        SettingsError: Layer ids that the target does not have.
    """
    settings = stage.settings.target
    folder = target_folder(stage.target, stage.root, trust_remote_code=settings.trust_remote_code, weights=False)
    facts = read_target_facts(folder, trust_remote_code=settings.trust_remote_code)
    layer_ids = resolve_layer_ids(settings.layer_ids, settings.draft_num_hidden_layers, facts.num_hidden_layers)
    compute_dtype = facts.dtype if settings.compute_dtype == "auto" else settings.compute_dtype
    size = read_model_size(folder, settings, compute_dtype)
    return TargetShape(
        vocab_size=facts.vocab_size,
        hidden_size=facts.hidden_size,
        num_layers=len(layer_ids),
        compute_dtype=compute_dtype,
        ties_weights=size.ties_weights,
        model_bytes=size.num_bytes,
    )


def samples_of_tokens(tokens: Tokens) -> Samples:
    """Return the samples of `tokens/`."""
    return Samples(lengths=tokens.offsets.diff().tolist(), keys=tokens.keys(), seq_length=tokens.seq_length)


def read_samples(stage: StageContext, *, max_rows: int | None, progress: ShowProgress = silent) -> tuple[Samples, str]:
    """Return the samples of a run and where they were taken from.

    Args:
        stage: The repository.
        max_rows: Tokenise as many conversations, spread evenly, and take them for all; None: `tokens/` if it was made
            with the params of now, else all conversations.
        progress: Shows the progress of tokenising.

    Raises:
        InputError: The inputs cannot be used, or give no sample.
    """
    if max_rows is None:
        try:
            tokens = Tokens(stage.root / TOKENS_PATH)
        except CacheNotFoundError:
            pass
        else:
            if params_identity(stage).items() <= tokens.identity.items():
                return samples_of_tokens(tokens), f"{TOKENS_PATH}/"
    return _tokenised(stage, max_rows, progress)


def _tokenised(stage: StageContext, max_rows: int | None, progress: ShowProgress) -> tuple[Samples, str]:
    conversations = open_conversations(stage, check_pins=False)
    order = conversations.order
    step = 1 if max_rows is None else max(1, -(-len(order) // max_rows))
    chosen = [order[index] for index in range(0, len(order), step)]
    lengths, keys = [], []
    with progress("tokenize", len(chosen), "rows") as advance:
        for sample in conversations.samples(TokenCounts(), chosen):
            lengths.append(len(sample.input_ids))
            keys.append(sample_key(torch.tensor(sample.input_ids, dtype=torch.int32)))
            advance(1)
    if not lengths:
        raise InputError(f"{stage.settings.data.path}: none of {len(chosen)} conversations gives a sample")
    count = _scaled(len(lengths), len(order), len(chosen), stage.settings.data.limit)
    rounds = [divmod(index, len(lengths)) for index in range(count)]
    scaled = Samples(
        lengths=[lengths[index] for _, index in rounds],
        keys=[f"{keys[index]}{turn or ''}" for turn, index in rounds],
        seq_length=stage.settings.data.seq_length,
    )
    return scaled, f"{len(chosen)} of {len(order)} conversations"


def _scaled(kept: int, rows: int, chosen: int, limit: int | None) -> int:
    """Return how many samples all rows give, of which `chosen` gave `kept`."""
    count = kept if chosen == rows else round(kept * rows / chosen)
    return min(count, limit) if limit else count


def estimate_run(
    stage: StageContext, samples: Samples, *, tokens_per_second: float | None, link_doubling: bool | None
) -> dict[str, Any]:
    """Return everything that is known of a run before it, as plain values; sizes in bytes.

    Args:
        stage: The repository.
        samples: What will be captured.
        tokens_per_second: Real tokens that the target's machine captures a second.
        link_doubling: Whether DVC's cache holds what it stores a second time; None: there is no DVC repository.
    """
    settings, target = stage.settings, target_shape(stage)
    distinct, tokens = samples.distinct(), sum(samples.lengths)
    forms = {
        f"{layout} {dtype}": cache_bytes(samples, target, settings.cache, (layout, dtype), settings.data.eval_samples)
        for layout, dtype in FORMS
    }
    chosen = forms[f"{settings.cache.layout} {settings.cache.dtype}"]
    scratch = scratch_bytes(samples, target)
    shares_blocks = (
        (settings.cache.layout, settings.cache.dtype) == ("ragged", target.compute_dtype)
        and settings.cache.shard_bytes == settings.target.block_bytes
        and nearest_existing(stage.scratch).stat().st_dev == nearest_existing(stage.root).stat().st_dev
    )
    return {
        "samples": len(samples.lengths),
        "distinct_samples": len(distinct),
        "tokens": tokens,
        "distinct_tokens": sum(distinct.values()),
        "padding_share": round(1 - tokens / (len(samples.lengths) * samples.seq_length), 6),
        "layout": settings.cache.layout,
        "dtype": settings.cache.dtype,
        "scratch_bytes": scratch,
        "cache_bytes": chosen.total,
        "cache_held_bytes": chosen.held,
        "shards": chosen.shards,
        "shards_are_links_to_blocks": shares_blocks,
        "dvc_copy_bytes": None if link_doubling is None else chosen.total * link_doubling,
        "target_bytes": target.model_bytes,
        "host_memory_bytes": int(settings.runtime.host_memory_gb * GIB),
        "largest_batch_bytes": _batch_bytes(samples, target, settings.runtime.max_tokens_per_batch),
        "scratch_free_bytes": shutil.disk_usage(nearest_existing(stage.scratch)).free,
        "cache_free_bytes": shutil.disk_usage(nearest_existing(stage.root)).free,
        "seconds": round(sum(distinct.values()) / tokens_per_second, 1) if tokens_per_second else None,
        "forms": {
            name: {"bytes": size.total, "held_bytes": size.held, "shards": size.shards} for name, size in forms.items()
        },
    }


def describe(found: dict[str, Any], origin: str) -> str:
    """Return an estimate as text for people; `origin` is where the samples were taken from."""

    def size(value: int) -> str:
        return f"{value / GIB:.3f} GiB"

    doubled = found["dvc_copy_bytes"]
    copies = "no DVC repository" if doubled is None else f"{size(doubled)} beside cache/"
    links = ", links to blocks in scratch" if found["shards_are_links_to_blocks"] else ""
    lines = {
        "samples": f"{found['samples']}, {found['distinct_samples']} of them distinct, from {origin}",
        "tokens": f"{found['tokens']}, {found['distinct_tokens']} to be captured",
        "padding": f"{100 * found['padding_share']:.1f} % of all positions up to seq_length",
        "scratch": f"{size(found['scratch_bytes'])}, {size(found['scratch_free_bytes'])} free there",
        "cache": f"{size(found['cache_bytes'])} ({found['layout']} {found['dtype']}), on the disk that writes it "
        f"{size(found['cache_held_bytes'])}{links}; {size(found['cache_free_bytes'])} free there",
        "shards": f"{found['shards']}",
        "DVC's cache": copies,
        "memory": f"{size(found['host_memory_bytes'])} of states on the host (runtime.host_memory_gb), a batch of up "
        f"to {size(found['largest_batch_bytes'])}, the target's {size(found['target_bytes'])} on its device",
        "time": f"{found['seconds'] / 3600:.2f} h of capture" if found["seconds"] else "pass --tokens-per-second",
    }
    text = [f"{name:12} {line}" for name, line in lines.items()]
    text += ["", f"{'form':16} {'bytes':>20} {'held here':>20} {'shards':>8}"]
    for name, form in found["forms"].items():
        text.append(f"{name:16} {form['bytes']:>20} {form['held_bytes']:>20} {form['shards']:>8}")
    return "\n".join(text)


def _batch_bytes(samples: Samples, target: TargetShape, max_tokens: int) -> int:
    """Return the most bytes of states that one batch has."""
    longest = max(samples.lengths)
    return max(longest, max_tokens) * target.form(target.compute_dtype).token_bytes
