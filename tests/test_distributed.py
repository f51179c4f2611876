"""Capture by several real processes, started by the stage, torchrun, srun, mpirun or as slices; failed and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.repository import Repository, free_port, kill, make_repository
from tests.test_crash import NUM_ROWS, PARAMS

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = socket.gethostname()
POLL_SECONDS = 0.02
"""How often a condition is looked at that nothing signals."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """What one process makes."""
    repository = make_repository(tmp_path_factory.mktemp("alone") / "repository", num_rows=NUM_ROWS, **PARAMS)
    repository.run("tokenize", "capture")
    return repository


@pytest.fixture
def tokenized(undisturbed: Repository, tmp_path: Path) -> Iterator[Repository]:
    """The same repository as far as tokenize; no process of it may outlive a test."""
    shutil.copytree(undisturbed.root, tmp_path / "repository", ignore=shutil.ignore_patterns(".work"))
    repository = Repository(tmp_path / "repository")
    (repository.root / "features.json").unlink()
    yield repository
    assert processes_in(repository) == []


def processes_in(repository: Repository) -> list[int]:
    """Return the processes that work in a repository, their own children among them."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if (folder / "cwd").readlink() == repository.root and b"stages" in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has ended meanwhile
                continue
    return found


def records(repository: Repository) -> list[Path]:
    return list(repository.root.glob(".work/capture-*/block-*.json"))


def wait_for_blocks(repository: Repository, process: subprocess.Popen[str], count: int) -> None:
    """Wait until so many blocks are recorded."""
    while len(records(repository)) < count:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            pytest.fail(f"it ended too early: {process.communicate()}")


def wait_until_gone(repository: Repository) -> None:
    while processes_in(repository):
        time.sleep(POLL_SECONDS)


def captured(repository: Repository) -> dict[str, str]:
    """Return the digests of the ledger and of everything in scratch but locks."""
    (folder,) = repository.scratch_folders()
    names = [str(path.relative_to(repository.root)) for path in folder.iterdir() if not path.name.startswith("lock")]
    return repository.digests("features.json", *names)


def last_line(err: str) -> str:
    return err.rstrip().splitlines()[-1]


def break_target(repository: Repository) -> int:
    """Give the target an embedding that is not a number for an id that only one sample has; return its index.

    A short one, so that it is in one of the last blocks.
    """
    tokens = load_file(repository.root / "tokens/tokens.safetensors")
    ids = tokens["input_ids"].split(tokens["sample_offsets"].diff().tolist())
    counts = torch.cat([part.unique() for part in ids]).bincount()
    alone = {index: [token for token in part.unique().tolist() if counts[token] == 1] for index, part in enumerate(ids)}
    sample = min((index for index, own in alone.items() if own), key=lambda index: len(ids[index]))
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][alone[sample][0]] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    return sample


# Started by the stage itself


def test_a_run_that_is_stopped_in_every_way_goes_on_with_another_number_of_processes(
    undisturbed: Repository, tokenized: Repository
) -> None:
    first = tokenized.start("capture", DSPARK_RUNTIME__PROCESSES="4")
    wait_for_blocks(tokenized, first, 2)
    assert len(processes_in(tokenized)) == 5
    code, err = kill(first, signal.SIGINT)
    assert (code, last_line(err)) == (130, "interrupted; finished work is kept, run again to go on")
    assert "Traceback" not in err
    assert processes_in(tokenized) == []

    second = tokenized.start("capture", DSPARK_RUNTIME__PROCESSES="3")
    wait_for_blocks(tokenized, second, len(records(tokenized)) + 2)
    kill(second, signal.SIGKILL)
    wait_until_gone(tokenized)

    third = tokenized.start("capture", DSPARK_RUNTIME__PROCESSES="2")
    wait_for_blocks(tokenized, third, len(records(tokenized)) + 2)
    code, err = kill(third, signal.SIGTERM)
    assert (code, last_line(err)) == (143, "terminated; finished work is kept, run again to go on")

    assert len(records(tokenized)) < NUM_ROWS
    tokenized.run("capture")
    assert captured(tokenized) == captured(undisturbed)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_one_process(undisturbed: Repository, tokenized: Repository, count: int) -> None:
    done = tokenized.stage("capture", DSPARK_RUNTIME__PROCESSES=str(count))
    assert done.returncode == 0, done.stderr
    assert captured(tokenized) == captured(undisturbed)
    assert done.stderr.count("INFO: loading") == 1, "rank 0 speaks for all"
    again = tokenized.stage("capture", DSPARK_RUNTIME__PROCESSES=str(count))
    assert again.returncode == 0
    assert "loading" not in again.stderr, "with everything there nothing is started"


