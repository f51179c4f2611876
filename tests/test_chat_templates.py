"""Which template is in effect, what it marks, and what is refused before any row is read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark_cache.chat_templates import (
    chat_template_sha256,
    check_template,
    has_generation_markers,
    merge_system_message,
    resolve_chat_template,
)
from dspark_cache.conversations import Conversation
from dspark_cache.errors import InputError

TEMPLATES = Path(__file__).parent / "data" / "golden" / "templates"


def tokenizer(chat_template: object) -> Any:
    return SimpleNamespace(chat_template=chat_template)


NO_TEMPLATE = tokenizer(None)


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("{{ own }}", "{{ own }}"),
        ({"rag": "{{ r }}", "default": "{{ d }}"}, "{{ d }}"),
        ({"rag": "{{ r }}"}, "{{ r }}"),
    ],
)
def test_without_override_the_tokenizer_s_own_is_taken(own: object, expected: str) -> None:
    assert resolve_chat_template(None, tokenizer(own)) == expected


@pytest.mark.parametrize("own", [None, {}, ""])
def test_no_template_at_all_is_refused(own: object) -> None:
    with pytest.raises(InputError, match=r"the tokenizer has no chat template; set target\.chat_template"):
        resolve_chat_template(None, tokenizer(own))


@pytest.mark.parametrize("text", ["{% for m in messages %}x{% endfor %}", "{{ messages }}", "a/b{{ x }}"])
def test_an_override_with_an_expression_is_the_template(text: str) -> None:
    assert resolve_chat_template(text, NO_TEMPLATE) == text


def test_an_override_may_be_the_path_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    path = TEMPLATES / "chatml_gen.jinja"
    text = path.read_text(encoding="utf-8")
    assert resolve_chat_template(str(path), NO_TEMPLATE) == text
    monkeypatch.chdir(TEMPLATES.parent)
    assert resolve_chat_template("templates/chatml_gen.jinja", NO_TEMPLATE) == text


def test_an_override_may_be_json_with_a_template_in_it() -> None:
    path = TEMPLATES / "tokenizer_config_chatml_gen.json"
    assert resolve_chat_template(str(path), NO_TEMPLATE) == json.loads(path.read_text())["chat_template"]


def test_json_without_a_template_is_refused() -> None:
    with pytest.raises(
        InputError, match=r'expected a string at its key "chat_template", found the keys \[\'nothing\'\]'
    ):
        resolve_chat_template(str(TEMPLATES / "no_template_key.json"), NO_TEMPLATE)


def test_a_mistyped_path_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError) as caught:
        resolve_chat_template(str(TEMPLATES / "chatlm.jinja"), NO_TEMPLATE)
    wanted, near = TEMPLATES / "chatlm.jinja", TEMPLATES / "chatml.jinja"
    assert str(caught.value) == f"target.chat_template: no such file: {wanted}; did you mean {near}?"


@pytest.mark.parametrize("text", ["", "{# only a comment #}", "x" * 5000, "a\0b"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^target\.chat_template"):
        resolve_chat_template(text, NO_TEMPLATE)


def test_folders_and_files_without_a_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder; expected a file"):
        resolve_chat_template(str(tmp_path), NO_TEMPLATE)
    path = tmp_path / "t.jinja"
    path.write_text("no expression")
    with pytest.raises(InputError, match=r"holds no template: found neither `\{%` nor `\{\{` in it"):
        resolve_chat_template(str(path), NO_TEMPLATE)
    path.write_bytes(b"{{ x }}\xe9")
    with pytest.raises(InputError, match="is not UTF-8"):
        resolve_chat_template(str(path), NO_TEMPLATE)


@pytest.mark.parametrize(
    "tag", ["generation", " generation ", "- generation -", "-generation-", "+ generation ", "\ngeneration\n"]
)
def test_markers_are_seen_however_they_are_spaced(tag: str) -> None:
    assert has_generation_markers(f"a{{%{tag}%}}b{{% endgeneration %}}")


@pytest.mark.parametrize(
    "template",
    [
        "{% endgeneration %}",
        "{# {% generation %} #}",
        "{% raw %}{% generation %}{% endraw %}",
        "{% set generation = 1 %}",
        "{{ '{% generation %}' }}",
        "{{ generation }}",
        "{% generations %}",
    ],
)
def test_what_only_looks_like_a_marker_is_none(template: str) -> None:
    assert not has_generation_markers(template)


@pytest.mark.parametrize(
    ("name", "marked"),
    [("chatml", False), ("chatml_gen", True), ("inst_gen", True), ("think", False), ("think_gen", True)],
)
def test_golden_templates(name: str, marked: bool) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    check_template(template)
    assert has_generation_markers(template) is marked


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for m in messages %}", "syntax error in line 2 of the template: Unexpected end of template"),
        ("a\n\n{{ x | nofilter }}", "syntax error in line 3 of the template: No filter named 'nofilter'"),
        ("{% generation %}", "syntax error in line 1 of the template: Unexpected end of template"),
    ],
)
def test_syntax_errors_are_refused_with_their_line(template: str, message: str) -> None:
    with pytest.raises(InputError, match=rf"^target\.chat_template: {message}"):
        check_template(template)


def test_markers_of_a_template_that_cannot_be_read_are_a_syntax_error() -> None:
    with pytest.raises(InputError, match="syntax error in line 1"):
        has_generation_markers("{{ 'open }}")


def test_the_hash_is_of_the_text_verbatim() -> None:
    assert chat_template_sha256("ü{{ x }}\n") == hashlib.sha256("ü{{ x }}\n".encode()).hexdigest()


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["system", "user", "assistant"], [("user", "0\n1"), ("assistant", "2")]),
        (["system", "assistant", "user"], [("assistant", "1"), ("user", "0\n2")]),
        (["system", "assistant"], [("user", "0"), ("assistant", "1")]),
        (["user", "assistant"], [("user", "0"), ("assistant", "1")]),
    ],
)
def test_system_text_goes_before_the_first_user_text(roles: list[str], expected: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    merged = merge_system_message(Conversation(messages=messages, tools=None)).messages
    assert [(m["role"], m["content"]) for m in merged] == expected
