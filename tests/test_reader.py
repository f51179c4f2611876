"""Reading a cache: any index, any worker, few open files, and nothing foreign gets past the opening."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import (
    CACHE_KEYS,
    CachedDSparkDataset,
    CacheFormatError,
    CacheNotFoundError,
    SettingsError,
    build_cached_dspark_dataloader,
    write_shard,
)
from dspark_cache.offline_cache import CachedTensorDataset, write_manifest, write_tensor_shard
from tests.caches import make_ragged, record_files

if TYPE_CHECKING:
    from collections.abc import Callable

    MakeCache = Callable[..., Path]
    Sample = dict[str, torch.Tensor]

GOLDEN = Path(__file__).parent / "data" / "golden" / "cases" / "q3-one-sample" / "cache"


def shard(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:06d}.safetensors"


def samples_of(folder: Path) -> list[Sample]:
    """Read all samples by safetensors' own reader."""
    shards = [load_file(path) for path in sorted(folder.glob("shard-*"))]
    return [
        {key: tensors[key][row] for key in tensors} for tensors in shards for row in range(len(tensors["input_ids"]))
    ]


def equal(found: Sample, expected: Sample) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected
    )


def open_files(folder: Path) -> list[str]:
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sorted(link.name for link in links if link.parent == folder)


# --- items ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("num_samples", "shard_size"), [(1, 1), (5, 1), (5, 2), (6, 3), (4, 9)])
def test_every_sample_is_read_as_written(make_cache: MakeCache, num_samples: int, shard_size: int, dtype: str) -> None:
    folder = make_cache(num_samples, shard_size, dtype=dtype)
    expected = samples_of(folder)
    dataset = CachedDSparkDataset(folder)
    assert len(dataset) == len(expected) == num_samples
    for index in range(num_samples):
        assert equal(dataset[index], expected[index])
        assert equal(dataset[index - num_samples], expected[index])
    assert all(equal(*pair) for pair in zip(dataset, expected, strict=True))  # type: ignore[call-overload]
    assert tuple(dataset[0]) == CACHE_KEYS
    assert list(dataset[0]["target_hidden_states"].shape) == [8, 8]


@pytest.mark.parametrize("index", [np.int64(2), np.uint8(2), np.array(2), torch.tensor(2)])
def test_other_integers_are_indices(make_cache: MakeCache, index: Any) -> None:
    folder = make_cache(3, 2)
    assert equal(CachedDSparkDataset(folder)[index], samples_of(folder)[2])


def test_true_is_one(make_cache: MakeCache) -> None:
    folder = make_cache(3, 2)
    assert equal(CachedDSparkDataset(folder)[True], samples_of(folder)[1])


@pytest.mark.parametrize("index", [3, -4, 1 << 70, np.int64(3)])
def test_an_index_outside_is_refused(make_cache: MakeCache, index: int) -> None:
    with pytest.raises(IndexError, match=f"^sample {index} of a cache of 3$"):
        CachedDSparkDataset(make_cache(3, 2))[index]


@pytest.mark.parametrize("index", [1.0, "1", None, slice(0, 1), [0], np.array([0, 1])])
def test_what_is_no_integer_is_a_type_error(make_cache: MakeCache, index: Any) -> None:
    dataset = CachedDSparkDataset(make_cache(3, 2))
    with pytest.raises(TypeError):
        dataset[index]


def test_items_have_memory_of_their_own(make_cache: MakeCache) -> None:
    folder = make_cache(4, 4)
    dataset = CachedDSparkDataset(folder)
    item = dataset[1]
    for tensor in item.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        tensor.fill_(1)
    assert equal(dataset[1], samples_of(folder)[1])


def test_an_empty_cache_has_no_samples(make_cache: MakeCache) -> None:
    dataset = CachedDSparkDataset(make_cache(0, 2))
    assert len(dataset) == 0
    assert list(dataset) == []  # type: ignore[call-overload]
    for index in (0, -1):
        with pytest.raises(IndexError, match=f"^sample {index} of a cache of 0$"):
            dataset[index]


