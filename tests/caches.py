"""Caches made and doctored for tests: the ragged form of a padded one, and provenance of any content."""

from __future__ import annotations

import hashlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, read_manifest, write_manifest
from dspark_cache.files import dump_json, file_digest, put_file
from dspark_cache.manifest import ragged_manifest
from dspark_cache.provenance import FileRecord, Provenance
from dspark_cache.ragged import samples_name
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS
from dspark_cache.shard_file import write_tensors
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANIFEST: dict[str, Any] = {
    "chat_template_sha256": "0" * 64,
    "complete": True,
    "dtype": "bf16",
    "hidden_size": 4,
    "mask_generation_prompt": False,
    "mask_reasoning_content": True,
    "num_hidden_layers": 3,
    "num_samples": 7,
    "seq_length": 8,
    "shard_size": 2,
    "shuffle_seed": 42,
    "target_hidden_dim": 8,
    "target_last_hidden_dim": 4,
    "target_layer_ids": [-1, 2],
    "target_model": "models/tiny",
    "target_model_type": "tiny",
    "target_vocab_size": 32,
    "train_data_path": "data/ünï.jsonl",
    "train_split": None,
}
"""A manifest of version 1 but for its version, with a value of every key."""

SHARD, SAMPLES = "shard-000000.safetensors", "samples-000000.safetensors"
DIGEST = hashlib.sha256(b"").hexdigest()
COUNTS = {"samples": 2, "tokens": 7, "supervised_tokens": 3}
FILES = {
    SHARD: FileRecord(num_bytes=5, sha256=DIGEST, counts=COUNTS),
    "manifest.json": FileRecord(num_bytes=0, sha256="0" * 64, counts={}),
}


def provenance(**changes: Any) -> Provenance:
    values: dict[str, Any] = {
        "layout": "ragged",
        "shards_version": 2,
        "pad_token_id": 0,
        "tokens": {"seed": 42, "name": "é"},
        "capture": {"logits": {"scale": 0.5}, "dropped": {}},
        "files": FILES,
    }
    return Provenance(**{**values, **changes})


def digest_of(content: dict[str, Any]) -> str:
    """Return the digest of provenance without its own key, as docs/format.md has it."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def put_content(cache: Path, content: dict[str, Any]) -> None:
    """Put provenance of any content in place, with the digest of itself that goes with it."""
    kept = {key: value for key, value in content.items() if key != "sha256"}
    (cache / "provenance.json").write_text(dump_json({**kept, "sha256": digest_of(kept)}) + "\n")


def change_content(cache: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of provenance, so that its digest of itself cannot tell."""
    content = json.loads((cache / "provenance.json").read_text())
    change(content)
    put_content(cache, content)


def counts_of(path: Path) -> dict[str, int]:
    """Count samples and tokens of a shard's file with states, whose masks may lie beside it; of others nothing."""
    if not path.name.startswith("shard-"):
        return {}
    tensors = load_file(path)
    if SAMPLE_OFFSETS in tensors:
        masks = load_file(path.with_name(path.name.replace("shard-", "samples-")))[LOSS_MASK]
        samples, tokens = len(tensors[SAMPLE_OFFSETS]) - 1, int(tensors[SAMPLE_OFFSETS][-1])
    else:
        masks = tensors[LOSS_MASK]
        samples, tokens = len(masks), int((tensors[LAST_HIDDEN] != 0).any(dim=-1).sum())
    return {"samples": samples, "tokens": tokens, "supervised_tokens": int(masks.sum())}


def record_files(cache: Path, **changes: Any) -> Provenance:
    """Put provenance that records every file of a cache as it is, and its layout."""
    paths = [path for path in sorted(cache.iterdir()) if path.name != "provenance.json"]
    files = {
        path.name: FileRecord(num_bytes=path.stat().st_size, sha256=file_digest(path), counts=counts_of(path))
        for path in paths
    }
    layout = json.loads((cache / "manifest.json").read_text()).get("layout", "padded")
    made = provenance(**{"layout": layout, "files": files, **changes})
    made.put(cache)
    return made


def make_ragged(padded: Path, shard_samples: list[int]) -> Path:
    """Write the ragged cache of a padded one's samples beside it."""
    dataset = CachedDSparkDataset(padded)
    folder = padded.with_name(f"{padded.name}-ragged")
    folder.mkdir()
    shutil.copy(padded / "target_weights.safetensors", folder)
    samples = [dataset[index] for index in range(len(dataset))]
    for number, count in enumerate(shard_samples):
        part, samples = samples[:count], samples[count:]
        lengths = [int((sample[LAST_HIDDEN] != 0).any(dim=-1).sum()) for sample in part]
        rows = {
            key: torch.cat([sample[key][:length] for sample, length in zip(part, lengths, strict=True)])
            for key in CACHE_KEYS
        }
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        ids, mask = rows[INPUT_IDS].to(torch.int32), rows[LOSS_MASK].to(torch.uint8)
        contents = {
            shard_name(number): {HIDDEN: rows[HIDDEN], LAST_HIDDEN: rows[LAST_HIDDEN], SAMPLE_OFFSETS: offsets},
            samples_name(number): {INPUT_IDS: ids, LOSS_MASK: mask, SAMPLE_OFFSETS: offsets},
        }
        for name, tensors in contents.items():
            with put_file(folder / name) as temporary:
                write_tensors(temporary, tensors)
    write_manifest(folder, ragged_manifest(read_manifest(padded), pad_token_id=0, shard_samples=shard_samples))
    return folder


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
