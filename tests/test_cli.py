"""The command line for people: what it prints, what it asks, what it removes, and its exit codes."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dspark_cache.blocks import BlockStore, block_name
from dspark_cache.cli import main
from dspark_cache.files import FileLock
from dspark_cache.inputs import Fingerprints
from dspark_cache.ledger import Ledger
from dspark_cache.manifest import read_manifest
from dspark_cache.schema import VERSION
from tests.caches import record_files
from tests.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).parent / "dspark-cache"
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{VERSION}\n"


@pytest.mark.parametrize("arguments", [[], ["nosuch"], ["inspect"], ["clean", "--nosuch"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: dspark-cache")


# init


def test_init_makes_a_repository_and_then_has_nothing_to_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "drafts"
    assert main(["init", str(folder), "--dry-run", "--no-sample"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("$ git init --quiet\n")
    assert "+++ b/dvc.yaml\n" in shown
    assert (
        "advice   put yours into inputs/data, or set data.path  # there is no inputs/data/conversations.jsonl\n"
        in shown
    )
    assert not folder.exists()
    assert main(["init", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["applied"] is True
    assert {"dvc.yaml", "inputs/data/conversations.jsonl"} <= set(content["made"])
    assert main(["init", str(folder), "--dry-run"]) == 0
    assert capsys.readouterr().out == "there is nothing to add\n"
    (folder / "stages/verify.py").write_text("import dspark_cache  # mine")
    assert main(["init", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "there is nothing to add",
        "kept     stages/verify.py, which differs from what is shipped",
        f"next: cd {folder} && dvc repro",
    ]


def test_init_lists_what_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "params.yaml").write_text("data: {rows: 5}\n")
    assert main(["init", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cache is there, and is to be an output of the stage shards" in captured.err
    assert "unknown key data.rows" in captured.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "params.yaml"]


# inspect


def test_inspect_shows_manifest_and_sizes(make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    cache = make_cache(5, 2)
    assert main(["inspect", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    size = sum(path.stat().st_size for path in cache.iterdir())
    shown = dict(line.split(None, 1) for line in lines)
    manifest = read_manifest(cache)
    assert shown["files"] == f"5, 3 shards, {size / 2**30:.3f} GiB"
    assert {key: shown[key] for key in manifest} == {key: str(value) for key, value in manifest.items()}
    assert lines[: len(manifest)] == sorted(lines[: len(manifest)])
    assert shown["tokens"] == "not recorded: there is no provenance.json"


def test_inspect_counts_the_tokens_that_provenance_records(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    assert main(["inspect", str(cache)]) == 0
    tokens, supervised = 2 + 3 + 4 + 5 + 6, 1 + 2 + 2 + 3 + 3
    expected = f"{'tokens':26} {tokens} of 40 positions, {supervised} supervised"
    assert expected in capsys.readouterr().out.splitlines()


def test_inspect_prints_json(make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    cache = make_cache(5, 2)
    assert main(["inspect", "--json", str(cache)]) == 0
    expected = {
        "manifest": read_manifest(cache),
        "shards": 3,
        "bytes": sum(path.stat().st_size for path in cache.iterdir()),
        "tokens": None,
        "supervised_tokens": None,
    }
    assert expected.items() <= json.loads(capsys.readouterr().out).items()
    record_files(cache)
    assert main(["inspect", "--json", str(cache)]) == 0
    expected |= {
        "bytes": expected["bytes"] + (cache / "provenance.json").stat().st_size,
        "tokens": 20,
        "supervised_tokens": 11,
    }
    assert expected.items() <= json.loads(capsys.readouterr().out).items()


def test_inspect_shows_a_sample_or_says_that_there_is_none(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    assert main(["inspect", str(cache), "-1"]) == 0
    assert capsys.readouterr().out.startswith("sample 4, row 0 of shard-000002.safetensors\n")
    assert main(["inspect", str(cache), "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sample"] == 0
    assert main(["inspect", str(cache), "5"]) == 1
    assert capsys.readouterr() == ("", f"error: SAMPLE: expected 0 to 4 in {cache}, found 5\n")


# check


def test_check_lists_what_does_not_fit_and_exits_with_1(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, config = make_cache(5, 2), tmp_path / "recipe.yaml"
    config.write_text("recipe_args: {seq_length: 9, draft_num_hidden_layers: 2, target_layer_ids: [0, 1]}\n")
    assert main(["check", str(cache), "--train-config", str(config)]) == 1
    out, err = capsys.readouterr()
    assert "error   recipe_args.seq_length: 9, the cache has 8\n" in out
    assert "eagle_aux_hidden_state_layer_ids: [1, 2]" in out
    assert err.startswith(f"error: {config} does not fit {cache}: ")
    assert main(["check", str(cache), "--train-config", str(config), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    (length,) = (item for item in content["differences"] if item["key"] == "recipe_args.seq_length")
    assert (length["value"], length["cache"], length["severity"]) == (9, 8, "error")
    assert content["serving"]["layer_ids"]["vLLM"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]


def test_check_exits_with_0_where_there_are_warnings_only_unless_it_is_strict(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last layer cannot be served."""
    cache, config = make_cache(5, 2, num_hidden_layers=2), tmp_path / "params.yaml"
    config.write_text("data: {seq_length: 8}\n")
    arguments = ["check", str(cache), "--train-config", str(config)]
    assert main(arguments) == 0
    assert "layer ids [1] cannot be served by SGLang" in capsys.readouterr().out
    assert main([*arguments, "--strict"]) == 1


