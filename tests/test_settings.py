"""params.yaml to typed settings: as DVC reads it, nothing coerced, every fault at once."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_cache.errors import SettingsError
from dspark_cache.settings import SECTIONS, Settings, check_settings, load_settings
from tests.repository import ROOT, read_yaml

if TYPE_CHECKING:
    from pathlib import Path


def test_the_shipped_params_are_the_defaults_and_name_every_key() -> None:
    assert load_settings(ROOT / "params.yaml", {}) == Settings()
    shipped = {section: list(values) for section, values in read_yaml(ROOT / "params.yaml").items()}
    assert shipped == {name: [field.name for field in dataclasses.fields(kind)] for name, kind in SECTIONS.items()}


def test_what_a_file_leaves_out_has_its_default() -> None:
    settings = check_settings({"data": {"seq_length": 64}})
    assert settings.data.seq_length == 64
    assert dataclasses.replace(settings, data=Settings().data) == Settings()


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_are_frozen(section: str) -> None:
    settings = check_settings({section: {}})
    assert type(getattr(settings, section)) is SECTIONS[section]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(getattr(settings, section), dataclasses.fields(SECTIONS[section])[0].name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, section, None)


FAULTS: list[tuple[str, Any, str]] = [
    # unknown names
    ("data.pth", "x", "unknown key data.pth, did you mean 'path'?"),
    ("verify.zzz", 1, "unknown key verify.zzz; known are ['level', 'recompute_samples']"),
    ("verify.3", 1, "unknown key verify.3; known are ['level', 'recompute_samples']"),
    # bool: YAML 1.1 words and numbers are none
    ("data.skip_invalid", "yes", "data.skip_invalid: expected true or false, found 'yes'"),
    ("data.skip_invalid", 1, "data.skip_invalid: expected true or false, found 1"),
    ("data.skip_invalid", None, "data.skip_invalid: expected true or false, found None"),
    ("data.shuffle", "false", "data.shuffle: expected true or false or null, found 'false'"),
    # int: no text, no bool, no float, however round; bounded
    ("data.shuffle_seed", "5", "data.shuffle_seed: expected an integer of at least 0, found '5'"),
    ("data.shuffle_seed", 1.0, "data.shuffle_seed: expected an integer of at least 0, found 1.0"),
    ("data.shuffle_seed", True, "data.shuffle_seed: expected an integer of at least 0, found True"),
    ("data.shuffle_seed", -1, "data.shuffle_seed: expected an integer of at least 0, found -1"),
    ("data.shuffle_seed", 1 << 63, f"data.shuffle_seed: expected an integer of at least 0, found {1 << 63}"),
    ("data.seq_length", 1, "data.seq_length: expected an integer of at least 2, found 1"),
    ("data.limit", 0, "data.limit: expected an integer of at least 1 or null, found 0"),
    ("data.min_loss_tokens", -1, "data.min_loss_tokens: expected an integer of at least 0, found -1"),
    ("data.min_loss_tokens", 257, "data.min_loss_tokens: 257 is more than the 256 tokens of data.seq_length"),
    ("target.block_bytes", 0, "target.block_bytes: expected an integer of at least 1, found 0"),
    ("target.draft_num_hidden_layers", 0, "expected an integer of at least 1, found 0"),
    ("cache.shard_size", 0, "cache.shard_size: expected an integer of at least 1 or auto, found 0"),
    ("cache.shard_bytes", 0, "cache.shard_bytes: expected an integer of at least 1, found 0"),
    ("verify.recompute_samples", -1, "verify.recompute_samples: expected an integer of at least 0, found -1"),
    ("runtime.max_tokens_per_batch", 0, "expected an integer of at least 1, found 0"),
    ("runtime.num_workers", -1, "runtime.num_workers: expected an integer of at least 0, found -1"),
    # float: finite
    ("runtime.host_memory_gb", -1, "runtime.host_memory_gb: expected a number of at least 0, found -1"),
    ("runtime.host_memory_gb", "4", "runtime.host_memory_gb: expected a number of at least 0, found '4'"),
    ("runtime.host_memory_gb", True, "runtime.host_memory_gb: expected a number of at least 0, found True"),
    ("runtime.host_memory_gb", float("inf"), "runtime.host_memory_gb: expected a number of at least 0, found inf"),
    ("runtime.host_memory_gb", float("nan"), "runtime.host_memory_gb: expected a number of at least 0, found nan"),
    # text: not empty, not OmegaConf's "missing"
    ("data.path", 5, "data.path: expected a text, found 5"),
    ("data.path", None, "data.path: expected a text, found None"),
    ("data.path", " ", "data.path: expected a text, found ' '"),
    ("data.path", "???", "data.path: expected a text, found '???'"),
    ("data.split", "", "data.split: expected a text or null, found ''"),
    ("target.chat_template", "???", "target.chat_template: expected a text or null, found '???'"),
    # choices
    ("cache.dtype", "fp8", "cache.dtype: expected one of bf16, fp16, fp32, fp8_e4m3, found 'fp8'"),
    ("target.compute_dtype", "f32", "target.compute_dtype: expected one of auto, bf16, fp16, fp32, found 'f32'"),
    ("target.nonfinite", "warn", "target.nonfinite: expected one of error, drop, found 'warn'"),
    ("verify.level", "all", "verify.level: expected one of files, headers, bytes, values, supervision, found 'all'"),
    ("runtime.parallelism", "ddp", "runtime.parallelism: expected one of replicate, fsdp, tensor, found 'ddp'"),
    # a number or a word
    ("runtime.processes", True, "runtime.processes: expected an integer of at least 1 or auto, found True"),
    ("runtime.processes", 0, "runtime.processes: expected an integer of at least 1 or auto, found 0"),
    ("runtime.processes", "all", "runtime.processes: expected an integer of at least 1 or auto, found 'all'"),
    ("runtime.processes", 2.0, "runtime.processes: expected an integer of at least 1 or auto, found 2.0"),
    ("runtime.processes", None, "runtime.processes: expected an integer of at least 1 or auto, found None"),
    ("runtime.group_size", -2, "runtime.group_size: expected an integer of at least 1 or auto, found -2"),
    ("runtime.group_size", "2", "runtime.group_size: expected an integer of at least 1 or auto, found '2'"),
    # a slice
    ("runtime.slice", "0/2", "runtime.slice: expected K/N with K from 1 to N or null, found '0/2'"),
    ("runtime.slice", "3/2", "runtime.slice: expected K/N with K from 1 to N or null, found '3/2'"),
    ("runtime.slice", "1/0", "runtime.slice: expected K/N with K from 1 to N or null, found '1/0'"),
    ("runtime.slice", "-1/2", "runtime.slice: expected K/N with K from 1 to N or null, found '-1/2'"),
    ("runtime.slice", "1/2/3", "runtime.slice: expected K/N with K from 1 to N or null, found '1/2/3'"),
    ("runtime.slice", "1", "runtime.slice: expected K/N with K from 1 to N or null, found '1'"),
    ("runtime.slice", " 1/2", "runtime.slice: expected K/N with K from 1 to N or null, found ' 1/2'"),
    ("runtime.slice", "1/2\n", "runtime.slice: expected K/N with K from 1 to N or null, found '1/2\\n'"),
    ("runtime.slice", "١/٢", "runtime.slice: expected K/N with K from 1 to N or null, found '١/٢'"),
    ("runtime.slice", "", "runtime.slice: expected K/N with K from 1 to N or null, found ''"),
    ("runtime.slice", 2, "runtime.slice: expected K/N with K from 1 to N or null, found 2"),
    # layer ids
    ("target.layer_ids", 3, "target.layer_ids: expected a list of integers of at least -1 or null, found 3"),
    ("target.layer_ids", ["1"], "target.layer_ids: expected a list of integers of at least -1 or null, found ['1']"),
    ("target.layer_ids", [True], "target.layer_ids: expected a list of integers of at least -1 or null, found [True]"),
    ("target.layer_ids", [-2, 0], "expected a list of integers of at least -1 or null, found [-2, 0]"),
    ("target.layer_ids", [], "target.layer_ids: expected one or more strictly increasing ids, found []"),
    ("target.layer_ids", [3, 1], "target.layer_ids: expected one or more strictly increasing ids, found [3, 1]"),
    ("target.layer_ids", [1, 1], "target.layer_ids: expected one or more strictly increasing ids, found [1, 1]"),
]


@pytest.mark.parametrize(("name", "value", "message"), FAULTS)
def test_a_fault_is_named_with_its_key_and_what_was_expected(name: str, value: Any, message: str) -> None:
    section, _, key = name.partition(".")
    with pytest.raises(SettingsError) as error:
        check_settings({section: {int(key) if key.isdigit() else key: value}}, name="params.yaml")
    first, *faults = str(error.value).split("\n  ")
    assert first == "params.yaml has 1 fault(s):"
    assert len(faults) == 1
    assert faults[0].endswith(message)


def test_every_fault_is_reported_at_once_and_with_those_found_before() -> None:
    params: dict[str, Any] = {"runtim": {}, "cache": None, "verify": [1]}
    names = [(name, value, message) for name, value, message in FAULTS if name.startswith(("data.pth", "target."))]
    for name, value, _ in names:
        section, _, key = name.partition(".")
        params.setdefault(section, {})[key] = value
    with pytest.raises(SettingsError) as error:
        check_settings(params, faults=["found before"])
    faults = str(error.value).splitlines()
    assert faults[0] == f"params has {len(faults) - 1} fault(s):"
    assert faults[1] == "  found before"
    assert "  unknown section 'runtim', did you mean 'runtime'?" in faults
    assert "  cache: expected keys and values, found None" in faults
    assert "  verify: expected keys and values, found [1]" in faults
    for name in {name for name, _, _ in names}:
        assert sum(name in fault for fault in faults) == 1, name


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("value", [3, "text", [1], None, True])
def test_a_section_that_has_no_keys_is_refused(section: str, value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        check_settings({section: value})
    assert str(error.value) == f"params has 1 fault(s):\n  {section}: expected keys and values, found {value!r}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data.seq_length", 2),
        ("data.limit", 1),
        ("data.limit", None),
        ("data.shuffle_seed", (1 << 63) - 1),
        ("data.min_loss_tokens", 256),
        ("data.shuffle", None),
        ("data.shuffle", False),
        ("target.layer_ids", None),
        ("target.layer_ids", [-1, 0, 7]),
        ("runtime.processes", 1),
        ("runtime.processes", 64),
        ("runtime.processes", "auto"),
        ("runtime.parallelism", "fsdp"),
        ("runtime.parallelism", "tensor"),
        ("runtime.group_size", 1),
        ("runtime.group_size", "auto"),
        ("runtime.slice", None),
        ("runtime.slice", "1/1"),
        ("runtime.slice", "16/16"),
        ("runtime.host_memory_gb", 0.5),
    ],
)
def test_the_edges_of_what_is_accepted(name: str, value: Any) -> None:
    section, _, key = name.partition(".")
    found = getattr(getattr(check_settings({section: {key: value}}), section), key)
    assert found == value
    assert type(found) is type(value)


SIMILAR = {
    "taget": "target",
    "targets": "target",
    "verfy": "verify",
    "caches": "cache",
    "runtme": "runtime",
    "dat": "data",
    "Data": "data",
    "TARGET": "target",
}


@pytest.mark.parametrize(("name", "meant"), SIMILAR.items())
def test_a_section_whose_name_is_nearly_ours_is_a_mistake(name: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"  unknown section '{name}', did you mean '{meant}'\?$"):
        check_settings({name: {"model": "x"}})


OTHERS = ["train", "model", "prepare", "eval", "evaluate", "featurize", "dataset", "date", "metadata", "run", "lr", "3"]


def test_sections_of_other_pipelines_are_left_alone_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "".join(f"{name}: [1]\n" for name in OTHERS) + "data: {seq_length: 64}\n"
    path = write(tmp_path / "params.yaml", text)
    with caplog.at_level(logging.INFO):
        found = load_settings(path, {})
    assert found == check_settings({"data": {"seq_length": 64}})
    assert caplog.messages == [f"{path}: left alone, no sections of this pipeline: {', '.join(OTHERS)}"]


def test_nothing_is_said_where_all_sections_are_ours(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_settings(ROOT / "params.yaml", {})
    assert caplog.messages == []


def test_an_integer_becomes_a_float_where_a_float_is_due() -> None:
    found = check_settings({"runtime": {"host_memory_gb": 2}}).runtime.host_memory_gb
    assert found == 2
    assert isinstance(found, float)


@settings(deadline=None)
@given(st.text(st.sampled_from("$ab{}\\ \n'?"), min_size=1).filter(lambda text: text.strip() and text != "???"))
def test_templates_come_back_as_they_are_written(text: str) -> None:
    assert check_settings({"target": {"chat_template": text}}).target.chat_template == text


@pytest.mark.parametrize("text", ["{{ '${a}' }}", "${oc.env:HOME}", "\\${a}", "\\\\${a}\\", "a\\", "${", "$${a}"])
def test_nothing_is_interpolated(text: str) -> None:
    assert check_settings({"target": {"chat_template": text}}).target.chat_template == text


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_is_read_as_dvc_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "data: {path: no, split: 1:30, skip_invalid: true, shuffle_seed: 010}\n")
    data = load_settings(path, {}).data
    assert (data.path, data.split, data.skip_invalid, data.shuffle_seed) == ("no", "1:30", True, 10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [", "is not valid YAML: line 1, column 8: "),
        ("data:\n\tpath: x\n", "is not valid YAML: line 2, column 1: "),
        ("data: {path: a, path: b}\n", 'is not valid YAML: line 1, column 17: found duplicate key "path"'),
        ("", "must hold sections of params, found NoneType"),
        ("- data\n", "must hold sections of params, found list"),
    ],
)
def test_a_file_that_holds_no_params(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "params.yaml", text)
    with pytest.raises(SettingsError) as error:
        load_settings(path, {})
    assert str(error.value).startswith(f"{path} {message}")


def test_a_file_that_is_missing_or_not_text(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    with pytest.raises(SettingsError) as error:
        load_settings(path, {})
    assert str(error.value) == f"no such file: {path}; run from the root of the repository"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="is not valid YAML"):
        load_settings(path, {})
    with pytest.raises(SettingsError, match=r"cannot be read: Is a directory$"):
        load_settings(tmp_path, {})


def test_the_environment_overrides_runtime_keys_and_their_types_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "runtime: {max_tokens_per_batch: 5, num_workers: 1}\n")
    environment = {
        "DSPARK_RUNTIME__MAX_TOKENS_PER_BATCH": "100",
        "DSPARK_RUNTIME__KEEP_BLOCKS": "false",
        "DSPARK_RUNTIME__HOST_MEMORY_GB": "0.5",
        "DSPARK_RUNTIME__SCRATCH_DIR": "/elsewhere",
        "DSPARK_OTHER__KEY": "not ours",
        "RUNTIME__DEVICE": "not ours",
    }
    runtime = load_settings(path, environment).runtime
    assert dataclasses.asdict(runtime) == dataclasses.asdict(Settings().runtime) | {
        "max_tokens_per_batch": 100,
        "num_workers": 1,
        "keep_blocks": False,
        "host_memory_gb": 0.5,
        "scratch_dir": "/elsewhere",
    }


@pytest.mark.parametrize(
    "name", ["DSPARK_RUNTIM__DEVICE", "DSPARK_RUNTIME_DEVICE", "DSPARK_RUNTIME", "DSPARK_RUNTIME__"]
)
def test_a_mistyped_name_in_the_environment_is_no_setting(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name} in the environment is no setting: write DSPARK_RUNTIME__<KEY>"):
        load_settings(write(tmp_path / "params.yaml", "data: {}\n"), {name: "cpu"})


def test_the_environment_sets_runtime_where_the_file_has_no_such_section(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "runtime:\ndata: {}\n")
    assert load_settings(path, {"DSPARK_RUNTIME__DEVICE": "cuda:1"}).runtime.device == "cuda:1"
    path = write(tmp_path / "params.yaml", "data: {}\n")
    assert load_settings(path, {"DSPARK_RUNTIME__DEVICE": "cuda:1"}).runtime.device == "cuda:1"


def test_all_faults_of_file_and_environment_come_together(tmp_path: Path) -> None:
    path = write(tmp_path / "params.yaml", "cache: {shard_size: 0}\n")
    environment = {
        "DSPARK_DATA__PATH": "x",
        "DSPARK_RUNTIME__DEVICE": "[",
        "DSPARK_RUNTIME__DEVIC": "cpu",
        "DSPARK_RUNTIME__NUM_WORKERS": "two",
    }
    with pytest.raises(SettingsError) as error:
        load_settings(path, environment)
    assert str(error.value).splitlines() == [
        f"{path} has 5 fault(s):",
        "  DSPARK_DATA__PATH in the environment: only runtime keys may be set there, set data.path instead",
        "  DSPARK_RUNTIME__DEVICE in the environment is not valid YAML: line 1, column 2: expected the node content, "
        "but found '<stream end>', found '['",
        "  cache.shard_size: expected an integer of at least 1 or auto, found 0",
        "  unknown key runtime.devic, did you mean 'device'?",
        "  runtime.num_workers: expected an integer of at least 0, found 'two'",
    ]


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("data: {path: 2020-13-45}\n", {}),  # no date
        ("{}\n", {"DSPARK_RUNTIME__DEVICE": "2020-13-45"}),
        ("runtime: 5\n", {"DSPARK_RUNTIME__DEVICE": "cpu"}),  # nothing to set a key in
        ("runtime: {host_memory_gb: 1" + "0" * 400 + "}\n", {}),  # no float is so large
    ],
)
def test_odd_values_are_refused_like_any_other(tmp_path: Path, text: str, environment: dict[str, str]) -> None:
    path = write(tmp_path / "params.yaml", text)
    with pytest.raises(SettingsError, match=re.escape(str(path))):
        load_settings(path, environment)
