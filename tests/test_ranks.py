"""Ranks: who a launcher says they are, what they tell each other over a real store, and how they end together."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from dspark_cache.errors import DsparkCacheError, SettingsError, Terminated
from dspark_cache.ranks import (
    MESSAGE_BYTES,
    Group,
    PeerLostError,
    Peers,
    Rank,
    SharedProgress,
    ending_together,
    find_master,
    find_rank,
)
from tests.repository import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOST = socket.gethostname()
HANG_SECONDS = 120

# Who a process is


def torchrun(number: int, count: int, local: int, local_count: int) -> dict[str, str]:
    values = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_count}
    return {name: str(value) for name, value in values.items()}


def srun(number: int, count: int, local: int, per_node: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "71",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_NTASKS": str(count),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


def mpirun(number: int, count: int, local: int, local_count: int) -> dict[str, str]:
    """Return what Open MPI sets."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = zip(names, (number, count, local, local_count), strict=True)
    return {"PMIX_NAMESPACE": "prterun-vm-1@1"} | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values}


def mpiexec(number: int, count: int, local: int, local_count: int) -> dict[str, str]:
    """Return what MPICH and Intel MPI set."""
    values = {"PMI_RANK": number, "PMI_SIZE": count, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": local_count}
    return {name: str(value) for name, value in values.items()}


def mpiexec_by_port(number: int, count: int, local: int, local_count: int) -> dict[str, str]:
    """Return what MPICH sets with -pmi-port: PMI_ID is the rank."""
    return mpiexec(number, count, local, local_count) | {"PMI_PORT": "gpu1:4711", "PMI_ID": str(number)}


SBATCH = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"} | {
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[1-2]",
}
"""What a batch script has though it is no rank: its tasks are those of the srun that it may call."""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"PATH": "/bin", "SLURM_JOB_ID": "71"}, None),
        (torchrun(5, 8, 1, 4), Rank(5, 8, 1, 4)),
        (torchrun(0, 1, 0, 1), Rank()),  # whoever started it by torchrun has it joined, also alone
        (srun(5, 8, 1, "4(x2)"), Rank(5, 8, 1, 4)),
        (srun(1, 2, 1, "2"), Rank(1, 2, 1, 2)),
        (srun(0, 1, 0, "1"), None),  # one task is a process as any other, and may start others
        (SBATCH, None),
        (SBATCH | srun(7, 8, 3, "4(x2)"), Rank(7, 8, 3, 4)),
        (SBATCH | srun(0, 1, 0, "1"), None),
        (mpirun(5, 8, 1, 4), Rank(5, 8, 1, 4)),
        (mpirun(0, 1, 0, 1), None),
        (SBATCH | mpirun(5, 8, 1, 4), Rank(5, 8, 1, 4)),  # mpirun in a batch script
        (mpiexec(5, 8, 1, 4), Rank(5, 8, 1, 4)),
        (mpiexec(0, 1, 0, 1), None),
        (srun(1, 2, 0, "1(x2)") | torchrun(6, 8, 2, 4), Rank(6, 8, 2, 4)),  # torchrun as a task of srun
        (srun(0, 1, 0, "1") | torchrun(3, 4, 3, 4), Rank(3, 4, 3, 4)),
        (srun(0, 1, 0, "1") | mpirun(3, 4, 3, 4), Rank(3, 4, 3, 4)),
        (srun(1, 2, 0, "1(x2)") | mpirun(5, 8, 1, 4), Rank(5, 8, 1, 4)),  # the srun that started mpirun's daemons
        (srun(1, 2, 1, "2") | {"PMI_RANK": "1", "PMI_SIZE": "2"}, Rank(1, 2, 1, 2)),  # srun --mpi=pmi2
        (srun(5, 7, 1, "4,3") | {"SLURM_NODEID": "1"}, Rank(5, 7, 1, 3)),
        (srun(9, 11, 1, "4(x2),3") | {"SLURM_NODEID": "2"}, Rank(9, 11, 1, 3)),
        ({"RANK": "3"}, None),  # a name that others use too
        ({"WORLD_SIZE": "3", "LOCAL_RANK": "0"}, None),
    ],
)
def test_the_rank_that_a_launcher_gives(environment: dict[str, str], expected: Rank | None) -> None:
    assert find_rank(environment) == expected


