"""Putting files and folders in place, and locks: real files, real umasks, real other processes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from dspark_cache import files
from dspark_cache.errors import LockedError, SettingsError
from dspark_cache.files import (
    FileLock,
    break_lock,
    byte_view,
    dump_json,
    file_digest,
    keeps_holes,
    make_folder,
    put_bytes,
    put_file,
    put_folder,
    put_json,
    remove_temporaries,
    temporary_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Make writes past `num_bytes` of a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def disk_calls() -> Iterator[list[str]]:
    """Note flushes and renames in their order, by the interpreter's own profile hook."""
    calls: list[str] = []

    def note(_frame: object, event: str, function: object) -> None:
        if event == "c_call" and function in (os.fsync, os.rename, os.replace):
            calls.append("flush" if function is os.fsync else "rename")

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- files ------------------------------------------------------------------------------------------------------


def test_a_file_appears_only_when_the_block_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with put_file(path) as temporary:
        assert temporary.parent == tmp_path
        assert temporary.read_bytes() == b""
        temporary.write_bytes(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_a_file_is_flushed_before_it_is_renamed_and_its_folder_afterwards(tmp_path: Path) -> None:
    with disk_calls() as calls:
        put_bytes(tmp_path / "a", b"new")
    assert calls == ["flush", "rename", "flush"]


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = open_descriptors()
    put_bytes(tmp_path / "a", b"new")
    fill(tmp_path / "cache", "new")
    with FileLock(tmp_path / "lock"), pytest.raises(LockedError), FileLock(tmp_path / "lock"):
        pass
    break_lock(tmp_path / "lock")
    file_digest(tmp_path / "a")
    assert open_descriptors() == before


@pytest.mark.parametrize("size", [0, 1, 10_000_000])
def test_a_digest_is_that_of_the_whole_file(tmp_path: Path, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    (tmp_path / "a").write_bytes(content)
    told: list[int] = []
    assert file_digest(tmp_path / "a", told.append) == hashlib.sha256(content).hexdigest()
    assert sum(told) == size


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failing_block_keeps_the_old_file_and_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def write_half() -> None:
        with put_file(path) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        write_half()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_block_that_loses_its_file_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(FileNotFoundError), put_file(path) as temporary:
        temporary.unlink()
    assert path.read_bytes() == b"old"


def test_a_folder_in_the_way_of_a_file_leaves_no_temporary(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        put_bytes(tmp_path / "a", b"new")
    assert names(tmp_path) == ["a"]


def test_a_full_disk_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        put_bytes(path, bytes(2000))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_two_writers_of_one_name_have_temporaries_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with put_file(path) as first:
        first.write_bytes(b"first")
        with put_file(path) as second:
            second.write_bytes(b"second")
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o027, 0o077])
def test_permissions_follow_the_umask_whatever_the_block_does(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        put_bytes(tmp_path / "plain", b"x")
        with put_file(tmp_path / "closed") as temporary:
            temporary.unlink()
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o600))
        with put_file(tmp_path / "tensors") as temporary:
            save_file({"a": torch.zeros(1)}, temporary)
    assert {name: mode(tmp_path / name) for name in names(tmp_path)} == dict.fromkeys(
        ["closed", "plain", "tensors"], 0o666 & ~mask
    )


def test_an_old_file_s_permissions_are_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with umask(0o022):
        put_bytes(path, b"new")
    assert mode(path) == 0o644


def test_a_link_at_the_name_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "a").symlink_to("precious")
    put_bytes(tmp_path / "a", b"new")
    assert not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_bytes() == b"new"
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_hard_link_of_the_old_file_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    put_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "b").read_bytes() == b"old"


def test_json_text_is_the_reference_s_and_files_end_in_a_newline(tmp_path: Path) -> None:
    text = '{\n  "a": [\n    1,\n    2\n  ],\n  "b": "\\u00fc"\n}'
    assert dump_json({"b": "ü", "a": (1, 2)}) == text
    put_json(tmp_path / "a.json", {"b": "ü", "a": (1, 2)})
    assert (tmp_path / "a.json").read_text() == text + "\n"


