"""Every command and every snippet of the docs is run, as somebody would who reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_cache.settings import SECTIONS, Settings
from tests.new_user import DEVELOPER, copy_of_repository
from tests.pages import COMMANDS, Page, pages
from tests.repository import ROOT, Repository, make_repository, read_yaml
from tests.test_import_flow import FLOW

sys.path.insert(0, str(ROOT / "docs"))
import make_parameters

RUN_BY = {
    "CONTRIBUTING.md": "test_docs",
    "README.md": "test_new_user",
    "docs/format.md": "test_docs",
    "docs/operations.md": "test_docs",
    "docs/performance.md": "test_docs",
    "docs/recipes/other-trainers.md": "test_other_trainers",
    "docs/recipes/training.md": "test_recipes",
    "docs/scale.md": "test_docs",
    "docs/verification.md": "test_docs",
    "docs/versions.md": "test_versions_doc",
    "inputs/data/README.md": "test_docs",
    "inputs/target/README.md": "test_docs",
}
"""Page with code, and the module of tests that runs it."""


# what holds of every page


def test_pages_with_code_have_a_test_that_runs_it() -> None:
    with_code = {str(path.relative_to(ROOT)) for path in pages() if Page(str(path.relative_to(ROOT))).blocks}
    assert with_code == set(RUN_BY)
    for name, module in RUN_BY.items():
        assert Path(name).name in (ROOT / f"tests/{module}.py").read_text()


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_says_its_language_and_commands_are_not_hidden_in_plain_text(path: Path) -> None:
    found = Page(str(path.relative_to(ROOT)))
    assert {language for language, _ in found.blocks} <= {"sh", "bash", "python", "yaml", "json", "text"}
    outside = re.sub(r"^ *```.*?^ *```$", "", found.text, flags=re.DOTALL | re.MULTILINE)
    indented = [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    assert not [line for line in indented if line.split(" ")[0] in COMMANDS]


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert target.startswith("https://") or (path.parent / target).exists(), target


def test_headings_that_links_name_exist() -> None:
    for path in pages():
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", path.read_text()):
            if not target.startswith("https://"):
                text = ((path.parent / target) if target else path).read_text()
                headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# parameters


def test_the_page_of_parameters_is_that_of_the_dataclasses() -> None:
    assert make_parameters.PAGE.read_text() == make_parameters.page(), "run python docs/make_parameters.py"


def test_params_yaml_has_every_default_with_what_it_means() -> None:
    params = read_yaml(ROOT / "params.yaml")
    defaults = Settings()
    assert {
        section: {name: getattr(getattr(defaults, section), name) for name in kind.__dataclass_fields__}
        for section, kind in SECTIONS.items()
    } == params
    comments = dict(re.findall(r"^  (\w+): .*?# (.*)$", (ROOT / "params.yaml").read_text(), re.MULTILINE))
    every = [item for kind in SECTIONS.values() for item in kind.__dataclass_fields__.values()]
    assert [item.name for item in every if comments[item.name] != item.metadata["about"]] == []


def test_contributing_lists_the_modules_in_their_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("\n```text\n")[2].partition("```")[0]
    named = [name for line in text.splitlines() for name in line.partition("  ")[0].split()]
    assert named == FLOW


@pytest.mark.dvc
def test_the_pages_of_the_inputs(tmp_path: Path) -> None:
    clone = copy_of_repository(tmp_path / "clone")
    data, target = Page("inputs/data/README.md"), Page("inputs/target/README.md")
    somewhere = tmp_path / "somewhere"
    shutil.copytree(ROOT / "inputs/target", somewhere / "my-target")
    row = data.take_block("json", "messages")
    (somewhere / "mine.jsonl").write_text(row * 3)
    for page in (data, target):
        for line in page.left:
            DEVELOPER.run(page.take(line).replace("/somewhere", str(somewhere)), clone)
        assert page.left == []
    Repository(clone).set_params(target={"model": "inputs/target/my-target"})
    DEVELOPER.run("dvc repro", clone)


# format


def test_the_reader_of_the_page_on_the_format_reads_what_it_says(tmp_path: Path) -> None:
    page = Page("docs/format.md")
    repository = make_repository(tmp_path / "repository", num_rows=3)
    repository.run("tokenize", "capture", "shards")
    code, expected = page.take_block("python", "def read_sample"), page.take_block("text", "input_ids I64")
    done = subprocess.run(
        [sys.executable, "-c", code, repository.root / "cache"], capture_output=True, text=True, check=True
    )
    assert done.stdout == expected
    assert page.left == []


# operations


@pytest.mark.dvc
def test_the_pages_on_operations_and_verification(tmp_path: Path) -> None:
    page = Page("docs/operations.md")
    root = make_repository(tmp_path / "repository", num_rows=6, data={"seq_length": 64}).root
    run = DEVELOPER.run
    run("git init --quiet && dvc remote add --default store ../store", root)
    run("git add --all && git commit --quiet --message all", root)
    assert "samples" in run(page.take("dspark-cache estimate"), root)
    run(page.take("dspark-cache doctor"), root, code=1)  # the remote of this test is not verified
    run(page.take("dvc remote modify").replace("NAME", "store"), root)
    run("dspark-cache doctor", root)
    for beginning in ("dvc repro tokenize", "dvc repro capture"):
        run(page.take(beginning), root)
    shutil.rmtree(root / ".work")
    line = page.take("torchrun --nnodes 4 --nproc-per-node 8").replace(
        "--nnodes 4 --nproc-per-node 8", "--nproc-per-node 2"
    )
    run(line.replace("HOST0:29400", "localhost:0"), root)
    assert len(list((root / ".work").glob("capture-*"))) == 1
    run(page.take("dvc repro && dvc status -q && dvc push"), root)

    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "srun").write_text('#!/bin/bash\nshift\nexec env SLURM_NTASKS=1 SLURM_PROCID=0 "$@"\n')
    (bin_folder / "srun").chmod(0o755)
    (root / ".venv").symlink_to(DEVELOPER.commands.parent)
    path = f"{bin_folder}:{DEVELOPER.environment()['PATH']}"
    for beginning, environment in (("srun", {}), ("SLURM_ARRAY_TASK_ID", {"SLURM_ARRAY_TASK_ID": "16"})):
        shutil.rmtree(root / ".work")
        script = page.take_block("bash", beginning).replace("/shared/repository", str(root))
        run(script, root, PATH=path, **environment)
        assert list((root / ".work").glob("capture-*"))
    run(page.take("DSPARK_RUNTIME__CHECK_BLOCKS=digest dvc repro"), root)

    run("git add --all && git commit --quiet --message cache", root)
    numbers = Page("docs/verification.md")
    for line in numbers.left:
        run(numbers.take(line), root)
    assert numbers.left == []
    run(f"git clone --quiet {root} trainer", tmp_path)
    for beginning in ("dvc pull", "dspark-cache verify"):
        run(page.take(beginning), tmp_path / "trainer")
    resume = page.take_block("python", "load_state_dict")
    before = """
