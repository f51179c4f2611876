"""DVC misbehaving: what it says, what we detect that it does not, and the commands that mend it.

DVC trusts what it stored: a read-only object of its cache is never hashed again, and a remote is not checked unless
it is told to. Our sizes are checked whenever a cache is opened, our digests whenever it is verified.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dspark_cache import CachedDSparkDataset
from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.verify import verify_cache
from tests.repository import Repository, make_repository, read_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Dvc = Callable[..., "Done"]

pytestmark = pytest.mark.dvc

SMALL: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 64},
    "target": {"layer_ids": [1, 3]},
    "cache": {"shard_size": 2},
    "verify": {"recompute_samples": 0},
}
SHARD = "shard-000001.safetensors"


@dataclass(frozen=True)
class Done:
    """How a dvc command ended, and what it said."""

    code: int
    text: str


DVC_COMMANDS = """
import json, os, sys
from dvc.cli import main

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    folder, said, arguments = json.loads(line)
    os.chdir(folder)
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    code = main(arguments)
    sys.stdout.flush()
    answers.write(f"{code}\\n")
    answers.flush()
"""
"""Runs dvc command lines one after the other: importing dvc takes longer than any of them."""


@pytest.fixture(scope="module")
def dvc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dvc]:
    """Return a function that runs the real dvc in a repository."""
    said = tmp_path_factory.mktemp("dvc") / "said"
    process = subprocess.Popen(
        [sys.executable, "-c", DVC_COMMANDS],
        env=Repository(said.parent).environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    commands, answers = process.stdin, process.stdout

    def run(repository: Repository, *arguments: str) -> Done:
        commands.write(json.dumps([str(repository.root), str(said), arguments]) + "\n")
        commands.flush()
        return Done(int(answers.readline()), said.read_text())

    with process:
        yield run
        commands.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory, dvc: Dvc) -> Repository:
    """A repository with a committed cache that is pushed to a remote beside it."""
    repository = make_repository(tmp_path_factory.mktemp("faults") / "repository", num_rows=6, **SMALL)
    repository.git("init", "--quiet")
    repository.git("config", "user.email", "test@example.invalid")
    repository.git("config", "user.name", "test")
    repository.run()
    assert dvc(repository, "remote", "add", "--default", "storage", "../remote").code == 0
    assert dvc(repository, "commit", "--force").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "first")
    assert dvc(repository, "push").code == 0
    return repository


@pytest.fixture
def repository(reproduced: Repository, tmp_path: Path, dvc: Dvc) -> Repository:
    """A copy with its remote, hard links kept and known to dvc as clean."""
    for name in ("repository", "remote"):
        subprocess.run(["cp", "-a", str(reproduced.root.parent / name), str(tmp_path)], check=True)
    repository = Repository(tmp_path / "repository")
    assert dvc(repository, "status", "--quiet").code == 0
    return repository


def findings(repository: Repository) -> list[str]:
    """Return what our verification finds, up to the bytes."""
    return [str(finding) for finding in verify_cache(CacheFolder(repository.root / "cache"), "bytes").findings]


def object_name(path: Path) -> str:
    """Return where dvc stores a file, relative to its cache or a remote."""
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return f"files/md5/{digest[:2]}/{digest[2:]}"


def folder_object_name(repository: Repository) -> str:
    """Return where dvc stores the list of the files of `cache/`."""
    output, _held_out = read_yaml(repository.root / "dvc.lock")["stages"]["shards"]["outs"]
    return f"files/md5/{output['md5'][:2]}/{output['md5'][2:]}"


def flip(path: Path) -> None:
    """Change one bit and nothing that dvc looks at."""
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    _overwrite(path, bytes(content))


def truncate(path: Path) -> None:
    _overwrite(path, path.read_bytes()[:-100])


def _overwrite(path: Path, content: bytes) -> None:
    status = path.stat()
    path.chmod(0o644)
    path.write_bytes(content)
    path.chmod(status.st_mode & 0o7777)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_ino == status.st_ino


# --- a full disk while dvc commits --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(repository: Repository) -> Iterator[Callable[[int], None]]:
    """Put DVC's cache, without the shards, on a disk of its own; return what gives that disk so many bytes of room."""
    folder = repository.root / ".dvc/cache"
    forget_shards(repository)
    aside = folder.rename(folder.with_name("aside"))
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    subprocess.run(["cp", "-a", f"{aside}/.", str(folder)], check=True)

    def leave(num_bytes: int) -> None:
        used = shutil.disk_usage(folder).used
        subprocess.run(["mount", "-o", f"remount,size={used + num_bytes}", str(folder)], check=True)

    yield leave
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("cache_type", "code", "remedy"),
    [
        ("hardlink,symlink", 255, ("commit", "--force", "shards")),
        pytest.param("copy", 0, ("repro",), marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_while_dvc_commits_leaves_the_output_whole(
    repository: Repository,
    dvc: Dvc,
    small_disk: Callable[[int], None],
    cache_type: str,
    code: int,
    remedy: tuple[str, ...],
) -> None:
    """With copies, DVC's own default, `dvc repro` exits 0 and only `dvc status -q` tells; with links it fails.

    In both cases `cache/` is whole. The operator makes room, removes what DVC left half-copied (`.*.tmp` in its
    cache), and runs `dvc commit -f shards` or `dvc repro`.
    """
    before = repository.digests()
    dvc(repository, "config", "cache.type", cache_type)
    small_disk((repository.root / "cache" / SHARD).stat().st_size + 8192)
    done = dvc(repository, "repro", "--force", "--single-item", "shards")
    assert done.code == code
    assert f"No space left on device: '{repository.root}/cache/shard-" in done.text
    assert dvc(repository, "status", "--quiet").code == 1
    assert repository.digests() == before
    assert findings(repository) == []
    small_disk(1 << 24)
    left = [*(repository.root / ".dvc/cache").rglob(".*.tmp")]
    assert left
    for path in left:
        path.unlink()
    assert dvc(repository, *remedy).code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    shutil.rmtree(repository.root / "cache")
    assert dvc(repository, "checkout").code == 0
    assert repository.digests() == before
    assert findings(repository) == []
    assert len(CachedDSparkDataset(repository.root / "cache")) == 6


# --- dvc killed ---------------------------------------------------------------------------------------------------


KILLED = """
import os, signal, sys

point, removed, link, unlink = sys.argv[1], set(), os.link, os.unlink

def watched_link(source, target, **options):
    link(source, target, **options)
    if point == "storing" and "/cache/shard-" in str(source):
        os.kill(os.getpid(), signal.SIGKILL)

def watched_unlink(path, **options):
    unlink(path, **options)
    if point != "storing" and "/cache/shard-" in str(path):
        if (path in removed) == (point == "linking"):
            os.kill(os.getpid(), signal.SIGKILL)
        removed.add(path)

os.link, os.unlink = watched_link, watched_unlink
from dvc.cli import main
main(sys.argv[2:])
"""
"""Kills dvc when it has just removed an old shard, stored a new one, or removed a new one to link it instead."""


def killed_repro(repository: Repository, point: str) -> None:
    command = [sys.executable, "-c", KILLED, point, "repro", "--force", "--single-item", "shards"]
    done = subprocess.run(
        command, cwd=repository.root, env=repository.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    assert ("Running stage 'shards'" in done.stdout) is (point != "removing")


def forget_shards(repository: Repository) -> None:
    """Remove the shards from DVC's cache, as if they had never been committed."""
    for shard in (repository.root / "cache").glob("shard-*"):
        (repository.root / ".dvc/cache" / object_name(shard)).unlink()


def test_a_repro_killed_while_it_stores_a_shard_leaves_a_cache_that_verifies_and_can_be_committed(
    repository: Repository, dvc: Dvc
) -> None:
    """`dvc status -q` exits 1. The cache verifies, so the operator may run `dvc commit -f shards`."""
    before = repository.digests()
    forget_shards(repository)
    killed_repro(repository, "storing")
    assert dvc(repository, "status", "--quiet").code == 1
    assert findings(repository) == []
    assert dvc(repository, "commit", "--force", "shards").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    shutil.rmtree(repository.root / "cache")
    assert dvc(repository, "checkout").code == 0
    assert repository.digests() == before


@pytest.mark.slow
def test_a_repro_killed_while_it_links_a_committed_shard_is_mended_by_another_repro(
    repository: Repository, dvc: Dvc
) -> None:
    """A committed file is removed and linked from DVC's cache; killed in between, DVC leaves a cache without it.

    The reader refuses that cache by the shard's number, `dvc status -q` exits 1. The operator runs `dvc repro`.
    """
    before = repository.digests()
    killed_repro(repository, "linking")
    assert dvc(repository, "status", "--quiet").code == 1
    with pytest.raises(CacheFormatError, match=r"missing shard indices \[\d\], unexpected shard indices \[\]$"):
        CachedDSparkDataset(repository.root / "cache")
    assert dvc(repository, "repro").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    assert repository.digests() == before


def test_commit_after_a_crash_takes_what_lies_there_and_verify_says_what_is_missing(
    repository: Repository, dvc: Dvc
) -> None:
    """`dvc commit -f` asks nothing: of a cache that DVC was killed while removing, it commits the rest.

    So after a crash the operator runs `dvc repro`, and `dvc commit -f shards` only for a cache that verifies. Once
    committed, `dvc repro` takes the rest for done: `dvc repro -f -s shards` makes the cache anew.
    """
    before = repository.digests()
    killed_repro(repository, "removing")
    assert dvc(repository, "commit", "--force", "shards").code == 0
    assert dvc(repository, "status", "--quiet", "shards").code == 0
    assert any("safetensors: is missing" in finding for finding in findings(repository))
    with pytest.raises(CacheFormatError, match="missing shard indices"):
        CachedDSparkDataset(repository.root / "cache")
    assert dvc(repository, "repro", "--force", "--single-item", "shards").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    assert repository.digests() == before


# --- a bad object in dvc's cache ----------------------------------------------------------------------------------


def test_a_flipped_bit_in_dvc_s_cache_is_seen_by_verify_only_and_pulled_anew(repository: Repository, dvc: Dvc) -> None:
    """DVC calls it clean and hands it out. The operator removes object and file, then runs `dvc pull`.

    `find .dvc/cache -samefile cache/SHARD` (or `readlink`) names the object. Both must go: `dvc pull` fetches only
    what its cache lacks and links only what the workspace lacks.
    """
    before = repository.digests()
    shard = repository.root / "cache" / SHARD
    stored = repository.root / ".dvc/cache" / object_name(shard)
    assert stored.samefile(shard)
    flip(stored)
    assert dvc(repository, "status", "--quiet").code == 0
    shutil.rmtree(repository.root / "cache")
    assert dvc(repository, "checkout").code == 0
    assert dvc(repository, "pull").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    (finding,) = findings(repository)
    assert finding.startswith(f"[bytes] {SHARD}: sha256 is ")
    CachedDSparkDataset(repository.root / "cache")
    stored.unlink()
    assert dvc(repository, "pull").code == 0
    assert findings(repository) == [finding]
    shard.unlink()
    assert dvc(repository, "pull").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    assert repository.digests() == before


def test_a_truncated_object_in_dvc_s_cache_is_refused_at_open_and_made_anew(repository: Repository, dvc: Dvc) -> None:
    """As long as DVC's cache has the bad object, it even replaces a good shard by it when that is committed.

    The operator removes the object and runs `dvc repro -f -s shards`; no remote is needed.
    """
    before = repository.digests()
    shard = repository.root / "cache" / SHARD
    stored = repository.root / ".dvc/cache" / object_name(shard)
    truncate(stored)
    message = rf"{SHARD} has {stored.stat().st_size} bytes, its header asks for {stored.stat().st_size + 100}$"
    with pytest.raises(CacheFormatError, match=message):
        CachedDSparkDataset(repository.root / "cache")
    repository.run("shards")
    assert repository.digests() == before
    assert dvc(repository, "commit", "--force", "shards").code == 0
    with pytest.raises(CacheFormatError, match=message):
        CachedDSparkDataset(repository.root / "cache")
    assert findings(repository)[0].startswith(f"[files] {SHARD}: has {stored.stat().st_size} bytes, provenance.json ")
    stored.unlink()
    assert dvc(repository, "repro", "--force", "--single-item", "shards").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    assert repository.digests() == before


# --- a bad object in a remote -------------------------------------------------------------------------------------


@pytest.fixture
def clone(repository: Repository, tmp_path: Path) -> Repository:
    """A clone that has nothing but git and the remote."""
    subprocess.run(["git", "clone", "--quiet", str(repository.root), str(tmp_path / "clone")], check=True)
    return Repository(tmp_path / "clone")


def push_again(repository: Repository, dvc: Dvc, bad: Path, remote: Path) -> None:
    """Mend a remote from a machine whose cache verifies.

    `dvc push` looks whether the remote has the list of a folder's files and takes the files for granted: without
    removing the list too, it pushes nothing.
    """
    assert findings(repository) == []
    bad.unlink(missing_ok=True)
    assert dvc(repository, "push") == Done(0, "Everything is up to date.\n")
    assert not bad.exists()
    (remote / folder_object_name(repository)).unlink()
    assert dvc(repository, "push") == Done(0, "2 files pushed\n")
    assert object_name(repository.root / "cache" / SHARD).endswith(bad.name)
    assert bad.exists()


@pytest.mark.parametrize("damage", [flip, truncate])
def test_a_bad_object_of_a_remote_is_pulled_without_a_word_and_found_by_us(
    repository: Repository, clone: Repository, dvc: Dvc, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """`dvc pull` and `dvc status -q` exit 0; a short shard is refused at open, a flipped bit found by verify.

    The operator removes object and list from the remote and pushes from a machine whose cache verifies; here, object
    and file are removed and pulled again.
    """
    name = object_name(repository.root / "cache" / SHARD)
    damage(tmp_path / "remote" / name)
    assert dvc(clone, "pull").code == 0
    assert dvc(clone, "status", "--quiet").code == 0
    (finding,) = findings(clone)
    if damage is truncate:
        assert finding.startswith(f"[files] {SHARD}: has ")
        with pytest.raises(CacheFormatError, match=rf"cache/{SHARD} has \d+ bytes, its header asks for \d+$"):
            CachedDSparkDataset(clone.root / "cache")
    else:
        assert finding.startswith(f"[bytes] {SHARD}: sha256 is ")
        assert len(CachedDSparkDataset(clone.root / "cache")) == 6
    push_again(repository, dvc, tmp_path / "remote" / name, tmp_path / "remote")
    (clone.root / ".dvc/cache" / name).unlink()
    (clone.root / "cache" / SHARD).unlink()
    assert dvc(clone, "pull").code == 0
    assert dvc(clone, "status", "--quiet").code == 0
    assert clone.digests("cache") == repository.digests("cache")


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_bad_object_of_a_remote_that_is_verified_and_a_missing_one_fail_the_pull(
    repository: Repository, clone: Repository, dvc: Dvc, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    """With `dvc remote modify storage verify true`, as after a missing object, there is no cache at all.

    Once the remote is mended, `dvc pull` alone does it.
    """
    name = object_name(repository.root / "cache" / SHARD)
    damage(tmp_path / "remote" / name)
    if damage is not Path.unlink:
        assert dvc(clone, "remote", "modify", "storage", "verify", "true").code == 0
    done = dvc(clone, "pull")
    assert done.code == 1
    assert "failed to pull data from the cloud" in done.text
    with pytest.raises(CacheNotFoundError, match=r"^no DSpark cache in .*manifest\.json does not exist"):
        CachedDSparkDataset(clone.root / "cache")
    push_again(repository, dvc, tmp_path / "remote" / name, tmp_path / "remote")
    assert dvc(clone, "pull").code == 0
    assert dvc(clone, "status", "--quiet").code == 0
    assert clone.digests("cache") == repository.digests("cache")


# --- another revision is checked out while a dataset is open ------------------------------------------------------


def test_dvc_checkout_of_another_revision_is_noticed_by_an_open_dataset(repository: Repository, dvc: Dvc) -> None:
    """The manifests of both revisions are equal, and so are the sizes of all shards.

    Shards that are open go on giving the old samples, others are refused. The operator opens the cache again.
    """
    folder = repository.root / "cache"
    first = list(CachedDSparkDataset(folder))  # type: ignore[call-overload]
    manifest = (folder / "manifest.json").read_bytes()
    repository.set_params(data={"shuffle": True})
    repository.run("tokenize", "capture", "shards", "verify")
    assert dvc(repository, "commit", "--force").code == 0
    repository.git("commit", "--quiet", "--all", "--message", "second")
    assert (folder / "manifest.json").read_bytes() == manifest
    dataset = CachedDSparkDataset(folder)
    second = [dataset[index] for index in range(4)]
    repository.git("checkout", "--quiet", "HEAD~1")
    assert dvc(repository, "checkout").code == 0
    assert dvc(repository, "status", "--quiet").code == 0
    assert (folder / "manifest.json").read_bytes() == manifest
    assert all(_equal(dataset[index], second[index]) for index in range(4))
    assert not _equal(first[0], second[0])
    with pytest.raises(CacheFormatError, match=r"cache was replaced while it was in use: .*; open the cache again$"):
        dataset[4]
    assert all(
        _equal(*pair)
        for pair in zip(CachedDSparkDataset(folder), first, strict=True)  # type: ignore[call-overload]
    )


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
