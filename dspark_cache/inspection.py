"""What a cache is and what one sample of it holds, for people: `dspark-cache inspect`. Nothing is changed or judged.

A cache is described from its manifest, its provenance and the sizes of its files; no state is read. A sample's states
are. Its text needs a tokenizer; where none is at hand, ids are shown.
"""

from __future__ import annotations

import re
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from dspark_cache.cache_files import bytes_by_kind
from dspark_cache.cached_rows import CachedRows
from dspark_cache.chat_template_hash import tokenizer_chat_template_sha256
from dspark_cache.errors import InputError, SettingsError
from dspark_cache.inputs import Fingerprints
from dspark_cache.manifest import PathLike, is_ragged
from dspark_cache.provenance import Provenance, read_provenance
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.sample_text import text_spans
from dspark_cache.schema import (
    GIB,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LOSS_MASK,
    PROVENANCE_NAME,
    STATES_PREFIX,
)
from dspark_cache.serving import serving_lines, serving_of
from dspark_cache.shards import shard_name
from dspark_cache.strict_json import printable
from dspark_cache.supervision import Supervision
from dspark_cache.target import is_tokenizer_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BLOCK: Final = 512
"""Bytes of a block in `stat`."""
_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_WIDTH: Final = 100
"""Columns that ids are wrapped at."""


def describe_cache(cache_dir: PathLike) -> dict[str, Any]:
    """Return what a cache is, as plain values; sizes in bytes, None for what it does not record.

    Raises:
        CacheNotFoundError, CacheFormatError: It is refused by `CachedDSparkDataset`.
    """
    dataset, folder = CachedDSparkDataset(cache_dir), Path(cache_dir)
    manifest, provenance = dataset.manifest, read_provenance(folder)
    sizes = {entry.name: entry.stat() for entry in sorted(folder.iterdir()) if entry.is_file()}
    held = sum(status.st_blocks * BLOCK for status in sizes.values())
    return {
        "manifest": manifest,
        "layout": "ragged" if is_ragged(manifest) else "padded",
        "samples": len(dataset),
        "shards": len([name for name in sizes if name.startswith(STATES_PREFIX)]),
        "files": len(sizes),
        "bytes": sum(status.st_size for status in sizes.values()),
        "held_bytes": held,
        "bytes_by_kind": bytes_by_kind({name: status.st_size for name, status in sizes.items()}),
        **_token_counts(manifest, provenance, len(dataset)),
        "serving": serving_of(manifest),
        "made_from": _origin(provenance) if provenance else None,
    }


def _token_counts(manifest: Mapping[str, Any], provenance: Provenance | None, num_samples: int) -> dict[str, Any]:
    names = ("tokens", "supervised_tokens", "mean_tokens", "supervised_fraction", "padding_share")
    if provenance is None:
        return dict.fromkeys(names)
    tokens, supervised = provenance.total("tokens"), provenance.total("supervised_tokens")
    positions = num_samples * manifest.get("seq_length", 0)
    shares = (
        round(tokens / num_samples, 3) if num_samples else None,
        round(supervised / tokens, 6) if tokens else None,
        round(1 - tokens / positions, 6) if positions else None,
    )
    return dict(zip(names, (tokens, supervised, *shares), strict=True))


def _origin(provenance: Provenance) -> dict[str, Any]:
    """Return what provenance says of how a cache was made, without its files; of what is inside, nothing is certain."""
    tokens, capture = provenance.tokens, provenance.capture
    parts = {key: _of_kind(dict, capture.get(key)) for key in ("identity", "dropped", "logits")}
    environments = _of_kind(list, capture.get("environments"))
    return {
        "data_fingerprint": tokens.get("data_fingerprint"),
        "tokenizer_fingerprint": tokens.get("tokenizer_fingerprint"),
        "identity": parts["identity"],
        "environments": [environment for environment in environments if isinstance(environment, dict)],
        "dropped_samples": len(parts["dropped"]),
        "logits": parts["logits"],
        "held_out": provenance.held_out or None,
        "conversions": [conversion["changes"] for conversion in provenance.conversions],
        "sha256": provenance.sha256(),
    }


def _of_kind(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) else kind()


def cache_text(found: Mapping[str, Any]) -> str:
    """Return what `describe_cache` gave as text: the manifest's keys, then what follows from the files."""
    manifest = {key: value for key, value in found["manifest"].items() if key != "shard_samples"}
    lines = [*sorted(manifest.items()), *_file_lines(found), *_token_lines(found), *_origin_lines(found["made_from"])]
    lines += serving_lines(found["serving"])
    return "\n".join(f"{printable(key):26} {printable(str(value))}" for key, value in lines)


