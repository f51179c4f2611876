"""Doctored caches, one fault each: the level that must find it does, naming the file, and no earlier level does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, read_target_weight_modules, write_shard
from dspark_cache.cache_files import CacheFolder, Finding, check_bytes, check_files
from dspark_cache.cli import main
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, VERIFY_LEVELS
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.supervision import Extreme, Supervision
from dspark_cache.tokens import Tokens
from dspark_cache.verify import (
    MAX_FINDINGS,
    Distance,
    Report,
    check_supervision,
    check_values,
    check_weights,
    read_files,
    verify_cache,
)
from tests.caches import change_content, make_ragged, record_files
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS = ["shard-000000.safetensors", "shard-000001.safetensors"]
WEIGHTS = "target_weights.safetensors"
PAD = 995


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Five samples of up to 64 tokens in shards of three; samples 0 and 2 are short."""
    root = tmp_path_factory.mktemp("verify") / "repository"
    repository = make_repository(
        root, num_rows=5, data={"seq_length": 64}, target={"layer_ids": [1, 3]}, cache={"shard_size": 3}
    )
    repository.run("tokenize", "capture", "shards")
    return repository


@pytest.fixture(scope="module")
def tokens(published: Repository) -> Tokens:
    return Tokens(published.root / "tokens")


@pytest.fixture
def cache(published: Repository, tmp_path: Path) -> Path:
    """A copy of the cache, to doctor."""
    return shutil.copytree(published.root / "cache", tmp_path / "cache")


def verify(cache: Path, level: str, tokens: Tokens | None = None, kept: list[int] | None = None) -> list[str]:
    return [str(finding) for finding in verify_cache(CacheFolder(cache), level, tokens=tokens, kept=kept).findings]


def doctor(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors of a file, keeping the order of its keys, and record its new size and digest."""
    places = ShardFile(path).places
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    with put_file(path) as temporary:
        write_tensors(temporary, {key: tensors[key] for key in sorted(places, key=lambda key: places[key].offset)})
    reseal(path)


def reseal(path: Path) -> None:
    """Record size and digest of a doctored file, so that only what lies deeper can tell."""
    data = path.read_bytes()
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change_content(path.parent, lambda content: content["files"][path.name].update(record))


def state_of(cache: Path) -> dict[str, tuple[Any, ...]]:
    """Return whatever a verification could change: names, bytes, inodes, times."""
    paths = [cache, *cache.iterdir()]
    return {
        path.name: (path.is_file() and path.read_bytes(), path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in paths
    }


@pytest.mark.parametrize("level", VERIFY_LEVELS)
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_sound_cache_has_no_findings_and_is_not_changed(
    cache: Path, tokens: Tokens, level: str, with_tokens: bool
) -> None:
    before = state_of(cache)
    report = verify_cache(CacheFolder(cache), level, tokens=tokens if with_tokens else None)
    assert report.findings == []
    assert report.level == level
    assert report.supervision.num_samples == (5 if level in ("values", "supervision") else 0)
    assert state_of(cache) == before


@pytest.mark.parametrize("level", VERIFY_LEVELS)
@pytest.mark.parametrize("damage", ["left over", "header", "value"])
def test_a_faulty_cache_is_not_changed_either(cache: Path, tokens: Tokens, level: str, damage: str) -> None:
    if damage == "left over":
        (cache / "left-over").write_text("x")
    elif damage == "header":
        (cache / SHARDS[0]).write_bytes(b"\xff" * 100)
        reseal(cache / SHARDS[0])
    else:
        doctor(cache / SHARDS[0], set_at(INPUT_IDS, 1, 5, value=-1))
    before = state_of(cache)
    found_by = VERIFY_LEVELS.index({"left over": "files", "header": "headers", "value": "values"}[damage])
    assert bool(verify(cache, level, tokens)) == (VERIFY_LEVELS.index(level) >= found_by)
    assert state_of(cache) == before


# Level files


@pytest.mark.parametrize("name", [*SHARDS, WEIGHTS])
def test_a_missing_file_is_found(cache: Path, name: str) -> None:
    (cache / name).unlink()
    for level in VERIFY_LEVELS:
        assert verify(cache, level) == [f"[files] {name}: is missing"]


def test_a_left_over_file_is_found(cache: Path) -> None:
    (cache / ".tmp-shard-000000.safetensors-1a").write_text("half")
    shutil.copy(cache / SHARDS[1], cache / "shard-000002.safetensors")
    assert verify(cache, "values") == [
        "[files] .tmp-shard-000000.safetensors-1a: does not belong into a cache",
        "[files] shard-000002.safetensors: does not belong into a cache",
    ]


def test_a_name_that_would_forge_what_a_terminal_shows_is_escaped(cache: Path) -> None:
    (cache / "a\n\x1b[2Kcache is sound\r").touch()
    assert verify(cache, "files") == ["[files] a\\n\\x1b[2Kcache is sound\\r: does not belong into a cache"]


def test_a_renamed_shard_is_missing_and_left_over(cache: Path) -> None:
    (cache / SHARDS[1]).rename(cache / "shard-000007.safetensors")
    assert verify(cache, "files") == [
        "[files] shard-000001.safetensors: is missing",
        "[files] shard-000007.safetensors: does not belong into a cache",
    ]


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", [*SHARDS, WEIGHTS])
def test_a_file_of_another_size_is_found(cache: Path, name: str, change: int) -> None:
    path = cache / name
    size = path.stat().st_size
    os.truncate(path, size + change)
    assert verify(cache, "values") == [f"[files] {name}: has {size + change} bytes, provenance.json says {size}"]


def test_what_is_no_regular_file_is_found(cache: Path) -> None:
    (cache / SHARDS[0]).unlink()
    os.mkfifo(cache / SHARDS[0])
    (cache / SHARDS[1]).unlink()
    (cache / SHARDS[1]).mkdir()
    for level in VERIFY_LEVELS:
        assert verify(cache, level) == [f"[files] {name}: is no regular file" for name in SHARDS]


@pytest.mark.parametrize("name", ["shard-000002.safetensors", "samples-000000.safetensors"])
def test_a_record_of_what_is_no_file_of_the_cache_is_found(cache: Path, name: str) -> None:
    record: dict[str, object] = {"bytes": 0, "sha256": "0" * 64}
    if name.startswith("shard-"):
        record |= {"samples": 0, "tokens": 0, "supervised_tokens": 0}
    change_content(cache, lambda content: content["files"].update({name: record}))
    for level in VERIFY_LEVELS:
        assert verify(cache, level) == [f"[files] provenance.json: records {name}, which is no file of the cache"]


# Links


def move(path: Path, to: Path, target: str | Path | None = None) -> None:
    """Put a file elsewhere and a link in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    path.rename(to)
    path.symlink_to(to if target is None else target)


FOREIGN = [
    "elsewhere",
    "files/md5/cdef",
    "files/md5/ab/cd/ef",
    "md5/files/ab/cdef",
    "files/sha/ab/cdef",
    "blobs/ab/cdef",
    "myblobs/cdef",
    "cache/kept",
]


@pytest.mark.parametrize("place", FOREIGN)
def test_a_link_out_of_the_cache_is_found_and_its_file_never_opened(cache: Path, tmp_path: Path, place: str) -> None:
    path, kept = cache / SHARDS[0], tmp_path / place
    move(path, kept)
    message = f"{path} is a link to {kept}: a cache holds files, copy it there"
    for level in VERIFY_LEVELS:
        assert f"[files] {SHARDS[0]}: {message}" in verify(cache, level)
    for _ in range(2):
        with pytest.raises(CacheFormatError) as caught:
            CachedDSparkDataset(cache)
        assert str(caught.value) == message
        kept.unlink(missing_ok=True)  # whether it leads anywhere or not


def test_links_out_of_the_cache_are_found_all_at_once(cache: Path, tmp_path: Path) -> None:
    for name in (*SHARDS, WEIGHTS):
        move(cache / name, tmp_path / name, f"../{name}")
    assert verify(cache, "values") == [
        f"[files] {name}: {cache / name} is a link to ../{name}: a cache holds files, copy it there"
        for name in (*SHARDS, WEIGHTS)
    ]
    with pytest.raises(CacheFormatError, match=rf"{WEIGHTS} is a link to \.\./{WEIGHTS}: a cache holds files"):
        read_target_weight_modules(cache)


@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
def test_a_cache_that_describes_itself_elsewhere_is_refused(cache: Path, tmp_path: Path, name: str) -> None:
    move(cache / name, tmp_path / name)
    message = f"{cache / name} is a link to {tmp_path / name}: a cache holds files, copy it there"
    with pytest.raises(CacheFormatError) as caught:
        CacheFolder(cache)
    assert str(caught.value) == message
    if name == "manifest.json":
        with pytest.raises(CacheFormatError) as caught:
            CachedDSparkDataset(cache)
        assert str(caught.value) == message


def link_as_dvc_does(cache: Path, store: Path) -> list[Path]:
    """Keep all files by their digests in `files/md5`, with absolute links to them."""
    kept = []
    for path in sorted(cache.iterdir()):
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        kept.append(store / "files/md5" / digest[:2] / digest[2:])
        move(path, kept[-1])
    return kept


def link_as_the_hub_does(cache: Path, store: Path) -> list[Path]:
    """Keep all files by their digests in `blobs`, with relative links to them."""
    kept = []
    for path in sorted(cache.iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        kept.append(store / "blobs" / digest)
        move(path, kept[-1], os.path.relpath(kept[-1], cache))
    return kept


@pytest.mark.parametrize("link", [link_as_dvc_does, link_as_the_hub_does])
def test_links_into_a_store_are_as_good_as_files(
    cache: Path, tmp_path: Path, tokens: Tokens, link: Callable[[Path, Path], list[Path]]
) -> None:
    expected = [CachedDSparkDataset(cache)[index] for index in range(5)]
    weight = read_target_weight_modules(cache)[1].weight
    kept = link(cache, tmp_path / "store")
    assert all(path.is_symlink() for path in cache.iterdir())
    dataset = CachedDSparkDataset(cache)
    assert all(torch.equal(dataset[index][key], expected[index][key]) for index in range(5) for key in CACHE_KEYS)
    assert torch.equal(read_target_weight_modules(cache)[1].weight, weight)
    assert verify(cache, "supervision", tokens) == []
    shard = kept[2]
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert verify(cache, "files") == [f"[files] {SHARDS[0]}: has {size - 1} bytes, provenance.json says {size}"]
    shard.unlink()
    assert verify(cache, "files") == [f"[files] {SHARDS[0]}: is no regular file"]
    with pytest.raises(CacheNotFoundError, match=f"^no such file: {cache / SHARDS[0]}$"):
        CachedDSparkDataset(cache)


def test_what_a_link_leads_to_in_the_end_decides(cache: Path, tmp_path: Path) -> None:
    kept, first, second = tmp_path / "files/md5/ab/cdef", cache / SHARDS[0], cache / SHARDS[1]
    move(first, kept)
    move(first, tmp_path / "alias")  # the cache's link leads to a link into the store
    assert verify(cache, "supervision") == []
    move(second, tmp_path / "files/md5/ab/0123")
    move(tmp_path / "files/md5/ab/0123", tmp_path / "elsewhere")  # the store's entry is a link out of it
    (finding,) = verify(cache, "supervision")
    assert finding.startswith(f"[files] {SHARDS[1]}: {second} is a link to {tmp_path / 'files/md5/ab/0123'}: ")


def test_a_link_to_itself_is_found(cache: Path) -> None:
    (cache / SHARDS[0]).unlink()
    (cache / SHARDS[0]).symlink_to(SHARDS[0])
    (finding,) = verify(cache, "files")
    assert finding.startswith(f"[files] {SHARDS[0]}: {cache / SHARDS[0]} is a link to {SHARDS[0]}: ")


# Level headers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({LOSS_MASK: t[LOSS_MASK].double()}), "loss_mask: expected I64[3, 64], found F64[3, 64]"),
        (lambda t: t.update({HIDDEN: t[HIDDEN].half()}), f"{HIDDEN}: expected BF16[3, 64, 128], found F16[3, 64, 128]"),
        (lambda t: t.update({INPUT_IDS: t[INPUT_IDS].reshape(6, 32)}), "expected I64[3, 64], found I64[6, 32]"),
    ],
)
def test_another_dtype_or_shape_of_the_same_size_is_found(cache: Path, change: Any, message: str) -> None:
    doctor(cache / SHARDS[0], change)
    assert verify(cache, "files") == []
    for level in VERIFY_LEVELS[1:]:
        (finding,) = verify(cache, level)
        assert finding.startswith(f"[headers] {SHARDS[0]}: {cache / SHARDS[0]}: ")
        assert finding.endswith(message)


