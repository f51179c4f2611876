"""What a new user does: the wheel in a new virtual environment, then the README, the report, training, two versions."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.new_user import Shell, copy_of_repository, new_environment
from tests.pages import Page
from tests.repository import ROOT, Repository
from tests.test_report_browser import run as run_browser

pytestmark = pytest.mark.dvc

NUMBER_OF_SAMPLES = "python -c \"import dspark_cache; print(len(dspark_cache.CachedDSparkDataset('cache')))\""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="module")
def user(folder: Path) -> Shell:
    return new_environment(folder / "venv")


@pytest.fixture(scope="module")
def page() -> Page:
    return Page("README.md")


@pytest.fixture(scope="module")
def first(user: Shell, page: Page, folder: Path) -> Path:
    """The repository that the first lines of the README make, committed."""
    clone, drafts = copy_of_repository(folder / "clone"), folder / "drafts"
    user.run(page.take("pip install"), clone)
    user.run(page.take("dspark-cache init"), clone)
    assert "Running stage 'verify'" in user.run(page.take("dvc repro && dvc status -q"), drafts)
    assert "+ Hello.<|im_end|>" in user.run(page.take("dspark-cache inspect"), drafts)
    user.run("git add --all && git commit --quiet --message sample", drafts)
    return drafts


@pytest.fixture
def drafts(first: Path, tmp_path: Path) -> Path:
    """A copy of it to work in."""
    shutil.copytree(first, tmp_path / "drafts", symlinks=True)
    return tmp_path / "drafts"


def test_the_wheel_is_what_runs(user: Shell, first: Path) -> None:
    code = "import dspark_cache, sys; print(dspark_cache.__file__, sys.executable)"
    module, python = user.run(f"python -c '{code}'", first).split()
    assert module.startswith(f"{user.commands.parent}/lib/")
    assert python == f"{user.commands}/python"


def test_the_readme(user: Shell, page: Page, drafts: Path, tmp_path: Path) -> None:
    """From the first cache to a change of data, a remote, a clone and an import."""
    (drafts / "train.py").write_text(page.take_block("python", "build_cached_dspark_dataloader"))
    assert user.run("python train.py", drafts).count("'input_ids': [8, 256]") == 8

    mine = tmp_path / "mine.jsonl"
    mine.write_text("".join((ROOT / "inputs/data/conversations.jsonl").read_text().splitlines(keepends=True)[:9]))
    for beginning in ("git rm", "cp /somewhere", "dvc add", "git add", "dvc repro && dvc status -q"):
        user.run(page.take(beginning).replace("/somewhere/mine.jsonl", str(mine)), drafts)
    assert user.run("git status --short inputs", drafts).splitlines() == [
        "A  inputs/data/.gitignore",
        "D  inputs/data/conversations.jsonl",
        "A  inputs/data/conversations.jsonl.dvc",
    ]
    assert user.run(NUMBER_OF_SAMPLES, drafts) == "9\n"

    user.run(page.take("dvc remote add").replace("URL", str(tmp_path / "store")), drafts)
    user.run(page.take("dvc repro && dvc status -q && dvc push"), drafts)
    user.run("git add --all && git commit --quiet --message mine && git tag v1", drafts)
    user.run(f"git clone --quiet {drafts} clone", tmp_path)
    user.run(page.take("dvc pull"), tmp_path / "clone")
    assert user.run(NUMBER_OF_SAMPLES, tmp_path / "clone") == "9\n"
    user.run("git init --quiet other && cd other && dvc init --quiet", tmp_path)
    line = page.take("dvc import").replace("URL_OF_THE_REPOSITORY", str(drafts)).replace("TAG", "v1")
    user.run(line, tmp_path / "other")
    assert user.run(NUMBER_OF_SAMPLES, tmp_path / "other") == "9\n"
    ran_by_ci = (ROOT / ".ci/run").read_text().splitlines()
    for command in ("make repro", "make test", "make lint"):
        assert page.take(command) in ran_by_ci
    assert page.left == []


def test_the_report_in_a_browser(first: Path, tmp_path: Path) -> None:
    shown, logged = run_browser(Path(shutil.copy(first / "reports/verify.html", tmp_path)), "--dump-dom")
    assert "ERROR:CONSOLE" not in logged
    text = re.sub(r"<[^>]+>", " ", shown)
    assert "Sound: nothing was found up to the level values." in text
    assert "What is the KV cache, and how does it differ from a cache of hidden states?" in text


def test_the_training_example(user: Shell, first: Path) -> None:
    printed = user.run("python ../clone/examples/train_draft.py --cache cache --steps 60 --every 20", first)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


def test_a_trainer_s_repository_imports_two_versions(user: Shell, drafts: Path, tmp_path: Path) -> None:
    """Each is trained from, one after the other and side by side."""
    user.run(f"dvc remote add --quiet --default store {tmp_path}/store && dvc push --quiet", drafts)
    user.run("git add --all && git commit --quiet --message remote && git tag v1", drafts)
    Repository(drafts).set_params(data={"limit": 20}, target={"layer_ids": [1, 3]})
    user.run("dvc repro --quiet && dvc status -q && dvc push --quiet", drafts)
    user.run("git add --all && git commit --quiet --message fewer && git tag v2", drafts)
    trainer, train = tmp_path / "trainer", f"python {tmp_path}/train_draft.py"
    for name in ("dspark_draft.py", "train_draft.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    user.run("git init --quiet trainer && cd trainer && dvc init --quiet", tmp_path)
    user.run(f"dvc import --quiet {drafts} cache --rev v1", trainer)
    assert user.run(NUMBER_OF_SAMPLES, trainer) == "64\n"
    assert "step 2: loss" in user.run(f"{train} --steps 2", trainer)
    user.run("git add --all && git commit --quiet --message v1", trainer)
    user.run("dvc update --quiet cache.dvc --rev v2", trainer)
    assert user.run(NUMBER_OF_SAMPLES, trainer) == "20\n"
    assert "step 2: loss" in user.run(f"{train} --steps 2", trainer)
    user.run("git checkout --quiet cache.dvc && dvc checkout --quiet", trainer)
    assert user.run(NUMBER_OF_SAMPLES, trainer) == "64\n"
    code = f"""
from dspark_cache import open_cache
for rev in ("v1", "v2"):
    print(rev, len(open_cache("file://{drafts}", rev)), open_cache("file://{drafts}", rev).manifest["target_layer_ids"])
"""
    (trainer / "both.py").write_text(code)
    lines = user.run("python both.py", trainer).splitlines()
    assert [line for line in lines if line.startswith("v")] == ["v1 64 [1, 2, 3, 4, 5]", "v2 20 [1, 3]"]
