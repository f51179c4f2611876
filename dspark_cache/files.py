"""Putting files and folders in place: the only module that renames, and the only one that locks.

A file is written under a unique temporary name in its own folder, flushed to the disk, renamed, and its folder
flushed too: after a crash or a power loss there is the old file, the new file or none, never half of one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dspark_cache.errors import LockedError, SettingsError
from dspark_cache.strict_json import is_int

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

TEMPORARY_PREFIX = ".tmp-"
BUILDING_SUFFIX = ".building"
_HASH_BYTES = 1 << 22
_PROBE_BYTES = 1 << 20
_SYNC_FILE_RANGE_WRITE = 2
_WRITE_BYTES = 1 << 30
"""A write of Linux takes at most 2 GiB at a time."""


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them; writable. The view keeps the tensor alive."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("byte_view needs a contiguous tensor on the CPU")
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(bytearray())
    array = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    array.owner = tensor  # type: ignore[attr-defined]  # an array made from an address owns nothing
    return memoryview(array).cast("B")


def _sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(path: Path) -> None:
    with naming(path):
        _sync(path)


def make_folder(path: Path) -> None:
    """Make a folder and the parents it lacks, so that they survive a power loss with what is put into them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def write_exactly(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset` of an open file."""
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + _WRITE_BYTES], offset + done)


@cache
def _sync_file_range() -> Any:
    """Return the system call of Linux that Python does not have; None elsewhere."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Let the disk begin to write a part of an open file, so that flushing it later takes less time.

    That is all: where the system does not do so, nothing is lost.
    """
    function = _sync_file_range()
    if function is not None:
        function(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


def _create_temporary(path: Path) -> tuple[Path, int]:
    """Create an empty file beside `path`; return it and the permissions that the umask leaves."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{secrets.token_hex(6)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    mode = os.fstat(descriptor).st_mode & 0o7777
    os.close(descriptor)
    return temporary, mode


def file_digest(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Return the sha256 of a file's content; `advance` is told of the bytes that were read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_HASH_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in the error of a system call that knew its descriptor only."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def put_file(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; on leaving, put it in place of `path`, durably and at once.

    The block may replace the temporary file itself, as safetensors' `save_file` does. If the block raises, the
    temporary file is removed and `path` is as it was.

    Raises:
        OSError: The disk is full, read-only or failing; it names `path`, which is as it was.
    """
    with naming(path):
        temporary, mode = _create_temporary(path)
        try:
            yield temporary
            os.chmod(temporary, mode)  # noqa: PTH101 - pathlib's chmod is the same call
            _sync(temporary)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _sync(path.parent)


def put_bytes(path: Path, content: bytes) -> None:
    """Put a small file in place."""
    with put_file(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY)
        try:
            write_exactly(descriptor, memoryview(content), 0)
        finally:
            os.close(descriptor)


def dump_json(value: Any) -> str:
    """Return JSON text as the reference's manifests have it: sorted, two spaces, ASCII, no final newline."""
    return json.dumps(value, indent=2, sort_keys=True)


def put_json(path: Path, value: Any) -> None:
    """Put `value` in place as a JSON file ending in a newline."""
    put_bytes(path, (dump_json(value) + "\n").encode())


def remove_temporaries(folder: Path, name: str = "") -> list[str]:
    """Remove what killed writers of `name` (of any file) left in `folder`. Return the names.

    The caller holds the lock under which these files are written.
    """
    prefix = f"{TEMPORARY_PREFIX}{name}"
    left = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(prefix))
    for temporary in left:
        (folder / temporary).unlink()
    return left


def nearest_existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    return next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.exists())


def ensure_free_disk(folder: Path, num_bytes: int, *, what: str, remedy: str) -> None:
    """Refuse to begin what would fill the disk.

    Args:
        folder: Where it is written; it exists.
        num_bytes: What will be written.
        what: Names it in the message.
        remedy: What to do beside making room.

    Raises:
        SettingsError: Less is free.
    """
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise SettingsError(
            f"{num_bytes} bytes of {what} are to be written to {folder.resolve()}, where {free} are free: make room, "
            f"{remedy}"
        )


def keeps_holes(folder: Path) -> bool:
    """Say whether the file system of a folder keeps parts of files that were never written as holes."""
    probe, _ = _create_temporary(folder / "holes")
    try:
        os.truncate(probe, _PROBE_BYTES)
        return probe.stat().st_blocks * 512 < _PROBE_BYTES
    finally:
        probe.unlink()


def link_file(source: Path, path: Path) -> bool:
    """Give a file a second name, durably; say no where the file system or its rules do not allow that."""
    try:
        os.link(source, path, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    _sync_folder(path.parent)
    return True


def building_lock(path: Path) -> Path:
    """Return the lock that whoever writes the output `path` of a stage holds."""
    return path.with_name(f".{path.name}{BUILDING_SUFFIX}.lock")


def put_output(path: Path, value: Any) -> None:
    """Put a stage's output in place as JSON, after removing what a killed run left of it.

    Raises:
        LockedError: Another process is writing the same output.
        OSError: The disk is full, read-only or failing; `path` is as it was.
    """
    with FileLock(building_lock(path)):
        remove_temporaries(path.parent, f"{path.name}-")
        put_json(path, value)


@contextmanager
def put_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to fill by `put_file`; on leaving, put it in place of `path` by one rename.

    It is built beside `path` as `.NAME.building`. What a killed run left there is removed first; a folder that
    another process is filling is refused. If the block raises, what it built is removed and `path` is as it was. A
    run that is killed leaves the earlier folder in its place, or beside it, from where the next run takes it back;
    it is removed once the new one is on the disk.

    Raises:
        LockedError: Another process is building the same folder.
        SettingsError: `path` exists and is no folder.
    """
    building = _building_folder(path)
    with FileLock(building_lock(path)):
        _settle(path)
        _remove(building)
        building.mkdir()
        try:
            yield building
            _put_in_place(building, path)
        except BaseException:
            _settle(path)
            shutil.rmtree(building, ignore_errors=True)
            raise
        _sync_folder(path.parent)
        _settle(path)


class FinishedParts:
    """Which files of a folder being built are finished, so that a later run need not write them again.

    A JSON line each in a file beside the folder, after a line with the key of what is built.

    Attributes:
        records: Name of each finished file to what was recorded of it.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Keep the records of an earlier run that had the same `key`, if `path` has any."""
        self._path = path
        self.records = read_parts(path, key)
        lines = [key, *([name, record] for name, record in self.records.items())]
        put_bytes(path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def add(self, name: str, record: dict[str, Any]) -> None:
        """Record a file that is durably in place."""
        self.records[name] = record
        with naming(self._path), self._path.open("a") as file:
            file.write(json.dumps([name, record]) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self) -> None:
        """Let no later run go on with what is there."""
        self.records.clear()


def read_parts(path: Path, key: str) -> dict[str, Any]:
    """Return the whole lines of a file of finished parts that begins with `key`; the last line may be torn."""
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return dict(lines[1:]) if lines[:1] == [key] else {}
    except (FileNotFoundError, ValueError, TypeError, RecursionError):
        return {}


@contextmanager
def resume_folder(path: Path, key: str) -> Iterator[tuple[Path, FinishedParts]]:
    """Give a folder to fill as `put_folder` does, with the files that a killed or failed run with the same `key` left.

    If the block raises, what it finished stays for the next run, unless it forgets that; `path` is as it was.

    Raises:
        LockedError: Another process is building the same folder.
        SettingsError: `path` exists and is no folder.
    """
    building = _building_folder(path)
    record = path.with_name(f".{path.name}{BUILDING_SUFFIX}.jsonl")
    with FileLock(building_lock(path)):
        _settle(path)
        remove_temporaries(path.parent, f"{record.name}-")
        parts = FinishedParts(record, key)
        if not parts.records or not building.is_dir() or building.is_symlink():
            _remove(building)
            building.mkdir()
            _sync_folder(path.parent)
        remove_temporaries(building)
        try:
            yield building, parts
            _put_in_place(building, path)
        except BaseException:
            _settle(path)
            if not parts.records:
                _remove(building)
                record.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
        record.unlink()
        _settle(path)


def _building_folder(path: Path) -> Path:
    """Return where the folder `path` is built.

    Raises:
        SettingsError: `path` exists and is no folder.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise SettingsError(f"{path} is in the way: expected no file or a folder, move it away")
    return path.with_name(f".{path.name}{BUILDING_SUFFIX}")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old{BUILDING_SUFFIX}")


def _put_in_place(building: Path, path: Path) -> None:
    if path.exists():
        path.rename(_aside(path))
    building.rename(path)


def _settle(path: Path) -> None:
    """Put back the earlier folder that stepped aside for one that did not come; remove it if that came."""
    aside = _aside(path)
    if aside.exists() and not path.exists():
        aside.rename(path)
    else:
        _remove(aside)


def _remove(path: Path) -> None:
    """Remove what a killed run left at `path`, whatever it is; a link is not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """Give a folder in `parent` while the block runs; those that killed processes of this host left are removed."""
    make_folder(parent)
    prefix = f"{name}-{socket.gethostname()}-"
    for left in [entry for entry in parent.iterdir() if entry.name.startswith(prefix)]:
        pid = left.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not _is_alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix}{os.getpid()}-", dir=parent) as folder:
        yield Path(folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_HELD: WeakSet[FileLock] = WeakSet()


def _close_in_child() -> None:
    """Close lock descriptors in a forked child: a worker must not keep its dead owner's lock alive."""
    for lock in list(_HELD):
        lock.forget()


os.register_at_fork(after_in_child=_close_in_child)


class FileLock:
    """An exclusive lock on a file that names its holder; released when the process ends, however it ends.

    The kernel drops the lock of a dead process of this host, so that the next one takes it over. A holder on
    another host is known only by its name in the file and is never taken over: `break_lock` is for a person who
    knows that it is gone.
    """

    def __init__(self, path: Path) -> None:
        """Prepare the lock on `path`; the file is created when the lock is taken and stays there, empty."""
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> FileLock:
        """Take the lock or raise `LockedError` naming the holder."""
        make_folder(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with naming(self._path):
                _lock(descriptor, self._path)
                _write_holder(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        _HELD.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            try:
                with naming(self._path):
                    os.ftruncate(self._descriptor, 0)
            finally:
                self.forget()

    def forget(self) -> None:
        """Close the descriptor without releasing what another process may hold through it."""
        descriptor, self._descriptor = self._descriptor, None
        _HELD.discard(self)
        if descriptor is not None:
            os.close(descriptor)


def _lock(descriptor: int, path: Path, *, shared: bool = False) -> None:
    """Lock an open lock file or raise `LockedError` with what is known of the holder."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockedError(_locked_message(path, _holder(descriptor))) from None
    holder = _holder(descriptor)
    if holder.get("host") not in (None, socket.gethostname()):
        raise LockedError(_locked_message(path, holder))


def ensure_unlocked(path: Path) -> None:
    """Check that nobody holds the lock on `path`, a dead process of this host aside.

    Raises:
        LockedError: Naming the holder.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        with naming(path):
            _lock(descriptor, path, shared=True)  # so that those who only ask do not refuse each other
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> dict[str, object]:
    with suppress(ValueError, AttributeError, RecursionError):
        found = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        return {"host": found.get("host"), "pid": found.get("pid")}
    return {}


def lock_host(path: Path) -> object:
    """Return the host that the lock file `path` names as its holder's; None if nobody holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return _holder(descriptor).get("host")
    finally:
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    holder = json.dumps({"host": socket.gethostname(), "pid": os.getpid()})
    os.ftruncate(descriptor, 0)
    write_exactly(descriptor, memoryview(holder.encode()), 0)


def _locked_message(path: Path, holder: dict[str, object]) -> str:
    pid = holder.get("pid")
    who = f"process {pid} on host {holder.get('host')}" if is_int(pid) else "another process"
    text = f"{path.parent} is being written by {who} (lock {path})"
    if holder.get("host") not in (None, socket.gethostname()):
        text += "; if that host is gone for good: dspark-cache clean --break-lock"
    return text


def break_lock(path: Path) -> bool:
    """Forget a holder on another host; say whether there was one. A live holder of this host keeps its lock.

    Raises:
        LockedError: A process of this host holds the lock.
    """
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        had_holder = bool(_holder(descriptor).get("host"))
        os.ftruncate(descriptor, 0)
    except BlockingIOError:
        raise LockedError(_locked_message(path, _holder(descriptor))) from None
    finally:
        os.close(descriptor)
    return had_holder
