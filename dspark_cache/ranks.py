"""Ranks of one run: who they are, what they tell each other, and how they end together.

The ranks are processes started by torchrun, srun, mpirun, or by a stage itself. They share a store of
torch.distributed; only those that hold one copy of the target together (`Group`) need collectives.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import traceback
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from dspark_cache.errors import DsparkCacheError, SettingsError, Terminated
from dspark_cache.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

_T = TypeVar("_T")

MESSAGE_BYTES = 1 << 22
"""Largest value put into the store at once; a TCPStore takes at most 8 MiB."""
POLL_SECONDS = 0.1
"""How often whoever waits looks; waiting in the store itself writes two lines of log each time it ends in vain."""
MEETING_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for rank 0 to come up."""
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""Ranks in lockstep wait for each other's disks and checkpoints, never for as long as this."""
LOST_SECONDS = 5.0
"""How long a rank that lost another one lives on, so that a launcher sees that one fail first."""

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    # before srun, by which mpirun starts its daemons
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # SLURM_STEP_*: those of srun; a batch script has SLURM_PROCID and SLURM_NTASKS too, and is no rank
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
"""Variables of torchrun, Open MPI, srun, and MPICH or Intel MPI: rank, number of ranks, and both on this machine."""


class PeerLostError(DsparkCacheError, ConnectionError):
    """Another rank of the run has failed, or cannot be reached any more."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of a run.

    Attributes:
        number: 0 to `count` - 1.
        count: How many there are.
        local: The same on this machine.
        local_count: How many are on this machine.
    """

    number: int = 0
    count: int = 1
    local: int = 0
    local_count: int = 1


def find_rank(environment: Mapping[str, str]) -> Rank | None:
    """Return the rank that a launcher gave this process; None if it was started alone.

    Raises:
        SettingsError: A launcher's variables are incomplete or no numbers.
    """
    for names in _LAUNCHERS:
        if names[0] in environment and names[1] in environment:
            found = [re.match(r"\d+", value) for value in _values(names, environment)]
            if not all(found):
                values = ", ".join(f"{name}={environment.get(name)!r}" for name in names)
                raise SettingsError(f"the launcher's variables are incomplete: {values}: expected a number in each")
            rank = Rank(*(int(match[0]) for match in found if match))
            if rank.count > 1 or names[0] == "RANK":
                return rank
    return None


def _values(names: tuple[str, ...], environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables; of srun's list of tasks, "4(x2),3" of three nodes, what this node has."""
    values = [environment.get(name, "") for name in names]
    if names[0] == "SLURM_PROCID":
        runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", values[-1])
        tasks = [number for number, nodes in runs for _ in range(int(nodes or 1))]
        node = int(environment.get("SLURM_NODEID") or 0)
        values[-1] = tasks[node] if node < len(tasks) else ""
    return values


def find_master(rank: Rank, environment: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port where rank 0 is met: MASTER_ADDR and MASTER_PORT, else what the launcher lets know.

    Raises:
        SettingsError: The ranks are on several machines, and nothing says where rank 0 is; or a port that is no number.
    """
    host = environment.get("MASTER_ADDR")
    if not host and rank.count == rank.local_count:
        host = "127.0.0.1"
    if not host and environment.get("SLURM_STEP_NODELIST"):
        # gpu[003-006,010],x is the nodes gpu003 to gpu006, gpu010 and x
        host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", environment["SLURM_STEP_NODELIST"]).partition(",")[0]
    if not host:
        raise SettingsError("the ranks are on several machines: set MASTER_ADDR to the host of rank 0")
    step = f"{environment.get('SLURM_JOB_ID')}.{environment.get('SLURM_STEP_ID')}"
    job = environment.get("PMIX_NAMESPACE", step)  # of mpirun, some of whose ranks may be tasks of srun, others not
    port = environment.get("MASTER_PORT") or str(20000 + zlib.crc32(job.encode()) % 10000)
    if not port.isdecimal():
        raise SettingsError(f"MASTER_PORT: expected a number, found {port!r}")
    return host, int(port)


class Peers:
    """What the ranks of a run tell each other. Each call may raise `PeerLostError`."""

    def __init__(self, rank: Rank, store: Store) -> None:
        """Hold the store that all ranks have."""
        self.rank = rank
        self._store = store

    @classmethod
    def alone(cls) -> Peers:
        """Return the peers of a process that is the only rank."""
        return cls(Rank(), HashStore())

    @classmethod
    def join(cls, rank: Rank) -> Peers:
        """Meet the other ranks, and let libraries that read torchrun's variables know the rank.

        Raises:
            SettingsError: Nothing says where rank 0 is.
            PeerLostError: It is not there.
        """
        host, port = find_master(rank, os.environ)
        values = {"RANK": rank.number, "WORLD_SIZE": rank.count, "LOCAL_RANK": rank.local, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR=host)
        try:
            store, _, _ = next(rendezvous("env://", timeout=MEETING_TIMEOUT))
        except (dist.DistError, RuntimeError) as error:
            raise PeerLostError(
                f"rank {rank.number} cannot meet rank 0 at {host}:{port}: {error}; set MASTER_ADDR and MASTER_PORT"
            ) from error
        return cls(rank, PrefixStore("dspark-cache", store))

    def part(self, name: str) -> Store:
        """Return a part of the store that nothing else writes to."""
        return PrefixStore(name, self._store)

    def add(self, name: str, amount: int) -> int:
        """Add to a number that all ranks share, 0 at first; return the sum."""
        total: int = self._reach(self._store.add, name, amount)
        return total

    def tell(self, name: str, content: bytes) -> None:
        """Let all ranks read `content`; told once, by one rank."""
        parts = [content[start : start + MESSAGE_BYTES] for start in range(0, len(content), MESSAGE_BYTES)]
        for number, part in enumerate(parts):
            self._reach(self._store.set, f"{name}/{number}", part)
        self._reach(self._store.set, name, str(len(parts)))

    def hear(self, name: str) -> bytes:
        """Wait for what another rank tells."""
        while not self._is_told(name):
            pass
        count = int(self._reach(self._store.get, name))
        return b"".join(self._reach(self._store.get, f"{name}/{number}") for number in range(count))

    def fail(self, text: str) -> None:
        """Let the other ranks know that this one fails; the first one's text is kept."""
        if self.add("failures", 1) == 1:
            self._reach(self._store.set, "failed", text)

    def ensure_no_failure(self) -> None:
        """Raise if a rank has failed.

        Raises:
            PeerLostError: With that rank's words.
        """
        if self._reach(self._store.check, ["failed"]):
            raise PeerLostError(self._reach(self._store.get, "failed").decode())

    def finish(self, refresh: Callable[[], object]) -> None:
        """Say that this rank is done; rank 0 waits for all, and calls `refresh` meanwhile."""
        if self.add("finished", 1) == self.rank.count:
            self.tell("all finished", b"")
        if self.rank.number == 0:
            while not self._is_told("all finished"):
                refresh()
            refresh()

    def _is_told(self, name: str) -> bool:
        """Wait a little for what is told, and look for failures."""
        self.ensure_no_failure()
        is_told: bool = self._reach(self._store.check, [name])
        if not is_told:
            time.sleep(POLL_SECONDS)
        return is_told

    def _reach(self, call: Callable[..., _T], *arguments: Any) -> _T:
        try:
            return call(*arguments)
        except dist.DistNetworkError as error:
            raise PeerLostError(f"rank {self.rank.number} cannot reach the others any more: {error}") from error


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that hold one copy of the target together; by itself a rank with a copy of its own.

    Its process group is torch.distributed's default one, since that is the one transformers shards over.

    Attributes:
        rank: 0 to `size` - 1 in the group.
        size: How many ranks.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, peers: Peers, size: int, device: torch.device) -> Group:
        """Form the groups of `size` ranks that follow each other; a collective."""
        rank = peers.rank
        group = cls(rank.number % size, size)
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # by which transformers chooses the device
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=peers.part(f"group-{rank.number // size}"),
            rank=group.rank,
            world_size=size,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        return group

    def leave(self) -> None:
        """Give up the process group, after the last collective."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def agree(self, value: int) -> int:
        """Return the value of the group's first rank; a collective."""
        if self.size == 1:
            return value
        shared = torch.tensor(value)
        dist.broadcast(shared, 0)
        return int(shared)

    def most(self, value: int) -> int:
        """Return the largest value of the group's ranks; a collective."""
        if self.size == 1:
            return value
        shared = torch.tensor(value)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)


