"""Caches of 8-bit states through the pipeline: what each level of verification finds in them and what only digests
do; the number of samples of an automatic shard; what readers of version 1 see; and the commands that compare and
estimate."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, read_manifest
from dspark_cache.blocks import BlockStore
from dspark_cache.cache_files import CacheFolder
from dspark_cache.cache_plan import resolve_shard_size
from dspark_cache.cli import main
from dspark_cache.diff import diff_caches
from dspark_cache.errors import CacheFormatError, SettingsError, VerificationError
from dspark_cache.files import put_file
from dspark_cache.fp8 import dequantise, quantise
from dspark_cache.ledger import read_ledger
from dspark_cache.progress import Progress
from dspark_cache.provenance import read_provenance
from dspark_cache.publish import Captured, publish_cache
from dspark_cache.ragged import StatesForm
from dspark_cache.recompute import read_recomputed, relative_l2, tolerance
from dspark_cache.schema import (
    HIDDEN,
    HIDDEN_SCALES,
    LAST_HIDDEN,
    LAST_HIDDEN_SCALES,
    SAMPLE_OFFSETS,
    SCALES_OF,
    VERIFY_LEVELS,
)
from dspark_cache.settings import check_settings
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.tokens import Tokens
from dspark_cache.verify import verify_cache
from tests.caches import change_content, provenance
from tests.repository import STAGES, Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Change = Callable[[dict[str, torch.Tensor]], object]

SEQ_LENGTH, WIDTH, LAYERS = 64, 64, [1, 3]
LENGTHS = [16, 64, 16, 64, 64, 64]
TOKEN_BYTES = WIDTH * 3 + 4 * 3
"""Bytes of a token's 8-bit states: two layers and the last one, each with a scale."""
FP8 = {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": 130 * TOKEN_BYTES}
PADDED_ROW = SEQ_LENGTH * WIDTH * 3 * 2
"""Bytes of a padded sample's states in bf16."""
SHARD = "shard-000000.safetensors"
ROW = 16 + 4
"""Row of the first shard that is token 4 of sample 1."""
LIMIT = 0.071
"""Relative L2 up to which 8-bit states of a capture in fp32 agree with the target's."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Six conversations as `cache/` of 8-bit states, verified by the pipeline, and as `padded/` of bf16."""
    repository = make_repository(
        tmp_path_factory.mktemp("small") / "repository",
        num_rows=len(LENGTHS),
        data={"seq_length": SEQ_LENGTH},
        target={"layer_ids": LAYERS, "compute_dtype": "fp32"},
        verify={"recompute_samples": len(LENGTHS)},
        cache={"shard_size": "auto", "shard_bytes": 2 * PADDED_ROW},
    )
    repository.run("tokenize", "capture", "shards")
    (repository.root / "cache").rename(repository.root / "padded")
    repository.set_params(cache=FP8)
    repository.run("shards", "verify")
    assert read_manifest(repository.root / "cache")["shard_samples"] == [3, 2, 1]
    return repository


@pytest.fixture
def repository(made: Repository, tmp_path: Path) -> Repository:
    return Repository(shutil.copytree(made.root, tmp_path / "repository"))


@pytest.fixture
def cache(made: Repository, tmp_path: Path) -> Path:
    return shutil.copytree(made.root / "cache", tmp_path / "cache")


def verify(cache: Path, level: str, tokens: Tokens | None = None) -> list[str]:
    return [str(finding) for finding in verify_cache(CacheFolder(cache), level, tokens=tokens, num_threads=2).findings]


def doctor(path: Path, change: Change) -> None:
    """Change tensors of a file; its header stays as it is."""
    places = ShardFile(path).places
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    change(tensors)
    with put_file(path) as temporary:
        write_tensors(temporary, {key: tensors[key] for key in sorted(places, key=lambda key: places[key].offset)})


def reseal(path: Path) -> None:
    """Record the digest of a doctored file, so that only what lies deeper can tell."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    change_content(path.parent, lambda content: content["files"][path.name].update(sha256=digest))


# Settings


FP8_FAULT = "cache.dtype: fp8_e4m3 needs cache.layout: ragged, format version 1 has no place for its scales"


@pytest.mark.parametrize("cache", [{"dtype": "fp8_e4m3"}, {"dtype": "fp8_e4m3", "layout": "padded"}])
def test_8_bits_need_the_ragged_layout(cache: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as error:
        check_settings({"cache": cache}, name="params.yaml")
    assert str(error.value) == f"params.yaml has 1 fault(s):\n  {FP8_FAULT}"
    assert check_settings({"cache": {**cache, "layout": "ragged"}}).cache.dtype == "fp8_e4m3"
    assert check_settings({"cache": {"dtype": "bf16", "layout": "padded"}}).cache.layout == "padded"


def test_a_layout_that_is_none_is_the_only_fault() -> None:
    with pytest.raises(SettingsError) as error:
        check_settings({"cache": {"dtype": "fp8_e4m3", "layout": "raged"}}, name="params.yaml")
    assert "1 fault(s)" in str(error.value)
    assert "cache.layout: expected" in str(error.value)


def test_every_stage_refuses_padded_8_bits_before_any_work(repository: Repository) -> None:
    repository.set_params(cache={"layout": "padded"})
    outputs = ("tokens", "features.json", "cache", "reports")
    before = repository.digests(*outputs), repository.blocks()
    for stage in STAGES:
        with pytest.raises(SettingsError, match=re.escape(FP8_FAULT)):
            repository.run(stage)
    assert (repository.digests(*outputs), repository.blocks()) == before


# Reading


def test_a_reader_gives_number_times_scale_in_bf16(made: Repository) -> None:
    padded = CachedDSparkDataset(made.root / "cache", expect=made.root / "params.yaml")
    unpadded = CachedDSparkDataset(made.root / "cache", padded=False)
    shards = [load_file(path) for path in sorted((made.root / "cache").glob("shard-*"))]
    for shard in shards:
        assert list(shard) == [HIDDEN, LAST_HIDDEN, HIDDEN_SCALES, LAST_HIDDEN_SCALES, SAMPLE_OFFSETS]
        assert [shard[key].dtype for key in (HIDDEN, LAST_HIDDEN)] == [torch.float8_e4m3fn] * 2
        assert [tuple(shard[key].shape[1:]) for key in (HIDDEN_SCALES, LAST_HIDDEN_SCALES)] == [(2,), (1,)]
    for key, layers in ((HIDDEN, 2), (LAST_HIDDEN, 1)):
        numbers = torch.cat([shard[key].double() for shard in shards]).view(-1, layers, WIDTH)
        scales = torch.cat([shard[SCALES_OF[key]] for shard in shards])
        assert bool((torch.frexp(scales).mantissa == 0.5).all())
        states = torch.split((numbers * scales.double()[..., None]).flatten(1), LENGTHS)
        for index, expected in enumerate(states):
            assert unpadded[index][key].dtype == padded[index][key].dtype == torch.bfloat16
            assert torch.equal(unpadded[index][key].double(), expected)
            assert torch.equal(padded[index][key][: len(expected)].double(), expected)
            assert not bool(padded[index][key][len(expected) :].any())


def test_states_are_those_of_a_bf16_cache_rounded_and_all_else_is_equal(made: Repository) -> None:
    small, whole = CachedDSparkDataset(made.root / "cache"), CachedDSparkDataset(made.root / "padded")
    for index, length in enumerate(LENGTHS):
        assert all(torch.equal(small[index][key], whole[index][key]) for key in CACHE_KEYS if key not in SCALES_OF)
        for key, layers in ((HIDDEN, 2), (LAST_HIDDEN, 1)):
            found, exact = small[index][key][:length], whole[index][key][:length]
            assert torch.equal(found, dequantise(*quantise(exact, layers)))
            assert 0 < float(relative_l2(found, exact).max()) < LIMIT
    weights = [load_file(made.root / name / "target_weights.safetensors") for name in ("cache", "padded")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])


# Verification


@pytest.mark.parametrize("level", VERIFY_LEVELS)
def test_every_level_accepts_what_the_pipeline_makes(made: Repository, level: str) -> None:
    assert verify(made.root / "cache", level) == []
    assert verify(made.root / "cache", level, Tokens(made.root / "tokens")) == []


def scale_by(key: str, factor: float, layer: int = 0) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][ROW, layer] *= factor

    return change


def flip(key: str, bit: int) -> Change:
    """Flip a bit of a scale, counted from its lowest one; or of the first number of the row."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        raw = tensors[key][ROW].view(torch.uint8)
        raw[bit // 8] ^= 1 << bit % 8

    return change


def lower_largest(tensors: dict[str, torch.Tensor]) -> None:
    """Lower every number of a token's first layer that is more than a quarter of the largest there may be."""
    layer = tensors[HIDDEN][ROW][: tensors[HIDDEN].shape[1] // tensors[HIDDEN_SCALES].shape[1]].view(torch.uint8)
    layer[layer & 0x7F > 0x70] -= 0x10


def put_byte(key: str, value: int) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][ROW].view(torch.uint8)[5] = value

    return change


INFINITE, ZERO = "holds numbers that are not finite", "is all zero at a real token"
NOT_SMALLEST = "are not the smallest powers of two with which the states fit"
DOCTORED: dict[str, tuple[Change, list[str]]] = {
    # what is promised of values: numbers times scales are finite, a last state is not zero
    "a scale that is no number": (
        scale_by(HIDDEN_SCALES, float("nan")),
        [f"{HIDDEN} {INFINITE}", f"{HIDDEN_SCALES} {NOT_SMALLEST}"],
    ),
    "an infinite scale": (
        scale_by(LAST_HIDDEN_SCALES, float("inf")),
        [f"{LAST_HIDDEN} {INFINITE}", f"{LAST_HIDDEN_SCALES} {NOT_SMALLEST}"],
    ),
    "a scale out of bf16's range": (scale_by(HIDDEN_SCALES, 2.0**127, 1), [f"{HIDDEN} {INFINITE}"]),
    "a number that is none": (put_byte(LAST_HIDDEN, 0x7F), [f"{LAST_HIDDEN} {INFINITE}"]),
    "a negative one that is none": (put_byte(HIDDEN, 0xFF), [f"{HIDDEN} {INFINITE}"]),
    "a scale of zero": (
        scale_by(LAST_HIDDEN_SCALES, 0),
        [f"{LAST_HIDDEN} {ZERO}", f"{LAST_HIDDEN_SCALES} {NOT_SMALLEST}"],
    ),
    "a scale of zero of a layer": (scale_by(HIDDEN_SCALES, 0, 1), [f"{HIDDEN_SCALES} {NOT_SMALLEST}"]),
    "a negative scale": (scale_by(LAST_HIDDEN_SCALES, -1), [f"{LAST_HIDDEN_SCALES} {NOT_SMALLEST}"]),
    "a scale that is no power of two": (scale_by(HIDDEN_SCALES, 1.5, 1), [f"{HIDDEN_SCALES} {NOT_SMALLEST}"]),
    "a scale with its lowest bit flipped": (flip(HIDDEN_SCALES, 0), [f"{HIDDEN_SCALES} {NOT_SMALLEST}"]),
    "a largest number with a bit of its exponent flipped": (lower_largest, [f"{HIDDEN_SCALES} {NOT_SMALLEST}"]),
    # what digests alone find, or a recomputation
    "a scale twice as large": (scale_by(HIDDEN_SCALES, 2), []),
    "a last scale half as large": (scale_by(LAST_HIDDEN_SCALES, 0.5), []),
    "a scale with a bit of its exponent flipped": (flip(LAST_HIDDEN_SCALES, 23), []),
    "a number with its lowest bit flipped": (flip(LAST_HIDDEN, 0), []),
    "a number with its sign flipped": (flip(HIDDEN, 7), []),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_doctored_states_are_found_by_their_digest_and_by_what_values_promise(
    made: Repository, cache: Path, name: str
) -> None:
    change, faults = DOCTORED[name]
    recorded = json.loads((cache / "provenance.json").read_text())["files"][SHARD]["sha256"]
    doctor(cache / SHARD, change)
    found = hashlib.sha256((cache / SHARD).read_bytes()).hexdigest()
    digest = f"[bytes] {SHARD}: sha256 is {found}, provenance.json says {recorded}"
    values = [f"[values] {SHARD}: sample 1: {fault}" for fault in faults]
    assert found != recorded
    assert verify(cache, "headers") == []
    assert verify(cache, "bytes") == [digest]
    assert verify(cache, "values") == [digest, *values]
    reseal(cache / SHARD)
    assert verify(cache, "bytes") == []
    for tokens in (None, Tokens(made.root / "tokens")):
        assert verify(cache, "values", tokens) == values


@pytest.mark.parametrize("key", [HIDDEN_SCALES, LAST_HIDDEN_SCALES])
def test_states_without_their_scales_are_refused_at_open(cache: Path, key: str) -> None:
    tensors = {name: value.clone() for name, value in load_file(cache / SHARD).items() if name != key}
    with put_file(cache / SHARD) as temporary:
        write_tensors(temporary, tensors)
    message = f"{cache / SHARD}: {key} is missing"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        CachedDSparkDataset(cache)
    (cache / "provenance.json").unlink()
    assert verify(cache, "values") == [f"[headers] {SHARD}: {message}"]


def test_the_report_says_how_far_states_are_from_the_target_s(made: Repository) -> None:
    report = json.loads((made.root / "reports/verify.json").read_text())
    assert (report["findings"], report["recompute"]["num_samples"]) == ([], len(LENGTHS))
    plotted = json.loads((made.root / "reports/plots/recompute.json").read_text())
    rows = {row["state"]: row for row in plotted}
    assert rows.keys() == {"layer 1", "layer 3", "last hidden"}
    for state, row in rows.items():
        assert 0.01 < row["train_mean"] < row["train_worst"] < tolerance("fp32", "fp8_e4m3", state)
    assert report["recompute"]["worst_relative_l2"] >= max(row["train_worst"] for row in plotted)
    assert 0 < report["recompute"]["worst_share_of_tolerance"] < 1
    assert tolerance("fp32", "fp8_e4m3", "layer 1") == pytest.approx(LIMIT)
    dataset, (scratch,) = CachedDSparkDataset(made.root / "cache", padded=False), made.scratch_folders()
    distances = torch.cat(
        [
            relative_l2(dataset[index][HIDDEN][:, WIDTH:], read_recomputed(path).hidden[:, WIDTH:])
            for index, key in enumerate(Tokens(made.root / "tokens").keys())
            for path in [scratch / f"recomputed-{key}.safetensors"]
        ]
    )
    assert rows["layer 3"]["train_mean"] == float(f"{float(distances.mean()):.3g}")
    assert rows["layer 3"]["train_worst"] == float(f"{float(distances.max()):.3g}")


@pytest.mark.parametrize(
    ("name", "state", "distance"),
    [
        ("a scale twice as large", "layer 1", r"(0\.9\d*|1|1\.0\d*)"),
        ("a last scale half as large", "last hidden", r"(0\.[45]\d*)"),
    ],
)
def test_states_far_off_are_found_by_recomputation_though_digests_were_made_anew(
    repository: Repository, name: str, state: str, distance: str
) -> None:
    path = repository.root / "cache" / SHARD
    doctor(path, DOCTORED[name][0])
    reseal(path)
    with pytest.raises(VerificationError) as error:
        repository.run("verify")
    first, *findings = json.loads((repository.root / "reports/verify.json").read_text())["findings"]
    assert re.fullmatch(
        rf"\[recompute\] {re.escape(SHARD)}: sample 1: {state} differs from the target's by a relative L2 of "
        rf"{distance} at token 4, at most {LIMIT} is expected",
        first,
    )
    assert findings == []
    assert str(error.value) == f"the train cache has 1 finding(s), see reports/verify.html:\n  {first}"


# Automatic sizes of padded shards


SHAPES = [*product((1, 7, 256), (1, 4), (1, 3), (("bf16", 2), ("fp16", 2), ("fp32", 4)))]


@pytest.mark.parametrize("shard_bytes", [1, 100, 6144, 10**6, 1 << 31])
def test_an_automatic_shard_has_as_many_samples_as_its_bytes_hold_but_one_at_least(shard_bytes: int) -> None:
    sizes = []
    for seq_length, width, layers, (dtype, size) in SHAPES:
        form = StatesForm(dtype=dtype, hidden_dim=width * layers, last_dim=width)
        sample = seq_length * width * (layers + 1) * size
        found = resolve_shard_size("auto", form, seq_length, shard_bytes)
        assert found == max(1, shard_bytes // sample)
        assert found == 1 or found * sample <= shard_bytes < (found + 1) * sample
        assert resolve_shard_size(5, form, seq_length, shard_bytes) == 5
        sizes.append(found)
    assert len(set(sizes)) > 1 or shard_bytes == 1


@pytest.mark.parametrize(
    ("shard_bytes", "dtype", "size"),
    [
        (2 * PADDED_ROW, "bf16", 2),
        (2 * PADDED_ROW, "fp32", 1),
        (4 * PADDED_ROW - 1, "fp16", 3),
        (1, "bf16", 1),
        (1 << 31, "bf16", (1 << 31) // PADDED_ROW),
    ],
)
def test_the_manifest_of_an_automatic_size_has_the_number(
    repository: Repository, shard_bytes: int, dtype: str, size: int
) -> None:
    repository.set_params(cache={"layout": "padded", "dtype": dtype, "shard_bytes": shard_bytes})
    repository.run("shards")
    cache = repository.root / "cache"
    assert read_manifest(cache)["shard_size"] == size
    counts = [len(load_file(path)[LAST_HIDDEN]) for path in sorted(cache.glob("shard-*"))]
    assert counts == [min(size, 6 - start) for start in range(0, 6, size)]


def test_an_automatic_size_does_not_follow_from_the_samples(repository: Repository) -> None:
    rows = repository.root / "inputs/data/conversations.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:3]))
    repository.set_params(cache={"layout": "padded", "dtype": "bf16", "shard_bytes": 5 * PADDED_ROW})
    repository.run("tokenize", "capture", "shards")
    manifest = read_manifest(repository.root / "cache")
    assert (manifest["num_samples"], manifest["shard_size"]) == (3, 5)


# Readers of version 1


def why_version_1_refuses(manifest: dict[str, Any]) -> str | None:
    """Return what a reader of NeMo AutoModel 0.7.0 says of a manifest, in the order in which it looks."""
    if manifest.get("format_version") != 1:
        return f"format_version={manifest.get('format_version')}, expected 1"
    if manifest.get("complete", True) is not True:
        return "incomplete"
    missing = [key for key in ("num_samples", "shard_size") if key not in manifest]
    return f"missing {missing}" if missing else None


TRAINING_KEYS = {
    "target_model", "target_model_type", "target_vocab_size", "hidden_size", "num_hidden_layers", "seq_length",
    "target_hidden_dim", "target_last_hidden_dim", "target_layer_ids", "mask_reasoning_content",
    "mask_generation_prompt",
}  # fmt: skip
"""What training compares with its own settings once a manifest is read; `dtype` must also be one that it knows."""


def test_a_reader_of_version_1_refuses_a_ragged_manifest_by_its_version_alone(made: Repository) -> None:
    padded, ragged = (json.loads((made.root / name / "manifest.json").read_text()) for name in ("padded", "cache"))
    assert why_version_1_refuses(padded) is None
    assert why_version_1_refuses(ragged) == "format_version=2, expected 1"
    assert why_version_1_refuses({**ragged, "format_version": 1}) == "missing ['shard_size']"
    assert why_version_1_refuses({**ragged, "format_version": 1, "shard_size": 3}) is None
    assert ragged["complete"] is True
    for key in TRAINING_KEYS | {"num_samples"}:
        assert ragged[key] == padded[key]
    assert padded.keys() - ragged.keys() == {"shard_size"}
    assert ragged.keys() - padded.keys() == {"layout", "pad_token_id", "shard_samples"}


def test_a_ragged_manifest_is_of_version_2_from_its_first_byte_on(repository: Repository) -> None:
    """A reader of version 1 must not take a cache that is being built, or one left half-built, for one of its own."""
    seen: list[dict[str, Any]] = []

    class Looking(Progress):
        def advance(self, units: int) -> None:
            super().advance(units)
            seen.append(json.loads((repository.root / ".cache.building/manifest.json").read_text()))

    ledger = read_ledger(repository.root / "features.json")
    store = BlockStore(repository.root / ".work", ledger.identity)
    captured = Captured(tokens=Tokens(repository.root / "tokens"), ledger=ledger, store=store)
    path = repository.root / "cache"
    for cache, reason in ((FP8, "format_version=2, expected 1"), ({"layout": "padded"}, "incomplete")):
        publish_cache(captured, check_settings({"cache": cache}), path, lambda total: Looking("shards", total, "tok"))
        assert {why_version_1_refuses(manifest) for manifest in seen} == {reason}
        assert {manifest["complete"] for manifest in seen} == {False}
        seen.clear()


def test_a_padded_manifest_of_8_bits_is_refused(made: Repository, tmp_path: Path) -> None:
    padded = shutil.copytree(made.root / "padded", tmp_path / "padded")
    manifest = json.loads((padded / "manifest.json").read_text())
    (padded / "manifest.json").write_text(json.dumps({**manifest, "dtype": "fp8_e4m3"}))
    message = "dtype: expected one of ['bf16', 'fp16', 'fp32'], found 'fp8_e4m3'"
    with pytest.raises(CacheFormatError, match=re.escape(message)):
        CachedDSparkDataset(padded)


# What provenance may say besides


CONVERSION = {"changes": {"dtype": "fp8_e4m3"}, "source_manifest_sha256": "0" * 64, "source_provenance_sha256": None}
SPLIT = "held_out: expected an object with eval_samples >= 1 and part train or eval"
OBJECTS = "conversions: expected objects with the object 'changes'"


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("held_out", None, f"{SPLIT}, found None"),
        ("held_out", [], f"{SPLIT}, found []"),
        ("held_out", "eval", f"{SPLIT}, found 'eval'"),
        ("held_out", 2, f"{SPLIT}, found 2"),
        ("held_out", True, f"{SPLIT}, found True"),
        ("held_out", {}, f"{SPLIT}, found {{}}"),
        *(
            ("held_out", split, f"{SPLIT}, found {split}")
            for split in (
                {"eval_samples": 2},
                {"eval_samples": 0, "part": "eval"},
                {"eval_samples": True, "part": "eval"},
                {"eval_samples": 2, "part": "test"},
                {"eval_samples": 2, "part": "eval", "seed": 1},
            )
        ),
        ("conversions", None, "conversions: expected a list, found None"),
        ("conversions", {}, "conversions: expected a list, found {}"),
        ("conversions", "x", "conversions: expected a list, found 'x'"),
        ("conversions", [None], OBJECTS),
        ("conversions", [[]], OBJECTS),
        ("conversions", ["changes"], OBJECTS),
        ("conversions", [{}], OBJECTS),
        ("conversions", [{"changes": []}], OBJECTS),
        ("conversions", [{"changes": None}], OBJECTS),
        ("conversions", [CONVERSION, {"change": {}}], OBJECTS),
    ],
)
def test_what_provenance_may_leave_out_is_checked_where_it_is(tmp_path: Path, key: str, value: Any, fault: str) -> None:
    provenance().put(tmp_path)
    change_content(tmp_path, lambda content: content.update({key: value}))
    with pytest.raises(CacheFormatError) as error:
        read_provenance(tmp_path)
    assert str(error.value) == f"{tmp_path / 'provenance.json'}: {fault}"


def test_all_that_provenance_may_leave_out_is_reported_at_once(tmp_path: Path) -> None:
    provenance().put(tmp_path)
    change_content(tmp_path, lambda content: content.update(held_out=0, conversions=[0], layout="x"))
    with pytest.raises(CacheFormatError) as error:
        read_provenance(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'provenance.json'}: layout: expected padded or ragged, found 'x'; {SPLIT}, found 0; {OBJECTS}"
    )


@pytest.mark.parametrize("held_out", [{}, {"eval_samples": 2, "part": "eval"}])
@pytest.mark.parametrize("conversions", [[], [CONVERSION], [CONVERSION, {"changes": {}}]])
def test_what_provenance_may_leave_out_is_read_back_and_absent_where_empty(
    tmp_path: Path, held_out: dict[str, Any], conversions: list[dict[str, Any]]
) -> None:
    made = provenance(held_out=held_out, conversions=conversions)
    made.put(tmp_path)
    assert read_provenance(tmp_path) == made
    content = json.loads((tmp_path / "provenance.json").read_text())
    optional = {"held_out": held_out, "conversions": conversions}
    assert {key: content[key] for key in optional if key in content} == {k: v for k, v in optional.items() if v}
    assert made.origin() == {key: value for key, value in content.items() if key not in ("files", "sha256")}


# Commands


NO_CACHE = "error: no DSpark cache in {0}: {0}/manifest.json does not exist; make one with dvc repro\n"
SAME = """\
samples removed: 0
samples added: 0
samples in both: 6, in the same order
masks of common samples: 0 of 6 differ
last hidden: relative L2 of a token 0 in the mean, 0 at most
layer 1: relative L2 of a token 0 in the mean, 0 at most
layer 3: relative L2 of a token 0 in the mean, 0 at most
"""


def test_a_cache_does_not_differ_from_itself(made: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    cache = str(made.root / "cache")
    assert main(["diff", cache, cache]) == 0
    assert capsys.readouterr().out == SAME


def test_diff_shows_forms_and_how_far_states_are_apart(made: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    padded, cache = made.root / "padded", made.root / "cache"
    assert main(["diff", str(padded), str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(("manifest.pad_token_id: ", "manifest.shard_size: "))] == [
        "manifest.dtype: 'bf16' -> 'fp8_e4m3'",
        "manifest.format_version: 1 -> 2",
        "manifest.layout: 'padded' -> 'ragged'",
        "provenance.layout: 'padded' -> 'ragged'",
        *SAME.splitlines()[:4],
        *lines[-3:],
    ]
    for name, line in zip(("last hidden", "layer 1", "layer 3"), lines[-3:], strict=True):
        assert re.fullmatch(rf"{name}: relative L2 of a token 0\.02\d* in the mean, 0\.0[3-6]\d* at most", line)


def test_diff_prints_json(made: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    padded, cache = made.root / "padded", made.root / "cache"
    assert main(["diff", str(padded), str(cache), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    steps: dict[str, int] = {}

    @contextmanager
    def progress(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        assert unit == "samples"
        yield lambda units: steps.update({name: steps.get(name, -total) + units})

    assert printed == diff_caches(padded, cache, progress=progress)
    assert steps == {f"ids of {padded}": 0, f"ids of {cache}": 0, "compare": 0}
    assert printed.keys() == {"identity", "samples", "masks", "drift"}
    assert printed["identity"]["manifest.dtype"] == {"first": "bf16", "second": "fp8_e4m3"}
    assert printed["masks"] == {"compared": 6, "different": 0}


@pytest.mark.parametrize(("options", "compared"), [([], 6), (["--max-samples", "2"], 2), (["--all"], 6)])
def test_diff_compares_as_many_samples_as_it_is_told(
    made: Repository, options: list[str], compared: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(made.root / "padded"), str(made.root / "cache"), "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["masks"]["compared"], found["samples"]["common"]) == (compared, 6)


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_diff_refuses_a_cache_that_is_missing_on_either_side(
    made: Repository, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cache, none = str(made.root / "cache"), str(tmp_path / "none")
    for pair in ((cache, none), (none, cache)):
        assert main(["diff", *pair, *options]) == 1
        assert capsys.readouterr() == ("", NO_CACHE.format(none))


def test_diff_refuses_no_samples_and_caches_that_do_not_say_how_they_are_padded(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = str(make_cache(5, 2))
    with pytest.raises(SystemExit):
        main(["diff", cache, cache, "--max-samples", "0"])
    assert "argument --max-samples: expected an integer above 0, found 0" in capsys.readouterr().err
    assert main(["diff", cache, cache]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        f"error: {cache} does not say which token is at padding: pass --pad-token-id, the target's tokenizer's "
    )
    assert main(["diff", cache, cache, "--pad-token-id", "0"]) == 0
    assert "samples in both: 5, in the same order" in capsys.readouterr().out.splitlines()


def test_estimate_says_what_a_run_takes(
    made: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made.root)
    assert main(["estimate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = dict(line.split(None, 1) for line in lines[: lines.index("")])
    tokens = sum(LENGTHS)
    assert shown["samples"] == "6, 6 of them distinct, from tokens/"
    assert shown["tokens"] == f"{tokens}, {tokens} to be captured"
    assert shown["padding"] == f"{100 * (1 - tokens / (6 * SEQ_LENGTH)):.1f} % of all positions up to seq_length"
    assert shown["shards"] == "3"
    assert shown["time"] == "pass --tokens-per-second"
    assert shown["cache"].startswith("0.000 GiB (ragged fp8_e4m3), on the disk that writes it 0.000 GiB; ")
    assert shown["DVC's"] == "cache  no DVC repository"
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert rows[0] == ["form", "bytes", "held", "here", "shards"]
    layouts = {"padded": ("bf16", "fp16", "fp32"), "ragged": ("bf16", "fp16", "fp32", "fp8_e4m3")}
    assert [row[:2] for row in rows[1:]] == [[layout, dtype] for layout in layouts for dtype in layouts[layout]]
    assert rows[-1][-1] == "3"
    assert main(["estimate", "--tokens-per-second", "0.5"]) == 0
    assert f"{'time':12} {tokens / 0.5 / 3600:.2f} h of capture" in capsys.readouterr().out.splitlines()


def test_estimate_prints_json(
    made: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made.root)
    assert main(["estimate", "--json", "--tokens-per-second", "100"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "from": "tokens/",
        "samples": 6,
        "distinct_tokens": sum(LENGTHS),
        "layout": "ragged",
        "dtype": "fp8_e4m3",
        "shards": 3,
        "seconds": round(sum(LENGTHS) / 100, 1),
        "dvc_copy_bytes": None,
        "shards_are_links_to_blocks": False,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["forms"]["ragged fp8_e4m3"] == {
        "bytes": found["cache_bytes"], "held_bytes": found["cache_held_bytes"], "shards": 3
    }  # fmt: skip
    assert main(["estimate", "--json", "--rows", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["from"], found["samples"], found["seconds"]) == ("2 of 6 conversations", 6, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "argument --rows: expected an integer above 0, found 0"),
        (["--rows", "-1"], "argument --rows: expected an integer above 0, found -1"),
        (["--tokens-per-second", "0"], "argument --tokens-per-second: expected a number above 0, found 0"),
    ],
)
def test_estimate_refuses_no_rows_and_no_speed(
    made: Repository,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(made.root)
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"dspark-cache estimate: error: {message}\n")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_estimate_outside_a_repository_is_refused(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", *options]) == 1
    assert capsys.readouterr() == ("", "error: no such file: params.yaml; run from the root of the repository\n")


def test_estimate_refuses_padded_8_bits(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.set_params(cache={"layout": "padded"})
    monkeypatch.chdir(repository.root)
    assert main(["estimate"]) == 1
    assert capsys.readouterr() == ("", f"error: params.yaml has 1 fault(s):\n  {FP8_FAULT}\n")
