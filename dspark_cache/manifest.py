"""The manifest of a cache: built, written, read and compared here, by one set of functions for all.

The first half is generic: any offline cache (DSpark, EAGLE-3) has a JSON manifest with a format version. The
second half is what a DSpark manifest holds. A manifest read here has checked types: whoever gets one from
`read_manifest` does not convert or check it again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dspark_cache.dtypes import DTYPE_MAP, STORED_DTYPES
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import dump_json, put_bytes
from dspark_cache.schema import (
    DSPARK_FORMAT_VERSION,
    DSPARK_NAME,
    DSPARK_PRODUCER,
    IDENTITY_EXEMPT,
    MANIFEST_DEFAULTS,
    MANIFEST_NAME,
    RAGGED_FORMAT_VERSION,
)
from dspark_cache.strict_json import ensure_no_foreign_link, is_int, is_sha256, read_json_object, shortened

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PathLike = str | os.PathLike[str]


class TextConfig(Protocol):
    """What a manifest takes from a target's text configuration."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers."""


MAX_MANIFEST_BYTES = 1 << 24
"""A ragged cache of a million shards has a line for each."""
MAX_SHARDS = 1_000_000
"""Shard names have six digits."""
MAX_SAMPLES = 1 << 48
MAX_SHARD_SAMPLES = 1 << 24
"""Of a ragged shard, whose offsets are held in memory while it is open."""
MAX_EXTENT = 1 << 31


def manifest_path(cache_dir: PathLike) -> str:
    """Return the path of the manifest inside `cache_dir`."""
    return str(Path(cache_dir) / MANIFEST_NAME)


def _count(minimum: int, maximum: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer from {minimum} to {maximum}", lambda v: is_int(v) and minimum <= v <= maximum


_TEXT: tuple[str, Callable[[Any], bool]] = ("a string", lambda v: isinstance(v, str))
_FLAG: tuple[str, Callable[[Any], bool]] = ("true or false", lambda v: isinstance(v, bool))

GENERIC_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_samples": _count(0, MAX_SAMPLES),
    "shard_size": _count(1, MAX_SAMPLES),
    "complete": _FLAG,
}

DSPARK_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = GENERIC_FIELDS | {
    "chat_template_sha256": ("64 hexadecimal digits", is_sha256),
    "dtype": (f"one of {sorted(DTYPE_MAP)}", lambda v: isinstance(v, str) and v in DTYPE_MAP),
    "hidden_size": _count(1, MAX_EXTENT),
    "mask_generation_prompt": _FLAG,
    "mask_reasoning_content": _FLAG,
    "num_hidden_layers": _count(1, MAX_EXTENT),
    "seq_length": _count(1, MAX_EXTENT),
    "shuffle_seed": ("an integer", lambda v: is_int(v) and abs(v) < 1 << 63),
    "target_hidden_dim": _count(1, MAX_EXTENT),
    "target_last_hidden_dim": _count(1, MAX_EXTENT),
    "target_layer_ids": (
        "a list of strictly increasing integers >= -1",
        lambda v: isinstance(v, list) and all(is_int(i) and i >= -1 for i in v) and sorted(set(v)) == v,
    ),
    "target_model": _TEXT,
    "target_model_type": _TEXT,
    "target_vocab_size": _count(1, MAX_EXTENT),
    "train_data_path": _TEXT,
    "train_split": ("a string or null", lambda v: v is None or isinstance(v, str)),
}
"""Every key of a DSpark manifest of version 1 but `format_version`, with what its value must be."""

RAGGED_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    key: value for key, value in DSPARK_FIELDS.items() if key != "shard_size"
} | {
    "dtype": (f"one of {sorted(STORED_DTYPES)}", lambda v: isinstance(v, str) and v in STORED_DTYPES),
    "layout": ("'ragged'", lambda v: v == "ragged"),
    "pad_token_id": _count(0, MAX_EXTENT),
    "shard_samples": (
        f"a list of integers from 1 to {MAX_SHARD_SAMPLES}, the samples of each shard",
        lambda v: (
            isinstance(v, list) and len(v) <= MAX_SHARDS and all(is_int(n) and 0 < n <= MAX_SHARD_SAMPLES for n in v)
        ),
    ),
}
"""The same of version 2."""


def is_ragged(manifest: Mapping[str, Any]) -> bool:
    """Say whether a DSpark manifest is of version 2."""
    return manifest.get("format_version") == RAGGED_FORMAT_VERSION


def dspark_fields(manifest: Mapping[str, Any]) -> dict[str, tuple[str, Callable[[Any], bool]]]:
    """Return every key that a DSpark manifest of this version has, with what its value must be."""
    return RAGGED_FIELDS if is_ragged(manifest) else DSPARK_FIELDS


def check_fields(
    manifest: Mapping[str, Any], fields: Mapping[str, tuple[str, Callable[[Any], bool]]], *, name: str
) -> None:
    """Check the values of those keys of `manifest` that `fields` knows; report all faults at once.

    Raises:
        CacheFormatError: Naming every key with a wrong type or range.
    """
    faults = [
        f"{key}: expected {expected}, found {manifest[key]!r:.80}"
        for key, (expected, accept) in fields.items()
        if key in manifest and not accept(manifest[key])
    ]
    if faults:
        raise CacheFormatError(f"{name}: " + "; ".join(faults))


