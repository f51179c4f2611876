"""The recipes of docs/recipes/training.md, each run as it stands there, one after the other in one folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_cache.train_config import check_train_config
from tests.pages import Page
from tests.repository import ROOT, make_repository

PAGE = Page("docs/recipes/training.md")
DRAFT, *RECIPES = PAGE.blocks
HEADINGS = [line.removeprefix("## ") for line in PAGE.text.splitlines() if line.startswith("## ")]
FRAMEWORKS = ("transformers", "pytorch_lightning")
PRINTED = {
    "Plain PyTorch": ["epoch 0: loss 0.", "epoch 1: loss 0."],
    "Only the cache that was meant": ["seq_length: expected 4096, found 256"],
    "Several processes, several machines": ["step 4: loss ", "step 4: loss "],
    "Held-out samples": ["held out: 0."],
    "Ragged and 8-bit caches": ["verified", "torch.bfloat16 0."],
}
"""Parts of what the blocks of a recipe print; others assert something themselves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as a reader has it: the shipped sample's cache, `draft.py` and this repository's examples."""
    repository = make_repository(tmp_path_factory.mktemp("recipes") / "repository", data={"eval_samples": 8})
    repository.run("tokenize", "capture", "shards")
    (repository.root / "draft.py").write_text(DRAFT[1])
    (repository.root / "examples").symlink_to(ROOT / "examples")
    return repository.root


def recipe(heading: str) -> list[tuple[str, str]]:
    """Return the blocks below a heading."""
    text = PAGE.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [(language, code) for language, code in RECIPES if f"```{language}\n{code}" in text]


def run(folder: Path, *command: str) -> str:
    """Run a command in the folder, as on a machine of two processes, and return what it prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "NODES": "1",
        "GPUS": "1",
        "HOST0_AND_PORT": f"localhost:{port}",
    }
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_block_is_one_of_a_recipe() -> None:
    assert [block for heading in HEADINGS for block in recipe(heading)] == RECIPES
    assert DRAFT[1].startswith("# draft.py\n")


@pytest.mark.parametrize("heading", HEADINGS)
def test_a_recipe_runs(
    folder: Path, heading: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for number, (language, code) in enumerate(recipe(heading)):
        if language == "yaml":
            (folder / "nemo.yaml").write_text(code)
        elif language == "sh":
            found = run(folder, "bash", "-euc", code)
        elif any(name in code for name in FRAMEWORKS):  # they warn of much, and change the process that they run in
            (folder / "recipe.py").write_text(code)
            found = run(folder, sys.executable, "recipe.py")
        else:
            exec(compile(code, heading, "exec"), {})
            found = capsys.readouterr().out
        if heading in PRINTED:
            assert PRINTED[heading][number if language == "sh" else -1] in found


def test_the_recipe_of_nemo_is_compared_with_the_cache(folder: Path) -> None:
    """As `dspark-cache check` is silent about it, it must speak of another."""
    ((_, code),) = [block for block in recipe("NeMo AutoModel") if block[0] == "yaml"]
    other = folder / "other.yaml"
    other.write_text(code.replace("256", "512").replace("draft_num_hidden_layers: 5", "draft_num_hidden_layers: 4"))
    faults = [item.key for item in check_train_config(folder / "cache", other) if item.severity == "error"]
    assert sorted(faults) == ["recipe_args.seq_length", "recipe_args.target_layer_ids"]