@pytest.mark.parametrize(
    ("environment", "values"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK='0', WORLD_SIZE='2', LOCAL_RANK=None, LOCAL_WORLD_SIZE=None"),
        (
            torchrun(0, 2, 0, 2) | {"LOCAL_RANK": ""},
            "RANK='0', WORLD_SIZE='2', LOCAL_RANK='', LOCAL_WORLD_SIZE='2'",
        ),
        (torchrun(0, 2, 0, 2) | {"RANK": "x"}, "RANK='x', WORLD_SIZE='2', LOCAL_RANK='0', LOCAL_WORLD_SIZE='2'"),
        (torchrun(-1, 2, 0, 2), "RANK='-1', WORLD_SIZE='2', LOCAL_RANK='0', LOCAL_WORLD_SIZE='2'"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_PROCID='0', SLURM_STEP_NUM_TASKS='2', SLURM_LOCALID=None, SLURM_STEP_TASKS_PER_NODE=None",
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "PMI_RANK='0', PMI_SIZE='2', MPI_LOCALRANKID=None, MPI_LOCALNRANKS=None",
        ),
    ],
)
def test_variables_that_do_not_say_all_are_refused(environment: dict[str, str], values: str) -> None:
    with pytest.raises(SettingsError) as error:
        find_rank(environment)
    assert str(error.value) == f"the launcher's variables are incomplete: {values}: expected a number in each"


# Where rank 0 is

TWO_MACHINES = Rank(5, 8, 1, 4)
ONE_MACHINE = Rank(1, 4, 1, 4)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu", "gpu"),
        ("a,b", "a"),
        ("gpu[003-006,010],x", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("gpu[7,9]", "gpu7"),
        ("x,gpu[003-006]", "x"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("gpu-a[1-2].cluster.example,b", "gpu-a1.cluster.example"),
    ],
)
def test_rank_0_is_on_the_first_node_of_the_step(nodes: str, host: str) -> None:
    environment = {"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": "other", "MASTER_PORT": "5"}
    assert find_master(TWO_MACHINES, environment) == (host, 5)


@pytest.mark.parametrize(
    ("rank", "environment", "expected"),
    [
        (TWO_MACHINES, {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}, ("here", 29500)),
        (TWO_MACHINES, {"MASTER_ADDR": "here", "SLURM_STEP_NODELIST": "there", "MASTER_PORT": "1"}, ("here", 1)),
        (ONE_MACHINE, {"MASTER_ADDR": "here", "MASTER_PORT": "1"}, ("here", 1)),
        (ONE_MACHINE, {"SLURM_STEP_NODELIST": "gpu3", "MASTER_PORT": "1"}, ("127.0.0.1", 1)),
        (ONE_MACHINE, {"MASTER_ADDR": "", "MASTER_PORT": "1"}, ("127.0.0.1", 1)),
    ],
)
def test_what_the_environment_says_of_rank_0(
    rank: Rank, environment: dict[str, str], expected: tuple[str, int]
) -> None:
    assert find_master(rank, environment) == expected


@pytest.mark.parametrize("environment", [{}, mpirun(5, 8, 1, 4), {"MASTER_PORT": "1"}, {"SLURM_STEP_NODELIST": ""}])
def test_several_machines_of_which_nobody_says_the_first_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError) as error:
        find_master(TWO_MACHINES, environment)
    assert str(error.value) == "the ranks are on several machines: set MASTER_ADDR to the host of rank 0"


@pytest.mark.parametrize("launcher", [srun, mpirun, mpiexec, mpiexec_by_port])
def test_all_ranks_of_a_job_work_out_the_same_port(launcher: Callable[..., dict[str, str]]) -> None:
    ports = set()
    for number in range(4):
        environment = launcher(number, 4, number, "4")
        rank = find_rank(environment)
        assert rank == Rank(number, 4, number, 4)
        ports.add(find_master(rank, environment)[1])
    (port,) = ports
    assert 20000 <= port < 30000


def test_ranks_of_mpirun_agree_on_the_port_whether_or_not_srun_started_their_daemon() -> None:
    """The daemon on mpirun's own machine is no task of srun, the others are."""
    here = SBATCH | mpirun(0, 8, 0, 4) | {"MASTER_ADDR": "gpu1"}
    there = here | srun(0, 1, 0, "1") | {"SLURM_STEP_NODELIST": "gpu2"} | mpirun(5, 8, 1, 4)
    assert find_master(Rank(0, 8, 0, 4), here) == find_master(TWO_MACHINES, there)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (srun(0, 4, 0, "4"), {"SLURM_JOB_ID": "72"}),
        (srun(0, 4, 0, "4"), {"SLURM_STEP_ID": "1"}),
        (mpirun(0, 4, 0, 4), {"PMIX_NAMESPACE": "prterun-vm-2@1"}),
        (srun(0, 4, 0, "4"), {"MASTER_PORT": "12345"}),
    ],
)
def test_jobs_beside_each_other_have_ports_of_their_own(one: dict[str, str], other: dict[str, str]) -> None:
    assert find_master(ONE_MACHINE, one)[1] != find_master(ONE_MACHINE, one | other)[1]