def require_fields(manifest: Mapping[str, Any], keys: tuple[str, ...], *, name: str) -> None:
    """Refuse a manifest that lacks any of `keys`.

    Raises:
        CacheFormatError: Naming every missing key.
    """
    missing = [key for key in keys if key not in manifest]
    if missing:
        raise CacheFormatError(f"{name}: missing required keys {missing}")


def read_offline_manifest(
    cache_dir: PathLike,
    cache_name: str,
    format_version: int,
    producer_name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Read the manifest of a `cache_name` cache and check its version and the types of the generic keys.

    Args:
        cache_dir: Folder of the cache.
        cache_name: Kind of cache, for messages.
        format_version: The only version this caller can read.
        producer_name: What makes such a cache, for the message where there is none.
        defaults: Values of keys that the manifest may lack, because they are younger than the format.

    Raises:
        CacheNotFoundError: There is no manifest.
        CacheFormatError: Not JSON, too large, another version, or a wrong type.
    """
    return {**(defaults or {}), **_read_versions(cache_dir, cache_name, (format_version,), producer_name)}


def _read_versions(
    cache_dir: PathLike, cache_name: str, versions: tuple[int, ...], producer_name: str | None
) -> dict[str, Any]:
    """Read a manifest of one of `versions` and check the generic keys."""
    path = Path(manifest_path(cache_dir))
    ensure_no_foreign_link(path)
    try:
        manifest = read_json_object(path, max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        remedy = f"; make one with {producer_name}" if producer_name else ""
        raise CacheNotFoundError(f"no {cache_name} cache in {cache_dir}: {path} does not exist{remedy}") from error
    version = manifest.get("format_version")
    if not is_int(version) or version not in versions:
        known = " and ".join(map(repr, versions))
        raise CacheFormatError(
            f"{path}: format_version is {shortened(version)}, this reader of {cache_name} caches knows {known}"
        )
    check_fields(manifest, GENERIC_FIELDS, name=str(path))
    return manifest


def write_offline_manifest(cache_dir: PathLike, manifest: Mapping[str, Any], format_version: int) -> str:
    """Put the manifest of a cache in place, durably; return its path. The values are not checked."""
    folder = Path(cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MANIFEST_NAME
    put_bytes(path, dump_json({**manifest, "format_version": format_version}).encode())
    return str(path)


def ensure_supervision_options_match(
    manifest: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    cache_name: str,
    cache_dir: PathLike,
    producer_name: str,
) -> None:
    """Refuse a cache whose loss masks were made under other options than training asks for.

    Args:
        manifest: The cache's manifest; an absent option counts as False, as in caches older than the option.
        expected: Option name to the value that training wants.
        cache_name: Kind of cache, for the message.
        cache_dir: Folder of the cache, for the message.
        producer_name: What makes such a cache, for the message.

    Raises:
        CacheFormatError: Listing every option that does not match.
    """
    differing = [
        f"{key} is {manifest.get(key, False)!r} in the cache, training asks for {value!r}"
        for key, value in expected.items()
        if manifest.get(key, False) != value
    ]
    if differing:
        raise CacheFormatError(
            f"the {cache_name} cache in {cache_dir} does not match the supervision options: "
            + "; ".join(differing)
            + f"; change the options or make the cache again with {producer_name}"
        )


def ensure_manifest_complete(manifest: Mapping[str, Any], cache_dir: PathLike) -> None:
    """Refuse a cache whose producer has not finished; a manifest without `complete` is older and accepted.

    Raises:
        CacheFormatError: `complete` is there and not true.
    """
    complete = manifest.get("complete", True)
    if complete is not True:
        raise CacheFormatError(
            f"the cache in {cache_dir} is incomplete: its manifest says complete: {complete!r}; its producer is "
            f"still running or was interrupted, wait for it or run {DSPARK_PRODUCER} again"
        )


def manifest_mismatch_fields(recorded: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    """Return the sorted keys whose values differ, apart from those that describe the state of the files."""
    left = {**MANIFEST_DEFAULTS, **recorded}
    right = {**MANIFEST_DEFAULTS, **manifest}
    absent = object()
    return [
        key
        for key in sorted(left.keys() | right.keys())
        if key not in IDENTITY_EXEMPT and left.get(key, absent) != right.get(key, absent)
    ]


def build_cache_manifest(
    target_model: str,
    target_model_type: str,
    target_text_config: TextConfig,
    seq_length: int,
    dtype: str,
    num_samples: int,
    shard_size: int,
    target_layer_ids: list[int],
    train_data_path: str,
    train_split: str | None,
    shuffle_seed: int,
    mask_reasoning_content: bool,
    chat_template_sha256: str,
    mask_generation_prompt: bool = False,
) -> dict[str, Any]:
    """Return a DSpark manifest without `format_version` and `complete`, which the writers add.

    Args:
        target_model: Folder or hub id of the target, as the user wrote it.
        target_model_type: `model_type` of the target's configuration.
        target_text_config: The target's text configuration (transformers' `config.get_text_config()`).
        seq_length: S, tokens that a stored sample has.
        dtype: Key of `DTYPE_MAP`.
        num_samples: Samples in the whole cache.
        shard_size: Samples of every shard but the last.
        target_layer_ids: Captured layers, strictly increasing; i is the output of decoder layer i, -1 the
            embedding's output, the last layer's id the output of the final norm.
        train_data_path: Where the conversations came from, as the user wrote it.
        train_split: Split of it, or None.
        shuffle_seed: Seed of the order of samples.
        mask_reasoning_content: Whether reasoning is unsupervised.
        chat_template_sha256: Digest of the effective chat template.
        mask_generation_prompt: Whether what the generation prompt adds is unsupervised.
    """
    hidden_size = int(target_text_config.hidden_size)
    return {
        "chat_template_sha256": chat_template_sha256,
        "dtype": dtype,
        "hidden_size": hidden_size,
        "mask_generation_prompt": bool(mask_generation_prompt),
        "mask_reasoning_content": bool(mask_reasoning_content),
        "num_hidden_layers": int(target_text_config.num_hidden_layers),
        "num_samples": int(num_samples),
        "seq_length": int(seq_length),
        "shard_size": int(shard_size),
        "shuffle_seed": int(shuffle_seed),
        "target_hidden_dim": hidden_size * len(target_layer_ids),
        "target_last_hidden_dim": hidden_size,
        "target_layer_ids": [int(layer) for layer in target_layer_ids],
        "target_model": target_model,
        "target_model_type": target_model_type,
        "target_vocab_size": int(target_text_config.vocab_size),
        "train_data_path": train_data_path,
        "train_split": train_split,
    }


def _check_widths(manifest: Mapping[str, Any], *, name: str) -> None:
    """Check the widths of states against the hidden size and the layers, as far as the manifest has them."""
    hidden_size, layer_ids = manifest.get("hidden_size"), manifest.get("target_layer_ids")
    if hidden_size is None:
        return
    widths = {"target_last_hidden_dim": hidden_size}
    if layer_ids is not None:
        widths["target_hidden_dim"] = hidden_size * len(layer_ids)
    faults = [
        f"{key} is {manifest[key]}, but hidden_size {hidden_size} and target_layer_ids {shortened(layer_ids)} give "
        f"{width}"
        for key, width in widths.items()
        if manifest.get(key, width) != width
    ]
    if faults:
        raise CacheFormatError(f"{name}: " + "; ".join(faults))


def read_manifest(cache_dir: PathLike, allow_incomplete: bool = False) -> dict[str, Any]:
    """Read and check the manifest of a DSpark cache.

    Args:
        cache_dir: Folder of the cache.
        allow_incomplete: Accept `complete: false`; for producers, never for consumers.

    Raises:
        CacheNotFoundError: There is no manifest.
        CacheFormatError: Not JSON, another version, wrong types, or incomplete.
    """
    versions = (DSPARK_FORMAT_VERSION, RAGGED_FORMAT_VERSION)
    manifest = {**MANIFEST_DEFAULTS, **_read_versions(cache_dir, DSPARK_NAME, versions, DSPARK_PRODUCER)}
    name = manifest_path(cache_dir)
    check_fields(manifest, dspark_fields(manifest), name=name)
    if is_ragged(manifest):
        require_fields(manifest, tuple(RAGGED_FIELDS), name=name)
        if sum(manifest["shard_samples"]) != manifest["num_samples"]:
            raise CacheFormatError(
                f"{name}: shard_samples add up to {sum(manifest['shard_samples'])}, num_samples is "
                f"{manifest['num_samples']}"
            )
    elif manifest.get("num_samples", 0) > manifest.get("shard_size", MAX_SAMPLES) * MAX_SHARDS:
        raise CacheFormatError(
            f"{name}: num_samples {manifest['num_samples']} in shards of {manifest['shard_size']} are more than the "
            f"{MAX_SHARDS} shards that have names"
        )
    _check_widths(manifest, name=name)
    if not allow_incomplete:
        ensure_manifest_complete(manifest, cache_dir)
    return manifest


def write_manifest(cache_dir: PathLike, manifest: dict[str, Any]) -> str:
    """Put the manifest of a DSpark cache in place; return its path. The values are not checked.

    The version is 2 where the manifest says `layout: ragged`, else 1.
    """
    return write_offline_manifest(cache_dir, manifest, version_of(manifest))


def version_of(manifest: Mapping[str, Any]) -> int:
    """Return the format version that a manifest's layout has."""
    return RAGGED_FORMAT_VERSION if manifest.get("layout") == "ragged" else DSPARK_FORMAT_VERSION


def ragged_manifest(manifest: Mapping[str, Any], *, pad_token_id: int, shard_samples: list[int]) -> dict[str, Any]:
    """Turn a manifest of version 1 into that of the ragged cache of the same samples."""
    kept = {key: value for key, value in manifest.items() if key != "shard_size"}
    return {**kept, "layout": "ragged", "pad_token_id": pad_token_id, "shard_samples": shard_samples}
