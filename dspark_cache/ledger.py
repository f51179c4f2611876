"""The ledger `features.json`: what the capture stage hands to DVC in place of the blocks themselves.

It pins every byte of every block by sha256, so that the stages after it depend on the states without DVC ever
hashing or storing them. It names no time, host or path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import Block, distinct_environments
from dspark_cache.dtypes import DTYPE_MAP
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError
from dspark_cache.files import put_output
from dspark_cache.schema import STAGE_VERSIONS
from dspark_cache.strict_json import Fields, is_int, read_json_object

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What was captured.

    Attributes:
        identity: The capture identity; its hash names the scratch folder.
        target_model: Folder or hub id of the target, as written in params.yaml.
        target_model_type: `model_type` of its configuration.
        vocab_size: V.
        num_hidden_layers: Decoder layers of the target.
        logits: Soft cap and scales between lm_head and the logits.
        weights_bytes: Size of the scratch file with embedding and lm_head.
        weights_sha256: Digest of it.
        blocks: Blocks that hold samples of the data set.
    """

    identity: dict[str, Any]
    target_model: str
    target_model_type: str
    vocab_size: int
    num_hidden_layers: int
    logits: dict[str, float]
    weights_bytes: int
    weights_sha256: str
    blocks: tuple[Block, ...]

    @property
    def layer_ids(self) -> list[int]:
        """Captured layers, strictly increasing."""
        return list(self.identity["target_layer_ids"])

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self.identity["hidden_size"])

    @property
    def compute_dtype(self) -> str:
        """Key of `DTYPE_MAP` in which the states were computed and are stored."""
        return str(self.identity["compute_dtype"])

    @property
    def dropped(self) -> dict[str, str]:
        """Key of each sample left out, with the reason."""
        return {key: why for block in self.blocks for key, why in block.dropped.items()}

    def environments(self) -> list[dict[str, Any]]:
        """Return the distinct environments of the blocks, sorted."""
        return distinct_environments(self.blocks)

    def write(self, path: Path) -> None:
        """Put the ledger in place.

        Raises:
            LockedError: Another process is writing it.
        """
        put_output(
            path,
            {
                "capture_version": STAGE_VERSIONS["capture"],
                "identity": self.identity,
                "target_model": self.target_model,
                "target_model_type": self.target_model_type,
                "vocab_size": self.vocab_size,
                "num_hidden_layers": self.num_hidden_layers,
                "logits": self.logits,
                "weights_bytes": self.weights_bytes,
                "weights_sha256": self.weights_sha256,
                "blocks": [block.as_json() for block in self.blocks],
            },
        )


def read_ledger(path: Path) -> Ledger:
    """Read and check a ledger.

    Raises:
        CacheNotFoundError: There is none.
        CacheFormatError: It is not what the capture stage writes.
    """
    try:
        values = read_json_object(path)
    except FileNotFoundError as error:
        raise CacheNotFoundError(f"no ledger {path}: run dvc repro capture") from error
    fields = Fields(values, name=str(path))
    ledger = Ledger(
        identity=fields.mapping("identity"),
        target_model=fields.text("target_model"),
        target_model_type=fields.text("target_model_type"),
        vocab_size=fields.count("vocab_size", minimum=1),
        num_hidden_layers=fields.count("num_hidden_layers", minimum=1),
        logits=fields.take("logits", "names and numbers", _are_numbers) or {},
        weights_bytes=fields.count("weights_bytes", minimum=1),
        weights_sha256=fields.sha256("weights_sha256"),
        blocks=tuple(
            Block.parse(item, name=f"{path}, block {number}")
            for number, item in enumerate(fields.items("blocks"))
            if _is_mapping(item, fields)
        ),
    )
    fields.finish()
    _check_identity(ledger.identity, name=f"{path}, identity")
    return ledger


def _are_numbers(value: Any) -> bool:
    numbers = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(number, float) or is_int(number) for number in numbers)


def _is_mapping(item: Any, fields: Fields) -> bool:
    if not isinstance(item, dict):
        fields.fault(f"blocks: expected objects, found {item!r:.40}")
    return isinstance(item, dict)


def _check_identity(identity: Mapping[str, Any], *, name: str) -> None:
    fields = Fields(identity, name=name)
    fields.count("hidden_size", minimum=1)
    fields.take("compute_dtype", f"one of {sorted(DTYPE_MAP)}", lambda v: isinstance(v, str) and v in DTYPE_MAP)
    fields.take(
        "target_layer_ids",
        "strictly increasing integers >= -1",
        lambda v: isinstance(v, list) and bool(v) and all(is_int(i) and i >= -1 for i in v) and sorted(set(v)) == v,
    )
    fields.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a sample's states lie: rows `start` (included) to `stop` (excluded) of a block."""

    block: Block
    start: int
    stop: int


def place_samples(ledger: Ledger, keys: Sequence[str], lengths: Sequence[int]) -> list[Place | None]:
    """Find the states of each sample; None for one that was dropped.

    Raises:
        CacheFormatError: A sample is in no block, or with another number of rows than it has tokens.
        CaptureError: Every sample was dropped.
    """
    places: dict[str, Place] = {}
    for block in ledger.blocks:
        start = 0
        for key, length in zip(block.samples, block.lengths, strict=True):
            places[key] = Place(block=block, start=start, stop=start + length)
            start += length
    dropped = ledger.dropped
    found: list[Place | None] = []
    for index, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        place = places.get(key)
        if place is None and key not in dropped:
            raise CacheFormatError(f"sample {index} ({key}) is in no block of the ledger: run dvc repro capture")
        if place is not None and place.stop - place.start != length:
            raise CacheFormatError(f"sample {index}: {place.stop - place.start} rows for {length} tokens")
        found.append(place)
    if all(place is None for place in found):
        raise CaptureError(f"all {len(found)} samples were dropped, their states are not finite: {dropped}")
    return found
