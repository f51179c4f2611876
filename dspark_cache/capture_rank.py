"""One rank's part of a capture: it loads the target, alone or with others, and computes blocks until none is left."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.blocks import WEIGHTS_NAME, WEIGHTS_RECORD_NAME, BlockStore, PlannedBlock, Slice, block_form
from dspark_cache.capture import BlockCapturer, Crew, compute_blocks, environment_differences, host_blocks
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, InputError, SettingsError
from dspark_cache.files import put_file, put_json
from dspark_cache.forward import Capturer, capture_environment, pick_device
from dspark_cache.ranks import Group, SharedProgress
from dspark_cache.schema import EMBED_KEY, LM_HEAD_KEY
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.sharding import full_tensor, load_over_group
from dspark_cache.stage import TOKENS_PATH
from dspark_cache.strict_json import Fields, read_json_object
from dspark_cache.target import target_folder
from dspark_cache.tokens import sample_key

if TYPE_CHECKING:
    from dspark_cache.ranks import Peers
    from dspark_cache.stage import StageContext
    from dspark_cache.target import Target
    from dspark_cache.tokens import Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all ranks are told to compute: plain values, as JSON has them.

    Attributes:
        identity: The capture identity.
        target: Section `target` of the settings.
        blocks: Name of each block that is due and the indices of its samples, longest block first.
        num_tokens: Tokens of all samples.
        num_due: Tokens of those in `blocks`.
        present: What moved last bits of the blocks that are there.
        num_threads: Threads of a process on a CPU.
        group_size: Ranks that share one copy of the target.
        keeps_weights: Whether embedding and lm_head are to be kept.
    """

    identity: dict[str, Any]
    target: dict[str, Any]
    blocks: list[tuple[str, list[int]]]
    num_tokens: int
    num_due: int
    present: list[dict[str, Any]]
    num_threads: int
    group_size: int
    keeps_weights: bool


def compute_work(stage: StageContext, tokens: Tokens, work: Work, peers: Peers) -> None:
    """Compute what is due, together with the other ranks.

    Raises:
        InputError: The target cannot be used, or tokens or settings of this rank are others than rank 0's.
        SettingsError: The states would not be computed as those that are there, or as those of rank 0.
        CaptureError: The target gave something unusable.
        PeerLostError: Another rank has failed.
    """
    settings, rank = stage.settings, peers.rank
    runtime = settings.runtime
    if asdict(settings.target) != work.target:
        raise SettingsError(f"params.yaml: section target is another one than rank 0's: {work.target}")
    device = pick_device(runtime.device, rank)
    if device.type == "cpu":
        torch.set_num_threads(work.num_threads)
    else:
        torch.cuda.set_device(device)
    store = BlockStore(stage.scratch, work.identity)
    environment = capture_environment(device, runtime, work.group_size)
    _ensure_unmixed(work, environment, peers, store, allow_mixed=runtime.allow_mixed)
    group = Group.join(peers, work.group_size, device) if runtime.parallelism != "replicate" else Group()
    crew = Crew(peers=peers, group=group, parallelism=runtime.parallelism)
    part = Slice.parse(runtime.slice) if runtime.slice else None
    with store.rank_lock(part, rank.number) if rank.count > 1 else nullcontext():
        _compute(stage, tokens, work, crew, environment, device)
    group.leave()


def _ensure_unmixed(
    work: Work, environment: dict[str, Any], peers: Peers, store: BlockStore, *, allow_mixed: bool
) -> None:
    """Refuse to compute otherwise than the blocks that are there, and than rank 0.

    Raises:
        SettingsError: Listing every difference, unless mixing is allowed.
    """
    found = environment_differences(work.present, environment)
    if found and not allow_mixed:
        raise SettingsError(
            f"blocks in {store.folder} were captured differently: {'; '.join(found)}; last bits would differ between "
            "samples: capture as before, set runtime.allow_mixed: true, or remove the folder to start again"
        )
    if peers.rank.number == 0:
        peers.tell("environment", json.dumps(environment).encode())
    found = environment_differences([json.loads(peers.hear("environment"))], environment)
    if found and not allow_mixed:
        raise SettingsError(
            f"this rank would not compute as rank 0 (then): {'; '.join(found)}; last bits would differ: "
            "take equal machines, or set runtime.allow_mixed: true"
        )


