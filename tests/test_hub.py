"""Targets and data sets of the hub, read offline from a cache laid out as the hub's client does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL_COMMIT, DATA_COMMIT = "1" * 40, "2" * 40


def snapshot(hub: Path, kind: str, name: str, commit: str, fill: Callable[[Path], Any]) -> None:
    """Lay a repository out as the client does: blobs, and a snapshot of links to them."""
    repository = hub / f"{kind}--{name.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True)
    fill(folder)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        blob = repository / "blobs" / f"{number:040d}"
        file.rename(blob)
        file.symlink_to(blob)


def write_splits(folder: Path) -> None:
    (folder / "data").mkdir()
    for split, words in {"train": ["a", "b", "c"], "test": ["x", "y"]}.items():
        rows = [
            {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word * 3}]}
            for word in words
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"data/{split}-00000-of-00001.parquet")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    shipped = Path(__file__).parents[1] / "inputs/target"
    snapshot(
        path,
        "models",
        "someone/tiny",
        MODEL_COMMIT,
        lambda to: [shutil.copy(file, to) for file in shipped.iterdir() if not file.name.startswith("README")],
    )
    snapshot(path, "datasets", "someone/talks", DATA_COMMIT, write_splits)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(
        tmp_path / "repository",
        data={"path": "someone/talks", "revision": DATA_COMMIT, "split": "test", "seq_length": 64},
        target={"model": "someone/tiny", "revision": MODEL_COMMIT, "layer_ids": [1, 3]},
    )


def test_a_target_and_a_data_set_of_the_hub_go_through_the_pipeline(repository: Repository, hub: Path) -> None:
    code = "import importlib\nfor name in 'tokenize capture shards verify'.split():\n"
    code += "    importlib.import_module(f'stages.{name}').main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository.root,
        env=repository.environment(HF_HUB_CACHE=str(hub)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((repository.root / "cache/manifest.json").read_text())
    assert (manifest["target_model"], manifest["train_data_path"]) == ("someone/tiny", "someone/talks")
    assert (manifest["num_samples"], manifest["train_split"]) == (2, "test")
    provenance = json.loads((repository.root / "cache/provenance.json").read_text())
    assert provenance["capture"]["identity"]["weights"] == f"hub:someone/tiny@{MODEL_COMMIT}"
    assert provenance["tokens"]["data_fingerprint"] == f"hub:someone/talks@{DATA_COMMIT}"
    assert provenance["tokens"]["tokenizer_fingerprint"] == f"hub:someone/tiny@{MODEL_COMMIT}"


@pytest.mark.parametrize(
    ("section", "key", "name"), [("data", "data.path", "someone/talks"), ("target", "target.model", "someone/tiny")]
)
def test_a_commit_that_is_not_there_is_refused_by_name(
    repository: Repository, hub: Path, section: str, key: str, name: str
) -> None:
    repository.set_params(**{section: {"revision": "3" * 40}})
    done = repository.stage("tokenize", HF_HUB_CACHE=str(hub))
    assert done.returncode == 1
    assert f"error: {key}: cannot fetch {name} at {'3' * 40}: " in done.stderr
    assert not (repository.root / "tokens").exists()
