"""Stages and conversions killed, signalled, started twice, without power or disk, at every point that changes a file.

See `fault_layer` for what a point is and what a power loss leaves, `crash_sweep` for what must hold afterwards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.caches import make_ragged, record_files
from tests.crash_server import STAGES, CrashServer
from tests.crash_sweep import OUTPUTS, Sweep, copy_tree, digests
from tests.fault_layer import WRITES
from tests.repository import ROOT, Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conftest import Tally
    from tests.fault_layer import Point

SWEPT: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 24},
    "target": {"layer_ids": [1, 3], "block_bytes": 1},
    "cache": {"shard_size": 2},
    "verify": {"recompute_samples": 0},
}
SCENARIOS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any]]] = {
    "tokenize": ("tokenize", None, {}),
    "capture": ("capture", None, {}),
    "shards over an earlier cache": ("shards", {"shard_size": 3}, {"data": {"eval_samples": 1}}),
    "shards": ("shards", None, {}),
    "ragged shards": (
        "shards",
        None,
        {"cache": {"layout": "ragged", "shard_bytes": 1}, "data": {"eval_samples": 1}},
    ),
    "tokenize over earlier tokens": ("tokenize", {}, {}),
}
"""Name to the stage, the section `cache` of an output that is there before (None: there is none), and params."""
CONVERSIONS: dict[str, tuple[str | None, str]] = {
    "padded to ragged fp8 over an earlier cache": (
        "convert inputs/padded cache --jobs 1",
        "convert inputs/padded cache --jobs 1 --layout ragged --dtype fp8_e4m3 --shard-bytes 1",
    ),
    "ragged to padded": (None, "convert inputs/ragged cache --jobs 1 --layout padded --shard-size 2"),
}
"""Name to the command that made the cache that is there before (None: there is none), and the one that is swept."""
SHORT_CONVERSION = "padded to ragged fp8 over an earlier cache"
SHORT = ("capture", "shards over an earlier cache")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashServer]:
    warm = make_repository(tmp_path_factory.mktemp("warm") / "repository", num_rows=3, **SWEPT)
    with CrashServer(warm.root) as server:
        yield server


@pytest.fixture
def make_sweep(server: CrashServer, make_cache: Callable[..., Path], tmp_path: Path) -> Callable[[str], Sweep]:
    def make(name: str) -> Sweep:
        before, undisturbed = tmp_path / "before", tmp_path / "undisturbed"
        if name in CONVERSIONS:
            command = prepare_conversion(server, make_cache, undisturbed, name)
        else:
            command = prepare_stage(server, undisturbed, name)
        copy_tree(undisturbed, before)
        run(server, undisturbed, command)
        (tmp_path / "sweep").mkdir()
        return Sweep(server, command, before, undisturbed, tmp_path / "sweep")

    return make


def prepare_stage(server: CrashServer, root: Path, name: str) -> str:
    """Make a repository in which the stage is the next to run; return the stage."""
    stage, earlier, params = SCENARIOS[name]
    repository = make_repository(root, num_rows=3, **SWEPT)
    for each in STAGES[: STAGES.index(stage)]:
        run(server, root, each)
    if earlier is not None:
        repository.set_params(cache=earlier)
        run(server, root, stage)
        repository.set_params(cache=SWEPT["cache"])
    repository.set_params(**params)
    return stage


def prepare_conversion(server: CrashServer, make_cache: Callable[..., Path], root: Path, name: str) -> str:
    """Make a folder with the sources of conversions; return the command."""
    earlier, command = CONVERSIONS[name]
    padded = make_cache(3, 2)
    for form, cache in (("padded", padded), ("ragged", make_ragged(padded, [1, 2]))):
        record_files(cache)
        shutil.copytree(cache, root / "inputs" / form)
    if earlier is not None:
        run(server, root, earlier)
    return command


def run(server: CrashServer, root: Path, command: str, **environment: str) -> None:
    """Run a command that nothing disturbs."""
    with TemporaryDirectory(dir=root.parent) as work:
        code = server.run(root, command, Path(work), environment=environment)
        assert code == 0, Path(work, "stderr").read_text()


def report(sweep: Sweep, tally: Tally) -> None:
    """Count what was done, and fail on any loss."""
    for name, number in {**sweep.counts, "losses": len(sweep.losses)}.items():
        tally(name, number)
    assert not sweep.losses, "\n".join(sweep.losses[:20])


@pytest.mark.parametrize("name", SHORT)
def test_nothing_is_lost_wherever_a_stage_is_killed_or_fails(
    make_sweep: Callable[[str], Sweep], name: str, tally: Tally
) -> None:
    """Killed at each line of the library and kind of file; signalled and failed at each line."""
    sweep = make_sweep(name)
    every, lines = sweep.first_of_each("call", "site", "kind"), sweep.first_of_each("call", "site")
    sweep.lose_power_after_the_end()
    sweep.kill(every)
    sweep.signal(lines[::2], "SIGTERM")
    sweep.signal(lines[1::2], "SIGINT")
    sweep.fail(lines[::3], "ENOSPC")
    sweep.fail(lines[1::3], "EIO")
    sweep.fail(lines[2::3], "EACCES")
    sweep.start_second(first_and_last_write(sweep), sweep.command)
    if sweep.command == "shards":
        sweep.start_second(first_and_last_write(sweep), "capture")
    report(sweep, tally)


def test_nothing_is_lost_wherever_a_conversion_is_killed_or_fails(
    make_sweep: Callable[[str], Sweep], tally: Tally
) -> None:
    """Killed at each line of the library; signalled and failed at some. The last write comes after finished files."""
    sweep = make_sweep(SHORT_CONVERSION)
    lines, writes = sweep.first_of_each("call", "site"), first_and_last_write(sweep)
    renames = [number for number in lines if sweep.points[number].call == "rename"]
    sweep.lose_power_after_the_end()
    sweep.kill([*lines, *writes])
    sweep.signal([*lines[::3], *renames], "SIGINT")
    sweep.fail(lines[1::3], "ENOSPC", "EIO", "EACCES")
    sweep.start_second(writes[1:], sweep.command)
    report(sweep, tally)


def test_a_second_tokenize_is_refused(make_sweep: Callable[[str], Sweep], tally: Tally) -> None:
    """The other stages meet in the folder of the captured states, before they come to their outputs."""
    sweep = make_sweep("tokenize")
    sweep.start_second(first_and_last_write(sweep), sweep.command)
    report(sweep, tally)


LINKING = """
import sys
from pathlib import Path
from dspark_cache.files import link_file
from tests.fault_layer import FaultLayer, Plan