def _file_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    size = found["bytes"]
    yield "files", f"{found['files']}, {found['shards']} shards, {size / GIB:.3f} GiB"
    names = {"states": "states, ids, masks"} if found["layout"] == "padded" else {}
    kinds = [f"{names.get(kind, kind).replace('_', ' ')} {part}" for kind, part in found["bytes_by_kind"].items()]
    yield "bytes", f"{size}: " + "; ".join(kinds)
    if found["held_bytes"] < size:
        yield "held on this disk", f"{found['held_bytes'] / GIB:.3f} GiB, the rest is holes"


def _token_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    samples, length, tokens = found["samples"], found["manifest"].get("seq_length"), found["tokens"]
    if tokens is None:
        yield "tokens", f"not recorded: there is no {PROVENANCE_NAME}"
        return
    positions = f" of {samples * length} positions" if length else ""
    yield "tokens", f"{tokens}{positions}, {found['supervised_tokens']} supervised"
    if tokens:
        yield "mean length", f"{found['mean_tokens']:.1f} tokens a sample"
        yield "supervised", f"{100 * found['supervised_fraction']:.1f} % of the tokens"
        yield "shards", f"{found['bytes_by_kind'].get('states', 0) / tokens:.1f} bytes a token"
    if found["padding_share"] is not None:
        stored = "" if found["layout"] == "padded" else ", not stored"
        yield "padding", f"{100 * found['padding_share']:.1f} % of the positions{stored}"