def test_the_rank_that_fails_is_named_and_the_others_stop(tokenized: Repository) -> None:
    sample = break_target(tokenized)
    done = tokenized.stage("capture", DSPARK_RUNTIME__PROCESSES="2")
    assert done.returncode == 1
    assert re.fullmatch(
        rf"error: rank [01] on {HOST}: sample {sample}: layer 1 holds numbers that are not finite \(torch\.float32\); "
        r"finished blocks are kept; try target\.compute_dtype: fp32, or target\.nonfinite: drop to leave such samples "
        r"out",
        last_line(done.stderr),
    )
    assert "Traceback" not in done.stderr
    assert records(tokenized)


def test_a_rank_that_is_killed_is_named(tokenized: Repository) -> None:
    process = tokenized.start("capture", DSPARK_RUNTIME__PROCESSES="2")
    wait_for_blocks(tokenized, process, 1)
    os.kill(max(pid for pid in processes_in(tokenized) if pid != process.pid), signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(
        r"error: rank [01] was killed by SIGKILL; where nobody did that, by the kernel for want of host memory",
        last_line(err),
    )


@pytest.mark.parametrize(("parallelism", "count"), [("fsdp", "1"), ("fsdp", "2"), ("tensor", "2")])
def test_a_sharded_target_gives_the_states_of_a_whole_one(
    undisturbed: Repository, tokenized: Repository, parallelism: str, count: str
) -> None:
    how = {"DSPARK_RUNTIME__PROCESSES": count, "DSPARK_RUNTIME__PARALLELISM": parallelism}
    done = tokenized.stage("capture", **how)
    assert done.returncode == 0, done.stderr
    path = tokenized.root / "features.json"
    ledger = json.loads(path.read_text())
    recorded = {"fsdp": "fsdp", "tensor": "tensor:2"}[parallelism]
    assert {block["environment"]["parallelism"] for block in ledger["blocks"]} == {recorded}
    ours, theirs = blocks_of(tokenized), blocks_of(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, states in theirs.items():
        for key, expected in states.items():
            difference = (ours[name][key].double() - expected.double()).norm() / expected.double().norm()
            assert difference <= {"fsdp": 0.0, "tensor": 1e-5}[parallelism], (name, key)
    weights = ".work/capture-*/weights.safetensors"
    (ours_weights,), (their_weights,) = (list(each.root.glob(weights)) for each in (tokenized, undisturbed))
    assert ours_weights.read_bytes() == their_weights.read_bytes()


def blocks_of(repository: Repository) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in repository.root.glob(".work/capture-*/block-*.safetensors")}


def test_ranks_that_share_a_target_stop_together(tokenized: Repository) -> None:
    sample = break_target(tokenized)
    how = {"DSPARK_RUNTIME__PROCESSES": "2", "DSPARK_RUNTIME__PARALLELISM": "fsdp"}
    done = tokenized.stage("capture", **how)
    assert done.returncode == 1
    assert re.match(rf"error: rank [01] on {HOST}: sample {sample}: layer 1 holds numbers", last_line(done.stderr))


def test_a_sharded_run_is_refused_before_anything_is_started(tokenized: Repository) -> None:
    how = {"DSPARK_RUNTIME__PROCESSES": "3", "DSPARK_RUNTIME__PARALLELISM": "tensor"}
    done = tokenized.stage("capture", **how)
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        "error: runtime.parallelism: tensor: 3 processes need numbers of heads that they divide, the target has "
        "{'num_attention_heads': 4, 'num_key_value_heads': 2}: choose another runtime.group_size, or "
        "runtime.parallelism: fsdp"
    )
    done = tokenized.stage("capture", **how, DSPARK_RUNTIME__GROUP_SIZE="2")
    assert last_line(done.stderr) == (
        "error: runtime.group_size: 3 processes cannot be divided into groups of 2: choose a divisor"
    )
    assert not records(tokenized)


