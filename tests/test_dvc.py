"""The pipeline under the real dvc: what invalidates what, the run cache, crashes, and clones with a remote only."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from dspark_cache.identity import IDENTITY_SOURCES
from dspark_cache.schema import STAGE_VERSIONS
from dspark_cache.settings import SECTIONS
from tests.repository import ROOT, STAGES, Repository, make_repository, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.dvc

SMALL: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 64},
    "target": {"layer_ids": [1, 3]},
    "verify": {"recompute_samples": 2},
}


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository that was reproduced once, committed, and pushed to a remote."""
    base = tmp_path_factory.mktemp("dvc")
    repository = make_repository(base / "repository", num_rows=12, **SMALL)
    repository.git("init", "--quiet")
    repository.git("config", "user.email", "test@example.invalid")
    repository.git("config", "user.name", "test")
    repository.dvc("remote", "add", "--default", "storage", str(base / "remote"))
    repository.dvc("repro")
    assert repository.dvc("status", "--quiet", check=False).returncode == 0
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "cache")
    repository.dvc("push")
    return repository


@pytest.fixture
def repository(reproduced: Repository, tmp_path: Path) -> Repository:
    """A copy of it, DVC's cache and scratch included, to do with as a test likes."""
    shutil.copytree(reproduced.root, tmp_path / "repository", symlinks=True)
    return Repository(tmp_path / "repository")


def ran(output: str) -> list[str]:
    return re.findall(r"Running stage '(\w+)'", output)


def test_a_second_repro_runs_nothing(reproduced: Repository) -> None:
    assert ran(reproduced.dvc("repro").stdout) == []


def test_the_report_is_a_metric_in_git(reproduced: Repository) -> None:
    metrics = json.loads(reproduced.dvc("metrics", "show", "--json").stdout)
    values = metrics[""]["data"]["reports/verify.json"]["data"]
    assert values["num_findings"] == 0
    assert values["supervision"]["num_samples"] == 12


def test_the_page_is_an_output_that_dvc_stores(reproduced: Repository, tmp_path: Path) -> None:
    out = tmp_path / "verify.html"
    reproduced.dvc("get", str(reproduced.root), "reports/verify.html", "--out", str(out))
    assert out.read_bytes() == (reproduced.root / "reports/verify.html").read_bytes()


PLOTS = {
    "lengths": ("tokens", "train", "Real tokens a sample"),
    "anchors": ("anchors", "train", "Anchors a sample"),
    "supervised": ("percent", "train", "Supervised share of a sample's tokens"),
    "norms": ("layer", "train_p50", "Norm of a token's state, median"),
    "recompute": ("layer", "train_worst", "Distance to the recomputed states, worst token"),
}


def test_the_plots_are_in_git_and_dvc_draws_them_for_each_revision(repository: Repository) -> None:
    plot = repository.root / "reports/plots/lengths.json"
    rows = json.loads(plot.read_text())
    plot.write_text(json.dumps([{**row, "train": 1} for row in rows]))
    shown = json.loads(repository.dvc("plots", "diff", "--json").stdout)
    assert "errors" not in shown
    assert shown["data"].keys() == {f"reports/plots/{name}.json" for name in PLOTS}
    for name, (x, y, title) in PLOTS.items():
        (drawn,) = shown["data"][f"reports/plots/{name}.json"]
        content = drawn["content"]
        assert set(drawn["revisions"]) == {"HEAD", "workspace"}
        assert (content["title"]["text"], content["mark"]["type"]) == (title, "line")
        assert [content["encoding"][axis]["field"] for axis in "xy"] == [x, y]
        assert all(content["encoding"][axis]["title"] for axis in "xy")
        assert all(row[x] is not None and row[y] is not None for row in content["data"]["values"])
    drawn = {(row["rev"], row["tokens"]): row["train"] for row in shown_rows(shown, "lengths")}
    assert drawn == {("workspace", row["tokens"]): 1 for row in rows} | {
        ("HEAD", row["tokens"]): row["train"] for row in rows
    }


