"""A layer between a stage and the disk that counts what the stage does to files, and kills it or fails it there.

It replaces, in one process, the functions of `os`, `io` and `fcntl` that change files; the library calls nothing else.
A point is one such call on a path inside the repository. At a chosen point the process is killed, signalled, or the
call fails. When it is killed the layer leaves behind what a power loss would leave: it knows which contents and which
folder entries were flushed.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

PATH_CALLS = ("mkdir", "rmdir", "unlink", "chmod", "truncate")
NAMINGS = ("rename", "replace", "link")
WRITES = ("pwrite", "write")
OS_DESCRIPTOR_CALLS = ("pwrite", "ftruncate", "fsync")
DESCRIPTOR_CALLS = (*OS_DESCRIPTOR_CALLS, "write")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SMALL = 1 << 16
LIBRARY = "dspark_cache"


@dataclass(frozen=True)
class Point:
    """One change to a file: what, by which line of the library, to which kind of file."""

    call: str
    site: str
    kind: str


@dataclass
class Plan:
    """What is to happen.

    Attributes:
        point: Number of the point; -1: after the last one.
        action: "none", a signal's name, "torn" (half of a write, then SIGKILL), or an errno's name.
        sticky: Whether later calls of this kind fail too, as on a full disk.
        survivors: Folder for the two trees that a power loss may leave: `strict` and `renamed`.
    """

    point: int = -2
    action: str = "none"
    sticky: bool = False
    survivors: str | None = None


@dataclass
class _Tree:
    """What is durable: entries of folders and contents of files, both by inode."""

    entries: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    contents: dict[int, Path] = field(default_factory=dict)


def kind_of(path: str) -> str:
    """Return a file's name without what differs between files of a kind and between runs."""
    name = re.sub(r"^\.tmp-(.*)-[0-9a-f]{12}$", r"\1 (temporary)", Path(path).name)
    if name.endswith("lock"):
        return "lock"
    return re.sub(r"\d{6}|[0-9a-f]{16,}", "N", name)


