"""The typed settings of the pipeline, read from params.yaml as DVC reads it.

One walk over the plain values checks names, exact types and ranges, and reports every fault at once with its full
key name. Nothing is coerced but an integer to a float, and nothing is interpolated. What passed is kept as an
OmegaConf structured config and handed out as the frozen dataclasses below.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dspark_cache.dtypes import DTYPE_MAP, STORED_DTYPES
from dspark_cache.errors import SettingsError
from dspark_cache.schema import AUTO, FP8, VERIFY_LEVELS
from dspark_cache.strict_json import is_int

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENVIRONMENT_PREFIX = "DSPARK_"
YAML_ERRORS = (YAMLError, ValueError, RecursionError)
"""What ruamel.yaml raises on bad text; ValueError comes from dates that do not exist and from bad UTF-8."""


def is_slice(text: str) -> bool:
    """Say whether a text is "K/N" with K from 1 to N."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    return found is not None and 1 <= int(found[1]) <= int(found[2])


def _at_least(default: Any, minimum: int) -> Any:
    return field(default=default, metadata={"minimum": minimum})


def _one_of(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Section `data`: which conversations, in which order, and what of them is supervised."""

    path: str = "inputs/data/conversations.jsonl"
    revision: str | None = None
    split: str | None = None
    shuffle: bool | None = None
    shuffle_seed: int = _at_least(42, 0)
    seq_length: int = _at_least(256, 2)
    """Tokens a sample is cut to."""
    mask_reasoning_content: bool = False
    mask_generation_prompt: bool = False
    min_loss_tokens: int = _at_least(0, 0)
    skip_invalid: bool = False
    limit: int | None = _at_least(None, 1)
    eval_samples: int = _at_least(0, 0)
    """Distinct samples, the first ones, that are published as `cache-eval/` and left out of `cache/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Section `target`: the frozen model, the layers captured, and how it runs."""

    model: str = "inputs/target"
    revision: str | None = None
    chat_template: str | None = None
    layer_ids: list[int] | None = _at_least(None, -1)  # noqa: RUF009 - a frozen field, not a mutable default
    draft_num_hidden_layers: int = _at_least(5, 1)
    compute_dtype: str = _one_of("auto", "auto", *DTYPE_MAP)
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    nonfinite: str = _one_of("error", "error", "drop")
    block_bytes: int = _at_least(2147483648, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Section `cache`: the published form."""

    layout: str = _one_of("padded", "padded", "ragged")
    dtype: str = _one_of("bf16", *STORED_DTYPES)
    """Of the states; fp8_e4m3 in the ragged layout only."""
    shard_size: int | str = field(default=16, metadata={"words": (AUTO,), "minimum": 1})
    """Samples a shard of the padded layout; auto: as many as `shard_bytes` hold, of this seq_length and width."""
    shard_bytes: int = _at_least(2147483648, 1)
    """Size of states at which a ragged shard is full; a larger sample has one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Section `verify`: how far the published cache is checked."""

    level: str = _one_of("values", *VERIFY_LEVELS)
    recompute_samples: int = _at_least(4, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Section `runtime`: where and how fast, never what; part of no identity."""

    device: str = "auto"
    processes: int | str = field(default=AUTO, metadata={"words": (AUTO,), "minimum": 1})
    """Processes that capture on this machine; auto: one a visible GPU."""
    parallelism: str = _one_of("replicate", "replicate", "fsdp", "tensor")
    group_size: int | str = field(default=AUTO, metadata={"words": (AUTO,), "minimum": 1})
    """Processes that share one copy of the target where it is sharded; auto: those of one machine."""
    slice: str | None = field(default=None, metadata={"form": ("K/N with K from 1 to N", is_slice)})
    """Part of the blocks that this run computes, independently of the others, without writing the ledger."""
    max_tokens_per_batch: int = _at_least(8192, 1)
    """Rows times width of one forward; a longer sample is a batch of its own."""
    num_workers: int = _at_least(2, 0)
    scratch_dir: str = ".work"
    keep_blocks: bool = True
    host_memory_gb: float = _at_least(4.0, 0)
    """GiB of captured states that each process holds on the host while they wait for the disk."""
    allow_mixed: bool = False
    check_blocks: str = _one_of("headers", "headers", "digest")
    check_disk: bool = True
    """Refuse to start where less disk is free than will be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All of params.yaml."""

    data: DataSettings = field(default_factory=DataSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    verify: VerifySettings = field(default_factory=VerifySettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)


SECTIONS: dict[str, type] = {
    "data": DataSettings,
    "target": TargetSettings,
    "cache": CacheSettings,
    "verify": VerifySettings,
    "runtime": RuntimeSettings,
}


def load_settings(path: Path, environment: Mapping[str, str]) -> Settings:
    """Read and check params.yaml, with `DSPARK_RUNTIME__<KEY>` of `environment` over its runtime keys.

    Raises:
        SettingsError: Listing every fault of the file and the environment.
    """
    params = _read_yaml(path)
    faults: list[str] = []
    for section, values in _environment_values(environment, faults).items():
        written = params.get(section) or {}
        if isinstance(written, dict):  # anything else is a fault that the walk reports
            params[section] = {**written, **values}
    return check_settings(params, name=str(path), faults=faults)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        params = YAML(typ="safe", pure=True).load(path)
    except FileNotFoundError as error:
        raise SettingsError(f"no such file: {path}; run from the root of the repository") from error
    except (OSError, *YAML_ERRORS) as error:
        raise SettingsError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(params, dict):
        raise SettingsError(f"{path} must hold sections of params, found {type(params).__name__}")
    return params


def _environment_values(environment: Mapping[str, str], faults: list[str]) -> dict[str, dict[str, Any]]:
    """Return what the environment sets; only runtime keys may come from there."""
    found: dict[str, Any] = {}
    for name in sorted(environment):
        section, _, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if not key or section not in SECTIONS:
            # Other programs may have variables of this prefix; a mistyped one of ours must not be lost.
            if section.startswith(tuple(SECTIONS)) or difflib.get_close_matches(section, SECTIONS, cutoff=0.8):
                faults.append(f"{name} in the environment is no setting: write {ENVIRONMENT_PREFIX}RUNTIME__<KEY>")
            continue
        if section != "runtime":
            faults.append(f"{name} in the environment: only runtime keys may be set there, set {section}.{key} instead")
            continue
        try:
            found[key] = YAML(typ="safe", pure=True).load(environment[name])
        except YAML_ERRORS:
            faults.append(f"{name} in the environment is not valid YAML: {environment[name]!r}")
    return {"runtime": found} if found else {}


def check_settings(params: Mapping[str, Any], *, name: str = "params", faults: list[str] | None = None) -> Settings:
    """Check plain nested values and return them as `Settings`, defaults filled in.

    Args:
        params: Section to its keys and values.
        name: File that the message names.
        faults: Faults found before, reported with those found here.

    Raises:
        SettingsError: Listing every fault.
    """
    found = list(faults or [])
    plain: dict[str, dict[str, Any]] = {}
    for section, values in params.items():
        if section not in SECTIONS:
            found.append(f"unknown section {section!r}" + _nearest(str(section), SECTIONS))
        elif not isinstance(values, dict):
            found.append(f"{section}: expected keys and values, found {values!r:.60}")
        else:
            plain[section] = _check_section(section, values, found)
    _check_together(plain, params, found)
    if found:
        raise SettingsError(f"{name} has {len(found)} fault(s):\n  " + "\n  ".join(found))
    return _typed(plain)


def _check_section(section: str, values: Mapping[Any, Any], faults: list[str]) -> dict[str, Any]:
    kind = SECTIONS[section]
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind)}
    checked = {}
    for key, value in values.items():
        if key not in known:
            faults.append(f"unknown key {section}.{key}" + _nearest(str(key), known))
            continue
        fault = _fault_of(value, hints[key], known[key].metadata)
        if fault:
            faults.append(f"{section}.{key}: expected {fault}, found {value!r:.80}")
        else:
            checked[key] = float(value) if hints[key] is float else value
    return checked


def _fault_of(value: Any, hint: Any, metadata: Mapping[str, Any]) -> str | None:
    """Return what was expected of `value`, or None if it is that."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in kinds:
        return None
    expected = _expectation(kinds, metadata)
    if value == "???" or not any(_is_kind(value, kind) for kind in kinds):
        return expected
    if "choices" in metadata and value not in metadata["choices"]:
        return expected
    if isinstance(value, str) and "words" in metadata:
        return None if value in metadata["words"] else expected
    if "form" in metadata and not metadata["form"][1](value):
        return expected
    numbers = value if isinstance(value, list) else [value]
    if "minimum" in metadata and any(number < metadata["minimum"] for number in numbers):
        return expected
    return None


def _is_kind(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return is_int(value) and abs(value) < 1 << 63
    if kind is float:
        return _is_kind(value, int) or (isinstance(value, float) and abs(value) < float("inf"))
    if kind is str:
        return isinstance(value, str) and bool(value.strip())
    return isinstance(value, list) and all(_is_kind(item, int) for item in value)


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a text", types.NoneType: "null"}


def _expectation(kinds: tuple[Any, ...], metadata: Mapping[str, Any]) -> str:
    if "choices" in metadata:
        return "one of " + ", ".join(str(choice) for choice in metadata["choices"])
    names: dict[Any, str] = {**_NAMES}
    if "words" in metadata:
        names[str] = ", ".join(metadata["words"])
    if "form" in metadata:
        names[str] = metadata["form"][0]
    text = " or ".join(names.get(kind, "a list of integers") for kind in kinds)
    return text + (f" of at least {metadata['minimum']}" if "minimum" in metadata else "")


def _check_together(plain: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any], faults: list[str]) -> None:
    """Check what no single key shows, among the keys of `params` that are right by themselves."""
    data, target = plain.get("data", {}), plain.get("target", {})
    layer_ids = target.get("layer_ids")
    if layer_ids is not None and (not layer_ids or sorted(set(layer_ids)) != layer_ids):
        faults.append(f"target.layer_ids: expected one or more strictly increasing ids, found {layer_ids}")
    is_default = "seq_length" not in (params.get("data") or {})
    least, length = data.get("min_loss_tokens", 0), DataSettings().seq_length if is_default else data.get("seq_length")
    if length is not None and least > length:
        faults.append(f"data.min_loss_tokens: {least} is more than the {length} tokens of data.seq_length")
    cache = plain.get("cache", {})
    layout = cache.get("layout") if "layout" in (params.get("cache") or {}) else CacheSettings().layout
    if cache.get("dtype") == FP8 and layout == "padded":
        faults.append(f"cache.dtype: {FP8} needs cache.layout: ragged, format version 1 has no place for its scales")


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else f"; known are {sorted(known)}"


def _literal(text: str) -> str:
    """Escape `${`, and the backslashes before it, so that OmegaConf gives the text back as it is."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


def _typed(plain: Mapping[str, Mapping[str, Any]]) -> Settings:
    """Fill in defaults and types through the structured config; `${` is text in it, no interpolation."""
    schema = OmegaConf.structured(Settings)
    OmegaConf.set_readonly(schema, False)
    for section in SECTIONS:
        OmegaConf.set_readonly(schema[section], False)
    literal = {
        section: {key: _literal(value) if isinstance(value, str) else value for key, value in keys.items()}
        for section, keys in plain.items()
    }
    typed: Settings = OmegaConf.to_object(OmegaConf.merge(schema, literal))  # type: ignore[assignment]
    return typed
