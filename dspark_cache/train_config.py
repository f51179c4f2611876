"""A trainer's YAML compared with a cache before GPU time is spent on either: `dspark-cache check`.

Read are recipes of NeMo AutoModel (`recipe_args:`) and params.yaml. What is reported as an error makes the trainer
refuse the cache, or train something else than the file says; all is found at once, and neither model nor GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.config_differences import (
    DEFAULT_DRAFT_LAYERS,
    ERROR,
    WARNING,
    CheckedCache,
    Difference,
    default_layers,
    layers_option,
    near_misses,
    wrong_layers,
)
from dspark_cache.errors import SettingsError
from dspark_cache.identity import VERBATIM, expected_of_sections, manifest_differences
from dspark_cache.nemo_recipe import RECIPE, Recipe
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.schema import MANIFEST_DEFAULTS
from dspark_cache.serving import serving_findings
from dspark_cache.strict_json import NOTHING, is_int, shortened
from dspark_cache.yaml_file import read_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dspark_cache.manifest import PathLike


def check_train_config(
    cache_dir: PathLike, config_path: PathLike, *, strict: bool = False, device: str | None = None
) -> list[Difference]:
    """Compare a trainer's YAML with a cache; return all differences, errors first.

    Args:
        cache_dir: Folder of the cache; it is opened as a trainer would open it.
        config_path: Recipe of NeMo AutoModel, or params.yaml. Paths in it are taken from the current directory.
        strict: Take warnings for errors.
        device: "cpu" if that is where training will run.

    Raises:
        CacheNotFoundError, CacheFormatError: `CachedDSparkDataset` refuses the cache.
        SettingsError: The file cannot be read, or is neither of the two; or ruamel.yaml is not installed.
    """
    cache = CheckedCache(folder=Path(cache_dir), manifest=CachedDSparkDataset(cache_dir).manifest)
    path = Path(config_path)
    config = _read_config(path)
    found = list(_unservable(cache))
    found += Recipe(config, cache).differences(device) if RECIPE in config else _of_params(config, cache)
    if strict:
        found = [replace(item, severity=ERROR) for item in found]
    return sorted(found, key=lambda item: (item.severity != ERROR, item.key, item.problem))


def describe(found: Sequence[Difference]) -> str:
    """Return differences as text for people."""
    return "\n".join(map(str, found)) if found else "the file and the cache go together"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_yaml(path)
    except FileNotFoundError as error:
        raise SettingsError(f"no such file: {path}") from error
    if isinstance(config, dict) and isinstance(config.get(RECIPE), dict):
        return config
    sections = {param.partition(".")[0] for param in VERBATIM.values()}
    if isinstance(config, dict) and RECIPE not in config and any(isinstance(config.get(key), dict) for key in sections):
        return config
    keys = f"the keys {shortened(sorted(map(str, config)))}" if isinstance(config, dict) else type(config).__name__
    raise SettingsError(
        f"{path} is no recipe of NeMo AutoModel and no params.yaml: expected the section {RECIPE}, or one of "
        f"{sorted(sections)}, with keys in it; found {keys}"
    )


def _unservable(cache: CheckedCache) -> Iterator[Difference]:
    layer_ids, num_layers = cache.manifest.get("target_layer_ids"), cache.manifest.get("num_hidden_layers")
    if layer_ids is None or num_layers is None:
        return
    for finding in serving_findings(layer_ids, num_layers):
        kept = [layer for layer in layer_ids if layer not in finding.layer_ids]
        remedy = "capture others with target.layer_ids"
        if kept:
            remedy = f"leave them out: {cache.converted(layers_option(kept))}; or {remedy}"
        yield Difference(severity=WARNING, key="cache", cached=layer_ids, problem=str(finding), remedy=remedy)


def _of_params(config: Mapping[str, Any], cache: CheckedCache) -> Iterator[Difference]:
    """Yield what `expect=` refuses of a cache for this file, and what it does not see."""
    manifest = cache.manifest
    recorded = {"layout": "padded", **MANIFEST_DEFAULTS, **manifest}
    for field, value in expected_of_sections(config).items():
        if manifest_differences(manifest, {field: value}):
            cached = recorded.get(field, NOTHING)
            yield Difference(
                severity=ERROR,
                key=VERBATIM[field],
                value=value,
                cached=cached,
                problem=f"{value!r}, the cache has {cached!r}",
                remedy="take the cache that was made with this file, or change the file: expect= refuses this one",
            )
    target = config.get("target")
    if isinstance(target, dict) and target.get("layer_ids") is None and "target_layer_ids" in manifest:
        count = target.get("draft_num_hidden_layers") or DEFAULT_DRAFT_LAYERS
        wanted = default_layers(manifest, count) if is_int(count) and count > 0 else None
        if wanted is not None and wanted != manifest["target_layer_ids"]:
            yield wrong_layers("target.layer_ids", wanted, cache, is_default=True)
    params: dict[str, list[str]] = {}
    for param in VERBATIM.values():
        section, _, key = param.partition(".")
        params.setdefault(section, []).append(key)
    yield from near_misses("", config, params)
    for section, keys in params.items():
        values = config.get(section)
        if isinstance(values, dict):
            yield from near_misses(section, values, keys)
