"""Making a cache from another one without the target: layout, dtype, shards, layers, seq_length or samples changed.

Every byte of the source that is used is checked against its provenance first. What is written is verified before it
is put in place, and its provenance says what the source was and what was changed. An interrupted conversion goes on
with the shards that it had finished.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.cache_files import CacheFolder
from dspark_cache.cache_plan import CachePlan, plan_cache, resolve_shard_size
from dspark_cache.cache_writer import ensure_room, write_cache
from dspark_cache.cached_rows import CachedRows
from dspark_cache.dtypes import READ_DTYPES, STORED_DTYPES
from dspark_cache.errors import SettingsError, VerificationError
from dspark_cache.files import file_digest, make_folder, resume_folder
from dspark_cache.manifest import manifest_path
from dspark_cache.progress import ShowProgress, silent
from dspark_cache.provenance import Provenance
from dspark_cache.ragged import StatesForm
from dspark_cache.schema import (
    AUTO,
    EVAL,
    FP8,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    SAMPLES_PREFIX,
    SIGNIFICAND_BITS,
    STAGE_VERSIONS,
    STATES_PREFIX,
    TARGET_WEIGHTS_NAME,
    TRAIN,
)
from dspark_cache.target_weights import TargetWeightsCopy
from dspark_cache.tokens import hold_out
from dspark_cache.verify import verify_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dspark_cache.manifest import PathLike
    from dspark_cache.progress import Advance

DEFAULT_SHARD_BYTES = 1 << 31
_FORM_KEYS = ("layout", "pad_token_id", "shard_samples", "complete", "format_version")
"""Keys of a manifest that follow from the new cache's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What is to be other in the new cache; None leaves it as it is in the source.

    Attributes:
        layout: "padded" or "ragged".
        dtype: Key of `STORED_DTYPES`, of no more significant bits than the source's.
        shard_size: Samples a padded shard, or "auto".
        shard_bytes: Bytes of states at which a ragged shard is full, and what "auto" follows from.
        layer_ids: Layers to keep, among those of the source.
        seq_length: Positions to keep at the start of each sample.
        samples: First (included) and last (excluded) sample to keep.
        eval_samples: Distinct samples, the first ones, to hold out.
        part: Which part to write where samples are held out, "train" or "eval".
        pad_token_id: Id at padding, of a source that does not say: a cache of another producer.
    """

    layout: str | None = None
    dtype: str | None = None
    shard_size: int | str | None = None
    shard_bytes: int | None = None
    layer_ids: list[int] | None = None
    seq_length: int | None = None
    samples: tuple[int, int] | None = None
    eval_samples: int | None = None
    part: str = TRAIN
    pad_token_id: int | None = None


def convert_cache(
    source: PathLike,
    target: PathLike,
    conversion: Conversion,
    *,
    check_disk: bool = True,
    num_threads: int = 1,
    progress: ShowProgress = silent,
) -> None:
    """Make the cache `target` from the cache `source`; it appears complete and verified, or not at all.

    Args:
        source: Folder of a cache of either version, of this producer or of NeMo AutoModel.
        target: Folder of the new cache. An earlier cache there is replaced, anything else is refused.
        conversion: What is to be other.
        check_disk: Refuse to begin where less disk is free than will be written.
        num_threads: Threads that read and convert; later shards verified at a time.
        progress: Shows the progress of each step.

    Raises:
        CacheNotFoundError, CacheFormatError: The source is not whole.
        SettingsError: The conversion cannot be made of this source, `target` may not be replaced, or the disk is too
            full.
        CaptureError: A state that does not fit into the new dtype.
        VerificationError: The new cache has findings; nothing of it is kept.
        LockedError: Another process is writing the same cache.
    """
    source, target = Path(source), Path(target)
    _check_target(source, target)
    _check_conversion(CacheFolder(source).manifest, conversion)
    rows = CachedRows(
        source,
        layer_ids=conversion.layer_ids,
        seq_length=conversion.seq_length,
        pad_token_id=conversion.pad_token_id,
    )
    start, stop = conversion.samples or (0, len(rows.dataset))
    with progress("lengths", stop - start, "samples") as advance:
        samples, dropped = _choose_samples(rows, conversion, advance)
    plan = _plan(rows, conversion, samples, dropped)
    dtype = READ_DTYPES[plan.manifest["dtype"]]
    weights = TargetWeightsCopy(rows.open_weights(), dtype, tied_once=plan.layout == "ragged")
    make_folder(target.absolute().parent)
    with resume_folder(target, _key_of(plan, rows)) as (folder, finished):
        if check_disk:
            remedy = "choose another form or disk, or pass --no-check-disk"
            ensure_room(folder, [plan], rows, weights.num_bytes, finished, what=f"{target.name}/", remedy=remedy)
        tokens = sum(rows.num_tokens(sample) for sample in samples)
        with progress("convert", tokens, "tok") as advance:
            write_cache(folder, plan, rows, weights.put, advance, finished, num_threads=num_threads)
        rows.dataset.ensure_unchanged()
        with progress("verify", len(plan.shards), "shards") as advance:
            report = verify_cache(CacheFolder(folder), "values", num_threads=num_threads, advance=advance)
        if report.findings:
            finished.forget()
            listed = "\n  ".join(str(finding) for finding in report.findings[:20])
            raise VerificationError(
                f"the cache made of {source} had {report.count} finding(s) and was removed: mend the source or "
                f"this disk and run again:\n  {listed}"
            )


def _check_target(source: Path, target: Path) -> None:
    """Refuse to replace what is no cache, and a folder in which the source or the caller is.

    Raises:
        SettingsError: Saying which.
    """
    there, here = source.resolve(), target.resolve()
    if there == here:
        raise SettingsError(f"{target} is the source itself: write to another folder")
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise SettingsError(f"{target} and {source} lie in each other: write to a folder beside the source")
    if Path.cwd().is_relative_to(here):
        raise SettingsError(f"{target} holds the working directory, which would be replaced: write to another folder")
    if target.is_dir() and (left := sorted(entry.name for entry in target.iterdir() if not _is_replaceable(entry))):
        raise SettingsError(
            f"{target} holds what is no part of a cache, {left[:5]}, and would be replaced: expected no folder, an "
            "empty one or a cache; write to another folder"
        )


def _is_replaceable(entry: Path) -> bool:
    is_shard = entry.name.startswith((STATES_PREFIX, SAMPLES_PREFIX)) and entry.suffix == ".safetensors"
    return not entry.is_dir() and (is_shard or entry.name in (MANIFEST_NAME, PROVENANCE_NAME, TARGET_WEIGHTS_NAME))


def _check_conversion(manifest: dict[str, Any], conversion: Conversion) -> None:
    """Refuse what cannot be made of a cache, all at once.

    Raises:
        SettingsError: Listing every fault.
    """
    faults = [*_form_faults(manifest, conversion), *_part_faults(manifest, conversion)]
    if faults:
        raise SettingsError("the conversion has faults:\n  " + "\n  ".join(faults))


def _form_faults(manifest: dict[str, Any], conversion: Conversion) -> Iterator[str]:
    """Yield what is wrong with layout, dtype and shards."""
    there = manifest["dtype"]
    layout, dtype = conversion.layout or manifest.get("layout", "padded"), conversion.dtype or there
    if layout not in ("padded", "ragged"):
        yield f"--layout: expected padded or ragged, found {layout!r}"
    if dtype not in STORED_DTYPES:
        yield f"--dtype: expected one of {sorted(STORED_DTYPES)}, found {dtype!r}"
    elif SIGNIFICAND_BITS[dtype] > SIGNIFICAND_BITS[there]:
        yield (
            f"--dtype: {dtype} has {SIGNIFICAND_BITS[dtype]} significant bits, the source's {there} only "
            f"{SIGNIFICAND_BITS[there]}: what rounding took does not come back, capture again"
        )
    if dtype == FP8 and layout == "padded":
        yield f"--dtype: {FP8} needs the ragged layout: pass --layout ragged"
    size = conversion.shard_size
    if size is not None and (layout == "ragged" or (size != AUTO and not (isinstance(size, int) and size > 0))):
        yield f"--shard-size: expected auto or a positive number, for the padded layout, found {size!r}"
    if conversion.shard_bytes is not None and conversion.shard_bytes < 1:
        yield f"--shard-bytes: expected a positive number, found {conversion.shard_bytes}"


def _part_faults(manifest: dict[str, Any], conversion: Conversion) -> Iterator[str]:
    """Yield what is wrong with the part of a cache to be kept."""
    layers, kept, length = manifest["target_layer_ids"], conversion.layer_ids, conversion.seq_length
    if kept is not None and (not kept or sorted(set(kept)) != kept or not set(kept) <= set(layers)):
        yield f"--layers: expected strictly increasing ids among {layers}, found {kept}"
    if length is not None and not 1 <= length <= manifest["seq_length"]:
        yield f"--seq-length: expected 1 to {manifest['seq_length']}, found {length}"
    start, stop = conversion.samples or (0, manifest["num_samples"])
    if not 0 <= start < stop <= manifest["num_samples"]:
        yield f"--samples: expected 0 <= start < stop <= {manifest['num_samples']}, found {start}:{stop}"
    if conversion.part not in (TRAIN, EVAL) or (conversion.eval_samples or 0) < 0:
        yield "--part: expected train or eval, with --eval-samples of at least 0"
    if conversion.part == EVAL and not conversion.eval_samples:
        yield "--part eval: pass --eval-samples too"


def _choose_samples(rows: CachedRows, conversion: Conversion, advance: Advance) -> tuple[list[int], int]:
    """Return the samples to keep, and how many of them became too short in supervision and are left out."""
    chosen = range(*(conversion.samples or (0, len(rows.dataset))))
    least = 0
    if rows.folder.provenance and conversion.seq_length:
        recorded = rows.folder.provenance.tokens.get("min_loss_tokens", 0)
        least = recorded if isinstance(recorded, int) else 0
    kept, keys = [], []
    for sample in chosen:
        rows.num_tokens(sample)  # found here, where there is progress to see
        if not least or rows.supervised(sample) >= least:
            kept.append(sample)
            keys += [rows.key(sample)] if conversion.eval_samples else []
        advance(1)
    dropped = len(chosen) - len(kept)
    if conversion.eval_samples:
        held = hold_out(keys, conversion.eval_samples)
        pairs = zip(kept, keys, strict=True)
        kept = [sample for sample, key in pairs if (key in held) is (conversion.part == EVAL)]
    if not kept:
        raise SettingsError(f"no sample of {rows.folder.path} is left, {dropped} have too few supervised tokens")
    return kept, dropped


def _plan(rows: CachedRows, conversion: Conversion, samples: list[int], dropped: int) -> CachePlan:
    there = {"layout": "padded", **rows.manifest}
    layers = conversion.layer_ids or there["target_layer_ids"]
    changes: dict[str, Any] = {
        "dtype": conversion.dtype or there["dtype"],
        "layout": conversion.layout or there["layout"],
        "num_samples": len(samples),
        "seq_length": conversion.seq_length or there["seq_length"],
        "target_hidden_dim": there["hidden_size"] * len(layers),
        "target_layer_ids": layers,
    }
    changed = {key: value for key, value in changes.items() if value != there[key]}
    manifest = {key: value for key, value in {**there, **changes}.items() if key not in _FORM_KEYS}
    shard_bytes = conversion.shard_bytes or DEFAULT_SHARD_BYTES
    shard_size = conversion.shard_size or there.get("shard_size", AUTO)
    manifest["shard_size"] = resolve_shard_size(
        shard_size, StatesForm.of(manifest), manifest["seq_length"], shard_bytes
    )
    return plan_cache(
        manifest,
        {sample: rows.num_tokens(sample) for sample in samples},
        shard_bytes=shard_bytes,
        provenance=_provenance(rows, conversion, changes["layout"], changed, dropped),
    )


def _provenance(
    rows: CachedRows, conversion: Conversion, layout: str, changes: dict[str, Any], dropped: int
) -> Provenance:
    """Return the source's provenance with one more conversion; of a cache without any, one that says so."""
    step: dict[str, Any] = {
        "changes": changes,
        "source_manifest_sha256": file_digest(Path(manifest_path(rows.folder.path))),
        "source_provenance_sha256": rows.folder.provenance and rows.folder.provenance.sha256(),
    }
    if conversion.samples is not None:
        step["samples"] = list(conversion.samples)
    if dropped:
        step["dropped_min_loss_tokens"] = dropped
    earlier = rows.folder.provenance or Provenance(
        layout=layout,
        shards_version=STAGE_VERSIONS["shards"],
        pad_token_id=rows.pad_token_id,
        tokens={},
        capture={},
    )
    held = {"eval_samples": conversion.eval_samples, "part": conversion.part} if conversion.eval_samples else {}
    return replace(
        earlier,
        layout=layout,
        shards_version=STAGE_VERSIONS["shards"],
        held_out=held or earlier.held_out,
        conversions=[*earlier.conversions, step],
        files={},
    )


def _key_of(plan: CachePlan, rows: CachedRows) -> str:
    """Return what tells one conversion from another: a later run goes on only with what the same one began."""
    content = {"manifest": plan.manifest, "shards": [list(shard) for shard in plan.shards]}
    text = json.dumps([content, plan.provenance.origin(), rows.stamps()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
