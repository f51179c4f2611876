"""provenance.json: what a cache was made from, and size and sha256 of each of its files.

Ours beside the manifest, never inside it; caches of other producers have none. It ends in a digest of itself, so
that a change of any of its bytes is noticed without the inputs at hand.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_cache.files import put_json
from dspark_cache.schema import EVAL, MANIFEST_NAME, PROVENANCE_NAME, STATES_PREFIX, TARGET_WEIGHTS_NAME, TRAIN
from dspark_cache.strict_json import Fields, ensure_no_foreign_link, is_int, is_sha256, read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROVENANCE_VERSION = 2
MAX_PROVENANCE_BYTES = 1 << 28
"""A cache of a million shards has some 230 bytes for each."""
DIGEST_KEY = "sha256"
COUNTS = ("samples", "tokens", "supervised_tokens")
_NAME_RE = re.compile(
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(TARGET_WEIGHTS_NAME)}|(shard|samples)-[0-9]{{6}}\.safetensors"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What is recorded of one file.

    Attributes:
        num_bytes: Its size.
        sha256: Digest of all of its bytes, holes read as zeros.
        counts: `COUNTS` of a file with states; nothing of others.
    """

    num_bytes: int
    sha256: str
    counts: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the record as it is written."""
        return {"bytes": self.num_bytes, "sha256": self.sha256, **self.counts}

    @classmethod
    def parse(cls, name: str, value: Any) -> FileRecord:
        """Check what should be what `as_json` gave for the file `name`.

        Raises:
            CacheFormatError: It is not.
        """
        fields = Fields({}, name=name)
        record = _record(name, value, fields)
        fields.finish()
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a cache was made from.

    Attributes:
        layout: "padded" or "ragged".
        shards_version: Version of the stage that wrote the cache.
        pad_token_id: Id at padding.
        tokens: Identity of the tokens.
        capture: Identity and environments of the capture, samples dropped, scales between lm_head and logits.
        held_out: Of a cache whose data were split, `eval_samples` and which `part` this is, "train" or "eval".
        conversions: Of a cache made from another one without the target, what each conversion changed, oldest first.
        files: Name of each other file of the cache to its record.
    """

    layout: str
    shards_version: int
    pad_token_id: int
    tokens: dict[str, Any]
    capture: dict[str, Any]
    held_out: dict[str, Any] = field(default_factory=dict)
    conversions: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileRecord] = field(default_factory=dict)

    def origin(self) -> dict[str, Any]:
        """Return all but the files, as it is written."""
        return {
            "provenance_version": PROVENANCE_VERSION,
            "layout": self.layout,
            "shards_version": self.shards_version,
            "pad_token_id": self.pad_token_id,
            "tokens": self.tokens,
            "capture": self.capture,
            **({"held_out": self.held_out} if self.held_out else {}),
            **({"conversions": self.conversions} if self.conversions else {}),
        }

    def put(self, folder: Path) -> None:
        """Put the file in place in `folder`."""
        put_json(folder / PROVENANCE_NAME, {**self._content(), DIGEST_KEY: self.sha256()})

    def sha256(self) -> str:
        """Return the digest that the file ends in."""
        return _digest(self._content())

    def _content(self) -> dict[str, Any]:
        return {**self.origin(), "files": {name: record.as_json() for name, record in self.files.items()}}

    def total(self, count: str) -> int:
        """Add up one of `COUNTS`."""
        return sum(record.counts.get(count, 0) for record in self.files.values())


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_provenance(cache_dir: Path) -> Provenance | None:
    """Read and check provenance.json of a cache; None where there is none.

    Raises:
        CacheFormatError: Not what this library writes, or its digest of itself is wrong; all faults are listed.
    """
    path = cache_dir / PROVENANCE_NAME
    ensure_no_foreign_link(path)
    try:
        values = read_json_object(path, max_bytes=MAX_PROVENANCE_BYTES)
    except FileNotFoundError:
        return None
    fields = Fields(values, name=str(path))
    version = f"{PROVENANCE_VERSION}, as this version of dspark-cache writes it"
    fields.take("provenance_version", version, lambda v: is_int(v) and v == PROVENANCE_VERSION)
    provenance = Provenance(
        layout=fields.take("layout", "padded or ragged", lambda v: v in ("padded", "ragged")) or "",
        shards_version=fields.count("shards_version", minimum=1),
        pad_token_id=fields.count("pad_token_id"),
        tokens=fields.mapping("tokens"),
        capture=fields.mapping("capture"),
        held_out=_held_out(fields) if "held_out" in values else {},
        conversions=_conversions(fields) if "conversions" in values else [],
        files={name: _record(name, value, fields) for name, value in fields.mapping("files").items()},
    )
    recorded = fields.sha256(DIGEST_KEY)
    found = _digest({key: value for key, value in values.items() if key != DIGEST_KEY})
    if recorded and found != recorded:
        fields.fault(f"{DIGEST_KEY}: its content has {found}, it says {recorded}")
    fields.finish()
    return provenance


def _held_out(fields: Fields) -> dict[str, Any]:
    expected = f"an object with eval_samples >= 1 and part {TRAIN} or {EVAL}"
    return fields.take("held_out", expected, _is_split) or {}


def _is_split(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"eval_samples", "part"}:
        return False
    return is_int(value["eval_samples"]) and value["eval_samples"] > 0 and value["part"] in (TRAIN, EVAL)


def _conversions(fields: Fields) -> list[dict[str, Any]]:
    items = fields.items("conversions")
    if not all(isinstance(item, dict) and isinstance(item.get("changes"), dict) for item in items):
        fields.fault("conversions: expected objects with the object 'changes'")
        return []
    return items


def _record(name: str, value: Any, fields: Fields) -> FileRecord:
    """Check the record of one file, noting faults in `fields`."""
    numbers = ("bytes", *(COUNTS if name.startswith(STATES_PREFIX) else ()))
    record = value if isinstance(value, dict) else {}
    are_numbers = all(is_int(record.get(key)) and 0 <= record[key] < 1 << 63 for key in numbers)
    if not _NAME_RE.fullmatch(name):
        fields.fault(f"files: {name!r:.80} is no name of a file of a cache")
    if not are_numbers or not is_sha256(record.get("sha256")) or record.keys() != {"sha256", *numbers}:
        fields.fault(f"files: expected sha256 and the numbers {list(numbers)} of {name!r:.80}, found {value!r:.200}")
        return FileRecord(num_bytes=0, sha256="", counts={})
    counts = {key: record[key] for key in numbers[1:]}
    return FileRecord(num_bytes=record["bytes"], sha256=record["sha256"], counts=counts)
