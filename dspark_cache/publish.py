"""Publishing: captured blocks and tokens in, a padded or ragged cache out, put in place by one rename.

With `data.eval_samples` a second cache holds the first samples out of the first one, for calibration. A block whose
samples are exactly those of a ragged shard becomes that shard by a second name, without a byte being written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import WEIGHTS_NAME, Block, BlockStore
from dspark_cache.cache_plan import CachePlan, plan_cache, resolve_shard_size
from dspark_cache.cache_writer import SharedFile, ensure_room, write_cache
from dspark_cache.dtypes import DTYPE_MAP, READ_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import file_digest, link_file, put_folder
from dspark_cache.ledger import Ledger, Place, place_samples
from dspark_cache.manifest import build_cache_manifest
from dspark_cache.provenance import Provenance
from dspark_cache.ragged import StatesForm
from dspark_cache.schema import EMBED_KEY, EVAL, INPUT_IDS, LOSS_MASK, STAGE_VERSIONS, TARGET_WEIGHTS_NAME, TRAIN
from dspark_cache.shard_file import ShardFile
from dspark_cache.target_weights import TargetWeightsCopy
from dspark_cache.tokens import hold_out

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from dspark_cache.progress import Progress
    from dspark_cache.settings import CacheSettings, Settings
    from dspark_cache.tokens import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What a cache is published from.

    Attributes:
        tokens: The samples.
        ledger: What was captured.
        store: The blocks.
    """

    tokens: Tokens
    ledger: Ledger
    store: BlockStore


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSample:
    """One sample of the cache: its index in `tokens/`, its key, and where its states lie."""

    index: int
    key: str
    place: Place

    @property
    def num_tokens(self) -> int:
        """T of this sample."""
        return self.place.stop - self.place.start


