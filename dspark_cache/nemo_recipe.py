"""A recipe of NeMo AutoModel against a cache: what that trainer would do with the two, as observed on version 0.7.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dspark_cache.chat_templates import SETTING, chat_template_sha256, resolve_chat_template
from dspark_cache.config_differences import (
    DEFAULT_DRAFT_LAYERS,
    ERROR,
    WARNING,
    CheckedCache,
    Difference,
    default_layers,
    near_misses,
    wrong_layers,
)
from dspark_cache.errors import DsparkCacheError, SettingsError
from dspark_cache.manifest import is_ragged
from dspark_cache.schema import FP8, MANIFEST_DEFAULTS
from dspark_cache.strict_json import NOTHING, is_int, read_json_object
from dspark_cache.target import resolve_layer_ids
from dspark_cache.target_weights import target_weights_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RECIPE: Final = "recipe_args"
NEMO: Final = "NeMo AutoModel 0.7.0"

_DRAFT_FAMILIES: Final = ("qwen3", "qwen3_moe", "gemma4*", "deepseek_v4*", "glm*", "kimi*", "minimax*")
"""Values of `model_type` that NeMo AutoModel has drafts for; those with a star are known as beginnings only."""
_NEEDED_FIELDS: Final = (
    "dtype",
    "hidden_size",
    "num_hidden_layers",
    "seq_length",
    "target_hidden_dim",
    "target_last_hidden_dim",
    "target_layer_ids",
    "target_model",
    "target_model_type",
    "target_vocab_size",
)
"""Manifest fields without which NeMo AutoModel stops with a KeyError."""

_TEXT = ("a text", lambda v: isinstance(v, str))
_FLAG = ("true or false", lambda v: isinstance(v, bool))
_COUNT = ("an integer of at least 1", lambda v: is_int(v) and v >= 1)
_KINDS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "cache_dtype": _TEXT,
    "cached_target_path": _TEXT,
    "chat_template": _TEXT,
    "draft_num_hidden_layers": _COUNT,
    "mask_generation_prompt": _FLAG,
    "mask_reasoning_content": _FLAG,
    "micro_batch_size": _COUNT,
    "packed_sequence_size": ("an integer of at least 0", lambda v: is_int(v) and v >= 0),
    "seq_length": _COUNT,
    "shuffle_seed": ("an integer", is_int),
    "target_layer_ids": ("a list of integers", lambda v: isinstance(v, list) and all(is_int(i) for i in v)),
    "target_model_name_or_path": _TEXT,
    "train_data_path": _TEXT,
    "train_split": _TEXT,
    "val_data_path": _TEXT,
}
"""Keys of `recipe_args` that are looked at, and what each must be; null counts as absent, others are ignored."""


class Recipe:
    """What NeMo AutoModel would do with a recipe and a cache, as it was observed on version 0.7.0."""

    def __init__(self, config: Mapping[str, Any], cache: CheckedCache) -> None:
        """Take a file that has the section `recipe_args`."""
        self._config = config
        self._args: Mapping[Any, Any] = config[RECIPE]
        self._cache = cache
        self._manifest = cache.manifest
        self._values: dict[str, Any] = {}

    def differences(self, device: str | None) -> Iterator[Difference]:
        """Yield all differences; `device` is "cpu" if that is where training will run."""
        yield from self._take_values()
        yield from self._cache_faults(device)
        yield from self._layer_ids()
        yield from self._seq_length()
        for option in MANIFEST_DEFAULTS:
            again = f"make the cache again with data.{option}, which needs no GPU if blocks were kept"
            yield from self._same(option, option, ERROR, again, default=False)
        names = "only names are compared: make sure that they are the same weights"
        yield from self._same("target_model_name_or_path", "target_model", WARNING, names)
        yield from self._target_config()
        for key in ("train_data_path", "train_split", "shuffle_seed"):
            ignored = "training from a cache does not read it: the data, split and order of the cache count"
            yield from self._same(key, key, WARNING, ignored)
        yield from self._same("cache_dtype", "dtype", WARNING, "it says how a cache is made, training does not read it")
        yield from self._chat_template()
        yield from self._ways_of_training()

    def _take_values(self) -> Iterator[Difference]:
        """Keep the values that can be compared; yield what is wrong with the others, and mistyped keys."""
        for key, (expected, accept) in _KINDS.items():
            value = self._args.get(key)
            if value is None:
                continue
            if isinstance(value, str) and "${" in value:
                problem = f"{value!r:.80} is filled in when training starts, it is not compared"
                yield self._difference(WARNING, key, problem, "compare it by hand")
            elif not accept(value):
                yield self._difference(ERROR, key, f"expected {expected}, found {value!r:.80}", "correct the value")
            else:
                self._values[key] = value
        yield from near_misses(RECIPE, self._args, _KINDS)
        for key in sorted({str(key) for key in self._config} & set(_KINDS)):
            yield Difference(
                severity=WARNING,
                key=key,
                value=self._config[key],
                problem=f"it stands outside {RECIPE}, where it is not read",
                remedy=f"move it into {RECIPE}",
            )

    def _difference(self, severity: str, key: str, problem: str, remedy: str, cached: Any = NOTHING) -> Difference:
        value = self._args.get(key)
        return Difference(
            severity=severity,
            key=f"{RECIPE}.{key}",
            value=NOTHING if value is None else value,
            cached=cached,
            problem=problem,
            remedy=remedy,
        )

    def _cache_faults(self, device: str | None) -> Iterator[Difference]:
        """Yield what makes NeMo AutoModel refuse the cache whatever the recipe says."""
        manifest, refused = self._manifest, f"{NEMO} refuses the cache: "

        def fault(problem: str, remedy: str, cached: Any = NOTHING) -> Difference:
            return Difference(severity=ERROR, key="cache", cached=cached, problem=problem, remedy=remedy)

        if is_ragged(manifest):
            remedy = f"make a padded one: {self._cache.converted('--layout padded')}"
            if manifest["dtype"] == FP8:  # which no conversion widens
                remedy = "publish it again with cache.layout: padded and cache.dtype: bf16"
            yield fault(f"{refused}it is ragged, format version 2", remedy, "ragged")
        missing = [field for field in _NEEDED_FIELDS if field not in manifest]
        if missing:
            yield fault(f"{refused}its manifest lacks {missing}", "make the cache again with dvc repro")
        weights = target_weights_path(self._cache.folder)
        if not Path(weights).is_file():
            yield fault(f"{refused}{weights} does not exist", "copy the whole cache")
        family = manifest.get("target_model_type")
        if family is not None and not _has_draft(family):
            families = ", ".join(name.rstrip("*") for name in _DRAFT_FAMILIES)
            yield fault(
                f"{NEMO} has no draft for targets of the family {family!r}, only for {families}",
                "train with another trainer: docs/recipes/other-trainers.md",
                family,
            )
        stored = manifest.get("dtype")
        if device == "cpu" and stored not in (None, "fp32"):
            yield fault(
                f"{refused}on a CPU it computes in fp32 and needs a cache in fp32, this one is in {stored}",
                "train on a GPU, or make the cache again with cache.dtype: fp32",
                stored,
            )
        if not manifest.get("num_samples"):
            yield fault("it has no samples", "make the cache again from data that have some", 0)

    def _layer_ids(self) -> Iterator[Difference]:
        there, num_layers = self._manifest.get("target_layer_ids"), self._manifest.get("num_hidden_layers")
        if there is None or num_layers is None:
            return
        key = "target_layer_ids"
        wanted: list[int] | None
        if key in self._values:
            wanted = self._values[key]
            try:
                resolve_layer_ids(wanted, DEFAULT_DRAFT_LAYERS, num_layers)
            except SettingsError as error:
                problem = str(error).partition(": ")[2]
                yield self._difference(ERROR, key, problem, f"set it to {there}, the cache's", there)
                return
        elif self._args.get(key) is not None:
            return
        else:
            wanted = default_layers(self._manifest, self._values.get("draft_num_hidden_layers", DEFAULT_DRAFT_LAYERS))
        if wanted not in (None, there):
            is_default = key not in self._values
            yield wrong_layers(f"{RECIPE}.{key}", wanted, self._cache, is_default=is_default)

    def _same(
        self, key: str, field: str, severity: str, remedy: str, *, default: Any = NOTHING
    ) -> Iterator[Difference]:
        """Yield a key whose value is another than the cache's; where it is absent, its default if it has one.

        Beside `remedy`, an error has that of taking the cache's value.
        """
        value = self._values.get(key, default if self._args.get(key) is None else NOTHING)
        cached = self._manifest.get(field, NOTHING)
        if NOTHING not in (value, cached) and value != cached:
            problem = f"{value!r}{'' if key in self._values else ' by default'}, the cache has {cached!r}"
            if severity == ERROR:
                remedy = f"set it to {json.dumps(cached)}; or {remedy}"
            yield self._difference(severity, key, problem, remedy, cached)

    def _seq_length(self) -> Iterator[Difference]:
        key, cached = "seq_length", self._manifest.get("seq_length")
        if self._args.get(key) is None and cached is not None:
            problem = f"it is not set, the cache has {cached}: NeMo AutoModel refuses another"
            yield self._difference(WARNING, key, problem, f"set it to {cached}", cached)
        value = self._values.get(key, 0)
        again = f"capture again with data.seq_length: {value}"
        if cached is not None and value < cached:
            again = f"cut the cache: {self._cache.converted(f'--seq-length {value}')}"
        yield from self._same(key, key, ERROR, again)

    def _target_config(self) -> Iterator[Difference]:
        """Compare the configuration of a target that lies in a folder, as NeMo AutoModel does at the start."""
        key = "target_model_name_or_path"
        path = Path(self._values.get(key, "")) / "config.json"
        if key not in self._values or not path.is_file():
            return
        try:
            whole = read_json_object(path)
        except (DsparkCacheError, OSError) as error:
            yield self._difference(WARNING, key, f"{error}: it is not compared", "compare it by hand")
            return
        text = whole.get("text_config")
        values = text if isinstance(text, dict) else whole
        fields = {"target_vocab_size": "vocab_size", "hidden_size": "hidden_size"}
        fields |= {"num_hidden_layers": "num_hidden_layers"}
        pairs = [("target_model_type", "model_type", whole)]
        pairs += [(field, name, values) for field, name in fields.items()]
        for field, name, source in pairs:
            cached = self._manifest.get(field)
            if name in source and cached is not None and source[name] != cached:
                problem = f"{name} of {path} is {source[name]!r}, the cache was made with {cached!r}"
                yield self._difference(ERROR, key, problem, "take the target that the cache was made with", cached)

    def _chat_template(self) -> Iterator[Difference]:
        key, cached = "chat_template", self._manifest.get("chat_template_sha256")
        if key not in self._values or cached is None:
            return
        try:
            digest = chat_template_sha256(resolve_chat_template(self._values[key], None))  # type: ignore[arg-type]  # not asked
        except DsparkCacheError as error:
            problem = str(error).replace(SETTING, key)
            yield self._difference(WARNING, key, f"{problem}; it is not compared", "correct it", cached)
            return
        if digest != cached:
            problem = f"its sha256 is {digest}, that of the cache's template {cached}"
            remedy = "tokens and masks are the cache's: serve the draft with the template that the cache was made with"
            yield self._difference(WARNING, key, problem, remedy, cached)

    def _ways_of_training(self) -> Iterator[Difference]:
        """Yield keys that do not go with any cache."""
        if self._values.get("packed_sequence_size"):
            problem = f"{self._values['packed_sequence_size']}: {NEMO} refuses to pack the samples of a cache"
            yield self._difference(ERROR, "packed_sequence_size", problem, "set it to 0")
        if "val_data_path" in self._values:
            problem = f"{NEMO} ignores it when it trains from a cache"
            remedy = "hold samples out with data.eval_samples, and evaluate on cache-eval/ in a run of its own"
            yield self._difference(WARNING, "val_data_path", problem, remedy)
        key = "cached_target_path"
        if self._args.get(key) is None:
            problem = "it is not set: NeMo AutoModel would run the target in every step and read no cache"
            yield self._difference(WARNING, key, problem, f"set it to {self._cache.folder.resolve()}")
        elif key in self._values and not _is_same_folder(Path(self._values[key]), self._cache.folder):
            problem = f"{self._values[key]!r} is not the folder that was compared, {self._cache.folder}"
            yield self._difference(WARNING, key, problem, "compare the cache that training will read")


def _has_draft(family: str) -> bool:
    return any(family.startswith(name[:-1]) if name.endswith("*") else family == name for name in _DRAFT_FAMILIES)


def _is_same_folder(one: Path, other: Path) -> bool:
    return one.exists() and one.samefile(other)
