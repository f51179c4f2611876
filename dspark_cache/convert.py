"""Making a cache from another one without the target: layout, dtype, shards, layers, seq_length or samples changed.

Every byte of the source that is used is checked against its provenance first. What is written is verified before it
is put in place, and its provenance says what the source was and what was changed. An interrupted conversion goes on
with the shards that it had finished.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cache_writer import CachePlan, bytes_to_write, cut_shards, resolve_shard_size, write_cache
from dspark_cache.errors import CacheFormatError, SettingsError, VerificationError
from dspark_cache.files import ensure_free_disk, file_digest, make_folder, resume_folder
from dspark_cache.manifest import is_ragged, manifest_path, ragged_manifest
from dspark_cache.provenance import Provenance
from dspark_cache.ragged import StatesForm
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.schema import (
    AUTO,
    FP8,
    HIDDEN,
    HIDDEN_SCALES,
    INPUT_IDS,
    LAST_HIDDEN,
    LOSS_MASK,
    READ_DTYPES,
    SIGNIFICAND_BITS,
    STAGE_VERSIONS,
    STORED_DTYPES,
    TARGET_WEIGHTS_NAME,
)
from dspark_cache.shard_file import open_cache_file
from dspark_cache.target_weights import copy_target_weights, target_weights_path
from dspark_cache.tokens import EVAL, TRAIN, hold_out, sample_key
from dspark_cache.verify import CacheFolder, verify_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from dspark_cache.files import FinishedParts
    from dspark_cache.manifest import PathLike

    Advance = Callable[[int], None]

DEFAULT_SHARD_BYTES = 1 << 31


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


class CacheRows:
    """Rows of another cache, named by their index there, cut and with fewer layers as a conversion asks.

    Of a padded cache a sample ends before the pad tokens at its end that are not supervised; where the cache promises
    zero states at padding, at its last state that is not zero. A shard's sha256 is compared with provenance.json when
    it is first used, which reads it once more, into the page cache.
    """

    def __init__(self, source: Path, conversion: Conversion) -> None:
        """Open a cache.

        Raises:
            CacheNotFoundError, CacheFormatError: It is refused by `CachedDSparkDataset`.
            SettingsError: It does not say how it is padded, and the conversion does not either.
        """
        self.folder = CacheFolder(source)
        self.dataset = CachedDSparkDataset(source)
        self.manifest = self.folder.manifest
        self.dtype: str = self.manifest["dtype"]
        self.pad_token_id = self._pad_token_id(conversion)
        self._columns = self._kept_columns(conversion)
        self._checked: set[int] = set()
        self._lengths = array("q", bytes(8 * len(self.dataset)))
        self._limit = min(conversion.seq_length or self.manifest["seq_length"], self.manifest["seq_length"])

    def _pad_token_id(self, conversion: Conversion) -> int:
        known = self.folder.provenance.pad_token_id if self.folder.provenance else self.manifest.get("pad_token_id")
        if known is not None and conversion.pad_token_id not in (None, known):
            raise SettingsError(f"--pad-token-id: {conversion.pad_token_id}, but {self.folder.path} says {known}")
        found = known if known is not None else conversion.pad_token_id
        if found is None:
            last = [int(self.dataset[index][INPUT_IDS][-1]) for index in range(min(len(self.dataset), 8))]
            raise SettingsError(
                f"{self.folder.path} does not say which token is at padding: pass --pad-token-id, the target's "
                f"tokenizer's pad_token_id, or 0 if it has none; the first samples end in the ids {last}"
            )
        return int(found)

    def _kept_columns(self, conversion: Conversion) -> list[int] | None:
        """Return which layers of the source are kept, by their places; None: all."""
        kept, there = conversion.layer_ids, self.manifest["target_layer_ids"]
        return None if kept is None or kept == there else [there.index(layer) for layer in kept]

    def num_tokens(self, sample: int) -> int:
        """Return the tokens of a sample that are kept."""
        return self._lengths[sample]

    def measure(self, sample: int) -> int:
        """Find out, once, how many tokens of a sample are kept; return it.

        Raises:
            CacheFormatError: A padded sample has no real token.
        """
        stored = self.dataset.stored_length(sample)
        length = stored if is_ragged(self.manifest) else self._real_length(sample, stored)
        self._lengths[sample] = min(length, self._limit)
        return self._lengths[sample]

    def _real_length(self, sample: int, positions: int) -> int:
        if self.folder.provenance is not None:
            length = self._first_zero(sample, positions)
        else:
            ids, mask = (self.dataset.stored_rows(key, sample, 0, positions) for key in (INPUT_IDS, LOSS_MASK))
            real = ((ids != self.pad_token_id) | (mask != 0)).nonzero()
            length = int(real[-1]) + 1 if len(real) else 0
        if length < 1:
            raise CacheFormatError(f"{self.folder.path}: sample {sample} has no real token, nothing but padding")
        return length

    def _first_zero(self, sample: int, positions: int) -> int:
        """Return the first position with a zero state: all after it are zero, all before it are not."""
        low, high = 0, positions
        while low < high:
            middle = (low + high) // 2
            if bool(self.dataset.stored_rows(LAST_HIDDEN, sample, middle, middle + 1).any()):
                low = middle + 1
            else:
                high = middle
        return low

    def key(self, sample: int) -> str:
        """Return the key of a sample's kept ids."""
        return sample_key(self.dataset.stored_rows(INPUT_IDS, sample, 0, self.num_tokens(sample)))

    def supervised(self, sample: int) -> int:
        """Count the supervised tokens of a sample that are kept."""
        return int(self.dataset.stored_rows(LOSS_MASK, sample, 0, self.num_tokens(sample)).sum(dtype=torch.int64))

    def rows(self, key: str, sample: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded), of the layers that are kept.

        Raises:
            CacheFormatError: The shard's bytes are not those that provenance.json records.
        """
        self._check(self.dataset.shard_of(sample))
        rows = self.dataset.stored_rows(key, sample, start, stop)
        if self._columns is None or key not in (HIDDEN, HIDDEN_SCALES):
            return rows
        layers = len(self.manifest["target_layer_ids"])
        return rows.view(len(rows), layers, -1)[:, self._columns].flatten(1)

    def features_of(self, samples: Sequence[int]) -> None:
        """Return nothing: files of another cache are not shared, they may be replaced there."""

    def _check(self, shard: int) -> None:
        if shard not in self._checked and self.folder.provenance is not None:
            for name in self.folder.names_of(shard):
                recorded, found = self.folder.recorded(name), file_digest(self.folder.path / name)
                if recorded is None or recorded.sha256 != found:
                    raise CacheFormatError(
                        f"{self.folder.path / name}: sha256 is {found}, provenance.json says "
                        f"{recorded.sha256 if recorded else 'nothing'}: dspark-cache verify {self.folder.path}"
                    )
        self._checked.add(shard)


def convert_cache(
    source: PathLike,
    target: PathLike,
    conversion: Conversion,
    *,
    check_disk: bool = True,
    num_threads: int = 1,
    progress: Callable[[str, int, str], AbstractContextManager[Advance]],
) -> None:
    """Make the cache `target` from the cache `source`; it appears complete and verified, or not at all.

    Args:
        source: Folder of a cache of either version, of this producer or of NeMo AutoModel.
        target: Folder of the new cache; an earlier one is replaced.
        conversion: What is to be other.
        check_disk: Refuse to begin where less disk is free than will be written.
        num_threads: Shards verified at a time.
        progress: Given name, total and unit of a step, returns a context of what is told of finished units.

    Raises:
        CacheNotFoundError, CacheFormatError: The source is not whole.
        SettingsError: The conversion cannot be made of this source, or the disk is too full.
        CaptureError: A state that does not fit into the new dtype.
        VerificationError: The new cache has findings; it stays where it is built.
        LockedError: Another process is writing the same cache.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise SettingsError(f"{target} is the source itself: write to another folder")
    _check_conversion(CacheFolder(source).manifest, conversion)
    rows = CacheRows(source, conversion)
    start, stop = conversion.samples or (0, len(rows.dataset))
    with progress("lengths", stop - start, "samples") as advance:
        samples, dropped = _choose_samples(rows, conversion, advance)
    plan = _plan(rows, conversion, samples, dropped)
    parent = target.absolute().parent
    make_folder(parent)
    if check_disk:
        needed = bytes_to_write(plan, rows)
        ensure_free_disk(
            parent, needed, what=f"{target.name}/", remedy="choose another form or disk, or pass --no-check-disk"
        )
    with resume_folder(target, _key_of(plan)) as (folder, finished):
        tokens = sum(rows.num_tokens(sample) for sample in samples)
        with progress("convert", tokens, "tok") as advance:
            _write(folder, plan, rows, finished, advance)
        rows.dataset.ensure_unchanged()
        with progress("verify", len(plan.shards), "shards") as advance:
            report = verify_cache(CacheFolder(folder), "values", num_threads=num_threads, advance=advance)
        if report.findings:
            listed = "\n  ".join(str(finding) for finding in report.findings[:20])
            raise VerificationError(f"the cache made in {folder} has {len(report.findings)} finding(s):\n  {listed}")


