"""What a row must hold to be a conversation.

Stands between rows and chat_templates in the tokenize stage. `parse_row` makes a checked `Conversation` of a row,
or says with a stable code why it is none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from dspark_cache.errors import RowError
from dspark_cache.strict_json import is_int

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROLES: Final = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES: Final = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "bot"), "assistant"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One checked conversation, ready for a chat template.

    Attributes:
        messages: At least one; roles are of `ROLES`, contents are text, tool calls are complete.
        tools: The row's tool descriptions, None if it has none.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None


def parse_row(row: object) -> Conversation:
    """Check one row and bring it into the form that chat templates expect.

    `messages` wins over `conversations` (ShareGPT). Contents become text, tool calls get their missing ids and
    types, keys whose value is null are dropped; further keys of messages reach the template unchanged.

    Raises:
        RowError: The row is no conversation; `reason` is the code it is counted under.
    """
    if not isinstance(row, dict):
        raise RowError("row_not_object", f"expected an object with `messages`, found {_kind(row)}")
    messages = [_parse_message(message, f"messages[{i}]") for i, message in enumerate(_raw_messages(row))]
    systems = sum(message["role"] == "system" for message in messages)
    if systems > 1:
        raise RowError("several_system", f"expected at most one system message, found {systems}")
    conversation = Conversation(messages=messages, tools=_parse_tools(row.get("tools")))
    for text in _texts([conversation.messages, conversation.tools]):
        _check_encodable(text)
    return conversation


def is_token_row(row: object) -> TypeGuard[dict[str, Any]]:
    """Say whether a row comes as token ids, as inference engines write regenerated answers."""
    return isinstance(row, dict) and row.get("input_ids") is not None


def parse_token_row(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Check a row that is tokenised already; return its `input_ids` and `loss_mask`, both [T].

    Raises:
        RowError: The two are no lists of the same positive length, ids are negative, or the mask is not of 0 and 1.
    """
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(is_int(token) and token >= 0 for token in ids):
        raise RowError("bad_tokens", f"input_ids: expected a list of token ids, found {_shown(ids)}")
    if not isinstance(mask, list) or not all(isinstance(bit, int) and bit in (0, 1) for bit in mask):
        raise RowError("bad_tokens", f"loss_mask: expected a list of 0 and 1 beside input_ids, found {_shown(mask)}")
    if len(ids) != len(mask):
        raise RowError("bad_tokens", f"input_ids and loss_mask: expected one length, found {len(ids)} and {len(mask)}")
    return ids, [int(bit) for bit in mask]


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    messages, sharegpt = row.get("messages"), row.get("conversations")
    if messages is None and sharegpt is None:
        raise RowError("no_messages", f"expected `messages` or `conversations`, found the keys {sorted(map(str, row))}")
    is_sharegpt = sharegpt is not None and not isinstance(messages, list)
    key, found = ("conversations", sharegpt) if is_sharegpt else ("messages", messages)
    if not isinstance(found, list):
        raise RowError("messages_not_list", f"{key}: expected a list, found {_kind(found)}")
    if not found:
        raise RowError("empty_messages", f"{key}: expected at least one message, found an empty list")
    return [_from_sharegpt(turn, i) for i, turn in enumerate(found)] if is_sharegpt else found


def _from_sharegpt(turn: object, index: int) -> dict[str, Any]:
    name = f"conversations[{index}]"
    if not isinstance(turn, dict):
        raise RowError("message_not_object", f"{name}: expected an object, found {_kind(turn)}")
    sender = turn.get("role") if turn.get("from") is None else turn["from"]
    role = SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise RowError("bad_role", f"{name}.from: expected one of {_listed(SHAREGPT_ROLES)}, found {_shown(sender)}")
    return {"role": role, "content": turn.get("content") if turn.get("value") is None else turn["value"]}


def _parse_message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError("message_not_object", f"{name}: expected an object, found {_kind(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise RowError("bad_role", f"{name}.role: expected one of {_listed(ROLES)}, found {_shown(role)}")
    parsed = {key: value for key, value in message.items() if value is not None}
    parsed["content"] = _content_text(message.get("content"), f"{name}.content")
    if role == "assistant":
        _parse_answer(parsed, message, name)
    if role == "tool":
        _require_text(parsed, "tool_call_id", "bad_tool_result", name)
    return parsed


def _content_text(content: object, name: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        return str(content)
    texts = [part["text"] for part in content if isinstance(part, dict) and part.get("text") is not None]
    for text in texts:
        if not isinstance(text, str):
            raise RowError("bad_content", f"{name}: expected parts whose text is a string, found {_shown(text)}")
    return " ".join(texts)


def _parse_answer(parsed: dict[str, Any], message: dict[str, Any], name: str) -> None:
    if "reasoning_content" in message:
        reasoning = parsed.setdefault("reasoning_content", "")
        if not isinstance(reasoning, str):
            raise RowError("bad_reasoning", f"{name}.reasoning_content: expected a string, found {_kind(reasoning)}")
    calls = parsed.get("tool_calls", [])
    if not isinstance(calls, list):
        raise RowError("bad_tool_calls", f"{name}.tool_calls: expected a list, found {_kind(calls)}")
    if "tool_calls" in parsed:
        parsed["tool_calls"] = [_parse_call(call, i, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _parse_call(call: object, index: int, name: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RowError("bad_tool_calls", f"{name}: expected an object with a `function` object, found {_shown(call)}")
    function = {key: value for key, value in call["function"].items() if value is not None}
    _require_text(function, "name", "bad_tool_calls", f"{name}.function")
    if "arguments" not in function:
        raise RowError("bad_tool_calls", f"{name}.function.arguments: expected arguments, found none")
    if not isinstance(function["arguments"], str):
        function["arguments"] = json.dumps(function["arguments"], default=str)
    parsed = {key: value for key, value in call.items() if value is not None} | {"function": function}
    for key, default in (("id", f"call_{index}"), ("type", "function")):
        parsed[key] = parsed.get(key) or default
        _require_text(parsed, key, "bad_tool_calls", name)
    return parsed


def _parse_tools(tools: object) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise RowError("bad_tools", f"tools: expected the JSON text of a list, found: {error}") from error
        if tools is None:
            raise RowError("bad_tools", "tools: expected the JSON text of a list, found null")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise RowError("bad_tools", f"tools: expected a list, found {_kind(tools)}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RowError("bad_tools", f"tools[{i}]: expected an object, found {_kind(tool)}")
    return tools or None


def _require_text(values: dict[str, Any], key: str, reason: str, name: str) -> None:
    if not isinstance(values.get(key), str) or not values[key]:
        raise RowError(reason, f"{name}.{key}: expected a non-empty string, found {_shown(values.get(key))}")


def _texts(value: object) -> Iterator[str]:
    """Yield every string inside `value`, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(text[error.start]):04X} in {text!a:.60}"
        raise RowError("bad_text", f"expected text that UTF-8 can encode, found {found}") from error


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a bool", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _shown(value: object) -> str:
    return "nothing" if value is None else ascii(value)[:80]


def _listed(names: Sequence[str] | dict[str, str]) -> str:
    return ", ".join(names)
