"""`dspark-cache doctor`: is this repository set up so that a long run ends well? It changes nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.blocks import BlockStore, scratch_folders
from dspark_cache.errors import DsparkCacheError, SettingsError
from dspark_cache.estimate import cache_bytes, samples_of_tokens, scratch_bytes, target_shape
from dspark_cache.files import lock_host, nearest_existing
from dspark_cache.ledger import read_ledger
from dspark_cache.schema import GIB
from dspark_cache.stage import CACHE_PATH, LEDGER_PATH, TOKENS_PATH, StageContext, writer_locks
from dspark_cache.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD_LINKS = ("hardlink", "symlink")
"""Link types with which the disk holds an output once; the first entry of `cache.type` decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that was looked at.

    Attributes:
        subject: What.
        found: What was found.
        remedy: What to do; empty where nothing is to be done.
    """

    subject: str
    found: str
    remedy: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the three texts."""
        return {"subject": self.subject, "found": self.found, "remedy": self.remedy}


def examine(stage: StageContext) -> list[Advice]:
    """Look at the repository of `stage`.

    Raises:
        SettingsError: There is no DVC repository.
    """
    with open_repo(stage.root) as repo:
        found = [
            *_links(repo, stage.root),
            *_remotes(repo),
            *_site_cache(Path(repo.site_cache_dir)),
            *_scratch(repo, stage),
        ]
        return [*found, *_locks(stage), *_disks(stage, Path(repo.cache.local.path))]


def open_repo(root: Path) -> Any:
    """Open the DVC repository of `root`; to be closed, as a context.

    Raises:
        SettingsError: There is none.
    """
    from dvc.exceptions import DvcException
    from dvc.repo import Repo
    from scmrepo.exceptions import SCMError

    try:
        return Repo(str(root))
    except (DvcException, SCMError) as error:
        raise SettingsError(f"{root.resolve()} cannot be opened as a DVC repository: {error}") from error


def _first_link_type(repo: Any) -> str:
    kinds = repo.config["cache"].get("type") or []
    return kinds[0] if kinds else "reflink (DVC's default), else copy"


def holds_outputs_twice(stage: StageContext) -> bool | None:
    """Say whether the disk holds an output of a stage and DVC's copy of it; None where there is no DVC repository."""
    try:
        with open_repo(stage.root) as repo:
            is_elsewhere = _device(Path(repo.cache.local.path)) != _device(stage.root)
            return _first_link_type(repo) not in GOOD_LINKS or is_elsewhere
    except SettingsError:
        return None


def advise_links(root: Path) -> list[Advice]:
    """Look at how the DVC repository of `root` links outputs to its cache.

    Raises:
        SettingsError: There is no DVC repository.
    """
    with open_repo(root) as repo:
        return list(_links(repo, root))


def _links(repo: Any, root: Path) -> Iterator[Advice]:
    first = _first_link_type(repo)
    remedy = "" if first in GOOD_LINKS else "dvc config cache.type hardlink,symlink"
    what = "outputs are links, held once" if first in GOOD_LINKS else "without reflinks the disk holds outputs twice"
    yield Advice(subject="cache.type", found=f"{first}: {what}", remedy=remedy)
    store = Path(repo.cache.local.path)
    if first == "hardlink" and _device(store) != _device(root):
        yield Advice(
            subject="cache.dir",
            found=f"{store} is on another file system: DVC copies outputs there and leaves symlinks",
        )


def _device(path: Path) -> int:
    """Return the file system that a path is on, or will be on."""
    return nearest_existing(path).stat().st_dev


def _remotes(repo: Any) -> Iterator[Advice]:
    remotes, default = repo.config["remote"], repo.config["core"].get("remote")
    if not remotes:
        yield Advice(
            subject="remote",
            found="none: there is nowhere to push to",
            remedy="dvc remote add --default NAME URL && dvc remote modify NAME verify true",
        )
    elif not default:
        yield Advice(subject="remote", found=f"{sorted(remotes)}, none is default", remedy="dvc remote default NAME")
    for name, options in sorted(remotes.items()):
        verifies = bool(options.get("verify"))
        yield Advice(
            subject=f"remote {name}",
            found="what is pulled is hashed" if verifies else "what is pulled is trusted unread",
            remedy="" if verifies else f"dvc remote modify {name} verify true",
        )