def test_opening_reads_headers_only_and_keeps_no_file_open(make_cache: MakeCache) -> None:
    folder = make_cache(6, 2)
    (folder / "target_weights.safetensors").unlink()
    dataset = CachedDSparkDataset(str(folder))
    assert open_files(folder) == []
    assert len(dataset._open_handles) == 0


# --- caches of other producers ----------------------------------------------------------------------------------


def test_a_cache_of_the_reference_opens() -> None:
    dataset = CachedDSparkDataset(GOLDEN)
    assert len(dataset) == 1
    assert equal(dataset[0], samples_of(GOLDEN)[0])
    assert dataset.manifest["target_model_type"] == "qwen3"


def test_a_minimal_manifest_is_enough(make_cache: MakeCache) -> None:
    folder = make_cache(5, 2)
    write_manifest(folder, {"num_samples": 5, "shard_size": 2}, 1)
    dataset = CachedDSparkDataset(folder)
    assert all(equal(*pair) for pair in zip(dataset, samples_of(folder), strict=True))  # type: ignore[call-overload]


def test_keys_beyond_the_contract_s_are_left_alone(make_cache: MakeCache) -> None:
    folder = make_cache(3, 2)
    tensors = load_file(shard(folder, 0))
    save_file(tensors | {"more": torch.ones(2, 3)}, shard(folder, 0))
    assert tuple(CachedDSparkDataset(folder)[0]) == CACHE_KEYS


EAGLE_KEYS = ("input_ids", "length", "aux_hidden_states", "scores")


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    """Return a cache of other keys, dtypes, order and version, and of no DSpark field."""
    folder = tmp_path / "eagle"
    for index, rows in enumerate((3, 3, 1)):
        tensors = {
            "input_ids": torch.arange(rows * 5).reshape(rows, 5).to(torch.int32) + 100 * index,
            "length": torch.arange(rows) + 10 * index,
            "aux_hidden_states": torch.randn(rows, 5, 2, 3).half(),
            "scores": torch.randn(rows, 5, dtype=torch.float64),
        }
        write_tensor_shard(folder, index, tensors, EAGLE_KEYS, "EAGLE-3")
    write_manifest(folder, {"num_samples": 7, "shard_size": 3, "dtype": 16}, 4)
    return folder


def test_a_generic_cache_has_its_own_keys_and_version(eagle: Path) -> None:
    dataset = CachedTensorDataset(eagle, "EAGLE-3", 4, EAGLE_KEYS)
    expected = samples_of(eagle)
    assert all(equal(*pair) for pair in zip(dataset, expected, strict=True))  # type: ignore[call-overload]
    assert tuple(dataset[0]) == EAGLE_KEYS
    assert dataset[4]["length"].shape == ()
    part = CachedTensorDataset(eagle, "EAGLE-3", 4, ("scores",))
    assert list(part[6]) == ["scores"]


@pytest.mark.parametrize(
    ("version", "keys", "message"),
    [
        (3, EAGLE_KEYS, "format_version is 4, this reader of EAGLE-3 caches knows 3"),
        (
            4,
            ("input_ids", "x", "y"),
            "shard-000000.safetensors: missing required keys ['x', 'y'], keys without samples []",
        ),
    ],
)
def test_a_generic_cache_of_another_kind_is_refused(
    eagle: Path, version: int, keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CacheFormatError, match=re.escape(message) + "$"):
        CachedTensorDataset(eagle, "EAGLE-3", version, keys)


def test_a_generic_cache_without_samples_in_a_key_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.tensor(1.0)}, shard(tmp_path, 0))
    write_manifest(tmp_path, {"num_samples": 1, "shard_size": 1}, 4)
    with pytest.raises(CacheFormatError, match=r"missing required keys \[\], keys without samples \['a'\]$"):
        CachedTensorDataset(tmp_path, "EAGLE-3", 4, ("a",))


