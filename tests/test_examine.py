"""What is seen of a cache: norms of its states against plain torch, and samples as text or ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dspark_cache import CachedDSparkDataset
from dspark_cache.cache_files import CacheFolder
from dspark_cache.examine import (
    HEAD_CHARACTERS,
    MAX_SHOWN_TOKENS,
    NORM_SAMPLES,
    TAIL_CHARACTERS,
    ShownSpan,
    Texts,
    examine_cache,
    no_texts,
    reasons_to_show,
    spread,
    state_norms,
    tokenizer_texts,
)
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN
from dspark_cache.verify import verify_cache
from tests.caches import make_ragged
from tests.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dspark_cache.supervision import Supervision

TARGET = ROOT / "inputs/target"


def supervision_of(cache: Path) -> Supervision:
    report = verify_cache(CacheFolder(cache), "values")
    assert report.has_sound_values
    return report.supervision


@pytest.mark.parametrize(("count", "most", "chosen"), [(1, 3, [0]), (3, 3, [0, 1, 2]), (10, 4, [0, 2, 5, 7])])
def test_samples_are_evenly_spread(count: int, most: int, chosen: list[int]) -> None:
    assert spread(count, most) == chosen


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("is_ragged", [False, True])
def test_norms_are_those_of_the_real_tokens_of_the_samples(
    make_cache: Callable[..., Path], dtype: str, is_ragged: bool
) -> None:
    cache = make_cache(9, 4, dtype=dtype)
    folder = make_ragged(cache, [4, 5]) if is_ragged else cache
    found, num_tokens = state_norms(CachedDSparkDataset(folder), [0, 3, 8])
    samples = [CachedDSparkDataset(cache)[index] for index in (0, 3, 8)]
    lengths = [2, 5, 2]
    assert num_tokens == sum(lengths)
    for place, state in enumerate(["layer 0", "layer 1", "last hidden"]):
        rows = [
            (sample[LAST_HIDDEN] if place == 2 else sample[HIDDEN][:, 4 * place : 4 * place + 4])[:length].double()
            for sample, length in zip(samples, lengths, strict=True)
        ]
        norms = torch.cat(rows).pow(2).sum(dim=-1).sqrt().sort().values
        expected = {"mean": norms.mean(), "min": norms[0], "p5": norms[0], "p50": norms[4], "p95": norms[8]}
        for name, value in expected.items():
            assert getattr(found[place], name) == float(f"{float(value):.4g}"), name
        assert (found[place].state, found[place].max) == (state, float(f"{float(norms[-1]):.4g}"))


def test_norms_are_measured_in_a_bounded_number_of_samples(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(40, 16)
    seen = examine_cache(cache, supervision_of(cache), no_texts("x"))
    assert seen.norm_samples == NORM_SAMPLES
    lengths = [2 + index % 8 for index in spread(40, NORM_SAMPLES)]
    assert seen.norm_tokens == sum(min(8, length) for length in lengths)


def test_samples_without_any_state_have_no_norms(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(2, 2)
    path = cache / "shard-000000.safetensors"
    save_file({key: torch.zeros_like(tensor) for key, tensor in load_file(path).items()}, path)
    assert state_norms(CachedDSparkDataset(cache), [0, 1]) == ([], 0)
    seen = examine_cache(cache, supervision_of(cache), no_texts("x"))
    assert [sample.spans for sample in seen.samples] == [[], []]


def test_the_extremes_are_shown_and_the_middle_each_once(make_cache: Callable[..., Path]) -> None:
    """Sample i has 2 + i % 8 tokens, 8 at most, of which the second half is supervised, the larger one if odd."""
    cache = make_cache(12, 4)
    assert reasons_to_show(supervision_of(cache), 12) == {
        6: "longest, in the middle of the cache",
        0: "shortest, least supervised",
        1: "most supervised",
    }


def test_without_a_tokenizer_ids_are_shown_and_it_is_said_why(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(3, 3)
    seen = examine_cache(cache, supervision_of(cache), no_texts("nobody gave one"))
    assert seen.note == "Token ids are shown, since nobody gave one."
    (sample,) = [sample for sample in seen.samples if sample.index == 2]
    ids = CachedDSparkDataset(cache)[2][INPUT_IDS].tolist()
    assert sample.spans == [
        ShownSpan(head=f"{ids[0]} {ids[1]} ", omitted=0, tail="", supervised=False),
        ShownSpan(head=f"{ids[2]} {ids[3]} ", omitted=0, tail="", supervised=True),
    ]
    assert (sample.num_tokens, sample.supervised_tokens, sample.shown_tokens) == (4, 2, 4)


def test_text_is_shown_with_a_tokenizer(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(3, 3)
    tokenizer: Any = AutoTokenizer.from_pretrained(TARGET)
    seen = examine_cache(cache, supervision_of(cache), Texts(tokenizer=tokenizer, note="ok"))
    (sample,) = [sample for sample in seen.samples if sample.index == 2]
    ids = CachedDSparkDataset(cache)[2][INPUT_IDS][:4].tolist()
    assert "".join(span.head for span in sample.spans) == tokenizer.decode(ids)
    assert seen.note == "ok"


def test_a_tokenizer_that_lacks_an_id_is_not_used(make_cache: Callable[..., Path]) -> None:
    class Small:
        def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:  # noqa: ARG002
            return "x" * len(token_ids)

        def convert_ids_to_tokens(self, ids: Any) -> str | None:
            return "x" if ids < 2 else None

    cache = make_cache(3, 3)
    seen = examine_cache(cache, supervision_of(cache), Texts(tokenizer=Small(), note="ok"))
    assert seen.note.startswith("Token ids are shown, since the tokenizer has no token ")
    assert all(span.head.replace(" ", "").isdigit() for sample in seen.samples for span in sample.spans)


def test_long_samples_and_long_spans_are_cut(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(1, 1, seq_length=8)
    assert examine_cache(cache, supervision_of(cache), no_texts("x")).samples[0].shown_tokens == 2
    long = make_cache(2000, 2000, seq_length=2000, hidden=1, layers=1)
    seen = examine_cache(long, supervision_of(long), no_texts("x"))
    (sample,) = [sample for sample in seen.samples if sample.why.startswith("longest")]
    assert (sample.num_tokens, sample.shown_tokens) == (2000, MAX_SHOWN_TOKENS)
    first = sample.spans[0]
    text = "".join(f"{token} " for token in CachedDSparkDataset(long)[1998][INPUT_IDS][:1000].tolist())
    assert first == ShownSpan(
        head=text[:HEAD_CHARACTERS],
        omitted=len(text) - HEAD_CHARACTERS - TAIL_CHARACTERS,
        tail=text[-TAIL_CHARACTERS:],
        supervised=False,
    )


def test_a_tokenizer_of_another_fingerprint_is_not_used() -> None:
    texts = tokenizer_texts(TARGET, "sha256:a", "sha256:b", name="the/target")
    assert texts == no_texts("the tokenizer of the/target is sha256:a, that of the samples was sha256:b")


def test_a_tokenizer_that_nothing_vouches_for_is_said_to_be_so() -> None:
    known, unknown = (tokenizer_texts(TARGET, "sha256:a", expected, name="t") for expected in ("sha256:a", None))
    assert known.note == "Text by the tokenizer of t, sha256:a."
    assert unknown.note == (
        "Text by the tokenizer of t, sha256:a; nothing says that it is the one that the samples were tokenised with."
    )
    assert known.tokenizer is not None


def test_a_folder_without_a_tokenizer_gives_ids(tmp_path: Path) -> None:
    texts = tokenizer_texts(tmp_path, "sha256:a", "sha256:a", name="t")
    assert texts == no_texts("no tokenizer can be loaded from t")
