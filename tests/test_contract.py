"""The public face: names, constants and signatures that callers of the reference rely on."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from inspect import Parameter

import pytest
import torch

import dspark_cache
from dspark_cache import offline_cache

FACE_SIGNATURES = {
    "CachedDSparkDataset": "cache_dir",
    "_collate_cached": "features",
    "_target_weights_path": "cache_dir",
    "build_cache_manifest": (
        "target_model, target_model_type, target_text_config, seq_length, dtype, num_samples, shard_size, "
        "target_layer_ids, train_data_path, train_split, shuffle_seed, mask_reasoning_content, chat_template_sha256, "
        "mask_generation_prompt=False"
    ),
    "build_cached_dspark_dataloader": "cache_dir, batch_size, shuffle, num_workers=0, distributed=False",
    "compute_batch_cache": "target_batch, cache_dtype",
    "ensure_manifest_complete": "manifest, cache_dir",
    "manifest_mismatch_fields": "recorded, manifest",
    "read_manifest": "cache_dir, allow_incomplete=False",
    "read_target_weight_modules": "cache_dir",
    "tokenizer_chat_template_sha256": "tokenizer",
    "write_manifest": "cache_dir, manifest",
    "write_shard": "cache_dir, shard_index, samples",
    "write_target_weights": "cache_dir, embed_tokens, lm_head, dtype",
}
LOOP = "compute_batch, write_shard_fn, logger"
OFFLINE_SIGNATURES = {
    "CachedTensorDataset": "cache_dir, cache_name, format_version, disk_keys",
    "_ShardAccumulator": "output_dir, shard_size, start_shard_index, write_shard_fn, logger",
    "_sequential_subset_loader": "dataloader, start, end",
    "atomic_write": "path, write_fn",
    "build_cached_dataloader": "dataset, batch_size, shuffle, collate_fn, num_workers=0, distributed=False",
    "collate_cached": "features, keys",
    "dataloader_from_sample": "dataloader, start_sample",
    "ensure_supervision_options_match": "manifest, expected, *, cache_name, cache_dir, producer_name",
    "existing_shard_indices": "cache_dir",
    "load_safetensors": "cache_name",
    "manifest_path": "cache_dir",
    "partition_cache_shards": "num_samples, shard_size, world_size, rank",
    "read_manifest": "cache_dir, cache_name, format_version, producer_name=None, defaults=None",
    "resume_start_sample": "existing_shards, shard_size",
    "shard_path": "cache_dir, shard_index",
    "validate_contiguous_shards": "cache_dir, cache_name, num_samples, shard_size",
    "write_cache_shards": f"dataloader, output_dir, shard_size, start_shard_index, {LOOP}",
    "write_cache_shards_distributed": (
        f"dataloader, output_dir, shard_size, world_size, rank, {LOOP}, sync_max_steps=None"
    ),
    "write_manifest": "cache_dir, manifest, format_version",
    "write_tensor_shard": "cache_dir, shard_index, samples, keys, cache_name",
}
METHOD_SIGNATURES = {
    (offline_cache.CachedTensorDataset, "__getitem__"): "self, index",
    (offline_cache.CachedTensorDataset, "__len__"): "self",
    (offline_cache.CachedTensorDataset, "_handle"): "self, shard_index",
    (offline_cache._ShardAccumulator, "_flush"): "self, max_samples=None",
    (offline_cache._ShardAccumulator, "add"): "self, batch_cache",
    (offline_cache._ShardAccumulator, "finalize"): "self",
}
FACE_CONSTANTS = {
    "CACHE_KEYS": ("input_ids", "loss_mask", "target_hidden_states", "target_last_hidden_states"),
    "DTYPE_MAP": {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
    "MANIFEST_DEFAULTS": {"mask_reasoning_content": False, "mask_generation_prompt": False},
    "_CACHE_NAME": "DSpark",
    "_FORMAT_VERSION": 1,
    "_IDENTITY_EXEMPT_FIELDS": ("format_version", "complete"),
    "_TARGET_WEIGHTS_NAME": "target_weights.safetensors",
}
OFFLINE_CONSTANTS = {
    "MANIFEST_NAME": "manifest.json",
    "SHARD_RE": re.compile("^shard-(\\d{6})\\.safetensors$"),
}
OURS = {
    "CacheFormatError",
    "CacheNotFoundError",
    "CaptureError",
    "DsparkCacheError",
    "InputError",
    "LockedError",
    "RowError",
    "SettingsError",
    "VerificationError",
    "__version__",
    "fetch_cache",
    "open_cache",
    "target_logits",
}

SIGNATURES = [
    *((getattr(dspark_cache, name), text) for name, text in FACE_SIGNATURES.items()),
    *((getattr(offline_cache, name), text) for name, text in OFFLINE_SIGNATURES.items()),
    *((getattr(cls, name), text) for (cls, name), text in METHOD_SIGNATURES.items()),
]


def parameters(function: object) -> list[tuple[str, object, object]]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(p.name, p.kind, p.default) for p in signature.parameters.values()]


@pytest.mark.parametrize(("function", "text"), SIGNATURES, ids=lambda value: getattr(value, "__qualname__", "_"))
def test_signatures_are_the_contract_s_with_at_most_more_keyword_only_parameters(function: object, text: str) -> None:
    expected = parameters(eval(f"lambda {text}: None"))
    found = parameters(function)
    assert found[: len(expected)] == expected
    more = found[len(expected) :]
    assert all(kind is Parameter.KEYWORD_ONLY and default is not Parameter.empty for _, kind, default in more)


@pytest.mark.parametrize(("module", "constants"), [(dspark_cache, FACE_CONSTANTS), (offline_cache, OFFLINE_CONSTANTS)])
def test_constants_are_the_contract_s(module: object, constants: dict[str, object]) -> None:
    assert {name: getattr(module, name) for name in constants} == constants


def test_attributes_of_classes_are_the_contract_s(make_cache: object) -> None:
    dataset = dspark_cache.CachedDSparkDataset(make_cache(3, 2))  # type: ignore[operator]
    assert isinstance(dataset, offline_cache.CachedTensorDataset)
    assert isinstance(dataset, torch.utils.data.Dataset)
    assert (dataset.num_samples, dataset.shard_size, list(dataset._shard_indices)) == (3, 2, [0, 1])
    assert dataset.manifest["num_samples"] == 3
    assert len(dataset._open_handles) == 0
    accumulator = offline_cache._ShardAccumulator("out", 2, 0, lambda *_: "", logger=None)  # type: ignore[arg-type]
    assert (accumulator._buffered, accumulator._chunks) == (0, [])


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (dspark_cache, {*FACE_SIGNATURES, *FACE_CONSTANTS, *OURS}),
        (offline_cache, {*OFFLINE_SIGNATURES, *OFFLINE_CONSTANTS}),
    ],
)
def test_all_lists_exactly_the_face_in_order(module: object, names: set[str]) -> None:
    listed: list[str] = module.__all__  # type: ignore[attr-defined]
    assert set(listed) == names

    def place(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert listed == sorted(names, key=place)


@pytest.mark.parametrize("module", [dspark_cache, offline_cache])
def test_everything_in_the_face_has_a_docstring(module: object) -> None:
    things = [getattr(module, name) for name in module.__all__]  # type: ignore[attr-defined]
    documented = [thing for thing in things if inspect.isclass(thing) or inspect.isfunction(thing)]
    methods = [
        method
        for cls in documented
        if inspect.isclass(cls)
        for name, method in vars(cls).items()
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
    ]
    assert [thing.__qualname__ for thing in documented + methods if not inspect.getdoc(thing)] == []
    assert len(documented) > 15


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (dspark_cache.CacheFormatError, ValueError),
        (dspark_cache.CacheNotFoundError, FileNotFoundError),
        (dspark_cache.CaptureError, RuntimeError),
        (dspark_cache.InputError, ValueError),
        (dspark_cache.LockedError, BlockingIOError),
        (dspark_cache.RowError, dspark_cache.InputError),
        (dspark_cache.SettingsError, ValueError),
        (dspark_cache.VerificationError, ValueError),
    ],
)
def test_errors_are_also_the_builtin_that_a_stranger_would_catch(error: type, builtin: type) -> None:
    assert issubclass(error, builtin)
    assert issubclass(error, dspark_cache.DsparkCacheError)


def test_import_loads_nothing_that_a_trainer_does_not_need() -> None:
    script = """
import sys, torch.utils.data, safetensors.torch
before = set(sys.modules)
import dspark_cache, dspark_cache.offline_cache
print(*{name.partition('.')[0] for name in set(sys.modules) - before})
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "dspark_cache" in loaded
    assert loaded & {"transformers", "datasets", "omegaconf", "dvc", "ruamel", "tqdm", "numpy"} == set()


def test_load_safetensors_gives_the_two_functions_of_the_package() -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    assert offline_cache.load_safetensors("EAGLE-3") == (save_file, safe_open)


def test_load_safetensors_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(dspark_cache.DsparkCacheError, match="EAGLE-3 caches need safetensors: pip install safetensors"):
        offline_cache.load_safetensors("EAGLE-3")
