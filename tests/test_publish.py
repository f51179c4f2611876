"""Publishing: blocks and tokens to a padded cache, at once and the same bytes every time, or nothing at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, read_manifest, write_shard
from dspark_cache.blocks import Block, BlockStore
from dspark_cache.dtypes import DTYPE_MAP
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError, LockedError, SettingsError
from dspark_cache.files import FileLock, file_digest, put_file
from dspark_cache.ledger import place_samples, read_ledger
from dspark_cache.progress import Progress
from dspark_cache.provenance import read_provenance
from dspark_cache.publish import Captured, placed_samples, plan_caches, publish_cache
from dspark_cache.ragged import StatesForm, feature_specs
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS, STAGE_VERSIONS
from dspark_cache.settings import check_settings
from dspark_cache.shard_file import file_bytes, write_tensors
from dspark_cache.tokens import Tokens
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from pathlib import Path

PAD = 995


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Five conversations and the first of them once more, captured in blocks of about two."""
    root = tmp_path_factory.mktemp("publish") / "repository"
    target = {"layer_ids": [1, 3], "block_bytes": 100 * 64 * 3 * 4}
    repository = make_repository(root, num_rows=5, data={"seq_length": 64}, target=target)
    rows = root / "inputs/data/conversations.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines, lines[0]]))
    repository.run("tokenize", "capture")
    return repository


@pytest.fixture
def work(captured: Repository, tmp_path: Path) -> Publication:
    """A copy of it, to do with as a test likes."""
    shutil.copytree(captured.root, tmp_path / "repository")
    return Publication(tmp_path / "repository")


class Publication:
    """A captured repository, to publish from."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "cache"
        self.ledger = read_ledger(root / "features.json")
        self.store = BlockStore(root / ".work", self.ledger.identity)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.root / "tokens")

    def publish(self, *, make_progress: Any = None, runtime: Any = None, **cache: Any) -> CachedDSparkDataset:
        make = make_progress or (lambda num_bytes: Progress("shards", num_bytes, "B"))
        settings = check_settings({"cache": {"shard_size": 4, **cache}, "runtime": runtime or {}})
        captured = Captured(tokens=self.tokens, ledger=self.ledger, store=self.store)
        publish_cache(captured, settings, self.path, make)
        return CachedDSparkDataset(self.path)

    def states(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a sample's rows of its block, read by safetensors itself."""
        tokens = self.tokens
        place = place_samples(self.ledger, tokens.keys(), tokens.offsets.diff().tolist())[index]
        assert place is not None
        content = load_file(self.store.path(place.block.name))
        return content[HIDDEN][place.start : place.stop], content[LAST_HIDDEN][place.start : place.stop]

    def doctor_block(self, number: int, **changes: torch.Tensor) -> None:
        """Put other tensors of the same size into a block."""
        path = self.store.path(self.ledger.blocks[number].name)
        put_tensors(path, {**load_file(path), **changes})

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.iterdir()}

    def block_files(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.glob("block-*"))


