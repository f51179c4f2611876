"""The typed settings of the pipeline, read from params.yaml as DVC reads it.

One walk over the plain values checks names, exact types and ranges, and reports every fault at once with its full
key name. Nothing is coerced but an integer to a float, and nothing is interpolated. What passed is kept as an
OmegaConf structured config and handed out as the frozen dataclasses below.
"""

from __future__ import annotations

import difflib
import logging
import re
import types
import typing
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from dspark_cache.dtypes import DTYPE_MAP, STORED_DTYPES
from dspark_cache.errors import SettingsError
from dspark_cache.schema import AUTO, FP8, VERIFY_LEVELS
from dspark_cache.strict_json import is_int
from dspark_cache.yaml_file import load_yaml, read_yaml

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "DSPARK_"
_SIMILAR = 0.8
"""From which similarity on, of 1, a name is taken for a mistyped one: `dat` has 0.86, `date` 0.75, `dataset` 0.73."""


def is_slice(text: str) -> bool:
    """Say whether a text is "K/N" with K from 1 to N."""
    found = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    return found is not None and 1 <= int(found[1]) <= int(found[2])


def _key(default: Any, about: str, **rules: Any) -> Any:
    """Return the field of a key.

    Args:
        default: Its value where params.yaml has none.
        about: What it means: the comment beside it in params.yaml, and its line in docs/parameters.md.
        rules: `minimum` of a number; `choices` of a text; `words` that may stand for a number; or `form`, what a text
            must look like and the function that says whether it does.
    """
    return field(default=default, metadata={"about": about, **rules})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Section `data`: which conversations, in which order, and what of them is supervised."""

    path: str = _key("inputs/data/conversations.jsonl", "file or folder of conversations, or a hub data set id")
    revision: str | None = _key(None, "hub commit, or sha256:... for a path outside inputs/")
    split: str | None = _key(None, "null: all; train, train[:5000], train[:95%]")
    shuffle: bool | None = _key(None, "null: Parquet and hub yes, JSON no; true; false")
    shuffle_seed: int = _key(42, "of that order", minimum=0)
    seq_length: int = _key(256, "tokens a sample is cut to; 4096 for real drafts", minimum=2)
    mask_reasoning_content: bool = _key(False, "leave reasoning unsupervised")
    mask_generation_prompt: bool = _key(False, "leave what the template puts before an answer unsupervised")
    min_loss_tokens: int = _key(
        0, "drop samples with fewer supervised tokens; DSpark uses 14 = 2 x block size", minimum=0
    )
    skip_invalid: bool = _key(False, "skip and count rows that are no conversation, instead of stopping")
    limit: int | None = _key(None, "first n samples, for a trial; null: all", minimum=1)
    eval_samples: int = _key(
        0, "distinct samples, the first ones, held out of cache/ and published as cache-eval/", minimum=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSettings:
    """Section `target`: the frozen model, the layers captured, and how it runs."""

    model: str = _key("inputs/target", "folder or hub id")
    revision: str | None = _key(None, "hub commit, or sha256:... for a path outside inputs/")
    chat_template: str | None = _key(None, "inline Jinja, or a path under inputs/; null: the tokenizer's own")
    layer_ids: list[int] | None = _key(  # noqa: RUF009 - a frozen field, not a mutable default
        None, "explicit ids; null: even spread over draft_num_hidden_layers", minimum=-1
    )
    draft_num_hidden_layers: int = _key(5, "layers that null spreads evenly, up to the last", minimum=1)
    compute_dtype: str = _key("auto", "the checkpoint's own dtype; bf16, fp16, fp32", choices=("auto", *DTYPE_MAP))
    attn_implementation: str | None = _key(None, "null: transformers' choice")
    trust_remote_code: bool = _key(False, "run the code of a checkpoint that brings its own")
    nonfinite: str = _key(
        "error", "states that are not finite stop the run; drop: their samples are left out", choices=("error", "drop")
    )
    block_bytes: int = _key(2147483648, "states of a block in scratch", minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """Section `cache`: the published form."""

    layout: str = _key(
        "padded",
        "padded (format 1, read by NeMo AutoModel) or ragged (format 2, real tokens only)",
        choices=("padded", "ragged"),
    )
    dtype: str = _key(
        "bf16",
        "bf16, fp16, fp32; fp8_e4m3 (ragged only): half of bf16, read back in bf16",
        choices=tuple(STORED_DTYPES),
    )
    shard_size: int | str = _key(
        16, "padded: samples a shard; auto: as many as shard_bytes hold", words=(AUTO,), minimum=1
    )
    shard_bytes: int = _key(
        2147483648, "ragged: bytes of states a shard; a larger sample has one of its own", minimum=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySettings:
    """Section `verify`: how far the published cache is checked."""

    level: str = _key("values", "files < headers < bytes < values < supervision", choices=VERIFY_LEVELS)
    recompute_samples: int = _key(4, "samples run through the target once more; 0: no target needed", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSettings:
    """Section `runtime`: where and how fast, never what; part of no identity."""

    device: str = _key("auto", "cuda if there is one, else cpu")
    processes: int | str = _key(AUTO, "that capture on this machine; auto: one a visible GPU", words=(AUTO,), minimum=1)
    parallelism: str = _key(
        "replicate",
        "or fsdp, tensor: the target sharded over several processes",
        choices=("replicate", "fsdp", "tensor"),
    )
    group_size: int | str = _key(
        AUTO,
        "processes that share one copy of the target then; auto: those of one machine",
        words=(AUTO,),
        minimum=1,
    )
    slice: str | None = _key(
        None,
        "K/N: capture this part of the blocks alone, without writing features.json",
        form=("K/N with K from 1 to N", is_slice),
    )
    max_tokens_per_batch: int = _key(
        8192, "rows times width of one forward; a longer sample is a batch of its own", minimum=1
    )
    num_workers: int = _key(2, "processes that tokenise, threads that convert and verify", minimum=0)
    scratch_dir: str = _key(".work", "relative to the repository's root")
    keep_blocks: bool = _key(True, "false: removed once the cache is verified")
    host_memory_gb: float = _key(4.0, "captured states waiting for the disk, in each process", minimum=0)
    allow_mixed: bool = _key(False, "allow blocks of other hardware or versions in one cache")
    check_blocks: str = _key(
        "headers", "or digest: read and hash blocks again before they are used", choices=("headers", "digest")
    )
    check_disk: bool = _key(True, "refuse to start where less disk is free than will be written")


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

    Sections of other pipelines of the repository are left alone, unless their name is nearly one of ours.

    Raises:
        SettingsError: Listing every fault of the file and the environment.
    """
    params = _read_yaml(path)
    faults: list[str] = []
    for section, values in _environment_values(environment, faults).items():
        written = params.get(section) or {}
        if isinstance(written, dict):  # anything else is a fault that the walk reports
            params[section] = {**written, **values}
    settings = check_settings(params, name=str(path), faults=faults)
    others = [str(section) for section in params if section not in SECTIONS]
    if others:
        logger.info("%s: left alone, no sections of this pipeline: %s", path, ", ".join(others))
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        params = read_yaml(path)
    except FileNotFoundError as error:
        raise SettingsError(f"no such file: {path}; run from the root of the repository") from error
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
            if section.startswith(tuple(SECTIONS)) or _similar_section(section):
                faults.append(f"{name} in the environment is no setting: write {ENVIRONMENT_PREFIX}RUNTIME__<KEY>")
            continue
        if section != "runtime":
            faults.append(f"{name} in the environment: only runtime keys may be set there, set {section}.{key} instead")
            continue
        try:
            found[key] = load_yaml(environment[name], f"{name} in the environment")
        except SettingsError as error:
            faults.append(f"{error}, found {environment[name]!r}")
    return {"runtime": found} if found else {}