@pytest.mark.dvc
@pytest.mark.slow
def test_ctrl_c_under_dvc_stops_all_and_repro_goes_on(undisturbed: Repository, tokenized: Repository) -> None:
    tokenized.git("init", "--quiet")
    repro = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "capture"],
        cwd=tokenized.root,
        env=tokenized.environment(DSPARK_RUNTIME__PROCESSES="2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_blocks(tokenized, repro, 1)
    os.killpg(repro.pid, signal.SIGINT)  # as a terminal does
    _, err = repro.communicate()
    assert repro.returncode == 255
    assert "interrupted; finished work is kept, run again to go on" in err
    assert "exited with 130" in err
    assert processes_in(tokenized) == []
    assert len(records(tokenized)) < NUM_ROWS
    tokenized.dvc("repro", "--single-item", "capture", DSPARK_RUNTIME__PROCESSES="3")
    assert captured(tokenized) == captured(undisturbed)


# Started by others


def start(repository: Repository, command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=repository.root,
        env=repository.environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def torchrun(repository: Repository, nodes: int, count: int, **environment: str) -> list[subprocess.Popen[str]]:
    """Start an agent a machine, each on an address of its own."""
    port = free_port()
    return [
        start(
            repository,
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={count}"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}"),
                *(f"--local-addr=127.0.0.{node + 1}", "-m", "stages.capture"),
            ],
            **environment,
        )
        for node in range(nodes)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for all; return exit codes and what was said on stderr."""
    said = [process.communicate()[1] for process in processes]
    return [(process.returncode, err) for process, err in zip(processes, said, strict=True)]


def test_torchrun_on_two_machines_makes_what_one_process_makes(undisturbed: Repository, tokenized: Repository) -> None:
    ended = finish(torchrun(tokenized, nodes=2, count=1))
    assert [code for code, _ in ended] == [0, 0], ended
    assert captured(tokenized) == captured(undisturbed)


def test_a_failure_under_torchrun_ends_all_machines(tokenized: Repository) -> None:
    sample = break_target(tokenized)
    ended = finish(torchrun(tokenized, nodes=2, count=1))
    assert [code for code, _ in ended] == [1, 1]
    said = "".join(err for _, err in ended)
    assert re.search(
        rf"^error: rank [01] on {HOST}: sample {sample}: layer 1 holds numbers that are not", said, re.MULTILINE
    )
    assert "Timed out" not in said


@pytest.mark.slow
def test_groups_of_one_machine_each_share_a_target(undisturbed: Repository, tokenized: Repository) -> None:
    ended = finish(torchrun(tokenized, nodes=2, count=2, DSPARK_RUNTIME__PARALLELISM="fsdp"))
    assert [code for code, _ in ended] == [0, 0], ended
    assert {name: d for name, d in captured(tokenized).items() if name.endswith(".safetensors")} == {
        name: d for name, d in captured(undisturbed).items() if name.endswith(".safetensors")
    }


def slurm(number: int, count: int) -> dict[str, str]:
    """Return what srun lets a task know."""
    return {
        "SLURM_PROCID": str(number),
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_LOCALID": str(number),
        "SLURM_STEP_TASKS_PER_NODE": str(count),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
    }


def test_tasks_of_srun_join_and_a_failed_one_ends_the_others(undisturbed: Repository, tokenized: Repository) -> None:
    command = [sys.executable, "-m", "stages.capture"]
    ended = finish([start(tokenized, command, **slurm(number, 2)) for number in range(2)])
    assert [code for code, _ in ended] == [0, 0], ended
    assert captured(tokenized) == captured(undisturbed)
    shutil.rmtree(tokenized.root / ".work")
    sample = break_target(tokenized)
    ended = finish([start(tokenized, command, **slurm(number, 2)) for number in range(2)])
    assert [code for code, _ in ended] == [1, 1], "srun by itself stops nobody"
    assert re.match(rf"error: rank [01] on {HOST}: sample {sample}: layer 1 holds numbers", last_line(ended[0][1]))


def test_processes_of_mpirun_join(undisturbed: Repository, tokenized: Repository) -> None:
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("the package openmpi is not installed")
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [mpirun, "-n", "2", "--oversubscribe", sys.executable, "-m", "stages.capture"]
    ((code, err),) = finish([start(tokenized, command, **allow)])
    assert code == 0, err
    assert captured(tokenized) == captured(undisturbed)


# Slices


def test_slices_are_computed_beside_each_other_and_a_run_without_the_target_s_states_writes_the_ledger(
    undisturbed: Repository, tokenized: Repository
) -> None:
    slices = [tokenized.start("capture", DSPARK_RUNTIME__SLICE=f"{number}/3") for number in (1, 2, 3)]
    ended = finish(slices)
    assert [code for code, _ in ended] == [0, 0, 0], ended
    assert "slice 2/3 is there: without runtime.slice, a run writes features.json" in ended[1][1]
    assert not (tokenized.root / "features.json").exists()
    assert len(records(tokenized)) == NUM_ROWS
    times = tokenized.blocks()
    done = tokenized.stage("capture")
    assert done.returncode == 0
    assert "loading" not in done.stderr
    assert tokenized.blocks() == times
    assert captured(tokenized) == captured(undisturbed)


def test_a_slice_is_computed_once_and_never_beside_a_run(tokenized: Repository) -> None:
    first = tokenized.start("capture", DSPARK_RUNTIME__SLICE="2/2")
    wait_for_blocks(tokenized, first, 1)
    first.send_signal(signal.SIGSTOP)
    for environment in ({"DSPARK_RUNTIME__SLICE": "2/2"}, {"DSPARK_RUNTIME__SLICE": "1/3"}, {}):
        refused = tokenized.stage("capture", **environment)
        assert refused.returncode == 1
        assert f"is being written by process {first.pid} on host {HOST} (lock" in last_line(refused.stderr)
    first.send_signal(signal.SIGCONT)
    first.communicate()
    assert first.returncode == 0
