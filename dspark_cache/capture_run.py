"""The capture stage as one call: settings and tokens in, ledger out.

One process coordinates: it works out the capture identity from the configuration and the weights' fingerprint, without
loading anything, holds the lock, and decides what is due. Only if something is do ranks compute it: this process
itself, others that it starts, or those that torchrun, srun or mpirun started together with it.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.blocks import WEIGHTS_NAME, Block, BlockStore, Slice, distinct_environments, scratch_folders
from dspark_cache.capture import Wanted, holding, plan_due
from dspark_cache.capture_rank import Work, compute_work, kept_weights
from dspark_cache.errors import CaptureError, SettingsError
from dspark_cache.forward import ensure_gpus
from dspark_cache.inputs import ensure_pinned
from dspark_cache.launch import die_with_parent, launch_ranks, read_orders
from dspark_cache.ledger import Ledger
from dspark_cache.ranks import Peers, Rank, ending_together, find_rank
from dspark_cache.schema import AUTO, GIB, STAGE_VERSIONS
from dspark_cache.sharding import ensure_shardable
from dspark_cache.stage import LEDGER_PATH
from dspark_cache.strict_json import is_int
from dspark_cache.target import (
    TargetFacts,
    is_weight_file,
    read_target_facts,
    resolve_layer_ids,
    target_folder,
    warn_unservable,
)
from dspark_cache.tokens import hold_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dspark_cache.settings import RuntimeSettings
    from dspark_cache.stage import StageContext
    from dspark_cache.tokens import Tokens

logger = logging.getLogger(__name__)

CAPTURE_MODULE = "stages.capture"
"""What started ranks run, as dvc.yaml does."""

IDENTITY_KEYS = {
    "model": "weights",
    "revision": "weights",
    "layer_ids": "target_layer_ids",
    "draft_num_hidden_layers": "target_layer_ids",
    "compute_dtype": "compute_dtype",
    "attn_implementation": "attn_implementation",
    "trust_remote_code": "remote_code",
}
"""Key of section `target` to the key of the capture identity that it decides."""

IDENTITY_EXEMPT_KEYS = {
    "chat_template": "decides ids, by whose hash the states are found",
    "nonfinite": "decides which samples are kept, not their states",
    "block_bytes": "decides how states are grouped, not their values",
}
"""Key of section `target` to the reason why it is no part of the capture identity."""


def capture_identity(stage: StageContext, folder: Path, facts: TargetFacts) -> dict[str, Any]:
    """Return everything that the states of given token ids depend on.

    Raises:
        InputError: A pinned target has changed.
        SettingsError: Layer ids that the target does not have.
    """
    target = stage.settings.target
    fingerprints = stage.fingerprints()
    ensure_pinned(stage.target, folder, fingerprints, key="target.model")
    return {
        "capture_version": STAGE_VERSIONS["capture"],
        "weights": fingerprints.of_input(stage.target, folder, accept=is_weight_file),
        "hidden_size": facts.hidden_size,
        "target_layer_ids": resolve_layer_ids(
            target.layer_ids, target.draft_num_hidden_layers, facts.num_hidden_layers
        ),
        "compute_dtype": facts.dtype if target.compute_dtype == "auto" else target.compute_dtype,
        "attn_implementation": target.attn_implementation,
        "remote_code": facts.remote_code,
    }


def capture_features(stage: StageContext, tokens: Tokens) -> Ledger | None:
    """Capture the states of every sample that scratch does not hold yet.

    Returns:
        The ledger; None in ranks that only compute, and of a slice.

    Raises:
        InputError: The target cannot be used, or has changed.
        SettingsError: Settings that do not fit the target or this machine.
        LockedError: Another process captures the same identity.
        CaptureError: The target gave something unusable, or a rank failed.
    """
    orders, rank = read_orders(os.environ), find_rank(os.environ)
    if rank is None:
        count = _count_processes(stage.settings.runtime)
        return _coordinate(stage, tokens, Rank(0, count, 0, count), lambda work: _run(stage, tokens, work, count))
    if rank.number:
        logging.getLogger().setLevel(logging.WARNING)  # rank 0 says the rest for all
    if orders is None and "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    peers = Peers.join(rank)
    with ending_together(peers, orders.report(rank.number) if orders else None):
        if orders is None and rank.number == 0:
            return _coordinate(stage, tokens, rank, lambda work: _run_joined(stage, tokens, work, peers))
        told = orders.content if orders else json.loads(peers.hear("work"))
        if told is not None:
            compute_work(stage, tokens, Work(**told), peers)
    return None


def _count_processes(runtime: RuntimeSettings) -> int:
    """Return how many processes capture on this machine, where nobody has started them; a GPU need not be there."""
    if runtime.processes != AUTO:
        return int(runtime.processes)
    return max(1, torch.cuda.device_count()) if runtime.device in (AUTO, "cuda") else 1


def _run(stage: StageContext, tokens: Tokens, work: Work | None, count: int) -> None:
    """Compute in this process, or in as many as there are to be."""
    if work is None:
        return
    if count == 1:
        compute_work(stage, tokens, work, Peers.alone())
    else:
        ensure_gpus(stage.settings.runtime.device, count)
        launch_ranks(CAPTURE_MODULE, count, asdict(work), {"OMP_NUM_THREADS": str(work.num_threads)})


def _run_joined(stage: StageContext, tokens: Tokens, work: Work | None, peers: Peers) -> None:
    """Tell the other ranks, and compute with them."""
    peers.tell("work", json.dumps(work and asdict(work)).encode())
    if work is not None:
        compute_work(stage, tokens, work, peers)


def _coordinate(stage: StageContext, tokens: Tokens, rank: Rank, run: Callable[[Work | None], None]) -> Ledger | None:
    """Find out what is due, let it be computed, and return the ledger of all that is there."""
    runtime, target = stage.settings.runtime, stage.settings.target
    folder = target_folder(stage.target, stage.root, trust_remote_code=target.trust_remote_code, weights=True)
    facts = read_target_facts(folder, trust_remote_code=target.trust_remote_code)
    size = _group_size(runtime, rank)
    if runtime.parallelism != "replicate":
        ensure_shardable(folder, runtime.parallelism, size, trust_remote_code=target.trust_remote_code)
    identity = capture_identity(stage, folder, facts)
    warn_unservable(identity["target_layer_ids"], facts.num_hidden_layers)
    store = BlockStore(stage.scratch, identity)
    _list_other_scratch(stage.scratch, store)
    part = Slice.parse(runtime.slice) if runtime.slice else None
    with store.lock() if part is None else store.slice_lock(part):
        for name in store.prepare(is_alone=part is None):
            logger.info("removed %s, left half-written by an earlier run", store.folder / name)
        blocks = _capture(stage, tokens, store, rank, run)
        weights = kept_weights(store)
    if part is not None:
        logger.info("slice %s is there: without runtime.slice, a run writes %s", runtime.slice, LEDGER_PATH)
        return None
    if weights is None:
        raise CaptureError(f"{store.folder / WEIGHTS_NAME} was not kept: run again")
    return Ledger(
        identity=identity,
        target_model=stage.target.text,
        target_model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        num_hidden_layers=facts.num_hidden_layers,
        logits=facts.logits,
        weights_bytes=weights[0],
        weights_sha256=weights[1],
        blocks=tuple(blocks[name] for name in sorted(blocks)),
    )


def _group_size(runtime: RuntimeSettings, rank: Rank) -> int:
    """Return how many ranks share one copy of the target.

    Raises:
        SettingsError: The ranks cannot be divided so.
    """
    if runtime.parallelism == "replicate":
        return 1
    size = rank.local_count if runtime.group_size == AUTO else int(runtime.group_size)
    if rank.count % size:
        raise SettingsError(
            f"runtime.group_size: {rank.count} processes cannot be divided into groups of {size}: choose a divisor"
        )
    return size


def _capture(
    stage: StageContext, tokens: Tokens, store: BlockStore, rank: Rank, run: Callable[[Work | None], None]
) -> dict[str, Block]:
    """Let missing blocks of the data set's samples be computed; refuse what may not be left out."""
    settings, runtime = stage.settings, stage.settings.runtime
    part = Slice.parse(runtime.slice) if runtime.slice else None
    first_index: dict[str, int] = {}
    for index, key in enumerate(tokens.keys()):
        first_index.setdefault(key, index)
    lengths = {key: tokens.length(index) for key, index in first_index.items()}
    wanted = Wanted(lengths=lengths, held_out=len(hold_out(first_index, settings.data.eval_samples)))
    due = plan_due(store, wanted, block_bytes=settings.target.block_bytes, runtime=runtime, part=part)
    keeps_weights = kept_weights(store) is None and (part is None or part.number == 1)
    blocks = due.present
    if not due.blocks and not keeps_weights:
        run(None)
    else:
        present = distinct_environments(blocks.values())
        run(
            Work(
                identity=store.identity,
                target=asdict(settings.target),
                blocks=[(block.name, [first_index[key] for key in block.samples]) for block in due.blocks],
                num_tokens=sum(lengths.values()),
                num_due=due.num_tokens,
                present=present,
                num_threads=_num_threads(present, rank),
                group_size=_group_size(runtime, rank),
                keeps_weights=keeps_weights,
            )
        )
        finished, _ = store.finished_blocks(due.blocks)
        absent = [block.name for block in due.blocks if block.name not in finished]
        if absent:
            raise CaptureError(f"{len(absent)} blocks are not in {store.folder}, {absent[0]} among them: run again")
        blocks = holding(finished, lengths)
    _report_dropped(stage, blocks, first_index)
    return blocks