class _Samples:
    """Blocks of `Work` with the ids of their samples, read when they are asked for."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._first_index: dict[str, int] = {}

    def read(self, block: tuple[str, list[int]]) -> tuple[PlannedBlock, list[torch.Tensor]]:
        """Return one block and its samples' ids.

        Raises:
            InputError: They are not those that rank 0 has.
        """
        name, indices = block
        planned = None
        if max(indices) < len(self._tokens):
            samples = [self._tokens.input_ids(index) for index in indices]
            planned = PlannedBlock(tuple(map(sample_key, samples)))
        if planned is None or planned.name != name:
            raise InputError(f"{TOKENS_PATH}/ does not hold the samples of {name} that rank 0 has: share one folder")
        self._first_index.update(zip(planned.samples, indices, strict=True))
        return planned, samples

    def describe(self, key: str) -> str:
        """Name a sample that was read."""
        return f"sample {self._first_index[key]}"

    def num_tokens(self, block: tuple[str, list[int]]) -> int:
        """Return the tokens of a block, of those of its samples that are here."""
        return sum(self._tokens.length(index) for index in block[1] if index < len(self._tokens))


def _compute(
    stage: StageContext, tokens: Tokens, work: Work, crew: Crew, environment: dict[str, Any], device: torch.device
) -> None:
    """Load the target, keep its embedding and lm_head if that is to be done, and compute blocks."""
    settings, identity, samples = stage.settings, work.identity, _Samples(tokens)
    store = BlockStore(stage.scratch, identity)
    done = work.num_tokens - work.num_due
    with SharedProgress.of(crew.peers, "capture", work.num_tokens, "tok", done=done) as progress:
        target = _load(stage, identity["compute_dtype"], crew, device)
        if work.keeps_weights and crew.peers.rank.number < crew.group.size:
            _keep_weights(store, target, is_writer=crew.group.rank == 0)
        capturer = BlockCapturer(
            Capturer(target, identity["target_layer_ids"], identity["hidden_size"]),
            store,
            environment,
            drop_nonfinite=settings.target.nonfinite == "drop",
            describe=samples.describe,
            in_lockstep=crew.group.size > 1,
        )
        if work.blocks:
            largest = max(map(samples.num_tokens, work.blocks)) * block_form(identity).token_bytes
            waiting = host_blocks(settings.runtime.host_memory_gb, largest) - 1
            compute_blocks(work.blocks, samples.read, capturer, crew, progress, waiting)
        crew.peers.finish(progress.refresh)


def _load(stage: StageContext, compute_dtype: str, crew: Crew, device: torch.device) -> Target:
    settings = stage.settings.target
    folder = target_folder(stage.target, stage.root, trust_remote_code=settings.trust_remote_code, weights=True)
    logger.info("loading %s in %s on %s", folder, compute_dtype, device)
    return load_over_group(folder, settings, compute_dtype, device, crew.group, crew.parallelism)


def kept_weights(store: BlockStore) -> tuple[int, str] | None:
    """Return size and sha256 of embedding and lm_head in scratch, if they are there."""
    path, record = store.folder / WEIGHTS_NAME, store.folder / WEIGHTS_RECORD_NAME
    if record.exists():
        try:
            fields = Fields(read_json_object(record), name=str(record))
            size, digest = fields.count("bytes", minimum=1), fields.sha256("sha256")
            fields.finish()
            if ShardFile(path).size == size:
                return size, digest
        except (CacheFormatError, CacheNotFoundError) as error:
            logger.warning("not accepted, written again: %s", error)
    return None


def _keep_weights(store: BlockStore, target: Target, *, is_writer: bool) -> None:
    """Keep embedding and lm_head in scratch; of a sharded target a collective of its group."""
    embed, head = target.embed_weight, target.head_weight
    weights = {EMBED_KEY: embed} if head is embed else {EMBED_KEY: embed, LM_HEAD_KEY: head}
    tensors = {key: full_tensor(weight.detach()).cpu() for key, weight in weights.items()}
    if is_writer:
        path = store.folder / WEIGHTS_NAME
        with put_file(path) as temporary:
            digest = write_tensors(temporary, tensors)
        put_json(store.folder / WEIGHTS_RECORD_NAME, {"bytes": path.stat().st_size, "sha256": digest})
