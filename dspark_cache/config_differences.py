"""What comparing a trainer's file with a cache gives: differences, and those that a file of any trainer may have."""

from __future__ import annotations

import difflib
import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from dspark_cache.strict_json import NOTHING, printable, shortened
from dspark_cache.target import build_target_layer_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

ERROR: Final = "error"
WARNING: Final = "warning"
DEFAULT_DRAFT_LAYERS: Final = 5
"""Layers of a draft whose number is not given, with NeMo AutoModel as in params.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which a trainer's file and a cache do not go together.

    Attributes:
        severity: "error" or "warning".
        key: Key in the file, with its section; "cache" of what no key decides.
        value: Its value there, `NOTHING` where it has none.
        cached: The cache's value, `NOTHING` where it has none.
        problem: What is wrong, in words.
        remedy: What to do.
    """

    severity: str
    key: str
    value: Any = NOTHING
    cached: Any = NOTHING
    problem: str
    remedy: str

    def __str__(self) -> str:
        """Say it in two lines, in which nothing of the file can forge a third."""
        return f"{self.severity:7} {printable(f'{self.key}: {self.problem}')}\n{'':8}{printable(self.remedy)}"

    def as_json(self) -> dict[str, Any]:
        """Return the six values, null for what is not there, text for what JSON has no form for."""
        return {
            "severity": self.severity,
            "key": self.key,
            "value": _plain(self.value),
            "cache": _plain(self.cached),
            "problem": self.problem,
            "remedy": self.remedy,
        }


def _plain(value: Any) -> Any:
    if value is NOTHING:
        return None
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # YAML has dates, infinity and lists that hold themselves
        return shortened(value)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCache:
    """A cache that was opened: its folder, for commands, and its manifest."""

    folder: Path
    manifest: Mapping[str, Any]

    def converted(self, options: str) -> str:
        """Return the command that makes another cache of it."""
        return f"dspark-cache convert {shlex.quote(str(self.folder))} DST {options}"


def layers_option(layer_ids: Iterable[int]) -> str:
    """Return the option of `dspark-cache convert` that keeps these layers."""
    return "--layers=" + ",".join(map(str, layer_ids))  # with =, since -1 begins like an option


def wrong_layers(key: str, wanted: list[int], cache: CheckedCache, *, is_default: bool) -> Difference:
    """Return the difference between layers that a trainer wants and those of the cache."""
    there = cache.manifest["target_layer_ids"]
    ways = [f"set it to {there}"]
    if set(wanted) < set(there):
        ways.append(f"keep these of the cache: {cache.converted(layers_option(wanted))}")
    ways.append(f"capture again with target.layer_ids: {wanted}")
    return Difference(
        severity=ERROR,
        key=key,
        value=NOTHING if is_default else wanted,
        cached=there,
        problem=f"{wanted}{' by default' if is_default else ''}, the cache holds the layers {there}",
        remedy="; or ".join(ways),
    )


def default_layers(manifest: Mapping[str, Any], draft_layers: int) -> list[int] | None:
    """Return the layers of a trainer that is not told them; None where they cannot be known."""
    num_layers = manifest.get("num_hidden_layers", 0)
    return build_target_layer_ids(num_layers, draft_layers) if num_layers >= 2 else None


def near_misses(section: str, values: Mapping[Any, Any], known: Iterable[str]) -> Iterator[Difference]:
    """Yield unknown keys that look like known ones which are not there: those would have their defaults."""
    absent = [key for key in known if key not in values]
    for key in map(str, values):
        near = difflib.get_close_matches(key, absent, n=1, cutoff=0.8) if key not in known else []
        if near:
            yield Difference(
                severity=WARNING,
                key=f"{section}.{key}" if section else key,
                value=values.get(key, NOTHING),
                problem=f"it is not compared, and {near[0]} is not there",
                remedy=f"if {near[0]!r} is meant, write that",
            )