def put_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replace a file by rename: what was loaded from the old one is mapped and stays as it is."""
    with put_file(path) as temporary:
        write_tensors(temporary, tensors)


def padded(rows: torch.Tensor, length: int, value: int = 0) -> torch.Tensor:
    whole = torch.full((length, *rows.shape[1:]), value, dtype=rows.dtype)
    whole[: len(rows)] = rows
    return whole


@pytest.mark.parametrize(("shard_size", "dtype"), [*product((1, 4, 6, 100), ("bf16",)), (4, "fp16"), (4, "fp32")])
def test_a_cache_holds_tokens_and_states_padded(work: Publication, shard_size: int, dtype: str) -> None:
    dataset = work.publish(shard_size=shard_size, dtype=dtype)
    tokens = work.tokens
    assert len(dataset) == len(tokens) == 6
    for index in range(6):
        hidden, last = (part.to(DTYPE_MAP[dtype]) for part in work.states(index))
        sample = dataset[index]
        assert torch.equal(sample[INPUT_IDS], padded(tokens.input_ids(index).long(), 64, PAD))
        assert torch.equal(sample[LOSS_MASK], padded(tokens.loss_mask(index).long(), 64))
        assert torch.equal(sample[HIDDEN], padded(hidden, 64))
        assert torch.equal(sample[LAST_HIDDEN], padded(last, 64))


def test_shards_are_the_bytes_of_dense_ones(work: Publication, tmp_path: Path) -> None:
    dataset = work.publish()
    for shard, indices in enumerate((range(4), range(4, 6))):
        samples = [dataset[index] for index in indices]
        dense = write_shard(tmp_path / "dense", shard, {k: torch.stack([s[k] for s in samples]) for k in CACHE_KEYS})
        with open(dense, "rb") as stream:  # noqa: PTH123 - the library returns text
            assert (work.path / f"shard-{shard:06d}.safetensors").read_bytes() == stream.read()


def test_the_manifest_says_where_the_cache_comes_from(work: Publication) -> None:
    work.publish(shard_size=4, dtype="fp32")
    manifest = read_manifest(work.path)
    identity = work.tokens.identity
    assert manifest == {
        "chat_template_sha256": identity["chat_template_sha256"],
        "complete": True,
        "dtype": "fp32",
        "format_version": 1,
        "hidden_size": 64,
        "mask_generation_prompt": False,
        "mask_reasoning_content": False,
        "num_hidden_layers": 6,
        "num_samples": 6,
        "seq_length": 64,
        "shard_size": 4,
        "shuffle_seed": 42,
        "target_hidden_dim": 128,
        "target_last_hidden_dim": 64,
        "target_layer_ids": [1, 3],
        "target_model": "inputs/target",
        "target_model_type": "qwen3",
        "target_vocab_size": 1024,
        "train_data_path": "inputs/data/conversations.jsonl",
        "train_split": None,
    }


@pytest.mark.parametrize("dtype", DTYPE_MAP)
def test_the_weights_are_the_target_s_in_the_cache_s_dtype(work: Publication, dtype: str) -> None:
    work.publish(dtype=dtype)
    found = load_file(work.path / "target_weights.safetensors")
    target = load_file(work.root / "inputs/target/model.safetensors")
    assert found.keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert torch.equal(found["lm_head.weight"], target["lm_head.weight"].to(DTYPE_MAP[dtype]))
    assert torch.equal(found["embed_tokens.weight"], target["model.embed_tokens.weight"].to(DTYPE_MAP[dtype]))


def test_tied_weights_are_in_the_cache_under_both_names(work: Publication) -> None:
    path = work.store.folder / "weights.safetensors"
    embed = load_file(path)["embed_tokens.weight"]
    put_tensors(path, {"embed_tokens.weight": embed})
    work.ledger = dataclasses.replace(work.ledger, weights_sha256=file_digest(path))
    work.publish(dtype="fp32")
    found = load_file(work.path / "target_weights.safetensors")
    assert torch.equal(found["embed_tokens.weight"], embed)
    assert torch.equal(found["lm_head.weight"], embed)


def test_identical_conversations_share_states(work: Publication) -> None:
    dataset = work.publish()
    keys = work.tokens.keys()
    assert keys[0] == keys[5]
    assert sum(len(block.samples) for block in work.ledger.blocks) == 5
    assert all(torch.equal(dataset[0][key], dataset[5][key]) for key in CACHE_KEYS)


def test_padding_is_holes(work: Publication) -> None:
    """The same samples in windows of 1024 positions: 192 KiB a sample and state that nobody writes."""
    path = work.root / "tokens/tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "seq_length": 1024}))
    dataset = work.publish(shard_size=6)
    status = (work.path / "shard-000000.safetensors").stat()
    tokens = work.tokens.num_tokens
    assert status.st_size > 6 * 1024 * 192 * 2
    assert status.st_blocks * 512 < tokens * 192 * 2 + 6 * 1024 * 16 + 40 * 4096
    assert torch.equal(dataset[0][HIDDEN], padded(work.states(0)[0].bfloat16(), 1024))
    recorded = json.loads((work.path / "provenance.json").read_text())["files"]["shard-000000.safetensors"]
    dense = (work.path / "shard-000000.safetensors").read_bytes()
    assert recorded["sha256"] == hashlib.sha256(dense).hexdigest()


# Provenance


def test_provenance_gives_size_and_digest_of_every_file(work: Publication) -> None:
    work.publish()
    files = work.files()
    recorded = json.loads(files.pop("provenance.json"))["files"]
    assert recorded.keys() == files.keys()
    for name, content in files.items():
        assert recorded[name]["bytes"] == len(content)
        assert recorded[name]["sha256"] == hashlib.sha256(content).hexdigest()
    shards = [recorded["shard-000000.safetensors"], recorded["shard-000001.safetensors"]]
    assert [shard["samples"] for shard in shards] == [4, 2]
    tokens = work.tokens
    lengths = tokens.offsets.diff().tolist()
    assert [shard["tokens"] for shard in shards] == [sum(lengths[:4]), sum(lengths[4:])]
    supervised = [int(tokens.loss_mask(index).sum()) for index in range(6)]
    assert [shard["supervised_tokens"] for shard in shards] == [sum(supervised[:4]), sum(supervised[4:])]


def test_provenance_says_what_the_cache_was_made_from_and_nothing_of_this_run(work: Publication) -> None:
    work.publish()
    text = (work.path / "provenance.json").read_text()
    content = json.loads(text)
    assert content.keys() == {
        "capture", "files", "layout", "pad_token_id", "provenance_version", "sha256", "shards_version", "tokens"
    }  # fmt: skip
    assert content["capture"] == {
        "identity": work.ledger.identity,
        "environments": work.ledger.environments(),
        "dropped": {},
        "logits": {},
    }
    assert (content["layout"], content["pad_token_id"]) == ("padded", PAD)
    assert content["shards_version"] == STAGE_VERSIONS["shards"]
    identity = work.tokens.identity
    assert content["tokens"].items() <= identity.items()
    assert {"chat_template", "data_fingerprint", "tokenizer_fingerprint", "sha256"} <= content["tokens"].keys()
    assert "num_samples" not in content["tokens"]
    for local in (str(work.root), socket.gethostname(), str(os.getpid()), "20"):
        words = text.replace('"', " ").replace(",", " ").split()
        assert local not in words
    assert str(work.root) not in text


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_provenance_is_read_back_as_what_tokens_and_ledger_give(work: Publication, layout: str) -> None:
    """The verify stage compares the two; counts are of the states' files alone."""
    cache = {"layout": layout, **({"shard_bytes": 100 * 192 * 2} if layout == "ragged" else {})}
    work.publish(**cache)
    found = read_provenance(work.path)
    assert found is not None
    samples = placed_samples(work.tokens, work.ledger)
    plan = plan_caches(work.tokens, work.ledger, samples, check_settings({"cache": cache}))["train"]
    assert found == dataclasses.replace(plan.provenance, files=found.files)
    assert found.files.keys() == work.files().keys() - {"provenance.json"}
    names = sorted(name for name, record in found.files.items() if record.counts)
    assert names == sorted(path.name for path in work.path.glob("shard-*"))
    assert len(names) > 1
    identity = work.tokens.identity
    totals = [found.total(count) for count in ("samples", "tokens", "supervised_tokens")]
    assert totals == [identity[key] for key in ("num_samples", "num_tokens", "supervised_tokens")]


