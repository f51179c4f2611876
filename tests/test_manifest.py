"""Manifests: the reference's bytes, and every way to be wrong, with the words of the refusal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache import (
    CacheFormatError,
    CacheNotFoundError,
    build_cache_manifest,
    ensure_manifest_complete,
    manifest_mismatch_fields,
    offline_cache,
    read_manifest,
    write_manifest,
)
from dspark_cache.manifest import DSPARK_FIELDS, MAX_MANIFEST_BYTES, require_fields
from tests.caches import MANIFEST

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = sorted((Path(__file__).parent / "data" / "golden" / "manifests").glob("*.json"))


@pytest.fixture
def put(tmp_path: Path) -> Callable[[Any], Path]:
    """Return a function that writes a manifest (an object, or bytes as they are) and gives its folder."""

    def write(content: Any) -> Path:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "manifest.json").write_bytes(text)
        return tmp_path

    return write


def versioned(**changes: Any) -> dict[str, Any]:
    return {**MANIFEST, "format_version": 1, **changes}


# --- bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_reading_and_rewriting_a_reference_manifest_gives_its_bytes(golden: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(golden.read_bytes())
    manifest = read_manifest(tmp_path)
    assert manifest == json.loads(golden.read_text())
    path = write_manifest(tmp_path / "again", manifest)
    assert path == str(tmp_path / "again" / "manifest.json")
    assert Path(path).read_bytes() == golden.read_bytes()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_building_a_manifest_from_the_same_facts_gives_the_reference_s_bytes(golden: Path, tmp_path: Path) -> None:
    facts = json.loads(golden.read_text())
    config = SimpleNamespace(
        vocab_size=facts.pop("target_vocab_size"),
        hidden_size=facts.pop("hidden_size"),
        num_hidden_layers=facts.pop("num_hidden_layers"),
    )
    for derived in ("complete", "format_version", "target_hidden_dim", "target_last_hidden_dim"):
        facts.pop(derived)
    manifest = build_cache_manifest(target_text_config=config, **facts)
    path = Path(write_manifest(tmp_path, {**manifest, "complete": True}))
    assert path.read_bytes() == golden.read_bytes()


def test_there_are_golden_manifests() -> None:
    assert len(GOLDEN) == 24


def test_a_built_manifest_has_every_identity_field_and_no_state() -> None:
    config = SimpleNamespace(vocab_size=32, hidden_size=4, num_hidden_layers=3)
    manifest = build_cache_manifest("m", "t", config, 8, "bf16", 7, 2, (0, 2), "d", None, 42, 1, "0" * 64)  # type: ignore[arg-type]
    assert set(manifest) == set(DSPARK_FIELDS) - {"complete"}
    assert manifest["mask_reasoning_content"] is True
    assert manifest["mask_generation_prompt"] is False
    assert manifest["target_layer_ids"] == [0, 2]
    assert manifest["target_hidden_dim"] == 8


def test_writing_sets_the_version_and_checks_nothing(tmp_path: Path) -> None:
    manifest = {"format_version": 99, "num_samples": "many"}
    path = offline_cache.write_manifest(tmp_path / "made" / "here", manifest, 3)
    assert path == offline_cache.manifest_path(tmp_path / "made" / "here")
    assert Path(path).read_text() == '{\n  "format_version": 3,\n  "num_samples": "many"\n}'
    assert manifest["format_version"] == 99


# --- reading ----------------------------------------------------------------------------------------------------


def test_a_manifest_is_read_with_its_types(put: Any) -> None:
    assert read_manifest(put(versioned())) == versioned()


def test_a_missing_manifest_is_said_to_be_missing_with_the_remedy(tmp_path: Path) -> None:
    message = f"no DSpark cache in {tmp_path}: {tmp_path}/manifest.json does not exist; make one with dvc repro"
    with pytest.raises(CacheNotFoundError, match=f"^{re.escape(message)}$"):
        read_manifest(tmp_path)
    message = f"no EAGLE-3 cache in {tmp_path}: {tmp_path}/manifest.json does not exist"
    with pytest.raises(CacheNotFoundError, match=f"^{re.escape(message)}$"):
        offline_cache.read_manifest(tmp_path, "EAGLE-3", 1)
    with pytest.raises(FileNotFoundError, match=r"; make one with precompute_eagle3$"):
        offline_cache.read_manifest(tmp_path, "EAGLE-3", 1, "precompute_eagle3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is not valid JSON: "),
        (b'{"format_version": 1', " is not valid JSON: "),
        (b"[1]", " must hold a JSON object, found list"),
        (b"null", " must hold a JSON object, found NoneType"),
        (b'{"format_version": 1, "num_samples": 1, "num_samples": 2}', " is not valid JSON: duplicate keys "),
        (b'{"format_version": 1}' + b" " * MAX_MANIFEST_BYTES, f" has {MAX_MANIFEST_BYTES + 21} bytes, more than the "),
    ],
)
def test_what_is_no_json_object_of_a_manifest_s_size_is_refused(put: Any, content: bytes, message: str) -> None:
    folder = put(content)
    with pytest.raises(CacheFormatError, match="^" + re.escape(f"{folder}/manifest.json{message}")):
        read_manifest(folder)


@pytest.mark.parametrize("version", ["1", 1.0, True, 3, 0, None, [1], {}])
def test_another_version_or_one_of_another_type_is_refused(put: Any, version: object) -> None:
    folder = put(versioned(format_version=version))
    message = f"{folder}/manifest.json: format_version is {version!r}, this reader of DSpark caches knows 1 and 2"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        read_manifest(folder)


def test_no_version_is_refused(put: Any) -> None:
    folder = put(MANIFEST)
    with pytest.raises(CacheFormatError, match=r"format_version is None, this reader of EAGLE-3 caches knows 3$"):
        offline_cache.read_manifest(folder, "EAGLE-3", 3)


COUNTS = [
    "hidden_size",
    "num_hidden_layers",
    "num_samples",
    "seq_length",
    "shard_size",
    "target_hidden_dim",
    "target_last_hidden_dim",
    "target_vocab_size",
]
WRONG: list[tuple[str, Any]] = [
    *[(key, ["7", 7.0, True, None, -1, 1 << 62, [7], {}]) for key in COUNTS],
    *[(key, [0]) for key in COUNTS if key != "num_samples"],
    ("shuffle_seed", ["7", 7.0, True, None, 1 << 63, [7], {}]),
    *[(key, ["false", 0, None, []]) for key in ("complete", "mask_generation_prompt", "mask_reasoning_content")],
    *[(key, [None, 3, ["x"]]) for key in ("target_model", "target_model_type", "train_data_path")],
    ("train_split", [3, False, ["train"]]),
    ("dtype", ["fp64", "BF16", "", None, 16, ["bf16"]]),
    ("chat_template_sha256", ["", "0" * 63, "G" * 64, None, 0]),
    ("target_layer_ids", [None, "0", 0, [0, 0], [1, 0], [-2], [0.0], [True], ["0"], [None], {"0": 1}]),
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG for value in values])
def test_a_wrong_type_or_range_is_refused_by_key(put: Any, key: str, value: object) -> None:
    folder = put(versioned(**{key: value}))
    expected = re.escape(DSPARK_FIELDS[key][0])
    with pytest.raises(
        CacheFormatError, match=f"manifest.json: {key}: expected {expected}, found {re.escape(repr(value))}$"
    ):
        read_manifest(folder)


def test_every_field_is_in_the_table_of_wrong_values() -> None:
    assert {key for key, _ in WRONG} == set(DSPARK_FIELDS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_samples", 0),
        ("shuffle_seed", -1),  # the reference records it, and ignores it, with JSON data
        ("hidden_size", 1),
        ("target_layer_ids", [-1]),
        ("target_layer_ids", [0, 5, 9]),
        ("train_split", "train[:5]"),
        ("dtype", "fp32"),
    ],
)
def test_values_at_the_edge_are_accepted(put: Any, key: str, value: object) -> None:
    assert read_manifest(put({"format_version": 1, key: value}))[key] == value


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        (
            {"hidden_size": 5},
            [
                "target_last_hidden_dim is 4, but hidden_size 5 and target_layer_ids [-1, 2] give 5",
                "target_hidden_dim is 8, but hidden_size 5 and target_layer_ids [-1, 2] give 10",
            ],
        ),
        ({"target_layer_ids": [1]}, ["target_hidden_dim is 8, but hidden_size 4 and target_layer_ids [1] give 4"]),
        (
            {"target_last_hidden_dim": 8},
            ["target_last_hidden_dim is 8, but hidden_size 4 and target_layer_ids [-1, 2] give 4"],
        ),
    ],
)
def test_widths_that_contradict_each_other_are_refused(put: Any, changes: dict[str, Any], faults: list[str]) -> None:
    folder = put(versioned(**changes))
    with pytest.raises(CacheFormatError, match=f"^{re.escape(f'{folder}/manifest.json: ' + '; '.join(faults))}$"):
        read_manifest(folder)


@pytest.mark.parametrize("absent", ["hidden_size", "target_layer_ids", "target_hidden_dim", "target_last_hidden_dim"])
def test_widths_are_compared_as_far_as_they_are_there(put: Any, absent: str) -> None:
    manifest = versioned()
    del manifest[absent]
    assert read_manifest(put(manifest)) == manifest


def test_all_wrong_values_are_reported_at_once(put: Any) -> None:
    folder = put(versioned(seq_length="8", dtype="x" * 200, train_split=3))
    with pytest.raises(CacheFormatError) as caught:
        read_manifest(folder)
    assert str(caught.value).split("; ") == [
        f"{folder}/manifest.json: dtype: expected one of ['bf16', 'fp16', 'fp32'], found '" + "x" * 79,
        "seq_length: expected an integer from 1 to 2147483648, found '8'",
        "train_split: expected a string or null, found 3",
    ]


def test_the_generic_reader_checks_generic_keys_only(put: Any) -> None:
    folder = put(versioned(dtype=7, format_version=3))
    assert offline_cache.read_manifest(folder, "EAGLE-3", 3)["dtype"] == 7
    folder = put(versioned(num_samples="7", shard_size=0, complete=None, format_version=3))
    with pytest.raises(
        CacheFormatError, match=r"num_samples: .*; shard_size: .*; complete: expected true or false, found None$"
    ):
        offline_cache.read_manifest(folder, "EAGLE-3", 3)


def test_few_fields_are_enough_to_read_a_manifest(put: Any) -> None:
    folder = put({"format_version": 1, "num_samples": 3, "shard_size": 2})
    assert read_manifest(folder) == {
        "format_version": 1,
        "num_samples": 3,
        "shard_size": 2,
        "mask_reasoning_content": False,
        "mask_generation_prompt": False,
    }


def test_defaults_fill_what_is_absent_and_change_nothing_else(put: Any) -> None:
    folder = put({"format_version": 1, "a": 1})
    assert offline_cache.read_manifest(folder, "X", 1, defaults={"a": 2, "b": 3}) == {
        "format_version": 1,
        "a": 1,
        "b": 3,
    }
    assert offline_cache.read_manifest(folder, "X", 1) == {"format_version": 1, "a": 1}


def test_required_fields_that_are_missing_are_all_named() -> None:
    require_fields(MANIFEST, ("dtype", "num_samples"), name="file")
    with pytest.raises(CacheFormatError, match=r"^file: missing required keys \['x', 'y'\]$"):
        require_fields(MANIFEST, ("x", "dtype", "y"), name="file")


# --- completeness -----------------------------------------------------------------------------------------------


def test_an_incomplete_cache_is_for_producers_only(put: Any) -> None:
    folder = put(versioned(complete=False))
    assert read_manifest(folder, allow_incomplete=True)["complete"] is False
    message = (
        f"the cache in {folder} is incomplete: its manifest says complete: False; its producer is still running or "
        "was interrupted, wait for it or run dvc repro again"
    )
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        read_manifest(folder)


@pytest.mark.parametrize("complete", [False, None, 1, "true"])
def test_only_true_is_complete(complete: object) -> None:
    with pytest.raises(CacheFormatError, match=re.escape(f"is incomplete: its manifest says complete: {complete!r}")):
        ensure_manifest_complete({"complete": complete}, "cache")


@pytest.mark.parametrize("manifest", [{}, {"complete": True}])
def test_a_manifest_older_than_the_marker_counts_as_complete(manifest: dict[str, bool]) -> None:
    ensure_manifest_complete(manifest, "cache")


# --- comparing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recorded", "manifest", "differing"),
    [
        (MANIFEST, MANIFEST, []),
        (versioned(), versioned(format_version=2, complete=False), []),
        (MANIFEST, {**MANIFEST, "dtype": "fp16"}, ["dtype"]),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, ["a", "b"]),
        ({"a": 1}, {}, ["a"]),
        ({}, {"a": None}, ["a"]),
        ({"a": 13.0, "b": 0}, {"a": 13, "b": False}, []),
        ({}, {"mask_generation_prompt": False, "mask_reasoning_content": False}, []),
        ({"mask_generation_prompt": False}, {}, []),
        ({}, {"mask_generation_prompt": True}, ["mask_generation_prompt"]),
        ({"mask_reasoning_content": True}, {}, ["mask_reasoning_content"]),
    ],
)
def test_fields_that_differ(recorded: dict[str, Any], manifest: dict[str, Any], differing: list[str]) -> None:
    assert manifest_mismatch_fields(recorded, manifest) == differing


@pytest.mark.parametrize(
    ("manifest", "expected", "differing"),
    [
        ({"a": True, "b": False}, {"a": True, "b": False}, []),
        ({}, {"a": False}, []),
        ({"a": True}, {}, []),
        ({}, {"a": True}, ["a is False in the cache, training asks for True"]),
        (
            {"a": True},
            {"a": False, "b": True},
            ["a is True in the cache, training asks for False", "b is False in the cache, training asks for True"],
        ),
    ],
)
def test_supervision_options_must_match(
    manifest: dict[str, bool], expected: dict[str, bool], differing: list[str]
) -> None:
    def check() -> None:
        offline_cache.ensure_supervision_options_match(
            manifest, expected, cache_name="EAGLE-3", cache_dir="some/cache", producer_name="precompute"
        )

    if not differing:
        check()
        return
    message = (
        "the EAGLE-3 cache in some/cache does not match the supervision options: "
        + "; ".join(differing)
        + "; change the options or make the cache again with precompute"
    )
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        check()
