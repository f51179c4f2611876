"""Captured states in scratch: one folder a capture identity, one file a block, and the plan that a resume follows.

    <scratch_dir>/capture-<id>/
        identity.json             what the states depend on; its hash is the folder's name
        plan.json                 which samples form which block, written before the first forward
        block-NNNNNN.safetensors  states of the block's samples, `sample_offsets` [n+1]
        block-NNNNNN.json         written after the block is on disk: its samples, size, sha256 and environment
        weights.safetensors       embedding and lm_head, for the published cache; weights.json its size and sha256
        lock

Inside a folder a sample is found by the hash of its token ids alone, so masks, order, limits and appended data
cost no forward.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import FileLock, put_json, remove_temporaries
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardFile
from dspark_cache.shards import cut_by_bytes
from dspark_cache.strict_json import Fields, is_int, read_json_object
from dspark_cache.tokens import SAMPLE_KEY_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set
    from pathlib import Path

PLAN_NAME = "plan.json"
IDENTITY_NAME = "identity.json"
LOCK_NAME = "lock"
WEIGHTS_NAME = "weights.safetensors"
WEIGHTS_RECORD_NAME = "weights.json"
FOLDER_PREFIX = "capture-"
_BLOCK_RE = re.compile(r"block-[0-9]{6}")
_KEY_RE = re.compile(rf"[0-9a-f]{{{SAMPLE_KEY_DIGITS}}}")


def identity_hash(identity: Mapping[str, Any]) -> str:
    """Return the name of a capture identity: 16 hexadecimal digits over its canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A finished block, as its JSON file and the ledger record it.

    Attributes:
        name: "block-NNNNNN".
        samples: Keys of its samples, in the order of its rows.
        lengths: Tokens of each.
        num_bytes: Size of its file.
        sha256: Digest of its file.
        dropped: Key of each sample left out, with the reason.
        environment: What moves last bits: batch budget, accelerator, parallelism, versions.
    """

    name: str
    samples: tuple[str, ...]
    lengths: tuple[int, ...]
    num_bytes: int
    sha256: str
    dropped: dict[str, str]
    environment: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Rows of the block's tensors."""
        return sum(self.lengths)

    def as_json(self) -> dict[str, Any]:
        """Return the block as it is written."""
        return {
            "name": self.name,
            "samples": list(self.samples),
            "lengths": list(self.lengths),
            "bytes": self.num_bytes,
            "sha256": self.sha256,
            "dropped": self.dropped,
            "environment": self.environment,
        }

    @classmethod
    def parse(cls, values: Mapping[str, Any], *, name: str) -> Block:
        """Check untrusted values.

        Raises:
            CacheFormatError: Listing every fault; `name` is the file.
        """
        fields = Fields(values, name=name)
        samples, lengths = fields.items("samples"), fields.items("lengths")
        block = cls(
            name=fields.text("name"),
            samples=tuple(samples),
            lengths=tuple(lengths),
            num_bytes=fields.count("bytes"),
            sha256=fields.sha256("sha256"),
            dropped=fields.mapping("dropped"),
            environment=fields.mapping("environment"),
        )
        if not _BLOCK_RE.fullmatch(block.name):
            fields.fault(f"name: expected block-NNNNNN, found {block.name!r:.40}")
        if len(samples) != len(lengths) or not _are_keys(samples) or not all(is_int(n) and n > 0 for n in lengths):
            fields.fault("samples and lengths: expected as many sample keys as positive lengths")
        if not _are_keys(block.dropped) or not all(isinstance(reason, str) for reason in block.dropped.values()):
            fields.fault("dropped: expected sample keys, with the reason of each")
        fields.finish()
        return block


def _are_keys(values: Any) -> bool:
    return all(isinstance(value, str) and _KEY_RE.fullmatch(value) for value in values)