def test_fewer_rows_than_the_manifest_says_are_found(cache: Path) -> None:
    doctor(cache / SHARDS[1], lambda tensors: tensors.update({key: tensors[key][:1].clone() for key in CACHE_KEYS}))
    (finding,) = verify(cache, "headers")
    assert f"{INPUT_IDS}: expected I64[2, 64], found I64[1, 64]" in finding
    assert f"{LAST_HIDDEN}: expected BF16[2, 64, 64], found BF16[1, 64, 64]" in finding


def test_another_key_is_found(cache: Path) -> None:
    with put_file(cache / WEIGHTS) as temporary:
        write_tensors(
            temporary, {"embed_tokens.weight": torch.zeros(1024, 64, dtype=torch.bfloat16), "x": torch.ones(1)}
        )
    reseal(cache / WEIGHTS)
    (finding,) = verify(cache, "headers")
    assert finding == (f"[headers] {WEIGHTS}: {cache / WEIGHTS}: lm_head.weight is missing; unexpected keys ['x']")


def test_a_malformed_header_is_found(cache: Path) -> None:
    (cache / SHARDS[0]).write_bytes(b"\xff" * 100)
    reseal(cache / SHARDS[0])
    (finding,) = verify(cache, "values")
    assert finding.startswith(f"[headers] {SHARDS[0]}: {cache / SHARDS[0]} has 100 bytes, its header claims ")


CONTRADICTIONS: list[tuple[tuple[str, ...], object, str]] = [
    (("layout",), "ragged", "layout is 'ragged', manifest.json says 'padded'"),
    (("tokens", "seq_length"), 32, "tokens.seq_length is 32, manifest.json says 64"),
    (("tokens", "seq_length"), "64", "tokens.seq_length is '64', manifest.json says 64"),
    (("tokens", "shuffle_seed"), 43, "tokens.shuffle_seed is 43, manifest.json says 42"),
    (("tokens", "mask_reasoning_content"), True, "tokens.mask_reasoning_content is True, manifest.json says False"),
    (("tokens", "mask_generation_prompt"), True, "tokens.mask_generation_prompt is True, manifest.json says False"),
    (("tokens", "train_split"), "train", "tokens.train_split is 'train', manifest.json says None"),
    (("tokens", "train_data_path"), None, "tokens.train_data_path is None, manifest.json says "),
    (
        ("tokens", "chat_template_sha256"),
        "0" * 300,
        f"tokens.chat_template_sha256 is '{'0' * 199}, manifest.json says ",
    ),
    (
        ("capture", "identity", "target_layer_ids"),
        [1, 2],
        "capture.identity.target_layer_ids is [1, 2], manifest.json says [1, 3]",
    ),
    (("capture", "identity", "hidden_size"), 32, "capture.identity.hidden_size is 32, manifest.json says 64"),
    (("capture", "identity", "dtype"), "fp32", "capture.identity.dtype is 'fp32', manifest.json says 'bf16'"),
]
"""Path to a value of provenance, what it is changed to, and what is found of it."""


@pytest.mark.parametrize(("place", "value", "message"), CONTRADICTIONS)
def test_provenance_that_contradicts_the_manifest_is_found(
    cache: Path, place: tuple[str, ...], value: object, message: str
) -> None:
    *parents, key = place

    def contradict(content: dict[str, Any]) -> None:
        for parent in parents:
            content = content[parent]
        content[key] = value

    change_content(cache, contradict)
    assert verify(cache, "files") == []
    for level in VERIFY_LEVELS[1:]:
        (finding,) = verify(cache, level)
        assert finding.startswith(f"[headers] provenance.json: {message}")


def test_everything_that_contradicts_the_manifest_is_found_at_once(cache: Path) -> None:
    def contradict(content: dict[str, Any]) -> None:
        content["tokens"].update(seq_length=65, shuffle_seed=1)
        content["capture"]["identity"].update(hidden_size=65)

    change_content(cache, contradict)
    doctor(cache / SHARDS[0], lambda tensors: tensors.update({HIDDEN: tensors[HIDDEN].half()}))
    assert [finding.split(" is ")[0].split(": ")[-1] for finding in verify(cache, "values")[:-1]] == [
        "tokens.seq_length",
        "tokens.shuffle_seed",
        "capture.identity.hidden_size",
    ]
    assert verify(cache, "values")[-1].startswith(f"[headers] {SHARDS[0]}: ")


@pytest.mark.parametrize("key", ["limit", "compute_dtype"])
def test_what_only_provenance_says_contradicts_nothing(cache: Path, key: str) -> None:
    change_content(cache, lambda content: content["tokens"].update({key: "x"}))
    change_content(cache, lambda content: content["capture"].pop("identity"))
    assert verify(cache, "supervision") == []


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({}, []),
        ({"layout": "padded"}, ["layout is 'padded', manifest.json says 'ragged'"]),
        ({"pad_token_id": 1}, ["pad_token_id is 1, manifest.json says 0"]),
        ({"tokens": {"pad_token_id": 1}}, ["tokens.pad_token_id is 1, manifest.json says 0"]),
        pytest.param(
            {"pad_token_id": 1, "tokens": {"pad_token_id": 0}},
            ["pad_token_id is 1, manifest.json says 0"],
        ),
    ],
)
def test_provenance_that_contradicts_a_ragged_manifest_is_found(
    make_cache: Callable[..., Path], changes: dict[str, Any], messages: list[str]
) -> None:
    cache = make_ragged(make_cache(3, 2), [2, 1])
    record_files(cache, **changes)
    assert verify(cache, "files") == []
    assert verify(cache, "headers") == [f"[headers] provenance.json: {message}" for message in messages]


