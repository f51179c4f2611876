"""Sweeps of a stage over its points: crash, look at what is left, resume, compare with an undisturbed run."""

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
from tests.fault_layer import DESCRIPTOR_CALLS, SMALL, Point, kind_of
from tests.repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.crash_server import CrashServer

OUTPUTS = {"tokenize": "tokens", "capture": "features.json", "shards": "cache"}
SIGNALS = {
    "SIGTERM": (143, "terminated; finished work is kept, run again to go on"),
    "SIGINT": (130, "interrupted; finished work is kept, run again to go on"),
}
ERRORS = {
    "ENOSPC": ("create", "mkdir", "pwrite", "ftruncate", "rename", "replace"),
    "EIO": ("pwrite", "fsync", "open", "replace", "rename", "ftruncate", "unlink", "rmdir", "chmod"),
    "EACCES": ("create", "mkdir", "open", "rename", "replace", "unlink", "rmdir", "flock"),
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


@dataclass
class Sweep:
    """One stage, from one state of the repository.

    Attributes:
        server: Runs stages.
        stage: The stage.
        before: The repository as the stage finds it.
        undisturbed: The same after a run of the stage that nothing disturbed.
        work: An empty folder.
    """

    server: CrashServer
    stage: str
    before: Path
    undisturbed: Path
    work: Path
    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    _resumed: set[str] = field(default_factory=set)
    _number: int = 0

    def __post_init__(self) -> None:
        self.points = self._enumerate()
        self._wanted = Repository(self.undisturbed).digests(OUTPUTS[self.stage])
        self._earlier = Repository(self.before).digests(OUTPUTS[self.stage]) if self._had_output() else {}

    def _had_output(self) -> bool:
        return (self.before / OUTPUTS[self.stage]).exists()

    def _enumerate(self) -> list[Point]:
        """Return every point of an undisturbed run."""
        root, work = self._fresh()
        assert self.server.run(root, self.stage, work) == 0, (work / "stderr").read_text()
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
                code = self.server.run(root, self.stage, work, point=number, action=action, survivors=str(survivors))
                self._expect(code == -9, f"{name}: exit code {code}")
                self.counts["points killed"] += 1
                self._go_on_from_power_loss(survivors, name)
                self._go_on(root, set(json.loads((survivors / "promised.json").read_text())), name)
                self._forget(root, work)

    def lose_power_after_the_end(self) -> None:
        """The stage has exited with 0: whatever it put in place must be there."""
        root, work = self._fresh()
        survivors = work / "survivors"
        survivors.mkdir()
        code = self.server.run(root, self.stage, work, point=-1, survivors=str(survivors))
        self._expect(code == 0, f"exit code {code} of an undisturbed run")
        self._go_on_from_power_loss(survivors, "power loss after the end")
        self._forget(root, work)

    def signal(self, numbers: list[int], *names: str) -> None:
        """Send a signal at each point; the stage may finish its write, and must not exit with 0."""
        for number in numbers:
            for action in names:
                expected, words = SIGNALS[action]
                root, work = self._fresh()
                name = f"{action} at {number} {self.points[number]}"
                code = self.server.run(root, self.stage, work, point=number, action=action)
                said = (work / "stderr").read_text().strip().splitlines()
                self._expect(code == expected and said[-1:] == [words], f"{name}: exit code {code}, said {said[-1:]}")
                if self.points[number].call not in REMOVALS:
                    self._expect_clean(root, name)
                self.counts["points signalled"] += 1
                self._go_on(root, set(), name)
                self._forget(root, work)

    def start_second(self, numbers: list[int], stage: str) -> None:
        """Stop at each point and start another stage: it is refused, and the first ends as if nothing had been."""
        for number in numbers:
            root, work = self._fresh()
            second = work / "second"
            second.mkdir()
            name = f"{stage} started at {number} {self.points[number]}"
            codes = self.server.run_two(root, (self.stage, stage), (work, second), number)
            said = (second / "stderr").read_text().strip().splitlines()[-1:]
            expected = f"is being written by process {codes['pid']} on host {os.uname().nodename}"
            is_refused = codes.get("second") == 1 and any(expected in line for line in said)
            self._expect(is_refused, f"{name}: the second run gave {codes}, said {said}")
            self._expect(codes["code"] == 0, f"{name}: the first run gave {codes}")
            found = Repository(root).digests(OUTPUTS[self.stage])
            self._expect(found == self._wanted, f"{name}: other bytes")
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
                code = self.server.run(root, self.stage, work, point=number, action=action, sticky=action == "ENOSPC")
                said = (work / "stderr").read_text().strip().splitlines()[-1:]
                self._expect(code == 1, f"{name}: exit code {code}, said {said}")
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
            self._expect(_is_there(root, kept, accepted), f"{name}: {kept} was finished and is lost")
        state = _state_of(root)
        if state in self._resumed:
            return
        self._resumed.add(state)
        self.counts["states resumed"] += 1
        work = root.with_name(root.name + "-resumed")
        work.mkdir()
        before = {path: path.stat().st_ino for path in accepted}
        code = self.server.run(root, self.stage, work)
        self._expect(code == 0, f"{name}: the next run gave {code}: {(work / 'stderr').read_text()[-500:]}")
        if code == 0:
            found = Repository(root).digests(OUTPUTS[self.stage])
            self._expect(found == self._wanted, f"{name}: the next run made other bytes")
            after = {path: path.stat().st_ino for path in accepted}
            self._expect(before == after, f"{name}: the next run made finished blocks again")
            self._expect_clean(root, f"the run after {name}", is_done=True)

    def _accepted(self, root: Path, name: str) -> list[Path]:
        """Return the block files that a resume accepts; whatever a reader would accept must be whole."""
        output = OUTPUTS[self.stage]
        if (root / output).exists():
            found = Repository(root).digests(output)
            self._expect(found in (self._wanted, self._earlier), f"{name}: {output} is neither the old nor the new one")
        accepted = []
        for folder in Repository(root).scratch_folders():
            for record in sorted(folder.glob("block-*.json")):
                path = record.with_suffix(".safetensors")
                try:
                    store = BlockStore(root / ".work", read_json_object(folder / "identity.json"))
                    block = Block.parse(read_json_object(record), name=str(record))
                    store.open(block)
                except (ValueError, FileNotFoundError):
                    continue
                is_whole = hashlib.sha256(path.read_bytes()).hexdigest() == block.sha256
                self._expect(is_whole, f"{name}: {path.name} is accepted and is not whole")
                accepted.append(path)
        return accepted

    def _expect_clean(self, root: Path, name: str, *, is_done: bool = False) -> None:
        left = [
            str(path.relative_to(root))
            for path in root.rglob(".*")
            if path.name.startswith(TEMPORARY_PREFIX) or path.name.endswith(BUILDING_SUFFIX)
        ]
        output = OUTPUTS[self.stage]
        if not is_done and (root / output).exists():
            # The earlier one stays beside the new one until that is known to be on the disk.
            left = [path for path in left if path != f".{output}.old{BUILDING_SUFFIX}"]
        self._expect(not left, f"{name}: left {left}")

    def _expect(self, holds: bool, message: str) -> None:
        if not holds:
            self.losses.append(message)

    @staticmethod
    def _forget(root: Path, work: Path) -> None:
        for folder in (root, work, root.with_name(root.name + "-resumed")):
            shutil.rmtree(folder, ignore_errors=True)


def _is_named(said: list[str], point: Point) -> bool:
    """Say whether the last line names the file, by its final name where the call knew only a descriptor."""
    if not said or not said[0].startswith("error: [Errno "):
        return False
    final = point.kind.removesuffix(" (temporary)")
    names = {kind_of(word.strip("':")) for word in said[0].split()}
    return point.call in DESCRIPTOR_CALLS or bool(names & {final, f"{final} (temporary)"})


def _is_there(root: Path, promised: str, accepted: list[Path]) -> bool:
    path = root / promised
    if promised.startswith(".work/capture-") and path.match("block-*.json"):
        return path.with_suffix(".safetensors") in accepted
    return path.exists() if promised in OUTPUTS.values() else True


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
        if path.is_dir() and not path.name.endswith(BUILDING_SUFFIX):
            yield from _files(path)
        else:
            yield path