class SharedProgress:
    """Units that all ranks have done, on one bar of rank 0."""

    def __init__(self, peers: Peers, progress: Progress | None) -> None:
        """Begin at what `progress` shows; other ranks than 0 have none."""
        self._peers = peers
        self._progress = progress
        self._shown = 0

    @classmethod
    @contextmanager
    def of(cls, peers: Peers, name: str, total: int, unit: str, *, done: int) -> Iterator[SharedProgress]:
        """Show progress while the block runs, as `Progress` does."""
        if peers.rank.number:
            yield cls(peers, None)
        else:
            with Progress(name, total, unit, done=done) as progress:
                yield cls(peers, progress)

    def advance(self, units: int) -> None:
        """Add units that this rank has done; negative ones take some back."""
        total = self._peers.add("units", units)
        if self._progress is not None:
            self._progress.advance(total - self._shown)
            self._shown = total

    def refresh(self) -> None:
        """Show what the other ranks have done."""
        self.advance(0)


@contextmanager
def ending_together(peers: Peers, report: Path | None = None) -> Iterator[None]:
    """End the process at once if the block raises, so that the rank that failed first is the one that is named.

    A rank that has failed leaves no collective undone on purpose: it says why, lets the others know and exits. A
    rank that has lost another one says nothing and lives a little longer.

    Args:
        peers: The ranks.
        report: File to write the reason to, for whoever started the ranks; None: it is said on stderr.
    """
    try:
        yield
    except KeyboardInterrupt:
        _exit(130)
    except Terminated:
        _exit(143)
    except BaseException as error:
        if _is_of_another(error):
            if peers.rank.number == 0 and report is None:
                sys.stderr.write(f"error: {error}\n")
                sys.stderr.flush()
            time.sleep(LOST_SECONDS)
            _exit(1)
        if not isinstance(error, DsparkCacheError | OSError):
            traceback.print_exc()
        text = f"rank {peers.rank.number} on {socket.gethostname()}: {str(error) or type(error).__name__}"
        with suppress(PeerLostError):
            peers.fail(text)
        if report is None:
            sys.stderr.write(f"error: {text}\n")
        else:
            report.write_text(text)
        _exit(1)


def _is_of_another(error: BaseException) -> bool:
    """Say whether an error only tells that another rank is gone."""
    return isinstance(error, PeerLostError | dist.DistNetworkError) or "closed by peer" in str(error)


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
