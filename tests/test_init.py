"""`dspark-cache init`: the pipeline beside what is there, all that is in the way at once, and nothing lost."""

from __future__ import annotations

import dataclasses
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dspark_cache.cli import main
from dspark_cache.doctor import open_repo
from dspark_cache.errors import LockedError, SettingsError
from dspark_cache.files import FileLock, building_lock
from dspark_cache.init_repository import TEMPLATE_FILES, ignored, outputs, plan_init
from dspark_cache.settings import load_settings
from tests.repository import ROOT, Repository, read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable

THEIR_DVC = """\
# ours; do not reformat
vars:
- scale: 2

stages:
    train:
        # one line
        cmd: >-
            python src/train.py
        deps: [src/train.py]
        params: [ train.lr,   train.epochs ]
        outs:
        - model.txt

# what is drawn
"""
THEIR_PARAMS = """\
train:
    lr:   1e-3   # tuned by hand
    epochs: 10

data:
    seq_length: 64     # ours
"""


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file but those of git, DVC's scratch, and locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".building.lock")]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {
        name: names[name].read_bytes() for name in names if not name.startswith((".git/", ".dvc/tmp", ".dvc/cache"))
    }


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A DVC repository with a pipeline of its own."""
    root = tmp_path / "theirs"
    root.mkdir()
    git(root, "init", "--quiet")
    write(root / ".dvc/config", "[core]\n    autostage = true\n")
    write(root / ".dvc/.gitignore", "/config.local\n/tmp\n/cache\n")
    write(root / "dvc.yaml", THEIR_DVC)
    write(root / "params.yaml", THEIR_PARAMS)
    write(root / "src/train.py", "import pathlib\npathlib.Path('model.txt').write_text('model')\n")
    write(root / "stages/helpers.py", "LOW = 1\n")
    write(root / ".gitignore", "data/\n*.log")
    return root


# A new folder


def test_an_empty_folder_gets_all_that_is_shipped(tmp_path: Path) -> None:
    root = tmp_path / "new" / "er"
    plan = plan_init(root)
    assert plan.commands == (("git", "init", "--quiet"),)
    assert (plan.kept, plan.advice) == ((), ())
    assert list(tmp_path.iterdir()) == []
    plan.apply()
    made = contents(root)
    assert sorted(made) == sorted(TEMPLATE_FILES)
    assert [name for name in TEMPLATE_FILES if made[name] != (ROOT / name).read_bytes()] == [".gitignore", ".dvcignore"]
    with open_repo(root) as repo:
        assert Path(repo.root_dir) == root
        assert repo.config["cache"]["type"] == ["hardlink", "symlink"]
    assert "dvc.yaml" in git(root, "status", "--short", "--untracked-files=all")


def test_without_the_sample_its_places_are_empty(tmp_path: Path) -> None:
    plan = plan_init(tmp_path, sample=False)
    assert plan.advice == (
        "put yours into inputs/data, or set data.path  # there is no inputs/data/conversations.jsonl",
        "put yours into inputs/target, or set target.model  # there is no inputs/target/config.json",
    )
    plan.apply()
    assert [name for name in sorted(contents(tmp_path)) if name.startswith("inputs")] == [
        "inputs/data/README.md",
        "inputs/target/README.md",
    ]


@pytest.mark.parametrize("sample", [True, False])
def test_a_second_run_changes_nothing(tmp_path: Path, sample: bool) -> None:
    plan_init(tmp_path, sample=sample).apply()
    made = contents(tmp_path)
    again = plan_init(tmp_path, sample=sample)
    assert (again.commands, again.changes, again.kept, again.diff()) == ((), (), (), "")
    assert bool(again.advice) != sample
    again.apply()
    assert contents(tmp_path) == made


def test_this_repository_has_it_all() -> None:
    plan = plan_init(ROOT)
    assert (plan.commands, plan.changes, plan.kept) == ((), (), ())


def test_the_plan_is_shown_as_a_diff_that_git_applies(tmp_path: Path, theirs: Path) -> None:
    plan = plan_init(theirs, sample=False)
    (tmp_path / "diff").write_text(plan.diff())
    git(theirs, "apply", str(tmp_path / "diff"))
    shown = contents(theirs)
    for change in plan.changes:
        assert shown[change.name] == change.new
    assert plan_init(theirs, sample=False).diff() == ""


def test_of_large_files_the_diff_has_name_and_size(tmp_path: Path) -> None:
    lines = plan_init(tmp_path).diff().splitlines()
    assert lines[0] == "$ git init --quiet"
    size = (ROOT / "inputs/target/model.safetensors").stat().st_size
    assert f"new file inputs/target/model.safetensors, {size} bytes" in lines
    assert "+++ b/dvc.yaml" in lines
    assert not [line for line in lines if "conversations.jsonl" in line and line.startswith("+++")]


def test_the_diff_shows_bytes_that_are_no_text_and_odd_line_ends(theirs: Path) -> None:
    (theirs / ".gitignore").write_bytes(b"*.log\r\n\xff\xe2\x80\xa8x\n")
    plan = plan_init(theirs, sample=False)
    assert " *.log\r\n \ufffd\u2028x\n+# dspark-cache\n" in plan.diff()
    plan.apply()
    assert (theirs / ".gitignore").read_bytes().startswith(b"*.log\r\n\xff\xe2\x80\xa8x\n# dspark-cache\n")


def test_a_folder_of_a_git_repository_becomes_a_dvc_repository_by_itself(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    write(tmp_path / "README.md", "theirs\n")
    plan = plan_init(tmp_path / "a/b", sample=False)
    assert plan.commands == ()
    plan.apply()
    with open_repo(tmp_path / "a/b") as repo:
        assert Path(repo.root_dir) == tmp_path / "a/b"
        assert Path(repo.scm.root_dir) == tmp_path
    assert {name for name in contents(tmp_path) if not name.startswith("a/b/")} == {"README.md"}


# A repository that exists


def test_what_a_repository_has_stays(theirs: Path) -> None:
    before = contents(theirs)
    plan = plan_init(theirs)
    assert plan.commands == ()
    assert {change.name for change in plan.changes if change.old is not None} == {
        "dvc.yaml",
        "params.yaml",
        ".gitignore",
    }
    plan.apply()
    after = contents(theirs)
    for name in before.keys() - {"dvc.yaml", "params.yaml", ".gitignore"}:
        assert after[name] == before[name], name
    assert after["dvc.yaml"].startswith(THEIR_DVC.removesuffix("\n# what is drawn\n").encode())
    assert after["params.yaml"].startswith(THEIR_PARAMS.encode())
    assert load_settings(theirs / "params.yaml", {}).data.seq_length == 64
    shipped = read_yaml(ROOT / "dvc.yaml")
    assert read_yaml(theirs / "dvc.yaml")["stages"] == {**read_yaml_text(THEIR_DVC)["stages"], **shipped["stages"]}
    with open_repo(theirs) as repo:
        assert {stage.name for stage in repo.index.stages} == {"train", *shipped["stages"]}


def read_yaml_text(text: str) -> dict[str, dict[str, object]]:
    from dspark_cache.yaml_text import parse_yaml

    return parse_yaml(text, "")


def test_lines_are_added_to_ignore_files_once(theirs: Path) -> None:
    write(theirs / ".gitignore", "data/\n/tokens\n*.log")
    plan_init(theirs).apply()
    patterns = ignored((ROOT / ".gitignore").read_text())
    expected = ["data/", "/tokens", "*.log", "# dspark-cache", *[line for line in patterns if line != "/tokens"], ""]
    assert (theirs / ".gitignore").read_text().split("\n") == expected
    assert (theirs / ".dvcignore").read_text() == "# dspark-cache\n" + (ROOT / ".dvcignore").read_text()


def test_every_output_and_the_scratch_is_ignored_but_nothing_of_ours_alone() -> None:
    patterns = ignored((ROOT / ".gitignore").read_text())
    stages = read_yaml(ROOT / "dvc.yaml")["stages"].values()
    cached = [name for stage in stages for name in outputs({"outs": stage.get("outs", [])})]
    assert {f"/{name}" for name in cached} <= set(patterns)
    assert {"/.work", ".tmp-*", "__pycache__/", "/.venv"} <= set(patterns)
    assert not {"/build", "/dist", "*.egg-info/", ".mypy_cache/"} & set(patterns)


def test_the_shipped_configuration_of_dvc_names_no_place() -> None:
    assert "remote" not in (ROOT / ".dvc/config").read_text()
    assert "/" not in (ROOT / ".dvc/config").read_text()


def test_settings_of_dvc_are_advised_and_left_alone(theirs: Path) -> None:
    plan = plan_init(theirs)
    assert plan.advice == (
        "dvc config cache.type hardlink,symlink  "
        "# reflink (DVC's default), else copy: without reflinks the disk holds outputs twice",
        "git add --force inputs/data/README.md inputs/data/conversations.jsonl  "
        "# git ignores them: a clone would lack them",
    )
    plan.apply()
    assert (theirs / ".dvc/config").read_text() == "[core]\n    autostage = true\n"
    assert plan_init(theirs).advice == plan.advice
    git(theirs, "add", "--force", "inputs/data")
    write(theirs / ".dvc/config", "[cache]\n    type = symlink\n")
    assert plan_init(theirs).advice == ()


def test_what_the_user_changed_since_is_kept_and_named(theirs: Path) -> None:
    plan_init(theirs).apply()
    for name, old, new in (
        ("stages/capture.py", "def main", "# ours\ndef main"),
        ("dvc.yaml", "cmd: python -m stages.shards", "cmd: nice python -m stages.shards"),
        ("params.yaml", "layout: padded", "layout: ragged"),
        ("stages/versions.yaml", "tokenize: 1", "tokenize: 0"),
        ("inputs/data/conversations.jsonl", "{", "{ "),
    ):
        text = (theirs / name).read_text()
        assert old in text
        (theirs / name).write_text(text.replace(old, new, 1))
    (theirs / "stages/__init__.py").write_text("")
    (theirs / "stages/tokenize.py").unlink()
    plan = plan_init(theirs)
    assert [change.name for change in plan.changes] == ["stages/tokenize.py"]
    assert plan.kept == (
        "stages/versions.yaml: tokenize",
        "dvc.yaml: stages.shards",
        "stages/__init__.py",
        "stages/capture.py",
        "inputs/data",
    )


INPUTS: dict[str, Callable[[Path], None]] = {
    "a file beside it": lambda root: write(root / "inputs/data/mine.jsonl", "{}\n"),
    "a file DVC holds that is not here": lambda root: write(
        root / "inputs/data/conversations.jsonl.dvc",
        "outs:\n- md5: d41d8cd98f00b204e9800998ecf8427e\n  size: 0\n  path: conversations.jsonl\n",
    ),
    "a folder DVC holds that is not here": lambda root: write(
        root / "inputs/data.dvc", "outs:\n- md5: d751713988987e9331980363e24189ce.dir\n  size: 0\n  path: data\n"
    ),
    "a param that names another": lambda root: write(root / "params.yaml", "data: {path: a/b}\n"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_sample_does_not_come_where_there_are_inputs(theirs: Path, name: str) -> None:
    INPUTS[name](theirs)
    plan_init(theirs).apply()
    assert not (theirs / "inputs/data/conversations.jsonl").exists()
    assert (theirs / "inputs/data/README.md").exists() == (name == "a param that names another")
    assert (theirs / "inputs/target/model.safetensors").exists()


# In the way


def test_all_that_is_in_the_way_is_said_at_once_and_nothing_is_written(theirs: Path) -> None:
    with (theirs / "params.yaml").open("a") as file:
        file.write("    raw_dir: x\ncache: 3\nTarget: {}\n")
    write(theirs / "dvc.yaml", THEIR_DVC + "    verify:\n        cmd: python v.py\n        outs: [tokens/a, cache]\n")
    write(theirs / "stages/capture.py", "print('mine')\n")
    write(theirs / "features.json", "{}")
    before = contents(theirs)
    with pytest.raises(SettingsError) as error:
        plan_init(theirs)
    first, *faults, last = str(error.value).splitlines()
    assert first == f"6 thing(s) are in the way in {theirs}, nothing was written:"
    known = sorted(read_yaml(ROOT / "params.yaml")["data"])
    assert faults == [
        "  params.yaml has 3 fault(s):",
        f"    unknown key data.raw_dir; known are {known}",
        "    cache: expected keys and values, found 3",
        "    unknown section 'Target', did you mean 'target'?",
        "  tokens, an output of the stage tokenize, is one of dvc.yaml:verify already: rename that",
        "  features.json is there, and is to be an output of the stage capture: move it away",
        "  cache, an output of the stage shards, is one of dvc.yaml:verify already: rename that",
        "  dvc.yaml: stage verify is another: expected cmd 'python -m stages.verify': rename yours",
        "  stages/capture.py is not of this pipeline: it does not import dspark_cache: rename yours",
    ]
    assert last == "change them, or put the pipeline into a folder of its own: dspark-cache init FOLDER"
    assert contents(theirs) == before


def link(name: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        (root / "elsewhere").mkdir()
        (root / name).symlink_to("elsewhere")

    return make


def put(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: write(root / name, text)


IN_THE_WAY: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file for a folder": (put("inputs", ""), "{root}/inputs is a file: expected a folder"),
    "a folder for a file": (put("params.yaml/x", ""), "{root}/params.yaml is a folder: expected a file"),
    "a link for a folder": (link("inputs"), "{root}/inputs is a link: expected a folder"),
    "a link that ends nowhere": (
        lambda root: (root / ".dvc").symlink_to("x"),
        "{root}/.dvc is a link: expected a folder",
    ),
    "a file where reports go": (
        put("reports", ""),
        "{root}/reports is a file: expected a folder, for an output of the stage verify",
    ),
    "what would be an output": (put("cache/x", ""), "cache is there, and is to be an output of the stage shards: move"),
    "no YAML": (put("dvc.yaml", "stages: ["), "dvc.yaml is not valid YAML: line 1, column 10: "),
    "no UTF-8": (lambda root: (root / "params.yaml").write_bytes(b"\xff"), "params.yaml is not UTF-8: 'utf-8' codec"),
    "no stages": (put("dvc.yaml", "stages: 3\n"), "dvc.yaml: stages: expected keys and values, found 3"),
    "no form to add to": (
        put("params.yaml", "data: {path: x  # mine\n  }\n"),
        "params.yaml: nothing can be added to this form of YAML",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_each_thing_in_the_way_is_named(tmp_path: Path, name: str) -> None:
    make, message = IN_THE_WAY[name]
    make(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(SettingsError) as error:
        plan_init(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"1 thing(s) are in the way in {tmp_path}, nothing was written:"
    assert lines[1].startswith("  " + message.format(root=tmp_path))
    assert contents(tmp_path) == before


def test_a_file_is_no_folder_to_put_it_into(tmp_path: Path) -> None:
    write(tmp_path / "file", "")
    with pytest.raises(SettingsError, match="file is a file: expected a folder"):
        plan_init(tmp_path / "file")


def test_what_dvc_cannot_read_is_in_the_way(theirs: Path) -> None:
    write(theirs / "sub/dvc.yaml", "stages:\n  a:\n    cmd: x\n    cache: no\n")
    with pytest.raises(SettingsError, match=r"DVC cannot read its files in .*sub/dvc.yaml' validation failed"):
        plan_init(theirs)


def test_outputs_of_other_folders_count(theirs: Path) -> None:
    write(theirs / "dvc.yaml", THEIR_DVC.replace("- model.txt", "- new"))
    with pytest.raises(SettingsError, match=r"tokens, an output of .* tokenize, is one of dvc.yaml:train already"):
        plan_init(theirs / "new")


def test_git_must_be_there_to_begin_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="git is not found: install it"):
        plan_init(tmp_path / "new")


# Killed, or not alone


@pytest.mark.parametrize("number", range(len(TEMPLATE_FILES)))
def test_a_second_run_completes_what_was_killed_after_any_file(tmp_path: Path, number: int) -> None:
    plan = plan_init(tmp_path / "new")
    assert len(plan.changes) == len(TEMPLATE_FILES)
    dataclasses.replace(plan, changes=plan.changes[:number]).apply()
    following = tmp_path / "new" / plan.changes[number].name
    write(following.with_name(f".tmp-{following.name}-0123456789ab"), "half")
    plan_init(tmp_path / "new").apply()
    assert contents(tmp_path / "new") == {change.name: change.new for change in plan.changes}


def test_the_file_with_the_stages_is_put_in_place_last(theirs: Path) -> None:
    assert plan_init(theirs).changes[-1].name == "dvc.yaml"


def test_a_plan_that_is_out_of_date_is_refused(theirs: Path) -> None:
    plan = plan_init(theirs)
    write(theirs / "params.yaml", "lr: 1\n")
    write(theirs / "stages/verify.py", "")
    before = contents(theirs)
    with pytest.raises(SettingsError, match=r"^stages/verify.py, params.yaml changed while this was planned: run"):
        plan.apply()
    assert contents(theirs) == before


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    plan = plan_init(tmp_path)
    write(tmp_path / ".git", "no folder of git")
    with pytest.raises(SettingsError, match=rf"^git init --quiet in {tmp_path} failed: fatal: invalid gitfile format"):
        plan.apply()
    assert contents(tmp_path).keys() == {".git"}


def test_two_at_once_are_refused(theirs: Path) -> None:
    plan = plan_init(theirs)
    with FileLock(building_lock(theirs / "dvc.yaml")), pytest.raises(LockedError):
        plan.apply()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dvc.yaml": "vars:\n  - target: models/a\nstages:\n  train:\n    cmd: echo ${target}\n"}, "'target'"),
        (
            {"dvc.yaml": "vars: [more.yaml]\nstages:\n  train:\n    cmd: echo\n", "more.yaml": "data: {path: x}\n"},
            "'data.path'",
        ),
        ({"params.yaml": "since: 2024-01-01\n"}, "'date'"),
    ],
)
def test_names_that_dvc_could_not_resolve_any_more_are_in_the_way(
    theirs: Path, files: dict[str, str], message: str
) -> None:
    """dvc.yaml may have variables of its own, which must not be params of ours."""
    for name, content in files.items():
        (theirs / name).write_text(content)
    before = {path: path.read_bytes() for path in theirs.rglob("*.yaml")}
    with pytest.raises(SettingsError, match="DVC c") as caught:
        plan_init(theirs)
    assert message in str(caught.value)
    assert {path: path.read_bytes() for path in theirs.rglob("*.yaml")} == before


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(SettingsError, match=f"{tmp_path}/f is a file: expected a folder\n"):
        plan_init(tmp_path / "f" / "x")


def test_variables_from_outside_the_folder_are_no_fault(theirs: Path) -> None:
    """They cannot be seen where the files are tried out."""
    (theirs / "sub").mkdir()
    (theirs / "more.yaml").write_text("mine: 1\n")
    (theirs / "sub" / "dvc.yaml").write_text("vars: [../more.yaml]\nstages:\n  train:\n    cmd: echo ${mine}\n")
    assert "dvc.yaml" in {change.name for change in plan_init(theirs / "sub").changes}


def test_a_link_to_a_folder_of_a_repository_is_that_folder(theirs: Path, tmp_path: Path) -> None:
    (theirs / "sub").mkdir()
    (tmp_path / "link").symlink_to(theirs / "sub")
    plan = plan_init(tmp_path / "link")
    assert plan.commands == ()
    assert plan == plan_init(theirs / "sub")


def test_links_to_files_stay_links(theirs: Path) -> None:
    (theirs / "params.yaml").rename(theirs / "shared.yaml")
    (theirs / "params.yaml").symlink_to("shared.yaml")
    plan_init(theirs).apply()
    assert (theirs / "params.yaml").is_symlink()
    assert load_settings(theirs / "shared.yaml", {}).data.seq_length == 64


# A folder of its own


def test_in_a_folder_of_a_dvc_repository_nothing_outside_is_touched(theirs: Path) -> None:
    before = contents(theirs)
    plan_init(theirs / "drafts/my cache").apply()
    after = contents(theirs)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("drafts/my cache/") for name in after.keys() - before.keys())
    assert not (theirs / "drafts/my cache/.dvc").exists()
    settings = load_settings(theirs / "drafts/my cache/params.yaml", {})
    assert settings.runtime.scratch_dir == "drafts/my cache/.work"
    assert plan_init(theirs / "drafts/my cache").changes == ()


@pytest.mark.dvc
def test_stages_run_in_a_folder_of_their_own(theirs: Path) -> None:
    repository = Repository(theirs / "drafts/cache")
    plan_init(repository.root).apply()
    repository.set_params(data={"seq_length": 32, "limit": 4})
    repository.dvc("repro", "tokenize")
    assert (repository.root / "tokens/tokens.json").exists()
    assert (repository.root / ".work/fingerprints.json").exists()
    assert not (theirs / ".work").exists()
    assert not [
        line for line in git(theirs, "status", "--short", "--untracked-files=all").splitlines() if "work" in line
    ]


# The command


def test_the_command_does_what_it_shows(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(theirs)
    assert main(["init", str(theirs), "--dry-run"]) == 0
    assert "+++ b/dvc.yaml" in capsys.readouterr().out
    assert contents(theirs) == before
    assert main(["init", str(theirs)]) == 0
    assert "dvc.yaml" in capsys.readouterr().out
    assert plan_init(theirs).changes == ()


def test_what_is_shipped_is_in_the_wheel_by_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {name: f"dspark_cache/template/{name}" for name in sorted(TEMPLATE_FILES)}