def test_temporaries_of_a_killed_writer_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".tmp-b-0123", ".tmp-a-4567", "tmp-a", "a.tmp", ".tmp"):
        (tmp_path / name).write_bytes(b"x")
    with put_file(tmp_path / "new") as temporary:
        left = remove_temporaries(tmp_path)
        assert left == [".tmp-a-4567", ".tmp-b-0123", temporary.name]
        temporary.touch()
    assert names(tmp_path) == [".tmp", "a.tmp", "new", "tmp-a"]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.int64])
def test_a_byte_view_is_the_tensor_s_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    view = byte_view(tensor)
    assert (len(view), view.format, view.readonly) == (6 * dtype.itemsize, "B", False)
    view[-dtype.itemsize] = 1
    assert tensor.view(torch.uint8).flatten()[-dtype.itemsize] == 1


def test_a_byte_view_of_nothing_is_empty() -> None:
    assert len(byte_view(torch.zeros(0, 3))) == 0


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3).T, torch.zeros(2, 3, device="meta")])
def test_a_byte_view_of_scattered_or_remote_memory_is_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^byte_view needs a contiguous tensor on the CPU$"):
        byte_view(tensor)


# --- folders ----------------------------------------------------------------------------------------------------


def fill(path: Path, content: str) -> None:
    with put_folder(path) as building:
        assert names(building) == []
        (building / "file").write_text(content)


def read(path: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in path.iterdir()}


def test_a_folder_appears_only_when_the_block_is_left(tmp_path: Path) -> None:
    path = tmp_path / "made" / "cache"
    with put_folder(path) as building:
        (building / "file").write_text("new")
        assert not path.exists()
    assert read(path) == {"file": "new"}
    assert names(path.parent) == [".cache.building.lock", "cache"]


def test_a_folder_replaces_an_earlier_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    path.mkdir()
    (path / "stale").write_text("old")
    fill(path, "new")
    assert read(path) == {"file": "new"}
    assert names(tmp_path) == [".cache.building.lock", "cache"]


def test_the_parent_of_a_folder_is_flushed_after_both_renames(tmp_path: Path) -> None:
    fill(tmp_path / "cache", "old")
    with disk_calls() as calls:
        fill(tmp_path / "cache", "new")
    assert calls == ["rename", "rename", "flush"]


def test_a_failing_block_keeps_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    fill(path, "old")

    def fill_half() -> None:
        with put_folder(path) as building:
            (building / "file").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fill_half()
    assert read(path) == {"file": "old"}
    fill(path, "new")
    assert read(path) == {"file": "new"}


def test_what_killed_runs_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    fill(path, "old")
    for left in (".cache.building", ".cache.old.building"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "stale").write_text("half")
    fill(path, "new")
    assert read(path) == {"file": "new"}
    assert names(tmp_path) == [".cache.building.lock", "cache"]


def test_a_folder_that_is_being_built_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with put_folder(path) as building:
        (building / "file").write_text("first")
        with pytest.raises(LockedError, match="is being written by process"), put_folder(path):
            pass
    assert read(path) == {"file": "first"}


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_what_is_no_folder_is_never_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "cache"
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        path.write_text("precious")
    else:
        path.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    message = f"{path} is in the way: expected no file or a folder, move it away"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"), put_folder(path):
        pass
    assert path.is_symlink() or path.read_text() == "precious"
    assert names(tmp_path / "elsewhere") == []