# What ranks tell each other, in one process


def peers_of_one_process(count: int) -> list[Peers]:
    store = dist.HashStore()
    return [Peers(Rank(number, count, number, count), store) for number in range(count)]


def test_a_process_alone_is_rank_0_of_1() -> None:
    peers = Peers.alone()
    assert peers.rank == Rank(0, 1, 0, 1)
    peers.tell("x", b"content")
    assert peers.hear("x") == b"content"
    assert [peers.add("turns", 2) for _ in range(3)] == [2, 4, 6]
    refreshed: list[int] = []
    peers.finish(lambda: refreshed.append(1))
    assert refreshed
    assert Peers.alone().add("turns", 1) == 1  # nothing is shared with another


@pytest.mark.parametrize("size", [0, 1, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1, 2 * MESSAGE_BYTES])
def test_what_is_told_is_heard_whatever_its_size(size: int) -> None:
    first, second = peers_of_one_process(2)
    content = os.urandom(size)
    first.tell("x", content)
    assert second.hear("x") == first.hear("x") == content


def test_the_first_failure_is_the_one_that_is_kept() -> None:
    ranks = peers_of_one_process(3)
    ranks[0].ensure_no_failure()
    ranks[2].fail("the first")
    ranks[1].fail("the second")
    ranks[2].fail("the third")
    for peers in ranks:
        with pytest.raises(PeerLostError, match=r"^the first$"):
            peers.ensure_no_failure()
        with pytest.raises(PeerLostError, match=r"^the first$"):
            peers.hear("what is never told")
    with pytest.raises(PeerLostError, match=r"^the first$"):
        ranks[0].finish(lambda: None)
    assert issubclass(PeerLostError, DsparkCacheError)
    assert issubclass(PeerLostError, ConnectionError)


def test_whoever_has_finished_needs_nobody_any_more() -> None:
    """Rank 0, which has the store, may be gone by then."""
    first, second = peers_of_one_process(2)
    second.finish(lambda: pytest.fail("rank 1 looks at the store after it has finished"))
    refreshed: list[int] = []
    first.finish(lambda: refreshed.append(1))
    assert refreshed


def test_a_part_of_the_store_is_apart() -> None:
    (peers,) = peers_of_one_process(1)
    peers.part("a").set("x", "1")
    assert peers.part("a").get("x") == b"1"
    assert not peers.part("b").check(["x"])
    assert peers.add("x", 5) == 5


def test_a_rank_by_itself_agrees_with_itself() -> None:
    group = Group()
    assert (group.rank, group.size) == (0, 1)
    assert (group.agree(7), group.most(8)) == (7, 8)
    group.leave()


# Progress


def test_progress_is_that_of_all_ranks_on_the_first_one(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, third = peers_of_one_process(3)
    with SharedProgress.of(first, "capture", 100, "tok", done=40) as shown:
        with SharedProgress.of(second, "capture", 100, "tok", done=40) as other:
            other.advance(30)
            shown.advance(5)
            other.advance(20)
            other.advance(-20)  # an attempt that came to nothing
            other.refresh()
        with SharedProgress.of(third, "capture", 100, "tok", done=40) as other:
            other.advance(15)
        shown.refresh()
        shown.refresh()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("capture:  90%|")
    assert " 90.0/100 " in line
    assert first.add("units", 0) == 50


def test_progress_goes_back_and_on_from_what_others_have_done(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = peers_of_one_process(2)
    with SharedProgress.of(first, "capture", 10, "tok", done=0) as shown:
        SharedProgress(second, None).advance(4)
        shown.advance(6)
        shown.advance(-6)
    assert " 4.00/10.0 " in capsys.readouterr().err


# Real processes

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__])  # so that torch is imported once


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, what it said on stderr, what its task returned."""

    code: int | None
    said: str
    value: Any


def run_processes(folder: Path, tasks: list[tuple[Any, ...]]) -> list[Ended]:
    """Run each task, a function and its arguments, in a process of its own, all at once."""
    processes = [
        CONTEXT.Process(target=be_process, args=(folder, number, *task), daemon=True)
        for number, task in enumerate(tasks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_SECONDS)
        process.kill()
    return [look_at(folder, number, process) for number, process in enumerate(processes)]


def be_process(folder: Path, number: int, task: Callable[..., Any], *arguments: Any) -> None:
    with (folder / f"{number}.err").open("w") as said:
        os.dup2(said.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - the one there is the fork server's
    (folder / f"{number}.value").write_bytes(pickle.dumps(task(*arguments)))


def look_at(folder: Path, number: int, process: Any) -> Ended:
    process.join()
    value = folder / f"{number}.value"
    said = (folder / f"{number}.err").read_text()
    return Ended(process.exitcode, said, pickle.loads(value.read_bytes()) if value.exists() else None)


def join(number: int, count: int, port: int) -> Peers:
    """Meet the others as a launcher's process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return Peers.join(Rank(number, count, number, count))


