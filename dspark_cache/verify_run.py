"""The verify stage as two calls: the levels and k samples through the target once more, then the reports."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import BlockStore
from dspark_cache.cache_files import CacheFolder, Finding
from dspark_cache.capture_run import capture_identity
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, InputError
from dspark_cache.examine import Texts, VerifiedPart, no_texts, tokenizer_texts, verified_part
from dspark_cache.files import (
    FileLock,
    building_lock,
    put_bytes,
    put_folder,
    put_json,
    put_output,
    remove_temporaries,
)
from dspark_cache.forward import pick_device
from dspark_cache.identity import manifest_differences
from dspark_cache.ledger import Ledger, read_ledger
from dspark_cache.plots import plot_data
from dspark_cache.progress import Progress
from dspark_cache.publish import PlacedSample, eval_folder, placed_samples, plan_caches
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.recompute import (
    Recomputed,
    choose_samples,
    compare_recomputed,
    put_recomputed,
    read_recomputed,
    recompute_sample,
    tolerance,
)
from dspark_cache.report import render_report
from dspark_cache.schema import EVAL, MANIFEST_NAME, PROVENANCE_NAME, TRAIN
from dspark_cache.stage import (
    CACHE_PATH,
    LEDGER_PATH,
    PAGE_PATH,
    PLOTS_PATH,
    REPORT_PATH,
    TOKENS_PATH,
    StageContext,
)
from dspark_cache.strict_json import differences
from dspark_cache.target import is_tokenizer_file, load_target, read_target_facts, target_folder
from dspark_cache.target_weights import read_target_weight_modules
from dspark_cache.tokens import Tokens, sample_key
from dspark_cache.verify import Distance, Report, verify_cache

if TYPE_CHECKING:
    import torch

    from dspark_cache.cache_plan import CachePlan
    from dspark_cache.provenance import Provenance
    from dspark_cache.target import Target

logger = logging.getLogger(__name__)


def verify_stage(stage: StageContext) -> dict[str, VerifiedPart]:
    """Verify what was published against tokens, provenance and, where asked, the target itself.

    Returns:
        What was found and seen of each part: "train", and "eval" where `data.eval_samples` holds samples out.

    Raises:
        CacheNotFoundError: There is no cache, ledger or tokens.
        CacheFormatError: A manifest, ledger or provenance that cannot be read.
        InputError: The target is no longer the one that was captured.
        LockedError: Samples are to be recomputed, and another process writes the same capture's scratch.
    """
    tokens, ledger = Tokens(stage.root / TOKENS_PATH), read_ledger(stage.root / LEDGER_PATH)
    path = stage.root / CACHE_PATH
    samples = placed_samples(tokens, ledger)
    plans = plan_caches(tokens, ledger, samples, stage.settings)
    run = _Run(stage=stage, tokens=tokens, ledger=ledger, samples={sample.index: sample for sample in samples})
    folders = {TRAIN: path, EVAL: eval_folder(path)}
    caches = {part: CacheFolder(folders[part]) for part in plans}
    reports = {part: _verify_part(run, caches[part], plan) for part, plan in plans.items()}
    texts = _texts(run) if any(report.has_sound_values for report in reports.values()) else no_texts("none is needed")
    return {part: verified_part(caches[part], report, texts) for part, report in reports.items()}


def _texts(run: _Run) -> Texts:
    """Return the target's tokenizer, if it is at hand and gave the tokens."""
    stage, expected = run.stage, run.tokens.identity.get("tokenizer_fingerprint")
    name, trust = stage.settings.target.model, stage.settings.target.trust_remote_code
    try:
        folder = target_folder(stage.target, stage.root, trust_remote_code=trust, weights=False)
        found = stage.fingerprints().of_input(stage.target, folder, accept=is_tokenizer_file)
    except (InputError, OSError) as error:
        logger.warning("the report shows token ids instead of text: %s", error)
        return no_texts(f"the target {name} is not at hand")
    return tokenizer_texts(folder, found, str(expected), name=name, trust=trust)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What the caches of one capture are verified against; `samples` are by their index in `tokens`."""

    stage: StageContext
    tokens: Tokens
    ledger: Ledger
    samples: dict[int, PlacedSample]


def _verify_part(run: _Run, cache: CacheFolder, plan: CachePlan) -> Report:
    settings, kept = run.stage.settings.verify, [index for shard in plan.shards for index in shard]
    with Progress(f"verify {cache.path.name}", len(plan.shards), "shards") as progress:
        report = verify_cache(
            cache,
            settings.level,
            tokens=run.tokens,
            kept=kept,
            num_threads=max(1, run.stage.settings.runtime.num_workers),
            advance=progress.advance,
        )
    report.findings += [
        Finding(level="files", file=MANIFEST_NAME, message=f"{line} in tokens/, features.json and params.yaml")
        for line in manifest_differences(cache.manifest, plan.manifest)
    ]
    report.findings += _origin_findings(cache, plan.provenance)
    if settings.recompute_samples and not report.findings:
        _recompute_part(run, cache, kept, report)
    return report


def _recompute_part(run: _Run, cache: CacheFolder, kept: list[int], report: Report) -> None:
    """Compare a few samples of a cache, whose indices in `tokens` are `kept`, with the target's states."""
    ledger, samples = run.ledger, [run.samples[index] for index in kept]
    keys, lengths = [sample.key for sample in samples], [sample.num_tokens for sample in samples]
    chosen = choose_samples(keys, lengths, run.stage.settings.verify.recompute_samples)
    recomputed = _recomputed(run.stage, ledger, {place: run.tokens.input_ids(kept[place]) for place in chosen})
    _, head = read_target_weight_modules(cache.path)
    comparison = compare_recomputed(
        CachedDSparkDataset(cache.path), recomputed, head.weight, ledger.layer_ids, ledger.compute_dtype
    )
    report.findings += comparison.findings
    report.num_recomputed = len(chosen)
    report.distances = [
        Distance(
            state=state,
            mean=comparison.mean[state],
            worst=worst,
            limit=tolerance(ledger.compute_dtype, cache.manifest["dtype"], state),
        )
        for state, worst in comparison.worst.items()
    ]


def put_reports(stage: StageContext, parts: dict[str, VerifiedPart]) -> None:
    """Put the page, the data of its charts, and the metrics in place.

    Raises:
        LockedError: Another process is writing them.
    """
    plots, page = stage.root / PLOTS_PATH, stage.root / PAGE_PATH
    with put_folder(plots) as folder:
        for name, rows in plot_data(parts).items():
            put_json(folder / f"{name}.json", rows)
    with FileLock(building_lock(page)):
        remove_temporaries(page.parent, f"{page.name}-")
        put_bytes(page, render_report(parts).encode())
    put_output(stage.root / REPORT_PATH, reports_json(parts))


def reports_json(parts: dict[str, VerifiedPart]) -> dict[str, Any]:
    """Return reports of parts as DVC metrics: that of "train" at the top, the others under their names."""
    others = {name: part.report.as_json() for name, part in parts.items() if name != TRAIN}
    return {**parts[TRAIN].report.as_json(), **others}


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
            message=f"{key}: found {found!r:.200}; tokens/, features.json and params.yaml give {expected!r:.200}",
        )
        for key, found, expected in differences(cache.provenance.origin(), now.origin())
    ]


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