# --- locks ------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from dspark_cache.files import FileLock
with FileLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_disk_with_holes_is_told_from_one_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system that tests can write to has holes: of one without, a file cut to a size is filled."""
    assert keeps_holes(tmp_path)
    monkeypatch.setattr("os.truncate", lambda path, size: Path(path).write_bytes(bytes(size)))
    assert not keeps_holes(tmp_path)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until its input is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_another_process_is_refused_until_the_holder_dies(tmp_path: Path) -> None:
    path = tmp_path / "made" / "lock"
    with holder(path) as process:
        message = (
            f"{path.parent} is being written by process {process.pid} on host {socket.gethostname()} (lock {path})"
        )
        with pytest.raises(LockedError, match=f"^{re.escape(message)}$"), FileLock(path):
            pass
        with pytest.raises(LockedError, match=f"^{re.escape(message)}$"):
            break_lock(path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert json.loads(path.read_text())["pid"] == process.pid
        with FileLock(path):
            assert json.loads(path.read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}


def test_a_holder_that_ends_well_leaves_an_empty_lock_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with FileLock(path):
            assert path.stat().st_size
        assert path.read_bytes() == b""


def test_a_lock_is_released_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(RuntimeError), FileLock(path):
        raise RuntimeError
    with FileLock(path):
        pass


@contextmanager
def forked() -> Iterator[int]:
    """Fork a child that lives until the block is left."""
    ready, tell = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.write(tell, b"x")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        yield child
    finally:
        os.close(end)
        os.waitpid(child, 0)
        for descriptor in (ready, tell, wait):
            os.close(descriptor)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as lock, forked() as child:
        assert path not in [link.readlink() for link in Path(f"/proc/{child}/fd").iterdir()]
        # What the kernel does for an owner that dies: its descriptor goes, the file still names it.
        lock.forget()
        with FileLock(path):
            pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_that_leaves_the_block_does_not_release_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path) as lock:
        child = os.fork()
        if child == 0:
            lock.__exit__()
            os._exit(0)
        os.waitpid(child, 0)
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(LockedError), FileLock(path):
            pass


FOREIGN = {"host": "another-machine", "pid": 17}


def test_a_holder_on_another_host_is_never_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps(FOREIGN))
    message = (
        f"{tmp_path} is being written by process 17 on host another-machine (lock {path}); "
        "if that host is gone for good: dspark-cache clean --break-lock"
    )
    for _ in range(2):
        with pytest.raises(LockedError, match=f"^{re.escape(message)}$"), FileLock(path):
            pass
    assert json.loads(path.read_text()) == FOREIGN


def test_breaking_a_lock_frees_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text(json.dumps(FOREIGN))
    assert break_lock(path)
    assert not break_lock(path)
    with FileLock(path), pytest.raises(LockedError, match=f"is being written by process {os.getpid()} on host "):
        break_lock(path)


def test_there_is_no_lock_to_break(tmp_path: Path) -> None:
    assert not break_lock(tmp_path / "lock")
    assert names(tmp_path) == []


@pytest.mark.parametrize("junk", [b"[]", b"{", b"\xff", b"null", b"{}", b'{"pid": 3}', b"longer than a holder" * 99])
def test_junk_in_a_free_lock_file_names_no_holder(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "lock"
    path.write_bytes(junk)
    with FileLock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_holder_that_cannot_be_read_is_another_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path):
        path.write_bytes(b"junk")
        message = f"{tmp_path} is being written by another process (lock {path})"
        with pytest.raises(LockedError, match=f"^{re.escape(message)}$"), FileLock(path):
            pass


def test_a_link_at_the_lock_s_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic link"), FileLock(tmp_path / "lock"):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        break_lock(tmp_path / "lock")
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_temporary_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    host = socket.gethostname()
    done = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead = done.stdout.strip()
    kept = ["rows-elsewhere-1-x", f"rows-{host}-{os.getppid()}-x", f"rows-{host}-x", f"others-{host}-{dead}-x"]
    for name in [*kept, f"rows-{host}-{dead}-x"]:
        (tmp_path / "scratch" / name / "inside").mkdir(parents=True)
    with temporary_folder(tmp_path / "scratch", "rows") as folder:
        (folder / "file").write_text("")
        assert folder.name.startswith(f"rows-{host}-{os.getpid()}-")
        assert names(tmp_path / "scratch") == sorted([*kept, folder.name])
    assert names(tmp_path / "scratch") == sorted(kept)
    with temporary_folder(tmp_path / "not/there", "rows") as folder:
        assert folder.parent == tmp_path / "not/there"


def test_a_folder_survives_a_power_loss_with_its_parents(tmp_path: Path) -> None:
    with disk_calls() as calls:
        make_folder(tmp_path / "a/b/c")
        make_folder(tmp_path / "a/b/c")
    assert calls == ["flush"] * 3
    assert (tmp_path / "a/b/c").is_dir()


# --- writing back early -------------------------------------------------------------------------------------------


def test_the_disk_is_told_of_a_part_and_a_system_without_that_call_is_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 5)
    with path.open("rb+") as file:
        files.start_writeback(file.fileno(), 0, 5)
        assert files._sync_file_range()(-1, 0, 5, files._SYNC_FILE_RANGE_WRITE) == -1  # the system call itself
        monkeypatch.setattr(files, "_sync_file_range", lambda: None)
        files.start_writeback(file.fileno(), 0, 5)
    files.start_writeback(-1, 0, 5)