def test_a_generic_cache_s_shards_must_be_alike(eagle: Path) -> None:
    tensors = load_file(shard(eagle, 2))
    save_file(tensors | {"scores": tensors["scores"].float()}, shard(eagle, 2))
    message = f"{shard(eagle, 2)}: scores: expected F64[1, 5], found F32[1, 5]"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        CachedTensorDataset(eagle, "EAGLE-3", 4, EAGLE_KEYS)


@pytest.mark.parametrize("missing", ["num_samples", "shard_size"])
def test_a_manifest_without_sizes_is_refused(eagle: Path, missing: str) -> None:
    sizes = {"num_samples": 7, "shard_size": 3}
    del sizes[missing]
    write_manifest(eagle, sizes, 4)
    with pytest.raises(CacheFormatError, match=f"manifest.json: missing required keys \\['{missing}'\\]$"):
        CachedTensorDataset(eagle, "EAGLE-3", 4, EAGLE_KEYS)


# --- refused at open --------------------------------------------------------------------------------------------


def rewrite(folder: Path, index: int, change: Callable[[Sample], Sample]) -> None:
    write_shard(folder, index, change(load_file(shard(folder, index))))


def set_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shard(folder, 1).unlink()
        make(shard(folder, 1))

    return change


DOCTORED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "shard missing": (lambda f: shard(f, 1).unlink(), r"missing shard indices \[1\], unexpected shard indices \[\]$"),
    "shard too many": (
        lambda f: shutil.copy(shard(f, 0), shard(f, 3)),
        r"missing shard indices \[\], unexpected shard indices \[3\]$",
    ),
    "short of rows": (
        lambda f: rewrite(f, 1, lambda t: {k: v[:1] for k, v in t.items()}),
        r"shard-000001.safetensors: input_ids: expected I64\[2, 8\], found I64\[1, 8\]; loss_mask: ",
    ),
    "too many rows": (
        lambda f: rewrite(f, 2, lambda t: {k: torch.cat([v, v]) for k, v in t.items()}),
        r"shard-000002.safetensors: input_ids: expected I64\[1, 8\], found I64\[2, 8\]; ",
    ),
    "wrong dtype of states": (
        lambda f: rewrite(f, 1, lambda t: t | {"target_hidden_states": t["target_hidden_states"].half()}),
        r"shard-000001.safetensors: target_hidden_states: expected BF16\[2, 8, 8\], found F16\[2, 8, 8\]$",
    ),
    "wrong dtype of ids": (
        lambda f: rewrite(f, 1, lambda t: t | {"input_ids": t["input_ids"].int()}),
        r"shard-000001.safetensors: input_ids: expected I64\[2, 8\], found I32\[2, 8\]$",
    ),
    "wrong width": (
        lambda f: rewrite(f, 1, lambda t: t | {"target_last_hidden_states": t["target_last_hidden_states"][..., :3]}),
        r"shard-000001.safetensors: target_last_hidden_states: expected BF16\[2, 8, 4\], found BF16\[2, 8, 3\]$",
    ),
    "key missing": (
        lambda f: write_tensor_shard(f, 1, load_file(shard(f, 1)), CACHE_KEYS[:3], "X"),
        r"shard-000001.safetensors: target_last_hidden_states is missing$",
    ),
    "truncated": (
        lambda f: os.truncate(shard(f, 1), shard(f, 1).stat().st_size - 1),
        r"shard-000001.safetensors has \d+ bytes, its header asks for \d+$",
    ),
    "empty": (lambda f: os.truncate(shard(f, 1), 0), r"shard-000001.safetensors ends at byte 0, 8 bytes are missing$"),
    "junk": (
        lambda f: shard(f, 1).write_bytes(b"junk" * 9),
        r"shard-000001.safetensors has 36 bytes, its header claims ",
    ),
    "folder": (replace_by(Path.mkdir), r"shard-000001.safetensors is no regular file$"),
    "fifo": (replace_by(os.mkfifo), r"shard-000001.safetensors is no regular file$"),
    "manifest of more samples": (
        lambda f: set_manifest(f, num_samples=6),
        r"shard-000002.safetensors: input_ids: expected I64\[2, 8\], found I64\[1, 8\]; ",
    ),
    "manifest of fewer samples": (
        lambda f: set_manifest(f, num_samples=4),
        r"missing shard indices \[\], unexpected shard indices \[2\]$",
    ),
    "manifest of another length": (
        lambda f: set_manifest(f, seq_length=9),
        r"shard-000000.safetensors: input_ids: expected I64\[2, 9\], found I64\[2, 8\]; ",
    ),
    "manifest of another dtype": (
        lambda f: set_manifest(f, dtype="fp16"),
        r"shard-000000.safetensors: target_hidden_states: expected F16\[2, 8, 8\], found BF16\[2, 8, 8\]; target_last",
    ),
    "manifest of other layers": (
        lambda f: set_manifest(f, target_hidden_dim=12, target_layer_ids=[0, 1, 2]),
        r"shard-000000.safetensors: target_hidden_states: expected BF16\[2, 8, 12\], found BF16\[2, 8, 8\]$",
    ),
    "manifest incomplete": (lambda f: set_manifest(f, complete=False), r" is incomplete: "),
    "manifest of another version": (lambda f: set_manifest(f, format_version=3), r"format_version is 3, this reader "),
    "manifest of a wrong type": (lambda f: set_manifest(f, shard_size="2"), r"shard_size: expected an integer from 1 "),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_cache_is_refused_at_open(make_cache: MakeCache, name: str) -> None:
    folder = make_cache(5, 2)
    CachedDSparkDataset(folder)
    change, message = DOCTORED[name]
    change(folder)
    with pytest.raises(CacheFormatError, match=message) as caught:
        CachedDSparkDataset(folder)
    assert str(folder) in str(caught.value)


