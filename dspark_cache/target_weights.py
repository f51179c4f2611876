"""The target's embedding and lm_head, kept beside the shards so that training needs no target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.manifest import is_ragged, read_manifest
from dspark_cache.schema import EMBED_KEY, LM_HEAD_KEY, TARGET_WEIGHTS_NAME
from dspark_cache.shard_file import open_cache_file, write_tensors

if TYPE_CHECKING:
    import torch

    from dspark_cache.manifest import PathLike


def target_weights_path(cache_dir: PathLike) -> str:
    """Return the path of the target weights inside `cache_dir`."""
    return str(Path(cache_dir) / TARGET_WEIGHTS_NAME)


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.detach().to(device="cpu", dtype=dtype).contiguous()


def put_target_weights(
    path: Path, embed_tokens: torch.Tensor, lm_head: torch.Tensor, dtype: torch.dtype, *, tied_once: bool = False
) -> str:
    """Put a file with both weights [V, H], cast to `dtype`, in place; return its sha256.

    Tied weights, the same tensor, are under both names, which format version 1 asks for, or only once.
    """
    embed = _cast(embed_tokens, dtype)
    head = embed if lm_head is embed_tokens else _cast(lm_head, dtype)
    tensors = {EMBED_KEY: embed} if tied_once and head is embed else {EMBED_KEY: embed, LM_HEAD_KEY: head}
    with put_file(path) as temporary:
        return write_tensors(temporary, tensors)


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
    put_target_weights(path, _weight(embed_tokens), _weight(lm_head), dtype)
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
