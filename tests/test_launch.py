"""Processes started as ranks: what they are given, what is left of them, and the reason of the first that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.errors import CaptureError
from dspark_cache.launch import launch_ranks, read_orders

if TYPE_CHECKING:
    from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def make_module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """Write a module that ranks run, with `orders` and `rank` at hand."""
    head = """
    import json, os, signal, sys
    from pathlib import Path
    from dspark_cache.launch import read_orders
    orders, rank = read_orders(os.environ), int(os.environ["RANK"])
    """
    (folder / "ranks_do.py").write_text(textwrap.dedent(head) + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "ranks_do"


def test_ranks_are_given_orders_and_leave_this_process_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = make_module(
        tmp_path,
        monkeypatch,
        """
        told = [orders.content, os.environ["OMP_NUM_THREADS"], int(os.environ["WORLD_SIZE"]), sys.argv[1:]]
        Path(orders.content["out"], f"{rank}.json").write_text(json.dumps(told))
        """,
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    content: dict[str, Any] = {"out": str(tmp_path), "numbers": [1, 2]}
    environment, handlers = dict(os.environ), [signal.getsignal(number) for number in SIGNALS]
    launch_ranks(module, 2, content, {"OMP_NUM_THREADS": "1"})
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [[content, "1", 2, []]] * 2
    assert {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL", "STAGE_RANK_ORDERS")} == {
        "OMP_NUM_THREADS": "3",
        "TORCH_CPP_LOG_LEVEL": None,
        "STAGE_RANK_ORDERS": None,
    }
    assert environment.items() <= os.environ.items()
    assert [signal.getsignal(number) for number in SIGNALS] == handlers


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit(7 if rank else 0)", "rank 1 ended with exit code 7"),
        (
            "os.kill(os.getpid(), signal.SIGKILL if rank == 0 else 0)",
            "rank 0 was killed by SIGKILL; where nobody did that, by the kernel for want of host memory",
        ),
        (
            """
            if rank:
                orders.report(1).write_text("the first reason")
            else:
                while not orders.report(1).exists():
                    pass
                orders.report(0).write_text("a later one")
            os._exit(1)
            """,
            "the first reason",
        ),
    ],
)
def test_the_reason_is_that_of_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    with pytest.raises(CaptureError) as error:
        launch_ranks(make_module(tmp_path, monkeypatch, body), 2, None, {})
    assert str(error.value) == reason


def test_a_process_that_nobody_started_as_a_rank_has_no_orders() -> None:
    assert read_orders({"RANK": "0"}) is None


def test_a_rank_whose_starter_died_while_it_came_up_ends(tmp_path: Path) -> None:
    (tmp_path / "orders.json").write_text(json.dumps({"parent": 1, "content": None}))
    code = "import os; from dspark_cache.launch import read_orders; read_orders(os.environ); print('lives')"
    environment = {**os.environ, "STAGE_RANK_ORDERS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
