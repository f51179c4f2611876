"""The text of a sample, told apart by its loss mask: what is shown to a person, not what anything is computed from.

Right after `errors` in the flow: a tokenizer is handed in, nothing is imported to make one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Protocol

from dspark_cache.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_ID = (1 << 31) - 1


class Decoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = ..., **options: Any) -> Any:
        """Return the text of ids."""

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Return the token of one id, None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a sample.

    Attributes:
        text: Its text.
        supervised: Whether its tokens are.
    """

    text: str
    supervised: bool


def text_spans(tokenizer: Decoder, input_ids: Sequence[int], loss_mask: Sequence[int]) -> list[Span]:
    """Return the text of a sample, one span for each longest run of tokens with equal mask.

    Special tokens are part of the text. Joined, the spans are the text of all ids. Where the bytes of one character
    are those of tokens in several runs, the last of these has it, and the text of another may be empty.

    Args:
        tokenizer: The one that gave the ids.
        input_ids: Ids of real tokens, without padding.
        loss_mask: Their masks; what is not 0 is supervised.

    Raises:
        InputError: The tokenizer does not have one of the ids.
        ValueError: There are more masks than ids, or fewer.
    """
    supervised = [bool(value) for _, value in zip(input_ids, loss_mask, strict=True)]
    _ensure_known(tokenizer, input_ids)
    runs = [(value, len(list(run))) for value, run in groupby(supervised)]
    text = _decode(tokenizer, input_ids)
    heads = (_decode(tokenizer, input_ids[:end]) for end in accumulate(length for _, length in runs))
    ends = list(accumulate((_num_shared(head, text) for head in heads), max))
    return [
        Span(text=text[start:end], supervised=value)
        for (value, _), start, end in zip(runs, [0, *ends], ends, strict=False)
    ]


def _num_shared(head: str, text: str) -> int:
    """Return how many characters of `head` begin `text` too: not those whose last bytes are still to come."""
    return len(commonprefix([head, text]))  # noqa: RUF071 - characters are what is compared


def _decode(tokenizer: Decoder, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _ensure_known(tokenizer: Decoder, ids: Sequence[int]) -> None:
    """Refuse ids that a tokenizer does not have, which it would leave out of the text without a word."""
    for token in dict.fromkeys(ids):
        if not 0 <= token <= _MAX_ID or tokenizer.convert_ids_to_tokens(token) is None:
            raise InputError(
                f"the tokenizer has no token {token}: it is not the one that the samples were tokenised with"
            )
