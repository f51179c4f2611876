"""Versioned, verified caches of a frozen LLM's hidden states, for training speculative-decoding drafts.

    conversations -> tokens/ -> features.json (blocks in scratch) -> cache/ -> reports/

Using this package needs torch and safetensors only: a training machine installs no more. The names below are
those of the reference's `dspark_cache` module, with its signatures; `target_logits`; and `open_cache` and
`fetch_cache`, which need dvc. `dspark_cache.offline_cache` has the generic ones. The pipeline's modules (`settings`,
`tokens`, `capture`, `publish`, `verify`) are imported by the stages.

What needs torch is imported when it is first asked for (PEP 562), so that the command line begins at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import (
    CacheFormatError,
    CacheNotFoundError,
    CaptureError,
    DsparkCacheError,
    InputError,
    LockedError,
    RowError,
    SettingsError,
    VerificationError,
)
from dspark_cache.schema import CACHE_KEYS, MANIFEST_DEFAULTS
from dspark_cache.schema import DSPARK_FORMAT_VERSION as _FORMAT_VERSION
from dspark_cache.schema import DSPARK_NAME as _CACHE_NAME
from dspark_cache.schema import IDENTITY_EXEMPT as _IDENTITY_EXEMPT_FIELDS
from dspark_cache.schema import TARGET_WEIGHTS_NAME as _TARGET_WEIGHTS_NAME
from dspark_cache.schema import VERSION as __version__

if TYPE_CHECKING:
    from dspark_cache.chat_template_hash import tokenizer_chat_template_sha256
    from dspark_cache.dtypes import DTYPE_MAP
    from dspark_cache.loaders import build_cached_dspark_dataloader
    from dspark_cache.loaders import collate_dspark as _collate_cached
    from dspark_cache.manifest import (
        build_cache_manifest,
        ensure_manifest_complete,
        manifest_mismatch_fields,
        read_manifest,
        write_manifest,
    )
    from dspark_cache.produce import compute_batch_cache
    from dspark_cache.reader import CachedDSparkDataset
    from dspark_cache.shards import write_shard
    from dspark_cache.target_weights import read_target_weight_modules, target_logits, write_target_weights
    from dspark_cache.target_weights import target_weights_path as _target_weights_path
    from dspark_cache.versions import fetch_cache, open_cache

__all__ = [
    "CACHE_KEYS",
    "DTYPE_MAP",
    "MANIFEST_DEFAULTS",
    "_CACHE_NAME",
    "_FORMAT_VERSION",
    "_IDENTITY_EXEMPT_FIELDS",
    "_TARGET_WEIGHTS_NAME",
    "CacheFormatError",
    "CacheNotFoundError",
    "CachedDSparkDataset",
    "CaptureError",
    "DsparkCacheError",
    "InputError",
    "LockedError",
    "RowError",
    "SettingsError",
    "VerificationError",
    "__version__",
    "_collate_cached",
    "_target_weights_path",
    "build_cache_manifest",
    "build_cached_dspark_dataloader",
    "compute_batch_cache",
    "ensure_manifest_complete",
    "fetch_cache",
    "manifest_mismatch_fields",
    "open_cache",
    "read_manifest",
    "read_target_weight_modules",
    "target_logits",
    "tokenizer_chat_template_sha256",
    "write_manifest",
    "write_shard",
    "write_target_weights",
]

_HOMES = {
    "CachedDSparkDataset": "reader",
    "DTYPE_MAP": "dtypes",
    "_collate_cached": "loaders.collate_dspark",
    "_target_weights_path": "target_weights.target_weights_path",
    "build_cache_manifest": "manifest",
    "build_cached_dspark_dataloader": "loaders",
    "compute_batch_cache": "produce",
    "ensure_manifest_complete": "manifest",
    "fetch_cache": "versions",
    "manifest_mismatch_fields": "manifest",
    "open_cache": "versions",
    "read_manifest": "manifest",
    "read_target_weight_modules": "target_weights",
    "target_logits": "target_weights",
    "tokenizer_chat_template_sha256": "chat_template_hash",
    "write_manifest": "manifest",
    "write_shard": "shards",
    "write_target_weights": "target_weights",
}
"""Name to its module, and to its name there where that is another; as the imports above, which only types see."""


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(".")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names that are not imported yet too."""
    return sorted({*globals(), *_HOMES})
