"""The report of a verification: one self-contained page.

Everything in it is untrusted text: the template escapes it, and what cannot be seen is spelled out.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.cache_files import bytes_by_kind
from dspark_cache.charts import Histogram, Ranges, histogram, ranges
from dspark_cache.errors import SettingsError
from dspark_cache.examine import Texts, VerifiedPart, no_texts, tokenizer_texts, verified_part
from dspark_cache.inputs import Fingerprints
from dspark_cache.manifest import is_ragged
from dspark_cache.plots import CHARTS, sample_bins
from dspark_cache.schema import TRAIN
from dspark_cache.strict_json import is_blank
from dspark_cache.target import is_tokenizer_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dspark_cache.cache_files import CacheFolder
    from dspark_cache.provenance import Provenance
    from dspark_cache.verify import Report

TEMPLATE = "report.html.jinja"
MAX_VALUE = 1000
"""Characters of a value of manifest.json or provenance.json that are shown."""
MAX_REPORTED = 100
"""Findings of a part that the page lists."""

REMEDIES = {
    "files": "Files are missing, left over or of another size, or the cache was not made from the tokens/, "
    "features.json and params.yaml that are here. Take it anew (`dvc checkout`, `dvc pull`), or publish it again where "
    "the blocks are: `dvc repro -f -s shards`.",
    "headers": "A file is not what the manifest says. Take the cache anew (`dvc checkout`, `dvc pull`), or publish it "
    "again where the blocks are: `dvc repro -f -s shards`.",
    "bytes": "Bytes changed since the cache was written: look at the disk, and set `verify = true` for the DVC remote. "
    "Where DVC links its files, its own object changed too: remove that, and pull it again.",
    "values": "Numbers are not what a cache may hold. If its bytes are those of provenance.json it was made so: "
    "capture again (`dvc repro -f -s capture`, then `dvc repro`).",
    "supervision": "The cache is well-formed, but a draft would learn badly from it: look at the samples below, then "
    "at the chat template and section data of params.yaml.",
    "recompute": "The states are not those of the target. Capture again (`dvc repro -f -s capture`, then `dvc repro`); "
    "if it stays so, the target or its software changed.",
}
"""Level to what to do about its findings; commands stand between backticks."""

MAIN_KEYS = ("dtype", "layout", "seq_length", "target_layer_ids", "target_model", "train_data_path", "train_split")
"""Keys of the manifest that say most."""

KEPT_CONTROLS = "\n\t\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
"""Joiners belong to emoji and to several scripts, and can neither hide nor turn round what is beside them."""
HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")


def folder_texts(folder: Path | None, provenance: Provenance | None) -> Texts:
    """Return what turns the ids of a cache into text: the tokenizer of a folder, if one is given.

    Raises:
        InputError: The folder holds no files.
    """
    if folder is None:
        return no_texts("no folder with the target's tokenizer was given")
    found = Fingerprints(None).of(folder, accept=is_tokenizer_file)
    expected = provenance.tokens.get("tokenizer_fingerprint") if provenance else None
    comparable = isinstance(expected, str) and expected.startswith(found.partition(":")[0])
    return tokenizer_texts(folder, found, expected if comparable else None, name=folder.name)


def render_cache_report(cache: CacheFolder, report: Report, texts: Texts) -> str:
    """Return the page of one verified cache, wherever it is.

    Args:
        cache: The cache.
        report: What `verify_cache` found of it.
        texts: What turns its ids into text, see `folder_texts`.

    Raises:
        SettingsError: jinja2, of the extra `pipeline`, is not installed.
    """
    part = cache.provenance.held_out.get("part", TRAIN) if cache.provenance else TRAIN
    return render_report({part: verified_part(cache, report, texts)})


def visible(value: object) -> object:
    """Spell out characters of a text that do not show, or change how others show; markup is left as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(_spelled(char) if _is_hidden(char) else char for char in value)


def _is_hidden(char: str) -> bool:
    return char not in KEPT_CONTROLS and (unicodedata.category(char) in HIDDEN_CATEGORIES or is_blank(char))


def _spelled(char: str) -> str:
    return f"<U+{ord(char):04X}>"