root, work = map(Path, sys.argv[1:])
layer = FaultLayer(root, work / "contents", Plan(point=-1, survivors=str(work)))
layer.install()
assert link_file(root / "file", root / "link")
layer.finish(work / "points.json")
"""


def test_a_second_name_survives_a_power_loss(tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    (work := tmp_path / "work").mkdir()
    (root / "file").write_text("content")
    subprocess.run([sys.executable, "-c", LINKING, str(root), str(work)], check=True, cwd=ROOT)
    assert digests(work / "strict") == digests(root)
    assert sorted(path.name for path in root.iterdir()) == ["file", "link"]


def first_and_last_write(sweep: Sweep) -> list[int]:
    """Return the points of the first and the last write of the stage's own files."""
    files = ("tokens.safetensors", "block-N.safetensors", "manifest.json")
    first = next(
        number for number, point in enumerate(sweep.points) if is_write(point) and point.kind.startswith(files)
    )
    return [first, max(number for number, point in enumerate(sweep.points) if is_write(point))]


def is_write(point: Point) -> bool:
    return point.call in WRITES and point.kind != "lock"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SCENARIOS, *CONVERSIONS])
def test_nothing_is_lost_at_any_point_at_all(make_sweep: Callable[[str], Sweep], name: str, tally: Tally) -> None:
    sweep = make_sweep(name)
    every = list(range(len(sweep.points)))
    sweep.lose_power_after_the_end()
    sweep.kill(every)
    sweep.signal(every, *sweep.ends)
    sweep.fail(every, "ENOSPC", "EIO", "EACCES")
    first, last = first_and_last_write(sweep)
    sweep.start_second([number for number in range(first, last + 1) if is_write(sweep.points[number])], sweep.command)
    report(sweep, tally)


