"""The verify stage as one call: the levels, then k samples through the target once more, then the report."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import BlockStore
from dspark_cache.capture_run import capture_identity
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, InputError
from dspark_cache.files import remove_temporaries
from dspark_cache.forward import pick_device
from dspark_cache.identity import manifest_differences
from dspark_cache.ledger import Ledger, read_ledger
from dspark_cache.progress import Progress
from dspark_cache.publish import build_manifest, build_provenance, cut_shards, placed_samples
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.recompute import (
    Recomputed,
    choose_samples,
    compare_recomputed,
    put_recomputed,
    read_recomputed,
    recompute_sample,
)
from dspark_cache.schema import MANIFEST_NAME, PROVENANCE_NAME
from dspark_cache.stage import CACHE_PATH, LEDGER_PATH, TOKENS_PATH, StageContext
from dspark_cache.strict_json import is_same_json
from dspark_cache.target import load_target, read_target_facts, target_folder
from dspark_cache.target_weights import read_target_weight_modules
from dspark_cache.tokens import Tokens, sample_key
from dspark_cache.verify import CacheFolder, Finding, Report, verify_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from dspark_cache.provenance import Provenance
    from dspark_cache.target import Target

logger = logging.getLogger(__name__)

_ABSENT: Any = object()


def verify_stage(stage: StageContext) -> Report:
    """Verify the published cache against tokens, provenance and, where asked, the target itself.

    Raises:
        CacheNotFoundError: There is no cache, ledger or tokens.
        CacheFormatError: A manifest, ledger or provenance that cannot be read.
        InputError: The target is no longer the one that was captured.
        LockedError: Samples are to be recomputed, and another process writes the same capture's scratch.
    """
    settings = stage.settings.verify
    tokens, ledger = Tokens(stage.root / TOKENS_PATH), read_ledger(stage.root / LEDGER_PATH)
    cache = CacheFolder(stage.root / CACHE_PATH)
    samples = placed_samples(tokens, ledger)
    kept = [sample.index for sample in samples]
    shards = cut_shards(samples, ledger, stage.settings.cache)
    expected = build_manifest(tokens, ledger, stage.settings.cache, [len(shard) for shard in shards])
    with Progress("verify", len(shards), "shards") as progress:
        report = verify_cache(
            cache,
            settings.level,
            tokens=tokens,
            kept=kept,
            num_threads=max(1, stage.settings.runtime.num_workers),
            advance=progress.advance,
        )
    report.findings += [
        Finding(level="files", file=MANIFEST_NAME, message=f"{line} in tokens/, features.json and params.yaml")
        for line in manifest_differences(cache.manifest, expected)
    ]
    report.findings += _origin_findings(cache, build_provenance(tokens, ledger, stage.settings.cache, files={}))
    if settings.recompute_samples and not report.findings:
        keys, lengths = [sample.key for sample in samples], [sample.num_tokens for sample in samples]
        chosen = choose_samples(keys, lengths, settings.recompute_samples)
        recomputed = _recomputed(stage, ledger, {position: tokens.input_ids(kept[position]) for position in chosen})
        _, head = read_target_weight_modules(cache.path)
        comparison = compare_recomputed(
            CachedDSparkDataset(cache.path), recomputed, head.weight, ledger.layer_ids, ledger.compute_dtype
        )
        report.findings += comparison.findings
        report.recompute = {"num_samples": len(chosen), "worst_relative_l2": comparison.worst}
    return report


def release_blocks(stage: StageContext) -> None:
    """Remove the blocks of a verified cache, unless they are to be kept.

    Not before: until a stage has ended DVC has not stored its output, which it removes before it runs the stage
    again. By now the cache is stored, and known to be sound.

    Raises:
        LockedError: Another process writes the same capture's scratch.
    """
    if not stage.settings.runtime.keep_blocks:
        ledger = read_ledger(stage.root / LEDGER_PATH)
        store = BlockStore(stage.scratch, ledger.identity)
        with store.lock():
            store.remove_blocks(ledger.blocks)


def _origin_findings(cache: CacheFolder, now: Provenance) -> list[Finding]:
    """Compare provenance.json with what tokens, ledger and params give now."""
    if cache.provenance is None:
        return [Finding(level="files", file=PROVENANCE_NAME, message="is missing: nothing says what the bytes must be")]
    return [
        Finding(
            level="files",
            file=PROVENANCE_NAME,
            message=f"{key}: found {found:.200}; tokens/, features.json and params.yaml give {expected:.200}",
        )
        for key, found, expected in _differences(cache.provenance.origin(), now.origin())
    ]


def _differences(found: dict[str, Any], expected: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield full key and both values, as they are shown, of everything that differs inside objects."""
    for key in sorted({*found, *expected}):
        pair = [values.get(key, _ABSENT) for values in (found, expected)]
        if all(isinstance(value, dict) for value in pair):
            yield from _differences(pair[0], pair[1], f"{prefix}{key}.")
        elif _ABSENT in pair or not is_same_json(*pair):
            shown = ["nothing" if value is _ABSENT else repr(value) for value in pair]
            yield f"{prefix}{key}", shown[0], shown[1]


def _recomputed(stage: StageContext, ledger: Ledger, samples: dict[int, torch.Tensor]) -> dict[int, Recomputed]:
    """Return the states of samples (index to ids), from scratch where they were recomputed before.

    They are kept beside the blocks by the hash of their ids, as the blocks' samples are.
    """
    store = BlockStore(stage.scratch, ledger.identity)
    paths = {index: store.folder / f"recomputed-{sample_key(ids)}.safetensors" for index, ids in samples.items()}
    found = {}
    for index, path in paths.items():
        with suppress(CacheNotFoundError, CacheFormatError):
            found[index] = read_recomputed(path)
    missing = [index for index in samples if index not in found]
    if missing:
        with store.lock():
            remove_temporaries(store.folder)
            target = _load_captured_target(stage, ledger)
            for index in missing:
                found[index] = recompute_sample(target, samples[index], ledger.layer_ids, ledger.hidden_size)
                put_recomputed(paths[index], found[index])
    return {index: found[index] for index in samples}


def _load_captured_target(stage: StageContext, ledger: Ledger) -> Target:
    """Load the target, after checking that it is still the one of the ledger."""
    settings = stage.settings.target
    trust = settings.trust_remote_code
    folder = target_folder(stage.target, stage.root, trust_remote_code=trust, weights=True)
    identity = capture_identity(stage, folder, read_target_facts(folder, trust_remote_code=trust))
    if identity != ledger.identity:
        raise InputError(f"the target is not the one that was captured: {identity} now, {ledger.identity} then")
    logger.info("loading %s to recompute samples", folder)
    return load_target(folder, settings, ledger.compute_dtype, pick_device(stage.settings.runtime.device))
