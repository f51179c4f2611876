"""Second names instead of copies: shards that are a block's file, weights that two caches share, and file systems
that refuse."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache import CachedDSparkDataset, read_manifest
from dspark_cache.blocks import Block, BlockStore
from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import SettingsError, VerificationError
from dspark_cache.files import link_file
from dspark_cache.ledger import read_ledger
from dspark_cache.progress import Progress
from dspark_cache.publish import Captured, publish_cache
from dspark_cache.settings import check_settings
from dspark_cache.tokens import Tokens
from dspark_cache.verify import verify_cache
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS = [1, 3]
ROW_BYTES = 64 * 3 * 4
"""Bytes of a token's states in a block: two layers and the last one, 64 fp32 numbers each."""
LIMIT = 130 * ROW_BYTES
LENGTHS = [16, 64, 16, 64, 64, 64, 64, 64, 28]
BLOCKS = [3, 2, 2, 2]
"""Samples of each block of at most 130 tokens."""
AS_BLOCKS = {"layout": "ragged", "dtype": "fp32", "shard_bytes": LIMIT}
WEIGHTS = "target_weights.safetensors"
OTHER_DISK = Path("/dev/shm")
REFUSALS = [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS]
FAILURES = [errno.EIO, errno.ENOSPC, errno.EACCES]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("links") / "repository"
    target = {"layer_ids": LAYERS, "compute_dtype": "fp32", "block_bytes": LIMIT}
    repository = make_repository(root, num_rows=len(LENGTHS), data={"seq_length": 64}, target=target, cache=AS_BLOCKS)
    repository.run("tokenize", "capture")
    assert Tokens(root / "tokens").offsets.diff().tolist() == LENGTHS
    assert [len(block.samples) for block in records(repository)] == BLOCKS
    return repository


@pytest.fixture
def repository(captured: Repository, tmp_path: Path) -> Repository:
    """A copy of it, in which every file has one name."""
    return Repository(shutil.copytree(captured.root, tmp_path / "repository"))


@pytest.fixture(scope="module")
def split(captured: Repository, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The same, captured with two samples held out."""
    root = tmp_path_factory.mktemp("split") / "repository"
    shutil.copytree(captured.root, root, ignore=shutil.ignore_patterns(".work"))
    repository = Repository(root)
    repository.set_params(data={"eval_samples": 2})
    repository.run("capture")
    return repository


@pytest.fixture
def held_out(split: Repository, tmp_path: Path) -> Repository:
    return Repository(shutil.copytree(split.root, tmp_path / "split"))


def publish(repository: Repository, *, eval_samples: int = 0, scratch: Path | None = None, **cache: Any) -> Path:
    """Publish as the stage does, with shards as large as blocks unless told otherwise."""
    ledger = read_ledger(repository.root / "features.json")
    store = BlockStore(scratch or repository.root / ".work", ledger.identity)
    captured = Captured(tokens=Tokens(repository.root / "tokens"), ledger=ledger, store=store)
    settings = check_settings({"data": {"eval_samples": eval_samples}, "cache": {**AS_BLOCKS, **cache}})
    publish_cache(captured, settings, repository.root / "cache", lambda total: Progress("shards", total, "tok"))
    return repository.root / "cache"


def records(repository: Repository) -> list[Block]:
    """Return what the ledger records, in the order of the samples."""
    keys = Tokens(repository.root / "tokens").keys()
    return sorted(read_ledger(repository.root / "features.json").blocks, key=lambda block: keys.index(block.samples[0]))


def blocks(repository: Repository) -> list[Path]:
    """Return the blocks' files that are there, in the order of the samples."""
    (folder,) = repository.scratch_folders()
    paths = [folder / f"{block.name}.safetensors" for block in records(repository)]
    assert set(folder.glob("block-*.safetensors")) <= set(paths)
    return [path for path in paths if path.exists()]


def shards(cache: Path) -> list[Path]:
    return sorted(cache.glob("shard-*"))


def content(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir()}


def linked(cache: Path) -> list[bool]:
    """Say of each shard whether it has a second name; no other file of a cache without held-out samples has one."""
    assert {path.stat().st_nlink for path in cache.iterdir() if path not in shards(cache)} == {1}
    return [path.stat().st_nlink == 2 for path in shards(cache)]


def assert_recorded(cache: Path) -> None:
    """Compare size and digest of every file with what provenance says."""
    recorded = json.loads((cache / "provenance.json").read_text())["files"]
    for name, record in recorded.items():
        found = (cache / name).read_bytes()
        assert (record["bytes"], record["sha256"]) == (len(found), hashlib.sha256(found).hexdigest()), name
    assert recorded.keys() == content(cache).keys() - {"provenance.json"}


class Refusing:
    """Stands for os.link on a file system that refuses from the call number `first` on."""

    def __init__(self, code: int, first: int = 0) -> None:
        self.code, self.first, self.calls = code, first, 0
        self._link = os.link

    def __call__(self, source: Any, target: Any, **options: Any) -> None:
        self.calls += 1
        if self.calls > self.first:
            raise OSError(self.code, os.strerror(self.code), str(source), None, str(target))
        self._link(source, target, **options)


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "linked" in record.getMessage()]