def test_two_runs_in_two_places_give_the_same_bytes(work: Publication, tmp_path: Path) -> None:
    work.publish()
    first = work.files()
    work.publish()
    assert work.files() == first
    other = Publication(shutil.copytree(work.root, tmp_path / "elsewhere"))
    shutil.rmtree(other.path)
    other.publish()
    assert other.files() == first


def test_the_bytes_of_a_cache_are_golden(work: Publication) -> None:
    """If this fails on purpose, raise STAGE_VERSIONS["shards"] and stages/versions.yaml."""
    for number, block in enumerate(work.ledger.blocks):
        tokens = block.num_tokens
        states = torch.arange(tokens * 192).reshape(tokens, 192) % 251 / 8
        hidden, last = states[:, :128].contiguous(), states[:, 128:].contiguous()
        work.doctor_block(number, **{HIDDEN: hidden, LAST_HIDDEN: last})
    work.publish()
    digest = hashlib.sha256()
    for name in ("shard-000000.safetensors", "shard-000001.safetensors", "target_weights.safetensors"):
        digest.update((work.path / name).read_bytes())
    assert digest.hexdigest() == "0d753fd575a4fc8d5ff0a416aed7cab7a3fc2192f50459349fe4e507915bf2b2"


def test_progress_counts_every_token(work: Publication) -> None:
    made: list[Counting] = []

    def make(num_tokens: int) -> Progress:
        made.append(Counting("shards", num_tokens, "tok"))
        return made[-1]

    work.publish(make_progress=make)
    (progress,) = made
    assert progress.total == progress.counted == work.tokens.num_tokens


