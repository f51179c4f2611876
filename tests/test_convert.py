"""Conversions against direct production: the same bytes; and what is refused or resumed."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset
from dspark_cache.cache_files import CacheFolder
from dspark_cache.cli import main
from dspark_cache.convert import Conversion, convert_cache
from dspark_cache.diff import diff_caches
from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_cache.provenance import read_provenance
from dspark_cache.schema import HIDDEN, LAST_HIDDEN
from dspark_cache.verify import verify_cache
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SHARD_BYTES = 200_000
FORMS: dict[str, dict[str, Any]] = {
    "padded": {"layout": "padded", "dtype": "bf16", "shard_size": 3, "shard_bytes": SHARD_BYTES},
    "ragged": {"layout": "ragged", "dtype": "bf16", "shard_bytes": SHARD_BYTES},
    "fp8": {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES},
    "fp32": {"layout": "ragged", "dtype": "fp32", "shard_bytes": SHARD_BYTES},
}


@contextmanager
def flipped(path: Path) -> Iterator[None]:
    """Flip the last bit of a file while the block runs."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    yield
    path.write_bytes(content)


def convert(source: Path, target: Path, **changes: Any) -> Path:
    convert_cache(source, target, Conversion(**changes))
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The caches that the pipeline makes of the same twelve conversations, by form."""
    root = tmp_path_factory.mktemp("convert")
    target = {"layer_ids": [1, 3], "block_bytes": SHARD_BYTES}
    repository: Repository = make_repository(root / "repository", num_rows=12, target=target)
    repository.run("tokenize", "capture")
    caches = {}
    for name, form in FORMS.items():
        repository.set_params(cache=form)
        repository.run("shards")
        caches[name] = root / name
        shutil.copytree(repository.root / "cache", caches[name])
    return caches


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir() if path.name != "provenance.json"}


@pytest.mark.parametrize(
    ("source", "target", "changes"),
    [
        ("padded", "ragged", {"layout": "ragged", "shard_bytes": SHARD_BYTES}),
        ("ragged", "padded", {"layout": "padded", "shard_size": 3}),
        ("ragged", "fp8", {"dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES}),
        ("padded", "fp8", {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES}),
        ("fp8", "fp8", {"shard_bytes": SHARD_BYTES}),
        ("fp32", "padded", {"layout": "padded", "dtype": "bf16", "shard_size": 3}),
        ("fp32", "fp8", {"dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES}),
    ],
)
def test_a_conversion_gives_the_bytes_of_direct_production(
    made: dict[str, Path], tmp_path: Path, source: str, target: str, changes: dict[str, Any]
) -> None:
    found = convert(made[source], tmp_path / "cache", **changes)
    assert files(found) == files(made[target])
    provenance = read_provenance(found)
    before = read_provenance(made[source])
    assert provenance is not None
    assert before is not None
    assert [step["source_provenance_sha256"] for step in provenance.conversions] == [before.sha256()]
    assert (provenance.tokens, provenance.capture) == (before.tokens, before.capture)
    assert verify_cache(CacheFolder(found), "supervision").findings == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.building.lock", "cache"]


def test_layers_positions_and_samples_are_cut(made: dict[str, Path], tmp_path: Path) -> None:
    found = convert(made["padded"], tmp_path / "a", layer_ids=[3], seq_length=50, samples=(2, 9), shard_size=2)
    again = convert(found, tmp_path / "b", layout="ragged", seq_length=40)
    old, new, last = (CachedDSparkDataset(cache) for cache in (made["padded"], found, again))
    assert len(new) == len(last) == 7
    width = new.manifest["hidden_size"]
    assert (new.manifest["target_layer_ids"], new.manifest["target_hidden_dim"]) == ([3], width)
    for index in range(7):
        sample = old[index + 2]
        expected = {key: sample[key][:50] for key in CACHE_KEYS}
        expected[HIDDEN] = expected[HIDDEN][:, width:]
        assert all(torch.equal(new[index][key], expected[key]) for key in CACHE_KEYS)
        assert all(torch.equal(last[index][key], expected[key][:40]) for key in CACHE_KEYS)
    provenance = read_provenance(again)
    assert provenance is not None
    assert [step["changes"].get("seq_length") for step in provenance.conversions] == [50, 40]
    assert verify_cache(CacheFolder(again), "values").findings == []


def test_held_out_samples_are_in_one_part_only(made: dict[str, Path], tmp_path: Path) -> None:
    train = convert(made["ragged"], tmp_path / "train", eval_samples=4)
    held = convert(made["ragged"], tmp_path / "held", eval_samples=4, part="eval")
    found = diff_caches(train, held)
    assert (found["samples"]["removed"], found["samples"]["added"], found["samples"]["common"]) == (8, 4, 0)
    provenance = read_provenance(held)
    assert provenance is not None
    assert provenance.held_out == {"eval_samples": 4, "part": "eval"}


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("padded", {"dtype": "fp32"}, "fp32 has 24 significant bits, the source's bf16 only 8"),
        ("fp8", {"dtype": "bf16"}, "bf16 has 8 significant bits, the source's fp8_e4m3 only 4"),
        ("padded", {"dtype": "fp8_e4m3"}, "fp8_e4m3 needs the ragged layout"),
        ("fp8", {"layout": "padded"}, "fp8_e4m3 needs the ragged layout"),
        ("padded", {"layer_ids": [2]}, "expected strictly increasing ids among [1, 3], found [2]"),
        ("padded", {"seq_length": 257}, "--seq-length: expected 1 to 256, found 257"),
        ("padded", {"samples": (3, 13)}, "--samples: expected 0 <= start < stop <= 12, found 3:13"),
        ("ragged", {"shard_size": 3}, "--shard-size: expected auto or a positive number, for the padded layout"),
        ("padded", {"part": "eval"}, "--part eval: pass --eval-samples too"),
        ("padded", {"eval_samples": 12}, "data.eval_samples: 12 of 12 distinct samples leave none to train on"),
        ("padded", {"pad_token_id": 1}, "--pad-token-id: 1, but "),
    ],
)
def test_what_cannot_be_made_is_refused(
    made: dict[str, Path], tmp_path: Path, source: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        convert(made[source], tmp_path / "cache", **changes)
    assert not (tmp_path / "cache").exists()


def test_a_flipped_bit_of_the_source_is_not_given_a_digest(made: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(made["padded"], source)
    path = source / "shard-000001.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CacheFormatError, match=re.escape(f"{path}: sha256 is ")):
        convert(source, tmp_path / "cache", layout="ragged")
    assert not (tmp_path / "cache").exists()


def test_a_conversion_goes_on_with_what_it_had_finished(made: dict[str, Path], tmp_path: Path) -> None:
    source, target, building = tmp_path / "source", tmp_path / "cache", tmp_path / ".cache.building"
    shutil.copytree(made["padded"], source)
    with flipped(source / "target_weights.safetensors"), pytest.raises(CacheFormatError):
        convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
    with flipped(source / "shard-000003.safetensors"), pytest.raises(CacheFormatError):
        convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
    finished = {path.name: path.stat().st_ino for path in building.glob("shard-*")}
    assert len(finished) >= 2
    (building / ".tmp-shard-x").touch()
    convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
    assert files(target) == files(made["ragged"])
    assert {name: (target / name).stat().st_ino for name in finished} == finished
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.building.lock", "cache", "source"]


def test_a_disk_too_small_is_refused_and_what_is_finished_needs_no_room(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "cache"
    shutil.copytree(made["padded"], source)
    usage = shutil.disk_usage(tmp_path)

    def refused(free: int) -> int:
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=free))
        with pytest.raises(SettingsError, match=re.escape("or pass --no-check-disk")) as error:
            convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
        return int(str(error.value).split()[0])

    needed = refused(1)
    assert needed == sum(path.stat().st_size for path in made["ragged"].glob("*.safetensors"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.building.lock", "source"]
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=needed))
    with flipped(source / "shard-000003.safetensors"), pytest.raises(CacheFormatError):
        convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
    finished = sum(path.stat().st_size for path in (tmp_path / ".cache.building").glob("shard-*"))
    assert finished > 0
    assert refused(1) == needed - finished
    convert_cache(source, target, Conversion(layout="ragged", shard_bytes=SHARD_BYTES), check_disk=False)
    assert files(target) == files(made["ragged"])


def test_another_conversion_begins_anew(made: dict[str, Path], tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "cache"
    shutil.copytree(made["padded"], source)
    with flipped(source / "shard-000003.safetensors"), pytest.raises(CacheFormatError):
        convert(source, target, layout="ragged", shard_bytes=SHARD_BYTES)
    convert(source, target, layout="ragged", dtype="fp8_e4m3", shard_bytes=SHARD_BYTES)
    assert files(target) == files(made["fp8"])


def test_a_cache_of_another_producer_needs_its_pad_token(make_cache: Callable[..., Path], tmp_path: Path) -> None:
    source = make_cache(5, 2)
    with pytest.raises(SettingsError, match="does not say which token is at padding: pass --pad-token-id"):
        convert(source, tmp_path / "cache", layout="ragged")
    found = convert(source, tmp_path / "cache", layout="ragged", pad_token_id=0)
    old, new = CachedDSparkDataset(source), CachedDSparkDataset(found)
    assert all(torch.equal(old[index][key], new[index][key]) for index in range(5) for key in CACHE_KEYS)
    unpadded = CachedDSparkDataset(found, padded=False)
    assert [len(unpadded[index][LAST_HIDDEN]) for index in range(5)] == [2, 3, 4, 5, 6]
    provenance = read_provenance(found)
    assert provenance is not None
    assert provenance.tokens == provenance.capture == {}
    assert provenance.conversions[0]["source_provenance_sha256"] is None


def test_the_command_converts_and_compares(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "cache"
    with contextlib.chdir(tmp_path):
        assert main(["convert", str(made["padded"]), "cache", "--layers", "3", "--samples", ":5"]) == 0
        assert capsys.readouterr().out == "cache is made and verified\n"
        assert main(["diff", str(made["padded"]), "cache", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "samples removed: 7, the first: 5, 6, 7, 8, 9, 10, 11" in lines
    assert "layer 3: relative L2 of a token 0 in the mean, 0 at most" in lines
    assert main(["convert", str(target), str(target)]) == 1
    assert "is the source itself" in capsys.readouterr().err


def test_states_of_other_widths_are_not_compared(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Caches of two targets with one tokenizer."""
    first, second = make_cache(3, 2, hidden=4, layers=1), make_cache(3, 2, hidden=6, layers=2)
    assert main(["diff", str(first), str(second), "--pad-token-id", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["drift"] == {}
    assert found["samples"]["common"] == 3
    widths = {"first": 4, "second": 6}
    assert found["not_compared"] == {"layer 0": widths, "last hidden": widths, "layer 1": {"second": 6}}
    assert main(["diff", str(first), str(second), "--pad-token-id", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "layer 0: not compared, since widths differ: 4 in the first, 6 in the second" in lines
    assert "layer 1: not compared, only the second has it" in lines


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_states_that_are_no_numbers_are_not_the_nearest(
    make_cache: Callable[..., Path], capsys: pytest.CaptureFixture[str], value: float
) -> None:
    """JSON has no form for them."""
    first, second = make_cache(3, 2), make_cache(3, 2)
    file = second / "shard-000000.safetensors"
    tensors = load_file(file)
    tensors[HIDDEN][0, 1, 0] = value
    save_file(tensors, file)
    distance = diff_caches(first, second, pad_token_id=0)["drift"]["layer 0"]
    assert not math.isfinite(distance["worst_relative_l2"])
    assert main(["diff", str(first), str(second), "--pad-token-id", "0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["drift"]["layer 0"] == {"mean_relative_l2": None, "worst_relative_l2": None}
    assert printed["drift"]["layer 1"]["worst_relative_l2"] == 0


def test_nothing_but_a_cache_is_replaced(made: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "project" / "cache"
    shutil.copytree(made["padded"], source)
    (tmp_path / "project" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(source.parent)
    thesis = tmp_path / "thesis"
    (thesis / "shard-000000.safetensors").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    first = Conversion(samples=(0, 2))
    for target, message in (
        (source.parent, f"{source.parent} and {source} lie in each other: write to a folder beside the source"),
        (source / "x", f"{source / 'x'} and {source} lie in each other: "),
        (tmp_path / "link", f"{tmp_path / 'link'} and {source} lie in each other: "),
        (thesis, f"{thesis} holds what is no part of a cache, ['shard-000000.safetensors'], and would be replaced: "),
    ):
        with pytest.raises(SettingsError, match=f"^{re.escape(message)}"):
            convert_cache(source, target, first)
    (thesis / "shard-000000.safetensors").rmdir()
    (thesis / "chapter").write_text("")
    with pytest.raises(SettingsError, match=re.escape("is no part of a cache, ['chapter'], and would")):
        convert_cache(source, thesis, first)
    (thesis / "chapter").unlink()
    with contextlib.chdir(thesis), pytest.raises(SettingsError, match=r"^\. holds the working directory, "):
        convert_cache(source, ".", first)
    (thesis / "shard-000000.safetensors").mkdir()
    assert sorted(tmp_path.rglob("*")) == before
    (thesis / "shard-000000.safetensors").rmdir()
    for samples in (2, 3):
        convert_cache(source, thesis, Conversion(samples=(0, samples)))
        assert len(CachedDSparkDataset(thesis)) == samples
