"""Entries added to YAML that people wrote: their lines stay, the values are those of both."""

from __future__ import annotations

import difflib
import itertools
from typing import Any

import pytest

from dspark_cache.errors import SettingsError
from dspark_cache.yaml_text import merge_yaml, parse_yaml
from tests.repository import ROOT

SHIPPED = """\
stages:
  ours:
    cmd: python -m ours   # why
    deps:
      - a
  second:
    cmd: python -m second
plots:
  - one.json:
      x: step
  - two.json
flat: 1
"""

WRITTEN = {
    "nothing": "",
    "comments only": "# mine\n\n",
    "another key": "vars: [a.yaml]\n",
    "a null": "stages:   # none yet\nlr: 1\n",
    "a null at the end": "lr: 1\nstages:\n",
    "a null in words": "stages: null  # none\nplots: ~\n",
    "an empty flow mapping": "stages: {}  # removed\nplots: []\n",
    "a flow mapping": "stages: {mine: {cmd: x}}\nplots: [one.json]\n",
    "a flow mapping over lines": "stages: {\n  mine: {cmd: x},\n  }\n",
    "four spaces": "stages:\n    mine:\n        cmd: x\n\n        outs: [m]\n\n# next\nlr:   1e-3\n",
    "a list without indent": "plots:\n- three.json\nstages:\n  mine:\n    cmd: x\n    outs:\n    - m\n",
    "a list with indent": "plots:\n    - three.json   # drawn\n    # the last\n\n\nlr: 1\n",
    "anchors": "base: &base {a: 1}\nstages:\n  mine: &mine\n    cmd: x\n  other:\n    <<: *mine\n    outs: [b]\n",
    "an unused anchor": "vars:\n  - a: &never {b: 1, 'c': 2}   # two\n",
    "long lines": "stages:\n  mine:\n    cmd: >-\n      " + "word " * 60 + "\n      end\n",
    "a literal with comments in it": "stages:\n  mine:\n    cmd: |\n      a\n      # no comment\nlr: 1\n",
    "comments of both depths": "stages:\n  mine: {cmd: x}\n  # of stages\n# of the file\nlr: 1\n",
    "quotes and tags": "'stages':\n  \"mine\": {cmd: 'x'}\nwhen: !!str 2020-01-01\n",
    "a marker": "---\nstages:\n  mine:\n    cmd: x\n",
    "an end": "stages:\n  mine:\n    cmd: x\n...\n",
    "ours in another form": "stages:\n  ours: {cmd: theirs}\n  second: null\nflat: 2\n",
    "all in one": "{stages: {mine: {cmd: x}}, lr: 1}\n",
    "letters": "größe: 日本\nstages:\n  日本:\n    cmd: ü\n",
}


def expected(text: str) -> dict[Any, Any]:
    theirs, ours = parse_yaml(text, ""), parse_yaml(SHIPPED, "")
    stages = {**ours["stages"], **(theirs.get("stages") or {})}
    plots = theirs.get("plots") or []
    return {**ours, **theirs, "stages": stages, "plots": plots + [item for item in ours["plots"] if item not in plots]}


def is_only_added_to(text: str, merged: str) -> bool:
    """Say whether all lines of a text are there, in order and unchanged."""
    return not [line for line in difflib.ndiff(text.splitlines(True), merged.splitlines(True)) if line[0] == "-"]


FORMS = [name for name in WRITTEN if "flow" not in name and name not in ("all in one", "a null in words")]


@pytest.mark.parametrize(("name", "newline", "head"), list(itertools.product(WRITTEN, ["\n", "\r\n"], ["", "\ufeff"])))
def test_what_is_written_stays_and_what_lacks_is_added(name: str, newline: str, head: str) -> None:
    text = head + WRITTEN[name].replace("\n", newline)
    merged = merge_yaml(text, SHIPPED, "dvc.yaml")
    assert parse_yaml(merged.removeprefix("\ufeff"), "") == expected(text.removeprefix("\ufeff"))
    assert merged.startswith(head)
    assert merged.count("\n") == merged.count(newline) or newline not in text
    assert merge_yaml(merged, SHIPPED, "dvc.yaml") == merged
    if name in FORMS:
        assert is_only_added_to(text.removeprefix(head), merged.removeprefix(head))


@pytest.mark.parametrize("name", FORMS)
def test_a_last_line_that_is_not_ended_is_ended(name: str) -> None:
    text = WRITTEN[name].rstrip("\n")
    merged = merge_yaml(text, SHIPPED, "dvc.yaml")
    assert parse_yaml(merged, "") == expected(text)
    assert is_only_added_to(text + "\n" if text else "", merged)


def test_entries_come_with_their_comments_at_the_indent_of_those_there() -> None:
    text = "stages:\n    mine:\n        cmd: x\n    # mine is first\n\n# drawn\nplots:\n- three.json\n"
    assert merge_yaml(text, SHIPPED, "dvc.yaml") == (
        "stages:\n    mine:\n        cmd: x\n    # mine is first\n"
        "    ours:\n      cmd: python -m ours   # why\n      deps:\n        - a\n"
        "    second:\n      cmd: python -m second\n"
        "\n# drawn\nplots:\n- three.json\n- one.json:\n    x: step\n- two.json\nflat: 1\n"
    )


def test_into_a_flow_mapping_entries_go_on_its_line() -> None:
    merged = merge_yaml("plots: [three.json]\nstages: {}\nflat: 0\n", SHIPPED, "dvc.yaml")
    assert merged.startswith('plots: [three.json, {"one.json": {"x": "step"}}, "two.json"]\nstages:\n  ours:\n    cmd:')


@pytest.mark.parametrize("name", ["dvc.yaml", "params.yaml", "stages/versions.yaml"])
def test_the_shipped_files_can_be_added_from_entry_by_entry(name: str) -> None:
    shipped = (ROOT / name).read_text()
    assert merge_yaml("", shipped, name) == shipped
    assert merge_yaml("# mine\n", shipped, name) == "# mine\n" + shipped[len(leading_comments(shipped)) :]
    content = parse_yaml(shipped, name)
    for key, value in content.items():
        if isinstance(value, dict):
            text = f"mine: 1\n{key}:\n   other: 1\n"
            assert parse_yaml(merge_yaml(text, shipped, name), "") == {
                **content,
                "mine": 1,
                key: {"other": 1, **value},
            }


def leading_comments(text: str) -> str:
    return "".join(itertools.takewhile(lambda line: line[0] == "#", text.splitlines(True)))


FAULTS = {
    "- a\n": "dvc.yaml: expected keys and values, found list",
    "stages: [\n": "dvc.yaml is not valid YAML: line 2, column 1: ",
    "stages: {a: 1}\nstages: {b: 1}\n": 'dvc.yaml is not valid YAML: line 2, column 1: found duplicate key "stages"',
    # an alias shares its entries with the anchor, which is another key's
    "other: &x\n  a: 1\nstages: *x\n": "dvc.yaml: nothing can be added to this form of YAML",
    "stages: {mine: 1  # one\n  }\n": "dvc.yaml: nothing can be added to this form of YAML",
    "a: 1\n---\nb: 1\n": "dvc.yaml is not valid YAML: line 2, column 1: but found another document",
    "mine: |+\n  a\n\n": "dvc.yaml: nothing can be added to this form of YAML",
}


@pytest.mark.parametrize(("text", "message"), FAULTS.items())
def test_what_nothing_can_be_added_to_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        merge_yaml(text, SHIPPED, "dvc.yaml")
    assert str(error.value).startswith(message)
