"""Captured states in scratch: one folder a capture identity, one file a block, and the plan that a resume follows.

    <scratch_dir>/capture-<id>/
        identity.json             what the states depend on; its hash is the folder's name
        plan.json                 which samples form which block, written before the first forward
        block-<id>.safetensors    states of the block's samples, `sample_offsets` [n+1]
        block-<id>.json           written after the block is on disk: its samples, size, sha256 and environment
        weights.safetensors       embedding and lm_head, for the published cache; weights.json its size and sha256
        lock, lock-*              of the run that writes here, of its ranks, of independent slices

Inside a folder a sample is found by the hash of its token ids alone, so masks, order, limits and appended data
cost no forward. A block is named by the samples it was planned with: writers that do not see each other's files in
time (a network file system's listing is late) may compute a block twice, but never write two under one name.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import FileLock, ensure_unlocked, put_json, remove_temporaries
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardFile
from dspark_cache.shards import cut_by_bytes
from dspark_cache.strict_json import Fields, is_int, read_json_object
from dspark_cache.tokens import SAMPLE_KEY_DIGITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
    from pathlib import Path

PLAN_NAME = "plan.json"
IDENTITY_NAME = "identity.json"
LOCK_NAME = "lock"
WEIGHTS_NAME = "weights.safetensors"
WEIGHTS_RECORD_NAME = "weights.json"
FOLDER_PREFIX = "capture-"
BLOCK_ID_DIGITS = 16
_BLOCK_RE = re.compile(rf"block-[0-9a-f]{{{BLOCK_ID_DIGITS}}}")
_LOCK_RE = re.compile(rf"{LOCK_NAME}(-slice-[0-9]+-of-(?P<count>[0-9]+))?(-rank-[0-9]+)?")
_KEY_RE = re.compile(rf"[0-9a-f]{{{SAMPLE_KEY_DIGITS}}}")


def identity_hash(identity: Mapping[str, Any]) -> str:
    """Return the name of a capture identity: 16 hexadecimal digits over its canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A finished block, as its JSON file and the ledger record it.

    Attributes:
        name: See `block_name`.
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
            fields.fault(f"name: expected block-<{BLOCK_ID_DIGITS} hexadecimal digits>, found {block.name!r:.40}")
        if len(samples) != len(lengths) or not _are_keys(samples) or not all(is_int(n) and n > 0 for n in lengths):
            fields.fault("samples and lengths: expected as many sample keys as positive lengths")
        if not _are_keys(block.dropped) or not all(isinstance(reason, str) for reason in block.dropped.values()):
            fields.fault("dropped: expected sample keys, with the reason of each")
        fields.finish()
        return block