def _write(folder: Path, plan: CachePlan, rows: CacheRows, finished: FinishedParts, advance: Advance) -> None:
    weights = open_cache_file(Path(target_weights_path(rows.folder.path)))
    _check_weights(rows, weights.sha256())

    def put_weights(path: Path) -> str:
        dtype = READ_DTYPES[plan.manifest["dtype"]]
        return copy_target_weights(weights, path, dtype, tied_once=plan.layout == "ragged")

    write_cache(folder, plan, rows, put_weights, advance, finished)


def _check_weights(rows: CacheRows, found: str) -> None:
    recorded = rows.folder.recorded(TARGET_WEIGHTS_NAME)
    if recorded is not None and recorded.sha256 != found:
        raise CacheFormatError(
            f"{target_weights_path(rows.folder.path)}: sha256 is {found}, provenance.json says {recorded.sha256}"
        )


def _check_conversion(manifest: dict[str, Any], conversion: Conversion) -> None:
    """Refuse what cannot be made of a cache, all at once.

    Raises:
        SettingsError: Listing every fault.
    """
    faults = []
    there, layers = manifest["dtype"], manifest["target_layer_ids"]
    layout = conversion.layout or manifest.get("layout", "padded")
    dtype = conversion.dtype or there
    if layout not in ("padded", "ragged"):
        faults.append(f"--layout: expected padded or ragged, found {layout!r}")
    if dtype not in STORED_DTYPES:
        faults.append(f"--dtype: expected one of {sorted(STORED_DTYPES)}, found {dtype!r}")
    elif SIGNIFICAND_BITS[dtype] > SIGNIFICAND_BITS[there]:
        faults.append(
            f"--dtype: {dtype} has {SIGNIFICAND_BITS[dtype]} significant bits, the source's {there} only "
            f"{SIGNIFICAND_BITS[there]}: what rounding took does not come back, capture again"
        )
    if dtype == FP8 and layout == "padded":
        faults.append(f"--dtype: {FP8} needs the ragged layout: pass --layout ragged")
    if conversion.layer_ids is not None:
        kept = conversion.layer_ids
        if not kept or sorted(set(kept)) != kept or not set(kept) <= set(layers):
            faults.append(f"--layers: expected strictly increasing ids among {layers}, found {kept}")
    length = conversion.seq_length
    if length is not None and not 1 <= length <= manifest["seq_length"]:
        faults.append(f"--seq-length: expected 1 to {manifest['seq_length']}, found {length}")
    size = conversion.shard_size
    if size is not None and (layout == "ragged" or (size != AUTO and not (isinstance(size, int) and size > 0))):
        faults.append(f"--shard-size: expected auto or a positive number, for the padded layout, found {size!r}")
    if conversion.shard_bytes is not None and conversion.shard_bytes < 1:
        faults.append(f"--shard-bytes: expected a positive number, found {conversion.shard_bytes}")
    if conversion.samples is not None:
        start, stop = conversion.samples
        if not 0 <= start < stop <= manifest["num_samples"]:
            faults.append(f"--samples: expected 0 <= start < stop <= {manifest['num_samples']}, found {start}:{stop}")
    if conversion.part not in (TRAIN, EVAL) or (conversion.eval_samples or 0) < 0:
        faults.append("--part: expected train or eval, with --eval-samples of at least 0")
    if conversion.part == EVAL and not conversion.eval_samples:
        faults.append("--part eval: pass --eval-samples too")
    if faults:
        raise SettingsError("the conversion has faults:\n  " + "\n  ".join(faults))