def render_report(parts: Mapping[str, VerifiedPart]) -> str:
    """Return the page: the verdict, what was verified, then each part with its numbers, charts and samples.

    Args:
        parts: Name of a part to what was found; the first one's manifest says what the cache is.

    Raises:
        SettingsError: jinja2, of the extra `pipeline`, is not installed.
    """
    first, *_ = parts.values()
    findings = [finding for part in parts.values() for finding in part.report.findings]
    levels = dict.fromkeys(finding.level for finding in findings)
    return str(
        _template().render(
            title=first.cache.manifest["target_model"],
            num_findings=len(findings),
            are_all_listed=all(part.report.lists_all for part in parts.values()),
            level=first.report.level,
            remedies={level: REMEDIES[level] for level in levels},
            identity=_identity(first.cache),
            parts=[_part_view(name, part) for name, part in parts.items()],
            max_reported=MAX_REPORTED,
        )
    )


@cache
def _template() -> Any:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise SettingsError("the report needs the package jinja2: pip install 'dspark-cache[pipeline]'") from error
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": _number, "percent": _percent}
    return environment.get_template(TEMPLATE)


def _number(value: float) -> str:
    """Return a count with separators, and another number as short as it is."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size_text(num_bytes: int) -> str:
    """Return a size in the largest unit of which there is one."""
    value = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes:,} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"


def _percent(share: float) -> str:
    return f"{100 * share:,.1f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Identity:
    """What the cache was made from and is, by the names of manifest.json and provenance.json."""

    main: list[tuple[str, str]]
    others: list[tuple[str, str]]


def _identity(cache: CacheFolder) -> _Identity:
    rows = {key: value for key, value in sorted(cache.manifest.items()) if key not in ("shard_samples", "num_samples")}
    if cache.provenance:
        tokens, capture = cache.provenance.tokens, cache.provenance.capture
        rows |= {f"tokens.{key}": tokens.get(key) for key in ("data_fingerprint", "tokenizer_fingerprint")}
        rows |= {f"capture.{key}": value for key, value in sorted(capture.items())}
        rows |= {f"conversions[{place}]": value for place, value in enumerate(cache.provenance.conversions)}
    lines = [(key, _cut(value if isinstance(value, str) else json.dumps(value))) for key, value in rows.items()]
    return _Identity(
        main=[row for row in lines if row[0] in MAIN_KEYS], others=[row for row in lines if row[0] not in MAIN_KEYS]
    )


def _cut(text: str) -> str:
    """Return a text that is not endless: many samples may have been dropped."""
    return text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} … ({len(text) - MAX_VALUE:,} more characters)"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chart:
    """A histogram with its words."""

    name: str
    title: str
    unit: str
    data: Histogram


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartView:
    """What the template shows of a part."""

    name: str
    part: VerifiedPart
    numbers: list[tuple[str, str]]
    charts: list[_Chart]
    norms: Ranges | None


def _part_view(name: str, part: VerifiedPart) -> _PartView:
    charts = [
        _Chart(name=key, title=CHARTS[key].title, unit=CHARTS[key].unit, data=histogram(bins))
        for key, bins in sample_bins(part).items()
    ]
    norms = part.examined.norms if part.examined else []
    rows = [(row.state, row.p5, row.p50, row.p95) for row in norms if row.p5 > 0]
    return _PartView(
        name=name,
        part=part,
        numbers=_numbers(part),
        charts=charts,
        norms=ranges(rows) if rows else None,
    )


def _numbers(part: VerifiedPart) -> list[tuple[str, str]]:
    """Return sizes and, where samples were seen, what was counted in all of them."""
    cache, supervision = part.cache, part.report.supervision
    manifest = cache.manifest
    rows = [("Samples", _number(manifest["num_samples"])), ("Shards", _number(len(cache.shard_samples)))]
    if part.examined:
        places = manifest["num_samples"] * manifest["seq_length"]
        padding = "none stored" if is_ragged(manifest) else _percent(1 - supervision.num_tokens / places)
        rows += [
            ("Tokens", _number(supervision.num_tokens)),
            ("Tokens a sample, mean", f"{supervision.num_tokens / manifest['num_samples']:,.1f}"),
            ("Padding", padding),
            ("Supervised tokens", f"{_number(supervision.supervised_tokens)} ({supervision.percent:.1f} %)"),
            ("Anchors (two supervised tokens in a row)", _number(supervision.anchors)),
            ("Samples without a supervised token", _number(len(supervision.unsupervised))),
            ("Samples without an anchor", _number(len(supervision.without_anchor))),
        ]
    sizes = {name: (cache.path / name).stat().st_size for name in cache.names if (cache.path / name).is_file()}
    kinds = {"states": "Shards", "ids_and_masks": "Ids and masks", "target_weights": "Target weights"}
    there = bytes_by_kind(sizes)
    return rows + [(f"{label}, bytes", size_text(there[kind])) for kind, label in kinds.items() if kind in there]
