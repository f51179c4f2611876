"""The ledger: written, read back, refused with every fault, and finding each sample's states by it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.blocks import Block, block_name
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, CaptureError
from dspark_cache.ledger import Ledger, place_samples, read_ledger
from dspark_cache.schema import STAGE_VERSIONS

if TYPE_CHECKING:
    from pathlib import Path


def key(number: int) -> str:
    return f"{number:032x}"


def block(samples: dict[int, int], *dropped: int, **environment: Any) -> Block:
    return Block(
        name=block_name(map(key, (*samples, *dropped))),
        samples=tuple(map(key, samples)),
        lengths=tuple(samples.values()),
        num_bytes=100,
        sha256=f"{len(samples):064x}",
        dropped={key(number): "layer 1 is not finite" for number in dropped},
        environment=environment,
    )


LEDGER = Ledger(
    identity={"hidden_size": 4, "target_layer_ids": [-1, 3], "compute_dtype": "bf16", "weights": "sha256:0"},
    target_model="inputs/target",
    target_model_type="qwen3",
    vocab_size=32,
    num_hidden_layers=6,
    logits={"logit_scale": 0.5},
    weights_bytes=7,
    weights_sha256="a" * 64,
    blocks=(block({1: 2, 2: 3}, 9, threads=2), block({3: 1}, threads=2)),
)


def write(path: Path, **changes: Any) -> Path:
    """Write the ledger; changes are made to its JSON, None removes a key."""
    LEDGER.write(path)
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return path


def test_a_ledger_round_trips(tmp_path: Path) -> None:
    LEDGER.write(tmp_path / "features.json")
    found = read_ledger(tmp_path / "features.json")
    assert found == LEDGER
    assert (found.layer_ids, found.hidden_size, found.compute_dtype) == ([-1, 3], 4, "bf16")
    assert found.dropped == {key(9): "layer 1 is not finite"}
    assert json.loads((tmp_path / "features.json").read_text())["capture_version"] == STAGE_VERSIONS["capture"]


def test_the_same_ledger_gives_the_same_bytes(tmp_path: Path) -> None:
    LEDGER.write(tmp_path / "a.json")
    shuffled = dataclasses.replace(LEDGER, identity=dict(reversed(LEDGER.identity.items())))
    shuffled.write(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_distinct_environments_are_listed_once_and_sorted() -> None:
    blocks = (block({1: 1}, b=1), block({2: 1}, a=1), block({}, b=1))
    assert dataclasses.replace(LEDGER, blocks=blocks).environments() == [{"a": 1}, {"b": 1}]


def test_a_missing_ledger_names_the_stage_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError) as error:
        read_ledger(tmp_path / "features.json")
    assert str(error.value) == f"no ledger {tmp_path / 'features.json'}: run dvc repro capture"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": 1}, ": identity: expected an object, found 1"),
        ({"target_model": 1}, ": target_model: expected a string, found 1"),
        ({"target_model_type": None}, ": missing required keys ['target_model_type']"),
        ({"vocab_size": 0}, ": vocab_size: expected an integer >= 1, found 0"),
        ({"num_hidden_layers": True}, ": num_hidden_layers: expected an integer >= 1, found True"),
        ({"logits": []}, ": logits: expected names and numbers, found []"),
        ({"logits": {"logit_scale": True}}, ": logits: expected names and numbers, found {'logit_scale': True}"),
        ({"weights_bytes": 0}, ": weights_bytes: expected an integer >= 1, found 0"),
        ({"weights_sha256": "x"}, ": weights_sha256: expected 64 hexadecimal digits, found 'x'"),
        ({"blocks": {}}, ": blocks: expected a list, found {}"),
        ({"blocks": [5, "x"]}, ": blocks: expected objects, found 5; blocks: expected objects, found 'x'"),
        ({"blocks": [LEDGER.blocks[0].as_json() | {"bytes": -1}]}, ", block 0: bytes: expected an integer >= 0,"),
        (
            {"vocab_size": "x", "weights_bytes": None},
            ": missing required keys ['weights_bytes']; vocab_size: expected an integer >= 1, found 'x'",
        ),
    ],
)
def test_faults_of_a_ledger_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "features.json", **changes)
    with pytest.raises(CacheFormatError) as error:
        read_ledger(path)
    assert str(error.value).startswith(f"{path}{message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size: expected an integer >= 1, found 0"),
        ({"compute_dtype": "fp8"}, "compute_dtype: expected one of ['bf16', 'fp16', 'fp32'], found 'fp8'"),
        ({"compute_dtype": []}, "compute_dtype: expected one of ['bf16', 'fp16', 'fp32'], found []"),
        ({"target_layer_ids": []}, "target_layer_ids: expected strictly increasing integers >= -1, found []"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids: expected strictly increasing integers >= -1, found [3, 1]"),
        ({"target_layer_ids": [-2]}, "target_layer_ids: expected strictly increasing integers >= -1, found [-2]"),
        ({"target_layer_ids": ["1"]}, "target_layer_ids: expected strictly increasing integers >= -1, found ['1']"),
    ],
)
def test_faults_of_the_identity_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "features.json", identity={**LEDGER.identity, **changes})
    with pytest.raises(CacheFormatError) as error:
        read_ledger(path)
    assert str(error.value) == f"{path}, identity: {message}"


# Finding samples


def test_each_sample_is_found_in_its_block_in_the_order_asked_for() -> None:
    first, second = LEDGER.blocks
    places = place_samples(LEDGER, list(map(key, (3, 2, 1, 2, 9))), [1, 3, 2, 3, 8])
    found = [place and (place.block, place.start, place.stop) for place in places]
    assert found == [(second, 0, 1), (first, 2, 5), (first, 0, 2), (first, 2, 5), None]


def test_a_sample_that_is_in_no_block_is_refused() -> None:
    with pytest.raises(CacheFormatError) as error:
        place_samples(LEDGER, [key(1), key(5)], [2, 2])
    assert str(error.value) == f"sample 1 ({key(5)}) is in no block of the ledger: run dvc repro capture"


def test_a_sample_with_another_number_of_rows_is_refused() -> None:
    with pytest.raises(CacheFormatError) as error:
        place_samples(LEDGER, [key(1)], [3])
    assert str(error.value) == "sample 0: 2 rows for 3 tokens"


def test_a_set_of_which_every_sample_was_dropped_is_refused() -> None:
    with pytest.raises(CaptureError) as error:
        place_samples(LEDGER, [key(9), key(9)], [3, 3])
    assert str(error.value) == (
        f"all 2 samples were dropped, their states are not finite: {{'{key(9)}': 'layer 1 is not finite'}}"
    )


def test_a_sample_dropped_once_and_captured_later_is_found() -> None:
    ledger = dataclasses.replace(LEDGER, blocks=(*LEDGER.blocks, block({9: 8})))
    (place,) = place_samples(ledger, [key(9)], [8])
    assert place is not None
    assert place.block == ledger.blocks[-1]