class Counting(Progress):
    def __init__(self, name: str, total: int, unit: str) -> None:
        super().__init__(name, total, unit)
        self.total, self.counted = total, 0

    def advance(self, units: int) -> None:
        super().advance(units)
        self.counted += units


# Samples that were dropped


def drop_first_sample(work: Publication, block: Block) -> Block:
    """Rewrite a block as capture does when its first sample is not finite."""
    path = work.store.path(block.name)
    content, length = load_file(path), block.lengths[0]
    offsets = torch.tensor([0, *block.lengths[1:]]).cumsum(0)
    hidden, last = content[HIDDEN][length:].clone(), content[LAST_HIDDEN][length:].clone()
    put_tensors(path, {HIDDEN: hidden, LAST_HIDDEN: last, SAMPLE_OFFSETS: offsets})
    specs = feature_specs(len(hidden), len(block.samples) - 1, StatesForm(dtype="fp32", hidden_dim=128, last_dim=64))
    return dataclasses.replace(
        block,
        samples=block.samples[1:],
        lengths=block.lengths[1:],
        num_bytes=file_bytes(specs),
        dropped={block.samples[0]: "layer 1 is not finite"},
    )


def test_dropped_samples_are_left_out_and_recorded(work: Publication) -> None:
    expected = [work.states(index)[1].bfloat16() for index in range(1, 5)]
    dropped = work.ledger.blocks[0].samples[0]
    blocks = (drop_first_sample(work, work.ledger.blocks[0]), *work.ledger.blocks[1:])
    work.ledger = dataclasses.replace(work.ledger, blocks=blocks)
    dataset = work.publish()
    assert len(dataset) == dataset.manifest["num_samples"] == 4  # the conversation that came twice is gone
    for index, rows in enumerate(expected):
        assert torch.equal(dataset[index][LAST_HIDDEN], padded(rows, 64))
        assert torch.equal(dataset[index][INPUT_IDS], padded(work.tokens.input_ids(index + 1).long(), 64, PAD))
    recorded = json.loads((work.path / "provenance.json").read_text())
    assert recorded["capture"]["dropped"] == {dropped: "layer 1 is not finite"}


# Refusals: an earlier cache stays, and no half of a new one appears