def distinct_environments(blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Return the environments of blocks, each once, sorted."""
    distinct = {repr(sorted(block.environment.items(), key=str)): block.environment for block in blocks}
    return [distinct[key] for key in sorted(distinct)]


def _are_keys(values: Any) -> bool:
    return all(isinstance(value, str) and _KEY_RE.fullmatch(value) for value in values)


def block_form(identity: Mapping[str, Any]) -> StatesForm:
    """Return how the blocks of a capture identity hold states: as ragged shards in the compute dtype do."""
    hidden_size, layers = identity["hidden_size"], identity["target_layer_ids"]
    return StatesForm(dtype=identity["compute_dtype"], hidden_dim=hidden_size * len(layers), last_dim=hidden_size)


def lock_files(folder: Path) -> list[Path]:
    """Return the locks of everybody who ever wrote in a capture identity's folder."""
    return [path for path in sorted(folder.glob(f"{LOCK_NAME}*")) if _LOCK_RE.fullmatch(path.name)]


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a capture identity's folder alone, as a run does for all of its ranks.

    Raises:
        LockedError: Another run, a rank of one that is gone, or a slice still writes there.
    """
    with FileLock(folder / LOCK_NAME):
        for path in lock_files(folder):
            if path.name != LOCK_NAME:
                ensure_unlocked(path)
        yield


def scratch_folders(scratch: Path) -> list[tuple[Path, int]]:
    """Return each capture identity's folder in scratch with the bytes of its files."""
    folders = sorted(folder for folder in scratch.glob(f"{FOLDER_PREFIX}*") if folder.is_dir())
    return [(folder, sum(file.lstat().st_size for file in folder.iterdir())) for folder in folders]


def block_name(samples: Iterable[str]) -> str:
    """Return the name of the block that is planned to hold these samples in this order."""
    digest = hashlib.sha256("\n".join(samples).encode()).hexdigest()
    return f"block-{digest[:BLOCK_ID_DIGITS]}"


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """Samples that go into one block, in order, and its name."""

    samples: tuple[str, ...]
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Name the block."""
        object.__setattr__(self, "name", block_name(self.samples))

    @classmethod
    def parse(cls, samples: Any) -> PlannedBlock:
        """Check untrusted values.

        Raises:
            TypeError: They are no keys of samples.
        """
        if not isinstance(samples, list) or not _are_keys(samples):
            raise TypeError(f"expected sample keys, found {samples!r:.80}")
        return cls(tuple(samples))


@dataclass(frozen=True, slots=True)
class Slice:
    """One of `count` parts of a capture that are computed independently of each other.

    Attributes:
        number: 1 to `count`.
        count: How many there are.
    """

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Read "3/16".

        Raises:
            ValueError: It is no such text, or out of range.
        """
        number, count = (int(part) for part in text.split("/"))
        if not 1 <= number <= count:
            raise ValueError(f"{number} is not one of 1 to {count}")
        return cls(number, count)

    @property
    def lock_name(self) -> str:
        """Name of the file that whoever computes it locks."""
        return f"{LOCK_NAME}-slice-{self.number}-of-{self.count}"

    def choose(self, tokens: Mapping[str, int]) -> set[str]:
        """Return the blocks of this slice, of all blocks of a plan by name: longest first to the least loaded slice.

        Depends on the plan alone, whatever is finished: so slices that start at different times agree.
        """
        load = [0] * self.count
        chosen = set()
        for name in longest_first(tokens):
            least = load.index(min(load))
            load[least] += tokens[name]
            if least == self.number - 1:
                chosen.add(name)
        return chosen


def longest_first(tokens: Mapping[str, int]) -> list[str]:
    """Return the names of blocks in the order in which they are computed, so that all ranks end together."""
    return sorted(tokens, key=lambda name: (-tokens[name], name))


class BlockStore:
    """The scratch folder of one capture identity."""

    def __init__(self, scratch: Path, identity: Mapping[str, Any]) -> None:
        """Name the folder; nothing is made yet."""
        self.identity = dict(identity)
        self.folder = scratch / f"{FOLDER_PREFIX}{identity_hash(identity)}"

    def lock(self) -> AbstractContextManager[None]:
        """Return what holds the folder alone, as `lock_folder` does."""
        return lock_folder(self.folder)

    @contextmanager
    def slice_lock(self, part: Slice) -> Iterator[None]:
        """Hold one slice of the folder's blocks; slices of the same division write beside each other.

        Raises:
            LockedError: The same slice, one of another division, or a run writes here.
        """
        with FileLock(self.folder / part.lock_name):
            for path in lock_files(self.folder):
                division = _LOCK_RE.fullmatch(path.name)
                if not division or division["count"] != str(part.count):
                    ensure_unlocked(path)
            yield

    def rank_lock(self, part: Slice | None, rank: int) -> FileLock:
        """Return the lock of one rank of a run or slice: what outlives its run is not overlooked."""
        return FileLock(self.folder / f"{part.lock_name if part else LOCK_NAME}-rank-{rank}")

    def prepare(self, *, is_alone: bool = True) -> list[str]:
        """Say what the folder is for; if nobody else writes there, remove what killed runs left half-written.

        The lock is held. Return the names of what was removed.
        """
        left = remove_temporaries(self.folder) if is_alone else []
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

    def finished_blocks(
        self, planned: Iterable[PlannedBlock] = (), *, check_digest: bool = False
    ) -> tuple[dict[str, Block], list[str]]:
        """Return the finished blocks by name, and why others that claim to be are not accepted.

        Args:
            planned: Blocks to look for by name beside those that the folder lists: on a network file system a listing
                may not show yet what another machine has written.
            check_digest: Compare each file's sha256.
        """
        blocks, refused = {}, []
        paths = {self.folder / f"{block.name}.json" for block in planned}.union(self.folder.glob("block-*.json"))
        for path in sorted(path for path in paths if path.exists()):
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
        """Return the plan of earlier runs; none if there is no usable one (finished blocks still count)."""
        try:
            plan = read_json_object(self.folder / PLAN_NAME)
            return [PlannedBlock.parse(item) for item in plan["blocks"]]
        except (FileNotFoundError, CacheFormatError, KeyError, TypeError):
            return []

    def write_plan(self, plan: Sequence[PlannedBlock]) -> None:
        """Put the plan in place."""
        put_json(self.folder / PLAN_NAME, {"blocks": [list(block.samples) for block in plan]})


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
    missing = _cut_missing(wanted, held_out, taken, bytes_per_token, block_bytes)
    cut = [PlannedBlock(tuple(keys)) for keys in missing]
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