def test_check_knows_where_training_will_run(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "recipe.yaml"
    config.write_text("recipe_args: {seq_length: 8}\n")
    arguments = ["check", str(make_cache(5, 2)), "--train-config", str(config)]
    for options, expected in ([], False), (["--device", "cuda"], False), (["--device", "cpu"], True):
        main([*arguments, *options])
        assert ("on a CPU it computes in fp32" in capsys.readouterr().out) is expected


def test_inspect_refuses_what_is_no_cache(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(tmp_path / "none")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: no DSpark cache in {tmp_path / 'none'}: ")
    cache = make_cache(5, 2)
    (cache / "shard-000001.safetensors").unlink()
    assert main(["inspect", str(cache)]) == 1
    assert "missing shard indices [1]" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"files": []}', '{"files": {"a": {"tokens": "x"}}}'])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_inspect_refuses_odd_provenance(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str], content: str, options: list[str]
) -> None:
    cache = make_cache(5, 2)
    (cache / "provenance.json").write_text(content)
    assert main(["inspect", *options, str(cache)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {cache / 'provenance.json'}")
    assert captured.err.count("\n") == 1


def test_inspect_refuses_links_out_of_the_cache(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    for name in ("shard-000001.safetensors", "provenance.json", "manifest.json"):
        (cache / name).rename(tmp_path / name)
        (cache / name).symlink_to(tmp_path / name)
        assert main(["inspect", str(cache)]) == 1
        expected = f"error: {cache / name} is a link to {tmp_path / name}: a cache holds files, copy it there\n"
        assert capsys.readouterr().err == expected


# fingerprint


def test_fingerprint_prints_the_value_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("x")
    for path in (tmp_path, tmp_path / "rows.jsonl"):
        assert main(["fingerprint", str(path)]) == 0
        assert capsys.readouterr().out == Fingerprints(None).of(path) + "\n"
        assert main(["fingerprint", str(path), "--json"]) == 0
        expected = {"path": str(path), "revision": Fingerprints(None).of(path)}
        assert json.loads(capsys.readouterr().out) == expected


def test_fingerprint_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    assert main(["fingerprint", str(tmp_path / "row.jsonl")]) == 1
    assert main(["fingerprint", str(tmp_path / "rows.jsonl")]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"error: PATH: no such file: {tmp_path / 'row.jsonl'}; did you mean {tmp_path / 'rows.jsonl'}?",
        f"error: {tmp_path / 'rows.jsonl'} holds no input files",
    ]


# clean


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A repository with three captures in scratch; features.json is of the second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    shutil.copy(ROOT / "params.yaml", tmp_path / "params.yaml")
    stores = [
        BlockStore(Path(".work"), {"hidden_size": size, "target_layer_ids": [1], "compute_dtype": "bf16"})
        for size in (4, 8, 16)
    ]
    for store in stores:
        with store.lock():
            store.prepare()
        store.path(block_name(())).write_bytes(bytes(1 << 20))
    ledger = Ledger(
        identity=stores[1].identity,
        target_model="x",
        target_model_type="x",
        vocab_size=1,
        num_hidden_layers=2,
        logits={},
        weights_bytes=1,
        weights_sha256="0" * 64,
        blocks=(),
    )
    ledger.write(Path("features.json"))
    (Path(".work") / "fingerprints.json").write_text("{}")
    return [store.folder for store in stores]


def left(folders: list[Path]) -> list[bool]:
    return [folder.exists() for folder in folders]


def test_clean_lists_sizes_and_keeps_the_current_capture(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"     0.001 GiB  {folder}" for folder in (folders[0], folders[2]))
    assert left(folders) == [False, True, False]
    assert Path(".work/fingerprints.json").exists()
    assert main(["clean"]) == 0
    assert capsys.readouterr().out == f"nothing to remove in .work; kept {folders[1]}\n"


def test_clean_for_scripts_lists_and_removes_only_if_told_to(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {item["folder"] for item in listed} == {str(folders[0]), str(folders[2])}
    assert {item["removed"] for item in listed} == {False}
    assert all(item["bytes"] > 1 << 20 for item in listed)
    assert left(folders) == [True, True, True]
    with FileLock(folders[0] / "lock"):
        assert main(["clean", "--json", "--yes"]) == 0
    removed = {item["folder"]: item["removed"] for item in json.loads(capsys.readouterr().out)}
    assert removed == {str(folders[0]): False, str(folders[2]): True}
    (folders[0] / "lock").write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    assert main(["clean", "--json", "--break-lock"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"lock": str(folders[0] / "lock")}]


def test_clean_all_removes_the_current_capture_as_well(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--all", "--yes"]) == 0
    assert left(folders) == [False, False, False]
    capsys.readouterr()
    assert main(["clean", "--all"]) == 0
    assert capsys.readouterr().out == "nothing to remove in .work\n"


def test_clean_without_a_ledger_removes_nothing_of_an_interrupted_capture(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("features.json").unlink()
    assert main(["clean", "--yes"]) == 1
    assert capsys.readouterr().err == (
        "error: there is no features.json, so blocks in .work may be those of an interrupted capture, which goes on "
        "from them: run dvc repro or dvc checkout first, or pass --all to remove every folder\n"
    )
    assert left(folders) == [True, True, True]
    assert main(["clean", "--yes", "--all"]) == 0
    assert left(folders) == [False, False, False]
    assert main(["clean", "--yes"]) == 0


def test_clean_takes_no_folder_to_remove(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["clean", str(folders[0]), "--yes"])
    assert caught.value.code == 2
    assert "FOLDER is what --break-lock takes: without it, remove a folder of blocks by hand" in capsys.readouterr().err
    assert left(folders) == [True, True, True]


def test_clean_refuses_to_guess_which_capture_is_current(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("features.json").write_text("{")
    assert main(["clean", "--yes"]) == 1
    assert capsys.readouterr().err.startswith("error: features.json is not valid JSON: ")
    assert left(folders) == [True, True, True]


def test_clean_looks_where_scratch_is(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPARK_RUNTIME__SCRATCH_DIR", "elsewhere")
    assert main(["clean", "--yes"]) == 0
    assert capsys.readouterr().out == "nothing to remove in elsewhere\n"
    monkeypatch.delenv("DSPARK_RUNTIME__SCRATCH_DIR")
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "main"))
    assert main(["clean", "--yes"]) == 0
    assert left(folders) == [True, True, True]


def test_clean_outside_a_repository_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["clean"]) == 1
    assert capsys.readouterr().err == "error: no such file: params.yaml; run from the root of the repository\n"


class Terminal(io.StringIO):
    """What somebody types."""

    def isatty(self) -> bool:
        return True


def test_clean_refuses_when_there_is_nobody_to_ask(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["clean"]) == 1
    assert capsys.readouterr().err == "error: remove 2 folder(s)? nobody to ask: pass --yes\n"
    assert left(folders) == [True, True, True]


@pytest.mark.parametrize(
    ("answer", "removed"), [("y", True), (" YES ", True), ("", False), ("n", False), ("ja", False)]
)
def test_clean_asks(folders: list[Path], monkeypatch: pytest.MonkeyPatch, answer: str, removed: bool) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer + "\n"))
    assert main(["clean"]) == 0
    assert left(folders) == [not removed, True, not removed]


def test_an_interrupted_question_removes_nothing(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Terminal):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted())
    assert main(["clean"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert left(folders) == [True, True, True]


@pytest.mark.parametrize("name", ["lock", "lock-rank-3", "lock-slice-1-of-2", "lock-slice-1-of-2-rank-0"])
def test_clean_skips_folders_that_are_being_written(
    folders: list[Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with FileLock(folders[0] / name):
        assert main(["clean", "--yes"]) == 0
        assert left(folders) == [True, True, False]
        assert f"kept {folders[0]}: {folders[0]} is being written by process {os.getpid()} on host " in (
            capsys.readouterr().err
        )
        assert main(["clean", "--break-lock"]) == 1
        assert f"error: {folders[0]} is being written by process {os.getpid()} on host " in capsys.readouterr().err
    assert main(["clean", "--yes"]) == 0
    assert left(folders) == [False, True, False]


@pytest.mark.parametrize("name", ["lock", "lock-rank-3", "lock-slice-1-of-2", "lock-slice-1-of-2-rank-0"])
def test_the_lock_of_a_host_that_is_gone_is_broken_on_request_only(
    folders: list[Path], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for folder in folders[:2]:
        (folder / name).write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    assert main(["clean", "--yes"]) == 0
    assert left(folders) == [True, True, False]
    message = f"{folders[0]} is being written by process 5 on host gone.invalid (lock {folders[0] / name})"
    assert f"kept {folders[0]}: {message}; if that host is gone for good: dspark-cache clean --break-lock\n" in (
        capsys.readouterr().err
    )
    assert main(["clean", "--break-lock"]) == 0
    expected = sorted(f"forgot the holder of {folder / name}" for folder in folders[:2])
    assert sorted(capsys.readouterr().out.splitlines()) == expected
    assert left(folders) == [True, True, False]
    assert main(["clean", "--break-lock"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["clean", "--yes"]) == 0
    assert left(folders) == [False, True, False]


@pytest.mark.parametrize("name", [".cache.building.lock", ".cache-eval.building.lock", ".tokens.building.lock"])
def test_the_lock_on_an_output_is_broken_too(folders: list[Path], name: str) -> None:
    Path(name).write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    assert main(["clean", "--break-lock"]) == 0
    with FileLock(Path(name).absolute()):
        assert left(folders) == [True, True, True]


def test_the_lock_of_a_conversion_is_broken_by_the_folder_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no params.yaml too."""
    monkeypatch.chdir(tmp_path)
    lock = tmp_path / "there/.padded.building.lock"
    lock.parent.mkdir()
    lock.write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    assert main(["clean", "--break-lock", "there/padded"]) == 0
    assert capsys.readouterr().out == "forgot the holder of there/.padded.building.lock\n"
    with FileLock(lock):
        pass


# convert


def test_convert_describes_what_it_made(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    arguments = ["convert", str(cache), str(tmp_path / "made"), "--layout", "ragged", "--samples", "0:3"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'made'} is made and verified\n"
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layout"], found["samples"]) == ("ragged", 3)


# verify


def test_verify_says_that_a_cache_is_sound(make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    assert main(["verify", str(cache)]) == 0
    assert capsys.readouterr().out == f"{cache} is sound up to the level values\n"
    assert main(["verify", str(cache), "--level", "files", "--jobs", "1"]) == 0
    assert capsys.readouterr().out == f"{cache} is sound up to the level files\n"


def test_verify_prints_each_finding_and_exits_with_1(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    record_files(cache)
    shard = cache / "shard-000001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert main(["verify", str(cache), "--level", "headers"]) == 0
    capsys.readouterr()
    assert main(["verify", str(cache), "--level", "bytes"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("[bytes] shard-000001.safetensors: sha256 is ")
    assert out.count("\n") == 1
    assert err.endswith(f"error: {cache} has 1 finding(s)\n")
    assert main(["verify", str(cache), "--level", "bytes", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["num_findings"] == 1
    assert report["findings"][0].startswith("[bytes] shard-000001.safetensors: ")


def test_verify_says_what_it_cannot_compare(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(5, 2)
    assert main(["verify", str(cache)]) == 0
    assert capsys.readouterr().err.startswith(f"{cache} has no provenance.json: there are no digests to compare\n")


def test_verify_writes_a_page_with_the_samples_or_says_what_it_lacks(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, page = make_cache(5, 2), tmp_path / "verify.html"
    record_files(cache)
    assert main(["verify", str(cache), "--html", str(page)]) == 0
    assert "no folder with the target&#39;s tokenizer was given" in page.read_text()
    (cache / "more").touch()
    assert main(["verify", str(cache), "--html", str(page), "--json"]) == 1
    assert "more: does not belong into a cache" in page.read_text()
    capsys.readouterr()


def test_verify_refuses_a_page_that_cannot_be_written_before_it_reads(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, none = make_cache(5, 2), tmp_path / "none"
    (tmp_path / "link").symlink_to(cache)
    for page, message in (
        (cache / "verify.html", f"--html: {cache / 'verify.html'} lies in the cache, into which it does not belong"),
        (tmp_path / "link" / "v.html", f"--html: {tmp_path / 'link' / 'v.html'} lies in the cache, into which it does"),
        (tmp_path, f"--html: {tmp_path} is a folder: expected a file"),
        (none / "v.html", f"--html: {none} is no folder: make it first"),
    ):
        assert main(["verify", str(cache), "--html", str(page), "--tokenizer", str(none), "--json"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith(f"error: {message}")
        assert line.endswith(f"; --tokenizer: {none} is no folder")
    none.mkdir()
    assert main(["verify", str(cache), "--html", str(tmp_path / "v.html"), "--tokenizer", str(none)]) == 1
    assert "none" in capsys.readouterr().err


def test_verify_says_what_it_found_also_where_the_page_fails(
    make_cache: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full."""
    cache = make_cache(5, 2)
    (cache / "more").touch()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    assert main(["verify", str(cache), "--html", str(tmp_path / "v.html")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "[files] more: does not belong into a cache\n"
    assert "No space left on device" in captured.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("redirection", "err"),
    [
        (">&-", "error: stdout is closed, there is nowhere to print to: redirect it to a file, or to /dev/null\n"),
        ("2>&-", ""),
        ("<&-", "error: remove 1 folder(s)? nobody to ask: pass --yes\n"),
    ],
)
def test_streams_that_are_closed_are_no_tracebacks(
    folders: list[Path], make_cache: Callable[..., Path], redirection: str, err: str
) -> None:
    command = "clean --all" if redirection == "<&-" else f"inspect {make_cache(5, 2)} 99"
    for folder in folders[1:]:
        shutil.rmtree(folder)
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m dspark_cache.cli {command} {redirection}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, err)
    assert "error" not in done.stdout


def test_the_end_of_input_is_a_no(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert main(["clean", "--all"]) == 0
    assert left(folders) == [True, True, True]
    assert capsys.readouterr().out.endswith("[y/N] \n")


def test_verify_needs_no_bar_to_be_drawn(make_cache: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A training machine has torch and safetensors only."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert main(["verify", str(make_cache(5, 2))]) == 0


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--jobs", "-1"], ["--jobs", "two"]])
def test_verify_refuses_no_jobs(
    make_cache: Callable[..., Path], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(make_cache(5, 2)), *arguments])
    assert ended.value.code == 2
    expected = f"dspark-cache verify: error: argument --jobs: expected an integer above 0, found {arguments[1]}\n"
    assert capsys.readouterr().err.endswith(expected)


def test_verify_refuses_what_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path)]) == 1
    assert "manifest.json does not exist" in capsys.readouterr().err
