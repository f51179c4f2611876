"""What `dspark-cache doctor` finds in a repository that is set up well, and in one where one thing is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import chdir
from typing import TYPE_CHECKING

import pytest

from dspark_cache.cli import main
from dspark_cache.doctor import examine
from dspark_cache.errors import SettingsError
from dspark_cache.stage import open_stage
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.dvc

REMOTE = "['remote \"box\"']\n    url = /box\n    verify = true\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    params = {"data": {"seq_length": 64}, "target": {"layer_ids": [1, 3]}}
    repository = make_repository(tmp_path_factory.mktemp("doctor") / "repository", num_rows=4, **params)
    repository.git("init", "--quiet")
    config = repository.root / ".dvc/config"
    config.write_text(config.read_text().replace("[core]\n", "[core]\n    remote = box\n") + REMOTE)
    repository.run("tokenize")
    return repository


@pytest.fixture
def repository(made: Repository, tmp_path: Path) -> Repository:
    shutil.copytree(made.root, tmp_path / "repository", symlinks=True)
    return Repository(tmp_path / "repository")


def remedies(repository: Repository) -> dict[str, str]:
    """Return what is to be changed, by subject."""
    with chdir(repository.root):
        return {item.subject: item.remedy for item in examine(open_stage("verify")) if item.remedy}


def found(repository: Repository, subject: str) -> list[str]:
    with chdir(repository.root):
        return [item.found for item in examine(open_stage("verify")) if item.subject == subject]


def edit(path: str, old: str, new: str) -> Callable[[Repository], None]:
    def change(repository: Repository) -> None:
        file = repository.root / path
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


def lock(name: str) -> Callable[[Repository], None]:
    def change(repository: Repository) -> None:
        path = repository.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"host": "gone", "pid": 1}))

    return change


def test_a_repository_that_is_set_up_well_needs_no_change(repository: Repository) -> None:
    assert remedies(repository) == {}
    assert found(repository, "cache.type") == ["hardlink: outputs are links, held once"]
    assert found(repository, "remote box") == ["what is pulled is hashed"]


FAULTS: dict[str, tuple[Callable[[Repository], None], str, str]] = {
    "reflink first": (
        edit(".dvc/config", "hardlink,symlink", "reflink,hardlink"),
        "cache.type",
        "dvc config cache.type hardlink,symlink",
    ),
    "no link type": (
        edit(".dvc/config", 'type = "hardlink,symlink"', ""),
        "cache.type",
        "dvc config cache.type hardlink,symlink",
    ),
    "no remote": (
        edit(".dvc/config", REMOTE, ""),
        "remote",
        "dvc remote add --default NAME URL && dvc remote modify NAME verify true",
    ),
    "no default remote": (edit(".dvc/config", "remote = box", ""), "remote", "dvc remote default NAME"),
    "unverified remote": (
        edit(".dvc/config", "    verify = true\n", ""),
        "remote box",
        "dvc remote modify box verify true",
    ),
    "scratch seen by DVC": (edit(".dvcignore", ".work/", ""), ".dvcignore", "add the line .work/ to .dvcignore"),
    "scratch seen by git": (edit(".gitignore", "/.work\n", ""), ".gitignore", "add the line .work/ to .gitignore"),
    "lock of another host on an output": (
        lock(".cache.building.lock"),
        "lock",
        "if that host is gone for good: dspark-cache clean --break-lock",
    ),
    "lock of another host on scratch": (
        lock(".work/capture-0123456789abcdef/lock"),
        "lock",
        "if that host is gone for good: dspark-cache clean --break-lock",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_alone_with_its_remedy(repository: Repository, name: str) -> None:
    change, subject, remedy = FAULTS[name]
    change(repository)
    assert remedies(repository) == {subject: remedy}


def test_a_site_cache_of_another_user_is_found(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, as whom these tests may run, is never refused."""
    monkeypatch.setattr("os.access", lambda *_: False)
    assert remedies(repository) == {
        "site cache": "set DVC_SITE_CACHE_DIR, or dvc config --local core.site_cache_dir, to a folder of yours"
    }


def test_a_disk_too_small_for_the_run_is_found(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    [line] = found(repository, "free disk")
    assert "GiB for states in scratch" in line
    assert "GiB for cache/" in line
    usage = shutil.disk_usage(repository.root)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    assert remedies(repository) == {
        "free disk": "make room, set runtime.scratch_dir to another disk, or use cache.layout: ragged"
    }


def test_disks_are_counted_apart(repository: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        repository.set_params(runtime={"scratch_dir": str(folder / "scratch")})
        assert [f"at {folder}," in line for line in found(repository, "free disk")] == [True, False]
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_without_tokens_the_disk_is_not_compared(repository: Repository) -> None:
    shutil.rmtree(repository.root / "tokens")
    assert found(repository, "free disk") == ["not compared: no tokens in tokens: run dvc repro tokenize"]
    assert remedies(repository) == {}


def test_what_is_captured_and_published_needs_no_more_room(repository: Repository) -> None:
    repository.run("capture", "shards")
    [line] = found(repository, "free disk")
    assert line.endswith("still to be written: 0.000 GiB for states in scratch")


def test_outside_of_a_dvc_repository_it_is_refused(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository", num_rows=4)
    shutil.rmtree(repository.root / ".dvc")
    with chdir(repository.root), pytest.raises(SettingsError, match=r"repository cannot be opened as a DVC repository"):
        examine(open_stage("verify"))


def test_the_command_prints_and_exits_by_what_it_found(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    with chdir(repository.root):
        assert main(["doctor"]) == 0
        assert "ok      cache.type: hardlink" in capsys.readouterr().out
        edit(".dvc/config", "    verify = true\n", "")(repository)
        assert main(["doctor"]) == 1
        out, err = capsys.readouterr()
        assert (
            "change  remote box: what is pulled is trusted unread\n        dvc remote modify box verify true\n" in out
        )
        assert err.startswith("error: 1 of ")
        assert main(["doctor", "--json"]) == 1
        assert {item["subject"] for item in json.loads(capsys.readouterr().out)} >= {"cache.type", "remote box"}