class FaultLayer:
    """Counts points in `root` and carries out a plan. One to a process; it is never removed."""

    def __init__(self, root: Path, store: Path, plan: Plan) -> None:
        self.points: list[Point] = []
        self.promised: set[str] = set()
        self._renamed: set[str] = set()
        self._root = str(root)
        self._store = store
        self._plan = plan
        self._failing = False
        self._durable = _Tree()
        self._number = 0
        self._real: dict[str, Callable[..., Any]] = {
            name: getattr(os, name) for name in ("open", *PATH_CALLS, *NAMINGS, *OS_DESCRIPTOR_CALLS)
        }
        self._flock = fcntl.flock
        self._stream = io.open
        store.mkdir(parents=True)
        self._take_all(self._root)

    # The tree as it is found is durable.

    def _take_all(self, folder: str) -> None:
        entries = {}
        with os.scandir(folder) as found:
            for entry in found:
                inode, is_folder = entry.inode(), entry.is_dir(follow_symlinks=False)
                entries[entry.name] = (inode, is_folder)
                if is_folder:
                    self._take_all(entry.path)
                else:
                    is_input = "/inputs/" in entry.path or entry.stat().st_size >= SMALL
                    self._keep_content(inode, entry.path, is_changing=not is_input)
        self._durable.entries[os.stat(folder).st_ino] = entries

    def _keep_content(self, inode: int, path: str, *, is_changing: bool) -> None:
        self._number += 1
        kept = self._store / str(self._number)
        if is_changing:
            shutil.copyfile(path, kept, follow_symlinks=False)
        else:
            os.link(path, kept)
        self._durable.contents[inode] = kept

    # Calls.

    def install(self) -> None:
        """Replace the functions."""
        os.open = self._open
        io.open = self._open_stream  # type: ignore[assignment]
        fcntl.flock = self._locking  # type: ignore[assignment]
        for name in PATH_CALLS:
            setattr(os, name, self._on_path(name))
        for name in NAMINGS:
            setattr(os, name, self._on_naming(name))
        for name in OS_DESCRIPTOR_CALLS:
            setattr(os, name, self._on_descriptor(name))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        full = self._full(path, dir_fd)
        if not flags & WRITE_FLAGS or not self._is_inside(full):
            return int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        is_new = not os.path.lexists(full)
        if flags & os.O_CREAT and is_new:
            self.promised |= self._renamed
        self._point("create" if is_new else "open", full)
        descriptor = int(self._real["open"](path, flags, mode, dir_fd=dir_fd))
        if is_new:
            self._durable.contents.pop(os.fstat(descriptor).st_ino, None)
        return descriptor

    def _open_stream(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **more: Any,
    ) -> Any:
        """Open as `io.open` does; what is written inside goes through the layer when its buffer is flushed."""
        is_write = not isinstance(file, int) and set(mode) & set("wax+") and self._is_inside(self._full(file, None))
        if not is_write:
            return self._stream(file, mode, buffering, encoding, errors, newline, **more)
        raw = _Stream(self, file, mode)
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    def _on_path(self, name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, dir_fd: int | None = None, **more: Any) -> Any:
            full = self._full(path, dir_fd)
            if dir_fd is not None:
                more["dir_fd"] = dir_fd
            if self._is_inside(full) and (name != "mkdir" or not os.path.lexists(full)):
                self._point(name, full)
            result = self._real[name](path, *arguments, **more)
            if name == "mkdir" and self._is_inside(full):
                self._durable.entries[os.stat(full).st_ino] = {}
            return result

        return call

    def _on_naming(self, name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **more: Any) -> Any:
            full = self._full(target, None)
            if not self._is_inside(full):
                return self._real[name](source, target, **more)
            self._point(name, full)
            result = self._real[name](source, target, **more)
            self._renamed.add(os.path.relpath(full, self._root))
            return result

        return call

    def _on_descriptor(self, name: str) -> Callable[..., Any]:
        def call(descriptor: int, *arguments: Any) -> Any:
            full = os.readlink(f"/proc/self/fd/{descriptor}")
            if not self._is_inside(full):
                return self._real[name](descriptor, *arguments)
            self._point(
                name,
                full,
                lambda: self._real["pwrite"](descriptor, arguments[0][: len(arguments[0]) // 2], arguments[1]),
            )
            if name == "fsync":  # what it does on a disk nobody sees here
                return self._flushed(descriptor)
            return self._real[name](descriptor, *arguments)

        return call

    def on_write(self, path: str, write_half: Callable[[], object]) -> None:
        """Be told of a write to a stream."""
        self._point("write", self._full(path, None), write_half)

    def _locking(self, descriptor: int, operation: int) -> None:
        full = os.readlink(f"/proc/self/fd/{descriptor}")
        if self._is_inside(full):
            self._point("flock", full)
        self._flock(descriptor, operation)

    def _flushed(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            with os.scandir(path) as found:
                self._durable.entries[status.st_ino] = {
                    entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in found
                }
        else:
            self._keep_content(status.st_ino, path, is_changing=True)

    def _full(self, path: Any, dir_fd: int | None) -> str:
        text = os.fspath(path)
        if isinstance(text, int):
            return os.readlink(f"/proc/self/fd/{text}")
        if dir_fd is not None:
            return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        return os.path.abspath(text)

    def _is_inside(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + "/")

    # The plan.

    def _point(self, call: str, path: str, write_half: Callable[[], object] | None = None) -> None:
        number = len(self.points)
        self.points.append(Point(call=call, site=_site(), kind=kind_of(path)))
        action = self._plan.action
        if number != self._plan.point and not (self._failing and _fails(call, action)):
            return
        if action == "torn":
            if call in WRITES and write_half:
                write_half()
            self._die()
        elif action == "SIGKILL":
            self._die()
        elif action in ("SIGTERM", "SIGINT", "SIGSTOP"):
            os.kill(os.getpid(), signal.Signals[action])
        elif hasattr(errno, action):
            self._failing = self._plan.sticky
            number = getattr(errno, action)
            raise OSError(number, os.strerror(number), *([] if call in DESCRIPTOR_CALLS else [path]))

    def _die(self) -> None:
        self.leave()
        os.kill(os.getpid(), signal.SIGKILL)

    def leave(self) -> None:
        """Write down what a power loss would leave at this moment, and what it must leave."""
        if self._plan.survivors is None:
            return
        target = Path(self._plan.survivors)
        for name in ("strict", "renamed"):
            self._rebuild(self._root, os.stat(self._root).st_ino, target / name, is_strict=name == "strict")
        (target / "promised.json").write_text(json.dumps(sorted(self.promised)))

    def _rebuild(self, folder: str, inode: int, target: Path, *, is_strict: bool) -> None:
        """Build a folder as it would be found again: only flushed contents, and flushed entries or the live ones."""
        self._real["mkdir"](target)
        for name, (entry, is_folder) in self._entries(folder, inode, is_strict=is_strict).items():
            if is_folder:
                self._rebuild(f"{folder}/{name}", entry, target / name, is_strict=is_strict)
            elif entry in self._durable.contents:
                os.link(self._durable.contents[entry], target / name)
            else:
                (target / name).touch()

    def _entries(self, folder: str, inode: int, *, is_strict: bool) -> dict[str, tuple[int, bool]]:
        if is_strict:
            return self._durable.entries[inode]
        with os.scandir(folder) as found:
            return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in found}

    def finish(self, log: Path) -> None:
        """The stage has ended: the last point."""
        self.promised |= self._renamed
        if self._plan.point == -1:
            self.leave()
        log.write_text(json.dumps([asdict(point) for point in self.points]))


class _Stream(io.FileIO):
    """A file opened by `open`, whose opening and writes are points."""

    def __init__(self, layer: FaultLayer, path: Any, mode: str) -> None:
        super().__init__(path, mode.replace("t", ""), opener=lambda path, flags: os.open(path, flags, 0o666))
        self._layer = layer

    def write(self, data: Any) -> int:
        write = super().write
        self._layer.on_write(os.fspath(self.name), lambda: write(data[: len(data) // 2]))
        return write(data)


def _fails(call: str, action: str) -> bool:
    """Say whether a call goes on failing once the disk is full, or read-only."""
    return call in ("create", "mkdir", *WRITES) if action == "ENOSPC" else call not in ("flock", "fsync")


def _site() -> str:
    """Return the innermost line of the library, with its function, that made the call."""
    frame = sys._getframe(1)
    while frame.f_back and f"/{LIBRARY}/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"
