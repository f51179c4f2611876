"""The wheel, from the checkout and from the sdist: what is in it, and what a user gets who installs it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement

from dspark_cache.init_repository import TEMPLATE_FILES
from dspark_cache.schema import VERSION
from tests.repository import ROOT, read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
NAME = f"dspark_cache-{VERSION}"


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run a command, with `path` before all others, and return what it prints."""
    first = f"{path}:" if path else ""
    environment = {**os.environ, "PATH": f"{first}{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, folder: Path) -> Path:
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, source, cwd=folder)
    [built] = folder.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@dataclass(frozen=True)
class Installed:
    """A virtual environment that has the wheel, and other packages by their folder."""

    folder: Path

    def run(self, *command: str | Path, cwd: Path) -> str:
        """Run a command of it, or one of the tests' environment that it does not have."""
        return run(*command, cwd=cwd, path=self.folder / "bin")

    def python(self, code: str, cwd: Path) -> str:
        return self.run("python", "-c", code, cwd=cwd)


def install(wheel: Path, folder: Path, packages: Path) -> Installed:
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin/python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel, cwd=folder.parent)
    [site_packages] = folder.glob("lib/python*/site-packages")
    # A folder named in a .pth file is searched, but .pth files in it, as an editable install has, are not read.
    (site_packages / "packages.pth").write_text(f"{packages}\n")
    return Installed(folder)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel beside all packages of the tests' environment."""
    return install(wheel, tmp_path_factory.mktemp("installed") / "venv", SITE_PACKAGES)


@pytest.fixture(scope="module")
def minimal(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel with what its metadata requires, and what that requires, and no more."""
    base = tmp_path_factory.mktemp("minimal")
    packages = base / "packages"
    packages.mkdir()
    for name in required("dspark-cache"):
        for entry in top_level(name):
            if (SITE_PACKAGES / entry).exists() and not (packages / entry).exists():
                (packages / entry).symlink_to(SITE_PACKAGES / entry)
    return install(wheel, base / "venv", packages)


def required(name: str) -> set[str]:
    """Return the distributions that one requires without extras, directly and through others."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in importlib.metadata.distribution(waiting.pop()).requires or []:
            requirement = Requirement(text)
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if needed and requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


def top_level(name: str) -> set[str]:
    """Return files and folders of a distribution directly in site-packages."""
    files = importlib.metadata.distribution(name).files or []
    return {file.parts[0] for file in files} - {"..", "__pycache__"}


# What is in it


def test_the_wheel_holds_the_package_and_what_init_puts_into_repositories(wheel: Path) -> None:
    package = [path for path in (ROOT / "dspark_cache").iterdir() if path.is_file()]
    metadata = ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE", "RECORD")
    with zipfile.ZipFile(wheel) as archive:
        assert sorted(archive.namelist()) == sorted(
            [
                *(f"dspark_cache/{path.name}" for path in package),
                *(f"dspark_cache/template/{name}" for name in TEMPLATE_FILES),
                *(f"{NAME}.dist-info/{name}" for name in metadata),
            ]
        )
        for name in TEMPLATE_FILES:
            assert archive.read(f"dspark_cache/template/{name}") == (ROOT / name).read_bytes(), name
    assert {path.suffix for path in package} - {".py"} == {".jinja", ".typed"}


def test_the_wheel_of_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    for name in ("sdist", "source", "wheel"):
        (tmp_path / name).mkdir()
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    again = build("wheel", tmp_path / "source" / NAME, tmp_path / "wheel")
    assert again.read_bytes() == wheel.read_bytes()


# What a user gets


def test_it_is_the_wheel_that_is_imported_and_not_the_checkout(installed: Installed, minimal: Installed) -> None:
    for place in (installed, minimal):
        found = place.python("import dspark_cache; print(dspark_cache.__file__)", cwd=place.folder)
        assert Path(found.strip()).is_relative_to(place.folder)


READ = """
from dspark_cache import build_cached_dspark_dataloader
[batch, *_] = build_cached_dspark_dataloader("cache", 2, False)
print({key: list(value.shape) for key, value in batch.items()})
"""


def set_params(folder: Path) -> None:
    """Make the run small, as a user does: by editing the text."""
    path = folder / "params.yaml"
    text = re.sub(r"recompute_samples: \d+", "recompute_samples: 0", path.read_text())
    text = re.sub(r"seq_length: \d+", "seq_length: 32", text)
    path.write_text(re.sub(r"limit: null", "limit: 4", re.sub(r"layer_ids: null", "layer_ids: [1]", text)))


@pytest.mark.dvc
def test_an_empty_folder_becomes_a_repository_that_reproduces(installed: Installed, tmp_path: Path) -> None:
    assert "+++ b/dvc.yaml" in installed.run("dspark-cache", "init", "--dry-run", cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
    installed.run("dspark-cache", "init", cwd=tmp_path)
    set_params(tmp_path)
    installed.run("dvc", "repro", cwd=tmp_path)
    installed.run("dvc", "status", "-q", cwd=tmp_path)
    assert "'input_ids': [2, 32]" in installed.python(READ, cwd=tmp_path)
    report = json.loads((tmp_path / "reports/verify.json").read_text())
    assert report["num_findings"] == 0


@pytest.mark.dvc
def test_a_repository_with_a_pipeline_of_its_own_reproduces_that_and_ours(installed: Installed, tmp_path: Path) -> None:
    installed.run("git", "init", "--quiet", cwd=tmp_path)
    installed.run("dvc", "init", "--quiet", cwd=tmp_path)
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n    count:   # theirs\n        cmd: wc -l < features.json > lines.txt\n"
        "        deps: [features.json]\n        params: [count.by]\n        outs:\n        - lines.txt\n"
    )
    (tmp_path / "params.yaml").write_text("count: {by: lines}   # theirs\nverify:\n    level: headers   # theirs\n")
    before = (tmp_path / ".dvc/config").read_text()
    installed.run("dspark-cache", "init", cwd=tmp_path)
    set_params(tmp_path)
    installed.run("dvc", "repro", "count", cwd=tmp_path)  # theirs, and ours up to what it depends on
    installed.run("dvc", "status", "-q", "count", "capture", "tokenize", cwd=tmp_path)
    assert set(read_yaml(tmp_path / "dvc.lock")["stages"]) == {"count", "tokenize", "capture"}
    assert (tmp_path / "lines.txt").exists()
    assert (tmp_path / ".dvc/config").read_text() == before


def test_a_training_machine_needs_torch_and_safetensors_only(
    minimal: Installed, make_cache: Callable[..., Path], tmp_path: Path
) -> None:
    cache = make_cache(5, 2)
    cache.rename(tmp_path / "cache")
    assert "'input_ids': [2, 8]" in minimal.python(READ, cwd=tmp_path)
    assert "5" in minimal.run("dspark-cache", "inspect", "cache", cwd=tmp_path)
    assert "sound" in minimal.run("dspark-cache", "verify", "cache", cwd=tmp_path)
    for name in ("transformers", "omegaconf", "ruamel.yaml", "dvc", "tqdm"):
        found = minimal.python(
            f"import importlib.util as u\ntry: print(u.find_spec('{name}'))\nexcept ImportError: print(None)",
            cwd=tmp_path,
        )
        assert found == "None\n", name
