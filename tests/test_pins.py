"""What an open dataset holds on to: a cache that is replaced in mid-epoch is refused, the same bytes are not."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CachedDSparkDataset, read_manifest, write_shard
from dspark_cache.dtypes import TensorSpec
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.offline_cache import CachedTensorDataset
from dspark_cache.pins import folder_digest
from dspark_cache.provenance import MAX_PROVENANCE_BYTES
from dspark_cache.ragged import samples_name
from dspark_cache.reader import ensure_sample_fits, sample_specs
from dspark_cache.schema import INPUT_IDS, LAST_HIDDEN, LOSS_MASK
from dspark_cache.shard_file import ShardFile
from dspark_cache.shards import shard_name
from tests.caches import change_content, equal, make_ragged, record_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeCache = Callable[..., Path]


@pytest.fixture
def cache(make_cache: MakeCache) -> Path:
    """A recorded cache of three shards of two samples."""
    folder = make_cache(6, 2)
    record_files(folder)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files whose bytes are hashed from now on."""
    names: list[str] = []
    sha256 = ShardFile.sha256

    def count(file: ShardFile) -> str:
        names.append(os.path.basename(file.name))  # noqa: PTH119 - a name in a message, not a path
        return sha256(file)

    monkeypatch.setattr(ShardFile, "sha256", count)
    return names


def replace(path: Path, content: bytes | None = None) -> None:
    """Put another file in the place of one, as a checkout does; without `content`, with the same bytes."""
    with put_file(path) as temporary:
        temporary.write_bytes(path.read_bytes() if content is None else content)


def other_states(path: Path) -> None:
    """Replace a shard by one of the same size, made from another target."""
    tensors = load_file(path)
    tensors[LAST_HIDDEN] = tensors[LAST_HIDDEN] * 2
    write_shard(path.parent, int(path.name[6:12]), tensors)


def read_all(dataset: CachedDSparkDataset) -> list[dict[str, torch.Tensor]]:
    return [dataset[index] for index in range(len(dataset))]


def refusal(dataset: CachedDSparkDataset, index: int) -> str:
    with pytest.raises(CacheFormatError) as caught:
        dataset[index]
    return str(caught.value)


# Files that are the same


def test_the_very_files_are_opened_again_without_hashing_them(cache: Path, hashed: list[str]) -> None:
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    expected = read_all(dataset)
    assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))
    assert hashed == []


def test_the_same_bytes_in_another_file_are_accepted_and_hashed_once(cache: Path, hashed: list[str]) -> None:
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    expected = read_all(dataset)
    replace(cache / shard_name(1))
    for _ in range(3):
        assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))
    assert hashed == [shard_name(1)]
    replace(cache / shard_name(1))
    read_all(dataset)
    assert hashed == [shard_name(1)] * 2


def test_a_file_of_another_time_is_hashed(cache: Path, hashed: list[str]) -> None:
    path = cache / shard_name(2)
    dataset = CachedDSparkDataset(cache)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert equal(dataset[4], CachedDSparkDataset(cache)[4])
    assert hashed == [shard_name(2)]


def test_a_whole_checkout_of_the_same_cache_is_accepted(cache: Path, tmp_path: Path, hashed: list[str]) -> None:
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    expected = read_all(dataset)
    shutil.copytree(cache, tmp_path / "checkout")
    cache.rename(tmp_path / "aside")
    (tmp_path / "checkout").rename(cache)
    assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))
    assert sorted(hashed) == [shard_name(0), shard_name(1), shard_name(2)]


def test_a_file_that_is_held_open_is_read_though_another_is_in_its_place(cache: Path, hashed: list[str]) -> None:
    dataset = CachedDSparkDataset(cache)
    expected = dataset[3]
    other_states(cache / shard_name(1))
    assert equal(dataset[3], expected)
    assert hashed == []