@pytest.fixture
def tokenized(server: CrashServer, tmp_path: Path) -> Repository:
    repository = make_repository(tmp_path / "repository", num_rows=3, **SWEPT)
    run(server, repository.root, "tokenize")
    return repository


def run_all(server: CrashServer, repository: Repository, **environment: str) -> dict[str, str]:
    """Run what comes after tokenize; return the digests of the outputs."""
    for stage in ("capture", "shards"):
        run(server, repository.root, stage, **environment)
    return repository.digests("features.json", "cache")


@pytest.mark.parametrize(("stage", "file_bytes"), [("capture", 8000), ("shards", 20_000)])
def test_a_file_size_limit_fails_a_stage_as_a_full_disk_does(
    server: CrashServer, tokenized: Repository, tmp_path: Path, stage: str, file_bytes: int
) -> None:
    copy_tree(tokenized.root, tmp_path / "undisturbed")
    if stage == "shards":
        run(server, tokenized.root, "capture")
    (work := tmp_path / "limited").mkdir()
    assert server.run(tokenized.root, stage, work, file_bytes=file_bytes) == 1
    assert (work / "stderr").read_text().splitlines()[-1].startswith("error: [Errno 27] File too large: ")
    assert not [output for output in OUTPUTS[stage] if (tokenized.root / output).exists()]
    assert not list(tokenized.root.rglob(".tmp-*"))
    wanted = run_all(server, Repository(tmp_path / "undisturbed"))
    assert run_all(server, tokenized) == wanted


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that mounts a tmpfs with given options: root, as which tests may run, ignores file modes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


def test_scratch_on_a_full_disk_fails_capture_and_goes_on_once_there_is_room(
    server: CrashServer, tokenized: Repository, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    copy_tree(tokenized.root, tmp_path / "undisturbed")
    disk = mounted("size=64k")
    scratch = str(disk / "work")
    (work := tmp_path / "full").mkdir()
    environment = {"DSPARK_RUNTIME__SCRATCH_DIR": scratch, "DSPARK_RUNTIME__CHECK_DISK": "false"}
    assert server.run(tokenized.root, "capture", work, environment=environment) == 1
    last = (work / "stderr").read_text().splitlines()[-1]
    assert last.startswith("error: [Errno 28] No space left on device: ")
    assert str(disk) in last
    assert not (tokenized.root / "features.json").exists()
    assert not list(disk.rglob(".tmp-*"))
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    wanted = run_all(server, Repository(tmp_path / "undisturbed"))
    assert run_all(server, tokenized, DSPARK_RUNTIME__SCRATCH_DIR=scratch) == wanted


def test_a_read_only_scratch_is_refused_and_nothing_is_left(
    server: CrashServer, tokenized: Repository, tmp_path: Path, mounted: Callable[[str], Path]
) -> None:
    scratch = str(mounted("ro") / "work")
    (work := tmp_path / "read-only").mkdir()
    assert server.run(tokenized.root, "capture", work, environment={"DSPARK_RUNTIME__SCRATCH_DIR": scratch}) == 1
    assert (work / "stderr").read_text().splitlines()[-1].startswith("error: [Errno 30] Read-only file system: ")
    assert not (tokenized.root / "features.json").exists()
    assert not list(tokenized.root.rglob(".tmp-*"))