from dspark_cache import build_cached_dspark_dataloader
first = build_cached_dspark_dataloader("cache", 2, True, seed=0)
batches = iter(first)
next(batches)
state = first.state_dict()
"""
    after = "print([batch['input_ids'].shape[0] for batch in loader])"
    (tmp_path / "resume.py").write_text(before + resume.replace('"cache", 8', '"cache", 2') + after)
    assert run("python ../resume.py", tmp_path / "trainer") == "[2, 2]\n"
    assert page.left == []


# performance, scale, contributing


@pytest.mark.parametrize("name", ["docs/performance.md", "docs/scale.md"])
def test_commands_of_benchmarks_parse(name: str) -> None:
    """Measuring takes minutes to hours; test_benchmarks and test_scale run them small."""
    page = Page(name)
    for line in page.left:
        words = page.take(line).split()
        module = words[words.index("-m") + 1]
        text = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert [word for word in words if word.startswith("--") and word not in text] == []


def test_the_commands_of_contributing_are_those_of_ci() -> None:
    page = Page("CONTRIBUTING.md")
    assert page.take("git clone URL && cd dspark-cache")
    assert page.take("make install")
    page.take_block("text", "errors")
    assert "$(VENV)/.installed" in (ROOT / "Makefile").read_text()
    assert page.left == []
