"""A trainer's YAML against a cache: every difference at once, with what to do, before a GPU is asked for."""

from __future__ import annotations

import json
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from dspark_cache.convert import Conversion, convert_cache
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, SettingsError
from dspark_cache.manifest import read_manifest
from dspark_cache.target import build_target_layer_ids
from dspark_cache.train_config import check_train_config, describe
from tests.caches import make_ragged
from tests.repository import GOLDEN, ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dspark_cache.config_differences import Difference

    MakeCache = Callable[..., Path]

LAYERS = [1, 2]
TEMPLATE = GOLDEN / "templates/chatml.jinja"


@pytest.fixture
def cache(make_cache: MakeCache) -> Path:
    """A padded cache of a target with six layers, without anything to complain of."""
    return make_cache(3, 2, num_hidden_layers=6, target_layer_ids=LAYERS, target_model_type="qwen3")


@pytest.fixture
def recipe(cache: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a recipe that fits the cache, but for what is given; None leaves a key out."""

    def write(**args: Any) -> Path:
        fitting = {
            "target_model_name_or_path": "models/tiny",
            "cached_target_path": str(cache),
            "seq_length": 8,
            "target_layer_ids": LAYERS,
        }
        values = {key: value for key, value in {**fitting, **args}.items() if value is not None}
        return put(tmp_path / "recipe.yaml", {"recipe": "TrainDSparkRecipe", "recipe_args": values})

    return write


def put(path: Path, content: Any) -> Path:
    YAML().dump(content, path)
    return path


def change_manifest(cache: Path, **values: Any) -> None:
    path = cache / "manifest.json"
    manifest = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))


def texts(found: list[Difference]) -> list[tuple[str, str, str]]:
    return [(item.severity, item.key, item.problem) for item in found]


def only(found: list[Difference]) -> Difference:
    (item,) = found
    return item


def test_a_recipe_that_fits_has_no_difference(cache: Path, recipe: Any) -> None:
    path = recipe(
        train_data_path="data/rows.jsonl",
        shuffle_seed=42,
        mask_reasoning_content=False,
        packed_sequence_size=0,
        micro_batch_size=4,
        cache_dtype="bf16",
        chat_template=None,
        num_workers=3,
        something_of_nemo={"a": [1]},
    )
    assert check_train_config(cache, path, strict=True) == []
    assert check_train_config(str(cache), str(path)) == []
    assert describe([]) == "the file and the cache go together"


# one key at a time


@pytest.mark.parametrize(
    ("args", "severity", "problem", "remedy"),
    [
        ({"seq_length": 4}, "error", "4, the cache has 8", "set it to 8; or cut the cache: {convert} --seq-length 4"),
        ({"seq_length": 16}, "error", "16, the cache has 8", "set it to 8; or capture again with data.seq_length: 16"),
        (
            {"mask_reasoning_content": True},
            "error",
            "True, the cache has False",
            "set it to false; or make the cache again with data.mask_reasoning_content, which needs no GPU if blocks "
            "were kept",
        ),
        (
            {"target_layer_ids": [1]},
            "error",
            "[1], the cache holds the layers [1, 2]",
            "set it to [1, 2]; or keep these of the cache: {convert} --layers=1; or capture again with "
            "target.layer_ids: [1]",
        ),
        (
            {"target_layer_ids": [1, 3]},
            "error",
            "[1, 3], the cache holds the layers [1, 2]",
            "set it to [1, 2]; or capture again with target.layer_ids: [1, 3]",
        ),
        (
            {"target_layer_ids": [2, 1]},
            "error",
            "expected strictly increasing ids from -1 (embedding) to 5 (final norm), found [2, 1]",
            "set it to [1, 2], the cache's",
        ),
        (
            {"target_model_name_or_path": "Qwen/Qwen3-4B"},
            "warning",
            "'Qwen/Qwen3-4B', the cache has 'models/tiny'",
            "only names are compared: make sure that they are the same weights",
        ),
        (
            {"train_data_path": "x.jsonl"},
            "warning",
            "'x.jsonl', the cache has 'data/rows.jsonl'",
            "training from a cache does not read it: the data, split and order of the cache count",
        ),
        ({"train_split": "train"}, "warning", "'train', the cache has None", None),
        ({"shuffle_seed": 7}, "warning", "7, the cache has 42", None),
        ({"cache_dtype": "fp32"}, "warning", "'fp32', the cache has 'bf16'", None),
        (
            {"packed_sequence_size": 4096},
            "error",
            "4096: NeMo AutoModel 0.7.0 refuses to pack the samples of a cache",
            "set it to 0",
        ),
        (
            {"val_data_path": "val.jsonl"},
            "warning",
            "NeMo AutoModel 0.7.0 ignores it when it trains from a cache",
            "hold samples out with data.eval_samples, and evaluate on cache-eval/ in a run of its own",
        ),
        (
            {"cached_target_path": "/somewhere/else"},
            "warning",
            "'/somewhere/else' is not the folder that was compared, {cache}",
            "compare the cache that training will read",
        ),
        (
            {"cached_target_path": "${oc.env:CACHE}"},
            "warning",
            "'${oc.env:CACHE}' is filled in when training starts, it is not compared",
            "compare it by hand",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_that_differs_is_named_with_both_values_and_what_to_do(
    cache: Path, recipe: Any, args: dict[str, Any], severity: str, problem: str, remedy: str | None
) -> None:
    item = only(check_train_config(cache, recipe(**args)))
    ((key, value),) = args.items()
    assert (item.severity, item.key, item.value) == (severity, f"recipe_args.{key}", value)
    assert item.problem == problem.replace("{cache}", str(cache))
    if remedy is not None:
        assert item.remedy == remedy.replace("{convert}", f"dspark-cache convert {cache} DST")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("seq_length", "8", "an integer of at least 1"),
        ("seq_length", 0, "an integer of at least 1"),
        ("micro_batch_size", True, "an integer of at least 1"),
        ("mask_generation_prompt", "yes", "true or false"),
        ("target_layer_ids", [1, "2"], "a list of integers"),
        ("target_layer_ids", 1, "a list of integers"),
        ("packed_sequence_size", -1, "an integer of at least 0"),
        ("shuffle_seed", 1.5, "an integer"),
        ("train_split", 3, "a text"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_error_and_not_compared(
    cache: Path, recipe: Any, key: str, value: Any, expected: str
) -> None:
    change_manifest(cache, mask_generation_prompt=True)
    args = {"mask_generation_prompt": True, key: value}
    item = only(check_train_config(cache, recipe(**args)))
    assert texts([item]) == [("error", f"recipe_args.{key}", f"expected {expected}, found {value!r}")]


def test_absent_keys_count_as_nemo_counts_them(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(3, 2, layers=5, num_hidden_layers=12, target_model_type="qwen3", mask_reasoning_content=True)
    found = check_train_config(cache, put(tmp_path / "recipe.yaml", {"recipe_args": {"train_split": None}}))
    assert texts(found) == [
        ("error", "recipe_args.mask_reasoning_content", "False by default, the cache has True"),
        (
            "error",
            "recipe_args.target_layer_ids",
            f"{build_target_layer_ids(12, 5)} by default, the cache holds the layers [0, 1, 2, 3, 4]",
        ),
        (
            "warning",
            "recipe_args.cached_target_path",
            "it is not set: NeMo AutoModel would run the target in every step and read no cache",
        ),
        ("warning", "recipe_args.seq_length", "it is not set, the cache has 8: NeMo AutoModel refuses another"),
    ]
    assert found[2].remedy == f"set it to {cache.resolve()}"
    shown = found[1].as_json()
    assert (shown["value"], shown["cache"]) == (None, [0, 1, 2, 3, 4])  # null where the file has nothing


@pytest.mark.parametrize(("layers", "draft"), [(6, 2), (6, 5), (6, 9), (2, 5), (12, 3)])
def test_default_layers_follow_the_number_of_draft_layers(
    make_cache: MakeCache, recipe: Any, layers: int, draft: int
) -> None:
    default = build_target_layer_ids(layers, draft)
    cache = make_cache(
        3, 2, layers=len(default), num_hidden_layers=layers, target_layer_ids=default, target_model_type="qwen3"
    )
    path = recipe(target_layer_ids=None, draft_num_hidden_layers=draft, cached_target_path=str(cache))
    assert [item.key for item in check_train_config(cache, path)] == ["cache"] * 2  # the last layer is among them


def test_a_target_of_one_layer_has_no_default_layers(make_cache: MakeCache, recipe: Any) -> None:
    for num_layers, keys in ((1, ["cache", "cache"]), (2, ["recipe_args.target_layer_ids"])):
        cache = make_cache(3, 2, layers=1, num_hidden_layers=num_layers, target_model_type="qwen3")
        found = check_train_config(cache, recipe(target_layer_ids=None, cached_target_path=str(cache)))
        assert [item.key for item in found] == keys


def test_the_configuration_of_a_target_at_hand_is_compared(cache: Path, recipe: Any) -> None:
    folder = str(GOLDEN / "models/gemma4-tiny")  # its sizes lie in text_config
    found = check_train_config(cache, recipe(target_model_name_or_path=folder))
    config = f"{folder}/config.json"
    assert [item.problem for item in found if item.severity == "error"] == [
        f"hidden_size of {config} is 32, the cache was made with 4",
        f"model_type of {config} is 'gemma4', the cache was made with 'qwen3'",
        f"vocab_size of {config} is 640, the cache was made with 32",
    ]
    assert found[0].cached == 4


def test_an_unreadable_configuration_of_the_target_is_said(cache: Path, recipe: Any, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text("{")
    change_manifest(cache, target_model=str(tmp_path / "target"))
    item = only(check_train_config(cache, recipe(target_model_name_or_path=str(tmp_path / "target"))))
    assert item.severity == "warning"
    assert "is not valid JSON" in item.problem
    assert item.problem.endswith(": it is not compared")


def test_a_chat_template_is_compared_by_its_text(cache: Path, recipe: Any) -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    assert only(check_train_config(cache, recipe(chat_template=str(TEMPLATE)))).problem.startswith(
        "its sha256 is 95d6d"
    )
    digest = "95d6d5191a76d4a9e0d744df4fa0b05eba718937d89214a205ae830caaa834c4"
    change_manifest(cache, chat_template_sha256=digest)
    assert check_train_config(cache, recipe(chat_template=str(TEMPLATE))) == []
    assert check_train_config(cache, recipe(chat_template=text)) == []
    item = only(check_train_config(cache, recipe(chat_template="templates/typo.jinja")))
    assert item.problem.startswith("chat_template: no such file: templates/typo.jinja")
    assert item.problem.endswith("; it is not compared")


def test_keys_like_those_compared_and_keys_outside_their_section_are_named(
    cache: Path, recipe: Any, tmp_path: Path
) -> None:
    path = recipe(mask_reasoning_contents=True, seq_len=8, max_seq_length=8, seq_length=8)
    item = only(check_train_config(cache, path))  # seq_length is there, so what is like it means nothing
    assert texts([item]) == [
        (
            "warning",
            "recipe_args.mask_reasoning_contents",
            "it is not compared, and mask_reasoning_content is not there",
        )
    ]
    assert item.remedy == "if 'mask_reasoning_content' is meant, write that"
    content = {"seq_length": 9, "recipe_args": YAML(typ="safe").load(path)["recipe_args"]}
    content["recipe_args"].pop("mask_reasoning_contents")
    item = only(check_train_config(cache, put(tmp_path / "outside.yaml", content)))
    assert texts([item]) == [("warning", "seq_length", "it stands outside recipe_args, where it is not read")]


# what no key of a recipe decides


def test_a_ragged_cache_is_refused_with_the_command_that_helps(cache: Path, recipe: Any) -> None:
    ragged = make_ragged(cache, [2, 1])
    item = only(check_train_config(ragged, recipe(cached_target_path=str(ragged))))
    assert texts([item]) == [
        ("error", "cache", "NeMo AutoModel 0.7.0 refuses the cache: it is ragged, format version 2")
    ]
    assert item.remedy == f"make a padded one: dspark-cache convert {ragged} DST --layout padded"
    small = ragged.with_name("small")
    convert_cache(ragged, small, Conversion(dtype="fp8_e4m3", pad_token_id=0))
    item = only(check_train_config(small, recipe(cached_target_path=str(small))))
    assert item.remedy == "publish it again with cache.layout: padded and cache.dtype: bf16"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_family_without_a_draft_is_refused(cache: Path, recipe: Any, is_known: bool) -> None:
    known, others = ("qwen3", "qwen3_moe", "gemma4", "kimi_k2"), ("llama", "gemma3", "qwen3_next", "qwen2")
    for family in known if is_known else others:
        change_manifest(cache, target_model_type=family)
        found = check_train_config(cache, recipe())
        expected = (
            f"NeMo AutoModel 0.7.0 has no draft for targets of the family {family!r}, only for qwen3, qwen3_moe, "
        )
        assert [item.problem.startswith(expected) for item in found] == ([] if is_known else [True])


@pytest.mark.parametrize(
    ("dtype", "device", "is_refused"),
    [
        ("bf16", "cpu", True),
        ("fp16", "cpu", True),
        ("fp32", "cpu", False),
        ("bf16", None, False),
        ("bf16", "cuda", False),
    ],
)
def test_training_on_a_cpu_needs_fp32(
    make_cache: MakeCache, recipe: Any, dtype: str, device: str | None, is_refused: bool
) -> None:
    cache = make_cache(3, 2, dtype=dtype, num_hidden_layers=6, target_layer_ids=LAYERS, target_model_type="qwen3")
    found = check_train_config(cache, recipe(cached_target_path=str(cache)), device=device)
    assert [item.problem.endswith(f"needs a cache in fp32, this one is in {dtype}") for item in found] == (
        [True] if is_refused else []
    )


def test_what_nemo_needs_of_a_cache_is_looked_for(cache: Path, recipe: Any) -> None:
    (cache / "target_weights.safetensors").unlink()
    change_manifest(cache, target_vocab_size=None, dtype=None)
    assert texts(check_train_config(cache, recipe())) == [
        ("error", "cache", "NeMo AutoModel 0.7.0 refuses the cache: " + problem)
        for problem in (
            f"{cache}/target_weights.safetensors does not exist",
            "its manifest lacks ['dtype', 'target_vocab_size']",
        )
    ]


def test_an_empty_cache_is_refused(make_cache: MakeCache, recipe: Any) -> None:
    cache = make_cache(0, 2, num_hidden_layers=6, target_layer_ids=LAYERS, target_model_type="qwen3")
    assert texts(check_train_config(cache, recipe(cached_target_path=str(cache)))) == [
        ("error", "cache", "it has no samples")
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_layers_that_cannot_be_served_are_warned_of_and_refused_in_strict_mode(
    cache: Path, recipe: Any, strict: bool
) -> None:
    change_manifest(cache, target_layer_ids=[-1, 5])
    found = check_train_config(cache, recipe(target_layer_ids=[-1, 5]), strict=strict)
    assert [item.severity for item in found] == ["error" if strict else "warning"] * 2
    sglang, vllm = found
    assert sglang.problem.startswith("layer ids [-1, 5] cannot be served by SGLang: ")
    assert sglang.remedy == "capture others with target.layer_ids"
    assert vllm.problem.startswith("layer ids [5] cannot be served by vLLM: ")
    assert vllm.remedy == (
        f"leave them out: dspark-cache convert {cache} DST --layers=-1; or capture others with target.layer_ids"
    )


def test_a_cache_that_no_trainer_could_read_is_refused_as_it_is_when_opened(
    cache: Path, recipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(CacheNotFoundError, match="no DSpark cache in"):
        check_train_config(tmp_path / "none", recipe())
    (cache / "shard-000001.safetensors").unlink()
    with pytest.raises(CacheFormatError, match=r"missing shard indices \[1\]"):
        check_train_config(cache, recipe())


# params.yaml


def test_params_are_compared_as_expect_compares_them(cache: Path, tmp_path: Path) -> None:
    params = {"data": {"path": "data/rows.jsonl", "seq_length": 9, "limit": 3}, "target": {"layer_ids": LAYERS}}
    item = only(check_train_config(cache, put(tmp_path / "params.yaml", params)))
    assert texts([item]) == [("error", "data.seq_length", "9, the cache has 8")]
    assert (item.value, item.cached) == (9, 8)
    params["data"]["seq_length"] = 8
    assert check_train_config(cache, put(tmp_path / "params.yaml", params)) == []


def test_layers_of_params_that_are_not_given_are_the_default_ones(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(3, 2, num_hidden_layers=6, target_layer_ids=[2, 3])
    for target, wanted in (({"layer_ids": None}, [1, 2, 3, 4, 5]), ({"draft_num_hidden_layers": 2}, [1, 5])):
        item = only(check_train_config(cache, put(tmp_path / "params.yaml", {"target": target})))
        assert texts([item]) == [
            ("error", "target.layer_ids", f"{wanted} by default, the cache holds the layers [2, 3]")
        ]


def test_mistyped_keys_and_sections_of_params_are_named(cache: Path, tmp_path: Path) -> None:
    params = {"datas": {"seq_length": 9}, "cache": {"dtypes": "fp32", "shard_bytes": 5}, "verify": {"level": "files"}}
    found = check_train_config(cache, put(tmp_path / "params.yaml", params))
    assert texts(found) == [
        ("warning", "cache.dtypes", "it is not compared, and dtype is not there"),
        ("warning", "datas", "it is not compared, and data is not there"),
    ]


def test_the_shipped_params_have_no_key_that_looks_mistyped(cache: Path) -> None:
    assert [item for item in check_train_config(cache, ROOT / "params.yaml") if item.severity == "warning"] == []


# files


@pytest.mark.parametrize(
    "content", ["a: [", "a: {b: 1, b: 2}", "!!python/object:os.system {}", "x: 2001-99-99", b"\xff"]
)
def test_what_is_no_yaml_is_refused(cache: Path, tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingsError, match=f"^{re.escape(str(path))} is not valid YAML: "):
        check_train_config(cache, path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "NoneType"),
        ("[1]", "list"),
        ("text", "str"),
        ("recipe_arg: {seq_length: 8}", "the keys ['recipe_arg']"),
        ("recipe_args: 3", "the keys ['recipe_args']"),
        ("runtime: {device: cpu}", "the keys ['runtime']"),
        ("data: 3", "the keys ['data']"),
    ],
)
def test_what_is_neither_a_recipe_nor_params_is_refused(cache: Path, tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    message = (
        f"{path} is no recipe of NeMo AutoModel and no params.yaml: expected the section recipe_args, or one of "
        f"['cache', 'data', 'target'], with keys in it; found {found}"
    )
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        check_train_config(cache, path)


def test_a_file_that_is_not_there_and_a_reader_that_is_not_installed_are_said(
    cache: Path, recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=f"^no such file: {re.escape(str(tmp_path / 'none.yaml'))}$"):
        check_train_config(cache, tmp_path / "none.yaml")
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    with pytest.raises(SettingsError, match=r"needs the package ruamel\.yaml: pip install ruamel\.yaml$"):
        check_train_config(cache, recipe())


# the forms of a result


def test_errors_come_first_and_nothing_in_a_file_forges_a_line(cache: Path, recipe: Any) -> None:
    found = check_train_config(cache, recipe(seq_length=4, train_data_path="x\nerror   all is well\x1b[2K"))
    assert [item.severity for item in found] == ["error", "warning"]
    lines = describe(found).splitlines()
    assert lines[0] == "error   recipe_args.seq_length: 4, the cache has 8"
    assert lines[1].startswith("        set it to 8; or cut the cache: ")
    assert lines[2].startswith("warning recipe_args.train_data_path: 'x\\nerror   all is well\\x1b[2K', the cache has ")
    assert len(lines) == 4
    assert json.loads(json.dumps(found[0].as_json())) == {
        "severity": "error",
        "key": "recipe_args.seq_length",
        "value": 4,
        "cache": 8,
        "problem": "4, the cache has 8",
        "remedy": found[0].remedy,
    }


@pytest.mark.parametrize("value", ["2001-01-01", ".inf", "&a [*a]", "{2001-01-01: 1}", "!!set {1}"])
def test_what_only_yaml_can_say_is_refused_and_still_written_as_json(cache: Path, tmp_path: Path, value: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe_args: {{seq_length: {value}, target_layer_ids: [1, 2], cached_target_path: {cache}}}")
    item = only(check_train_config(cache, path))
    assert (item.severity, item.key) == ("error", "recipe_args.seq_length")
    assert isinstance(json.loads(json.dumps(item.as_json(), allow_nan=False))["value"], str)


def test_a_cache_of_nemo_itself_is_compared(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(GOLDEN / "cases/q3-nomarkers-fp32/cache", cache)
    manifest = read_manifest(cache)
    args = {
        "target_model_name_or_path": manifest["target_model"],
        "cached_target_path": str(cache),
        "seq_length": manifest["seq_length"],
        "target_layer_ids": manifest["target_layer_ids"],
    }
    found = check_train_config(cache, put(tmp_path / "recipe.yaml", {"recipe_args": args}), device="cpu")
    assert [item.key for item in found] == ["cache"] * len(found)
