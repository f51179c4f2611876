"""The code of docs/recipes/other-trainers.md, run on a small cache against what each trainer expects."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dspark_cache import CachedDSparkDataset
from dspark_cache.serving import CONFIG_KEYS
from tests.caches import make_ragged
from tests.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = ROOT / "docs/recipes/other-trainers.md"
LENGTHS = [2, 3, 4, 5, 6]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what the page's code defines; each block has its own imports."""
    found: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for block in blocks:
        scope: dict[str, Any] = {}
        exec(block, scope)
        found |= scope
    assert len(blocks) == 4
    return found


@pytest.fixture
def cache(make_cache: Callable[..., Path]) -> Path:
    return make_ragged(make_cache(5, 2), [2, 3])


@pytest.fixture
def samples(cache: Path) -> list[dict[str, torch.Tensor]]:
    dataset = CachedDSparkDataset(cache, padded=False)
    return [dict(dataset[index]) for index in range(len(dataset))]


def test_deepspec_gets_items_of_its_own_kind(names: Any, cache: Path, samples: Any) -> None:
    dataset = names["DeepSpecCache"](cache)
    assert len(dataset) == 5
    assert dataset.manifest == {
        "target_layer_ids": [0, 1],
        "hidden_size": 4,
        "target_model_name_or_path": "models/tiny",
    }
    for index, sample in enumerate(samples):
        item = dataset[index]
        assert item["input_ids"].dtype == torch.int32
        assert item["loss_mask"].dtype == torch.uint8
        assert item["target_hidden_states"].shape == (LENGTHS[index], 8)
        assert item["target_last_hidden_states"].dtype == torch.bfloat16
        assert item.keys() == sample.keys()
        assert all(torch.equal(item[key].to(value.dtype), value) for key, value in sample.items())


def test_speculators_gets_items_of_its_own_kind(names: Any, cache: Path, samples: Any) -> None:
    dataset = names["SpeculatorsCache"](cache)
    assert (len(dataset), dataset.approx_lengths) == (5, LENGTHS)
    for index, sample in enumerate(samples):
        item = dataset[index]
        assert sorted(item) == [
            "hidden_states",
            "input_ids",
            "lengths",
            "loss_mask",
            "position_ids",
            "verifier_last_hidden_states",
        ]
        assert torch.equal(item["hidden_states"], sample["target_hidden_states"])
        assert torch.equal(item["verifier_last_hidden_states"], sample["target_last_hidden_states"])
        assert torch.equal(item["input_ids"], sample["input_ids"])
        assert item["loss_mask"].tolist() == [bool(mask) for mask in sample["loss_mask"]]
        assert item["lengths"].tolist() == [LENGTHS[index]]
        assert item["position_ids"].tolist() == list(range(LENGTHS[index]))
    assert names["speculators_layer_ids"](cache) == [1, 2]


def test_the_verifier_s_norm_is_not_applied_twice(names: Any) -> None:
    class Draft(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.verifier_norm: torch.nn.Module = torch.nn.RMSNorm(4)

    state = torch.tensor([3.0, 4.0, 0.0, 0.0])
    model = names["without_verifier_norm"](Draft())
    assert not torch.equal(Draft().verifier_norm(state), state)
    assert torch.equal(model.verifier_norm(state), state)
    assert not list(model.parameters())


def test_specforge_gets_a_file_for_each_sample_that_it_takes(
    names: Any, cache: Path, samples: Any, tmp_path: Path
) -> None:
    names["write_specforge"](cache, tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == [
        f"{index:08d}.ckpt" for index in range(1, 5)
    ]  # the first has one supervised token
    for file, sample in zip(files, samples[1:], strict=True):
        record = torch.load(file, weights_only=True)
        assert sorted(record) == ["hidden_states", "input_ids", "loss_mask", "target_last_hidden_states"]
        assert torch.equal(record["hidden_states"], sample["target_hidden_states"])
        assert torch.equal(record["target_last_hidden_states"], sample["target_last_hidden_states"])
        assert torch.equal(record["input_ids"], sample["input_ids"])
        assert torch.equal(record["loss_mask"], sample["loss_mask"])
        storage = record["hidden_states"].untyped_storage()
        assert storage.nbytes() == record["hidden_states"].nbytes  # nothing else travels with it


def test_the_table_of_engines_is_the_one_in_the_code() -> None:
    section = PAGE.read_text().partition("## Layer ids of engines")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line][2:]
    engine, found = "", {}
    for name, keys, value, _ in rows:
        engine = name or engine
        for key in re.findall(r"`([^`]+)`", keys):
            found.setdefault(engine, {})[key] = {"i": 0, "i + 1": 1}[value]
    assert found == CONFIG_KEYS