# Shards


def test_a_shard_is_the_file_of_the_block_with_its_samples(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    before = [path.read_bytes() for path in blocks(repository)]
    cache = publish(repository)
    recorded = json.loads((cache / "provenance.json").read_text())["files"]
    for shard, path, block in zip(shards(cache), blocks(repository), records(repository), strict=True):
        assert shard.stat().st_ino == path.stat().st_ino
        assert shard.stat().st_nlink == 2
        assert recorded[shard.name]["sha256"] == block.sha256
        assert recorded[shard.name]["tokens"] == block.num_tokens
    assert linked(cache) == [True] * len(BLOCKS)
    assert [path.read_bytes() for path in blocks(repository)] == before
    assert_recorded(cache)
    assert messages(caplog) == []
    repository.run("verify")


def test_only_a_shard_with_exactly_a_block_s_samples_is_linked(repository: Repository) -> None:
    whole = {block.samples for block in read_ledger(repository.root / "features.json").blocks}
    for tokens, links in ((1, 0), (92, 1), (96, 2), (128, 4), (159, 4), (160, 0), (10**6, 0)):
        cache = publish(repository, shard_bytes=tokens * ROW_BYTES)
        keys, expected = Tokens(repository.root / "tokens").keys(), []
        for count in read_manifest(cache)["shard_samples"]:
            expected.append(tuple(keys[:count]) in whole)
            keys = keys[count:]
        assert linked(cache) == expected
        assert sum(expected) == links
        assert_recorded(cache)


@pytest.mark.parametrize(
    "cache",
    [
        {"dtype": "bf16", "shard_bytes": LIMIT // 2},
        {"dtype": "fp16", "shard_bytes": LIMIT // 2},
        {"dtype": "fp8_e4m3", "shard_bytes": 130 * (64 * 3 + 3 * 4)},
        {"layout": "padded", "shard_size": 3},
        {"layout": "padded", "shard_size": "auto"},
    ],
)
def test_nothing_is_linked_in_another_form_though_the_samples_are_a_block_s(
    repository: Repository, cache: dict[str, Any]
) -> None:
    made = publish(repository, **cache)
    assert read_manifest(made).get("shard_samples", BLOCKS) == BLOCKS
    assert not any(linked(made))
    inodes = {path.stat().st_ino for path in blocks(repository)}
    assert inodes.isdisjoint(path.stat().st_ino for path in made.iterdir())
    assert_recorded(made)


def test_a_conversation_that_comes_again_is_copied_in_its_shard(repository: Repository) -> None:
    rows = repository.root / "inputs/data/conversations.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines, lines[0]]))
    repository.run("tokenize", "capture")
    cache = publish(repository)
    assert read_manifest(cache)["shard_samples"] == [3, 2, 2, 3]
    assert linked(cache) == [True, True, True, False]
    assert_recorded(cache)


def test_a_cache_that_is_replaced_leaves_the_blocks_as_they_are(repository: Repository) -> None:
    before = [path.read_bytes() for path in blocks(repository)]
    first = content(publish(repository))
    publish(repository, dtype="bf16")
    assert [path.stat().st_nlink for path in blocks(repository)] == [1] * len(BLOCKS)
    assert [path.read_bytes() for path in blocks(repository)] == before
    again = publish(repository)
    assert linked(again) == [True] * len(BLOCKS)
    assert content(again) == first


def test_a_cache_stays_whole_where_blocks_are_not_kept(repository: Repository) -> None:
    repository.set_params(runtime={"keep_blocks": False})
    cache = publish(repository)
    before = content(cache)
    assert len(blocks(repository)) == len(BLOCKS)
    repository.run("verify")
    assert blocks(repository) == []
    assert content(cache) == before
    assert linked(cache) == [False] * len(BLOCKS)
    assert verify_cache(CacheFolder(cache), "supervision").findings == []
    assert [len(CachedDSparkDataset(cache, padded=False)[index]["input_ids"]) for index in range(9)] == LENGTHS


def test_a_block_that_was_changed_keeps_the_digest_it_had(repository: Repository) -> None:
    """A copy would get a digest of what it is; a link has the one of the capture, which tells."""
    path = blocks(repository)[1]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    publish(repository)
    with pytest.raises(VerificationError, match=r"has 1 finding.*\n  \[bytes\] shard-000001\.safetensors: sha256 is "):
        repository.run("verify")


# File systems that refuse


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM])
def test_where_links_are_refused_shards_are_copied_and_the_log_says_so_once(
    repository: Repository, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(publish(repository))
    caplog.set_level("INFO")
    refusing = Refusing(code)
    monkeypatch.setattr("dspark_cache.files.os.link", refusing)
    cache = publish(repository)
    assert refusing.calls == 1
    assert linked(cache) == [False] * len(BLOCKS)
    assert content(cache) == expected
    building = cache.with_name(".cache.building")
    assert messages(caplog) == [f"{blocks(repository)[0]} cannot be linked into {building}: states are copied"]


def test_a_real_second_file_system_gets_copies(
    repository: Repository, other_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = content(publish(repository))
    caplog.set_level("INFO")
    shutil.copytree(repository.root / ".work", other_disk / "scratch")
    cache = publish(repository, scratch=other_disk / "scratch")
    assert content(cache) == expected
    assert linked(cache) == [False] * len(BLOCKS)
    (message,) = messages(caplog)
    assert message.startswith(f"{other_disk / 'scratch'}/capture-")
    building = cache.parent / ".cache.building"
    assert message.endswith(f"/{blocks(repository)[0].name} cannot be linked into {building}: states are copied")


def test_room_is_asked_for_what_cannot_be_linked(
    repository: Repository, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = publish(repository)
    sizes = {path.name: path.stat().st_size for path in cache.glob("*.safetensors")}
    shutil.rmtree(cache)
    shutil.copytree(repository.root / ".work", other_disk / "scratch")
    usage = shutil.disk_usage(cache.parent)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(SettingsError, match=f"^{sum(sizes.values())} bytes of cache/ "):
        publish(repository, scratch=other_disk / "scratch")
    copied = sum(size for name, size in sizes.items() if not name.startswith("shard-"))
    with pytest.raises(SettingsError, match=f"^{copied} bytes of cache/ "):
        publish(repository)


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    if not OTHER_DISK.is_dir() or OTHER_DISK.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    with tempfile.TemporaryDirectory(dir=OTHER_DISK) as folder:
        yield Path(folder)


def test_shards_that_were_linked_before_a_refusal_stay_links(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = content(publish(repository))
    shutil.rmtree(repository.root / "cache")
    monkeypatch.setattr("dspark_cache.files.os.link", Refusing(errno.EMLINK, first=2))
    cache = publish(repository)
    assert linked(cache) == [True, True, False, False]
    assert content(cache) == expected


def test_another_error_is_raised_and_the_earlier_cache_stays(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = publish(repository, dtype="bf16")
    before = content(cache)
    monkeypatch.setattr("dspark_cache.files.os.link", Refusing(errno.EIO, first=1))
    with pytest.raises(OSError, match=re.escape(blocks(repository)[1].name)) as error:
        publish(repository)
    assert error.value.errno == errno.EIO
    assert content(cache) == before
    assert not cache.with_name(".cache.building").exists()
    assert [path.stat().st_nlink for path in blocks(repository)] == [1] * len(BLOCKS)


@pytest.mark.parametrize(("code", "is_refusal"), [(code, code in REFUSALS) for code in (*REFUSALS, *FAILURES)])
def test_only_some_errors_say_that_links_are_not_allowed(
    tmp_path: Path, code: int, is_refusal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_cache.files.os.link", Refusing(code))
    if is_refusal:
        assert link_file(tmp_path / "a", tmp_path / "b") is False
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            link_file(tmp_path / "a", tmp_path / "b")


def test_a_link_at_the_source_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    assert link_file(tmp_path / "link", tmp_path / "second")
    assert (tmp_path / "second").is_symlink()
    with pytest.raises(FileExistsError):
        link_file(tmp_path / "file", tmp_path / "second")


# What is held out


def test_the_shards_of_both_parts_are_blocks(held_out: Repository) -> None:
    cache = publish(held_out, eval_samples=2)
    evaluated = held_out.root / "cache-eval"
    names = [*shards(evaluated), *shards(cache)]
    assert [path.stat().st_ino for path in names] == [path.stat().st_ino for path in blocks(held_out)]
    assert len(shards(evaluated)) == 1
    assert_recorded(cache)
    assert_recorded(evaluated)
    held_out.run("verify")


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_both_parts_share_one_file_of_weights(held_out: Repository, layout: str) -> None:
    cache = publish(held_out, eval_samples=2, layout=layout, dtype="bf16")
    evaluated = held_out.root / "cache-eval"
    status = (cache / WEIGHTS).stat()
    assert status.st_nlink == 2
    assert (evaluated / WEIGHTS).stat().st_ino == status.st_ino
    assert_recorded(cache)
    assert_recorded(evaluated)
    shutil.rmtree(cache)
    assert verify_cache(CacheFolder(evaluated), "values").findings == []


def test_weights_are_copied_where_links_are_refused(held_out: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_cache.files.os.link", Refusing(errno.EPERM))
    cache = publish(held_out, eval_samples=2)
    evaluated = held_out.root / "cache-eval"
    for path in (*cache.iterdir(), *evaluated.iterdir()):
        assert path.stat().st_nlink == 1, path
    assert (evaluated / WEIGHTS).read_bytes() == (cache / WEIGHTS).read_bytes()
    assert_recorded(cache)
    assert_recorded(evaluated)


def test_weights_that_cannot_be_linked_for_another_reason_stop_the_run(
    held_out: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_cache.files.os.link", Refusing(errno.EIO))
    with pytest.raises(OSError, match=rf"cache/{WEIGHTS}") as error:
        publish(held_out, eval_samples=2, dtype="bf16")
    assert error.value.errno == errno.EIO
    assert not (held_out.root / "cache-eval").exists()
