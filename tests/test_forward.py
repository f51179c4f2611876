"""Devices of ranks, and forwards that nothing around them changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dspark_cache.errors import SettingsError
from dspark_cache.forward import Capturer, ensure_gpus, pick_device
from dspark_cache.ranks import Rank
from dspark_cache.settings import TargetSettings
from dspark_cache.target import load_target
from tests.repository import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let torch show as many GPUs as the parameter says; nothing is put on them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    return iter(())


@pytest.mark.parametrize(
    ("gpus", "name", "rank", "expected"),
    [
        (0, "auto", Rank(3, 4, 3, 4), "cpu"),
        (8, "auto", None, "cuda"),
        (8, "auto", Rank(), "cuda"),
        (8, "auto", Rank(3, 4, 3, 4), "cuda:3"),
        (8, "cpu", Rank(3, 4, 3, 4), "cpu"),
        (8, "auto", Rank(11, 16, 3, 8), "cuda:3"),
        (1, "auto", Rank(11, 16, 3, 8), "cuda:0"),  # each process is shown its own
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_the_device_of_a_rank(name: str, rank: Rank | None, expected: str) -> None:
    assert str(pick_device(name, rank)) == expected


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_more_processes_than_gpus_are_refused() -> None:
    ensure_gpus("auto", 2)
    ensure_gpus("cpu", 64)
    expected = r"^runtime\.processes: 3 processes on a machine that shows them 2 GPUs$"
    with pytest.raises(SettingsError, match=expected):
        ensure_gpus("auto", 3)
    with pytest.raises(SettingsError, match=expected):
        pick_device("auto", Rank(0, 3, 0, 3))


def test_one_gpu_is_not_shared_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)  # there is no such device here
    with pytest.raises(SettingsError) as error:
        ensure_gpus("cuda:1", 2)
    assert str(error.value) == "runtime.device: 2 processes cannot share cuda:1: expected auto, cpu or cuda"


def test_autocast_of_the_caller_changes_nothing() -> None:
    target = load_target(GOLDEN / "models" / "qwen3-tiny", TargetSettings(), "fp32", torch.device("cpu"))
    capturer = Capturer(target, [0, 3], 64)
    samples = [torch.arange(9, dtype=torch.int32), torch.arange(4, dtype=torch.int32)]
    expected = capturer(samples)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = capturer(samples)
    assert torch.equal(found.hidden, expected.hidden)
    assert torch.equal(found.last, expected.last)
