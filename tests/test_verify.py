"""Doctored caches, one fault each: the level that must find it does, naming the file, and no earlier level does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.files import put_file
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK
from dspark_cache.settings import VERIFY_LEVELS
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.tokens import Tokens
from dspark_cache.verify import MAX_FINDINGS, CacheFolder, Finding, Report, Supervision, check_files, verify_cache
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
    """Make provenance.json agree with a doctored file, so that only what lies deeper can tell."""
    provenance = path.parent / "provenance.json"
    content = json.loads(provenance.read_text())
    data = path.read_bytes()
    content["files"][path.name] |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    provenance.write_text(json.dumps(content))


@pytest.mark.parametrize("level", VERIFY_LEVELS)
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_sound_cache_has_no_findings_and_is_not_changed(
    cache: Path, tokens: Tokens, level: str, with_tokens: bool
) -> None:
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in cache.iterdir()}
    report = verify_cache(CacheFolder(cache), level, tokens=tokens if with_tokens else None)
    assert report.findings == []
    assert report.level == level
    assert (report.supervision.num_samples == 5) == (level == "values")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in cache.iterdir()} == before


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


def test_links_and_folders_are_found(cache: Path, tmp_path: Path) -> None:
    shutil.move(cache / SHARDS[0], tmp_path / "elsewhere")
    (cache / SHARDS[0]).symlink_to(tmp_path / "elsewhere")
    shutil.move(cache / "provenance.json", tmp_path / "provenance.json")
    (cache / "provenance.json").symlink_to(tmp_path / "provenance.json")
    (cache / SHARDS[1]).unlink()
    (cache / SHARDS[1]).mkdir()
    assert verify(cache, "files") == [
        "[files] provenance.json: is no regular file",
        "[files] shard-000000.safetensors: is no regular file",
        "[files] shard-000001.safetensors: is no regular file",
    ]


def test_a_link_into_a_dvc_cache_is_as_good_as_a_file(cache: Path, tmp_path: Path) -> None:
    kept = tmp_path / ".dvc/cache/files/md5/ab/cdef"
    kept.parent.mkdir(parents=True)
    shutil.move(cache / SHARDS[0], kept)
    (cache / SHARDS[0]).symlink_to(kept)
    assert verify(cache, "values") == []
    os.truncate(kept, kept.stat().st_size - 1)
    assert [finding[:31] for finding in verify(cache, "files")] == ["[files] shard-000000.safetensor"]


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
    path.write_text(path.read_text().replace('"shuffle_seed": 42', '"shuffle_seed": 43'))
    assert verify(cache, "headers") == []
    (finding,) = verify(cache, "bytes")
    assert finding.startswith("[bytes] manifest.json: sha256 is ")


def test_files_that_provenance_does_not_record_are_found(cache: Path) -> None:
    path = cache / "provenance.json"
    content = json.loads(path.read_text())
    del content["files"][SHARDS[0]]
    content["files"][WEIGHTS]["sha256"] = "x"
    path.write_text(json.dumps(content))
    assert verify(cache, "bytes") == [
        f"[bytes] {WEIGHTS}: provenance.json records no sha256 of it",
        f"[bytes] {SHARDS[0]}: provenance.json records no sha256 of it",
    ]


@pytest.mark.parametrize("files", [None, [], "x", {SHARDS[0]: 5}])
def test_odd_provenance_records_nothing(cache: Path, files: object) -> None:
    (cache / "provenance.json").write_text(json.dumps({"files": files}))
    assert verify(cache, "headers") == []
    assert len(verify(cache, "bytes")) == 4


def test_without_provenance_the_levels_around_bytes_still_hold(cache: Path, tokens: Tokens) -> None:
    (cache / "provenance.json").unlink()
    assert verify(cache, "headers") == []
    findings = verify(cache, "values", tokens)
    assert [finding.split()[0] for finding in findings] == ["[bytes]"] * 4


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


IDS, MASK = f"{INPUT_IDS} are not those of tokens/", f"{LOSS_MASK} is not that of tokens/"
VALUES: list[tuple[Any, list[str], list[str]]] = [
    # change of the first shard, findings against tokens/, findings without them
    (set_at(INPUT_IDS, 1, 5, value=7), [f"1: {IDS}"], []),
    (set_at(INPUT_IDS, 1, 5, value=1024), ["1: ids outside 0..1023", f"1: {IDS}"], ["1: ids outside 0..1023"]),
    (
        set_at(INPUT_IDS, 0, 60, value=-1),
        ["0: ids outside 0..1023", f"0: padding holds ids other than {PAD}"],
        ["both"],
    ),
    (set_at(INPUT_IDS, 0, 60, value=7), [f"0: padding holds ids other than {PAD}"], ["both"]),
    (
        set_at(LOSS_MASK, 1, 60, value=2),
        ["1: loss mask values other than 0 and 1", f"1: {MASK}"],
        ["1: loss mask values other than 0 and 1"],
    ),
    (set_at(LOSS_MASK, 1, 0, value=1), [f"1: {MASK}"], []),
    (shift_mask, [f"1: {MASK}"], []),
    (swap_samples, [f"0: {IDS}", f"0: {MASK}", f"1: {LAST_HIDDEN} is all zero at a real token"], []),
    (set_at(HIDDEN, 1, 3, 2, value=float("nan")), [f"1: {HIDDEN} holds numbers that are not finite"], ["both"]),
    (
        set_at(LAST_HIDDEN, 1, 3, 2, value=float("inf")),
        [f"1: {LAST_HIDDEN} holds numbers that are not finite"],
        ["both"],
    ),
    (set_at(HIDDEN, 0, 60, 2, value=0.5), [f"0: {HIDDEN} is not zero at padding"], ["both"]),
    (set_at(LAST_HIDDEN, 1, 3, value=0), [f"1: {LAST_HIDDEN} is all zero at a real token"], ["both"]),
    (set_at(LOSS_MASK, 0, 60, value=1), ["0: padding is supervised"], []),
    (set_at(LAST_HIDDEN, 0, 60, 0, value=0.5), [f"0: {LAST_HIDDEN} is not zero at padding"], []),
]


@pytest.mark.parametrize(("change", "against_tokens", "alone"), VALUES)
def test_wrong_values_are_found_where_digests_agree(
    cache: Path, tokens: Tokens, change: Any, against_tokens: list[str], alone: list[str]
) -> None:
    doctor(cache / SHARDS[0], change)
    assert verify(cache, "bytes") == []
    found = verify(cache, "values", tokens)
    prefix = f"[values] {SHARDS[0]}: sample "
    for message in against_tokens:
        assert prefix + message in found
    assert all(finding.startswith(prefix) for finding in found)
    if change is not swap_samples:  # which is wrong in many ways
        assert len(found) == len(against_tokens)
    expected = against_tokens if alone == ["both"] else alone
    if expected or change in (shift_mask, swap_samples):
        assert verify(cache, "values") == [prefix + message for message in expected]


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
    assert [finding for finding in verify(cache, "values", tokens) if not finding.startswith("[bytes]")] == []


def test_a_cache_of_fewer_samples_than_tokens_is_found(cache: Path, tokens: Tokens) -> None:
    (finding,) = verify(cache, "values", tokens, kept=[0, 1, 2, 3])
    assert finding == "[values] manifest.json: num_samples is 5, tokens/ gives 4"


def test_samples_are_compared_with_the_ones_that_were_kept(cache: Path, tokens: Tokens) -> None:
    found = verify(cache, "values", tokens, kept=[0, 1, 2, 4, 3])
    assert f"[values] {SHARDS[1]}: sample 3: {IDS}" in found
    assert f"[values] {SHARDS[1]}: sample 4: {IDS}" in found
    assert not any(SHARDS[0] in finding for finding in found)


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
    counts.add(torch.tensor(mask), 3)
    found = (counts.supervised_tokens, counts.anchors, counts.unsupervised_samples, counts.samples_without_anchor)
    assert found == expected
    assert (counts.num_samples, counts.num_tokens) == (1, 3)


def test_a_level_stops_after_so_many_findings(cache: Path) -> None:
    for number in range(MAX_FINDINGS + 5):
        (cache / f"left-{number:03d}").touch()
    assert len(list(check_files(CacheFolder(cache)))) == MAX_FINDINGS + 5
    assert len(verify(cache, "files")) == MAX_FINDINGS


def test_a_report_is_metrics_and_text() -> None:
    report = Report(level="files", recompute={"num_samples": 1})
    assert report.collect(iter([]))
    assert not report.collect(iter([Finding(level="files", file="x", message="is missing")]))
    assert report.as_json() == {
        "level": "files",
        "num_findings": 1,
        "findings": ["[files] x: is missing"],
        "supervision": Supervision().as_json(),
        "recompute": {"num_samples": 1},
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


def test_unreadable_provenance_is_refused(cache: Path) -> None:
    (cache / "provenance.json").write_text("{")
    with pytest.raises(CacheFormatError, match=r"provenance.json is not valid JSON"):
        CacheFolder(cache)