@pytest.mark.parametrize("identity", [[1], "x", 5])
def test_a_capture_identity_that_is_no_object_does_not_stop_a_verification(cache: Path, identity: object) -> None:
    change_content(cache, lambda content: content["capture"].update(identity=identity))
    assert verify(cache, "values") == [f"[headers] provenance.json: capture.identity is {identity!r}, no object"]


# Level bytes


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", [*SHARDS, WEIGHTS])
def test_a_bit_flip_anywhere_in_a_tensor_is_found(cache: Path, name: str) -> None:
    path = cache / name
    recorded = hashlib.sha256(path.read_bytes()).hexdigest()
    for place in ShardFile(path).places.values():
        for offset in (place.offset, place.offset + place.spec.num_bytes - 1):
            flip(path, offset)
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            assert verify(cache, "headers") == []
            assert verify(cache, "bytes") == [f"[bytes] {name}: sha256 is {found}, provenance.json says {recorded}"]
            flip(path, offset)
    assert verify(cache, "bytes") == []


def test_a_changed_manifest_is_found(cache: Path) -> None:
    path = cache / "manifest.json"
    path.write_text(path.read_text().replace('"qwen3"', '"qwen4"'))
    assert json.loads(path.read_text())["target_model_type"] == "qwen4"  # which provenance does not say
    assert verify(cache, "headers") == []
    (finding,) = verify(cache, "bytes")
    assert finding.startswith("[bytes] manifest.json: sha256 is ")


def test_a_manifest_that_provenance_contradicts_is_found_without_its_bytes_too(cache: Path) -> None:
    path = cache / "manifest.json"
    path.write_text(path.read_text().replace('"shuffle_seed": 42', '"shuffle_seed": 43'))
    assert verify(cache, "files") == []
    assert verify(cache, "headers") == ["[headers] provenance.json: tokens.shuffle_seed is 42, manifest.json says 43"]
    for level in VERIFY_LEVELS[2:]:
        (finding,) = verify(cache, level)
        assert finding.startswith("[bytes] manifest.json: sha256 is ")


def test_nothing_is_said_of_files_that_another_manifest_describes(cache: Path, tokens: Tokens) -> None:
    """Everything would be wrong, from the shapes of states to the number of samples."""
    path, before = cache / "manifest.json", (cache / "manifest.json").read_text()
    after = before.replace('"dtype": "bf16"', '"dtype": "fp16"').replace(
        '"target_vocab_size": 1', '"target_vocab_size": 2'
    )
    path.write_text(after)
    assert len(after) == len(before)
    assert len(verify(cache, "headers")) == 3
    (cache / SHARDS[0]).write_bytes(b"\xff" * (cache / SHARDS[0]).stat().st_size)
    for level in VERIFY_LEVELS[2:]:
        (finding,) = verify(cache, level, tokens)
        assert finding.startswith("[bytes] manifest.json: sha256 is ")


def test_a_manifest_without_a_record_is_found_and_not_relied_on(cache: Path) -> None:
    change_content(cache, lambda content: content["files"].pop("manifest.json"))
    (cache / SHARDS[0]).write_bytes(b"\xff" * (cache / SHARDS[0]).stat().st_size)
    assert len(verify(cache, "headers")) == 1
    for level in VERIFY_LEVELS[2:]:
        assert verify(cache, level) == ["[bytes] manifest.json: provenance.json records no sha256 of it"]


def test_a_wrong_manifest_is_found_beside_wrong_files(cache: Path) -> None:
    path = cache / "manifest.json"
    path.write_text(path.read_text().replace('"qwen3"', '"qwen4"'))
    (cache / "left-over").touch()
    found = verify(cache, "values")
    assert found[0] == "[files] left-over: does not belong into a cache"
    assert [finding.split(" is ")[0] for finding in found[1:]] == ["[bytes] manifest.json: sha256"]


@pytest.mark.parametrize("level", VERIFY_LEVELS[:3])
def test_tokens_are_not_asked_at_levels_that_read_no_values(cache: Path, tokens: Tokens, level: str) -> None:
    assert verify(cache, level, tokens, kept=[0, 1]) == []


@pytest.mark.parametrize("name", [*SHARDS, WEIGHTS, "manifest.json"])
def test_a_file_that_goes_missing_before_its_bytes_are_read_is_found(cache: Path, name: str) -> None:
    opened = CacheFolder(cache)
    (cache / name).unlink()
    assert [str(finding) for finding in check_bytes(opened, [*SHARDS, WEIGHTS, "manifest.json"])] == [
        f"[bytes] {name}: went missing while the cache was verified"
    ]


def test_files_that_provenance_does_not_record_are_found(cache: Path) -> None:
    change_content(cache, lambda content: [content["files"].pop(name) for name in (WEIGHTS, SHARDS[0])])
    assert verify(cache, "headers") == []
    expected = [f"[bytes] {name}: provenance.json records no sha256 of it" for name in (WEIGHTS, SHARDS[0])]
    for level in VERIFY_LEVELS[2:]:
        assert verify(cache, level) == expected


def test_without_provenance_the_level_bytes_is_left_out_and_those_around_it_hold(cache: Path, tokens: Tokens) -> None:
    doctor(cache / SHARDS[0], set_at(INPUT_IDS, 1, 5, value=1024))
    (cache / "provenance.json").unlink()
    (cache / "left-over").touch()
    assert verify(cache, "supervision") == ["[files] left-over: does not belong into a cache"]
    (cache / "left-over").unlink()
    assert verify(cache, "bytes") == []
    assert verify(cache, "values") == [f"[values] {SHARDS[0]}: sample 1: ids outside 0..1023"]
    assert len(verify(cache, "values", tokens)) == 2


# Level values


def set_at(key: str, *position: int, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][position] = value

    return change


def swap_samples(tensors: dict[str, torch.Tensor]) -> None:
    """Exchange samples 0 and 1, states and all."""
    for key in CACHE_KEYS:
        tensors[key][[0, 1]] = tensors[key][[1, 0]]


def shift_mask(tensors: dict[str, torch.Tensor]) -> None:
    """Supervise each token's successor, in the second sample."""
    tensors[LOSS_MASK][1] = tensors[LOSS_MASK][1].roll(1)


def count_finding(cache: Path, name: str, **more: int) -> str:
    """Return the finding that a shard's samples count `more` than is recorded."""
    record = json.loads((cache / "provenance.json").read_text())["files"][name]
    recorded = {key: record[key] for key in ("samples", "tokens", "supervised_tokens")}
    found = {key: value + more.get(key, 0) for key, value in recorded.items()}
    return f"[values] {name}: provenance.json says {recorded}, its samples give {found}"


IDS, MASK = f"{INPUT_IDS} are not those of tokens/", f"{LOSS_MASK} is not that of tokens/"
ZERO = f"{LAST_HIDDEN} is all zero at a real token"
NO_BIT = "loss mask values other than 0 and 1"
ENDS_AT_60 = [f"0: {ZERO}"]
"""What is found where, without tokens/, sample 0 seems to end at position 60."""
VALUES: list[tuple[Any, list[str], list[str]]] = [
    # change of the first shard, what is found of samples against tokens/, without them
    (set_at(INPUT_IDS, 1, 5, value=7), [f"1: {IDS}"], []),
    (set_at(INPUT_IDS, 1, 5, value=1024), ["1: ids outside 0..1023", f"1: {IDS}"], ["1: ids outside 0..1023"]),
    (
        set_at(INPUT_IDS, 0, 60, value=-1),
        ["0: ids outside 0..1023", f"0: padding holds ids other than {PAD}"],
        ["both"],
    ),
    (set_at(INPUT_IDS, 0, 60, value=7), [f"0: padding holds ids other than {PAD}"], ["both"]),
    (set_at(LOSS_MASK, 1, 0, value=2), [f"1: {NO_BIT}", f"1: {MASK}"], [f"1: {NO_BIT}"]),
    (set_at(LOSS_MASK, 1, 0, value=-1), [f"1: {NO_BIT}", f"1: {MASK}"], [f"1: {NO_BIT}"]),
    (set_at(LOSS_MASK, 1, 0, value=1), [f"1: {MASK}"], []),
    (shift_mask, [f"1: {MASK}"], []),
    (swap_samples, [f"0: {IDS}", f"0: {MASK}", f"1: {ZERO}"], []),
    (set_at(HIDDEN, 1, 3, 2, value=float("nan")), [f"1: {HIDDEN} holds numbers that are not finite"], ["both"]),
    (
        set_at(LAST_HIDDEN, 1, 3, 2, value=float("inf")),
        [f"1: {LAST_HIDDEN} holds numbers that are not finite"],
        ["both"],
    ),
    (set_at(HIDDEN, 0, 60, 2, value=0.5), [f"0: {HIDDEN} is not zero at padding"], ["both"]),
    (set_at(LAST_HIDDEN, 1, 3, value=0), [f"1: {ZERO}"], ["both"]),
    (set_at(LOSS_MASK, 0, 60, value=1), ["0: padding is supervised"], ENDS_AT_60),
    (set_at(LAST_HIDDEN, 0, 60, 0, value=0.5), [f"0: {LAST_HIDDEN} is not zero at padding"], ENDS_AT_60),
]