def block_form(identity: Mapping[str, Any]) -> StatesForm:
    """Return how the blocks of a capture identity hold states: as ragged shards in the compute dtype do."""
    hidden_size, layers = identity["hidden_size"], identity["target_layer_ids"]
    return StatesForm(dtype=identity["compute_dtype"], hidden_dim=hidden_size * len(layers), last_dim=hidden_size)


def scratch_folders(scratch: Path) -> list[tuple[Path, int]]:
    """Return each capture identity's folder in scratch with the bytes of its files."""
    folders = sorted(folder for folder in scratch.glob(f"{FOLDER_PREFIX}*") if folder.is_dir())
    return [(folder, sum(file.lstat().st_size for file in folder.iterdir())) for folder in folders]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBlock:
    """Samples that go into one block, in order."""

    name: str
    samples: tuple[str, ...]

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> PlannedBlock:
        """Check untrusted values.

        Raises:
            TypeError, KeyError: They are no plan of a block.
        """
        name, samples = values["name"], values["samples"]
        if not isinstance(name, str) or not _BLOCK_RE.fullmatch(name) or not _are_keys(samples):
            raise TypeError(f"expected block-NNNNNN and sample keys, found {values!r:.80}")
        return cls(name=name, samples=tuple(samples))


class BlockStore:
    """The scratch folder of one capture identity."""

    def __init__(self, scratch: Path, identity: Mapping[str, Any]) -> None:
        """Name the folder; nothing is made yet."""
        self.identity = dict(identity)
        self.folder = scratch / f"{FOLDER_PREFIX}{identity_hash(identity)}"

    def lock(self) -> FileLock:
        """Return the lock that a writer of this folder holds."""
        return FileLock(self.folder / LOCK_NAME)

    def prepare(self) -> list[str]:
        """Make the folder and remove what a killed run left half-written; the lock is held. Return those names."""
        left = remove_temporaries(self.folder)
        put_json(self.folder / IDENTITY_NAME, self.identity)
        return left

    def path(self, name: str) -> Path:
        """Return the path of a block's file."""
        return self.folder / f"{name}.safetensors"

    def record(self, block: Block) -> None:
        """Declare a block finished; its file is durably in place."""
        put_json(self.folder / f"{block.name}.json", block.as_json())

    def remove_blocks(self, blocks: Iterable[Block]) -> None:
        """Remove blocks: the record first, so that a block without its file is never taken for finished."""
        for block in blocks:
            (self.folder / f"{block.name}.json").unlink(missing_ok=True)
            self.path(block.name).unlink(missing_ok=True)

    def finished_blocks(self, *, check_digest: bool = False) -> tuple[dict[str, Block], list[str]]:
        """Return the finished blocks by name, and why others that claim to be are not accepted."""
        blocks, refused = {}, []
        for path in sorted(self.folder.glob("block-*.json")):
            try:
                block = Block.parse({**read_json_object(path), "name": path.stem}, name=str(path))
                self.open(block, check_digest=check_digest)
                blocks[block.name] = block
            except (CacheFormatError, CacheNotFoundError) as error:
                refused.append(str(error))
        return blocks, refused

    def open(self, block: Block, *, check_digest: bool = False) -> ShardFile:
        """Open a block's file and compare size, header, offsets and, if asked, its sha256 with its record.

        Raises:
            CacheNotFoundError: The file is gone.
            CacheFormatError: Another size, header, offsets or digest.
        """
        file = ShardFile(self.path(block.name))
        if file.size != block.num_bytes:
            raise CacheFormatError(f"{file.name} has {file.size} bytes, its record says {block.num_bytes}")
        specs = feature_specs(block.num_tokens, len(block.samples), block_form(self.identity))
        file.expect(specs, exactly=True)
        if file.read_rows(SAMPLE_OFFSETS, 0, len(block.samples) + 1).diff().tolist() != list(block.lengths):
            raise CacheFormatError(f"{file.name}: its sample_offsets are not the lengths of its record")
        if check_digest and (found := file.sha256()) != block.sha256:
            raise CacheFormatError(f"{file.name}: sha256 is {found}, its record says {block.sha256}")
        return file

    def read_plan(self) -> list[PlannedBlock]:
        """Return the plan of earlier runs; none if there is no usable one (its finished blocks still count)."""
        try:
            plan = read_json_object(self.folder / PLAN_NAME)
            return [PlannedBlock.parse(item) for item in plan["blocks"]]
        except (FileNotFoundError, CacheFormatError, KeyError, TypeError):
            return []

    def write_plan(self, plan: Sequence[PlannedBlock]) -> None:
        """Put the plan in place."""
        put_json(self.folder / PLAN_NAME, {"blocks": [{"name": b.name, "samples": list(b.samples)} for b in plan]})


