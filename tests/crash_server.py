"""A warmed process from which stages are forked, each under a fault layer: importing torch costs more than a stage.

A job's command is the name of a stage, or what follows `dspark-cache` on a command line.

Jobs come as JSON lines on stdin, answers go as JSON lines to stdout.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.fault_layer import FaultLayer, Plan

if TYPE_CHECKING:
    from collections.abc import Callable

STAGES = ("tokenize", "capture", "shards")


def serve() -> None:
    """Warm up in the repository given as first argument, then run jobs."""
    from dspark_cache import cli
    from dspark_cache.stage import run_stage

    modules = {name: __import__(f"stages.{name}", fromlist=["main"]) for name in STAGES}
    with chdir(sys.argv[1]), redirect_stdout(sys.stderr):
        for module in modules.values():
            module.main()
        assert cli.main(["convert", "cache", "warm", "--layout", "ragged", "--dtype", "fp8_e4m3"]) == 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()

    def run(command: str) -> int:
        name, *arguments = command.split()
        return run_stage(modules[name].main) if name in modules else cli.main([name, *arguments])

    def fork(job: dict[str, Any]) -> int:
        child = os.fork()
        if not child:
            code = 70
            try:
                code = _run(job, lambda: run(job["command"]))
            finally:
                os._exit(code)
        return child

    for line in sys.stdin:
        job = json.loads(line)
        child = fork(job)
        _, status = os.waitpid(child, os.WUNTRACED)
        answer = {"pid": child}
        if os.WIFSTOPPED(status):
            _, second = os.waitpid(fork(job["second"]), 0)
            answer["second"] = os.waitstatus_to_exitcode(second)
            os.kill(child, signal.SIGCONT)
            _, status = os.waitpid(child, 0)
        answer["code"] = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _run(job: dict[str, Any], main: Callable[[], int]) -> int:
    work = Path(job["work"])
    errors = os.open(work / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(job["root"])
    os.environ.update(job["environment"])
    layer = FaultLayer(Path(job["root"]), work / "contents", Plan(**job["plan"]))
    layer.install()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"] or unlimited[0], unlimited[1]))
    code = main()
    for thread in threading.enumerate():  # as an interpreter does before it ends
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    layer.finish(work / "points.json")
    return code


def _job(
    root: Path,
    command: str,
    work: Path,
    plan: dict[str, Any],
    file_bytes: int | None = None,
    environment: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "root": str(root),
        "command": command,
        "work": str(work),
        "plan": plan,
        "file_bytes": file_bytes,
        "environment": environment or {},
    }


class CrashServer:
    """The process, from the side of a test."""

    def __init__(self, warm_repository: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash_server", str(warm_repository)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert self._line() == "ready\n"
        except AssertionError:
            self._process.communicate()
            raise

    def _line(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the crash server ended"
        return line

    def _answer(self, job: dict[str, Any]) -> dict[str, int]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._line())
        return answer

    def run(
        self,
        root: Path,
        command: str,
        work: Path,
        *,
        file_bytes: int | None = None,
        environment: dict[str, str] | None = None,
        **plan: Any,
    ) -> int:
        """Run a command in `root` and return the exit code.

        Args:
            root: The repository, or whatever folder the command works in.
            command: A stage, or a command line of `dspark-cache`.
            work: An empty folder, for `stderr`, `points.json`, and what the layer keeps.
            file_bytes: Largest file that the process may write.
            environment: More variables.
            plan: Of the fault layer.
        """
        return self._answer(_job(root, command, work, plan, file_bytes, environment))["code"]

    def run_two(self, root: Path, commands: tuple[str, str], works: tuple[Path, Path], point: int) -> dict[str, int]:
        """Stop a command at a point, run another, let the first go on: exit codes and the pid of the first."""
        first = _job(root, commands[0], works[0], {"point": point, "action": "SIGSTOP"})
        return self._answer({**first, "second": _job(root, commands[1], works[1], {})})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


if __name__ == "__main__":
    serve()
