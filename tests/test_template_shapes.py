"""Masks under templates shaped like those of the known families: what is supervised, as text, checked by hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from dspark_cache.chat_templates import has_generation_markers, resolve_chat_template
from dspark_cache.errors import RowError
from dspark_cache.tokenizing import (
    ConversationTokenizer,
    TokenizedSample,
    TokenizeOptions,
    TokenizerSource,
    load_tokenizer,
)

DATA = Path(__file__).parent / "data"
LONG = 2000


@dataclass(frozen=True, slots=True)
class Family:
    """Special tokens of a family; each is one token of its tokenizer."""

    bos: str | None
    eos: str
    others: tuple[str, ...]


CHATML = ("<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILIES = {
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")),
    "qwen25": Family(None, "<|im_end|>", CHATML),
    "qwen3_thinking": Family(None, "<|im_end|>", (*CHATML, "<think>", "</think>")),
    "qwen3_nonthinking": Family(None, "<|im_end|>", CHATML),
    "gemma3": Family("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "gemma4": Family(
        "<bos>",
        "<turn|>",
        (
            "<|turn>",
            "<|think|>",
            "<|channel>",
            "<channel|>",
            "<|tool>",
            "<tool|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
        ),
    ),
    "mistral": Family(
        "<s>",
        "</s>",
        (
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
        ),
    ),
    "phi": Family(None, "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")),
    "deepseek": Family(
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
            "<｜tool▁sep｜>",
            *tuple(
                f"<｜tool▁{part}▁{end}｜>"
                for part in ("calls", "call", "outputs", "output")
                for end in ("begin", "end")
            ),
        ),
    ),
}


@cache
def tokenizer_of(family: str) -> Any:
    tokenizer = load_tokenizer(
        TokenizerSource(path=str(DATA / "golden" / "models" / "qwen3-tiny"), trust_remote_code=False)
    )
    tokens = FAMILIES[family]
    tokenizer.add_special_tokens({"eos_token": tokens.eos} | ({"bos_token": tokens.bos} if tokens.bos else {}))
    tokenizer.add_tokens(list(tokens.others), special_tokens=True)
    return tokenizer


@cache
def template_of(family: str) -> str:
    return resolve_chat_template(str(DATA / "templates" / f"{family}.jinja"), tokenizer_of(family))


def sample(
    family: str, conversation: str, *, reasoning: bool = False, prompt: bool = False, seq_length: int = LONG
) -> TokenizedSample:
    options = TokenizeOptions(seq_length=seq_length, mask_reasoning_content=reasoning, mask_generation_prompt=prompt)
    messages = CONVERSATIONS[conversation]
    tools = [{"name": "add"}] if any("tool_calls" in message for message in messages) else None
    make = ConversationTokenizer(tokenizer_of(family), template_of(family), options)
    return make({"messages": messages, "tools": tools})


def runs(family: str, found: TokenizedSample) -> list[tuple[int, str]]:
    """Return the text of each run of equal bits, with the bit."""
    pairs = zip(found.loss_mask, found.input_ids, strict=True)
    return [
        (bit, tokenizer_of(family).decode([token for _, token in run]))
        for bit, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def supervised(family: str, found: TokenizedSample) -> list[str]:
    return [text for bit, text in runs(family, found) if bit]


def shown(family: str, found: TokenizedSample) -> str:
    """Return the whole text with what is supervised in ⟦ ⟧."""
    return "".join(f"⟦{text}⟧" if bit else text for bit, text in runs(family, found))


# --- conversations ------------------------------------------------------------------------------------------------


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, thought: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({} if thought is None else {"reasoning_content": thought})


def call(*names: str, content: str = "", thought: str | None = None) -> dict[str, Any]:
    calls = [{"id": "c1", "function": {"name": name, "arguments": {"n": 1}}} for name in names]
    return answer(content, thought) | {"tool_calls": calls}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": "c1"}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "single": [user("Hi"), answer("ok")],
    "two": [user("Hi"), answer("ok"), user("More"), answer("done")],
    "system": [system("Be brief."), user("Hi"), answer("ok"), user("More"), answer("done")],
    "tool": [user("Sum"), call("add"), tool("18"), answer("It is 18.")],
    "two tools": [user("Sum"), call("add", "mul", content="Wait."), tool("18"), tool("19"), answer("Both.")],
    "tool, then question": [user("Sum"), call("add"), tool("18"), answer("It is 18."), user("More"), answer("done")],
    "open tool": [user("Sum"), call("add")],
    "empty": [user("Hi"), answer(""), user("More"), answer("done")],
    "empty last": [user("Hi"), answer("")],
    "assistant first": [answer("Welcome"), user("Hi"), answer("ok")],
    "system, assistant first": [system("Be brief."), answer("Welcome"), user("Hi"), answer("ok")],
    "call first": [call("add"), tool("18"), answer("It is 18.")],
    "several": [user("Hi"), answer("one"), answer("two")],
    "several, then question": [user("Hi"), answer("one"), answer("two"), user("More"), answer("done")],
    "user last": [user("Hi"), answer("ok"), user("More"), answer("done"), user("Bye")],
    "thoughts": [user("Hi"), answer("ok", "why"), user("More"), answer("done", "so")],
    "thoughts inside": [
        user("Hi"),
        answer("<think>\nwhy\n</think>\n\nok"),
        user("More"),
        answer("<think>\nso\n</think>\n\ndone"),
    ],
    "tool thoughts": [user("Sum"), call("add", thought="why"), tool("18"), answer("It is 18.", "so")],
    "tool thoughts with text, then question": [
        user("Sum"),
        call("add", content="Wait.", thought="why"),
        tool("18"),
        answer("It is 18.", "so"),
        user("More"),
        answer("done", "then"),
    ],
    "tool thoughts, then question": [
        user("Sum"),
        call("add", thought="why"),
        tool("18"),
        answer("It is 18.", "so"),
        user("More"),
        answer("done", "then"),
    ],
    "long": [user("Hi"), answer("It is a bit long."), user("More"), answer("done")],
}

# --- what is supervised -------------------------------------------------------------------------------------------

LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
QWEN = "<|im_start|>assistant\n"
NO_THOUGHT = "<think>\n\n</think>\n\n"
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
QWEN_MUL = '<tool_call>\n{"name": "mul", "arguments": {"n": 1}}\n</tool_call>'
GEMMA3 = "<start_of_turn>model\n"
GEMMA4 = "<|turn>model\n"
GEMMA4_CALL = '<|tool_call>call:add{"n": 1}<tool_call|>'
MISTRAL_CALL = '{"name": "add", "arguments": {"n": 1}, "id": "c1"}'
MISTRAL_MUL = '{"name": "mul", "arguments": {"n": 1}, "id": "c1"}'
PHI = "<|assistant|>\n"
SEEK = "<｜Assistant｜>"
SEEK_END = "<｜end▁of▁sentence｜>"
SEEK_ADD = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
SEEK_MUL = '<｜tool▁call▁begin｜>mul<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
SEEK_CALL = f"<｜tool▁calls▁begin｜>{SEEK_ADD}<｜tool▁calls▁end｜>{SEEK_END}"

# Qwen 2.5, and Qwen 3 without thinking, write answers alike.
QWEN_PLAIN = {
    "single": [f"{QWEN}ok<|im_end|>\n"],
    "two": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "system": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "tool": [f"{QWEN}{QWEN_CALL}<|im_end|>\n", f"{QWEN}It is 18.<|im_end|>\n"],
    "two tools": [f"{QWEN}Wait.\n{QWEN_CALL}\n{QWEN_MUL}<|im_end|>\n", f"{QWEN}Both.<|im_end|>\n"],
    "tool, then question": [
        f"{QWEN}{QWEN_CALL}<|im_end|>\n",
        f"{QWEN}It is 18.<|im_end|>\n",
        f"{QWEN}done<|im_end|>\n",
    ],
    "open tool": [f"{QWEN}{QWEN_CALL}<|im_end|>\n"],
    "empty": [f"{QWEN}<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "empty last": [f"{QWEN}<|im_end|>\n"],
    "assistant first": [f"{QWEN}Welcome<|im_end|>\n", f"{QWEN}ok<|im_end|>\n"],
    "system, assistant first": [f"{QWEN}Welcome<|im_end|>\n", f"{QWEN}ok<|im_end|>\n"],
    "call first": [f"{QWEN}{QWEN_CALL}<|im_end|>\n", f"{QWEN}It is 18.<|im_end|>\n"],
    "several": [f"{QWEN}one<|im_end|>\n{QWEN}two<|im_end|>\n"],
    "several, then question": [f"{QWEN}one<|im_end|>\n{QWEN}two<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "user last": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "thoughts": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
    "tool thoughts, then question": [
        f"{QWEN}{QWEN_CALL}<|im_end|>\n",
        f"{QWEN}It is 18.<|im_end|>\n",
        f"{QWEN}done<|im_end|>\n",
    ],
}

EXPECTED: dict[str, dict[str, list[str]]] = {
    "llama3": {
        "single": [f"{LLAMA}ok<|eot_id|>"],
        "two": [f"{LLAMA}ok<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
        "system": [f"{LLAMA}ok<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
        "tool": [f'{LLAMA}{{"name": "add", "parameters": {{"n": 1}}}}<|eot_id|>', f"{LLAMA}It is 18.<|eot_id|>"],
        "tool, then question": [
            f'{LLAMA}{{"name": "add", "parameters": {{"n": 1}}}}<|eot_id|>',
            f"{LLAMA}It is 18.<|eot_id|>",
            f"{LLAMA}done<|eot_id|>",
        ],
        "open tool": [f'{LLAMA}{{"name": "add", "parameters": {{"n": 1}}}}<|eot_id|>'],
        "empty": [f"{LLAMA}<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
        "empty last": [f"{LLAMA}<|eot_id|>"],
        "assistant first": [f"{LLAMA}Welcome<|eot_id|>", f"{LLAMA}ok<|eot_id|>"],
        "system, assistant first": [f"{LLAMA}Welcome<|eot_id|>", f"{LLAMA}ok<|eot_id|>"],
        "call first": [f'{LLAMA}{{"name": "add", "parameters": {{"n": 1}}}}<|eot_id|>', f"{LLAMA}It is 18.<|eot_id|>"],
        "several": [f"{LLAMA}one<|eot_id|>{LLAMA}two<|eot_id|>"],
        "several, then question": [f"{LLAMA}one<|eot_id|>{LLAMA}two<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
        "user last": [f"{LLAMA}ok<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
        "thoughts": [f"{LLAMA}ok<|eot_id|>", f"{LLAMA}done<|eot_id|>"],
    },
    "qwen25": QWEN_PLAIN,
    "qwen3_nonthinking": QWEN_PLAIN,
    "qwen3_thinking": {
        "single": [f"{QWEN}{NO_THOUGHT}ok<|im_end|>\n"],
        "two": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}{NO_THOUGHT}done<|im_end|>\n"],
        "system": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}{NO_THOUGHT}done<|im_end|>\n"],
        # Before the last message a turn without thought has no block.
        "tool": [f"{QWEN}{QWEN_CALL}<|im_end|>\n", f"{QWEN}{NO_THOUGHT}It is 18.<|im_end|>\n"],
        "two tools": [
            f"{QWEN}Wait.\n{QWEN_CALL}\n{QWEN_MUL}<|im_end|>\n",
            f"{QWEN}{NO_THOUGHT}Both.<|im_end|>\n",
        ],
        "tool, then question": [
            f"{QWEN}{QWEN_CALL}<|im_end|>\n",
            f"{QWEN}It is 18.<|im_end|>\n",
            f"{QWEN}{NO_THOUGHT}done<|im_end|>\n",
        ],
        "open tool": [f"{QWEN}{NO_THOUGHT}{QWEN_CALL}<|im_end|>\n"],
        "empty": [f"{QWEN}<|im_end|>\n", f"{QWEN}{NO_THOUGHT}done<|im_end|>\n"],
        "empty last": [f"{QWEN}{NO_THOUGHT}<|im_end|>\n"],
        "assistant first": [f"{QWEN}Welcome<|im_end|>\n", f"{QWEN}{NO_THOUGHT}ok<|im_end|>\n"],
        "system, assistant first": [f"{QWEN}Welcome<|im_end|>\n", f"{QWEN}{NO_THOUGHT}ok<|im_end|>\n"],
        # Without any question no thought is written.
        "call first": [f"{QWEN}{QWEN_CALL}<|im_end|>\n", f"{QWEN}It is 18.<|im_end|>\n"],
        "several": [f"{QWEN}one<|im_end|>\n{QWEN}{NO_THOUGHT}two<|im_end|>\n"],
        "several, then question": [
            f"{QWEN}one<|im_end|>\n{QWEN}two<|im_end|>\n",
            f"{QWEN}{NO_THOUGHT}done<|im_end|>\n",
        ],
        "user last": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}done<|im_end|>\n"],
        "thoughts": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}<think>\nso\n</think>\n\ndone<|im_end|>\n"],
        "thoughts inside": [f"{QWEN}ok<|im_end|>\n", f"{QWEN}<think>\nso\n</think>\n\ndone<|im_end|>\n"],
        "tool thoughts": [
            f"{QWEN}<think>\nwhy\n</think>\n\n{QWEN_CALL}<|im_end|>\n",
            f"{QWEN}<think>\nso\n</think>\n\nIt is 18.<|im_end|>\n",
        ],
        "tool thoughts with text, then question": [
            f"{QWEN}Wait.\n{QWEN_CALL}<|im_end|>\n",
            f"{QWEN}It is 18.<|im_end|>\n",
            f"{QWEN}<think>\nthen\n</think>\n\ndone<|im_end|>\n",
        ],
        "tool thoughts, then question": [
            f"{QWEN}{QWEN_CALL}<|im_end|>\n",
            f"{QWEN}It is 18.<|im_end|>\n",
            f"{QWEN}<think>\nthen\n</think>\n\ndone<|im_end|>\n",
        ],
    },
    "gemma3": {
        "single": [f"{GEMMA3}ok<end_of_turn>\n"],
        "two": [f"{GEMMA3}ok<end_of_turn>\n", f"{GEMMA3}done<end_of_turn>\n"],
        "system": [f"{GEMMA3}ok<end_of_turn>\n", f"{GEMMA3}done<end_of_turn>\n"],
        "empty": [f"{GEMMA3}<end_of_turn>\n", f"{GEMMA3}done<end_of_turn>\n"],
        "empty last": [f"{GEMMA3}<end_of_turn>\n"],
        "user last": [f"{GEMMA3}ok<end_of_turn>\n", f"{GEMMA3}done<end_of_turn>\n"],
        "thoughts": [f"{GEMMA3}ok<end_of_turn>\n", f"{GEMMA3}done<end_of_turn>\n"],
    },
    "gemma4": {
        "single": [f"{GEMMA4}ok<turn|>\n"],
        "two": [f"{GEMMA4}ok<turn|>\n", f"{GEMMA4}done<turn|>\n"],
        "system": [f"{GEMMA4}ok<turn|>\n", f"{GEMMA4}done<turn|>\n"],
        # The model opens the tool's answer and speaks on after it, without a header.
        "tool": [f"{GEMMA4}{GEMMA4_CALL}<|tool_response>", "It is 18.<turn|>\n"],
        "two tools": [
            f'{GEMMA4}Wait.{GEMMA4_CALL}<|tool_call>call:mul{{"n": 1}}<tool_call|><|tool_response>',
            "Both.<turn|>\n",
        ],
        "tool, then question": [
            f"{GEMMA4}{GEMMA4_CALL}<|tool_response>",
            "It is 18.<turn|>\n",
            f"{GEMMA4}done<turn|>\n",
        ],
        "open tool": [f"{GEMMA4}{GEMMA4_CALL}<|tool_response>"],
        "empty": [f"{GEMMA4}<turn|>\n", f"{GEMMA4}done<turn|>\n"],
        "empty last": [f"{GEMMA4}<turn|>\n"],
        "assistant first": [f"{GEMMA4}Welcome<turn|>\n", f"{GEMMA4}ok<turn|>\n"],
        "system, assistant first": [f"{GEMMA4}Welcome<turn|>\n", f"{GEMMA4}ok<turn|>\n"],
        "call first": [f"{GEMMA4}{GEMMA4_CALL}<|tool_response>", "It is 18.<turn|>\n"],
        "several": [f"{GEMMA4}one<turn|>\n{GEMMA4}two<turn|>\n"],
        "several, then question": [f"{GEMMA4}one<turn|>\n{GEMMA4}two<turn|>\n", f"{GEMMA4}done<turn|>\n"],
        "user last": [f"{GEMMA4}ok<turn|>\n", f"{GEMMA4}done<turn|>\n"],
        "thoughts": [f"{GEMMA4}ok<turn|>\n", f"{GEMMA4}<|channel>thought\nso\n<channel|>done<turn|>\n"],
        "tool thoughts": [
            f"{GEMMA4}<|channel>thought\nwhy\n<channel|>{GEMMA4_CALL}<|tool_response>",
            "<|channel>thought\nso\n<channel|>It is 18.<turn|>\n",
        ],
        "tool thoughts, then question": [
            f"{GEMMA4}{GEMMA4_CALL}<|tool_response>",
            "It is 18.<turn|>\n",
            f"{GEMMA4}<|channel>thought\nthen\n<channel|>done<turn|>\n",
        ],
    },
    "mistral": {
        "single": [" ok</s>"],
        "two": [" ok</s>", " done</s>"],
        "system": [" ok</s>", " done</s>"],
        "tool": [f"[TOOL_CALLS] [{MISTRAL_CALL}]</s>", " It is 18.</s>"],
        "two tools": [f"[TOOL_CALLS] [{MISTRAL_CALL}, {MISTRAL_MUL}]</s>", " Both.</s>"],
        # The list of tools moves to the last question: no render of fewer turns is a prefix.
        "tool, then question": [f"[TOOL_CALLS] [{MISTRAL_CALL}]</s>", " It is 18.</s>", " done</s>"],
        "open tool": [f"[TOOL_CALLS] [{MISTRAL_CALL}]</s>"],
        "empty": [" </s>", " done</s>"],
        "empty last": [" </s>"],
        "user last": [" ok</s>", " done</s>"],
        "thoughts": [" ok</s>", " done</s>"],
    },
    "phi": {
        # Whatever ends here ends with the end-of-text token; it is the assistant's if the assistant speaks last.
        "single": [f"{PHI}ok<|end|>\n<|endoftext|>"],
        "two": [f"{PHI}ok<|end|>\n", f"{PHI}done<|end|>\n<|endoftext|>"],
        "system": [f"{PHI}ok<|end|>\n", f"{PHI}done<|end|>\n<|endoftext|>"],
        # Calls are not written.
        "tool": [f"{PHI}<|end|>\n", f"{PHI}It is 18.<|end|>\n<|endoftext|>"],
        "empty": [f"{PHI}<|end|>\n", f"{PHI}done<|end|>\n<|endoftext|>"],
        "empty last": [f"{PHI}<|end|>\n<|endoftext|>"],
        "assistant first": [f"{PHI}Welcome<|end|>\n", f"{PHI}ok<|end|>\n<|endoftext|>"],
        "system, assistant first": [f"{PHI}Welcome<|end|>\n", f"{PHI}ok<|end|>\n<|endoftext|>"],
        "several": [f"{PHI}one<|end|>\n{PHI}two<|end|>\n<|endoftext|>"],
        "several, then question": [f"{PHI}one<|end|>\n{PHI}two<|end|>\n", f"{PHI}done<|end|>\n<|endoftext|>"],
        "user last": [f"{PHI}ok<|end|>\n", f"{PHI}done<|end|>\n"],
        "thoughts": [f"{PHI}ok<|end|>\n", f"{PHI}done<|end|>\n<|endoftext|>"],
    },
    "deepseek": {
        "single": [f"{SEEK}ok{SEEK_END}"],
        "two": [f"{SEEK}ok{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "system": [f"{SEEK}ok{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        # After a tool's answer the assistant has no header.
        "tool": [f"{SEEK}{SEEK_CALL}", f"It is 18.{SEEK_END}"],
        "two tools": [
            f"{SEEK}Wait.<｜tool▁calls▁begin｜>{SEEK_ADD}{SEEK_MUL}<｜tool▁calls▁end｜>{SEEK_END}",
            f"Both.{SEEK_END}",
        ],
        "tool, then question": [f"{SEEK}{SEEK_CALL}", f"It is 18.{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "open tool": [f"{SEEK}{SEEK_CALL}"],
        "empty": [f"{SEEK}{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "empty last": [f"{SEEK}{SEEK_END}"],
        "assistant first": [f"{SEEK}Welcome{SEEK_END}", f"{SEEK}ok{SEEK_END}"],
        "system, assistant first": [f"{SEEK}Welcome{SEEK_END}", f"{SEEK}ok{SEEK_END}"],
        "call first": [f"{SEEK}{SEEK_CALL}", f"It is 18.{SEEK_END}"],
        "several": [f"{SEEK}one{SEEK_END}{SEEK}two{SEEK_END}"],
        "several, then question": [f"{SEEK}one{SEEK_END}{SEEK}two{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "user last": [f"{SEEK}ok{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "thoughts": [f"{SEEK}ok{SEEK_END}", f"{SEEK}done{SEEK_END}"],
        "thoughts inside": [f"{SEEK}\n\nok{SEEK_END}", f"{SEEK}<think>\nso\n</think>\n\ndone{SEEK_END}"],
    },
}

CASES = [
    pytest.param(family, conversation, spans, id=f"{family}-{conversation}")
    for family, table in EXPECTED.items()
    for conversation, spans in table.items()
]


@pytest.mark.parametrize(("family", "conversation", "spans"), CASES)
def test_the_assistant_s_turns_are_supervised_and_nothing_else(
    family: str, conversation: str, spans: list[str]
) -> None:
    found = sample(family, conversation)
    assert supervised(family, found) == spans
    assert set(found.notes) <= {"span_by_difference"}
    assert not found.truncated


@pytest.mark.parametrize(
    ("family", "conversation", "expected"),
    [
        (
            "llama3",
            "tool",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
            'Knowledge ends: 2023\n\nAnswer with the JSON of a call.\n\n{"name": "add"}\n\n<|eot_id|>'
            "<|start_header_id|>user<|end_header_id|>\n\nSum<|eot_id|>"
            f'⟦{LLAMA}{{"name": "add", "parameters": {{"n": 1}}}}<|eot_id|>⟧'
            f'<|start_header_id|>ipython<|end_header_id|>\n\n"18"<|eot_id|>⟦{LLAMA}It is 18.<|eot_id|>⟧',
        ),
        (
            "qwen25",
            "two tools",
            "<|im_start|>system\nYou are a default assistant."
            '\n\n# Tools\n<tools>\n{"name": "add"}\n</tools><|im_end|>\n'
            f"<|im_start|>user\nSum<|im_end|>\n⟦{QWEN}Wait.\n{QWEN_CALL}\n{QWEN_MUL}<|im_end|>\n⟧"
            "<|im_start|>user\n<tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response><|im_end|>\n"
            f"⟦{QWEN}Both.<|im_end|>\n⟧",
        ),
        (
            "qwen25",
            "assistant first",
            f"<|im_start|>system\nYou are a default assistant.<|im_end|>\n⟦{QWEN}Welcome<|im_end|>\n⟧"
            f"<|im_start|>user\nHi<|im_end|>\n⟦{QWEN}ok<|im_end|>\n⟧",
        ),
        (
            "qwen3_thinking",
            "thoughts",
            f"<|im_start|>user\nHi<|im_end|>\n⟦{QWEN}ok<|im_end|>\n⟧<|im_start|>user\nMore<|im_end|>\n"
            f"⟦{QWEN}<think>\nso\n</think>\n\ndone<|im_end|>\n⟧",
        ),
        (
            "qwen3_nonthinking",
            "thoughts",
            f"<|im_start|>user\nHi<|im_end|>\n⟦{QWEN}ok<|im_end|>\n⟧<|im_start|>user\nMore<|im_end|>\n"
            f"⟦{QWEN}done<|im_end|>\n⟧",
        ),
        (
            "gemma3",
            "system",
            f"<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n⟦{GEMMA3}ok<end_of_turn>\n⟧"
            f"<start_of_turn>user\nMore<end_of_turn>\n⟦{GEMMA3}done<end_of_turn>\n⟧",
        ),
        (
            "gemma4",
            "tool thoughts",
            '<bos><|turn>system\n<|tool>{"name": "add"}<tool|><turn|>\n<|turn>user\nSum<turn|>\n'
            f"⟦{GEMMA4}<|channel>thought\nwhy\n<channel|>{GEMMA4_CALL}<|tool_response>⟧response:18<tool_response|>"
            "⟦<|channel>thought\nso\n<channel|>It is 18.<turn|>\n⟧",
        ),
        (
            "mistral",
            "system",
            "<s>[INST] Hi[/INST]⟦ ok</s>⟧[INST] Be brief.\n\nMore[/INST]⟦ done</s>⟧",
        ),
        (
            "phi",
            "user last",
            f"<|user|>\nHi<|end|>\n⟦{PHI}ok<|end|>\n⟧<|user|>\nMore<|end|>\n⟦{PHI}done<|end|>\n⟧"
            "<|user|>\nBye<|end|>\n<|endoftext|>",
        ),
        (
            "deepseek",
            "tool",
            f"<｜begin▁of▁sentence｜><｜User｜>Sum⟦{SEEK}{SEEK_CALL}⟧<｜tool▁outputs▁begin｜>"
            "<｜tool▁output▁begin｜>18<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
            f"⟦It is 18.{SEEK_END}⟧",
        ),
    ],
)
def test_whole_renders(family: str, conversation: str, expected: str) -> None:
    assert shown(family, sample(family, conversation)) == expected


REFUSED = [
    ("llama3", "two tools", "One tool call at a time is supported"),
    *(
        ("gemma3", conversation, "Turns must alternate: user, assistant, user, ...")
        for conversation in ("tool", "assistant first", "system, assistant first", "call first", "several")
    ),
    *(
        ("mistral", conversation, "After the optional system message, turns must alternate user/assistant")
        for conversation in ("assistant first", "system, assistant first", "call first", "several")
    ),
]


@pytest.mark.parametrize(("family", "conversation", "message"), REFUSED)
def test_what_a_template_refuses_is_refused_with_its_own_words(family: str, conversation: str, message: str) -> None:
    with pytest.raises(RowError) as caught:
        sample(family, conversation)
    assert caught.value.reason == "template_error"
    assert str(caught.value) == f"the chat template cannot render this row: TemplateError: {message}"


# --- the two options ----------------------------------------------------------------------------------------------

BOTH = {"reasoning": True, "prompt": True}
NO_REASONING = {"reasoning_not_found"}
NO_PROMPT = {"generation_prompt_not_found"}
DIFFERENCE = {"span_by_difference"}


@pytest.mark.parametrize(
    ("family", "conversation", "options", "spans", "notes"),
    [
        # Without the header that a generation prompt writes.
        ("llama3", "two", {"prompt": True}, ["ok<|eot_id|>", "done<|eot_id|>"], set()),
        ("llama3", "assistant first", {"prompt": True}, ["Welcome<|eot_id|>", "ok<|eot_id|>"], DIFFERENCE),
        ("llama3", "several", {"prompt": True}, ["one<|eot_id|>", "two<|eot_id|>"], set()),
        ("llama3", "empty", {"prompt": True}, ["<|eot_id|>", "done<|eot_id|>"], set()),
        (
            "llama3",
            "tool",
            {"prompt": True},
            ['{"name": "add", "parameters": {"n": 1}}<|eot_id|>', "It is 18.<|eot_id|>"],
            set(),
        ),
        ("qwen25", "tool", {"prompt": True}, [f"{QWEN_CALL}<|im_end|>\n", "It is 18.<|im_end|>\n"], set()),
        ("qwen25", "assistant first", {"prompt": True}, ["Welcome<|im_end|>\n", "ok<|im_end|>\n"], DIFFERENCE),
        ("qwen3_nonthinking", "two", {"prompt": True}, ["ok<|im_end|>\n", "done<|im_end|>\n"], set()),
        # The empty block is what the prompt writes with enable_thinking false; a thought is not.
        ("qwen3_thinking", "single", {"prompt": True}, ["ok<|im_end|>\n"], set()),
        ("qwen3_thinking", "two", {"prompt": True}, ["ok<|im_end|>\n", "done<|im_end|>\n"], DIFFERENCE),
        ("qwen3_thinking", "several", {"prompt": True}, ["one<|im_end|>\n", "two<|im_end|>\n"], DIFFERENCE),
        (
            "qwen3_thinking",
            "thoughts",
            {"prompt": True},
            ["ok<|im_end|>\n", "<think>\nso\n</think>\n\ndone<|im_end|>\n"],
            DIFFERENCE,
        ),
        ("gemma3", "system", {"prompt": True}, ["ok<end_of_turn>\n", "done<end_of_turn>\n"], set()),
        ("gemma4", "two", {"prompt": True}, ["ok<turn|>\n", "done<turn|>\n"], set()),
        # After a tool's answer Gemma 4 and DeepSeek have no generation prompt.
        (
            "gemma4",
            "tool",
            {"prompt": True},
            [f"{GEMMA4_CALL}<|tool_response>", "It is 18.<turn|>\n"],
            NO_PROMPT,
        ),
        ("mistral", "two", {"prompt": True}, [" ok</s>", " done</s>"], NO_PROMPT),
        pytest.param(*("phi", "two", {"prompt": True}, ["ok<|end|>\n", "done<|end|>\n<|endoftext|>"], set())),
        pytest.param(*("phi", "single", {"prompt": True}, ["ok<|end|>\n<|endoftext|>"], set())),
        # The prompt opens a thought that the first answer does not have: taken in full or not at all.
        (
            "deepseek",
            "thoughts inside",
            {"prompt": True},
            [f"{SEEK}\n\nok{SEEK_END}", f"so\n</think>\n\ndone{SEEK_END}"],
            DIFFERENCE | NO_PROMPT,
        ),
        # Without the reasoning; an earlier turn's, which the template drops, is not found.
        (
            "qwen3_thinking",
            "thoughts",
            {"reasoning": True},
            [f"{QWEN}ok<|im_end|>\n", f"{QWEN}<think>\n", "\n</think>\n\ndone<|im_end|>\n"],
            DIFFERENCE | NO_REASONING,
        ),
        # Not the last message: the block goes with its thought.
        (
            "qwen3_thinking",
            "tool thoughts",
            {"reasoning": True},
            [QWEN, f"{QWEN_CALL}<|im_end|>\n", f"{QWEN}<think>\n", "\n</think>\n\nIt is 18.<|im_end|>\n"],
            set(),
        ),
        (
            "qwen3_thinking",
            "tool thoughts",
            BOTH,
            [f"{QWEN_CALL}<|im_end|>\n", "<think>\n", "\n</think>\n\nIt is 18.<|im_end|>\n"],
            set(),
        ),
        ("gemma4", "thoughts", BOTH, ["ok<turn|>\n", "done<turn|>\n"], DIFFERENCE | NO_REASONING),
        (
            "gemma4",
            "tool thoughts",
            {"reasoning": True},
            [GEMMA4, f"{GEMMA4_CALL}<|tool_response>", "It is 18.<turn|>\n"],
            set(),
        ),
        *(
            (family, "thoughts", {"reasoning": True}, EXPECTED[family]["thoughts"], NO_REASONING)
            for family in ("llama3", "qwen25", "qwen3_nonthinking", "gemma3", "mistral", "phi", "deepseek")
        ),
    ],
)
def test_the_options_take_out_reasoning_and_generation_prompts(
    family: str, conversation: str, options: dict[str, bool], spans: list[str], notes: set[str]
) -> None:
    found = sample(family, conversation, **options)
    assert supervised(family, found) == spans
    assert set(found.notes) == notes


# --- cuts ---------------------------------------------------------------------------------------------------------

LLAMA_SYSTEM = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nKnowledge ends: 2023\n\n<|eot_id|>"
QWEN_SYSTEM = "<|im_start|>system\nYou are a default assistant.<|im_end|>\n"


@pytest.mark.parametrize(
    ("family", "before", "header"),
    [
        ("llama3", f"{LLAMA_SYSTEM}<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", LLAMA),
        ("qwen25", f"{QWEN_SYSTEM}<|im_start|>user\nHi<|im_end|>\n", QWEN),
        ("qwen3_thinking", "<|im_start|>user\nHi<|im_end|>\n", QWEN),
        ("qwen3_nonthinking", "<|im_start|>user\nHi<|im_end|>\n", QWEN),
        ("gemma3", "<bos><start_of_turn>user\nHi<end_of_turn>\n", GEMMA3),
        ("gemma4", "<bos><|turn>user\nHi<turn|>\n", GEMMA4),
        ("mistral", "<s>[INST] Hi[/INST]", " "),
        ("phi", "<|user|>\nHi<|end|>\n", PHI),
        ("deepseek", "<｜begin▁of▁sentence｜><｜User｜>Hi", SEEK),
    ],
)
def test_a_cut_answer_is_supervised_as_far_as_it_goes(family: str, before: str, header: str) -> None:
    def cut_after(text: str) -> TokenizedSample:
        length = len(tokenizer_of(family)(text, add_special_tokens=False)["input_ids"])
        found = sample(family, "long", seq_length=length)
        assert found.truncated
        assert tokenizer_of(family).decode(found.input_ids) == text
        return found

    assert supervised(family, cut_after(f"{before}{header}It is a")) == [f"{header}It is a"]
    assert supervised(family, cut_after(before)) == []


@pytest.mark.parametrize("options", [{}, BOTH], ids=["plain", "both-options"])
@pytest.mark.parametrize(
    ("family", "conversation"),
    [
        ("llama3", "tool"),
        ("qwen25", "assistant first"),
        ("qwen3_thinking", "thoughts"),
        ("qwen3_thinking", "tool thoughts"),
        ("qwen3_nonthinking", "two tools"),
        ("gemma3", "system"),
        ("gemma4", "tool thoughts, then question"),
        ("mistral", "system"),
        ("phi", "user last"),
        ("deepseek", "thoughts inside"),
    ],
)
def test_a_cut_at_any_token_leaves_the_mask_of_what_is_left(
    family: str, conversation: str, options: dict[str, bool]
) -> None:
    whole = sample(family, conversation, **options)
    for length in range(1, len(whole.input_ids), 3):
        cut = sample(family, conversation, seq_length=length, **options)
        assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[:length], whole.loss_mask[:length])


# --- the tables themselves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_have_no_markers_and_special_tokens_are_single(family: str) -> None:
    assert not has_generation_markers(template_of(family))
    tokens = FAMILIES[family]
    for text in (tokens.eos, *tokens.others, *filter(None, [tokens.bos])):
        ids = tokenizer_of(family)(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == 1
        assert tokenizer_of(family).decode(ids) == text


def test_every_template_is_tested() -> None:
    assert sorted(FAMILIES) == sorted(EXPECTED) == sorted(path.stem for path in (DATA / "templates").glob("*.jinja"))