def plan_blocks(
    wanted: Mapping[str, int],
    finished: Mapping[str, Block],
    earlier: Sequence[PlannedBlock],
    *,
    bytes_per_token: int,
    block_bytes: int,
    held_out: int = 0,
) -> tuple[list[PlannedBlock], list[PlannedBlock]]:
    """Decide which samples form which block.

    Finished blocks stay. An earlier plan's unfinished block stays if all of its samples are still wanted and not
    captured elsewhere, so that resumed and undisturbed runs make the same blocks. All samples are cut, in their
    order, at `block_bytes`, as the ragged layout cuts shards; runs of which nothing is there yet become blocks, which
    may then be shards. What else is missing is cut at `block_bytes` by itself. A sample larger than that has a block
    of its own.

    Args:
        wanted: Key of each distinct sample to its number of tokens, in the order of the samples.
        finished: Finished blocks by name.
        earlier: The plan of earlier runs.
        bytes_per_token: Bytes of a token's states.
        block_bytes: Size at which a block is full.
        held_out: The first samples, as many, that are published as a cache of their own: blocks do not mix the two.

    Returns:
        The whole new plan, and the blocks of it that are still to be computed.
    """
    captured = {key for block in finished.values() for key in (*block.samples, *block.dropped)}
    plan, due = [], []
    for block in earlier:
        if block.name in finished:
            plan.append(block)
        elif all(key in wanted and key not in captured for key in block.samples):
            plan.append(block)
            due.append(block)
    taken = captured | {key for block in due for key in block.samples}
    names = {block.name for block in plan} | set(finished)
    number = 1 + max((int(name[-6:]) for name in names), default=-1)
    cut = [
        PlannedBlock(name=f"block-{number:06d}", samples=tuple(keys))
        for number, keys in enumerate(_cut_missing(wanted, held_out, taken, bytes_per_token, block_bytes), start=number)
    ]
    return plan + cut, due + cut


def _cut_missing(
    wanted: Mapping[str, int], held_out: int, taken: Set[str], bytes_per_token: int, block_bytes: int
) -> list[list[str]]:
    """Cut the samples that are not `taken`: those of runs that miss, and before them what else does, in their order."""

    def cut(keys: Sequence[str]) -> list[list[str]]:
        runs = cut_by_bytes((wanted[key] * bytes_per_token for key in keys), block_bytes)
        return [list(keys[run.start : run.stop]) for run in runs]

    rest, whole = [], []
    keys = list(wanted)
    for part in (keys[:held_out], keys[held_out:]):
        runs = cut(part)
        whole += [run for run in runs if taken.isdisjoint(run)]
        rest += cut([key for run in runs if not taken.isdisjoint(run) for key in run if key not in taken])
    return rest + whole


def cut_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Form batches of samples of like length: at most `max_tokens` rows times width, longest first.

    The batches depend on the lengths alone. A sample longer than `max_tokens` is a batch of its own.

    Returns:
        Indices into `lengths` for each batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    width = 0
    for index in order:
        if not batches or (len(batches[-1]) + 1) * width > max_tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
