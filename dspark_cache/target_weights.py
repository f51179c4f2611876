"""The target's embedding and lm_head, kept beside the shards so that training needs no target, and its logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from dspark_cache.dtypes import TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, SettingsError
from dspark_cache.files import put_file
from dspark_cache.manifest import is_ragged, read_manifest
from dspark_cache.schema import EMBED_KEY, LM_HEAD_KEY, LOGIT_CAPS, LOGIT_FACTORS, TARGET_WEIGHTS_NAME
from dspark_cache.shard_file import ShardFile, ShardWriter, file_bytes, open_cache_file, write_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dspark_cache.manifest import PathLike

_CHUNK_BYTES = 1 << 26


def target_weights_path(cache_dir: PathLike) -> str:
    """Return the path of the target weights inside `cache_dir`."""
    return str(Path(cache_dir) / TARGET_WEIGHTS_NAME)


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.detach().to(device="cpu", dtype=dtype).contiguous()


class TargetWeightsCopy:
    """Puts the weights of another file in place in a dtype of choice, a few rows at a time.

    Attributes:
        num_bytes: Bytes of the file that it will make.
    """

    def __init__(self, source: ShardFile, dtype: torch.dtype, *, tied_once: bool) -> None:
        """Compare the two weights.

        Args:
            source: Holds `embed_tokens.weight` and, unless it is the same, `lm_head.weight`, both [V, H].
            dtype: Dtype of the copies.
            tied_once: Whether weights that are equal, byte for byte, are written once: format version 2.
        """
        head = EMBED_KEY if _is_tied(source) else LM_HEAD_KEY
        is_once = tied_once and head == EMBED_KEY
        self._source = source
        self._names = {EMBED_KEY: EMBED_KEY} if is_once else {EMBED_KEY: EMBED_KEY, LM_HEAD_KEY: head}
        self._specs = {
            key: TensorSpec(dtype=dtype, shape=source.places[name].spec.shape) for key, name in self._names.items()
        }
        self.num_bytes = file_bytes(self._specs)

    def put(self, path: Path) -> str:
        """Put the weights in place; return the file's sha256."""
        with put_file(path) as temporary, ShardWriter(temporary, self._specs) as writer:
            for key, name in self._names.items():
                for rows in _row_chunks(self._source, name):
                    writer.append(key, rows.to(self._specs[key].dtype))
            return writer.finish()


def _is_tied(file: ShardFile) -> bool:
    """Say whether lm_head is the embedding: not there, or the same bytes."""
    if LM_HEAD_KEY not in file.places:
        return True
    pairs = zip(_row_chunks(file, EMBED_KEY), _row_chunks(file, LM_HEAD_KEY), strict=False)
    same_shape = file.places[EMBED_KEY].spec == file.places[LM_HEAD_KEY].spec
    return same_shape and all(torch.equal(embed, head) for embed, head in pairs)


def _row_chunks(file: ShardFile, key: str) -> Iterator[torch.Tensor]:
    spec = file.places[key].spec
    step = max(1, _CHUNK_BYTES // max(1, spec.row_bytes))
    for start in range(0, spec.shape[0], step):
        yield file.read_rows(key, start, min(start + step, spec.shape[0]))


def write_target_weights(
    cache_dir: PathLike, embed_tokens: torch.nn.Module, lm_head: torch.nn.Module, dtype: torch.dtype
) -> str:
    """Write the weights [V, H] of the embedding and the lm_head in `dtype`; return the file's path.

    Tied weights are written under both names, which format version 1 asks for.

    Raises:
        CacheFormatError: The lm_head has a bias, which the format has no place for.
    """
    if getattr(lm_head, "bias", None) is not None:
        raise CacheFormatError("the target's lm_head has a bias, which target_weights.safetensors has no place for")
    path = Path(target_weights_path(cache_dir))
    path.parent.mkdir(parents=True, exist_ok=True)
    embed, head = _weight(embed_tokens), _weight(lm_head)
    cast = _cast(embed, dtype)
    with put_file(path) as temporary:
        write_tensors(temporary, {EMBED_KEY: cast, LM_HEAD_KEY: cast if head is embed else _cast(head, dtype)})
    return str(path)


def _weight(module: torch.nn.Module) -> torch.Tensor:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]  # Module's attributes are Tensor | Module
    return weight


def read_target_weight_modules(cache_dir: PathLike) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Load the weights; return two objects with a `.weight` [V, H] each: embedding and lm_head.

    Tied weights of a ragged cache, stored once, are the same object twice.

    Raises:
        CacheNotFoundError: There is no such file.
        CacheFormatError: Truncated, malformed, keys missing, or shapes that do not fit each other.
    """
    file = open_cache_file(Path(target_weights_path(cache_dir)))
    is_tied = LM_HEAD_KEY not in file.places and _stores_tied_weights_once(cache_dir)
    keys = (EMBED_KEY, EMBED_KEY) if is_tied else (EMBED_KEY, LM_HEAD_KEY)
    file.require(keys)
    specs = [file.places[key].spec for key in keys]
    if specs[0] != specs[1] or len(specs[0].shape) != 2:
        raise CacheFormatError(f"{file.name}: expected two weights [V, H] of one dtype, found {specs[0]}, {specs[1]}")
    embed = SimpleNamespace(weight=file.read_rows(EMBED_KEY, 0, specs[0].shape[0]))
    if is_tied:
        return embed, embed
    return embed, SimpleNamespace(weight=file.read_rows(LM_HEAD_KEY, 0, specs[1].shape[0]))


def _stores_tied_weights_once(cache_dir: PathLike) -> bool:
    """Say whether the cache is of format version 2; without a manifest it is not."""
    try:
        return is_ragged(read_manifest(cache_dir, allow_incomplete=True))
    except CacheNotFoundError:
        return False


def target_logits(
    last_hidden: torch.Tensor, lm_head: torch.Tensor, rules: Mapping[str, float] | None = None
) -> torch.Tensor:
    """Return the logits [..., V] that the target makes of last hidden states.

    Args:
        last_hidden: States after the final norm [..., H], as `target_last_hidden_states` has them.
        lm_head: Weight of lm_head [V, H], in the dtype of the states.
        rules: What else the target does to them: `capture["logits"]` of the cache's provenance; None: nothing.

    Raises:
        SettingsError: A rule that is not known here.
    """
    rules = rules or {}
    known = (*LOGIT_FACTORS, *LOGIT_CAPS)
    if unknown := sorted(rules.keys() - known):
        raise SettingsError(
            f"rules: expected some of {', '.join(known)}, found {', '.join(unknown)}: install the release that wrote it"
        )
    logits = torch.nn.functional.linear(last_hidden, lm_head)
    for name, power in LOGIT_FACTORS.items():
        logits = logits * rules[name] ** power if name in rules else logits
    for name in LOGIT_CAPS:
        logits = rules[name] * torch.tanh(logits / rules[name]) if name in rules else logits
    return logits
