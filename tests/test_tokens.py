"""The output of the tokenize stage: written ragged, read back exactly, and which rows become samples."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import logging
import struct
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dspark_cache.errors import CacheFormatError, CacheNotFoundError, InputError, RowError
from dspark_cache.schema import INPUT_IDS, LOSS_MASK, SAMPLE_OFFSETS, STAGE_VERSIONS
from dspark_cache.shard_file import write_tensors
from dspark_cache.tokenizing import TokenizedSample
from dspark_cache.tokens import (
    KeepRules,
    SpanPrefix,
    TokenCounts,
    Tokens,
    TokensWriter,
    ensure_supervision,
    keep_samples,
    report_supervision,
    sample_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

IDENTITY = {
    "seq_length": 2_000_000,
    "pad_token_id": 3,
    "train_data_path": "rows.jsonl",
    "train_split": None,
    "shuffle_seed": 42,
    "chat_template_sha256": "0" * 64,
    "mask_reasoning_content": False,
    "mask_generation_prompt": False,
}


def sample(length: int, supervised: int = 1, *, truncated: bool = False, notes: tuple[str, ...] = ()) -> Any:
    ids = [(7 * position + length) % 1000 for position in range(length)]
    mask = [int(position >= length - supervised) for position in range(length)]
    return TokenizedSample(input_ids=ids, loss_mask=mask, truncated=truncated, notes=notes)


def write_tokens(folder: Path, samples: Sequence[TokenizedSample], **identity: Any) -> Tokens:
    folder.mkdir()
    with TokensWriter(folder) as writer:
        for each in samples:
            writer.add(each)
        writer.finish({**IDENTITY, **identity})
    return Tokens(folder)


@pytest.mark.parametrize(
    "lengths",
    [
        *product((1, 3), repeat=1),
        *product((1, 2, 5), repeat=3),
        (1 << 20,),  # exactly one chunk of the copy
        ((1 << 20) - 1, 2),  # a sample across the chunks
        ((1 << 20) + 1, 1),
    ],
)
def test_what_is_written_is_read_back(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    samples = [sample(length, supervised=index % 2) for index, length in enumerate(lengths)]
    tokens = write_tokens(tmp_path / "tokens", samples)
    assert len(tokens) == tokens.num_samples == len(samples)
    assert (tokens.num_tokens, tokens.seq_length, tokens.pad_token_id) == (sum(lengths), 2_000_000, 3)
    assert tokens.offsets.tolist() == [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    for index, expected in enumerate(samples):
        ids, mask = tokens.input_ids(index), tokens.loss_mask(index)
        assert (ids.dtype, mask.dtype) == (torch.int32, torch.uint8)
        assert ids.tolist() == expected.input_ids
        assert mask.tolist() == expected.loss_mask
        assert tokens.length(index) == len(expected.input_ids)


def test_the_folder_holds_two_files_and_the_digest_of_the_larger(tmp_path: Path) -> None:
    samples = [
        sample(3, 2, truncated=True, notes=("b", "a")),
        sample(2, 0, notes=("a",)),
    ]
    tokens = write_tokens(tmp_path / "tokens", samples, limit=None)
    assert sorted(path.name for path in tokens.folder.iterdir()) == ["tokens.json", "tokens.safetensors"]
    digest = hashlib.sha256((tokens.folder / "tokens.safetensors").read_bytes()).hexdigest()
    assert tokens.sha256 == digest
    assert json.loads((tokens.folder / "tokens.json").read_text()) == {
        **IDENTITY,
        "limit": None,
        "num_samples": 2,
        "num_tokens": 5,
        "supervised_tokens": 2,
        "truncated_samples": 1,
        "unsupervised_samples": 1,
        "dropped": {},
        "notes": {"a": 2, "b": 1},
        "sha256": digest,
        "tokenize_version": STAGE_VERSIONS["tokenize"],
    }


def test_the_bytes_of_tokens_are_golden(tmp_path: Path) -> None:
    """If this fails on purpose, raise STAGE_VERSIONS["tokenize"] and stages/versions.yaml."""
    tokens = write_tokens(tmp_path / "tokens", [sample(3), sample(1, 0)])
    assert tokens.sha256 == "999b5acafb0ce80fa90d4a8ec38458197a4fd9983a861d79fe30725d82007d5e"


def test_a_sample_s_key_is_the_hash_of_its_ids_alone(tmp_path: Path) -> None:
    ids = [0, 5, 70000, 2**31 - 1]
    expected = hashlib.sha256(struct.pack("<4i", *ids)).hexdigest()[:32]
    assert sample_key(torch.tensor(ids, dtype=torch.int32)) == expected
    tokens = write_tokens(tmp_path / "tokens", [sample(4, 0), sample(4, 3), sample(5)])
    keys = tokens.keys()
    assert keys[0] == keys[1] != keys[2]
    assert keys == [sample_key(tokens.input_ids(index)) for index in range(3)]


def test_a_sample_s_key_does_not_depend_on_dtype_or_stride() -> None:
    ids = torch.arange(100_000, 100_064)
    expected = sample_key(ids.to(torch.int32))
    assert sample_key(ids) == expected
    assert sample_key(ids.to(torch.int32).repeat_interleave(2)[::2]) == expected


# A folder that is not what the stage writes


@pytest.mark.parametrize("offsets", [[1, 2, 5], [0, 2, 4], [0, 5, 5], [0, 0, 5], [0, 6, 5], [0, -1, 5]])
def test_offsets_that_do_not_cover_the_tokens_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    tokens = write_tokens(tmp_path / "tokens", [sample(2), sample(3)])
    file = tokens.folder / "tokens.safetensors"
    ids, mask = torch.arange(5, dtype=torch.int32), torch.ones(5, dtype=torch.uint8)
    write_tensors(file, {INPUT_IDS: ids, LOSS_MASK: mask, SAMPLE_OFFSETS: torch.tensor(offsets)})
    with pytest.raises(CacheFormatError) as error:
        Tokens(tokens.folder)
    assert str(error.value) == f"{file}: sample_offsets do not cover the 5 tokens"


def test_a_sample_longer_than_seq_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CacheFormatError) as error:
        write_tokens(tmp_path / "tokens", [sample(2), sample(3)], seq_length=2)
    assert str(error.value) == f"{tmp_path / 'tokens/tokens.safetensors'}: a sample is longer than seq_length 2"


def test_another_header_or_no_file_is_refused(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", [sample(2), sample(3)])
    file = tokens.folder / "tokens.safetensors"
    tensors = {INPUT_IDS: torch.arange(5), SAMPLE_OFFSETS: torch.tensor([0, 2, 5]), "x": torch.zeros(1)}
    write_tensors(file, tensors)
    with pytest.raises(CacheFormatError) as error:
        Tokens(tokens.folder)
    assert str(error.value) == (
        f"{file}: input_ids: expected I32[5], found I64[5]; loss_mask is missing; unexpected keys ['x']"
    )
    file.unlink()
    with pytest.raises(CacheNotFoundError, match="no such file"):
        Tokens(tokens.folder)


def test_faults_of_tokens_json_are_reported_at_once(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", [sample(2)])
    path = tokens.folder / "tokens.json"
    content = json.loads(path.read_text())
    del content["seq_length"]
    faulty = {"num_samples": 0, "num_tokens": "2", "pad_token_id": -1, "sha256": "x", "train_split": 1}
    path.write_text(json.dumps({**content, **faulty}))
    with pytest.raises(CacheFormatError) as error:
        Tokens(tokens.folder)
    assert str(error.value) == (
        f"{path}: missing required keys ['seq_length']; num_samples: expected an integer >= 1, found 0; "
        "num_tokens: expected an integer >= 1, found '2'; pad_token_id: expected an integer >= 0, found -1; "
        "sha256: expected 64 hexadecimal digits, found 'x'; train_split: expected a string or null, found 1"
    )
    path.unlink()
    with pytest.raises(CacheNotFoundError) as missing:
        Tokens(tokens.folder)
    assert str(missing.value) == f"no tokens in {tokens.folder}: run dvc repro tokenize"


# Which rows become samples

RULES = KeepRules(min_loss_tokens=0, skip_invalid=False, limit=None)
BAD = RowError("no_messages", "expected messages, found none")


def keep(results: Sequence[Any], rules: KeepRules) -> tuple[list[TokenizedSample], dict[str, int]]:
    counts = TokenCounts()
    named = ((f"rows.jsonl:{number}", result) for number, result in enumerate(results, start=1))
    return list(keep_samples(named, rules, counts)), dict(counts.dropped)


def test_a_bad_row_is_refused_by_place_with_the_way_to_skip_it() -> None:
    with pytest.raises(InputError) as error:
        keep([sample(2), BAD], RULES)
    assert str(error.value) == (
        "rows.jsonl:2: expected messages, found none; data.skip_invalid: true skips and counts such rows"
    )


def test_bad_rows_are_skipped_and_counted_by_reason() -> None:
    results = [BAD, sample(2), RowError("bad_json", "x"), BAD]
    kept, dropped = keep(results, dataclasses.replace(RULES, skip_invalid=True))
    assert kept == [results[1]]
    assert dropped == {"no_messages": 2, "bad_json": 1}


def test_samples_with_too_few_supervised_tokens_are_dropped_and_counted() -> None:
    results = [sample(9, supervised) for supervised in (0, 1, 2, 3)]
    assert keep(results, dataclasses.replace(RULES, min_loss_tokens=2)) == (results[2:], {"min_loss_tokens": 2})
    assert keep(results, RULES) == (results, {})


def test_the_limit_counts_kept_samples_only_and_reads_no_further() -> None:
    results = [BAD, sample(3, 0), sample(3), sample(4), sample(5)]
    rules = KeepRules(min_loss_tokens=1, skip_invalid=True, limit=2)
    assert keep(results, rules) == (results[2:4], {"no_messages": 1, "min_loss_tokens": 1})
    assert keep([*results[:4], "never read"], rules)[0] == results[2:4]
    assert keep(results, dataclasses.replace(rules, limit=9))[0] == results[2:]


# A set with nothing to learn from


def counted(*samples: TokenizedSample, **dropped: int) -> TokenCounts:
    counts = TokenCounts()
    for each in samples:
        counts.add(each)
    counts.dropped.update(dropped)
    return counts


def test_a_set_without_samples_is_refused_with_counts_and_cause() -> None:
    with pytest.raises(InputError) as error:
        ensure_supervision(counted(min_loss_tokens=2, bad_json=1), path="rows.jsonl")
    assert str(error.value) == (
        "rows.jsonl: no usable samples, dropped by reason: {'bad_json': 1, 'min_loss_tokens': 2}; "
        "check data.split, data.min_loss_tokens and the rows"
    )


def test_a_set_without_supervision_is_refused_with_counts_and_cause() -> None:
    with pytest.raises(InputError) as error:
        ensure_supervision(counted(sample(3, 0), sample(4, 0, truncated=True)), path="rows.jsonl")
    assert str(error.value) == (
        "rows.jsonl: no supervised token in any of 2 samples (1 cut at data.seq_length): is the chat template without "
        "generation markers around the answers (target.chat_template), or data.seq_length shorter than the prompts?"
    )
    ensure_supervision(counted(sample(3, 0), sample(4, 1)), path="rows.jsonl")


def report(*samples: TokenizedSample, has_markers: bool = True, masks_prompt: bool = False, **dropped: int) -> None:
    report_supervision(
        counted(*samples, **dropped), has_markers=has_markers, masks_prompt=masks_prompt, decode=lambda ids: f"<{ids}>"
    )


def report_counts(counts: TokenCounts, *, has_markers: bool = True, masks_prompt: bool = False) -> None:
    report_supervision(counts, has_markers=has_markers, masks_prompt=masks_prompt, decode=str)


def test_counts_and_odd_masks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dspark_cache.tokens")
    report(sample(2, 0, truncated=True), sample(2, 1, notes=("odd",)), bad_json=1)
    report(sample(4, 4), has_markers=False)
    report(sample(50, 49))
    assert caplog.messages == [
        "2 samples, 4 tokens, 25.0 % supervised; 1 cut at data.seq_length; dropped {'bad_json': 1}",
        "odd in 1 of 2 samples, 25.0 % supervised",
        "1 samples without supervision, data.min_loss_tokens drops them",
        "1 samples, 4 tokens, 100.0 % supervised; 0 cut at data.seq_length; dropped none",
        "the chat template has no generation markers: whole assistant turns count, 100.0 %",
        "100.0 % of all tokens are supervised: does the chat template mark only answers?",
        "1 samples, 50 tokens, 98.0 % supervised; 0 cut at data.seq_length; dropped none",
    ]


def test_a_writer_that_is_left_early_closes_its_files(tmp_path: Path) -> None:
    """An unclosed file would be a ResourceWarning, which is an error here."""
    with TokensWriter(tmp_path) as writer:
        writer.add(sample(2))
    del writer
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.part", "mask.part"]


def spans(*samples: tuple[list[int], list[int], bool]) -> TokenCounts:
    counts = TokenCounts()
    for ids, mask, truncated in samples:
        counts.add(TokenizedSample(input_ids=ids, loss_mask=mask, truncated=truncated, notes=()))
    return counts


def test_a_template_without_markers_is_reported_once_with_the_share(caplog: pytest.LogCaptureFixture) -> None:
    report_counts(spans(([1, 2, 3, 4], [0, 0, 0, 1], False), ([1, 5], [0, 1], False)), has_markers=False)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == "the chat template has no generation markers: whole assistant turns count, 33.3 %"


SAME_START = (([9, 7, 8, 1], [0, 1, 1, 1], False), ([9, 7, 8, 2, 9, 7, 8, 3], [0, 1, 1, 1, 0, 1, 1, 1], False))


@pytest.mark.parametrize(
    ("masks_prompt", "remedy"),
    [(False, ": data.mask_generation_prompt: true leaves out what the template puts there"), (True, "")],
)
def test_a_prefix_that_all_supervised_spans_share_is_reported(
    caplog: pytest.LogCaptureFixture, masks_prompt: bool, remedy: str
) -> None:
    report_counts(spans(*SAME_START), masks_prompt=masks_prompt)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == f"all 3 supervised spans begin with the same 2 token(s) '[7, 8]'{remedy}"


@pytest.mark.parametrize(
    "samples",
    [
        [([9, 7, 8], [0, 1, 1], False), ([9, 6, 8], [0, 1, 1], False)],  # they differ at once
        [([9, 7, 8], [0, 1, 1], False)],  # only one
        [([9, 7, 8], [0, 1, 1], False), ([9, 7, 8], [0, 1, 1], True)],  # the other is cut: nobody knows its rest
    ],
)
def test_no_prefix_is_reported_where_there_is_none(
    caplog: pytest.LogCaptureFixture, samples: list[tuple[list[int], list[int], bool]]
) -> None:
    report_counts(spans(*samples))
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


# What supervised spans have in common


@pytest.mark.parametrize(
    ("mask", "is_cut", "expected"),
    [
        ([0, 0, 0, 0], False, (0, [])),
        ([1, 1, 1, 1], False, (1, [10, 11, 12, 13])),
        ([1, 1, 1, 1], True, (0, [])),
        ([0, 1, 1, 0], False, (1, [11, 12])),
        ([0, 1, 1, 0], True, (1, [11, 12])),
        ([1, 0, 0, 1], False, (2, [])),
        ([1, 0, 0, 1], True, (1, [10])),
        ([0, 1, 2, 0], False, (1, [11, 12])),
        ([2, 1, -1, 3], False, (1, [10, 11, 12, 13])),
        ([1, 0, 2, 3], True, (1, [10])),
        ([-1, 0, 0, 2], False, (2, [])),
        ([], True, (0, [])),
    ],
)
def test_spans_are_runs_of_supervised_tokens_that_end_before_a_cut(
    mask: list[int], is_cut: bool, expected: tuple[int, list[int]]
) -> None:
    prefix = SpanPrefix()
    prefix.add([10, 11, 12, 13][: len(mask)], mask, is_cut=is_cut)
    assert (prefix.num_spans, prefix.ids) == expected


def test_spans_follow_one_another_in_a_sample() -> None:
    prefix = SpanPrefix()
    prefix.add([7, 8, 0, 7, 8, 9, 0, 0, 7, 8, 5, 6], [1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1], is_cut=False)
    assert prefix == SpanPrefix(num_spans=3, ids=[7, 8])
    prefix.add([7], [1], is_cut=False)
    assert prefix == SpanPrefix(num_spans=4, ids=[7])


SPANS = [[7, 8, 9], [7, 8], [7, 8, 9, 5], [7, 8, 1]]


@pytest.mark.parametrize("cut", range(len(SPANS) + 1))
def test_prefixes_of_parts_merge_to_that_of_the_whole(cut: int) -> None:
    whole, parts = SpanPrefix(), (SpanPrefix(), SpanPrefix())
    for number, ids in enumerate(SPANS):
        for prefix in (whole, parts[number >= cut]):
            prefix.add(ids, [1] * len(ids), is_cut=False)
    before = [(part.num_spans, list(part.ids)) for part in parts]
    merged = SpanPrefix()
    for part in parts:
        merged.merge(part)
    assert merged == whole == SpanPrefix(num_spans=4, ids=[7, 8])
    assert [(part.num_spans, part.ids) for part in parts] == before


def test_a_prefix_that_is_lost_does_not_come_back() -> None:
    prefix = SpanPrefix()
    for ids in ([7, 8], [6], [7, 8], [7, 8]):
        prefix.merge(SpanPrefix(num_spans=1, ids=ids))
    assert prefix == SpanPrefix(num_spans=4, ids=[])


def test_two_sets_of_counts_do_not_share_their_spans() -> None:
    first, second = counted(sample(3, 2)), TokenCounts()
    assert (first.spans.num_spans, second.spans.num_spans) == (1, 0)
