"""Parameter files for real targets: right but for the commit, which nobody but their user can pin."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dspark_cache.errors import InputError
from dspark_cache.inputs import locate_inputs
from dspark_cache.settings import load_settings
from dspark_cache.target import resolve_layer_ids
from tests.repository import ROOT, make_repository, read_yaml

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = {
    "qwen3-0.6b": (28, [1, 7, 13, 19, 25]),
    "qwen3-4b": (36, [1, 9, 17, 25, 33]),
    "qwen3-8b": (36, [1, 9, 17, 25, 33]),
    "llama-3.1-8b-instruct": (32, [1, 8, 15, 22, 29]),
    "gemma-3-4b-it": (34, [1, 8, 16, 24, 31]),
}
FILES = sorted((ROOT / "examples").glob("*.yaml"))


def test_every_file_is_listed_here() -> None:
    assert {path.stem for path in FILES} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_parameter_file_is_refused_until_its_commit_is_filled_in(path: Path, tmp_path: Path) -> None:
    root = make_repository(tmp_path / "repository").root
    text = path.read_text()
    (root / "params.yaml").write_text(text)
    settings = load_settings(root / "params.yaml", {})
    with pytest.raises(InputError) as refusal:
        locate_inputs(settings, root)
    (fault,) = str(refusal.value).splitlines()[1:]
    assert "it needs target.revision to be a commit of 40 hexadecimal digits" in fault
    (root / "params.yaml").write_text(text.replace("FILL-IN-THE-COMMIT", "0" * 40))
    locate_inputs(load_settings(root / "params.yaml", {}), root)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_parameter_file_says_what_a_real_run_needs(path: Path) -> None:
    layers, layer_ids = LAYERS[path.stem]
    params = read_yaml(path)
    assert {section: list(keys) for section, keys in params.items()} == {
        section: list(keys) for section, keys in read_yaml(ROOT / "params.yaml").items()
    }
    assert (params["data"]["seq_length"], params["data"]["min_loss_tokens"]) == (4096, 14)
    assert (params["cache"]["layout"], params["cache"]["dtype"]) == ("ragged", "bf16")
    assert resolve_layer_ids(params["target"]["layer_ids"], 5, layers) == layer_ids
    assert not {-1, layers - 1} & set(layer_ids)
    lines = path.read_text().splitlines()
    assert all(" # " in line for line in lines if line.startswith("  "))