def test_a_foreign_shard_is_refused_at_open(make_cache: MakeCache) -> None:
    folder, other = make_cache(4, 2), make_cache(4, 2, seq_length=6)
    shutil.copy(shard(other, 1), shard(folder, 1))
    with pytest.raises(
        CacheFormatError, match=r"shard-000001.safetensors: input_ids: expected I64\[2, 8\], found I64\[2, 6\]"
    ):
        CachedDSparkDataset(folder)


def test_missing_files_are_said_to_be_missing(make_cache: MakeCache, tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError, match=f"^no DSpark cache in {re.escape(str(tmp_path))}: "):
        CachedDSparkDataset(tmp_path)
    folder = make_cache(4, 2)
    shard(folder, 1).unlink()
    shard(folder, 1).symlink_to(tmp_path / "files/md5/00/gone-from-the-cache-of-dvc")
    with pytest.raises(CacheNotFoundError, match=f"^no such file: {re.escape(str(shard(folder, 1)))}$"):
        CachedDSparkDataset(folder)


def test_a_shard_that_changes_after_the_opening_is_refused_when_it_is_read(make_cache: MakeCache) -> None:
    folder = make_cache(4, 2)
    dataset = CachedDSparkDataset(folder)
    rewrite(folder, 1, lambda tensors: {key: tensor[:1] for key, tensor in tensors.items()})
    with pytest.raises(CacheFormatError, match=r"shard-000001.safetensors: input_ids: expected "):
        dataset[2]


# --- open files -------------------------------------------------------------------------------------------------