def _num_threads(present: Sequence[dict[str, Any]], rank: Rank) -> int:
    """Return how many threads a process computes with on a CPU: as many as for the blocks that are there.

    Their number moves last bits, so another number of processes must not change it.
    """
    recorded = {environment.get("threads") for environment in present}
    if len(recorded) == 1 and is_int(number := recorded.pop()):
        return int(number)
    shared_by = 1 if "OMP_NUM_THREADS" in os.environ else rank.local_count
    return max(1, torch.get_num_threads() // shared_by)


def _report_dropped(stage: StageContext, blocks: dict[str, Block], first_index: dict[str, int]) -> None:
    """Name dropped samples of this data set; with `nonfinite: error` they stop the run.

    Raises:
        CaptureError: Samples were dropped by an earlier run that was told to.
    """
    dropped = {
        first_index[key]: why for block in blocks.values() for key, why in block.dropped.items() if key in first_index
    }
    if not dropped:
        return
    named = ", ".join(f"sample {index} ({why})" for index, why in sorted(dropped.items())[:10])
    if stage.settings.target.nonfinite == "error":
        raise CaptureError(f"{len(dropped)} samples are not finite: {named}; target.nonfinite: drop leaves them out")
    logger.warning("%d samples are left out: %s", len(dropped), named)


def _list_other_scratch(scratch: Path, store: BlockStore) -> None:
    """Say what other identities' blocks take up; they are removed by hand only."""
    for folder, size in scratch_folders(scratch):
        if folder != store.folder:
            logger.info("scratch of another capture: %s, %.2f GiB (dspark-cache clean removes it)", folder, size / GIB)