def shown_rows(shown: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = shown["data"][f"reports/plots/{name}.json"][0]["content"]["data"]["values"]
    return rows


CHANGED = {
    "data.split": ("train[:5]", ["tokenize"]),
    "data.shuffle": (True, ["tokenize"]),
    "data.shuffle_seed": (7, ["tokenize"]),
    "data.seq_length": (32, ["tokenize"]),
    "data.mask_reasoning_content": (True, ["tokenize"]),
    "data.mask_generation_prompt": (True, ["tokenize"]),
    "data.min_loss_tokens": (5, ["tokenize"]),
    "data.skip_invalid": (True, ["tokenize"]),
    "data.limit": (3, ["tokenize"]),
    "data.eval_samples": (2, ["capture", "shards"]),
    "data.path": ("inputs/data/other.jsonl", ["tokenize"]),
    "data.revision": ("x", ["tokenize"]),
    "target.model": ("inputs/target/other", ["tokenize", "capture"]),
    "target.revision": ("x", ["tokenize", "capture"]),
    "target.chat_template": ("{% x %}", ["tokenize"]),
    "target.trust_remote_code": (True, ["tokenize", "capture"]),
    "target.layer_ids": ([1, 2], ["capture"]),
    "target.draft_num_hidden_layers": (3, ["capture"]),
    "target.compute_dtype": ("fp32", ["capture"]),
    "target.attn_implementation": ("eager", ["capture"]),
    "target.nonfinite": ("drop", ["capture"]),
    "target.block_bytes": (4096, ["capture"]),
    "cache.layout": ("x", ["shards"]),
    "cache.dtype": ("fp32", ["shards"]),
    "cache.shard_size": (5, ["shards"]),
    "cache.shard_bytes": (5, ["shards"]),
    "verify.level": ("files", ["verify"]),
    "verify.recompute_samples": (0, ["verify"]),
    "runtime.device": ("x", []),
    "runtime.max_tokens_per_batch": (1, []),
    "runtime.scratch_dir": ("x", []),
}


def test_every_param_invalidates_its_stages_and_no_others(repository: Repository) -> None:
    original = (repository.root / "params.yaml").read_text()
    for name, (value, expected) in CHANGED.items():
        section, key = name.split(".")
        repository.set_params(**{section: {key: value}})
        assert repository.stale_stages() == expected, name
        (repository.root / "params.yaml").write_text(original)
    assert repository.stale_stages() == []


def test_the_table_of_params_is_complete() -> None:
    every = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__dataclass_fields__}
    assert {name for name in every if not name.startswith("runtime.")} == {
        name for name in CHANGED if not name.startswith("runtime.")
    }


def test_dvc_yaml_lists_the_leaves_of_the_settings() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    listed = {param for stage in stages.values() for param in stage["params"] if isinstance(param, str)}
    every = {f"{section}.{key}" for section, kind in SECTIONS.items() for key in kind.__dataclass_fields__}
    assert listed == {name for name in every if not name.startswith("runtime.")}
    params = read_yaml(ROOT / "params.yaml")
    assert {f"{section}.{key}" for section, keys in params.items() for key in keys} == every


def test_identity_fields_come_from_what_dvc_tracks() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    tracked = {param for stage in stages.values() for param in stage["params"] if isinstance(param, str)}
    tracked |= {dep for stage in stages.values() for dep in stage["deps"]}
    for field, sources in IDENTITY_SOURCES.items():
        assert set(sources) <= tracked, field


def test_each_stage_depends_on_its_version() -> None:
    stages = read_yaml(ROOT / "dvc.yaml")["stages"]
    for name in STAGES:
        assert {"stages/versions.yaml": [name]} in stages[name]["params"]
        assert stages[name]["cmd"] == f"python -m stages.{name}"
    assert read_yaml(ROOT / "stages/versions.yaml") == STAGE_VERSIONS


def test_inputs_invalidate_what_reads_them(repository: Repository) -> None:
    data = repository.root / "inputs/data/conversations.jsonl"
    content = data.read_text()
    data.write_text(content + content.splitlines(keepends=True)[0])
    assert repository.stale_stages() == ["tokenize"]
    data.write_text(content)
    change_a_weight(repository)
    assert repository.stale_stages() == ["tokenize", "capture"]


def change_a_weight(repository: Repository) -> None:
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 0.25
    save_file(weights, path, metadata={"format": "pt"})


