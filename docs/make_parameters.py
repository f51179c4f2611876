"""Write docs/parameters.md from the dataclasses of the settings and the stages of dvc.yaml; it takes no arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from dspark_cache.settings import SECTIONS, allowed_values

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("parameters.md")
HEAD = """# Parameters

Every key of [params.yaml](../params.yaml), made by `python docs/make_parameters.py` from the dataclasses that check it.
A key that is left out has its default. All faults are reported at once, before any work. "Runs again" is the first
stage that a change makes out of date; [operations](operations.md#what-a-change-costs) says what that costs. Sections of
other names belong to other pipelines of a repository and are left alone.

`DSPARK_RUNTIME__<KEY>` in the environment, such as `DSPARK_RUNTIME__NUM_WORKERS=8`, overrides a key of `runtime`, and
only those.
"""


def page() -> str:
    """Return the page."""
    stages = YAML(typ="safe", pure=True).load(ROOT / "dvc.yaml")["stages"]
    return HEAD + "".join(_section(name, kind, stages) for name, kind in SECTIONS.items())


def _section(name: str, kind: type, stages: dict[str, Any]) -> str:
    about = (kind.__doc__ or "").partition(": ")[2].rstrip(".")
    lines = [f"\n## {name}\n", f"{about[0].upper()}{about[1:]}.\n"]
    lines += ["| key | default | allowed | meaning | runs again |", "|---|---|---|---|---|"]
    for item in dataclasses.fields(kind):
        first = next((stage for stage, content in stages.items() if f"{name}.{item.name}" in content["params"]), "-")
        default = (
            "null"
            if item.default is None
            else str(item.default).lower()
            if isinstance(item.default, bool)
            else item.default
        )
        allowed = allowed_values(name, item.name)
        lines.append(f"| `{item.name}` | `{default}` | {allowed} | {_escaped(item.metadata['about'])} | {first} |")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page())
