"""Imports among the library's modules go one way, and the core stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dspark_cache

FLOW = [
    "errors",
    "sample_text",
    "schema",
    "dtypes",
    "strict_json",
    "yaml_file",
    "files",
    "memory",
    "threads",
    "fp8",
    "shard_file",
    "manifest",
    "shards",
    "produce",
    "target_weights",
    "ragged",
    "provenance",
    "pins",
    "identity",
    "batch_reading",
    "slabs",
    "reader",
    "cache_plan",
    "cache_writer",
    "samplers",
    "loaders",
    "chat_template_hash",
    "offline_cache",
    "settings",
    "inputs",
    "rows",
    "row_order",
    "conversations",
    "chat_templates",
    "loss_masks",
    "tokenizing",
    "tokens",
    "serving",
    "target",
    "blocks",
    "progress",
    "dvc_output",
    "version_store",
    "versions",
    "ranks",
    "launch",
    "sharding",
    "forward",
    "capture",
    "ledger",
    "publish",
    "supervision",
    "cache_files",
    "shard_stream",
    "verify",
    "recompute",
    "examine",
    "charts",
    "plots",
    "report",
    "cached_rows",
    "convert",
    "diff",
    "config_differences",
    "nemo_recipe",
    "train_config",
    "inspection",
    "stage",
    "tokenize_run",
    "capture_rank",
    "capture_run",
    "verify_run",
    "estimate",
    "doctor",
    "yaml_text",
    "init_repository",
    "console",
    "cache_commands",
    "repository_commands",
    "cli",
]
"""A module imports only from those before it. `__init__` is the face: it imports from all, none from it."""

CORE = FLOW[: FLOW.index("offline_cache") + 1]
FACADES = {"__init__", "offline_cache"}
FOLDER = Path(dspark_cache.__file__).parent
MODULES = sorted(path.stem for path in FOLDER.glob("*.py"))


def imports(module: str) -> list[ast.Import | ast.ImportFrom]:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the dotted modules that a statement imports; `from package import x` counts as package.x."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if node.module == "dspark_cache":
        return [f"dspark_cache.{alias.name}" for alias in node.names]
    return [node.module or ""]


def siblings(module: str) -> set[str]:
    names = [name for node in imports(module) for name in imported_names(node)]
    return {name.split(".")[1] for name in names if name.startswith("dspark_cache.")}


def test_every_module_has_its_place_in_the_flow() -> None:
    assert set(MODULES) - {"__init__"} <= set(FLOW)
    assert len(FLOW) == len(set(FLOW))
    assert not [path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "__init__"])
def test_a_module_imports_only_from_those_before_it(module: str) -> None:
    assert siblings(module) <= set(FLOW[: FLOW.index(module)])


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_relatively_or_the_whole_package(module: str) -> None:
    for node in imports(module):
        assert "dspark_cache" not in imported_names(node)
        assert not isinstance(node, ast.ImportFrom) or (node.level == 0 and node.names[0].name != "*")


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_crosses_a_module(module: str) -> None:
    for node in imports(module):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dspark_cache"):
            assert [alias.name for alias in node.names if alias.name.startswith("_")] == []
            private = [alias.asname for alias in node.names if (alias.asname or "").startswith("_")]
            assert private == [] or module in FACADES


def deferred(tree: ast.Module) -> set[ast.AST]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {inner for function in functions for inner in ast.walk(function)}


@pytest.mark.parametrize("module", [*CORE, "__init__"])
def test_the_core_imports_torch_safetensors_and_the_standard_library_only(module: str) -> None:
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    inside = deferred(tree)
    names = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in inside
        for name in imported_names(node)
    }
    assert names <= {"dspark_cache", "torch", "safetensors", *sys.stdlib_module_names}


def test_names_imported_when_asked_for_are_those_that_types_see() -> None:
    """`__init__` has a table for one and imports for the other."""
    eager = [node for node in ast.parse((FOLDER / "__init__.py").read_text()).body if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.asname or alias.name: f"{(node.module or '').removeprefix('dspark_cache.')}.{alias.name}"
        for node in imports("__init__")
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module or "").startswith("dspark_cache.") and ast.dump(node) not in map(ast.dump, eager)
    }
    homes = {name: home if "." in home else f"{home}.{name}" for name, home in dspark_cache._HOMES.items()}
    assert homes == seen
    assert list(dspark_cache._HOMES) == sorted(dspark_cache._HOMES)


@pytest.mark.parametrize("statement", ["import dspark_cache", "from dspark_cache.cli import make_parser as m; m()"])
def test_nothing_heavy_is_imported_before_it_is_needed(statement: str) -> None:
    heavy = {"torch", "transformers", "safetensors", "dvc", "omegaconf"}
    code = f"import sys; {statement}; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dspark_cache' has no attribute 'nosuch'"):
        _ = dspark_cache.nosuch
    assert set(dspark_cache.__all__) <= set(dir(dspark_cache))