def test_a_changed_weight_captures_anew_and_going_back_restores_without_capturing(repository: Repository) -> None:
    before = repository.digests()
    weights = (repository.root / "inputs/target/model.safetensors").read_bytes()
    old = repository.scratch_folders()
    change_a_weight(repository)
    done = repository.dvc("repro")
    assert ran(done.stdout) == ["tokenize", "capture", "shards", "verify"]
    assert repository.digests("tokens") == {k: v for k, v in before.items() if k.startswith("tokens/")}
    assert len(repository.scratch_folders()) == len(old) + 1
    ledger = json.loads((repository.root / "features.json").read_text())
    assert repository.digests("features.json")["features.json"] != before["features.json"]
    assert ledger["blocks"]
    shutil.rmtree(repository.root / ".work")
    (repository.root / "inputs/target/model.safetensors").write_bytes(weights)
    repository.dvc("repro")
    assert repository.digests() == before
    assert not repository.scratch_folders()


@pytest.mark.slow
def test_changed_masks_and_cache_settings_load_no_target_for_capture(repository: Repository) -> None:
    blocks = repository.blocks()
    repository.set_params(cache={"dtype": "fp32", "shard_size": 5})
    done = repository.dvc("repro")
    assert ran(done.stdout) == ["shards", "verify"]
    assert "loading" not in done.stdout + done.stderr
    repository.set_params(data={"mask_generation_prompt": True, "min_loss_tokens": 2}, cache={"dtype": "bf16"})
    done = repository.dvc("repro")
    assert ran(done.stdout) == ["tokenize", "capture", "shards", "verify"]
    assert "on cpu" not in done.stdout + done.stderr
    assert repository.blocks() == blocks


def test_capture_killed_in_the_middle_goes_on_under_repro_with_the_same_bytes(
    reproduced: Repository, tmp_path: Path
) -> None:
    params = {**SMALL, "target": {"layer_ids": [1, 3], "block_bytes": 1}}
    undisturbed = make_repository(tmp_path / "undisturbed", num_rows=12, **params)
    undisturbed.run()
    repository = make_repository(tmp_path / "killed", num_rows=12, **params)
    repository.git("init", "--quiet")
    repository.run("tokenize")
    process = repository.start("capture")
    while not list(repository.root.glob(".work/capture-*/block-*.json")) and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finished = list(repository.root.glob(".work/capture-*/block-*.json"))
    kept = {str(path.relative_to(repository.root).with_suffix(".safetensors")) for path in finished}
    times = {name: time for name, time in repository.blocks().items() if name in kept}
    assert 1 <= len(kept) < 12
    repository.dvc("repro")
    assert {name: time for name, time in repository.blocks().items() if name in kept} == times
    assert len(repository.blocks()) == 12
    assert repository.digests() == undisturbed.digests()
    assert reproduced.digests("tokens") == repository.digests("tokens")


def test_a_clone_with_only_a_remote_pulls_and_trains(reproduced: Repository, tmp_path: Path) -> None:
    clone = Repository(tmp_path / "clone")
    subprocess.run(["git", "clone", "--quiet", str(reproduced.root), str(clone.root)], check=True)
    assert clone.dvc("pull", check=False).returncode == 0
    assert clone.dvc("status", "--quiet", check=False).returncode == 0
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    done = subprocess.run(
        [sys.executable, "-c", snippet[1]], cwd=clone.root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_failing_verification_fails_repro_after_the_report(repository: Repository) -> None:
    """A doctored block: the shards hold it faithfully, only the target itself tells."""
    (block,) = repository.root.glob(".work/capture-*/block-*.safetensors")
    size = block.stat().st_size
    tensors = load_file(block)
    content = block.read_bytes()
    hidden = tensors["target_hidden_states"].contiguous().view(-1)
    doctored = hidden.flip(0).numpy().tobytes()
    start = content.index(hidden.numpy().tobytes()[:64])
    block.unlink()
    block.write_bytes(content[:start] + doctored + content[start + len(doctored) :])
    assert block.stat().st_size == size
    repository.set_params(cache={"shard_size": 3})
    done = repository.dvc("repro", check=False)
    assert done.returncode != 0
    assert "[recompute] shard-00000" in done.stderr
    assert json.loads((repository.root / "reports/verify.json").read_text())["num_findings"] > 0
    assert "do not train on this cache" in (repository.root / "reports/verify.html").read_text()
