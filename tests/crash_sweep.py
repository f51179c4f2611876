"""Sweeps of a stage or command over its points: crash, look at what is left, resume, compare with a whole run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.blocks import Block, BlockStore
from dspark_cache.files import BUILDING_SUFFIX, TEMPORARY_PREFIX
from dspark_cache.strict_json import read_json_object
from tests.fault_layer import DESCRIPTOR_CALLS, SMALL, WRITES, Point, kind_of
from tests.repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.crash_server import CrashServer

OUTPUTS = {
    "tokenize": ("tokens",),
    "capture": ("features.json",),
    "shards": ("cache", "cache-eval"),
    "convert": ("cache",),
}
"""Stage or command to what it makes."""
CONVERT = "convert"
"""It alone goes on with the folder that a killed run was filling, and is no stage."""
STAGE_ENDS = {
    "SIGTERM": (143, "terminated; finished work is kept, run again to go on"),
    "SIGINT": (130, "interrupted; finished work is kept, run again to go on"),
}
COMMAND_ENDS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}
"""Signal to exit code and last line."""
ERRORS = {
    "ENOSPC": ("create", "mkdir", *WRITES, "ftruncate", "truncate", "rename", "replace", "link"),
    "EIO": (*WRITES, "fsync", "open", "replace", "rename", "link", "ftruncate", "unlink", "rmdir", "chmod"),
    "EACCES": ("create", "mkdir", "open", "rename", "replace", "link", "unlink", "rmdir", "flock"),
}
"""Error to the calls that may fail by it."""


REMOVALS = ("unlink", "rmdir")
"""What a run that ends while it cleans up leaves, the next run removes."""


def copy_tree(source: Path, target: Path) -> None:
    """Copy a repository; files too large to be changed in place are linked."""

    def copy(old: str, new: str) -> None:
        if Path(old).stat().st_size < SMALL:
            shutil.copy2(old, new)
        else:
            os.link(old, new)

    shutil.copytree(source, target, copy_function=copy)


@dataclass(frozen=True)
class Part:
    """A finished file of a run that has not ended.

    Attributes:
        path: Where it is.
        final: Where the next run leaves it.
        sha256: What is recorded of it.
    """

    path: Path
    final: Path
    sha256: str


@dataclass
class Sweep:
    """One stage or command, from one state of the repository.

    Attributes:
        server: Runs them.
        command: The stage, or the command line of `dspark-cache`.
        before: The repository as it finds it.
        undisturbed: The same after a run that nothing disturbed.
        work: An empty folder.
    """

    server: CrashServer
    command: str
    before: Path
    undisturbed: Path
    work: Path
    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    _resumed: set[str] = field(default_factory=set)
    _number: int = 0

    def __post_init__(self) -> None:
        self.name = self.command.split()[0]
        self.outputs = OUTPUTS[self.name]
        self.ends = COMMAND_ENDS if self.name == CONVERT else STAGE_ENDS
        self.points = self._enumerate()
        self._wanted = self._digests(self.undisturbed)
        self._earlier = self._digests(self.before)
        assert None not in self._wanted.values()

    def _digests(self, root: Path) -> dict[str, dict[str, str] | None]:
        return {output: digests(root / output) for output in self.outputs}

    def _enumerate(self) -> list[Point]:
        """Return every point of an undisturbed run."""
        root, work = self._fresh()
        assert self.server.run(root, self.command, work) == 0, (work / "stderr").read_text()
        return [Point(**point) for point in json.loads((work / "points.json").read_text())]

    def _fresh(self) -> tuple[Path, Path]:
        self._number += 1
        root, work = self.work / f"root-{self._number}", self.work / f"work-{self._number}"
        work.mkdir()
        copy_tree(self.before, root)
        return root, work

    def first_of_each(self, *fields: str) -> list[int]:
        """Return the first point of each combination of call, line of the library, and kind of file."""
        first: dict[tuple[str, ...], int] = {}
        for number, point in enumerate(self.points):
            first.setdefault(tuple(getattr(point, name) for name in fields), number)
        return sorted(first.values())

    # What is done at a point.

    def kill(self, numbers: list[int]) -> None:
        """Kill at each point; go on from what is left, and from what a power loss would leave."""
        for number in numbers:
            for action in ("SIGKILL", "torn") if self.points[number].call == "pwrite" else ("SIGKILL",):
                root, work = self._fresh()
                survivors = work / "survivors"
                survivors.mkdir()
                name = f"{action} at {number} {self.points[number]}"
                code = self.server.run(root, self.command, work, point=number, action=action, survivors=str(survivors))
                self._expect(code == -9, f"{name}: exit code {code}")
                self.counts["points killed"] += 1
                self._go_on_from_power_loss(survivors, name)
                self._go_on(root, set(json.loads((survivors / "promised.json").read_text())), name)
                self._forget(root, work)

    def lose_power_after_the_end(self) -> None:
        """It has exited with 0: whatever it put in place must be there."""
        root, work = self._fresh()
        survivors = work / "survivors"
        survivors.mkdir()
        code = self.server.run(root, self.command, work, point=-1, survivors=str(survivors))
        self._expect(code == 0, f"exit code {code} of an undisturbed run")
        self._go_on_from_power_loss(survivors, "power loss after the end")
        self._forget(root, work)

    def signal(self, numbers: list[int], *names: str) -> None:
        """Send a signal at each point; a write may be finished, and the exit code must not be 0."""
        for number in numbers:
            for action in names:
                expected, words = self.ends[action]
                root, work = self._fresh()
                name = f"{action} at {number} {self.points[number]}"
                code = self.server.run(root, self.command, work, point=number, action=action)
                said = (work / "stderr").read_text().strip().splitlines()
                self._expect(code == expected and said[-1:] == [words], f"{name}: exit code {code}, said {said[-1:]}")
                if self.points[number].call not in REMOVALS:
                    self._expect_clean(root, name)
                self.counts["points signalled"] += 1
                self._go_on(root, set(), name)
                self._forget(root, work)

    def start_second(self, numbers: list[int], command: str) -> None:
        """Stop at each point and start another: it is refused, and the first ends as if nothing had been."""
        for number in numbers:
            root, work = self._fresh()
            second = work / "second"
            second.mkdir()
            name = f"{command} started at {number} {self.points[number]}"
            codes = self.server.run_two(root, (self.command, command), (work, second), number)
            said = (second / "stderr").read_text().strip().splitlines()[-1:]
            expected = f"is being written by process {codes['pid']} on host {os.uname().nodename}"
            is_refused = codes.get("second") == 1 and any(expected in line for line in said)
            self._expect(is_refused, f"{name}: the second run gave {codes}, said {said}")
            self._expect(codes["code"] == 0, f"{name}: the first run gave {codes}")
            self._expect(self._digests(root) == self._wanted, f"{name}: other bytes")
            self.counts["second runs refused"] += 1
            self._forget(root, work)

    def fail(self, numbers: list[int], *names: str) -> None:
        """Let the call fail at each point where it may fail so; ENOSPC goes on failing as a full disk does."""
        for number in numbers:
            for action in names:
                point = self.points[number]
                if point.call not in ERRORS[action]:
                    continue
                root, work = self._fresh()
                name = f"{action} at {number} {point}"
                code = self.server.run(root, self.command, work, point=number, action=action, sticky=action == "ENOSPC")
                said = (work / "stderr").read_text().strip().splitlines()
                self._expect(code == 1, f"{name}: exit code {code}, said {said[-1:]}")
                self._expect(_is_named(said, point), f"{name}: said {said}")
                if point.call not in REMOVALS:
                    self._expect_clean(root, name)
                self.counts["faults injected"] += 1
                self._go_on(root, set(), name)
                self._forget(root, work)

    # What is left.

    def _go_on_from_power_loss(self, survivors: Path, name: str) -> None:
        promised = set(json.loads((survivors / "promised.json").read_text()))
        for tree in ("strict", "renamed"):
            self.counts["power losses"] += 1
            self._go_on(survivors / tree, promised, f"power loss ({tree}), {name}")

    def _go_on(self, root: Path, promised: set[str], name: str) -> None:
        accepted = self._accepted(root, name)
        for kept in promised:
            self._expect(self._is_there(root, kept, accepted), f"{name}: {kept} was finished and is lost")
        state = _state_of(root)
        if state in self._resumed:
            return
        self._resumed.add(state)
        self.counts["states resumed"] += 1
        work = root.with_name(root.name + "-resumed")
        work.mkdir()
        before = {part.final: part.path.stat().st_ino for part in accepted}
        code = self.server.run(root, self.command, work)
        self._expect(code == 0, f"{name}: the next run gave {code}: {(work / 'stderr').read_text()[-500:]}")
        if code == 0:
            self._expect(self._digests(root) == self._wanted, f"{name}: the next run made other bytes")
            after = {part.final: part.final.stat().st_ino for part in accepted}
            self._expect(before == after, f"{name}: the next run made finished files again")
            self._expect_clean(root, f"the run after {name}", is_done=True)

    def _accepted(self, root: Path, name: str) -> list[Part]:
        """Return the files that a resume accepts; whatever is accepted, by a reader too, must be whole."""
        for output, found in self._digests(root).items():
            earlier = self._earlier[output]
            known = found in (self._wanted[output], earlier)
            known |= found is None and digests(_aside(root, output)) == earlier
            self._expect(known, f"{name}: {output} is neither the old nor the new one")
        accepted = [*_blocks(root), *(part for output in self.outputs for part in _finished_files(root, output))]
        for part in accepted:
            is_whole = digests(part.path) == {".": part.sha256}
            self._expect(is_whole, f"{name}: {part.path.name} is accepted and is not whole")
        return accepted

    def _is_there(self, root: Path, promised: str, accepted: list[Part]) -> bool:
        path = root / promised
        if promised.startswith(".work/capture-") and path.match("block-*.json"):
            return path.with_suffix(".safetensors") in [part.path for part in accepted]
        if self.name == CONVERT and path.match(f"*{BUILDING_SUFFIX}/s*-*.safetensors"):
            is_in_place = self._digests(root) == self._wanted
            return is_in_place or path in [part.path for part in accepted]
        return digests(path) == self._wanted[promised] if promised in self.outputs else True

    def _expect_clean(self, root: Path, name: str, *, is_done: bool = False) -> None:
        left = {
            str(path.relative_to(root))
            for path in root.rglob(".*")
            if path.name.startswith(TEMPORARY_PREFIX) or path.suffix in (BUILDING_SUFFIX, ".jsonl")
        }
        for output in self.outputs if not is_done else ():
            if (root / output).exists():
                # The earlier one stays beside the new one until that is known to be on the disk.
                left.discard(f".{output}.old{BUILDING_SUFFIX}")
            if self.name == CONVERT:
                left -= {f".{output}{BUILDING_SUFFIX}", f".{output}{BUILDING_SUFFIX}.jsonl"}
        self._expect(not left, f"{name}: left {sorted(left)}")

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.losses.append(message)

    @staticmethod
    def _forget(root: Path, work: Path) -> None:
        for folder in (root, work, root.with_name(root.name + "-resumed")):
            shutil.rmtree(folder, ignore_errors=True)


def _is_named(said: list[str], point: Point) -> bool:
    """Say whether the last line, the only one of an error, names the file: its final name if a descriptor was known."""
    if sum("error" in line.lower() or "Traceback" in line for line in said) != 1 or "error: [Errno " not in said[-1]:
        return False
    final = point.kind.removesuffix(" (temporary)")
    names = {kind_of(word.strip("':")) for word in said[-1].split()}
    return (point.call in DESCRIPTOR_CALLS and "'" in said[-1]) or bool(names & {final, f"{final} (temporary)"})


def digests(path: Path) -> dict[str, str] | None:
    """Return the sha256 of a file, or of each file of a folder; None if nothing is there."""
    if not path.exists():
        return None
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _blocks(root: Path) -> Iterator[Part]:
    """Yield the blocks that a capture accepts."""
    for folder in Repository(root).scratch_folders():
        for record in sorted(folder.glob("block-*.json")):
            path = record.with_suffix(".safetensors")
            try:
                store = BlockStore(root / ".work", read_json_object(folder / "identity.json"))
                block = Block.parse(read_json_object(record), name=str(record))
                store.open(block)
            except (ValueError, FileNotFoundError):
                continue
            yield Part(path=path, final=path, sha256=block.sha256)


def _finished_files(root: Path, output: str) -> Iterator[Part]:
    """Yield the files of a folder being built that are recorded as finished, in whole lines, and are there."""
    building = root / f".{output}{BUILDING_SUFFIX}"
    record = _record(building)
    for line in record.read_text().splitlines(keepends=True)[1:] if record.exists() else ():
        if line.endswith("\n"):
            name, values = json.loads(line)
            path = building / name
            if path.exists() and path.stat().st_size == values["bytes"]:
                yield Part(path=path, final=root / output / name, sha256=values["sha256"])


def _record(building: Path) -> Path:
    return building.with_name(f"{building.name}.jsonl")


def _aside(root: Path, output: str) -> Path:
    return root / f".{output}.old{BUILDING_SUFFIX}"


def _state_of(root: Path) -> str:
    """Return a digest of what a resume depends on: not of what it removes unread, nor of locks and inputs."""
    digest = hashlib.sha256()
    for path in _files(root):
        name = str(path.relative_to(root))
        is_removed = path.name.startswith(TEMPORARY_PREFIX) or path.is_dir()
        digest.update(f"{kind_of(name) if is_removed else name}\n".encode())
        if not is_removed and "lock" not in path.name:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """Yield files and unfinished folders in a fixed order, without inputs."""
    for path in sorted(folder.iterdir()):
        if path.name in ("inputs", "stages", ".dvc", "fingerprints.json"):
            continue
        is_removed = path.name.endswith(BUILDING_SUFFIX) and not _record(path).exists()
        if path.is_dir() and not is_removed:
            yield from _files(path)
        else:
            yield path