def test_very_files_are_read_on_though_another_manifest_came(cache: Path) -> None:
    """Nothing foreign can be read from them; the next file that is another one tells."""
    dataset = CachedDSparkDataset(cache)
    expected = read_all(CachedDSparkDataset(cache))
    replace(cache / "manifest.json", (cache / "manifest.json").read_bytes() + b"\n")
    assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))


# Files that are others


def test_other_bytes_are_refused_every_time(cache: Path, hashed: list[str]) -> None:
    path = cache / shard_name(1)
    dataset = CachedDSparkDataset(cache)
    expected = dataset[0]
    other_states(path)
    for count in (1, 2):
        assert refusal(dataset, 3) == (
            f"{cache} was changed while it was in use: {path} is another file with another sha256 than provenance.json "
            "records; open the cache again"
        )
        assert hashed == [shard_name(1)] * count
    assert equal(dataset[0], expected)
    assert len(dataset._open_handles) == 1
    assert not equal(CachedDSparkDataset(cache)[3], expected)


@pytest.mark.parametrize("recorded", [False, True])
def test_another_file_without_a_recorded_digest_is_refused(make_cache: MakeCache, recorded: bool) -> None:
    """Also one with the same bytes: nobody can tell."""
    cache = make_cache(6, 2)
    if recorded:
        record_files(cache)
        change_content(cache, lambda content: content["files"].pop(shard_name(1)))
    dataset = CachedDSparkDataset(cache)
    replace(cache / shard_name(1))
    assert refusal(dataset, 2) == (
        f"{cache} was changed while it was in use: {cache / shard_name(1)} is another file with no recorded sha256 to "
        "compare; open the cache again"
    )
    assert len(dataset[0]) == len(dataset[4]) == 4


def drop(path: Path) -> None:
    path.unlink()


def add_space(path: Path) -> None:
    replace(path, path.read_bytes() + b"\n")


def relabel(path: Path) -> None:
    """Change a file that says how many samples there are, keeping its size."""
    content = path.read_bytes()
    replace(path, content.replace(b'"shuffle_seed": 42', b'"shuffle_seed": 43').replace(b'"seed": 42', b'"seed": 43'))


def enlarge(path: Path) -> None:
    """Let a file grow so large that it is never read."""
    os.truncate(path, MAX_PROVENANCE_BYTES + 1)


@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
@pytest.mark.parametrize("change", [drop, add_space, relabel, enlarge])
def test_another_manifest_or_provenance_is_refused_with_the_first_other_file(
    cache: Path, hashed: list[str], name: str, change: Callable[[Path], None]
) -> None:
    dataset = CachedDSparkDataset(cache)
    change(cache / name)
    replace(cache / shard_name(1))
    assert refusal(dataset, 2) == (
        f"{cache} was replaced while it was in use: manifest.json or provenance.json is another; open the cache again"
    )
    assert hashed == []
    assert len(dataset[0]) == 4


def test_another_cache_of_the_same_shape_is_never_mixed_in(make_cache: MakeCache, hashed: list[str]) -> None:
    cache, other = make_cache(6, 2), make_cache(6, 2)
    for number in range(3):
        other_states(other / shard_name(number))
    record_files(cache)
    record_files(other)
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    read_all(dataset)
    cache.rename(cache.with_name("aside"))
    other.rename(cache)
    assert [refusal(dataset, index).split(":")[0] for index in range(4)] == [
        f"{cache} was replaced while it was in use"
    ] * 4
    assert hashed == []


def test_a_digest_tells_which_file_has_which_bytes(tmp_path: Path) -> None:
    """What moves from one file to the other, or is empty instead of absent, gives another digest."""
    manifest, provenance = tmp_path / "manifest.json", tmp_path / "provenance.json"
    digests = [folder_digest(tmp_path)]
    for first, second in [("", None), (None, ""), ("", ""), ("ab", ""), ("a", "b"), ("", "ab"), ("ab", None)]:
        for path, text in ((manifest, first), (provenance, second)):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        digests.append(folder_digest(tmp_path))
    assert len(set(digests)) == len(digests) == 8
    assert folder_digest(tmp_path) == digests[-1]