def refused(work: Publication, error: type[Exception], runtime: Any = None, **cache: Any) -> str:
    """Publish over a cache, see it refused, and the earlier cache and the blocks untouched."""
    work.publish()
    before, blocks = work.files(), work.block_files()
    with pytest.raises(error) as caught:
        work.publish(runtime={"keep_blocks": False, **(runtime or {})}, **cache)
    assert work.files() == before
    assert work.block_files() == blocks
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "column", "state"),
    [(HIDDEN, 5, "layer 1"), (HIDDEN, 64, "layer 3"), (LAST_HIDDEN, 63, "the last hidden state")],
)
def test_a_value_too_large_for_the_dtype_is_refused_by_sample_and_layer(
    work: Publication, key: str, column: int, state: str
) -> None:
    block = work.ledger.blocks[0]
    states = load_file(work.store.path(block.name))[key]
    states[block.lengths[0], column] = -1e6
    work.doctor_block(0, **{key: states})
    assert refused(work, CaptureError, dtype="fp16") == (
        f"sample 1: {state}, with values up to 1e+06, does not fit into cache.dtype fp16: use cache.dtype: bf16 or fp32"
    )


@pytest.mark.parametrize("value", [3.4e38, 3.38e38])
def test_a_value_that_8_bits_cannot_hold_is_refused(work: Publication, value: float) -> None:
    """The first is no bf16 number; the second is one, and is rounded up out of bf16's range."""
    block = work.ledger.blocks[0]
    states = load_file(work.store.path(block.name))[HIDDEN]
    states[block.lengths[0], 5] = value
    work.doctor_block(0, **{HIDDEN: states})
    with pytest.raises(CaptureError) as error:
        work.publish(dtype="fp8_e4m3", layout="ragged")
    assert str(error.value) == (
        f"sample 1: layer 1, with values up to {value:.6g}, does not fit into cache.dtype fp8_e4m3: "
        "use cache.dtype: bf16 or fp32"
    )


def test_blocks_that_are_gone_are_named_with_the_ways_out(work: Publication) -> None:
    gone = [work.store.path(block.name) for block in work.ledger.blocks]
    gone[0].unlink()
    gone[1].write_bytes(gone[1].read_bytes()[:-1])
    (work.store.folder / "weights.safetensors").unlink()
    with pytest.raises(CacheNotFoundError) as error:
        work.publish()
    assert str(error.value) == (
        f"3 files of captured states in {work.store.folder} are gone or changed, the first: no such file: {gone[0]}; "
        "either revert the param (dvc repro restores the old cache), capture again with dvc repro -f -s capture "
        "&& dvc repro, or make what you need from a published cache with dspark-cache convert"
    )
    assert not work.path.exists()


def test_blocks_that_are_gone_leave_an_earlier_cache(work: Publication) -> None:
    work.publish()
    before = work.files()
    shutil.rmtree(work.store.folder)
    with pytest.raises(CacheNotFoundError, match="are gone or changed"):
        work.publish(dtype="fp32")
    assert work.files() == before


def test_a_ledger_of_other_samples_is_refused(work: Publication) -> None:
    blocks = work.ledger.blocks
    work.publish()
    before = work.files()
    work.ledger = dataclasses.replace(work.ledger, blocks=blocks[:-1])
    with pytest.raises(CacheFormatError, match=r"^sample \d \(\w+\) is in no block of the ledger"):
        work.publish()
    assert work.files() == before


def test_weights_that_are_not_the_ledger_s_are_refused(work: Publication) -> None:
    path = work.store.folder / "weights.safetensors"
    put_tensors(path, {**load_file(path), "lm_head.weight": torch.zeros(1024, 64)})
    with pytest.raises(CacheNotFoundError, match=f"the first: {path} is gone or not the one of the ledger; either"):
        work.publish()
    put_tensors(path, {"embed_tokens.weight": torch.zeros(1024, 63)})
    work.ledger = dataclasses.replace(work.ledger, weights_sha256=file_digest(path))
    with pytest.raises(CacheFormatError, match=r"embed_tokens.weight: expected F32\[1024, 64\], found F32\[1024, 63\]"):
        work.publish()
    assert not work.path.exists()


def test_a_changed_block_is_refused_where_digests_are_checked(work: Publication) -> None:
    block = work.ledger.blocks[1]
    hidden = load_file(work.store.path(block.name))[HIDDEN]
    hidden[0, 0] += 1
    work.doctor_block(1, **{HIDDEN: hidden})
    found = file_digest(work.store.path(block.name))
    assert refused(work, CacheNotFoundError, runtime={"check_blocks": "digest"}).startswith(
        f"1 files of captured states in {work.store.folder} are gone or changed, the first: "
        f"{work.store.path(block.name)}: sha256 is {found}, its record says {block.sha256}; either"
    )


