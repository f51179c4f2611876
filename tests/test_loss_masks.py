"""Which tokens are supervised, read as text: [supervised] stands in brackets."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dspark_cache.chat_templates import resolve_chat_template
from dspark_cache.errors import RowError
from dspark_cache.loss_masks import MaskedRender, common_prefix, cut_to_window, difference
from dspark_cache.tokenizing import (
    ConversationTokenizer,
    TokenizedSample,
    TokenizeOptions,
    TokenizerSource,
    load_tokenizer,
)

GOLDEN = Path(__file__).parent / "data" / "golden"
CHATML = "templates/chatml.jinja"
THINK = "templates/think.jinja"
HEADER = "<|im_start|>assistant\n"
EMPTY_THINK = "<think>\n\n</think>\n\n"

TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PLAIN = "{% for m in messages %}" + TURN + "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


@cache
def golden_tokenizer(model: str) -> Any:
    return load_tokenizer(TokenizerSource(path=str(GOLDEN / "models" / model), trust_remote_code=False))


def sample(
    template: str,
    *messages: dict[str, Any],
    model: str = "qwen3-tiny",
    reasoning: bool = False,
    prompt: bool = False,
    seq_length: int = 500,
) -> TokenizedSample:
    tokenizer = golden_tokenizer(model)
    if template.startswith("templates/"):
        template = resolve_chat_template(str(GOLDEN / template), tokenizer)
    options = TokenizeOptions(seq_length=seq_length, mask_reasoning_content=reasoning, mask_generation_prompt=prompt)
    return ConversationTokenizer(tokenizer, template, options)({"messages": list(messages)})


def shown(found: TokenizedSample, model: str = "qwen3-tiny") -> str:
    tokenizer, text, inside = golden_tokenizer(model), "", 0
    for token, supervised in zip(found.input_ids, found.loss_mask, strict=True):
        text += "[" * (supervised > inside) + "]" * (supervised < inside) + tokenizer.decode([token])
        inside = supervised
    return text + "]" * inside


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, reasoning: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({} if reasoning is None else {"reasoning_content": reasoning})


HI = "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "reasoning", "options", "expected"),
    [
        (CHATML, None, {}, "[<|im_start|>assistant\nok<|im_end|>\n]"),
        ("templates/chatml_gen.jinja", None, {}, "<|im_start|>assistant\n[ok<|im_end|>]\n"),
        (CHATML, None, {"prompt": True}, "<|im_start|>assistant\n[ok<|im_end|>\n]"),
        (THINK, None, {}, f"[{HEADER}{EMPTY_THINK}ok<|im_end|>\n]"),
        (THINK, None, {"prompt": True}, f"{HEADER}{EMPTY_THINK}[ok<|im_end|>\n]"),
        (THINK, "sum up", {"reasoning": True}, f"[{HEADER}<think>\n]sum up[\n</think>\n\nok<|im_end|>\n]"),
        (THINK, "sum up", {"prompt": True}, f"{HEADER}[<think>\nsum up\n</think>\n\nok<|im_end|>\n]"),
        (
            THINK,
            "sum up",
            {"prompt": True, "reasoning": True},
            f"{HEADER}[<think>\n]sum up[\n</think>\n\nok<|im_end|>\n]",
        ),
        (CHATML, "sum up", {"reasoning": True}, f"[{HEADER}]<think>\nsum up\n</think>\n\n[ok<|im_end|>\n]"),
    ],
)
def test_masks_checked_by_hand(template: str, reasoning: str | None, options: dict[str, bool], expected: str) -> None:
    found = sample(template, user("Hi"), answer("ok", reasoning), **options)
    assert shown(found) == HI + expected
    assert found.notes == ()


def test_mask_bits_checked_by_hand() -> None:
    assert "".join(map(str, sample(CHATML, user("Hi"), answer("ok")).loss_mask)) == "0000000" + "1111111"
    marked = sample("templates/chatml_gen.jinja", user("Hi"), answer("ok"))
    assert "".join(map(str, marked.loss_mask)) == "0000000" + "0001110"


def test_markers_without_spaces_are_used() -> None:
    template = (
        "{%for m in messages%}" + "<|im_start|>{{m.role}}\n{%-generation-%}{{m.content}}{%-endgeneration-%}{%endfor%}"
    )
    assert shown(sample(template, answer("ok"))) == "<|im_start|>assistant[ok]"


def test_a_template_that_rewrites_earlier_turns_is_masked_like_one_that_does_not() -> None:
    found = sample(THINK, user("a"), answer("b", "r1"), user("c"), answer("d", "r2"))
    assert shown(found) == (
        "<|im_start|>user\na<|im_end|>\n[<|im_start|>assistant\nb<|im_end|>\n]<|im_start|>user\nc<|im_end|>\n"
        "[<|im_start|>assistant\n<think>\nr2\n</think>\n\nd<|im_end|>\n]"
    )
    assert found.notes == ("span_by_difference",)


def test_both_options_work_where_the_difference_of_renders_is_used() -> None:
    turns = [user("a"), answer("b", "r1"), user("c"), answer("d", "r2")]
    found = sample(THINK, *turns, prompt=True, reasoning=True)
    assert shown(found) == (
        f"<|im_start|>user\na<|im_end|>\n{HEADER}[b<|im_end|>\n]<|im_start|>user\nc<|im_end|>\n"
        f"{HEADER}[<think>\n]r2[\n</think>\n\nd<|im_end|>\n]"
    )
    assert found.notes == ("reasoning_not_found", "span_by_difference")


def test_header_and_closing_are_found_when_neither_end_has_a_prefix() -> None:
    tool = {"role": "tool", "content": "18", "tool_call_id": "c"}
    found = sample(THINK, user("a"), answer("", "r1"), tool, answer("m", "r2"), user("c"), answer("d", "r3"))
    assert shown(found) == (
        "<|im_start|>user\na<|im_end|>\n[<|im_start|>assistant\n<|im_end|>\n]<|im_start|>tool\n18<|im_end|>\n"
        "[<|im_start|>assistant\nm<|im_end|>\n]<|im_start|>user\nc<|im_end|>\n"
        "[<|im_start|>assistant\n<think>\nr3\n</think>\n\nd<|im_end|>\n]"
    )


@pytest.mark.parametrize("text", ["\n\nlead", "q", "z", "trail\n\n", "qzj", "<|im_end|>\n<|im_start|>assistant\n", ""])
def test_the_difference_gives_the_whole_turn_whatever_the_answer(text: str) -> None:
    found = sample(THINK, user("a"), answer(text), user("c"), answer("d"))
    assert shown(found) == (
        f"<|im_start|>user\na<|im_end|>\n[<|im_start|>assistant\n{text}<|im_end|>\n]<|im_start|>user\nc<|im_end|>\n"
        f"[<|im_start|>assistant\n{EMPTY_THINK}d<|im_end|>\n]"
    )


@pytest.mark.parametrize(
    ("template", "before"),
    [
        (CHATML, ""),
        (PLAIN, ""),
        (PLAIN + PROMPT, ""),
        ("{{ '<|endoftext|>' }}" + PLAIN, "<|endoftext|>"),
        ("{% if messages %}{{ '<|endoftext|>' }}{% endif %}" + PLAIN + PROMPT, "<|endoftext|>"),
        # No render of an empty conversation is possible here.
        ("{% if messages[0].role != 'system' %}Be brief.{% endif %}" + PLAIN + PROMPT, "Be brief."),
    ],
)
def test_an_assistant_that_speaks_first_is_supervised_from_its_header_on(template: str, before: str) -> None:
    found = sample(template, answer("hello"), user("Hi"), answer("ok"))
    assert shown(found) == (
        f"{before}[<|im_start|>assistant\nhello<|im_end|>\n]{HI}[<|im_start|>assistant\nok<|im_end|>\n]"
    )
    assert found.notes == ("span_by_difference",)


def test_a_template_that_refuses_shorter_conversations_supervises_answers_without_headers() -> None:
    refuses = "{% if messages[-1].role != 'assistant' %}{{ raise_exception('answer first') }}{% endif %}" + PLAIN
    found = sample(refuses, user("Hi"), answer("ok"), user("Hi"), answer("no"))
    assert shown(found) == f"{HI}{HEADER}[ok<|im_end|>\n]{HI}{HEADER}[no<|im_end|>\n]"


def test_strict_alternation_does_not_hinder_the_difference() -> None:
    strict = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
        "{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
    )
    found = sample(strict, user("a"), answer("b", "r1"), user("c"), answer("d", "r2"))
    assert shown(found) == (
        "<|im_start|>user\na<|im_end|>\n[<|im_start|>assistant\nb<|im_end|>\n]<|im_start|>user\nc<|im_end|>\n"
        "[<|im_start|>assistant\n<think>r2</think>d<|im_end|>\n]"
    )


def test_a_closing_eos_of_a_shorter_render_is_not_taken_for_the_next_turn() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '\n' }}{% endfor %}{{ eos_token }}"
    )
    found = sample(template, user("Hi"), answer("a"), user("Hi"), answer("b"))
    turn = "<|im_start|>user\nHi\n[<|im_start|>assistant\n"
    assert shown(found) == f"{turn}a\n]{turn}b\n<|im_end|>]"
    assert found.notes == ()


def test_an_answer_that_the_template_drops_is_noted() -> None:
    template = "{% for m in messages if m.role == 'user' %}" + TURN + "{% endfor %}"
    found = sample(template, answer("b"), user("Hi"))
    assert shown(found) == HI
    assert found.notes == ("answer_not_found", "span_by_difference")


def test_an_answer_whose_replacement_is_refused_is_noted() -> None:
    picky = "{% if messages[0].content != 'b' %}{{ raise_exception('b first') }}{% endif %}" + PLAIN
    found = sample(picky, answer("b"), user("Hi"), answer("ok"))
    assert shown(found) == f"{HEADER}b<|im_end|>\n{HI}[{HEADER}ok<|im_end|>\n]"
    assert found.notes == ("answer_not_found", "span_by_difference")


def test_options_that_find_nothing_are_noted() -> None:
    found = sample(PLAIN, user("Hi"), answer("ok", "r"), reasoning=True, prompt=True)
    assert shown(found) == f"{HI}[{HEADER}ok<|im_end|>\n]"
    assert found.notes == ("generation_prompt_not_found", "reasoning_not_found")


def test_a_generation_prompt_is_removed_in_full_or_not_at_all() -> None:
    longer = PLAIN + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nSure' }}{% endif %}"
    assert shown(sample(longer, user("Hi"), answer("ok"), prompt=True)) == f"{HI}[{HEADER}ok<|im_end|>\n]"
    assert shown(sample(longer, user("Hi"), answer("Sure"), prompt=True)) == f"{HI}{HEADER}Sure[<|im_end|>\n]"


def test_without_markers_a_row_without_assistant_is_refused_and_with_them_it_is_unsupervised() -> None:
    with pytest.raises(RowError, match="expected an assistant message to supervise, found none") as caught:
        sample(CHATML, user("Hi"))
    assert caught.value.reason == "no_assistant"
    assert set(sample("templates/chatml_gen.jinja", user("Hi")).loss_mask) == {0}


def test_a_cut_on_the_left_keeps_the_mask_of_what_is_left() -> None:
    turns = [user("Hi"), answer("ok")]
    whole = sample(PLAIN, *turns, model="llama-leftpad-tiny")
    for length in range(1, len(whole.input_ids) + 1):
        cut = sample(PLAIN, *turns, model="llama-leftpad-tiny", seq_length=length)
        assert cut.input_ids == whole.input_ids[-length:]
        assert cut.loss_mask == whole.loss_mask[-length:]
        assert cut.truncated is (length < len(whole.input_ids))


@pytest.mark.parametrize(
    ("left", "marked", "ids", "mask"),
    [
        (False, False, [1, 2, 3], [1, 0, 0]),
        (False, True, [1, 2, 3], [1, 0, 0]),
        (True, False, [3, 4, 5], [0, 1, 1]),
        # As in the reference: once a marked answer begins before the window, none is supervised.
        (True, True, [3, 4, 5], [0, 0, 0]),
    ],
)
def test_cut_to_window(left: bool, marked: bool, ids: list[int], mask: list[int]) -> None:
    whole = MaskedRender(ids=[1, 2, 3, 4, 5], mask=[1, 0, 0, 1, 1])
    cut = cut_to_window(whole, 3, left=left, marked=marked)
    assert (cut.ids, cut.mask) == (ids, mask)


@pytest.mark.parametrize(
    ("ids", "other", "found"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], (1, 2)),
        ([1, 2, 3], [1, 3], (1, 2)),
        ([1, 3], [1, 2, 3], (1, 1)),
        ([1, 1, 1], [1, 1], (2, 3)),  # the prefix is taken first
        ([], [1], (0, 0)),
    ],
)
def test_difference(ids: list[int], other: list[int], found: tuple[int, int] | None) -> None:
    assert difference(ids, other) == found


def test_common_prefix() -> None:
    assert [common_prefix(*pair) for pair in (([], [1]), ([1], [1, 2]), ([1, 2], [1, 3]))] == [0, 1, 1]
