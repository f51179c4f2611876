"""Fixtures that several test modules share."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

# Before torch is imported, and inherited by every process that a test starts: the suite runs on two processes, tiny
# models are faster on one thread, and a capture refuses to go on with another number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

# What a shell runs in the background ignores SIGINT, and would hand that on to the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# dvc keeps its hands off the user's own folders.
os.environ["DVC_NO_ANALYTICS"] = "1"
for _name in ("SITE_CACHE", "GLOBAL_CONFIG", "SYSTEM_CONFIG"):
    os.environ[f"DVC_{_name}_DIR"] = tempfile.mkdtemp(prefix="dvc-")

import torch

from dspark_cache import DTYPE_MAP, build_cache_manifest, write_manifest, write_shard, write_target_weights
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 32

Tally = Callable[[str, int], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from threads and wait for them wherever other work runs too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tally(record_property: Callable[[str, object], None]) -> Tally:
    """Return a function that counts what a test tried; the sums are printed at the end of the run."""
    return lambda name, number: record_property(TALLY_PREFIX + name, number)


TALLY_PREFIX = "tally: "


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the sums, over all processes that ran tests."""
    sums: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, number in report.user_properties:
                if name.startswith(TALLY_PREFIX):
                    sums[name.removeprefix(TALLY_PREFIX)] += number
    if sums:
        terminalreporter.section("tried")
        terminalreporter.write_line(", ".join(f"{name} {number}" for name, number in sorted(sums.items())))


def padded_sample(index: int, seq_length: int, hidden: int, layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return sample `index`: random tensors of its own, real tokens first, then pad id 0 and zeros."""
    generator = torch.Generator().manual_seed(index)
    length = min(seq_length, 2 + index % seq_length)
    ids = torch.zeros(seq_length, dtype=torch.int64)
    ids[:length] = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
    mask = torch.zeros(seq_length, dtype=torch.int64)
    mask[length // 2 : length] = 1
    sample = {INPUT_IDS: ids, LOSS_MASK: mask}
    for key, width in ((HIDDEN, hidden * layers), (LAST_HIDDEN, hidden)):
        sample[key] = torch.zeros(seq_length, width, dtype=dtype)
        sample[key][:length] = torch.randn(length, width, generator=generator).to(dtype)
    return sample


@pytest.fixture
def make_cache(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a complete DSpark cache into a folder of its own."""
    numbers = count()

    def make(
        num_samples: int,
        shard_size: int,
        seq_length: int = 8,
        hidden: int = 4,
        layers: int = 2,
        dtype: str = "bf16",
        **manifest_overrides: Any,
    ) -> Path:
        folder = tmp_path / f"cache-{next(numbers)}"
        config = SimpleNamespace(vocab_size=VOCAB_SIZE, hidden_size=hidden, num_hidden_layers=layers + 2)
        manifest = build_cache_manifest(
            target_model="models/tiny",
            target_model_type="tiny",
            target_text_config=config,
            seq_length=seq_length,
            dtype=dtype,
            num_samples=num_samples,
            shard_size=shard_size,
            target_layer_ids=list(range(layers)),
            train_data_path="data/rows.jsonl",
            train_split=None,
            shuffle_seed=42,
            mask_reasoning_content=False,
            chat_template_sha256="0" * 64,
        )
        generator = torch.Generator().manual_seed(num_samples)
        weights = torch.nn.Linear(hidden, VOCAB_SIZE, bias=False)
        weights.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, hidden, generator=generator))
        write_target_weights(folder, weights, weights, DTYPE_MAP[dtype])
        for start in range(0, num_samples, shard_size):
            samples = [
                padded_sample(index, seq_length, hidden, layers, DTYPE_MAP[dtype])
                for index in range(start, min(start + shard_size, num_samples))
            ]
            shard = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
            write_shard(folder, start // shard_size, shard)
        write_manifest(folder, {**manifest, "complete": True, **manifest_overrides})
        return folder

    return make