def test_a_file_too_large_is_never_read_but_its_size_counts(tmp_path: Path) -> None:
    path = tmp_path / "provenance.json"
    digests = []
    for start, size in [
        (b"a", MAX_PROVENANCE_BYTES + 1),
        (b"b", MAX_PROVENANCE_BYTES + 1),
        (b"b", MAX_PROVENANCE_BYTES + 2),
    ]:
        path.write_bytes(start)
        os.truncate(path, size)
        digests.append(folder_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_what_is_no_regular_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    assert folder_digest(tmp_path) == folder_digest(tmp_path / "nowhere")


# Files that cannot be opened any more


def test_a_gone_shard_is_explained(cache: Path) -> None:
    path = cache / shard_name(1)
    dataset = CachedDSparkDataset(cache)
    path.unlink()
    with pytest.raises(CacheNotFoundError) as caught:
        dataset[2]
    assert str(caught.value) == f"{cache} was changed while it was in use: no such file: {path}; open it again"


def test_a_shard_of_another_shape_is_explained(cache: Path, hashed: list[str]) -> None:
    path = cache / shard_name(1)
    dataset = CachedDSparkDataset(cache)
    os.truncate(path, path.stat().st_size - 1)
    assert re.fullmatch(
        f"{re.escape(str(cache))} was changed while it was in use: {re.escape(str(path))} has \\d+ bytes, its header "
        "asks for \\d+; open it again",
        refusal(dataset, 2),
    )
    assert hashed == []


def test_a_shard_that_became_a_link_out_of_the_cache_is_refused(cache: Path, tmp_path: Path) -> None:
    path = cache / shard_name(1)
    dataset = CachedDSparkDataset(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert refusal(dataset, 2) == (
        f"{cache} was changed while it was in use: {path} is a link to {tmp_path / 'elsewhere'}: a cache holds files, "
        "copy it there; open it again"
    )


# Changes during the opening


@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
def test_a_cache_that_is_replaced_while_it_is_opened_is_refused(cache: Path, name: str) -> None:
    class Replaced(CachedDSparkDataset):
        def _read_manifest(self, *arguments: Any) -> dict[str, Any]:
            manifest = super()._read_manifest(*arguments)
            add_space(cache / name)
            return manifest

    with pytest.raises(CacheFormatError, match=r"was replaced while it was in use: manifest\.json or provenance\.json"):
        Replaced(cache)
    assert len(CachedDSparkDataset(cache)) == 6


# Layouts and other kinds of caches


@pytest.mark.parametrize("name", [shard_name(1), samples_name(1)])
def test_both_files_of_a_ragged_shard_are_pinned(make_cache: MakeCache, hashed: list[str], name: str) -> None:
    cache = make_ragged(make_cache(6, 2), [3, 1, 2])
    record_files(cache)
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    expected = read_all(dataset)
    replace(cache / name)
    assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))
    assert all(equal(*pair) for pair in zip(read_all(dataset), expected, strict=True))
    assert hashed == [name]
    content = bytearray((cache / name).read_bytes())
    place = ShardFile(cache / name).places[LAST_HIDDEN if name == shard_name(1) else INPUT_IDS]
    content[place.offset] ^= 1
    replace(cache / name, bytes(content))
    assert refusal(dataset, 3) == (
        f"{cache} was changed while it was in use: {cache / name} is another file with another sha256 than "
        "provenance.json records; open the cache again"
    )
    assert equal(dataset[2], expected[2])
    assert equal(dataset[4], expected[4])


def test_caches_of_other_keys_are_pinned_too(cache: Path, hashed: list[str]) -> None:
    dataset = CachedTensorDataset(cache, "EAGLE-3", 1, (LAST_HIDDEN,))
    expected = dataset[1]
    replace(cache / shard_name(1))
    assert list(dataset[2]) == list(expected) == [LAST_HIDDEN]
    assert hashed == [shard_name(1)]
    other_states(cache / shard_name(2))
    with pytest.raises(CacheFormatError, match=r"is another file with another sha256 than provenance\.json "):
        dataset[4]


