"""Reading YAML as DVC does: version 1.2, plain values. ruamel.yaml is imported when needed: trainers may lack it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dspark_cache.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        FileNotFoundError: There is no such file.
        SettingsError: It cannot be read, is no YAML, or ruamel.yaml is not installed.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    return load_yaml(content, str(path))


def load_yaml(content: str | bytes, name: str) -> Any:
    """Return what a YAML text holds, which messages call `name`.

    Raises:
        SettingsError: It is no YAML, with the line where that shows; or ruamel.yaml is not installed.
    """
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError as error:
        raise SettingsError(f"reading {name} needs the package ruamel.yaml: pip install ruamel.yaml") from error
    try:
        return YAML(typ="safe", pure=True).load(content)
    except (YAMLError, ValueError, RecursionError) as error:  # ValueError: dates that do not exist, bad UTF-8
        raise SettingsError(f"{name} is not valid YAML: {_where(error)}") from error


def _where(error: Exception) -> str:
    """Return what is wrong in one line; what ruamel.yaml adds for programmers is left out."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)  # of most of its errors
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + " ".join(str(problem or error or type(error).__name__).split())