def test_the_least_recently_used_file_is_closed(make_cache: MakeCache) -> None:
    folder = make_cache(4, 1)
    dataset = CachedDSparkDataset(folder, max_open_files=2)
    for index, held in [(0, [0]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (2, [0, 2]), (3, [2, 3])]:
        dataset[index]
        assert open_files(folder) == [shard(folder, number).name for number in held]
        assert sorted(dataset._open_handles) == held


@pytest.mark.parametrize("bound", [0, -1])
def test_at_least_one_file_may_be_open(make_cache: MakeCache, bound: int) -> None:
    with pytest.raises(ValueError, match=f"^max_open_files must be at least 1, found {bound}$"):
        CachedDSparkDataset(make_cache(1, 1), max_open_files=bound)


# --- other processes and threads --------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
def test_a_used_dataset_is_copied_without_its_files(make_cache: MakeCache, transfer: Callable[[Any], Any]) -> None:
    folder = make_cache(4, 2)
    dataset = CachedDSparkDataset(folder, expect={"num_samples": 4}, max_open_files=1)
    expected = [dataset[index] for index in range(4)]
    other = transfer(dataset)
    assert len(other._open_handles) == 0
    assert all(equal(*pair) for pair in zip(other, expected, strict=True))
    assert len(other._open_handles) == len(dataset._open_handles) == 1


# --- shares of shards -------------------------------------------------------------------------------------------


def forms(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return a cache in every form in which it can be read, shards of one number of samples in each."""
    ragged = make_ragged(folder, [len(load_file(path)["input_ids"]) for path in sorted(folder.glob("shard-*"))])
    return [(folder, {}), (ragged, {}), (ragged, {"padded": False})]


@pytest.mark.parametrize(("num_samples", "shard_size"), [(1, 1), (4, 1), (5, 2), (6, 2)])
def test_shares_one_after_the_other_are_the_whole(make_cache: MakeCache, num_samples: int, shard_size: int) -> None:
    count = -(-num_samples // shard_size)
    for folder, options in forms(make_cache(num_samples, shard_size)):
        whole = CachedDSparkDataset(folder, **options)
        samples = [whole[index] for index in range(len(whole))]
        for first, second in combinations_with_replacement(range(1, count), 2):
            cuts = sorted({0, first, second, count})
            shares = [CachedDSparkDataset(folder, shards=range(*pair), **options) for pair in pairwise(cuts)]
            found = [share[index] for share in shares for index in range(-len(share), 0)]
            assert all(equal(*pair) for pair in zip(found, samples, strict=True))
            for share in shares:
                assert share.manifest == whole.manifest
                assert share.num_samples == len(share) == sum(share.shard_samples)
                of_shards = [index for shard in share.shards for index in share.samples_of(shard)]
                assert of_shards == list(range(len(share)))
                assert [share.shard_of(index) for index in of_shards] == [
                    shard for shard in share.shards for _ in share.samples_of(shard)
                ]


def test_a_share_s_batches_are_those_of_its_samples(make_cache: MakeCache) -> None:
    for folder, options in forms(make_cache(7, 2)):
        whole, share = (CachedDSparkDataset(folder, shards=shards, **options) for shards in (None, range(1, 3)))
        expected = [whole[index] for index in (5, 2, 3)]
        batch = share.__getitems__([3, 0, 1])
        assert all(equal(*pair) for pair in zip(batch, expected, strict=True))
        with pytest.raises(IndexError, match=r"^sample 4 of a cache of 4$"):
            share[4]


@pytest.mark.parametrize("number", range(3))
def test_a_share_needs_no_other_files_and_pickles(make_cache: MakeCache, number: int) -> None:
    folder, options = forms(make_cache(7, 2))[number]
    record_files(folder)
    expected = [CachedDSparkDataset(folder, **options)[index] for index in range(4, 7)]
    for index in (0, 1):
        for path in folder.glob(f"*-00000{index}.safetensors"):
            path.unlink()
    share = pickle.loads(pickle.dumps(CachedDSparkDataset(folder, shards=range(2, 4), max_open_files=1, **options)))
    shutil.copy(shard(folder, 3), folder / "again")
    (folder / "again").replace(shard(folder, 3))  # the same bytes in another file: hashed, and accepted
    assert all(equal(share[index], expected[index]) for index in range(3))
    with pytest.raises(CacheFormatError, match=r"missing shard indices \[0, 1\], unexpected shard indices \[\]$"):
        CachedDSparkDataset(folder, **options)


def test_a_share_whose_files_change_is_refused(make_cache: MakeCache) -> None:
    folder = make_cache(6, 2)
    share = CachedDSparkDataset(folder, shards=range(1, 3))
    rewrite(folder, 2, lambda tensors: {key: tensor + 1 for key, tensor in tensors.items()})
    with pytest.raises(CacheFormatError, match=r"shard-000002.safetensors is another file"):
        share[2]


@pytest.mark.parametrize(
    "share",
    [
        range(0),
        range(2, 2),
        range(2, 1),
        range(0, 4),
        range(-1, 2),
        range(0, 3, 2),
        range(2, 0, -1),
        [0, 1],
        1,
        slice(2),
    ],
)
def test_what_is_no_run_of_shards_is_refused(make_cache: MakeCache, share: Any) -> None:
    message = (
        f"shards: expected a range of step 1 with at least one of the shards 0..2, such as range(0, 2), found {share!r}"
    )
    for folder, options in forms(make_cache(6, 2)):
        with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
            CachedDSparkDataset(folder, shards=share, **options)


@pytest.mark.parametrize(
    ("foreign", "gone", "faults"),
    [
        (7, None, "missing shard indices [], unexpected shard indices [7]"),
        (None, 2, "missing shard indices [2], unexpected shard indices []"),
    ],
)
def test_a_share_lacks_none_of_its_shards_and_has_no_foreign_ones(
    make_cache: MakeCache, foreign: int | None, gone: int | None, faults: str
) -> None:
    folder = make_cache(8, 2)
    if foreign is not None:
        shutil.copy(shard(folder, 0), shard(folder, foreign))
    if gone is not None:
        shard(folder, gone).unlink()
    message = f"the DSpark cache in {folder} must have shards 1 to 2 of 0..3; {faults}"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        CachedDSparkDataset(folder, shards=range(1, 3))


def test_a_share_s_shards_are_checked_at_open_and_others_are_not(make_cache: MakeCache) -> None:
    folder = make_cache(6, 2)
    os.truncate(shard(folder, 0), 9)
    assert len(CachedDSparkDataset(folder, shards=range(1, 3))) == 4
    with pytest.raises(CacheFormatError, match=r"shard-000000.safetensors has 9 bytes"):
        CachedDSparkDataset(folder, shards=range(0, 1))


def test_a_generic_cache_has_shares_too(eagle: Path) -> None:
    shard(eagle, 0).unlink()
    dataset = CachedTensorDataset(eagle, "EAGLE-3", 4, EAGLE_KEYS, shards=range(1, 3))
    assert all(equal(*pair) for pair in zip(dataset, samples_of(eagle), strict=True))  # type: ignore[call-overload]


def test_a_loader_reads_a_share_and_resumes_no_other(make_cache: MakeCache) -> None:
    for folder, options in forms(make_cache(6, 2)):
        pad_to = "longest" if options else "seq_length"
        loaders = [
            build_cached_dspark_dataloader(folder, 2, "shard", seed=0, pad_to=pad_to, shards=shards)
            for shards in (range(0, 2), range(1, 3), range(0, 3), None)
        ]
        states = [loader.state_dict() for loader in loaders]
        assert [state["shards"] for state in states] == [[0, 2], [1, 3], None, None]
        with pytest.raises(SettingsError, match=r"^this state cannot be resumed: shards: \[0, 2\] then, \[1, 3\] now$"):
            loaders[1].load_state_dict(states[0])
        loaders[2].load_state_dict(states[3])
        assert sum(len(batch["input_ids"]) for batch in loaders[0]) == 4


def test_opening_that_takes_long_says_how_far_it_is(
    make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache(5, 2)
    CachedDSparkDataset(cache)
    assert caplog.messages == []
    monkeypatch.setattr("dspark_cache.reader.SLOW_SECONDS", 0.0)
    CachedDSparkDataset(cache)
    assert caplog.messages == [f"{cache}: opened {number} of 3 shards" for number in range(3)]
