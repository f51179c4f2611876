"""What a trainer expects of a cache: a mapping, or the explicit values of a params.yaml."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache import CachedDSparkDataset, CacheFormatError, SettingsError, build_cached_dspark_dataloader
from dspark_cache.identity import IDENTITY_SOURCES, VERBATIM, ensure_expected, expected_of_params, manifest_differences
from dspark_cache.manifest import DSPARK_FIELDS, RAGGED_FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable

MANIFEST: dict[str, Any] = {
    "dtype": "bf16",
    "mask_reasoning_content": True,
    "num_samples": 3,
    "seq_length": 1,
    "target_layer_ids": [0, 2],
    "train_split": None,
}


def test_every_identity_field_has_a_source() -> None:
    assert set(IDENTITY_SOURCES) == set(DSPARK_FIELDS | RAGGED_FIELDS) - {"complete"}
    assert all(IDENTITY_SOURCES.values())
    assert all(param in IDENTITY_SOURCES[field] for field, param in VERBATIM.items())


@pytest.mark.parametrize(
    ("expected", "differences"),
    [
        ({}, []),
        (MANIFEST, []),
        ({"mask_generation_prompt": False}, []),  # absent in the manifest, as in caches older than the option
        ({"train_split": None}, []),
        ({"format_version": 1}, ["format_version: expected 1, found 'nothing'"]),
        ({"dtype": "fp32"}, ["dtype: expected 'fp32', found 'bf16'"]),
        ({"hidden_size": 4}, ["hidden_size: expected 4, found 'nothing'"]),
        ({"seq_length": True}, ["seq_length: expected True, found 1"]),
        ({"mask_reasoning_content": 1}, ["mask_reasoning_content: expected 1, found True"]),
        (
            {"target_layer_ids": [0, 1], "num_samples": 3, "dtype": None},
            ["target_layer_ids: expected [0, 1], found [0, 2]", "dtype: expected None, found 'bf16'"],
        ),
    ],
)
def test_differences_are_listed_one_by_one(expected: dict[str, Any], differences: list[str]) -> None:
    assert manifest_differences(MANIFEST, expected) == differences


def test_keys_that_no_manifest_has_are_refused() -> None:
    message = (
        "expect= has keys that no manifest has: ['Dtype', 'seq_len']; known are ['chat_template_sha256', 'complete',"
    )
    with pytest.raises(SettingsError, match="^" + re.escape(message)):
        manifest_differences(MANIFEST, {"seq_len": 8, "dtype": "bf16", "Dtype": "bf16"})


def test_keys_of_the_cache_s_own_may_be_expected() -> None:
    assert manifest_differences({"note": 1}, {"note": 2}) == ["note: expected 2, found 1"]


def test_a_cache_that_differs_is_refused_with_every_difference() -> None:
    message = (
        "the cache in some/cache was made with a different configuration, it does not match expect=: "
        "dtype: expected 'fp32', found 'bf16'; num_samples: expected 4, found 3"
    )
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        ensure_expected(MANIFEST, {"dtype": "fp32", "num_samples": 4}, cache_dir="some/cache")
    ensure_expected(MANIFEST, {"dtype": "bf16"}, cache_dir="some/cache")


# --- params.yaml ------------------------------------------------------------------------------------------------

PARAMS = """
data:
  path: data/rows.jsonl
  revision: null
  split: null
  shuffle_seed: 42
  seq_length: 8
  mask_reasoning_content: no  # YAML 1.2: a string, as DVC reads it
  limit: 7
target:
  model: models/tiny
  chat_template: some.jinja
  layer_ids: [0, 1]
cache:
  dtype: bf16
  shard_size: 2
runtime:
  device: cpu
"""


@pytest.fixture
def params(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Return a function that writes a params.yaml."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "params.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_explicit_values_of_params_are_expected_and_nothing_else(params: Any) -> None:
    assert expected_of_params(params(PARAMS)) == {
        "dtype": "bf16",
        "mask_reasoning_content": "no",
        "seq_length": 8,
        "shard_size": 2,
        "shuffle_seed": 42,
        "target_layer_ids": [0, 1],
        "target_model": "models/tiny",
        "train_data_path": "data/rows.jsonl",
    }


def test_false_is_an_explicit_value(params: Any) -> None:
    path = params("data: {mask_reasoning_content: false, mask_generation_prompt: true}")
    assert expected_of_params(path) == {"mask_reasoning_content": False, "mask_generation_prompt": True}


@pytest.mark.parametrize("content", ["{}", "data:", "data: 3", "other: {dtype: bf16}", "cache: {dtype: null}"])
def test_params_without_values_expect_nothing(params: Any, content: str) -> None:
    assert expected_of_params(params(content)) == {}


@pytest.mark.parametrize(
    "content", ["a: [", "data: {path: x, path: y}", b"\xff\xfe\xfa", "!!python/object:os.system {}"]
)
def test_params_that_cannot_be_read_are_refused(params: Any, content: str | bytes) -> None:
    path = params(content)
    with pytest.raises(SettingsError, match="^" + re.escape(f"{path} is not valid YAML: ")):
        expected_of_params(path)


@pytest.mark.parametrize(("content", "kind"), [("", "NoneType"), ("- 1", "list"), ("text", "str")])
def test_params_without_sections_are_refused(params: Any, content: str, kind: str) -> None:
    path = params(content)
    with pytest.raises(SettingsError, match=f"^{re.escape(str(path))} must hold sections of params, found {kind}$"):
        expected_of_params(path)


def test_params_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(SettingsError, match="^" + re.escape(f"expect='{path}': no such file") + "$"):
        expected_of_params(path)


def test_a_trainer_without_a_yaml_reader_is_told_so(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    path = params(PARAMS)
    message = f"reading {path} needs the package ruamel.yaml: pip install ruamel.yaml"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        expected_of_params(path)


# --- opening a cache --------------------------------------------------------------------------------------------


def test_a_cache_opens_only_if_it_is_the_expected_one(make_cache: Any) -> None:
    folder = make_cache(3, 2)
    assert len(CachedDSparkDataset(folder, expect={"num_samples": 3, "dtype": "bf16"})) == 3
    message = f"the cache in {folder} was made with a different configuration, it does not match expect=: dtype: "
    for open_cache in (
        CachedDSparkDataset,
        lambda path, expect: build_cached_dspark_dataloader(path, 1, False, expect=expect),
    ):
        with pytest.raises(CacheFormatError, match="^" + re.escape(message)):
            open_cache(folder, expect={"num_samples": 3, "dtype": "fp32"})
        with pytest.raises(SettingsError, match="expect= has keys that no manifest has"):
            open_cache(folder, expect={"samples": 3})


@pytest.mark.parametrize("kind", [str, Path])
def test_a_cache_is_compared_with_a_params_file(make_cache: Any, params: Any, kind: Callable[[Path], Any]) -> None:
    folder = make_cache(3, 2)
    text = PARAMS.replace("no  #", "false  #")
    assert len(CachedDSparkDataset(folder, expect=kind(params(text)))) == 3
    path = params(text.replace("seq_length: 8", "seq_length: 9").replace("[0, 1]", "[0, 2]"))
    with pytest.raises(CacheFormatError) as caught:
        CachedDSparkDataset(folder, expect=kind(path))
    assert str(caught.value).endswith(
        "seq_length: expected 9, found 8; target_layer_ids: expected [0, 2], found [0, 1]"
    )