# Other processes


def transfer(dataset: CachedDSparkDataset) -> CachedDSparkDataset:
    copied: CachedDSparkDataset = pickle.loads(pickle.dumps(dataset))
    return copied


def test_a_pickled_dataset_keeps_the_pin(cache: Path, hashed: list[str]) -> None:
    """A worker that starts after the cache was replaced refuses it as the first process does."""
    dataset = CachedDSparkDataset(cache)
    expected = dataset[2]
    state = pickle.dumps(dataset)
    replace(cache / shard_name(1))
    assert equal(pickle.loads(state)[2], expected)
    assert hashed == [shard_name(1)]
    other_states(cache / shard_name(1))
    assert "is another file with another sha256" in refusal(pickle.loads(state), 2)
    replace(cache / "manifest.json", b"{}")
    assert "was replaced while it was in use" in refusal(pickle.loads(state), 2)


def test_a_file_that_was_accepted_is_accepted_by_later_copies(cache: Path, hashed: list[str]) -> None:
    dataset = CachedDSparkDataset(cache, max_open_files=1)
    replace(cache / shard_name(1))
    expected = dataset[2]
    assert equal(transfer(dataset)[2], expected)
    assert hashed == [shard_name(1)]


# Samples larger than the memory


def give_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    sizes = {"SC_PAGE_SIZE": 2, "SC_PHYS_PAGES": size // 2}
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name] if name in sizes else sysconf(name))


def test_a_sample_may_be_as_large_as_the_memory_and_no_larger(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(3, 2)
    size = sum(spec.num_bytes for spec in sample_specs(read_manifest(cache)).values())
    assert size == 8 * (8 + 8 + 2 * 8 + 2 * 4)
    give_memory(monkeypatch, size)
    assert len(CachedDSparkDataset(cache)[2]) == 4
    give_memory(monkeypatch, size - 2)
    with pytest.raises(CacheFormatError) as caught:
        CachedDSparkDataset(cache)
    assert str(caught.value) == (
        f"{cache}: a sample has {size} bytes by the manifest, more than the {size - 2} of this machine's memory"
    )


def test_a_sample_of_a_cache_without_a_full_manifest_is_measured_by_its_first_shard(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(3, 2)
    give_memory(monkeypatch, 64)
    assert len(CachedTensorDataset(cache, "EAGLE-3", 1, (INPUT_IDS,))) == 3
    with pytest.raises(CacheFormatError, match="a sample has 128 bytes by the manifest, more than the 64 "):
        CachedTensorDataset(cache, "EAGLE-3", 1, (INPUT_IDS, LOSS_MASK))


def test_a_ragged_cache_of_huge_windows_is_refused_before_it_is_read(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are small and fit the manifest; only padding to the window would fill the memory."""
    cache = make_ragged(make_cache(3, 2), [3])
    path = cache / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "seq_length": 1 << 12}))
    assert CachedDSparkDataset(cache)[0][INPUT_IDS].shape == (1 << 12,)
    path.write_text(json.dumps({**manifest, "seq_length": 1 << 31}))
    give_memory(monkeypatch, 1 << 36)
    with pytest.raises(CacheFormatError) as caught:
        CachedDSparkDataset(cache)
    assert str(caught.value) == (
        f"{cache}: a sample has {40 << 31} bytes by the manifest, more than the {1 << 36} of this machine's memory"
    )


def test_the_memory_of_this_machine_is_asked_for() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ensure_sample_fits({"a": TensorSpec(dtype=torch.uint8, shape=(memory - 2,)), "b": byte_spec(2)}, "cache")
    ensure_sample_fits({}, "cache")
    with pytest.raises(CacheFormatError, match=f"^cache: a sample has {memory + 1} bytes by the manifest, "):
        ensure_sample_fits({"a": TensorSpec(dtype=torch.uint8, shape=(memory - 2,)), "b": byte_spec(3)}, "cache")


def byte_spec(size: int) -> TensorSpec:
    return TensorSpec(dtype=torch.uint8, shape=(size,))