@pytest.mark.parametrize(
    ("cache", "holes"), [({"layout": "padded"}, True), ({"layout": "padded"}, False), ({"layout": "ragged"}, True)]
)
def test_a_disk_too_small_is_refused_before_a_byte_is_written(
    work: Publication, monkeypatch: pytest.MonkeyPatch, cache: dict[str, str], holes: bool
) -> None:
    """What is needed is what shards then take: no holes where the disk has any, no links."""
    usage = shutil.disk_usage(work.root)
    if not holes:
        monkeypatch.setattr("dspark_cache.cache_writer.keeps_holes", lambda _: False)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(SettingsError) as error:
        work.publish(dtype="fp32", shard_bytes=100 * 64 * 3 * 4, **cache)
    found = re.fullmatch(
        rf"(\d+) bytes of cache/ are to be written to {work.root}/\.cache\.building, where 1 are free: make room, use "
        r"cache\.layout: ragged, or set runtime\.check_disk: false",
        str(error.value),
    )
    assert found is not None
    assert not list(work.root.glob(".cache.building"))
    needed = int(found[1])
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed))
    work.publish(dtype="fp32", shard_bytes=100 * 64 * 3 * 4, **cache)
    written = [path.stat() for path in work.path.glob("*.safetensors") if path.stat().st_nlink == 1]
    logical, held = sum(file.st_size for file in written), sum(file.st_blocks * 512 for file in written)
    assert needed <= logical
    assert needed == logical or cache["layout"] == "padded"
    assert (needed == logical) is (cache["layout"] == "ragged" or not holes)
    assert abs(needed - held) < 16 * 4096 * len(written) or not holes
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1))
    work.publish(runtime={"check_disk": False}, dtype="fp32", **cache)


@pytest.mark.parametrize("lock", ["scratch", "cache"])
def test_a_second_writer_is_refused(work: Publication, lock: str) -> None:
    path = {"scratch": work.store.folder / "lock", "cache": work.root / ".cache.building.lock"}[lock]
    with FileLock(path), pytest.raises(LockedError, match=f"is being written by process {os.getpid()} on host "):
        work.publish()
    assert not work.path.exists()


# Scratch, afterwards


@pytest.mark.parametrize("keep_blocks", [True, False])
def test_blocks_stay_until_the_cache_is_verified(work: Publication, keep_blocks: bool) -> None:
    before = {path.name: path.read_bytes() for path in work.store.folder.iterdir() if path.is_file()}
    work.publish(runtime={"keep_blocks": keep_blocks})
    assert {path.name: path.read_bytes() for path in work.store.folder.iterdir() if path.is_file()} == before
    assert len(CachedDSparkDataset(work.path)) == 6


def test_what_a_killed_run_left_is_replaced(work: Publication) -> None:
    left = work.root / ".cache.building"
    (left / "deep").mkdir(parents=True)
    (left / "shard-000009.safetensors").write_text("half")
    (work.root / "cache").mkdir()
    (work.root / "cache" / "old").write_text("x")
    work.publish()
    assert not left.exists()
    assert sorted(work.files()) == [
        "manifest.json",
        "provenance.json",
        "shard-000000.safetensors",
        "shard-000001.safetensors",
        "target_weights.safetensors",
    ]


def test_a_cache_that_is_being_built_is_incomplete(work: Publication) -> None:
    class Looking(Progress):
        def advance(self, units: int) -> None:
            super().advance(units)
            with pytest.raises(CacheFormatError, match="incomplete"):
                CachedDSparkDataset(work.root / ".cache.building")
            assert not work.path.exists()

    work.publish(make_progress=lambda num_bytes: Looking("shards", num_bytes, "B"))