LARGE = hashlib.sha256(b"").digest() * (9 * (1 << 20) // 32 + 1)
"""More than a TCPStore takes at once."""


def talk(number: int, count: int, port: int) -> dict[str, Any]:
    """Tell, hear, add and finish with others; return what this rank found."""
    peers = join(number, count, port)
    if number == 0:
        peers.tell("large", LARGE)
    heard = peers.hear("large")
    peers.add("sum", 10**number)
    peers.tell(f"from {number}", str(number).encode())
    names = [peers.hear(f"from {other}") for other in range(count)]
    group = Group.join(peers, 2, torch.device("cpu"))
    agreed, most = group.agree(number), group.most(number)
    group.leave()
    refreshed: list[int] = []

    def refresh() -> None:
        refreshed.append(1)
        if number == 0 and len(refreshed) == 1:
            peers.tell("waits", b"")

    if number:  # rank 0 waits for the others, and looks at what they have done meanwhile
        peers.hear("waits")
        peers.add("late", 1)
    peers.finish(refresh)
    return {
        "heard": heard == LARGE,
        "names": names,
        "sum": peers.add("sum", 0) if number == 0 else None,
        "late": peers.add("late", 0) if number == 0 else None,
        "group": (group.rank, group.size, agreed, most),
        "environment": {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
    }


def test_ranks_in_processes_of_their_own_hear_each_other(tmp_path: Path) -> None:
    count, port = 4, free_port()
    ended = run_processes(tmp_path, [(talk, number, count, port) for number in range(count)])
    assert [each.code for each in ended] == [0] * count, ended
    assert [each.said for each in ended] == [""] * count  # also where it waits for long
    values = [each.value for each in ended]
    assert all(value["heard"] for value in values)
    assert [value["names"] for value in values] == [[b"0", b"1", b"2", b"3"]] * count
    assert (values[0]["sum"], values[0]["late"]) == (1111, 3)
    assert [value["group"] for value in values] == [(0, 2, 0, 1), (1, 2, 0, 1), (0, 2, 2, 3), (1, 2, 2, 3)]
    for number, value in enumerate(values):
        expected = {"RANK": number, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        assert value["environment"] == {name: str(value) for name, value in expected.items()}


def lose(number: int, port: int) -> str | None:
    """Be killed as rank 0, once the other one waits; as that one, say how it is told."""
    peers = join(number, 2, port)
    if number == 0:
        peers.hear("ready")
        os.kill(os.getpid(), signal.SIGKILL)
    peers.tell("ready", b"")
    try:
        peers.hear("what is never told")
    except PeerLostError as error:
        return str(error)
    return None


def test_a_rank_that_is_killed_is_missed_by_those_who_wait(tmp_path: Path) -> None:
    port = free_port()
    killed, other = run_processes(tmp_path, [(lose, number, port) for number in range(2)])
    assert (killed.code, other.code) == (-signal.SIGKILL, 0)
    assert other.value.startswith("rank 1 cannot reach the others any more: ")


def meet(port: int) -> str | None:
    try:
        join(0, 2, port)
    except PeerLostError as error:
        return str(error)
    return None


def test_a_port_that_is_taken_is_named_with_what_to_set(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (ended,) = run_processes(tmp_path, [(meet, port)])
    assert ended.value.startswith(f"rank 0 cannot meet rank 0 at 127.0.0.1:{port}: ")
    assert ended.value.endswith("; set MASTER_ADDR and MASTER_PORT")


# How they end


def end(number: int, error: BaseException | None, report: Path | None) -> str:
    """Leave the block by an error, as rank `number` of two; return what is said if the process goes on."""
    with ending_together(Peers(Rank(number, 2, number, 2), dist.HashStore()), report):
        if error is not None:
            raise error
    return "goes on"


def fail_together(number: int, port: int) -> None:
    """Fail as rank 1, while rank 0 waits for something."""
    peers = join(number, 2, port)
    with ending_together(peers):
        if number == 1:
            raise SettingsError("cache.dtype: no")
        peers.hear("what is never told")


LOST = PeerLostError("rank 1 on host: no")
NETWORK = dist.DistNetworkError("reset")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5")
ENDS: dict[str, tuple[int, BaseException | None, int, str]] = {
    "nothing": (1, None, 0, ""),
    "interrupted": (1, KeyboardInterrupt(), 130, ""),
    "terminated": (0, Terminated(), 143, ""),
    "refused": (1, SettingsError("cache.dtype: no"), 1, f"error: rank 1 on {HOST}: cache.dtype: no\n"),
    "disk": (0, OSError(28, "full", "x"), 1, f"error: rank 0 on {HOST}: [Errno 28] full: 'x'\n"),
    "bug": (1, ValueError("odd"), 1, f"ValueError: odd\nerror: rank 1 on {HOST}: odd\n"),
    "wordless": (1, ValueError(), 1, f"ValueError\nerror: rank 1 on {HOST}: ValueError\n"),
    "memory": (1, MemoryError(), 1, f"MemoryError\nerror: rank 1 on {HOST}: MemoryError\n"),
    "rank 0 lost a peer": (0, LOST, 1, "error: rank 1 on host: no\n"),
    "rank 1 lost a peer": (1, LOST, 1, ""),
    "the network is gone": (1, NETWORK, 1, ""),
    "gloo lost a peer": (1, GLOO, 1, ""),
}
"""How a rank leaves: its number, the error, its exit code and the end of what it says."""
REPORTS = {
    "refused": f"rank 1 on {HOST}: cache.dtype: no",
    "bug": f"rank 1 on {HOST}: odd",
    "disk": f"rank 0 on {HOST}: [Errno 28] full: 'x'",
    "wordless": f"rank 1 on {HOST}: ValueError",
    "memory": f"rank 1 on {HOST}: MemoryError",
}
"""What is reported; of the others nothing is."""

Ends = dict[tuple[str, object], tuple[Ended, "Path"]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """All ends at once, as who has lost a peer lives on for a while; each without and with a file for the reason."""
    folder, port = tmp_path_factory.mktemp("ends"), free_port()
    cases: list[tuple[str, object]] = [(name, has_report) for name in ENDS for has_report in (False, True)]
    reports = [folder / f"{number}.txt" for number in range(len(cases) + 2)]
    tasks: list[tuple[Any, ...]] = [
        (end, *ENDS[name][:2], report if has_report else None)
        for (name, has_report), report in zip(cases, reports, strict=False)
    ]
    tasks += [(fail_together, number, port) for number in range(2)]
    cases += [("together", number) for number in range(2)]
    return dict(zip(cases, zip(run_processes(folder, tasks), reports, strict=True), strict=True))


@pytest.mark.parametrize("name", ENDS)
def test_a_rank_ends_with_its_exit_code_and_says_why(ends: Ends, name: str) -> None:
    _, _, code, said = ENDS[name]
    ended, report = ends[name, False]
    assert ended.code == code
    assert ended.said.endswith(said)
    assert bool(ended.said) == bool(said)
    assert ("Traceback" in ended.said) == (name in ("bug", "wordless", "memory"))
    assert ended.value == ("goes on" if name == "nothing" else None)
    assert not report.exists()


@pytest.mark.parametrize("name", ENDS)
def test_a_started_rank_reports_what_went_wrong_in_it_and_nothing_of_others(ends: Ends, name: str) -> None:
    ended, report = ends[name, True]
    assert ended.code == ENDS[name][2]
    assert "error:" not in ended.said
    assert ("Traceback" in ended.said) == (name in ("bug", "wordless", "memory"))
    assert (report.read_text() if report.exists() else None) == REPORTS.get(name)


def test_what_went_wrong_in_one_rank_is_what_the_first_one_says_too(ends: Ends) -> None:
    (first, _), (second, _) = ends["together", 0], ends["together", 1]
    assert (first.code, second.code) == (1, 1)
    assert first.said == second.said == f"error: rank 1 on {HOST}: cache.dtype: no\n"


def test_a_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(SettingsError) as error:
        find_master(Rank(0, 2, 0, 2), {"MASTER_PORT": "any"})
    assert str(error.value) == "MASTER_PORT: expected a number, found 'any'"
