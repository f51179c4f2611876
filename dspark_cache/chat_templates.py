"""Chat templates: which one is in effect, whether it marks answers, and rendering with it.

Stands between conversations and loss_masks in the tokenize stage. `resolve_chat_template` and `check_template` run
once, before any row is read; a `ChatRenderer` then turns messages into text and text into token ids, always
through transformers' own rendering and without adding special tokens of its own.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import jinja2

from dspark_cache.chat_template_hash import effective_chat_template
from dspark_cache.conversations import Conversation
from dspark_cache.errors import InputError, RowError
from dspark_cache.inputs import is_inline_template, missing_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SETTING: Final = "target.chat_template"
_NO_SYSTEM_ROLE: Final = "system role not supported"

Messages = list[dict[str, Any]]


class ChatTokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    truncation_side: str
    special_tokens_map: Mapping[str, Any]

    def __call__(self, text: str, **options: Any) -> Any:
        """Tokenize one text."""

    def apply_chat_template(self, conversation: Messages, **options: Any) -> Any:
        """Render, and with `tokenize=True` tokenize, one conversation."""


def resolve_chat_template(override: str | None, tokenizer: ChatTokenizer) -> str:
    """Return the text of the template in effect.

    Args:
        override: A template (it contains `{%` or `{{`), or the path of a file that holds one, either as its text or
            as the value of "chat_template" in a JSON object. None takes the tokenizer's own: of several named ones
            "default", else the first.
        tokenizer: Asked only if there is no override.

    Raises:
        InputError: Neither a template nor a file that holds one; no override and the tokenizer has none.
    """
    if override is None:
        own = effective_chat_template(tokenizer)
        if not own:
            raise InputError(f"the tokenizer has no chat template; set {SETTING} to one, or to the path of one")
        return own
    if is_inline_template(override):
        return override
    if not override:
        raise InputError(f"{SETTING} is empty; expected a template or a path (null takes the tokenizer's own)")
    return _read_template(Path(override))


def _read_template(path: Path) -> str:
    try:
        found = path.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{SETTING} is neither a template nor a path: {str(path)!r:.80}: {error}") from error
    if not found:
        raise missing_file(SETTING, path)
    if path.is_dir():
        raise InputError(f"{SETTING}: {path} is a folder; expected a file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{SETTING}: {path} is not UTF-8: {error}") from error
    template = _template_of_json(text, path)
    if not is_inline_template(template):
        raise InputError(f"{SETTING}: {path} holds no template: found neither `{{%` nor `{{{{` in it")
    return template


def _template_of_json(text: str, path: Path) -> str:
    """Return the "chat_template" of a JSON object; text that is no JSON object is the template itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict):
        return text
    template = value.get("chat_template")
    if not isinstance(template, str):
        raise InputError(
            f'{SETTING}: {path} is a JSON object; expected a string at its key "chat_template", '
            f"found the keys {sorted(value)}"
        )
    return template


def has_generation_markers(template: str) -> bool:
    """Say whether the template marks answers by `{% generation %}`, however it is spaced.

    Raises:
        InputError: The template cannot be split into Jinja tokens.
    """
    try:
        tokens = [(kind, text) for _, kind, text in jinja2.Environment().lex(template) if kind != "whitespace"]
    except jinja2.TemplateSyntaxError as error:
        raise _syntax_error(error) from error
    return any(opening == "block_begin" and name == ("name", "generation") for (opening, _), name in pairwise(tokens))


def check_template(template: str) -> None:
    """Compile the template as transformers will, `generation` tags included.

    Raises:
        InputError: A syntax error; names the line.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template(conversations=[], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise _syntax_error(error) from error


def _syntax_error(error: jinja2.TemplateSyntaxError) -> InputError:
    return InputError(f"{SETTING}: syntax error in line {error.lineno} of the template: {error.message}")


def chat_template_sha256(text: str) -> str:
    """Return the sha256 of a template's UTF-8 text, verbatim."""
    return hashlib.sha256(text.encode()).hexdigest()


class ChatRenderer:
    """Renders conversations with one template and tokenizes the result."""

    def __init__(self, tokenizer: ChatTokenizer, template: str) -> None:
        """Render with `template`, whatever the tokenizer's own is."""
        self._tokenizer = tokenizer
        self._template = template
        self.eos_token_id = tokenizer.eos_token_id
        self.truncates_left = tokenizer.truncation_side == "left"
        self.has_markers = has_generation_markers(template)
        self.prompt_variants: tuple[dict[str, Any], ...] = (
            ({"enable_thinking": True}, {"enable_thinking": False}) if "enable_thinking" in template else ({},)
        )
        """Options under which the template may write different generation prompts."""

    def ids(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None, **options: Any) -> list[int]:
        """Return the token ids of a render; of no messages, what the template writes before any turn.

        Raises:
            RowError: The template refuses these messages (`template_error`).
        """
        try:
            text = self._text(list(messages), tools, options)
        except Exception as error:
            raise template_error(error) from error
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _text(self, messages: Messages, tools: list[Any] | None, options: dict[str, Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        common: dict[str, Any] = {"tools": tools, "chat_template": self._template}
        if messages:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **common, **options))
        # Declared as text, but it returns the texts and their marked ranges.
        rendered: Any = render_jinja_template(conversations=[[]], **common, **self._tokenizer.special_tokens_map)
        return str(rendered[0][0])

    def marked_ids(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> tuple[list[int], list[int]]:
        """Return the token ids of a render and, for each, 1 if it lies in a `generation` block.

        Raises:
            RowError: The template refuses these messages (`template_error`).
        """
        try:
            encoded = self._tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self._template,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
        except Exception as error:
            raise template_error(error) from error
        return encoded["input_ids"], encoded["assistant_masks"]


def template_error(error: Exception) -> RowError:
    """Make the row error for what a template (or a tokenizer) raised on one row."""
    return RowError("template_error", f"the chat template cannot render this row: {type(error).__name__}: {error}")


def refuses_system_role(error: RowError) -> bool:
    """Say whether a template refused a row because it knows no system role."""
    return _NO_SYSTEM_ROLE in str(error).lower()


def merge_system_message(conversation: Conversation) -> Conversation:
    """Put the system text before the first user text; without a user message it becomes one, at the start."""
    system = next((m["content"] for m in conversation.messages if m["role"] == "system"), None)
    messages = [message for message in conversation.messages if message["role"] != "system"]
    if system is None:
        return conversation
    for position, message in enumerate(messages):
        if message["role"] == "user":
            messages[position] = message | {"content": f"{system}\n{message['content']}"}
            break
    else:
        messages.insert(0, {"role": "user", "content": system})
    return Conversation(messages=messages, tools=conversation.tools)
