"""A repository of the pipeline in a temporary folder, driven in process, by subprocess, or by the real dvc."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

if TYPE_CHECKING:
    import signal

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "data" / "golden"
STAGES = ("tokenize", "capture", "shards", "verify")
OUTPUTS = ("tokens", "features.json", "cache", "reports/verify.json", "reports/verify.html", "reports/plots")


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Repository:
    root: Path

    def set_params(self, **sections: dict[str, Any]) -> None:
        """Change params as a user's editor would: only the given keys."""
        path = self.root / "params.yaml"
        params = read_yaml(path)
        for section, values in sections.items():
            params[section].update(values)
        YAML().dump(params, path)

    def run(self, *stages: str) -> None:
        """Run stages in this process; errors come out as they are."""
        modules = {name: __import__(f"stages.{name}", fromlist=["main"]) for name in stages or STAGES}
        with contextlib.chdir(self.root):
            for module in modules.values():
                module.main()

    def start(self, stage: str, **environment: str) -> subprocess.Popen[str]:
        """Start a stage as dvc would: a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", f"stages.{stage}"],
            cwd=self.root,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stage(self, stage: str, **environment: str) -> subprocess.CompletedProcess[str]:
        process = self.start(stage, **environment)
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def environment(self, **more: str) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, **more}

    def dvc(self, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "dvc", *arguments],
            cwd=self.root,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=self.root, env=self.environment(), check=True, capture_output=True)

    def stale_stages(self) -> list[str]:
        """Return the stages whose own inputs or params differ from dvc.lock, as dvc sees it.

        Asks dvc in this process, as its command line does: starting it would take most of the time.
        """
        from dvc.repo import Repo

        with contextlib.chdir(self.root), Repo() as repo:
            status = repo.status()
        return [name for name in STAGES if any(change for change in status.get(name, []) if not _only_upstream(change))]

    def digests(self, *names: str) -> dict[str, str]:
        """Return the sha256 of every file of the outputs."""
        found = {}
        for name in names or OUTPUTS:
            path = self.root / name
            files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
            for file in files:
                found[file.relative_to(self.root).as_posix()] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found

    def scratch_folders(self) -> list[Path]:
        return sorted((self.root / ".work").glob("capture-*"))

    def blocks(self) -> dict[str, int]:
        """Return each block file in scratch with the time it was put in place, in nanoseconds."""
        return {
            str(path.relative_to(self.root)): path.stat().st_mtime_ns
            for folder in self.scratch_folders()
            for path in folder.glob("block-*.safetensors")
        }


def _only_upstream(change: Any) -> bool:
    """Say whether a change is only an output that an earlier stage will make again."""
    return change == "changed checksum" or (isinstance(change, dict) and not change)


def make_repository(root: Path, *, num_rows: int | None = None, **sections: dict[str, Any]) -> Repository:
    """Copy what a clone of this repository has; keep the first `num_rows` conversations."""
    root.mkdir(parents=True)
    for name in ("stages", "inputs", ".dvc"):
        shutil.copytree(
            ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "tmp", "cache", "*.py[co]")
        )
    shutil.copytree(ROOT / "stages", root / "stages", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, root / name)
    if num_rows is not None:
        data = root / "inputs/data/conversations.jsonl"
        data.write_text("".join(data.read_text().splitlines(keepends=True)[:num_rows]))
    repository = Repository(root)
    repository.set_params(**sections)
    return repository


def kill(process: subprocess.Popen[str], how: signal.Signals) -> tuple[int, str]:
    """Send a signal and return the exit code and what was said on stderr."""
    process.send_signal(how)
    _, err = process.communicate()
    return process.returncode, err
