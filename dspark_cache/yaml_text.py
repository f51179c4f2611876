"""Adding entries to a YAML file that people wrote: every line that is there stays as it is, byte for byte.

Round trips through a YAML library move comments, drop unused anchors and level indents. So entries go in as text, at
the place and the indent that the parser finds, and the result is parsed and compared with what is expected.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import CollectionNode, MappingNode, Node

from dspark_cache.errors import SettingsError
from dspark_cache.yaml_file import load_yaml

_BOM = "\ufeff"
_INDENT = 2


def parse_yaml(text: str, name: str) -> dict[Any, Any]:
    """Return the keys and values of a YAML text as DVC reads them; an empty text has none.

    Raises:
        SettingsError: It is no YAML, or something else than keys and values.
    """
    found = load_yaml(text, name)
    if not isinstance(found, dict | None):
        raise SettingsError(f"{name}: expected keys and values, found {type(found).__name__}")
    return found or {}


def merge_yaml(text: str, shipped: str, name: str) -> str:
    """Return `text` with what only `shipped` has: top-level keys, and the entries directly under common ones.

    Args:
        text: What the file `name` holds. Its lines stay, and its values win.
        shipped: What is added from, with its comments: in block style, keys and items without comments before them.
        name: File that messages name.

    Raises:
        SettingsError: `text` is no mapping, or written in a form to which nothing can be added.
    """
    if not text:
        return shipped
    body = text.removeprefix(_BOM)
    theirs, ours = parse_yaml(body, name), parse_yaml(shipped, name)
    missing = {key: places for key in ours if key in theirs and (places := _missing(theirs[key], ours[key]))}
    new = _missing(theirs, ours)
    expected = theirs | {key: _joined(theirs[key], ours[key], places) for key, places in missing.items()}
    try:
        for key, places in missing.items():
            body = _insert(body, shipped, key, places)
        if new:
            body = _insert(body, shipped, None, new)
        is_right = parse_yaml(body, name) == _joined(expected, ours, new)
    except (SettingsError, YAMLError, ValueError):
        is_right = False
    if not is_right:
        raise SettingsError(f"{name}: nothing can be added to this form of YAML: write each key on a line of its own")
    return text[: text.startswith(_BOM)] + body


def _missing(there: Any, value: Any) -> list[int]:
    """Return the positions of the entries of `value` that `there` lacks; a null has none, a scalar takes none."""
    if isinstance(there, dict) and isinstance(value, dict):
        return [place for place, key in enumerate(value) if key not in there]
    if isinstance(there, list) and isinstance(value, list):
        return [place for place, item in enumerate(value) if item not in there]
    return list(range(len(value))) if there is None and isinstance(value, dict | list) else []


def _picked(value: Any, places: list[int]) -> Any:
    if isinstance(value, list):
        return [value[place] for place in places]
    return {key: value[key] for place, key in enumerate(value) if place in places}


def _joined(there: Any, value: Any, places: list[int]) -> Any:
    picked = _picked(value, places)
    if there is None:
        return picked
    return there + picked if isinstance(there, list) else {**there, **picked}


def _insert(text: str, shipped: str, name: str | None, places: list[int]) -> str:
    """Insert entries of the mapping or list `name` of `shipped`, None: of all of it, at the end of that of `text`."""
    newline = "\r\n" if "\r\n" in text else "\n"
    if text and not text.endswith("\n"):
        text += newline
    key, node = _find(text, name)
    if isinstance(node, CollectionNode) and node.flow_style and node.value:
        value = parse_yaml(shipped, "")
        return _into_flow(text, node, _picked(value if name is None else value[name], places))
    if isinstance(node, CollectionNode) and not node.flow_style:
        column, end = node.start_mark.column, _end_of_block(text, node.end_mark.index, node.start_mark.column)
    elif key is not None:
        if node.start_mark.index < node.end_mark.index:  # null or {} gives way to a block
            text = text[: node.start_mark.index].rstrip() + text[node.end_mark.index :]
        column, end = key.start_mark.column + _INDENT, text.index("\n", key.end_mark.index) + 1
    else:
        column, end = 0, len(text)
    block = textwrap.indent("".join(_entries(shipped, name)[place] for place in places), " " * column)
    return text[:end] + block.replace("\n", newline) + text[end:]


def _find(text: str, name: str | None) -> tuple[Node | None, Any]:
    """Return the nodes of a key and its value; without a name no key, and the whole text: None if that is empty."""
    root = YAML(typ="safe", pure=True).compose(text)
    return (None, root) if name is None else next(pair for pair in root.value if pair[0].value == name)


def _end_of_block(text: str, end: int, column: int) -> int:
    """Return where the last line of a block ends: what follows are blank lines and comments of an outer block."""
    stop = text.rfind("\n", 0, end) + 1
    while stop:
        start = text.rfind("\n", 0, stop - 1) + 1
        line = text[start:stop]
        words = line.strip()
        if words and not (words.startswith("#") and len(line) - len(line.lstrip()) < column):
            break
        stop = start
    return stop


def _entries(text: str, name: str | None) -> list[str]:
    """Return the text of each entry of a block mapping or list, without its indent."""
    _, node = _find(text, name)
    firsts = [child[0] if isinstance(node, MappingNode) else child for child in node.value]
    starts = [text.rfind("\n", 0, first.start_mark.index) + 1 for first in firsts]
    stops = [*starts[1:], _end_of_block(text, node.end_mark.index, node.start_mark.column)]
    return [textwrap.dedent(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]


def _into_flow(text: str, node: CollectionNode, entries: Any) -> str:
    """Insert entries before the bracket that ends a flow mapping or list, as JSON, which YAML reads."""
    end = node.end_mark.index - 1
    before = text[:end].rstrip()
    separator = "" if before.endswith(("{", "[", ",")) else ", "
    return before + separator + json.dumps(entries, ensure_ascii=False)[1:-1] + text[end:]
