"""Which tokens of a rendered conversation are supervised.

Stands between chat_templates and tokenizing. Everything here works on the whole render, before it is cut to the
sample length, and returns half-open token ranges or a mask of it.

Supervised are, with a template that has `generation` markers, the tokens inside them. Without markers the whole of
each assistant turn, role header and closing included, found by the first of two rules that gives an answer:

1. Prefixes. The turn of message k begins where a render of the messages before k ends, and ends where a render up
   to and including k ends, provided that such a render is the head of the whole render. (Its last token may differ
   if it is the end-of-sequence token; the token is then not counted.)
2. Difference of renders, for an end of the turn that rule 1 does not give: the template rewrites earlier turns,
   refuses the shorter conversation, or the assistant speaks first. The message is rendered once more with another
   text in place of its content and reasoning; the tokens that differ are the answer.
   - It begins at the last generation prompt before these tokens and after the preceding turn, so that the header is
     included as under rule 1. If the assistant speaks first, what the template writes before any turn is left out.
     Failing both it begins at the first token that differs.
   - It ends after the tokens that differ and after as much as the whole render repeats of what follows the answer
     when it is the last message: the closing, and tool calls.
   - Where the template does not write the content, beside a call say, no token differs: the turn is what it adds to a
     render of the messages before it, if the whole render repeats that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dspark_cache.errors import RowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from dspark_cache.chat_templates import ChatRenderer
    from dspark_cache.conversations import Conversation

SPAN_BY_DIFFERENCE: Final = "span_by_difference"
ANSWER_NOT_FOUND: Final = "answer_not_found"
REASONING_NOT_FOUND: Final = "reasoning_not_found"
GENERATION_PROMPT_NOT_FOUND: Final = "generation_prompt_not_found"
MASK_OPTIONS_NOT_APPLIED: Final = "mask_options_not_applied_to_token_rows"

Span = tuple[int, int]
"""Token range of the whole render, end excluded."""

_PROBES: Final = "qzjxkvw"


@dataclass(slots=True, kw_only=True)
class MaskedRender:
    """The whole render of one conversation with its mask.

    Attributes:
        ids: Token ids [T].
        mask: 1 where a token is supervised [T].
        notes: Stable codes of what was unusual.
    """

    ids: list[int]
    mask: list[int]
    notes: set[str] = field(default_factory=set)


def masked_render(
    renderer: ChatRenderer, conversation: Conversation, *, window: int, without_reasoning: bool, without_prompt: bool
) -> MaskedRender:
    """Render a conversation and mask it.

    Args:
        renderer: Template and tokenizer.
        conversation: What to render.
        window: Tokens the sample is cut to. Where the head is kept, no render is compared beyond it.
        without_reasoning: Do not supervise the reasoning of assistant messages (`data.mask_reasoning_content`).
        without_prompt: Do not supervise what a generation prompt already gives (`data.mask_generation_prompt`).

    Raises:
        RowError: The template refuses the row; or it has no markers and the row no assistant message.
    """
    if renderer.has_markers:
        ids, mask = renderer.marked_ids(conversation.messages, conversation.tools)
        turns = _Turns(renderer, conversation, ids, window)
    else:
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise RowError("no_assistant", "expected an assistant message to supervise, found none")
        ids = renderer.ids(conversation.messages, conversation.tools)
        turns = _Turns(renderer, conversation, ids, window)
        mask = [0] * len(ids)
        _fill(mask, turns.spans(), 1)
    if without_reasoning:
        _fill(mask, turns.reasoning(), 0)
    if without_prompt:
        _fill(mask, turns.prompts(), 0)
    return MaskedRender(ids=ids, mask=mask, notes=turns.notes)


def cut_to_window(render: MaskedRender, window: int, *, left: bool, marked: bool) -> MaskedRender:
    """Cut a render to its first `window` tokens, or its last if `left`.

    As in the reference, a cut on the left that removes supervised tokens of a marked render leaves none of its
    answers supervised.
    """
    start = max(0, len(render.ids) - window) if left else 0
    ids, mask = render.ids[start : start + window], render.mask[start : start + window]
    if marked and 1 in render.mask[:start]:
        mask = [0] * len(mask)
    return MaskedRender(ids=ids, mask=mask, notes=render.notes)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the equal items at the start of two sequences."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


def difference(ids: Sequence[int], other: Sequence[int]) -> Span | None:
    """Return the range of `ids` that `other` does not share: what lies between common prefix and common suffix.

    The range is empty if `other` only inserts something; None if the two are equal.
    """
    if ids == other:
        return None
    start = common_prefix(ids, other)
    suffix = common_prefix(ids[start:][::-1], other[start:][::-1])
    return start, len(ids) - suffix


def _fill(mask: list[int], spans: Iterable[Span], value: int) -> None:
    for start, end in spans:
        mask[start:end] = [value] * (end - start)


def _rfind(ids: Sequence[int], block: Sequence[int], start: int, end: int) -> int | None:
    """Return where `block` last occurs within ids[start:end], None if it does not."""
    for position in range(end - len(block), start - 1, -1):
        if list(ids[position : position + len(block)]) == list(block):
            return position
    return None


def _with_probe(message: dict[str, Any], *, keep_reasoning: bool = False) -> dict[str, Any]:
    """Return an assistant message with another text, one that shares neither its first nor its last character."""
    texts = [message["content"].strip(), (message.get("reasoning_content") or "").strip()]
    ends = {text[position] for text in texts if text for position in (0, -1)}
    probe = next(letter for letter in _PROBES if letter not in ends)
    changed = {"content": probe} | ({"reasoning_content": probe} if texts[1] and not keep_reasoning else {})
    return message | changed


class _Turns:
    """Token ranges of the assistant turns of one conversation."""

    def __init__(self, renderer: ChatRenderer, conversation: Conversation, ids: list[int], window: int) -> None:
        self._renderer = renderer
        self._messages = conversation.messages
        self._tools = conversation.tools
        self._ids = ids
        self._window = len(ids) if renderer.truncates_left else window
        self._boundaries: dict[int, int | None] = {}
        self.notes: set[str] = set()

    def spans(self) -> Iterator[Span]:
        """Yield the range of each assistant turn that begins inside the window."""
        floor = 0
        for turn in self._answers():
            found = self._span(turn, floor)
            if found is None:
                self.notes.add(ANSWER_NOT_FOUND)
                continue
            if found[0] >= self._window:
                return
            floor = max(found)
            yield found[0], floor

    def reasoning(self) -> Iterator[Span]:
        """Yield the range of each assistant message's reasoning: what a render without it does not share."""
        for turn in self._answers():
            if not self._messages[turn].get("reasoning_content"):
                continue
            found = difference(self._ids, self._with(turn, self._messages[turn] | {"reasoning_content": ""}))
            if found is None:
                self.notes.add(REASONING_NOT_FOUND)
            else:
                yield found

    def prompts(self) -> Iterator[Span]:
        """Yield the longest generation prompt that each assistant turn begins with."""
        floor = 0
        for turn in self._answers():
            start = self._start(turn, floor)
            if start is None:
                continue
            if start >= self._window:
                return
            lengths = [len(p) for p in self._generation_prompts(turn) if self._ids[start : start + len(p)] == p]
            if lengths:
                yield start, start + max(lengths)
            else:
                self.notes.add(GENERATION_PROMPT_NOT_FOUND)
            floor = start

    def _span(self, turn: int, floor: int) -> Span | None:
        """Return the range of an assistant turn after `floor`, by either rule; None if neither finds it."""
        start, end = self._start(turn, floor), self._boundary(turn + 1)
        if start is not None and (end is not None or start >= self._window):
            return start, start if end is None else end
        if start is not None and self._difference_of(turn, keep_reasoning=True)[1] is not None:
            return start, self._end_by_difference(turn)
        return self._own_text(turn, floor if start is None else start)

    def _own_text(self, turn: int, floor: int) -> Span | None:
        """Find a turn whose content the template does not write (a call, say) by what it adds to those before it."""
        try:
            before = self._renderer.ids(self._messages[:turn], self._tools) if turn else []
            upto = self._renderer.ids(self._messages[: turn + 1], self._tools)
        except RowError:
            return None
        own = upto[len(before) :] if upto[: len(before)] == before else []
        if not turn:
            # Before the first message stands what the template writes anyway; its header is the generation prompt.
            places = [_rfind(own, prompt, 0, len(own)) for prompt in self._generation_prompts(0)]
            header = max((place for place in places if place is not None), default=len(own))
            own, floor = own[header:], header
        for start in range(floor, len(self._ids) - len(own) + 1 if own else 0):
            if self._ids[start : start + len(own)] == own:
                return start, start + len(own)
        return None

    def _answers(self) -> Iterator[int]:
        return (turn for turn, message in enumerate(self._messages) if message["role"] == "assistant")

    def _boundary(self, turn: int) -> int | None:
        """Return where message `turn` begins by the prefix rule, None if that rule does not hold."""
        if turn == len(self._messages):
            return len(self._ids)
        if turn not in self._boundaries:
            self._boundaries[turn] = self._prefix_length(turn) if turn else None
        return self._boundaries[turn]

    def _prefix_length(self, turn: int) -> int | None:
        try:
            head = self._renderer.ids(self._messages[:turn], self._tools)[: self._window]
        except RowError:
            return None
        if head == self._ids[: len(head)]:
            return len(head)
        if head[-1:] == [self._renderer.eos_token_id] and head[:-1] == self._ids[: len(head) - 1]:
            return len(head) - 1
        return None

    def _start(self, turn: int, floor: int) -> int | None:
        """Return where an assistant turn begins, by either rule; None if neither finds it."""
        start = self._boundary(turn)
        if start is not None:
            return start
        self.notes.add(SPAN_BY_DIFFERENCE)
        other, found = self._difference_of(turn)
        if found is None:
            return None
        # In `other` the probe follows the header: no token joins the header to the answer's first character.
        places = [_rfind(other, prompt, floor, found[0] + 1) for prompt in self._generation_prompts(turn)]
        if turn == 0:
            places.append(self._prefix_length(0))
        return min(max((place for place in places if place is not None), default=found[0]), found[0])

    def _end_by_difference(self, turn: int) -> int:
        """Return where a turn ends whose answer a probe changes; reasoning stays, as calls may follow at its heels."""
        self.notes.add(SPAN_BY_DIFFERENCE)
        _, found = self._difference_of(turn, keep_reasoning=True)
        end = found[1] if found is not None else 0
        return end + common_prefix(self._ids[end:], self._closing(turn))

    def _difference_of(self, turn: int, *, keep_reasoning: bool = False) -> tuple[list[int], Span | None]:
        """Return a render with another answer in `turn`, and the tokens of the whole render that it does not share."""
        try:
            other = self._with(turn, _with_probe(self._messages[turn], keep_reasoning=keep_reasoning))
        except RowError:
            return [], None
        return other, difference(self._ids, other)

    def _closing(self, turn: int) -> list[int]:
        """Return what the template writes after the answer of `turn` when it is the last message."""
        upto = self._messages[: turn + 1]
        try:
            ids = self._renderer.ids(upto, self._tools)
            other = self._renderer.ids([*upto[:-1], _with_probe(upto[-1], keep_reasoning=True)], self._tools)
        except RowError:
            return []
        found = difference(ids, other)
        return ids[found[1] :] if found is not None else []

    def _generation_prompts(self, turn: int) -> Iterator[list[int]]:
        """Yield each non-empty generation prompt that the template writes before message `turn`."""
        before = self._messages[: max(turn, 1)]
        for options in self._renderer.prompt_variants:
            try:
                head = self._renderer.ids(before, self._tools, **options)
                asked = self._renderer.ids(before, self._tools, add_generation_prompt=True, **options)
            except RowError:
                continue
            if asked[: len(head)] != head and head[-1:] == [self._renderer.eos_token_id]:
                head = head[:-1]  # a template may close a text only where it asks for no answer
            if len(asked) > len(head) and asked[: len(head)] == head:
                yield asked[len(head) :]

    def _with(self, turn: int, message: dict[str, Any]) -> list[int]:
        """Return the ids of the whole conversation with message `turn` replaced."""
        return self._renderer.ids([*self._messages[:turn], message, *self._messages[turn + 1 :]], self._tools)
