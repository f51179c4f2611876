"""What makes a row a conversation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dspark_cache.conversations import parse_row
from dspark_cache.errors import RowError

CHAT = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}


def message_row(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"} | message]}


def call_row(**call: Any) -> dict[str, Any]:
    return message_row(tool_calls=[{"function": {"name": "f", "arguments": "{}"}} | call])


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        (None, "row_not_object", "expected an object with `messages`, found null"),
        ([CHAT], "row_not_object", "expected an object with `messages`, found a list"),
        (
            {"text": "x", "id": 1},
            "no_messages",
            "expected `messages` or `conversations`, found the keys ['id', 'text']",
        ),
        ({"messages": "x"}, "messages_not_list", "messages: expected a list, found a string"),
        ({"conversations": "x"}, "messages_not_list", "conversations: expected a list, found a string"),
        ({"messages": []}, "empty_messages", "messages: expected at least one message, found an empty list"),
        ({"messages": ["hi"]}, "message_not_object", "messages[0]: expected an object, found a string"),
        ({"conversations": ["hi"]}, "message_not_object", "conversations[0]: expected an object, found a string"),
        (
            message_row(role="developer"),
            "bad_role",
            "messages[1].role: expected one of system, user, assistant, tool, found 'developer'",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "x"}]},
            "bad_role",
            "conversations[0].from: expected one of system, human, user, gpt, assistant, chatgpt, model, bot, "
            "found 'function_call'",
        ),
        ({"messages": [{"role": ["user"]}]}, "bad_role", "messages[0].role: expected one of"),
        ({"conversations": [{"from": {}}]}, "bad_role", "conversations[0].from: expected one of"),
        (
            {"messages": [{"role": "system"}, {"role": "system"}]},
            "several_system",
            "expected at most one system message, found 2",
        ),
        (
            message_row(content=[{"text": 3}]),
            "bad_content",
            "messages[1].content: expected parts whose text is a string, found 3",
        ),
        (
            message_row(reasoning_content=["z"]),
            "bad_reasoning",
            "messages[1].reasoning_content: expected a string, found a list",
        ),
        (message_row(tool_calls={}), "bad_tool_calls", "messages[1].tool_calls: expected a list, found an object"),
        (
            message_row(tool_calls=["f"]),
            "bad_tool_calls",
            "messages[1].tool_calls[0]: expected an object with a `function` object, found 'f'",
        ),
        (
            call_row(function={"arguments": "{}"}),
            "bad_tool_calls",
            "messages[1].tool_calls[0].function.name: expected a non-empty string, found nothing",
        ),
        (
            call_row(function={"name": "f", "arguments": None}),
            "bad_tool_calls",
            "messages[1].tool_calls[0].function.arguments: expected arguments, found none",
        ),
        (call_row(id=3), "bad_tool_calls", "messages[1].tool_calls[0].id: expected a non-empty string, found 3"),
        (call_row(type=3), "bad_tool_calls", "messages[1].tool_calls[0].type: expected a non-empty string, found 3"),
        (
            message_row(role="tool", tool_call_id=""),
            "bad_tool_result",
            "messages[1].tool_call_id: expected a non-empty string, found ''",
        ),
        (CHAT | {"tools": {}}, "bad_tools", "tools: expected a list, found an object"),
        (CHAT | {"tools": [3]}, "bad_tools", "tools[0]: expected an object, found a number"),
        (CHAT | {"tools": ""}, "bad_tools", "tools: expected the JSON text of a list, found: Expecting value"),
        (CHAT | {"tools": "null"}, "bad_tools", "tools: expected the JSON text of a list, found null"),
        (
            message_row(content="bad \ud800"),
            "bad_text",
            r"expected text that UTF-8 can encode, found the lone surrogate U+D800 in 'bad \ud800'",
        ),
        (message_row(note={"\udfff": 1}), "bad_text", "expected text that UTF-8 can encode"),
    ],
)
def test_rows_that_are_no_conversation(row: object, reason: str, message: str) -> None:
    with pytest.raises(RowError) as caught:
        parse_row(row)
    assert caught.value.reason == reason
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        (12, "12"),
        (True, "True"),
        ({"a": 1}, "{'a': 1}"),
        ([{"type": "text", "text": "a"}, {"type": "image"}, "b", {"text": None}, {"text": "c"}], "a c"),
        ([], ""),
        ("nul \0 🙂", "nul \0 🙂"),
    ],
)
def test_content_becomes_text(content: object, text: str) -> None:
    assert parse_row(message_row(content=content)).messages[1]["content"] == text


def test_null_keys_are_dropped_and_others_kept() -> None:
    row = message_row(tool_calls=None, name="bob", weight=None, content=None)
    assert parse_row(row).messages[1] == {"role": "assistant", "content": "", "name": "bob"}


def test_tool_calls_are_completed() -> None:
    call = {"id": None, "type": "", "function": {"name": "f", "arguments": {"k": "ü", "n": None}, "x": None}, "y": None}
    (parsed,) = parse_row(message_row(tool_calls=[call])).messages[1]["tool_calls"]
    function = {"name": "f", "arguments": '{"k": "\\u00fc", "n": null}'}
    assert parsed == {"id": "call_0", "type": "function", "function": function}


def test_null_reasoning_becomes_empty_and_absent_reasoning_stays_absent() -> None:
    assert parse_row(message_row(reasoning_content=None)).messages[1]["reasoning_content"] == ""
    assert "reasoning_content" not in parse_row(CHAT).messages[1]


@pytest.mark.parametrize(
    ("tools", "parsed"), [(None, None), ([], None), ("[]", None), ([{"a": 1}], [{"a": 1}]), ('[{"a": 1}]', [{"a": 1}])]
)
def test_tools_come_as_a_list_or_as_its_json_text(tools: object, parsed: object) -> None:
    assert parse_row(CHAT | {"tools": tools}).tools == parsed


def test_sharegpt_turns_become_messages_unless_there_are_messages() -> None:
    turns = [{"from": "human", "value": "a"}, {"role": "bot", "content": "b"}, {"from": "gpt", "value": None}]
    parsed = parse_row({"conversations": turns, "messages": None}).messages
    assert parsed == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": ""},
    ]
    assert parse_row({"conversations": turns} | CHAT).messages == CHAT["messages"]


def test_the_row_itself_is_left_unchanged() -> None:
    row = call_row(id=None)
    before = json.dumps(row)
    parse_row(row)
    assert json.dumps(row) == before