def _site_cache(folder: Path) -> Iterator[Advice]:
    """DVC keeps locks and its index of files there, for all users of the machine."""
    can_write = os.access(folder, os.W_OK | os.X_OK)
    yield Advice(
        subject="site cache",
        found=f"{folder} is {'writable' if can_write else 'not writable by this user: DVC will fail or hash again'}",
        remedy=""
        if can_write
        else "set DVC_SITE_CACHE_DIR, or dvc config --local core.site_cache_dir, to a folder of yours",
    )


def _scratch(repo: Any, stage: StageContext) -> Iterator[Advice]:
    scratch = stage.scratch.resolve()
    if not scratch.is_relative_to(stage.root.resolve()):
        yield Advice(subject="runtime.scratch_dir", found=f"{scratch}, outside the repository")
        return
    name = scratch.relative_to(stage.root.resolve()).as_posix()
    ignored = {
        ".dvcignore": repo.dvcignore.is_ignored(repo.fs, str(scratch / "x"), ignore_subrepos=False),
        ".gitignore": _git_ignores(stage.root, f"{name}/x"),
    }
    for file, is_ignored in ignored.items():
        yield Advice(
            subject=file,
            found=f"{'lists' if is_ignored else 'does not list'} scratch, {name}/",
            remedy="" if is_ignored else f"add the line {name}/ to {file}",
        )


def _git_ignores(root: Path, name: str) -> bool:
    """Say whether git ignores a path; without git nobody can commit it."""
    if shutil.which("git") is None:
        return True
    done = subprocess.run(["git", "check-ignore", "--quiet", name], cwd=root, check=False, capture_output=True)
    return done.returncode in (0, 128)  # 128: no git repository


def _locks(stage: StageContext) -> Iterator[Advice]:
    """Find locks whose holder is another host: nobody takes them over by himself."""
    for lock in writer_locks(stage.root, stage.scratch):
        host = lock_host(lock)
        if host not in (None, socket.gethostname()):
            yield Advice(
                subject="lock",
                found=f"{lock} is held by a process on {host}",
                remedy="if that host is gone for good: dspark-cache clean --break-lock",
            )


def _disks(stage: StageContext, store: Path) -> Iterator[Advice]:
    """Compare free disk with what the next run will write."""
    settings = stage.settings
    try:
        samples, target = samples_of_tokens(Tokens(stage.root / TOKENS_PATH)), target_shape(stage)
        form = (settings.cache.layout, settings.cache.dtype)
        cache = cache_bytes(samples, target, settings.cache, form, settings.data.eval_samples)
    except DsparkCacheError as error:
        yield Advice(subject="free disk", found=f"not compared: {error}")
        return
    missing = max(0, scratch_bytes(samples, target) - _captured_bytes(stage))
    needs = [(stage.scratch, missing, "states in scratch")]
    if not (stage.root / CACHE_PATH).exists():
        needs.append((stage.root, cache.held, "cache/"))
        if _device(store) != _device(stage.root):
            needs.append((store, cache.total, "DVC's own copy of cache/"))
    by_device: dict[int, list[tuple[Path, int, str]]] = {}
    for need in needs:
        by_device.setdefault(_device(need[0]), []).append(need)
    for group in by_device.values():
        yield _disk(group)


def _disk(group: list[tuple[Path, int, str]]) -> Advice:
    there = nearest_existing(group[0][0])
    free, needed = shutil.disk_usage(there).free, sum(size for _, size, _ in group)
    listed = ", ".join(f"{size / GIB:.3f} GiB for {what}" for _, size, what in group)
    return Advice(
        subject="free disk",
        found=f"{free / GIB:.3f} GiB at {there}, still to be written: {listed}",
        remedy=""
        if free > needed
        else "make room, set runtime.scratch_dir to another disk, or use cache.layout: ragged",
    )


def _captured_bytes(stage: StageContext) -> int:
    """Return the bytes of the blocks that the current ledger uses; without a ledger nothing is known to be there."""
    try:
        ledger = read_ledger(stage.root / LEDGER_PATH)
    except DsparkCacheError:
        return 0
    folder = BlockStore(stage.scratch, ledger.identity).folder
    return dict(scratch_folders(stage.scratch)).get(folder, 0)