def _origin_lines(origin: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if origin is None:
        return
    identity = origin["identity"]
    yield "data", str(origin["data_fingerprint"])
    yield "tokenizer", str(origin["tokenizer_fingerprint"])
    yield "weights", str(identity.get("weights"))
    attention = identity.get("attn_implementation")
    yield "computed in", f"{identity.get('compute_dtype')}" + (f", attention {attention}" if attention else "")
    for environment in origin["environments"]:
        keys = ("accelerator", "parallelism", "torch", "transformers")
        yield "computed on", ", ".join(f"{key} {environment[key]}" for key in keys if key in environment)
    for name in ("dropped_samples", "logits", "held_out"):
        if origin[name]:
            yield name.replace("_", " "), str(origin[name])
    for changes in origin["conversions"]:
        yield "converted", str(changes)


# One sample


def describe_sample(cache_dir: PathLike, index: int, tokenizer: PathLike | None = None) -> dict[str, Any]:
    """Return what one sample holds, as plain values.

    Args:
        cache_dir: Folder of the cache.
        index: The sample; negative ones count from the end.
        tokenizer: Folder of the tokenizer; None: the manifest's target, if it is a folder with one, taken from the
            current directory or from where the cache lies.

    Raises:
        CacheNotFoundError, CacheFormatError: The cache is refused by `CachedDSparkDataset`.
        InputError: `tokenizer` is no folder with a tokenizer that can be loaded.
        SettingsError: There is no such sample.
    """
    folder, notes = Path(cache_dir), list[str]()
    rows = _rows(folder)
    dataset = rows.dataset if rows else CachedDSparkDataset(folder)
    if not -len(dataset) <= index < len(dataset):
        raise SettingsError(f"SAMPLE: expected 0 to {len(dataset) - 1} in {folder}, found {index}")
    number = index % len(dataset)
    sample = dataset[number]
    length = rows.num_tokens(number) if rows else _guessed_tokens(sample, notes)
    ids, mask = sample[INPUT_IDS][:length], sample[LOSS_MASK][:length]
    counts = Supervision()
    counts.add(number, {INPUT_IDS: ids, LOSS_MASK: mask}, length, is_cut=False)
    shard = dataset.shard_of(number)
    return {
        "sample": number,
        "shard": shard_name(shard),
        "row": number - dataset.samples_of(shard).start,
        "positions": len(sample[INPUT_IDS]),
        "tokens": length,
        "supervised_tokens": counts.supervised_tokens,
        "anchors": counts.anchors,
        "state_norms": _norms(sample, length, dataset.manifest),
        "input_ids": ids.tolist(),
        "loss_mask": mask.tolist(),
        "spans": _spans(folder, dataset.manifest, ids.tolist(), mask.tolist(), tokenizer, notes),
        "notes": notes,
    }


def _rows(folder: Path) -> CachedRows | None:
    """Open a cache as one that says what is padding; None where it does not."""
    try:
        return CachedRows(folder)
    except SettingsError:
        return None


def _guessed_tokens(sample: Mapping[str, torch.Tensor], notes: list[str]) -> int:
    """Return the positions before the run of one unsupervised id that ends a sample, and note what was guessed."""
    ids, mask = sample[INPUT_IDS], sample[LOSS_MASK]
    others = ((ids != ids[-1]) | (mask != 0)).nonzero()
    length = int(others[-1]) + 1 if len(others) else len(ids)
    if length + 1 >= len(ids):  # one id is no run
        return len(ids)
    notes.append(f"the cache does not say what is padding: taken for it is id {int(ids[-1])}, of which a run ends it")
    return length


def _norms(sample: Mapping[str, torch.Tensor], length: int, manifest: Mapping[str, Any]) -> dict[str, float]:
    """Return the mean over the tokens of the L2 norm of each state."""
    layers: list[int] = manifest["target_layer_ids"]
    states = torch.chunk(sample[HIDDEN][:length], len(layers), dim=-1) if layers else ()
    named = {_layer_name(layer, manifest): state for layer, state in zip(layers, states, strict=True)}
    named["last hidden"] = sample[LAST_HIDDEN][:length]
    return {name: round(float(state.float().norm(dim=-1).mean()), 4) for name, state in named.items()}


def _layer_name(layer: int, manifest: Mapping[str, Any]) -> str:
    names = {-1: " (embedding)", manifest.get("num_hidden_layers", 0) - 1: " (final norm)"}
    return f"layer {layer}{names.get(layer, '')}"


def _spans(
    folder: Path,
    manifest: Mapping[str, Any],
    ids: list[int],
    mask: list[int],
    tokenizer: PathLike | None,
    notes: list[str],
) -> list[dict[str, Any]] | None:
    """Return the text in spans of equal mask; None where there is no text, which is noted."""
    place = Path(tokenizer) if tokenizer is not None else _own_tokenizer(folder, str(manifest.get("target_model", "")))
    if place is None:
        notes.append("text needs the target's tokenizer: pass --tokenizer FOLDER")
        return None
    loaded = _load_tokenizer(place, notes, is_asked=tokenizer is not None)
    if loaded is None:
        return None
    notes.extend(_doubts(loaded, place, folder, manifest))
    try:
        spans = text_spans(loaded, ids, mask)
    except InputError as error:
        notes.append(f"no text: {error} ({place})")
        return None
    return [{"text": span.text, "supervised": span.supervised} for span in spans]


def _own_tokenizer(folder: Path, target: str) -> Path | None:
    """Return the folder of the tokenizer of the cache's target, if it can be reached from here."""
    places = [Path(target), folder.resolve().parent / target] if target else []
    return next((place for place in places if _has_tokenizer(place)), None)


def _has_tokenizer(place: Path) -> bool:
    try:
        return any((place / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    except OSError:  # a name too long
        return False


def _load_tokenizer(place: Path, notes: list[str], *, is_asked: bool) -> Any:
    if not _has_tokenizer(place):
        raise InputError(f"--tokenizer: {place} is no folder with a tokenizer.json or tokenizer_config.json")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        notes.append("text needs the package transformers: pip install transformers")
        return None
    try:
        return AutoTokenizer.from_pretrained(str(place), local_files_only=True)
    except Exception as error:  # transformers raises what the file's fault leads to
        if is_asked:
            raise InputError(f"--tokenizer: {place} cannot be loaded: {error}") from error
        notes.append(f"no text: the tokenizer in {place} cannot be loaded: {error}")
        return None


def _doubts(tokenizer: Any, place: Path, folder: Path, manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a tokenizer may not be the one that the samples were tokenised with."""
    provenance = read_provenance(folder)
    recorded = provenance.tokens.get("tokenizer_fingerprint") if provenance else None
    if isinstance(recorded, str) and recorded.startswith("sha256:"):
        if Fingerprints(None).of(place, accept=is_tokenizer_file) != recorded:
            yield f"the files of the tokenizer in {place} are not those that the samples were tokenised with"
    elif manifest.get("chat_template_sha256") not in (None, tokenizer_chat_template_sha256(tokenizer)):
        yield (
            f"the chat template of the tokenizer in {place} is another than the cache's: either another one was set "
            "for the cache, or this is another tokenizer"
        )


def sample_text(found: Mapping[str, Any], *, color: bool = False) -> str:
    """Return what `describe_sample` gave as text; lines of supervised tokens begin with +, in green if asked."""
    lines = [
        f"sample {found['sample']}, row {found['row']} of {found['shard']}",
        f"{found['tokens']} tokens of {found['positions']} positions, {found['supervised_tokens']} supervised, "
        f"{found['anchors']} anchors",
        *(f"{name:24} mean norm of a token {norm}" for name, norm in found["state_norms"].items()),
        *(f"note: {printable(note)}" for note in found["notes"]),
        "",
    ]
    for text, supervised in _shown_lines(found):
        line = f"{'+' if supervised else ' '} {printable(text)}"
        lines.append(f"{_GREEN}{line}{_PLAIN}" if color and supervised else line)
    return "\n".join(lines)


def _shown_lines(found: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield lines of text, or of ids where there is none, each of one kind; a line break ends a line and is shown."""
    if found["spans"] is not None:
        for span in found["spans"]:
            for line in re.findall(r"[^\n]*\n|[^\n]+", span["text"]):
                yield line, span["supervised"]
        return
    pairs = zip(found["loss_mask"], found["input_ids"], strict=True)
    for supervised, run in groupby(pairs, key=lambda pair: bool(pair[0])):
        for line in textwrap.wrap(" ".join(str(token) for _, token in run), _WIDTH):
            yield line, supervised
