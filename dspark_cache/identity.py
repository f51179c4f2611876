"""Where each identity field of the manifest comes from, and comparing a cache with what a trainer expects.

`IDENTITY_SOURCES` is the one table that ties the manifest to params.yaml and to what follows from watched inputs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_cache.manifest import DSPARK_FIELDS, RAGGED_FIELDS
from dspark_cache.schema import AUTO, IDENTITY_EXEMPT, MANIFEST_DEFAULTS
from dspark_cache.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY_SOURCES: dict[str, tuple[str, ...]] = {
    "chat_template_sha256": ("target.chat_template", "inputs/target"),
    "dtype": ("cache.dtype",),
    "hidden_size": ("target.model", "target.revision", "inputs/target"),
    "layout": ("cache.layout",),
    "mask_generation_prompt": ("data.mask_generation_prompt",),
    "mask_reasoning_content": ("data.mask_reasoning_content",),
    "num_hidden_layers": ("target.model", "target.revision", "inputs/target"),
    "num_samples": (
        "data.path",
        "data.revision",
        "data.split",
        "data.seq_length",
        "data.mask_reasoning_content",
        "data.mask_generation_prompt",
        "data.min_loss_tokens",
        "data.skip_invalid",
        "data.limit",
        "data.eval_samples",
        "target.chat_template",
        "target.nonfinite",
        "inputs/data",
        "inputs/target",
    ),
    "pad_token_id": ("target.model", "target.revision", "inputs/target"),
    "seq_length": ("data.seq_length",),
    "shard_samples": ("cache.shard_bytes", "cache.dtype", "inputs/data", "inputs/target"),
    "shard_size": ("cache.shard_size", "cache.shard_bytes", "data.seq_length", "cache.dtype", "inputs/target"),
    "shuffle_seed": ("data.shuffle_seed",),
    "target_hidden_dim": (
        "target.model",
        "target.revision",
        "target.layer_ids",
        "target.draft_num_hidden_layers",
        "inputs/target",
    ),
    "target_last_hidden_dim": ("target.model", "target.revision", "inputs/target"),
    "target_layer_ids": ("target.layer_ids", "target.draft_num_hidden_layers", "target.model", "inputs/target"),
    "target_model": ("target.model",),
    "target_model_type": ("target.model", "target.revision", "inputs/target"),
    "target_vocab_size": ("target.model", "target.revision", "inputs/target"),
    "train_data_path": ("data.path",),
    "train_split": ("data.split",),
}
"""Manifest field to the params and watched inputs that decide it; one listed alone is the field's value itself."""

VERBATIM: dict[str, str] = {field: sources[0] for field, sources in IDENTITY_SOURCES.items() if len(sources) == 1} | {
    "shard_size": "cache.shard_size",
    "target_layer_ids": "target.layer_ids",
}
"""Manifest field to the param whose explicit value it repeats."""


def manifest_differences(manifest: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    """Return one line for each key of `expected` whose value in `manifest` is another.

    Raises:
        SettingsError: `expected` has keys that no manifest has.
    """
    unknown = sorted(set(expected) - set(DSPARK_FIELDS | RAGGED_FIELDS) - set(IDENTITY_EXEMPT) - set(manifest))
    if unknown:
        raise SettingsError(f"expect= has keys that no manifest has: {unknown}; known are {sorted(DSPARK_FIELDS)}")
    recorded = {"layout": "padded", **MANIFEST_DEFAULTS, **manifest}
    expected = {key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()}
    return [
        f"{key}: expected {value!r}, found {recorded.get(key, 'nothing')!r}"
        for key, value in expected.items()
        if key not in recorded or recorded[key] != value or isinstance(recorded[key], bool) != isinstance(value, bool)
    ]


def expected_of_params(path: Path) -> dict[str, Any]:
    """Return the manifest fields that the explicit (not null) values of a params.yaml fix.

    Raises:
        SettingsError: No such file, no YAML mapping, or the package `ruamel.yaml` is not installed.
    """
    try:
        params = read_yaml(path)
    except FileNotFoundError as error:
        raise SettingsError(f"expect={str(path)!r}: no such file") from error
    if not isinstance(params, dict):
        raise SettingsError(f"{path} must hold sections of params, found {type(params).__name__}")
    return expected_of_sections(params)


def expected_of_sections(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest fields that the explicit (not null) values of the sections of a params.yaml fix."""
    expected = {}
    for field, param in VERBATIM.items():
        section, _, key = param.partition(".")
        values = params.get(section)
        if isinstance(values, dict) and values.get(key) is not None:
            expected[field] = values[key]
    if expected.get("layout") == "ragged":
        expected.pop("shard_size", None)  # ragged shards are cut by bytes
    if expected.get("shard_size") == AUTO:
        del expected["shard_size"]
    return expected


def ensure_expected(
    manifest: Mapping[str, Any], expect: Mapping[str, Any] | str | os.PathLike[str], *, cache_dir: str
) -> None:
    """Refuse a cache that is not the one a trainer expects, listing every difference.

    Args:
        manifest: The cache's manifest.
        expect: Manifest fields to compare, or the path of a params.yaml whose explicit values are compared.
        cache_dir: Folder of the cache, for the message.

    Raises:
        CacheFormatError: Fields differ.
        SettingsError: `expect` has unknown keys or cannot be read.
    """
    expected = expected_of_params(Path(expect)) if isinstance(expect, str | os.PathLike) else expect
    differing = manifest_differences(manifest, expected)
    if differing:
        raise CacheFormatError(
            f"the cache in {cache_dir} was made with a different configuration, it does not match expect=: "
            + "; ".join(differing)
        )
