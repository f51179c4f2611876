"""The capture stage as one call: settings and tokens in, ledger out.

The capture identity is worked out from the configuration and the weights' fingerprint, without loading anything;
the target is loaded only if samples are missing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import WEIGHTS_NAME, WEIGHTS_RECORD_NAME, Block, BlockStore, scratch_folders
from dspark_cache.capture import GIB, BlockCapturer, Engine, Wanted, capture_blocks
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError
from dspark_cache.files import put_file, put_json
from dspark_cache.forward import Capturer, capture_environment, pick_device
from dspark_cache.inputs import ensure_pinned
from dspark_cache.ledger import Ledger
from dspark_cache.progress import Progress
from dspark_cache.schema import EMBED_KEY, LM_HEAD_KEY, STAGE_VERSIONS
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.strict_json import Fields, read_json_object
from dspark_cache.target import (
    TargetFacts,
    is_weight_file,
    load_target,
    read_target_facts,
    resolve_layer_ids,
    target_folder,
    warn_unservable,
)
from dspark_cache.tokens import hold_out

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from dspark_cache.stage import StageContext
    from dspark_cache.target import Target
    from dspark_cache.tokens import Tokens

logger = logging.getLogger(__name__)

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


def capture_features(stage: StageContext, tokens: Tokens) -> Ledger:
    """Capture the states of every sample that scratch does not hold yet.

    Raises:
        InputError: The target cannot be used, or has changed.
        SettingsError: Settings that do not fit the target or this machine.
        LockedError: Another process captures the same identity.
        CaptureError: The target gave something unusable.
    """
    trust = stage.settings.target.trust_remote_code
    folder = target_folder(stage.target, stage.root, trust_remote_code=trust, weights=True)
    facts = read_target_facts(folder, trust_remote_code=trust)
    identity = capture_identity(stage, folder, facts)
    warn_unservable(identity["target_layer_ids"], facts.num_hidden_layers)
    store = BlockStore(stage.scratch, identity)
    _list_other_scratch(stage.scratch, store)
    with store.lock():
        for name in store.prepare():
            logger.info("removed %s, left half-written by an earlier run", store.folder / name)
        load = _Loader(stage, folder, identity["compute_dtype"])
        blocks = _capture(stage, tokens, store, load)
        weights = _keep_weights(store, load)
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


class _Loader:
    """Loads the target at most once, when somebody first asks for it."""

    def __init__(self, stage: StageContext, folder: Path, compute_dtype: str) -> None:
        self._stage = stage
        self._folder = folder
        self._compute_dtype = compute_dtype
        self._target: Target | None = None

    @property
    def device(self) -> torch.device:
        return pick_device(self._stage.settings.runtime.device)

    def __call__(self) -> Target:
        if self._target is None:
            logger.info("loading %s in %s on %s", self._folder, self._compute_dtype, self.device)
            self._target = load_target(self._folder, self._stage.settings.target, self._compute_dtype, self.device)
        return self._target


def _capture(stage: StageContext, tokens: Tokens, store: BlockStore, load: _Loader) -> dict[str, Block]:
    """Compute the missing blocks of the data set's samples; refuse what may not be left out."""
    settings = stage.settings
    first_index: dict[str, int] = {}
    for index, key in enumerate(tokens.keys()):
        first_index.setdefault(key, index)

    def environment() -> dict[str, Any]:
        return capture_environment(load.device, settings.runtime)

    def load_capturer() -> BlockCapturer:
        identity = store.identity
        return BlockCapturer(
            Capturer(load(), identity["target_layer_ids"], identity["hidden_size"]),
            store,
            environment(),
            drop_nonfinite=settings.target.nonfinite == "drop",
            describe=lambda key: f"sample {first_index[key]}",
        )

    blocks = capture_blocks(
        store,
        Wanted(
            lengths={key: tokens.length(index) for key, index in first_index.items()},
            read_ids=lambda key: tokens.input_ids(first_index[key]),
            held_out=len(hold_out(first_index, settings.data.eval_samples)),
        ),
        Engine(
            environment=environment,
            load=load_capturer,
            progress=lambda total, done: Progress("capture", total, "tok", done=done),
        ),
        block_bytes=settings.target.block_bytes,
        runtime=settings.runtime,
    )
    _report_dropped(stage, blocks, first_index)
    return blocks


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


def _keep_weights(store: BlockStore, load: _Loader) -> tuple[int, str]:
    """Keep embedding and lm_head in scratch, once; return size and sha256 of the file."""
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
    target = load()
    embed, head = target.embed_weight, target.head_weight
    tensors = {EMBED_KEY: embed} if head is embed else {EMBED_KEY: embed, LM_HEAD_KEY: head}
    with put_file(path) as temporary:
        digest = write_tensors(temporary, {key: weight.detach().cpu() for key, weight in tensors.items()})
    put_json(record, {"bytes": path.stat().st_size, "sha256": digest})
    return path.stat().st_size, digest


def _list_other_scratch(scratch: Path, store: BlockStore) -> None:
    """Say what other identities' blocks take up; they are removed by hand only."""
    for folder, size in scratch_folders(scratch):
        if folder != store.folder:
            logger.info("scratch of another capture: %s, %.2f GiB (dspark-cache clean removes it)", folder, size / GIB)
