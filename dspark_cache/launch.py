"""Starting a stage's module as several ranks on this machine, by torch's elastic launch.

The ranks are processes with the stage's own command line. They die with the process that started them, and the first
one that fails gives its reason to it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import CaptureError, Terminated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_FOLDER_VARIABLE = "STAGE_RANK_ORDERS"
"""Names to a started rank the folder with its orders."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STOP_SECONDS = 10
"""How long ranks that are told to stop may take before they are killed."""
_PR_SET_PDEATHSIG = 1
_START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of whatever is being imported
module = sys.argv.pop(1)
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a started rank is to do.

    Attributes:
        content: What `launch_ranks` was given.
        folder: Where it reports why it failed.
    """

    content: Any
    folder: Path

    def report(self, rank: int) -> Path:
        """Return the file for a rank's reason."""
        return self.folder / f"rank-{rank}.txt"


def read_orders(environment: Mapping[str, str]) -> Orders | None:
    """Return the orders of this process if `launch_ranks` started it, and let it die with its starter."""
    if _FOLDER_VARIABLE not in environment:
        return None
    folder = Path(environment[_FOLDER_VARIABLE])
    die_with_parent()
    orders = json.loads((folder / "orders.json").read_text())
    if os.getppid() != orders["parent"]:  # it died before this process asked to die with it
        os._exit(1)
    return Orders(content=orders["content"], folder=folder)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def launch_ranks(module: str, count: int, content: Any, environment: Mapping[str, str]) -> None:
    """Run `python -m module` as `count` ranks of this machine until all have ended.

    Args:
        module: The module; it finds `content` by `read_orders`.
        count: Number of ranks.
        content: Plain values, as JSON has them.
        environment: Variables that the ranks have beside those of this process.

    Raises:
        CaptureError: A rank failed; the reason is that of the first one that did.
        KeyboardInterrupt, Terminated: This process was told to stop; the ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-cache-") as name:
        folder = Path(name)
        orders = {"parent": os.getpid(), "content": content}
        (folder / "orders.json").write_text(json.dumps(orders))
        variables = {
            _FOLDER_VARIABLE: name,
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            **environment,
        }
        with environment_variables(variables), _signal_handlers():
            _run(module, count, folder)


def _run(module: str, count: int, folder: Path) -> None:
    # Here, as they take a second, and most runs start no ranks.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are said once, by us
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=_STOP_SECONDS,
        signals_to_handle=",".join(number.name for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-c", _START, module)
    except ChildFailedError as error:
        raise CaptureError(_reason(folder, error)) from None
    except SignalException as error:
        raise (KeyboardInterrupt if error.sigval == signal.SIGINT else Terminated) from None


def _reason(folder: Path, error: ChildFailedError) -> str:
    """Return the words of the rank that failed first."""
    reports = sorted(folder.glob("rank-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if reports:
        return reports[0].read_text()
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} was killed by {name}; where nobody did that, by the kernel for want of host memory"
    return f"rank {rank} ended with exit code {failure.exitcode}"


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, which those that it starts inherit, while the block runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Put back the signal handlers that the launcher replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