@pytest.mark.parametrize(("change", "against_tokens", "alone"), VALUES)
def test_wrong_values_are_found_where_digests_agree(
    cache: Path, tokens: Tokens, change: Any, against_tokens: list[str], alone: list[str]
) -> None:
    before = int(load_file(cache / SHARDS[0])[LOSS_MASK].sum())
    doctor(cache / SHARDS[0], change)
    supervised = int(load_file(cache / SHARDS[0])[LOSS_MASK].sum()) - before
    assert verify(cache, "bytes") == []

    def expected(messages: list[str], more_tokens: int) -> list[str]:
        counts = [count_finding(cache, SHARDS[0], tokens=more_tokens, supervised_tokens=supervised)]
        findings = [f"[values] {SHARDS[0]}: sample {message}" for message in messages]
        return findings + counts * bool(more_tokens or supervised)

    found = verify(cache, "values", tokens)
    if change is swap_samples:  # which is wrong in many ways
        assert set(expected(against_tokens, 0)) < set(found)
        assert all(finding.startswith(f"[values] {SHARDS[0]}: sample ") for finding in found)
    else:
        assert found == expected(against_tokens, 0)
    more_tokens = 61 - tokens.length(0) if alone == ENDS_AT_60 else 0
    assert verify(cache, "values") == expected(against_tokens if alone == ["both"] else alone, more_tokens)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("count", ["samples", "tokens", "supervised_tokens"])
@pytest.mark.parametrize("name", SHARDS)
def test_wrong_counts_are_found(cache: Path, tokens: Tokens, name: str, count: str, change: int) -> None:
    def add(content: dict[str, Any]) -> None:
        content["files"][name][count] += change

    change_content(cache, add)
    assert verify(cache, "bytes") == []
    expected = [count_finding(cache, name, **{count: -change})]
    assert verify(cache, "values") == verify(cache, "values", tokens) == expected


@pytest.mark.parametrize("count", ["samples", "tokens", "supervised_tokens"])
def test_a_cache_whose_counts_are_missing_is_refused(cache: Path, count: str) -> None:
    change_content(cache, lambda content: content["files"][SHARDS[1]].pop(count))
    with pytest.raises(CacheFormatError) as caught:
        CacheFolder(cache)
    assert str(caught.value).startswith(
        f"{cache / 'provenance.json'}: files: expected sha256 and the numbers ['bytes', 'samples', 'tokens', "
        f"'supervised_tokens'] of '{SHARDS[1]}', found {{'bytes': "
    )


def test_counts_of_a_ragged_shard_are_compared_with_its_samples(make_cache: Callable[..., Path]) -> None:
    cache = make_ragged(make_cache(3, 2), [2, 1])
    record_files(cache)
    assert verify(cache, "values") == []
    change_content(cache, lambda content: content["files"][SHARDS[1]].update(tokens=0))
    assert verify(cache, "values") == [count_finding(cache, SHARDS[1], tokens=4)]


@pytest.mark.parametrize("level", ["values", "supervision"])
@pytest.mark.parametrize("odd", [2, -1, 1 << 40])
@pytest.mark.parametrize("place", [1, 2, 3, 5])
def test_an_odd_mask_value_among_ones_is_found(
    make_cache: Callable[..., Path], place: int, odd: int, level: str
) -> None:
    """Also where runs of supervised tokens are looked for, of which it is part."""
    mask = [0, 1, 1, 1, 0, 0]
    mask[place] = odd
    cache = cache_of(make_cache, *SOUND, sample_of(mask), sample_of([0, 1, 1, 0]))
    assert verify(cache, level) == [f"[values] {SHARDS[1]}: sample 2: {NO_BIT}"]


@pytest.mark.parametrize("level", ["values", "supervision"])
def test_an_odd_mask_value_is_found_against_tokens_too(cache: Path, tokens: Tokens, level: str) -> None:
    supervised = tokens.loss_mask(1).nonzero()[:, 0].tolist()
    place = next(position for position in supervised if position + 1 in supervised)
    doctor(cache / SHARDS[0], set_at(LOSS_MASK, 1, place, value=2))
    messages = [f"[values] {SHARDS[0]}: sample 1: {message}" for message in (NO_BIT, MASK)]
    assert verify(cache, level, tokens) == [*messages, count_finding(cache, SHARDS[0], supervised_tokens=1)]


def test_values_of_the_last_shard_are_checked_too(cache: Path, tokens: Tokens) -> None:
    doctor(cache / SHARDS[1], set_at(INPUT_IDS, 1, 5, value=7))
    assert verify(cache, "values", tokens) == [f"[values] {SHARDS[1]}: sample 4: {IDS}"]


def test_wrong_bytes_do_not_hide_wrong_values(cache: Path, tokens: Tokens) -> None:
    place = ShardFile(cache / SHARDS[0]).places[INPUT_IDS]
    flip(cache / SHARDS[0], place.offset)
    assert [finding.split()[0] for finding in verify(cache, "values", tokens)] == ["[bytes]", "[values]"]


def test_a_cache_without_provenance_may_hold_anything_at_padding(cache: Path, tokens: Tokens) -> None:
    """As the reference's caches do; what lies there is never supervised."""
    doctor(cache / SHARDS[0], set_at(HIDDEN, 0, 60, 2, value=0.5))
    (cache / "provenance.json").unlink()
    assert verify(cache, "values", tokens) == []


def test_a_cache_of_fewer_samples_than_tokens_is_found(cache: Path, tokens: Tokens) -> None:
    (finding,) = verify(cache, "values", tokens, kept=[0, 1, 2, 3])
    assert finding == "[values] manifest.json: num_samples is 5, tokens/ gives 4"


def test_samples_are_compared_with_the_ones_that_were_kept(cache: Path, tokens: Tokens) -> None:
    found = verify(cache, "values", tokens, kept=[0, 1, 2, 4, 3])
    assert f"[values] {SHARDS[1]}: sample 3: {IDS}" in found
    assert f"[values] {SHARDS[1]}: sample 4: {IDS}" in found
    assert not any(SHARDS[0] in finding for finding in found)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 1023])
def test_an_lm_head_that_is_not_finite_is_found(cache: Path, row: int, value: float) -> None:
    doctor(cache / WEIGHTS, set_at("lm_head.weight", row, 63, value=value))
    assert verify(cache, "bytes") == []
    for level in ("values", "supervision"):
        assert verify(cache, level) == [f"[values] {WEIGHTS}: lm_head.weight holds numbers that are not finite"]


@pytest.mark.parametrize(("row", "part"), [(4095, 1 << 15), (4096, 1 << 15), (4999, 1 << 15), (2, 1), (4999, 8)])
def test_every_row_of_a_large_lm_head_is_checked(
    make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, row: int, part: int
) -> None:
    """A row has 8 bytes; in parts of so many or fewer it is read by itself."""
    monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", part)
    cache = make_cache(2, 2, target_vocab_size=5000)
    weight = torch.zeros(5000, 4, dtype=torch.bfloat16)
    weight[row, 3] = float("nan")
    for head, findings in [(weight, 1), (torch.zeros_like(weight), 0)]:
        with put_file(cache / WEIGHTS) as temporary:
            write_tensors(temporary, {"embed_tokens.weight": torch.zeros_like(weight), "lm_head.weight": head})
        assert len(verify(cache, "values")) == findings


@pytest.mark.parametrize(("memory", "findings"), [(1024 * 64 * 2, 0), (1024 * 64 * 2 - 1, 1)])
def test_an_lm_head_larger_than_the_memory_is_found_and_not_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch, memory: int, findings: int
) -> None:
    monkeypatch.setattr("dspark_cache.verify.physical_memory", lambda: memory)
    message = f"[values] {WEIGHTS}: lm_head.weight is larger than the memory of this machine"
    assert verify(cache, "bytes") == []
    assert verify(cache, "values") == [message] * findings
    doctor(cache / WEIGHTS, set_at("lm_head.weight", 0, 0, value=float("nan")))
    assert ("not finite" in verify(cache, "values")[0]) == (not findings)


def test_the_tied_weight_of_a_ragged_cache_is_checked(make_cache: Callable[..., Path]) -> None:
    cache = make_ragged(make_cache(3, 2), [3])
    weight = load_file(cache / WEIGHTS)["embed_tokens.weight"].clone()
    for value, findings in [
        (1.0, []),
        (float("nan"), [f"[values] {WEIGHTS}: embed_tokens.weight holds numbers that are not finite"]),
    ]:
        weight[31, 3] = value
        with put_file(cache / WEIGHTS) as temporary:
            write_tensors(temporary, {"embed_tokens.weight": weight})
        assert verify(cache, "values") == findings


