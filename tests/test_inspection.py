"""What people are shown of a cache and of one of its samples."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import CachedDSparkDataset, tokenizer_chat_template_sha256
from dspark_cache.errors import CacheFormatError, InputError, SettingsError
from dspark_cache.inputs import Fingerprints
from dspark_cache.inspection import cache_text, describe_cache, describe_sample, sample_text
from dspark_cache.manifest import read_manifest
from dspark_cache.schema import HIDDEN, LAST_HIDDEN
from dspark_cache.serving import engine_layer_ids, serving_findings
from dspark_cache.target import is_tokenizer_file
from dspark_cache.tokenizing import TokenizerSource, load_tokenizer
from tests.caches import make_ragged, provenance, record_files
from tests.repository import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeCache = Callable[..., Path]

QWEN = GOLDEN / "models/qwen3-tiny"
TOKENS, SUPERVISED = [2, 3, 4, 5, 6], [1, 2, 2, 3, 3]
"""Of the first five samples that `make_cache` makes."""


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """A cache of the reference, with a tokenizer that gave its ids, where its manifest says that the target is."""
    shutil.copytree(GOLDEN / "cases/q3-markers-bf16/cache", tmp_path / "cache")
    (tmp_path / "models").mkdir()
    shutil.copytree(QWEN, tmp_path / "models/qwen3-tiny")
    return tmp_path / "cache"


def shown(text: str) -> dict[str, str]:
    """Return the lines of a description by their first column."""
    return {line[:26].strip(): line[27:] for line in text.splitlines()}


# A cache


def test_a_cache_without_provenance_is_described_by_its_manifest_and_its_files(make_cache: MakeCache) -> None:
    cache = make_cache(5, 2)
    found = describe_cache(cache)
    sizes = {path.name: path.stat().st_size for path in cache.iterdir()}
    assert found["manifest"] == read_manifest(cache)
    assert (found["layout"], found["samples"], found["shards"], found["files"]) == ("padded", 5, 3, 5)
    assert found["bytes"] == sum(sizes.values())
    assert found["bytes_by_kind"] == {
        "states": sum(size for name, size in sizes.items() if name.startswith("shard-")),
        "target_weights": sizes["target_weights.safetensors"],
        "manifest": sizes["manifest.json"],
    }
    unknown = ("tokens", "supervised_tokens", "mean_tokens", "supervised_fraction", "padding_share", "made_from")
    assert [found[key] for key in unknown] == [None] * len(unknown)
    assert json.loads(json.dumps(found)) == found
    lines = shown(cache_text(found))
    assert lines.items() >= {key: str(value) for key, value in read_manifest(cache).items()}.items()
    assert lines["files"] == f"5, 3 shards, {found['bytes'] / 2**30:.3f} GiB"
    assert lines["tokens"] == "not recorded: there is no provenance.json"


@pytest.mark.parametrize("layout", ["padded", "ragged"])
def test_counts_of_provenance_are_added_up(make_cache: MakeCache, layout: str) -> None:
    cache = make_cache(5, 2)
    cache = make_ragged(cache, [2, 3]) if layout == "ragged" else cache
    record_files(cache)
    found = describe_cache(cache)
    assert (found["tokens"], found["supervised_tokens"]) == (sum(TOKENS), sum(SUPERVISED))
    assert (found["mean_tokens"], found["supervised_fraction"], found["padding_share"]) == (4.0, 0.55, 0.5)
    assert ("ids_and_masks" in found["bytes_by_kind"]) is (layout == "ragged")
    states = found["bytes_by_kind"]["states"]
    lines = shown(cache_text(found))
    assert lines["tokens"] == "20 of 40 positions, 11 supervised"
    assert (lines["mean length"], lines["supervised"]) == ("4.0 tokens a sample", "55.0 % of the tokens")
    assert lines["shards"] == f"{states / 20:.1f} bytes a token"
    assert lines["padding"] == "50.0 % of the positions" + ("" if layout == "padded" else ", not stored")
    assert "shard_samples" not in lines


def test_what_made_a_cache_is_shown_from_its_provenance(make_cache: MakeCache) -> None:
    cache = make_cache(5, 2)
    identity = {"weights": "sha256:abc", "compute_dtype": "bf16", "attn_implementation": "sdpa"}
    environment = {"accelerator": "cpu", "parallelism": "replicate", "torch": "2.13", "threads": 1}
    made = record_files(
        cache,
        tokens={"data_fingerprint": "sha256:data", "tokenizer_fingerprint": "sha256:words"},
        capture={"identity": identity, "environments": [environment], "dropped": {"k": "NaN"}, "logits": {}},
        held_out={"eval_samples": 2, "part": "train"},
        conversions=[{"changes": {"dtype": "bf16"}, "source_manifest_sha256": "0" * 64}],
    )
    found = describe_cache(cache)["made_from"]
    assert found == {
        "data_fingerprint": "sha256:data",
        "tokenizer_fingerprint": "sha256:words",
        "identity": identity,
        "environments": [environment],
        "dropped_samples": 1,
        "logits": {},
        "held_out": {"eval_samples": 2, "part": "train"},
        "conversions": [{"dtype": "bf16"}],
        "sha256": made.sha256(),
    }
    lines = shown(cache_text(describe_cache(cache)))
    assert (
        lines.items()
        >= {
            "data": "sha256:data",
            "tokenizer": "sha256:words",
            "weights": "sha256:abc",
            "computed in": "bf16, attention sdpa",
            "computed on": "accelerator cpu, parallelism replicate, torch 2.13",
            "dropped samples": "1",
            "held out": "{'eval_samples': 2, 'part': 'train'}",
            "converted": "{'dtype': 'bf16'}",
        }.items()
    )
    assert "logits" not in lines


def test_the_numbers_that_engines_want_are_shown(golden: Path) -> None:
    serving = describe_cache(golden)["serving"]
    assert serving["layer_ids"]["vLLM"] == engine_layer_ids("vLLM", [-1, 0, 5])
    assert serving["unservable"] == [finding.as_json() for finding in serving_findings([-1, 0, 5], 6)]
    lines = shown(cache_text(describe_cache(golden)))
    assert lines["draft in vLLM"] == (
        "dflash_config.target_layer_ids or target_layer_ids: [-1, 0, 5]; eagle_aux_hidden_state_layer_ids: [0, 1, 6]; "
        "layers [5] cannot be served"
    )
    assert lines["draft in SGLang"].endswith("layers [-1, 5] cannot be served")


def test_holes_are_told_from_what_the_disk_holds(make_cache: MakeCache) -> None:
    cache = make_cache(1, 1)
    with (cache / "extra").open("wb") as file:
        file.truncate(1 << 24)
    (cache / "folder").mkdir()
    found = describe_cache(cache)
    assert found["files"] == 4
    assert found["bytes_by_kind"]["other"] == 1 << 24
    assert found["held_bytes"] < 1 << 20
    assert shown(cache_text(found))["held on this disk"].endswith("GiB, the rest is holes")


def test_an_old_manifest_and_a_hostile_one_are_shown(make_cache: MakeCache) -> None:
    cache = make_cache(3, 2, note="\x1b[2J\n\u202efine")
    manifest = json.loads((cache / "manifest.json").read_text())
    del manifest["num_hidden_layers"], manifest["seq_length"]
    (cache / "manifest.json").write_text(json.dumps(manifest))
    record_files(cache)
    found = describe_cache(cache)
    assert (found["serving"], found["padding_share"]) == (None, None)
    lines = shown(cache_text(found))
    assert lines["note"] == "\\x1b[2J\\n\\u202efine"
    assert lines["tokens"] == "9, 5 supervised"


def test_provenance_may_hold_anything(make_cache: MakeCache) -> None:
    cache = make_cache(3, 2)
    capture = {"identity": 3, "environments": [None, "x"], "dropped": 5, "logits": [1]}
    record_files(cache, tokens={"data_fingerprint": ["\x1b[2J"]}, capture=capture)
    made = describe_cache(cache)["made_from"]
    assert (made["identity"], made["environments"], made["dropped_samples"], made["logits"]) == ({}, [], 0, {})
    record_files(cache, tokens={}, capture={"environments": "cpu"})
    text = cache_text(describe_cache(cache))
    assert shown(text)["weights"] == "None"
    assert "\x1b" not in text


def test_what_is_no_cache_is_refused(make_cache: MakeCache) -> None:
    cache = make_cache(5, 2)
    (cache / "shard-000001.safetensors").unlink()
    for describe in (describe_cache, lambda folder: describe_sample(folder, 0)):
        with pytest.raises(CacheFormatError, match=r"missing shard indices \[1\]"):
            describe(cache)


# A sample


@pytest.mark.parametrize("layout", ["padded", "ragged"])
@pytest.mark.parametrize("index", [0, 3, 4, -1])
def test_a_sample_is_counted_and_measured(make_cache: MakeCache, layout: str, index: int) -> None:
    cache = make_cache(5, 2)
    sample = CachedDSparkDataset(cache)[index]
    cache = make_ragged(cache, [2, 3]) if layout == "ragged" else cache
    record_files(cache)
    number, length = index % 5, TOKENS[index]
    found = describe_sample(cache, index)
    row = number % 2 if layout == "padded" else number - 2 * (number > 1)
    assert (found["sample"], found["row"], found["positions"]) == (number, row, 8)
    assert found["shard"] == f"shard-{number // 2 if layout == 'padded' else int(number > 1):06d}.safetensors"
    assert (found["tokens"], found["supervised_tokens"]) == (length, SUPERVISED[index])
    assert found["anchors"] == SUPERVISED[index] - 1
    assert found["input_ids"] == sample["input_ids"][:length].tolist()
    assert found["loss_mask"] == sample["loss_mask"][:length].tolist()
    norms = found["state_norms"]
    assert list(norms) == ["layer 0", "layer 1", "last hidden"]
    states = sample[HIDDEN][:length].double()
    expected = [states[:, :4].norm(dim=1).mean(), states[:, 4:].norm(dim=1).mean()]
    expected.append(sample[LAST_HIDDEN][:length].double().norm(dim=1).mean())
    torch.testing.assert_close(list(norms.values()), [float(norm) for norm in expected], atol=1e-3, rtol=1e-3)


def test_odd_layers_are_named_by_what_they_are(golden: Path) -> None:
    norms = describe_sample(golden, 0)["state_norms"]
    assert list(norms) == ["layer -1 (embedding)", "layer 0", "layer 5 (final norm)", "last hidden"]
    assert norms["layer 5 (final norm)"] == norms["last hidden"]


def test_anchors_need_two_supervised_tokens_in_a_row(make_cache: MakeCache) -> None:
    cache = make_cache(1, 1, seq_length=8)
    path = cache / "shard-000000.safetensors"
    tensors = load_file(path)
    tensors["loss_mask"] = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 0]])
    tensors["input_ids"] = torch.tensor([[9, 8, 7, 6, 5, 0, 0, 0]])
    save_file(tensors, path)
    found = describe_sample(cache, 0)
    assert (found["tokens"], found["supervised_tokens"], found["anchors"]) == (5, 4, 2)


@pytest.mark.parametrize(
    ("ids", "mask", "length"),
    [
        ([5, 6, 7, 7, 7, 7], [0, 1, 0, 0, 0, 0], 2),
        ([5, 6, 7, 7, 7, 7], [0, 1, 1, 1, 0, 0], 4),  # what is supervised is no padding
        ([5, 6, 5, 6, 5, 6], [0, 1, 1, 1, 0, 0], 6),  # one id at the end is no run
        ([7, 7, 7, 7, 7, 7], [0, 0, 0, 0, 0, 0], 6),  # a run of everything is none either
    ],
)
def test_padding_is_guessed_where_the_cache_does_not_say_and_that_is_said(
    make_cache: MakeCache, ids: list[int], mask: list[int], length: int
) -> None:
    cache = make_cache(1, 1, seq_length=6)
    path = cache / "shard-000000.safetensors"
    save_file({**load_file(path), "input_ids": torch.tensor([ids]), "loss_mask": torch.tensor([mask])}, path)
    found = describe_sample(cache, 0)
    assert found["tokens"] == length
    guess = "the cache does not say what is padding: taken for it is id 7, of which a run ends it"
    assert (guess in found["notes"]) is (length < 6)


@pytest.mark.parametrize("index", [5, -6, 1 << 40])
def test_a_sample_that_is_not_there_is_refused_with_the_range(make_cache: MakeCache, index: int) -> None:
    cache = make_cache(5, 2)
    with pytest.raises(SettingsError, match=rf"^SAMPLE: expected 0 to 4 in {cache}, found {index}$"):
        describe_sample(cache, index)


# Its text


def test_text_is_shown_with_what_is_supervised_marked(golden: Path) -> None:
    found = describe_sample(golden, 3, QWEN)
    supervised = [span["text"] for span in found["spans"] if span["supervised"]]
    assert supervised == ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]
    lines = sample_text(found).splitlines()
    start = lines.index("")
    assert lines[0] == "sample 3, row 3 of shard-000000.safetensors"
    assert lines[1] == "48 tokens of 160 positions, 6 supervised, 3 anchors"
    assert lines[2] == f"{'layer -1 (embedding)':24} mean norm of a token 5.0698"
    assert lines[start + 1 : start + 8] == [
        "  <|im_start|>system\\n",
        "  Answer step by step.<|im_end|>\\n",
        "  <|im_start|>user\\n",
        "  a<|im_end|>\\n",
        "  <|im_start|>assistant\\n",
        "+ b<|im_end|>",
        "  \\n",
    ]
    coloured = sample_text(found, color=True).splitlines()
    assert coloured[start + 6] == "\x1b[32m+ b<|im_end|>\x1b[0m"
    assert [line for line in coloured if "\x1b" not in line] == [line for line in lines if not line.startswith("+")]


def test_text_cannot_forge_what_a_terminal_shows(golden: Path) -> None:
    found = {**describe_sample(golden, 0, QWEN), "spans": [{"text": "a\x1b[2J\rb\n\n\u202ec", "supervised": True}]}
    lines = sample_text({**found, "notes": ["x\x1b[0m"]}).splitlines()
    assert lines[-3:] == ["+ a\\x1b[2J\\rb\\n", "+ \\n", "+ \\u202ec"]
    assert "note: x\\x1b[0m" in lines


@pytest.mark.parametrize("place", ["beside the cache", "the current directory"])
def test_the_target_s_own_tokenizer_is_found(golden: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if place == "the current directory":
        shutil.rmtree(golden.parent / "models")
        monkeypatch.chdir(GOLDEN)
    found = describe_sample(golden, 3)
    assert found["spans"] == describe_sample(golden, 3, QWEN)["spans"]
    assert found["spans"]


def test_without_a_tokenizer_ids_are_shown_and_what_text_needs(golden: Path) -> None:
    shutil.rmtree(golden.parent / "models")
    found = describe_sample(golden, 3)
    assert found["spans"] is None
    assert found["notes"][-1] == "text needs the target's tokenizer: pass --tokenizer FOLDER"
    text = sample_text(found)
    lines = text[text.index("\n\n") + 2 :].splitlines()
    assert {line[:2] for line in lines} == {"  ", "+ "}
    assert [int(word) for line in lines for word in line[2:].split()] == found["input_ids"]
    supervised = [int(word) for line in lines if line.startswith("+") for word in line[2:].split()]
    assert supervised == [token for token, mask in zip(found["input_ids"], found["loss_mask"], strict=True) if mask]
    assert max(map(len, lines)) <= 102


def test_a_machine_without_transformers_is_told_what_text_needs(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = describe_sample(golden, 3, QWEN)
    assert found["spans"] is None
    assert found["notes"][-1] == "text needs the package transformers: pip install transformers"


def test_torch_and_safetensors_are_enough(golden: Path) -> None:
    absent = ["datasets", "dvc", "huggingface_hub", "omegaconf", "ruamel", "ruamel.yaml", "tqdm", "transformers"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from dspark_cache.inspection import *\n"
        f"print(cache_text(describe_cache({str(golden)!r})))\n"
        f"print(sample_text(describe_sample({str(golden)!r}, 3)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "note: text needs the package transformers" in done.stdout


def test_a_tokenizer_that_is_asked_for_must_be_one(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^--tokenizer: {tmp_path}/none is no folder with a tokenizer\.json or "):
        describe_sample(golden, 3, tmp_path / "none")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match=rf"^--tokenizer: {broken} cannot be loaded: "):
        describe_sample(golden, 3, broken)
    shutil.copy(broken / "tokenizer.json", golden.parent / "models/qwen3-tiny")  # nobody asked for this one
    found = describe_sample(golden, 3)
    assert found["spans"] is None
    assert found["notes"][-1].startswith("no text: the tokenizer in ")


@pytest.mark.parametrize("target", ["", "x" * 5000, "a\0b", "/nowhere"])
def test_any_target_of_a_manifest_is_looked_up_without_harm(make_cache: MakeCache, target: str) -> None:
    found = describe_sample(make_cache(1, 1, target_model=target), 0)
    assert found["notes"][-1] == "text needs the target's tokenizer: pass --tokenizer FOLDER"


def test_an_id_that_the_tokenizer_does_not_have_is_said(make_cache: MakeCache) -> None:
    cache = make_cache(1, 1)
    path = cache / "shard-000000.safetensors"
    tensors = load_file(path)
    tensors["input_ids"][0, 0] = 99_999
    save_file(tensors, path)
    found = describe_sample(cache, 0, QWEN)
    assert found["spans"] is None
    assert found["notes"][-1].startswith("no text: the tokenizer has no token 99999: ")
    assert found["notes"][-1].endswith(f"({QWEN})")


def test_another_tokenizer_is_told_by_its_files_or_else_by_its_template(make_cache: MakeCache) -> None:
    cache = make_cache(1, 1)
    template = f"the chat template of the tokenizer in {QWEN} is another than the cache's: "
    files = f"the files of the tokenizer in {QWEN} are not those that the samples were tokenised with"

    def doubts() -> list[str]:
        return [note for note in describe_sample(cache, 0, QWEN)["notes"] if str(QWEN) in note]

    (doubt,) = doubts()
    assert doubt.startswith(template)
    record_files(cache, tokens={"tokenizer_fingerprint": f"sha256:{'0' * 64}"})
    assert doubts() == [files]
    own = Fingerprints(None).of(QWEN, accept=is_tokenizer_file)
    provenance(tokens={"tokenizer_fingerprint": own}).put(cache)
    assert doubts() == []  # the template may be one that was set


def test_the_tokenizer_s_own_template_raises_no_doubt(golden: Path) -> None:
    manifest: dict[str, Any] = json.loads((golden / "manifest.json").read_text())
    tokenizer = load_tokenizer(TokenizerSource(path=str(QWEN), trust_remote_code=False))
    manifest["chat_template_sha256"] = tokenizer_chat_template_sha256(tokenizer)
    (golden / "manifest.json").write_text(json.dumps(manifest))
    assert not [note for note in describe_sample(golden, 3, QWEN)["notes"] if "template" in note]