def _choose_samples(rows: CacheRows, conversion: Conversion, advance: Advance) -> tuple[list[int], int]:
    """Return the samples to keep, and how many of them became too short in supervision and are left out."""
    chosen = range(*(conversion.samples or (0, len(rows.dataset))))
    least = 0
    if rows.folder.provenance and conversion.seq_length:
        recorded = rows.folder.provenance.tokens.get("min_loss_tokens", 0)
        least = recorded if isinstance(recorded, int) else 0
    kept, keys = [], []
    for sample in chosen:
        rows.measure(sample)
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


def _plan(rows: CacheRows, conversion: Conversion, samples: list[int], dropped: int) -> CachePlan:
    there = rows.manifest
    layers = conversion.layer_ids or there["target_layer_ids"]
    layout = conversion.layout or there.get("layout", "padded")
    width = there["hidden_size"]
    changes: dict[str, Any] = {
        "dtype": conversion.dtype or there["dtype"],
        "layout": layout,
        "num_samples": len(samples),
        "seq_length": conversion.seq_length or there["seq_length"],
        "target_hidden_dim": width * len(layers),
        "target_layer_ids": layers,
    }
    form = StatesForm(dtype=changes["dtype"], hidden_dim=width * len(layers), last_dim=width)
    shard_size = conversion.shard_size or there.get("shard_size", AUTO)
    limit = conversion.shard_bytes or DEFAULT_SHARD_BYTES
    lengths = [rows.num_tokens(sample) for sample in samples]
    shards = cut_shards(
        lengths,
        form,
        changes["seq_length"],
        shard_size=None if layout == "ragged" else shard_size,
        shard_bytes=limit,
    )
    dropped_keys = ("layout", "pad_token_id", "shard_samples", "shard_size", "complete", "format_version")
    kept = {key: value for key, value in there.items() if key not in dropped_keys}
    manifest = {**kept, **{key: value for key, value in changes.items() if key != "layout"}}
    if layout == "ragged":
        counts = [len(shard) for shard in shards]
        manifest = ragged_manifest(manifest, pad_token_id=rows.pad_token_id, shard_samples=counts)
    else:
        manifest["shard_size"] = resolve_shard_size(shard_size, form, changes["seq_length"], limit)
    changed = {key: value for key, value in changes.items() if value != {"layout": "padded", **there}.get(key)}
    return CachePlan(
        manifest=manifest,
        shards=[[samples[place] for place in shard] for shard in shards],
        provenance=_provenance(rows, conversion, layout, changed, dropped),
    )


def _provenance(
    rows: CacheRows, conversion: Conversion, layout: str, changes: dict[str, Any], dropped: int
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


def _key_of(plan: CachePlan) -> str:
    """Return what tells one conversion from another: a later run goes on only with what the same one began."""
    content = {"manifest": plan.manifest, "shards": [list(shard) for shard in plan.shards]}
    text = json.dumps([content, plan.provenance.origin()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