def test_bytes_of_an_lm_head_larger_than_the_memory_are_checked_all_the_same(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark_cache.verify.physical_memory", lambda: 0)
    flip(cache / WEIGHTS, ShardFile(cache / WEIGHTS).places["lm_head.weight"].offset)
    digest, value = verify(cache, "values")
    assert digest.startswith(f"[bytes] {WEIGHTS}: sha256 is ")
    assert value == f"[values] {WEIGHTS}: lm_head.weight is larger than the memory of this machine"
    (cache / "provenance.json").unlink()
    assert verify(cache, "values") == [value]


def test_bytes_of_target_weights_are_found_before_their_values(cache: Path) -> None:
    doctor(cache / WEIGHTS, set_at("lm_head.weight", 0, 0, value=float("inf")))
    flip(cache / WEIGHTS, ShardFile(cache / WEIGHTS).places["embed_tokens.weight"].offset)
    assert [finding.split(" is ")[0] for finding in verify(cache, "values")] == [
        f"[bytes] {WEIGHTS}: sha256",
        f"[values] {WEIGHTS}: lm_head.weight holds numbers that are not finite",
    ]


def test_an_embedding_that_is_not_finite_is_no_fault_beside_an_lm_head(cache: Path) -> None:
    doctor(cache / WEIGHTS, set_at("embed_tokens.weight", 0, 0, value=float("inf")))
    assert verify(cache, "values") == []


def test_target_weights_that_are_gone_are_said_to_be(cache: Path) -> None:
    opened = CacheFolder(cache)
    (cache / WEIGHTS).unlink()
    with pytest.raises(CacheNotFoundError, match=f"^no such file: {cache / WEIGHTS}$"):
        list(check_weights(opened))


def doctored_ragged(make_cache: Callable[..., Path], change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Write a ragged cache of samples of 2, 3 and 4 tokens with a change in each file where it applies."""
    cache = make_ragged(make_cache(3, 3), [2, 1])
    for path in cache.glob("s*-00000[01].safetensors"):
        tensors = {key: value.clone() for key, value in load_file(path).items()}
        change(tensors)
        order = sorted(tensors, key=lambda key: ShardFile(path).places[key].offset)
        with put_file(path) as temporary:
            write_tensors(temporary, {key: tensors[key] for key in order})
    record_files(cache)
    return cache


class Given:
    """Tokens that are those of a ragged cache but for one sample, whose ids and mask are given."""

    def __init__(self, cache: Path, index: int, ids: list[int], mask: list[int]) -> None:
        self._dataset = CachedDSparkDataset(cache, padded=False)
        self._given = index, torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._dataset)

    def input_ids(self, index: int) -> torch.Tensor:
        return self._given[1] if index == self._given[0] else self._dataset[index][INPUT_IDS]

    def loss_mask(self, index: int) -> torch.Tensor:
        return self._given[2] if index == self._given[0] else self._dataset[index][LOSS_MASK]


def test_a_ragged_sample_with_fewer_tokens_than_it_should_have_is_found(make_cache: Callable[..., Path]) -> None:
    """Though what is missing are pad tokens, not supervised."""
    cache = make_ragged(make_cache(3, 3), [2, 1])
    sample = CachedDSparkDataset(cache, padded=False)[1]
    ids, mask = sample[INPUT_IDS].tolist(), sample[LOSS_MASK].tolist()
    tokens: Any = Given(cache, 1, ids, mask)
    assert verify(cache, "values", tokens) == []
    tokens = Given(cache, 1, [*ids, 0], [*mask, 0])
    assert verify(cache, "values", tokens) == [
        f"[values] {SHARDS[0]}: sample 1: {message}" for message in (ZERO, IDS, MASK)
    ]


def test_a_ragged_sample_with_more_tokens_than_it_should_have_is_found(make_cache: Callable[..., Path]) -> None:
    cache = make_ragged(make_cache(3, 3), [2, 1])
    record_files(cache)
    sample = CachedDSparkDataset(cache, padded=False)[1]
    tokens: Any = Given(cache, 1, sample[INPUT_IDS].tolist()[:-1], sample[LOSS_MASK].tolist()[:-1])
    messages = [
        "padding is supervised",
        "padding holds ids other than 0",
        f"{HIDDEN} is not zero at padding",
        f"{LAST_HIDDEN} is not zero at padding",
    ]
    assert verify(cache, "values", tokens) == [
        *(f"[values] {SHARDS[0]}: sample 1: {message}" for message in messages),
        count_finding(cache, SHARDS[0], tokens=-1),
    ]


@pytest.mark.parametrize("token", [2, 3, 4])
def test_a_zero_state_of_a_ragged_sample_is_found_at_its_end_too(make_cache: Callable[..., Path], token: int) -> None:
    """Where a padded sample would seem to be shorter."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if LAST_HIDDEN in tensors and len(tensors[LAST_HIDDEN]) == 5:
            tensors[LAST_HIDDEN][token] = 0
        elif LOSS_MASK in tensors and len(tensors[LOSS_MASK]) == 5:
            tensors[LOSS_MASK][token] = 0

    assert verify(doctored_ragged(make_cache, change), "values") == [f"[values] {SHARDS[0]}: sample 1: {ZERO}"]


@pytest.mark.parametrize("value", [-1, 32])
def test_an_odd_id_of_a_ragged_sample_is_found(make_cache: Callable[..., Path], value: int) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if INPUT_IDS in tensors and len(tensors[INPUT_IDS]) == 4:
            tensors[INPUT_IDS][3] = value

    expected = [f"[values] {SHARDS[1]}: sample 2: ids outside 0..31"]
    assert verify(doctored_ragged(make_cache, change), "values") == expected


def test_ids_of_the_largest_vocabulary_are_compared_with_it(make_cache: Callable[..., Path]) -> None:
    """It is one more than ids of 32 bits."""
    cache = make_ragged(make_cache(3, 3), [2, 1])
    manifest = json.loads((cache / "manifest.json").read_text()) | {"target_vocab_size": 1 << 31}
    (cache / "manifest.json").write_text(json.dumps(manifest))
    opened = CacheFolder(cache)
    values = read_files(opened, opened.open_shard(0), (HIDDEN, LAST_HIDDEN))[1]
    assert list(check_values(opened, 0, values, Supervision(), None)) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("key", [HIDDEN, LAST_HIDDEN])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_any_state_that_is_not_finite_is_found(
    make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: str, layout: str, key: str, value: float
) -> None:
    """In pieces of some tokens, of one, and of one layer of it."""
    cache = make_cache(3, 3, dtype=dtype)
    tensors = {name: tensor.clone() for name, tensor in load_file(cache / SHARDS[0]).items()}
    tensors[key][1, 2, -1] = value
    write_shard(cache, 0, tensors)
    if layout == "ragged":
        cache = make_ragged(cache, [2, 1])
    for chunk in (1, 16, 100, 1 << 21):
        monkeypatch.setattr("dspark_cache.shard_stream.CHUNK_BYTES", chunk)
        expected = [f"[values] {SHARDS[0]}: sample 1: {key} holds numbers that are not finite"]
        assert verify(cache, "values") == expected


@pytest.mark.parametrize("key", [HIDDEN, LAST_HIDDEN])
@pytest.mark.parametrize(("value", "is_zero"), [(-0.0, True), (2.0**-133, False)])
def test_a_zero_is_one_whatever_its_sign_and_a_tiny_number_is_none(
    make_cache: Callable[..., Path], key: str, value: float, is_zero: bool
) -> None:
    cache = make_cache(3, 3)
    record_files(cache)
    tokens: Any = Given(make_ragged(cache, [3]), 3, [], [])
    doctor(cache / SHARDS[0], set_at(key, 1, 7, 1, value=value))
    messages = [f"[values] {SHARDS[0]}: sample 1: {key} is not zero at padding"]
    assert verify(cache, "values", tokens) == messages * (not is_zero)
    doctor(cache / SHARDS[0], set_at(LAST_HIDDEN, 1, 0, value=0))
    doctor(cache / SHARDS[0], set_at(LAST_HIDDEN, 1, 0, 1, value=value))
    assert (f"[values] {SHARDS[0]}: sample 1: {ZERO}" in verify(cache, "values", tokens)) == is_zero


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_each_byte_is_read_once(make_cache: Callable[..., Path], layout: str) -> None:
    """But for headers, offsets and what says how things are: in all less than a tenth."""
    cache = make_cache(16, 4, seq_length=64, hidden=256, layers=4)
    if layout == "ragged":
        cache = make_ragged(cache, [8, 8])
    record_files(cache)

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    size = sum(path.stat().st_size for path in cache.glob("*.safetensors"))
    assert verify(cache, "values") == []
    before = bytes_read()
    assert verify(cache, "values") == []
    assert size <= bytes_read() - before < 1.1 * size


# Level supervision


def cache_of(make_cache: Callable[..., Path], *samples: tuple[list[int], list[int]], shard_size: int = 2) -> Path:
    """Write a cache of samples, each ids and mask, in windows of 12 positions."""
    folder = make_cache(len(samples), shard_size, seq_length=12)
    for start in range(0, len(samples), shard_size):
        part = samples[start : start + shard_size]
        tensors = {
            INPUT_IDS: torch.zeros(len(part), 12, dtype=torch.int64),
            LOSS_MASK: torch.zeros(len(part), 12, dtype=torch.int64),
            HIDDEN: torch.zeros(len(part), 12, 8, dtype=torch.bfloat16),
            LAST_HIDDEN: torch.zeros(len(part), 12, 4, dtype=torch.bfloat16),
        }
        for row, (ids, mask) in enumerate(part):
            for key, values in ((INPUT_IDS, ids), (LOSS_MASK, mask), (HIDDEN, 1), (LAST_HIDDEN, 1)):
                tensors[key][row, : len(ids)] = torch.as_tensor(values)
        write_shard(folder, start // shard_size, tensors)
    record_files(folder)
    return folder


def sample_of(mask: list[int], first: int = 1) -> tuple[list[int], list[int]]:
    """Return a sample whose ids count from `first`."""
    return list(range(first, first + len(mask))), mask


SOUND = [sample_of([0, 1, 1]), sample_of([0, 0, 1, 1, 0, 1, 1], first=3)]


@pytest.mark.parametrize("shard_size", [1, 2, 13])
def test_a_cache_that_trains_well_has_no_findings(make_cache: Callable[..., Path], shard_size: int) -> None:
    assert verify(cache_of(make_cache, *SOUND * 3, shard_size=shard_size), "supervision") == []


UNSUPERVISED = sample_of([0, 0, 0])
SUPERVISION: dict[str, tuple[list[tuple[list[int], list[int]]], str]] = {
    "nothing": (
        [UNSUPERVISED] * 3,
        "no token of any sample is supervised: does the chat template mark the answers?",
    ),
    "one sample": (
        [*SOUND, UNSUPERVISED],
        "1 of 3 samples have no supervised token, the first: [2]; data.min_loss_tokens: 1 leaves them out",
    ),
    "many samples": (
        [*SOUND, *[UNSUPERVISED] * 11],
        "11 of 13 samples have no supervised token, the first: [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]; data.min_loss_tokens: "
        "1 leaves them out",
    ),
    "no anchor": (
        [*SOUND, sample_of([0, 1, 0, 1])],
        "1 of 3 samples have no two supervised tokens in a row, where a draft could begin, the first: [2]; "
        "data.min_loss_tokens leaves out short answers",
    ),
    "many without anchor": (
        [*SOUND, *[sample_of([0, 1, 0], first=number) for number in range(1, 12)]],
        "11 of 13 samples have no two supervised tokens in a row, where a draft could begin, the first: [2, 3, 4, 5, "
        "6, 7, 8, 9, 10, 11]; data.min_loss_tokens leaves out short answers",
    ),
    "all tokens": (
        [sample_of([1] * 5), sample_of([1] * 4, first=7)],
        "100.0 % of all tokens are supervised: does the chat template mark only answers?",
    ),
    "a prefix": (
        [([1, 7, 8, 9], [0, 1, 1, 1]), ([2, 7, 8, 3, 7, 8, 5], [0, 1, 1, 0, 1, 1, 1]), ([7, 8], [1, 1])],
        "all 4 supervised spans begin with the same ids [7, 8], which the chat template puts there; "
        "data.mask_generation_prompt: true leaves them out",
    ),
    "a long prefix": (
        [([3, *range(20, 30), 1], [0] + [1] * 10 + [0]), (list(range(20, 31)), [1] * 11)],
        "all 2 supervised spans begin with the same ids [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], which the chat "
        "template puts there; data.mask_generation_prompt: true leaves them out",
    ),
}


@pytest.mark.parametrize("fault", SUPERVISION)
@pytest.mark.parametrize("shard_size", [1, 2])
def test_what_would_train_badly_is_found_by_itself(
    make_cache: Callable[..., Path], fault: str, shard_size: int
) -> None:
    samples, message = SUPERVISION[fault]
    cache = cache_of(make_cache, *samples, shard_size=shard_size)
    assert verify(cache, "values") == []
    assert verify(cache, "supervision") == [f"[supervision] manifest.json: {message}"]


def test_everything_that_would_train_badly_is_found_at_once(make_cache: Callable[..., Path]) -> None:
    cache = cache_of(make_cache, UNSUPERVISED, ([7], [1]), ([7, 8], [1, 1]), ([7], [1]))
    assert [finding.removeprefix("[supervision] manifest.json: ")[:20] for finding in verify(cache, "supervision")] == [
        "1 of 4 samples have ",
        "2 of 4 samples have ",
        "all 3 supervised spa",
    ]


@pytest.mark.parametrize(
    ("samples", "prefix"),
    [
        ([([1, 7, 8], [0, 1, 1])], 0),  # one span says nothing
        ([([1, 7, 8], [0, 1, 1]), ([1, 7, 8, *[0] * 8, 7], [0, 1, 1, *[0] * 8, 1])], 2),  # the last one is cut
        ([([1, 7, 8], [0, 1, 1]), ([*[1] * 10, 7, 9], [*[0] * 10, 1, 1])], 0),  # the only other one is cut
        ([([1, 7, 8], [0, 1, 1]), ([*[1] * 9, 7, 9], [*[0] * 9, 1, 1])], 1),  # the other one ends before the window
        ([([1, 7, 8], [0, 1, 1]), ([1, 7, 8, 7, 9], [0, 1, 1, 0, 0])], 2),
        ([([1, 7, 8], [0, 1, 1]), ([1, 7, 8, 1, 9, 9], [0, 1, 1, 0, 1, 1])], 0),
    ],
)
def test_a_prefix_is_what_two_whole_spans_have_in_common(
    make_cache: Callable[..., Path], samples: list[tuple[list[int], list[int]]], prefix: int
) -> None:
    report = verify_cache(CacheFolder(cache_of(make_cache, *samples)), "supervision")
    assert report.as_json()["supervision"]["common_span_prefix_tokens"] == prefix
    assert len(report.findings) == (prefix > 0)


@pytest.mark.parametrize("odd", [1, 16])
def test_what_is_supervised_is_the_same_in_either_layout(make_cache: Callable[..., Path], odd: int) -> None:
    """Also by mask values whose product has more than eight bits."""
    samples = [sample for samples, _ in SUPERVISION.values() for sample in samples]
    samples += [sample_of([0, odd, odd, 0]), sample_of([0] * 9 + [1] * 3), sample_of([0] * 8 + [1] * 3)]
    padded = cache_of(make_cache, *samples, shard_size=len(samples))
    ragged = make_ragged(padded, [len(samples) - 2, 2])
    reports = [verify_cache(CacheFolder(cache), "values") for cache in (padded, ragged)]
    assert reports[0].supervision == reports[1].supervision
    assert reports[0].supervision.num_samples == len(samples)
    assert [len(report.findings) for report in reports] == [int(odd > 1)] * 2


@pytest.mark.parametrize(("supervised", "findings"), [(490, 0), (491, 1)])
def test_a_share_of_98_percent_is_plausible_and_no_more(supervised: int, findings: int) -> None:
    supervision = Supervision()
    mask = torch.tensor([0] * (500 - supervised) + [1] * supervised)
    supervision.add(0, {INPUT_IDS: torch.zeros(500, dtype=torch.int64), LOSS_MASK: mask}, 500, is_cut=True)
    found = [finding.message for finding in check_supervision(supervision)]
    assert found == ["98.2 % of all tokens are supervised: does the chat template mark only answers?"] * findings


def test_supervision_is_not_judged_where_anything_else_is_wrong(make_cache: Callable[..., Path]) -> None:
    cache = cache_of(make_cache, UNSUPERVISED, ([1, 32, 2], [0, 0, 0]))
    assert verify(cache, "supervision") == [f"[values] {SHARDS[0]}: sample 1: ids outside 0..31"]


# Threads


def faulty(make_cache: Callable[..., Path], num_samples: int, shard_size: int) -> Path:
    """Write a recorded cache of which every sample has an id that is none."""
    cache = make_cache(num_samples, shard_size)
    for path in sorted(cache.glob("shard-*")):
        tensors = {key: value.clone() for key, value in load_file(path).items()}
        tensors[INPUT_IDS][:, 0] = 32
        write_shard(cache, int(path.name[6:12]), tensors)
    record_files(cache)
    return cache


def outcome(cache: Path, level: str, num_threads: int) -> tuple[dict[str, Any], list[int]]:
    """Return the report and what progress was told."""
    advanced: list[int] = []
    report = verify_cache(CacheFolder(cache), level, num_threads=num_threads, advance=advanced.append)
    return report.as_json(), advanced


def test_threads_change_neither_findings_nor_their_order_nor_counts(make_cache: Callable[..., Path]) -> None:
    cache = faulty(make_cache, 14, 2)
    flip(cache / SHARDS[1], ShardFile(cache / SHARDS[1]).places[HIDDEN].offset)
    change_content(cache, lambda content: content["files"]["shard-000005.safetensors"].update(tokens=0))
    expected, advanced = outcome(cache, "values", 1)
    assert [finding.split(":")[0][-19:-12] for finding in expected["findings"]] == [
        *["-000000"] * 2, *["-000001"] * 3, *["-000002"] * 2, *["-000003"] * 2, *["-000004"] * 2, *["-000005"] * 3,
        *["-000006"] * 2,
    ]  # fmt: skip
    assert expected["supervision"]["num_samples"] == 14
    assert advanced == [1] * 7
    for num_threads in (2, 3, 8):
        assert outcome(cache, "values", num_threads) == (expected, advanced)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_supervision_is_merged_in_the_order_of_the_samples(make_cache: Callable[..., Path], num_threads: int) -> None:
    samples = [UNSUPERVISED if number % 2 else SOUND[number % 4 // 2] for number in range(9)]
    report, advanced = outcome(cache_of(make_cache, *samples, shard_size=1), "supervision", num_threads)
    assert report["findings"] == [
        "[supervision] manifest.json: 4 of 9 samples have no supervised token, the first: [1, 3, 5, 7]; "
        "data.min_loss_tokens: 1 leaves them out"
    ]
    assert advanced == [1] * 9


@pytest.mark.parametrize(("level", "told"), [("files", 0), ("headers", 0), ("bytes", 3), ("values", 3)])
def test_progress_is_told_of_each_shard_once(make_cache: Callable[..., Path], level: str, told: int) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    assert outcome(cache, level, 2)[1] == [1] * told


class Meeting:
    """Tokens of which each reading waits for another one at the same time."""

    def __init__(self, cache: Path) -> None:
        self._dataset = CachedDSparkDataset(cache)
        self._barrier = threading.Barrier(2)

    def __len__(self) -> int:
        return len(self._dataset)

    def input_ids(self, index: int) -> torch.Tensor:
        self._barrier.wait(timeout=10)
        sample = self._dataset[index]
        return sample[INPUT_IDS][: int((sample[LAST_HIDDEN] != 0).any(dim=-1).sum())]

    def loss_mask(self, index: int) -> torch.Tensor:
        return self._dataset[index][LOSS_MASK][: len(self.input_ids(index))]


def test_as_many_shards_as_threads_are_checked_at_a_time(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(2, 1)
    tokens: Any = Meeting(cache)
    assert verify_cache(CacheFolder(cache), "values", tokens=tokens, num_threads=2).findings == []


class Asking(Given):
    """Tokens that remember on how many processors torch computes where they are asked for."""

    def __init__(self, cache: Path) -> None:
        super().__init__(cache, -1, [], [])
        self.found: set[int] = set()

    def input_ids(self, index: int) -> torch.Tensor:
        self.found.add(torch.get_num_threads())
        return super().input_ids(index)


def test_torch_takes_one_processor_a_thread_and_as_many_as_before_later(make_cache: Callable[..., Path]) -> None:
    cache = make_ragged(make_cache(6, 2), [2, 2, 2])
    tokens: Any = Asking(cache)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert verify_cache(CacheFolder(cache), "values", tokens=tokens, num_threads=2).findings == []
        assert tokens.found == {1}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_damaged_shard_is_named_and_only_the_first_findings_are_listed(
    make_cache: Callable[..., Path], num_threads: int
) -> None:
    cache = faulty(make_cache, 240, 60)
    report, advanced = outcome(cache, "values", num_threads)
    shards = [f"shard-{number:06d}.safetensors" for number in range(4)]
    numbers = [*range(MAX_FINDINGS), 120, 180]
    listed = [f"[values] {shards[number // 60]}: sample {number}: ids outside 0..31" for number in numbers]
    others = [f"[values] {shard}: and others" for shard in shards[1:]]
    assert report["findings"] == [*listed[:-2], others[0], listed[-2], others[1], listed[-1], others[2]]
    assert report["supervision"]["num_samples"] == 240
    assert advanced == [1] * 4


def test_one_shard_has_so_many_findings_and_no_more(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, advanced = outcome(faulty(make_cache, 150, 150), "values", 1)
    assert len(report["findings"]) == MAX_FINDINGS + 1
    assert report["findings"][-1] == f"[values] {SHARDS[0]}: and others"
    assert main(["verify", str(tmp_path / "cache-0")]) == 1
    assert capsys.readouterr().err.endswith(f"has at least {MAX_FINDINGS + 1} finding(s)\n")
    assert report["supervision"]["num_samples"] == 150
    assert advanced == [1]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bytes_name_every_damaged_shard(make_cache: Callable[..., Path], num_threads: int) -> None:
    cache = make_cache(1, 1)
    for number in range(1, MAX_FINDINGS + 5):
        (cache / f"shard-{number:06d}.safetensors").hardlink_to(cache / SHARDS[0])
    manifest = json.loads((cache / "manifest.json").read_text())
    (cache / "manifest.json").write_text(json.dumps({**manifest, "num_samples": MAX_FINDINGS + 5}))
    record_files(cache)
    change_content(
        cache,
        lambda content: [
            record.update(sha256="0" * 64) for name, record in content["files"].items() if name != "manifest.json"
        ],
    )
    report, advanced = outcome(cache, "bytes", num_threads)
    expected = [WEIGHTS, *(f"shard-{number:06d}.safetensors" for number in range(MAX_FINDINGS + 5))]
    assert [finding.split()[1][:-1] for finding in report["findings"]] == expected
    assert advanced == [1] * (MAX_FINDINGS + 5)


# Caches that change while they are verified

LAST = "shard-000009.safetensors"
"""The last of ten shards: whichever number of threads there is, the first one is through before it is its turn."""
CHANGED = "was changed while it was in use: "


def found_meanwhile(cache: Path, level: str, num_threads: int, change: Callable[[], object]) -> list[str]:
    """Verify a cache of ten shards that is changed once, after the first of them; return the findings."""
    advanced: list[int] = []

    def advance(number: int) -> None:
        if not advanced:
            change()
        advanced.append(number)

    report = verify_cache(CacheFolder(cache), level, num_threads=num_threads, advance=advance)
    assert advanced == [1] * 10
    assert not any(thread.name.startswith("verify") for thread in threading.enumerate())
    return [str(finding) for finding in report.findings]


def replace_last(cache: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> None:
    """Put another file in the place of the last shard, with the same tensors but for a change."""
    tensors = {key: value.clone() for key, value in load_file(cache / LAST).items()}
    change(tensors)
    write_shard(cache, 9, tensors)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_shard_that_is_replaced_by_the_same_bytes_is_found_where_nobody_can_tell(
    make_cache: Callable[..., Path], num_threads: int, recorded: bool
) -> None:
    cache = make_cache(20, 2)
    if recorded:
        record_files(cache)
    refused = f"{cache} {CHANGED}{cache / LAST} is another file with no recorded sha256 to compare; open the "
    expected = [] if recorded else [f"[values] {LAST}: {refused}cache again"]
    assert found_meanwhile(cache, "values", num_threads, lambda: replace_last(cache)) == expected


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_shard_that_is_replaced_by_other_bytes_is_found_twice(
    make_cache: Callable[..., Path], num_threads: int
) -> None:
    cache = make_cache(20, 2)
    record_files(cache)
    change = set_at(LAST_HIDDEN, 1, 0, 0, value=7)
    digests, values = found_meanwhile(cache, "values", num_threads, lambda: replace_last(cache, change))
    assert digests.startswith(f"[bytes] {LAST}: sha256 is ")
    assert values == (
        f"[values] {LAST}: {cache} {CHANGED}{cache / LAST} is another file with another sha256 than provenance.json "
        "records; open the cache again"
    )


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("level", ["bytes", "values", "supervision"])
def test_a_shard_that_vanishes_is_found_by_every_level_that_would_have_read_it(
    make_cache: Callable[..., Path], level: str, recorded: bool, num_threads: int
) -> None:
    cache = make_cache(20, 2)
    if recorded:
        record_files(cache)
    by_bytes = [f"[bytes] {LAST}: went missing while the cache was verified"]
    by_values = [f"[values] {LAST}: {cache} {CHANGED}no such file: {cache / LAST}; open it again"]
    expected = by_bytes * recorded + by_values * (level != "bytes")
    assert found_meanwhile(cache, level, num_threads, (cache / LAST).unlink) == expected


def test_the_second_file_of_a_ragged_shard_that_vanishes_is_found_by_its_own_name(
    make_cache: Callable[..., Path],
) -> None:
    cache = make_ragged(make_cache(10, 10), [1] * 10)
    record_files(cache)
    path = cache / "samples-000009.safetensors"
    assert found_meanwhile(cache, "values", 1, path.unlink) == [
        f"[bytes] {path.name}: went missing while the cache was verified",
        f"[values] {LAST}: {cache} {CHANGED}no such file: {path}; open it again",
    ]


def test_a_manifest_that_is_replaced_is_found_with_the_first_shard_that_is(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(20, 2)
    record_files(cache)

    def replace() -> None:
        (cache / "manifest.json").write_text((cache / "manifest.json").read_text() + "\n")
        replace_last(cache)

    (finding,) = found_meanwhile(cache, "values", 1, replace)
    assert finding.startswith(f"[values] {LAST}: {cache} was replaced while it was in use: manifest.json or provenance")


def test_a_cache_whose_manifest_is_another_one_than_was_read_is_refused(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(3, 2)
    opened = CacheFolder(cache)
    (cache / "manifest.json").write_text((cache / "manifest.json").read_text() + "\n")
    with pytest.raises(CacheFormatError, match=f"^{cache} was replaced while it was in use: manifest.json or "):
        verify_cache(opened, "values")


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("stays", [False, True])
def test_a_file_that_is_another_one_when_it_is_opened_to_be_read_is_found(
    make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, layout: str, stays: bool
) -> None:
    """The other one is there from the first shard on, or for the opening only."""
    cache = make_cache(10, 1)
    if layout == "ragged":
        cache = make_ragged(cache, [1] * 10)
    path, kept, other = cache / LAST, cache.parent / "kept", cache.parent / "other"
    shutil.copy(path, other)
    begun: list[bool] = []
    open_shard = CacheFolder.open_shard

    def put_other() -> None:
        path.rename(kept)
        other.rename(path)

    def begin() -> None:
        begun.append(True)
        if stays:
            put_other()

    def swapped(opened: CacheFolder, shard: int) -> tuple[ShardFile, ...]:
        if not begun or stays or shard != 9:
            return open_shard(opened, shard)
        put_other()
        files = open_shard(opened, shard)
        kept.rename(path)
        return files

    monkeypatch.setattr(CacheFolder, "open_shard", swapped)
    assert found_meanwhile(cache, "values", 1, begin) == [
        f"[values] {LAST}: {cache} {CHANGED}{path} is another file with no recorded sha256 to compare; open the cache "
        "again"
    ]


# Verifications that end early


class Held:
    """Tokens of which none but the first sample can be read before `let_go`; remembers what was asked for."""

    def __init__(self, cache: Path) -> None:
        self._dataset = CachedDSparkDataset(cache)
        self.let_go = threading.Event()
        self.asked: set[int] = set()
        self.fault: BaseException | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def input_ids(self, index: int) -> torch.Tensor:
        self.asked.add(index)
        if index:
            assert self.let_go.wait(timeout=30)
        elif self.fault:
            raise self.fault
        sample = self._dataset[index]
        return sample[INPUT_IDS][: int((sample[LAST_HIDDEN] != 0).any(dim=-1).sum())]

    def loss_mask(self, index: int) -> torch.Tensor:
        return self._dataset[index][LOSS_MASK][: len(self.input_ids(index))]


@pytest.mark.parametrize("fault", [RuntimeError("no more"), KeyboardInterrupt()])
@pytest.mark.parametrize("raised_by", ["advance", "tokens"])
def test_no_shard_is_begun_after_an_exception(
    make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, fault: BaseException, raised_by: str
) -> None:
    """Two threads have begun three shards by then at most: the first, and one each."""
    cache = make_cache(20, 1)
    held = Held(cache)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            held.let_go.set()
            super().shutdown(wait=wait)

    def advance(_: int) -> None:
        raise fault

    monkeypatch.setattr("dspark_cache.threads.ThreadPoolExecutor", Pool)
    held.fault = fault if raised_by == "tokens" else None
    tokens: Any = held
    with pytest.raises(type(fault)) as caught:
        verify_cache(CacheFolder(cache), "values", tokens=tokens, num_threads=1, advance=advance)
    assert caught.value is fault
    assert held.asked <= {0, 1, 2}
    assert not any(thread.name.startswith("verify") for thread in threading.enumerate())


# Counts and reports


def test_supervision_is_counted(cache: Path, tokens: Tokens) -> None:
    report = verify_cache(CacheFolder(cache), "values", tokens=tokens)
    masks = [tokens.loss_mask(index).int() for index in range(5)]
    counts = report.supervision.as_json()
    assert counts == {
        "num_samples": 5,
        "num_tokens": tokens.num_tokens,
        "supervised_tokens": sum(int(mask.sum()) for mask in masks),
        "supervised_fraction": round(sum(int(mask.sum()) for mask in masks) / tokens.num_tokens, 6),
        "anchors": sum(int((mask[:-1] * mask[1:]).sum()) for mask in masks),
        "unsupervised_samples": 0,
        "samples_without_anchor": 0,
        "common_span_prefix_tokens": 0,
    }
    assert counts["supervised_tokens"] == tokens.identity["supervised_tokens"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([0, 0, 0, 0], (0, 0, 1, 1)),
        ([0, 1, 0, 1], (2, 0, 0, 1)),
        ([0, 1, 1, 0], (2, 1, 0, 0)),
        ([1, 1, 1, 1], (4, 3, 0, 0)),
    ],
)
def test_an_anchor_is_supervised_and_so_is_its_successor(mask: list[int], expected: tuple[int, ...]) -> None:
    counts = Supervision()
    counts.add(5, {INPUT_IDS: torch.arange(4), LOSS_MASK: torch.tensor(mask)}, 3, is_cut=False)
    lists = (counts.unsupervised.tolist(), counts.without_anchor.tolist())
    assert (counts.supervised_tokens, counts.anchors, *map(len, lists)) == expected
    assert all(indices in ([], [5]) for indices in lists)
    assert (counts.num_samples, counts.num_tokens) == (1, 3)


@pytest.mark.parametrize("cut", range(5))
def test_merged_counts_are_those_of_all_samples_in_order(cut: int) -> None:
    samples = [([1, 7, 8], [0, 0, 0]), ([1, 7, 8], [0, 1, 1]), ([2, 7, 5], [0, 1, 0]), ([3, 7, 8], [0, 1, 1])]
    parts = [Supervision(), Supervision(), Supervision()]
    for index, (ids, mask) in enumerate(samples):
        for part in (parts[0], parts[1 if index < cut else 2]):
            sample = {INPUT_IDS: torch.tensor(ids), LOSS_MASK: torch.tensor(mask)}
            part.add(index, sample, 2 if index == 3 else 3, is_cut=index != 3)
    merged = Supervision()
    merged.merge(parts[1])
    merged.merge(parts[2])
    assert merged == parts[0]
    assert merged.as_json() == {
        "num_samples": 4,
        "num_tokens": 11,
        "supervised_tokens": 5,
        "supervised_fraction": round(5 / 11, 6),
        "anchors": 2,
        "unsupervised_samples": 1,
        "samples_without_anchor": 2,
        "common_span_prefix_tokens": 1,
    }
    assert merged.unsupervised.tolist() == [0]
    assert merged.without_anchor.tolist() == [0, 2]
    assert merged.lengths == {3: 3, 2: 1}
    assert merged.anchor_counts == {0: 2, 1: 2}
    assert merged.percents == {0: 1, 66: 1, 33: 1, 100: 1}
    assert merged.extremes == {
        "longest": Extreme(value=3, index=0),
        "shortest": Extreme(value=-2, index=3),
        "most supervised": Extreme(value=1, index=3),
        "least supervised": Extreme(value=0, index=0),
    }


def test_supervised_padding_is_no_part_of_a_span() -> None:
    counts = Supervision()
    for index in range(2):
        counts.add(index, {INPUT_IDS: torch.tensor([7, 8, 9]), LOSS_MASK: torch.tensor([1, 1, 1])}, 2, is_cut=False)
    assert (counts.spans.num_spans, counts.spans.ids) == (2, [7, 8])


def test_every_file_that_is_left_over_is_named(cache: Path) -> None:
    for number in range(MAX_FINDINGS + 5):
        (cache / f"left-{number:03d}").touch()
    assert len(list(check_files(CacheFolder(cache)))) == MAX_FINDINGS + 5
    assert len(verify(cache, "files")) == MAX_FINDINGS + 5


def test_a_report_is_metrics_and_text() -> None:
    report = Report(level="files")
    assert report.collect(iter([]))
    assert not report.collect(iter([Finding(level="files", file="x", message="is missing")]))
    assert report.as_json() == {
        "level": "files",
        "num_findings": 1,
        "findings": ["[files] x: is missing"],
        "supervision": Supervision().as_json(),
        "recompute": {},
    }
    report.num_recomputed = 2
    report.distances = [
        Distance(state="layer 1", mean=0.001, worst=0.004, limit=0.01),
        Distance(state="logits", mean=0.01, worst=0.02, limit=0.1),
    ]
    assert report.as_json()["recompute"] == {
        "num_samples": 2,
        "worst_relative_l2": 0.02,
        "worst_share_of_tolerance": 0.4,
    }
    assert report.as_json()["supervision"]["supervised_fraction"] == 0


# Caches that cannot be opened for verification


def test_a_folder_without_a_readable_manifest_is_refused(cache: Path) -> None:
    path = cache / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "complete": False}))
    with pytest.raises(CacheFormatError, match="is incomplete: its manifest says complete: False"):
        CacheFolder(cache)
    path.write_text(json.dumps({key: value for key, value in manifest.items() if key != "target_vocab_size"}))
    with pytest.raises(CacheFormatError) as error:
        CacheFolder(cache)
    assert str(error.value) == f"{path}: missing required keys ['target_vocab_size']"
    path.unlink()
    with pytest.raises(CacheNotFoundError, match="no DSpark cache in "):
        CacheFolder(cache)


@pytest.mark.parametrize(
    "files",
    [
        "{",
        "[]",
        '{"files": null}',
        '{"files": []}',
        '{"files": "x"}',
        '{"files": {"shard-000000.safetensors": 5}}',
    ],
)
def test_unreadable_or_odd_provenance_is_refused(cache: Path, files: str) -> None:
    (cache / "provenance.json").write_text(files)
    with pytest.raises(CacheFormatError, match=r"/provenance\.json(: | is not valid JSON| must hold a JSON object)"):
        CacheFolder(cache)


def test_provenance_that_was_changed_by_hand_is_refused(cache: Path) -> None:
    path = cache / "provenance.json"
    path.write_text(path.read_text().replace(f'"pad_token_id": {PAD}', '"pad_token_id": 1'))
    with pytest.raises(CacheFormatError, match=r"provenance\.json: sha256: its content has \w+, it says \w+$"):
        CacheFolder(cache)
