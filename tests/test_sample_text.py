"""Text of samples: nothing is lost at the borders of what is supervised, whatever the tokenizer."""

from __future__ import annotations

from functools import cache
from itertools import groupby, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark_cache.errors import InputError
from dspark_cache.sample_text import Span, text_spans
from tests.repository import GOLDEN, ROOT

BYTE_LEVEL = [ROOT / "inputs/target", *sorted((GOLDEN / "models").iterdir())]
NAMES = [*(folder.name for folder in BYTE_LEVEL), "sentencepiece"]


@cache
def tokenizer_of(name: str) -> Any:
    if name == "sentencepiece":
        return sentencepiece()
    (folder,) = [folder for folder in BYTE_LEVEL if folder.name == name]
    return AutoTokenizer.from_pretrained(folder)


def sentencepiece() -> Any:
    """A tokenizer in the manner of Llama 2: words with their space in front, bytes for other characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"ab.,", "▁a", "▁b", "ab"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def joined(spans: list[Span]) -> str:
    return "".join(span.text for span in spans)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # the first example loads a tokenizer
@given(text=st.text(st.characters(codec="utf-8"), max_size=20), masks=st.lists(st.booleans(), min_size=1))
def test_joined_spans_are_the_text_and_each_run_of_the_mask_has_one(name: str, text: str, masks: list[bool]) -> None:
    tokenizer = tokenizer_of(name)
    ids = ids_of(tokenizer, text)
    mask = [int(masks[position % len(masks)]) for position in range(len(ids))]
    spans = text_spans(tokenizer, ids, mask)
    assert joined(spans) == whole(tokenizer, ids)
    assert [span.supervised for span in spans] == [bool(value) for value, _ in groupby(mask)]


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # the first example loads a tokenizer
@given(parts=st.lists(st.text("ab .é😀", min_size=1, max_size=5), min_size=1, max_size=6))
def test_whole_texts_come_back_as_they_were_put_together(name: str, parts: list[str]) -> None:
    """Each part was tokenised alone, so that no character is split between two runs."""
    tokenizer = tokenizer_of(name)
    pieces = [ids_of(tokenizer, part) for part in parts]
    ids = [token for piece in pieces for token in piece]
    mask = [number % 2 for number, piece in enumerate(pieces) for _ in piece]
    spans = text_spans(tokenizer, ids, mask)
    before = ""
    for number, span in enumerate(spans):
        after = whole(tokenizer, [token for piece in pieces[: number + 1] for token in piece])
        assert span == Span(text=after.removeprefix(before), supervised=number % 2 == 1)
        before = after


@pytest.mark.parametrize("name", NAMES)
def test_a_split_character_is_in_the_run_that_has_its_last_byte(name: str) -> None:
    tokenizer = tokenizer_of(name)
    smile = ids_of(tokenizer, "a😀")[len(ids_of(tokenizer, "a")) :]
    assert len(smile) > 1
    before, after = ids_of(tokenizer, "a"), ids_of(tokenizer, "b")
    ids = [*before, *smile, *after]
    for masks in product((0, 1), repeat=len(smile)):
        spans = text_spans(tokenizer, ids, [0] * len(before) + list(masks) + [0] * len(after))
        assert joined(spans) == whole(tokenizer, ids)
        (span,) = [span for span in spans if "😀" in span.text]
        assert span.supervised == bool(masks[-1])
        assert "\N{REPLACEMENT CHARACTER}" not in joined(spans)


def test_broken_bytes_stay_the_replacement_character_that_the_tokenizer_gives() -> None:
    tokenizer = tokenizer_of("target")
    first, *_ = ids_of(tokenizer, "😀")
    ids = [*ids_of(tokenizer, "a"), first, *ids_of(tokenizer, "b")]
    assert [span.text for span in text_spans(tokenizer, ids, [0, 1, 0])] == ["a", "\N{REPLACEMENT CHARACTER}", "b"]


def test_special_tokens_and_spaces_are_kept() -> None:
    tokenizer = tokenizer_of("target")
    ids = ids_of(tokenizer, "<|im_start|>user\nHi , you  .<|im_end|>\n")
    mask = [0] + [1] * (len(ids) - 3) + [0, 0]
    assert joined(text_spans(tokenizer, ids, mask)) == "<|im_start|>user\nHi , you  .<|im_end|>\n"
    assert text_spans(tokenizer, ids, mask)[0] == Span(text="<|im_start|>", supervised=False)
    assert text_spans(tokenizer, ids, mask)[-1].text == "<|im_end|>\n"


def test_a_tokenizer_that_would_tidy_spaces_up_does_not() -> None:
    tokenizer = AutoTokenizer.from_pretrained(
        ROOT / "inputs/target",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    ids = ids_of(tokenizer, "Hi , you .")
    assert tokenizer.decode(ids) != "Hi , you ."
    assert joined(text_spans(tokenizer, ids, [0] * len(ids))) == "Hi , you ."


def test_a_leading_space_is_dropped_at_the_start_of_the_sample_only() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    ids = [*ids_of(tokenizer, "a b"), *ids_of(tokenizer, "b a")]
    assert [span.text for span in text_spans(tokenizer, ids, [0, 0, 1, 1])] == ["a b", " b a"]


def test_a_sample_without_tokens_has_no_spans() -> None:
    assert text_spans(tokenizer_of("target"), [], []) == []


@pytest.mark.parametrize("token", [-1, 1000, 1 << 31, 1 << 40])
def test_ids_that_the_tokenizer_does_not_have_are_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"has no token {token}: it is not the one that the samples were tokenised"):
        text_spans(tokenizer_of("target"), [1, token], [0, 1])


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        text_spans(tokenizer_of("target"), [1, 2], [0])