class BlockRows:
    """Rows of samples, named by their index in `tokens/`, from tokens and blocks; one block stays open."""

    def __init__(self, captured: Captured, samples: Sequence[PlacedSample]) -> None:
        """Read `samples`, and no others."""
        self._tokens = captured.tokens
        self._store = captured.store
        self._samples = {sample.index: sample for sample in samples}
        self._open: tuple[str, ShardFile] | None = None
        self.dtype = captured.ledger.compute_dtype

    def num_tokens(self, sample: int) -> int:
        """Return T of a sample."""
        return self._samples[sample].num_tokens

    def rows(self, key: str, sample: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded): ids int32, mask uint8, states in the compute dtype."""
        if key == INPUT_IDS:
            return self._tokens.input_ids(sample)[start:stop]
        if key == LOSS_MASK:
            return self._tokens.loss_mask(sample)[start:stop]
        place = self._samples[sample].place
        return self._block(place.block).read_rows(key, place.start + start, place.start + stop)

    def features_of(self, samples: Sequence[int]) -> SharedFile | None:
        """Return the block that holds exactly these samples in this order, if there is one."""
        block = self._samples[samples[0]].place.block
        if tuple(self._samples[sample].key for sample in samples) != block.samples:
            return None
        return SharedFile(path=self._store.path(block.name), num_bytes=block.num_bytes, sha256=block.sha256)

    def _block(self, block: Block) -> ShardFile:
        """Return an open block; threads that ask for several may each have another one open."""
        opened = self._open
        if opened is None or opened[0] != block.name:
            opened = self._open = (block.name, self._store.open(block))
        return opened[1]


def ensure_blocks(ledger: Ledger, store: BlockStore, *, check_digest: bool) -> None:
    """Check that the blocks of the ledger and the weights are in scratch, before anything is written.

    Raises:
        CacheNotFoundError: Some are gone or are others; the folder and the ways out are named.
    """
    faults = []
    for block in ledger.blocks:
        try:
            store.open(block, check_digest=check_digest)
        except (CacheNotFoundError, CacheFormatError) as error:
            faults.append(str(error))
    weights = store.folder / WEIGHTS_NAME
    if not weights.is_file() or file_digest(weights) != ledger.weights_sha256:
        faults.append(f"{weights} is gone or not the one of the ledger")
    if faults:
        raise CacheNotFoundError(
            f"{len(faults)} files of captured states in {store.folder} are gone or changed, the first: {faults[0]}; "
            "either revert the param (dvc repro restores the old cache), capture again with "
            "dvc repro -f -s capture && dvc repro, or make what you need from a published cache with "
            "dspark-cache convert"
        )


def eval_folder(path: Path) -> Path:
    """Return where the held-out part of the cache `path` lies."""
    return path.with_name(f"{path.name}-{EVAL}")


def publish_cache(captured: Captured, settings: Settings, path: Path, make_progress: Callable[[int], Progress]) -> None:
    """Write the cache at `path` and what is held out of it beside it; each appears complete or not at all.

    Without `data.eval_samples` the folder of what is held out is empty: DVC asks for every output of a stage.

    Args:
        captured: Tokens, ledger and blocks.
        settings: Section `cache` and `data.eval_samples` say what to write, `runtime` how to check blocks and disk.
        path: Folder of the cache; an earlier one is replaced.
        make_progress: Given the number of tokens to write.

    Raises:
        CacheNotFoundError: Blocks are gone.
        CacheFormatError: A sample is in no block.
        CaptureError: A value does not fit into the cache's dtype.
        SettingsError: More shards than names, too little free disk, or nothing left to train on.
        LockedError: Another process is writing the same cache, or capturing the same states.
    """
    ledger, store = captured.ledger, captured.store
    with store.lock():
        ensure_blocks(ledger, store, check_digest=settings.runtime.check_blocks == "digest")
        samples = placed_samples(captured.tokens, ledger)
        source = BlockRows(captured, samples)
        plans = plan_caches(captured.tokens, ledger, samples, settings)
        tokens = sum(sample.num_tokens for sample in samples)
        weights = _weights(captured, settings.cache)
        with make_progress(tokens) as progress:
            with put_folder(path) as folder:
                if settings.runtime.check_disk:
                    remedy = "use cache.layout: ragged, or set runtime.check_disk: false"
                    ensure_room(folder, plans.values(), source, weights.num_bytes, what=f"{path.name}/", remedy=remedy)
                write = partial(write_cache, advance=progress.advance, num_threads=max(1, settings.runtime.num_workers))
                published = write(folder, plans[TRAIN], source, weights.put)

            def share_weights(to: Path) -> str:
                is_linked = link_file(path / TARGET_WEIGHTS_NAME, to)
                return published.files[TARGET_WEIGHTS_NAME].sha256 if is_linked else weights.put(to)

            with put_folder(eval_folder(path)) as folder:
                if EVAL in plans:
                    write(folder, plans[EVAL], source, share_weights)


def _weights(captured: Captured, settings: CacheSettings) -> TargetWeightsCopy:
    """Return the target weights that were kept beside the blocks."""
    ledger = captured.ledger
    file = ShardFile(captured.store.folder / WEIGHTS_NAME)
    spec = TensorSpec(dtype=DTYPE_MAP[ledger.compute_dtype], shape=(ledger.vocab_size, ledger.hidden_size))
    file.expect({EMBED_KEY: spec}, exactly=False)
    return TargetWeightsCopy(file, READ_DTYPES[settings.dtype], tied_once=settings.layout == "ragged")


def placed_samples(tokens: Tokens, ledger: Ledger) -> list[PlacedSample]:
    """Find the states of every sample that was not dropped, in order."""
    lengths = [tokens.length(index) for index in range(len(tokens))]
    keys = tokens.keys()
    places = place_samples(ledger, keys, lengths)
    return [
        PlacedSample(index=index, key=key, place=place)
        for index, (key, place) in enumerate(zip(keys, places, strict=True))
        if place is not None
    ]


def plan_caches(
    tokens: Tokens, ledger: Ledger, samples: Sequence[PlacedSample], settings: Settings
) -> dict[str, CachePlan]:
    """Plan the cache to train from, "train", and what `data.eval_samples` holds out of it, "eval", if anything.

    Raises:
        SettingsError: More shards than names, or nothing left to train on.
    """
    count = settings.data.eval_samples
    held = hold_out([sample.key for sample in samples], count)
    parts = {TRAIN: [sample for sample in samples if sample.key not in held]}
    if held:
        parts[EVAL] = [sample for sample in samples if sample.key in held]
    return {
        part: _plan_cache(tokens, ledger, kept, settings.cache, {"eval_samples": count, "part": part} if held else {})
        for part, kept in parts.items()
    }


def _plan_cache(
    tokens: Tokens,
    ledger: Ledger,
    samples: Sequence[PlacedSample],
    settings: CacheSettings,
    held_out: dict[str, Any],
) -> CachePlan:
    width = ledger.hidden_size
    form = StatesForm(dtype=settings.dtype, hidden_dim=width * len(ledger.layer_ids), last_dim=width)
    shard_size = resolve_shard_size(settings.shard_size, form, tokens.seq_length, settings.shard_bytes)
    return plan_cache(
        _manifest(tokens, ledger, settings.dtype, num_samples=len(samples), shard_size=shard_size),
        {sample.index: sample.num_tokens for sample in samples},
        shard_bytes=settings.shard_bytes,
        provenance=_provenance(tokens, ledger, settings.layout, held_out),
    )


def _manifest(tokens: Tokens, ledger: Ledger, dtype: str, *, num_samples: int, shard_size: int) -> dict[str, Any]:
    made_from = tokens.identity
    return build_cache_manifest(
        target_model=ledger.target_model,
        target_model_type=ledger.target_model_type,
        target_text_config=ledger,
        seq_length=tokens.seq_length,
        dtype=dtype,
        num_samples=num_samples,
        shard_size=shard_size,
        target_layer_ids=ledger.layer_ids,
        train_data_path=made_from["train_data_path"],
        train_split=made_from["train_split"],
        shuffle_seed=made_from["shuffle_seed"],
        mask_reasoning_content=made_from["mask_reasoning_content"],
        chat_template_sha256=made_from["chat_template_sha256"],
        mask_generation_prompt=made_from["mask_generation_prompt"],
    )


def _provenance(tokens: Tokens, ledger: Ledger, layout: str, held_out: dict[str, Any]) -> Provenance:
    counts = ("num_samples", "num_tokens", "supervised_tokens", "truncated_samples", "unsupervised_samples")
    return Provenance(
        layout=layout,
        shards_version=STAGE_VERSIONS["shards"],
        pad_token_id=tokens.pad_token_id,
        tokens={key: value for key, value in tokens.identity.items() if key not in counts},
        capture={
            "identity": ledger.identity,
            "environments": ledger.environments(),
            "dropped": ledger.dropped,
            "logits": ledger.logits,
        },
        held_out=held_out,
    )