def check_settings(params: Mapping[str, Any], *, name: str = "params", faults: list[str] | None = None) -> Settings:
    """Check plain nested values and return them as `Settings`, defaults filled in.

    Args:
        params: Section to its keys and values; what is no section of ours, nor nearly one, is not looked at.
        name: File that the message names.
        faults: Faults found before, reported with those found here.

    Raises:
        SettingsError: Listing every fault.
    """
    found = list(faults or [])
    plain: dict[str, dict[str, Any]] = {}
    for section, values in params.items():
        if section not in SECTIONS:
            similar = _similar_section(str(section))
            if similar:
                found.append(f"unknown section {section!r}, did you mean {similar!r}?")
        elif not isinstance(values, dict):
            found.append(f"{section}: expected keys and values, found {values!r:.60}")
        else:
            plain[section] = _check_section(section, values, found)
    _check_together(plain, params, found)
    if found:
        raise SettingsError(f"{name} has {len(found)} fault(s):\n  " + "\n  ".join(found))
    return _typed(plain)


def _similar_section(name: str) -> str | None:
    """Return the section of ours that a name is nearly: `targets` and `Data` are, `dataset` and `run` are not."""
    near = difflib.get_close_matches(name.casefold(), SECTIONS, n=1, cutoff=_SIMILAR)
    return near[0] if near else None


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
    kinds = _kinds(hint)
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
    least = f" of at least {metadata['minimum']}" if "minimum" in metadata else ""
    names: dict[Any, str] = {**_NAMES, int: _NAMES[int] + least, float: _NAMES[float] + least}
    if "words" in metadata:
        names[str] = ", ".join(metadata["words"])
    if "form" in metadata:
        names[str] = metadata["form"][0]
    return " or ".join(names.get(kind, f"a list of integers{least}") for kind in kinds)


def _check_together(plain: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any], faults: list[str]) -> None:
    """Check what no single key shows, among the keys of `params` that are right by themselves."""
    data, target = plain.get("data", {}), plain.get("target", {})
    layer_ids = target.get("layer_ids")
    if layer_ids is not None and (not layer_ids or sorted(set(layer_ids)) != layer_ids):
        faults.append(f"target.layer_ids: expected one or more strictly increasing ids, found {layer_ids}")
    least = data.get("min_loss_tokens", 0)
    length = data.get("seq_length") if _writes(params, "data", "seq_length") else DataSettings().seq_length
    if length is not None and least > length:
        faults.append(f"data.min_loss_tokens: {least} is more than the {length} tokens of data.seq_length")
    cache = plain.get("cache", {})
    layout = cache.get("layout") if _writes(params, "cache", "layout") else CacheSettings().layout
    if cache.get("dtype") == FP8 and layout == "padded":
        faults.append(f"cache.dtype: {FP8} needs cache.layout: ragged, format version 1 has no place for its scales")


def allowed_values(section: str, key: str) -> str:
    """Return what values a key may have, as messages say it."""
    kind = SECTIONS[section]
    (found,) = (item for item in fields(kind) if item.name == key)
    return _expectation(_kinds(typing.get_type_hints(kind)[key]), found.metadata)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _writes(params: Mapping[str, Any], section: str, key: str) -> bool:
    values = params.get(section)
    return isinstance(values, dict) and key in values


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
