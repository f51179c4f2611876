"""Batches as long as their longest sample: those of `pad_to="seq_length"`, cut, in the same order, with lengths."""

from __future__ import annotations

import pickle
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache import CACHE_KEYS, CachedDSparkDataset, build_cached_dspark_dataloader, read_manifest, write_manifest
from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_cache.fp8 import dequantise, quantise
from dspark_cache.loaders import LENGTHS, PadToLongest
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS, SCALES_OF
from dspark_cache.shard_file import write_tensors
from tests.caches import make_ragged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    MakeCache = Callable[..., Path]
    Batch = dict[str, torch.Tensor]

NUM_SAMPLES, SEQ_LENGTH, HIDDEN_SIZE, PAD = 9, 8, 4, 31
TOKENS = [2, 3, 4, 5, 6, 7, 8, 8, 2]
"""Tokens of each sample that `make_cache` writes, of at most `SEQ_LENGTH`."""


@pytest.fixture
def cache(make_cache: MakeCache, request: pytest.FixtureRequest) -> Path:
    """A ragged cache of nine samples in three shards, of bf16 or, if asked, fp8; its pad token is also a real one."""
    dtype = getattr(request, "param", "bf16")
    folder = make_ragged(make_cache(NUM_SAMPLES, 2, SEQ_LENGTH, HIDDEN_SIZE), [4, 1, 4])
    if dtype == "fp8_e4m3":
        for path in folder.glob("shard-*"):
            write_tensors(path, in_fp8(load_file(path)))
    write_manifest(folder, {**read_manifest(folder), "dtype": dtype, "pad_token_id": PAD})
    return folder


def in_fp8(states: Batch) -> Batch:
    """Return the tensors of a file with states in 8 bits, in the format's order."""
    parts = {key: quantise(states[key], states[key].shape[1] // HIDDEN_SIZE) for key in (HIDDEN, LAST_HIDDEN)}
    numbers = {key: part[0] for key, part in parts.items()}
    scales = {SCALES_OF[key]: part[1] for key, part in parts.items()}
    return {**numbers, **scales, SAMPLE_OFFSETS: states[SAMPLE_OFFSETS].clone()}


def loader(cache: Path, pad_to: str, batch_size: int = 4, shuffle: bool = False, **options: Any) -> Any:
    return build_cached_dspark_dataloader(cache, batch_size, shuffle, **options, pad_to=pad_to)


def batches(cache: Path, pad_to: str, batch_size: int = 4, shuffle: bool = False, **options: Any) -> list[Batch]:
    """Return the batches of an epoch; shuffled ones are those of one seed."""
    torch.manual_seed(7)
    return list(loader(cache, pad_to, batch_size, shuffle, **options))


def assert_cut(found: list[Batch], padded: list[Batch]) -> list[int]:
    """Compare batches with padded ones, cut; return the tokens of all samples in their order."""
    tokens = []
    for batch, whole in zip(found, padded, strict=True):
        assert list(batch) == [*CACHE_KEYS, LENGTHS]
        lengths = batch[LENGTHS]
        assert (lengths.dtype, list(lengths.shape)) == (torch.int64, [len(whole[INPUT_IDS])])
        longest = max(lengths.tolist())
        for key in CACHE_KEYS:
            assert batch[key].dtype == whole[key].dtype
            assert torch.equal(batch[key], whole[key][:, :longest])
        assert lengths.tolist() == whole[LAST_HIDDEN].any(dim=-1).sum(dim=-1).tolist()
        for row, length in enumerate(lengths.tolist()):
            assert bool((whole[INPUT_IDS][row, length:] == PAD).all())
        tokens += lengths.tolist()
    return tokens


@pytest.mark.parametrize("cache", ["bf16", "fp8_e4m3"], indirect=True)
@pytest.mark.parametrize(("batch_size", "shuffle"), [*product((1, 2, 4, 20), (False, True))])
def test_a_batch_is_the_padded_one_cut_at_its_longest_sample(cache: Path, batch_size: int, shuffle: bool) -> None:
    found, padded = (batches(cache, pad_to, batch_size, shuffle) for pad_to in ("longest", "seq_length"))
    tokens = assert_cut(found, padded)
    assert sorted(tokens) == sorted(TOKENS)
    assert (tokens == TOKENS) is not shuffle
    assert {batch[key].dtype for batch in found for key in (HIDDEN, LAST_HIDDEN)} == {torch.bfloat16}
    assert {batch[key].dtype for batch in found for key in (INPUT_IDS, LOSS_MASK)} == {torch.int64}
    assert max(len(batch[INPUT_IDS]) for batch in found) == min(batch_size, NUM_SAMPLES)


@pytest.mark.parametrize("cache", ["fp8_e4m3"], indirect=True)
def test_states_of_8_bits_are_number_times_scale(cache: Path) -> None:
    shards = [load_file(path) for path in sorted(cache.glob("shard-*"))]
    for key in (HIDDEN, LAST_HIDDEN):
        stored = torch.cat([dequantise(shard[key], shard[SCALES_OF[key]]) for shard in shards])
        (batch,) = batches(cache, "longest", NUM_SAMPLES)
        assert torch.equal(
            batch[key], torch.nn.utils.rnn.pad_sequence(list(torch.split(stored, TOKENS)), batch_first=True)
        )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_give_the_same_batches(cache: Path, shuffle: bool) -> None:
    found = batches(cache, "longest", shuffle=shuffle, num_workers=2)
    assert sorted(assert_cut(found, batches(cache, "seq_length", shuffle=shuffle))) == sorted(TOKENS)


def test_spawned_workers_take_the_dataset_and_what_collates(cache: Path) -> None:
    """As once CUDA is up, where a forked worker would abort."""
    spawned = loader(cache, "longest", num_workers=1)
    assert len(spawned.dataset[0][INPUT_IDS]) == TOKENS[0]  # an open file, which must stay here
    spawned.multiprocessing_context = "spawn"
    assert assert_cut(list(spawned), batches(cache, "seq_length")) == TOKENS
    assert pickle.loads(pickle.dumps(spawned.collate_fn)) == PadToLongest(pad_token_id=PAD)


@pytest.mark.parametrize(("shuffle", "epoch"), [(False, 0), (True, 0), (True, 3)])
def test_each_rank_reads_the_share_that_it_has_of_padded_samples(
    cache: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, epoch: int
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    tokens = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        shares = []
        for pad_to in ("longest", "seq_length"):
            made = loader(cache, pad_to, 2, shuffle, distributed=True)
            made.sampler.set_epoch(epoch)
            shares.append(list(made))
        tokens.append(assert_cut(shares[0], shares[1]))
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    expected = [TOKENS[index] for index in (order if shuffle else range(NUM_SAMPLES))]
    expected.append(expected[0])  # padded to equal length
    assert tokens == [expected[0::2], expected[1::2]]


def test_samples_without_padding_have_memory_of_their_own(cache: Path) -> None:
    dataset, padded = CachedDSparkDataset(cache, padded=False), CachedDSparkDataset(cache)
    for index, tokens in enumerate(TOKENS):
        sample = dataset[index]
        assert list(sample) == list(CACHE_KEYS)
        for key, value in sample.items():
            assert torch.equal(value, padded[index][key][:tokens])
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_the_default_is_seq_length_without_lengths(cache: Path) -> None:
    plain, named = (next(iter(build_cached_dspark_dataloader(cache, 2, False, **more))) for more in ({}, SEQ))
    assert list(plain) == list(named) == list(CACHE_KEYS)
    for key in CACHE_KEYS:
        assert plain[key].shape[:2] == (2, SEQ_LENGTH)
        assert torch.equal(plain[key], named[key])


SEQ: dict[str, Any] = {"pad_to": "seq_length"}


def test_an_empty_cache_gives_no_batch(make_cache: MakeCache) -> None:
    assert batches(make_ragged(make_cache(0, 2), []), "longest") == []


# What is refused


def test_a_padded_cache_is_refused_with_the_way_out(make_cache: MakeCache) -> None:
    padded = make_cache(3, 2)
    with pytest.raises(SettingsError) as error:
        loader(padded, "longest")
    assert str(error.value) == (
        f"{padded} is padded: it does not say how long its samples are; dspark-cache convert --layout ragged makes a "
        "cache that does"
    )
    assert len(batches(padded, "seq_length", 3)) == 1


@pytest.mark.parametrize("pad_to", ["", "Longest", "max", "seq_length ", None, 8, True])
def test_another_value_is_refused_before_the_cache_is_opened(tmp_path: Path, pad_to: Any) -> None:
    message = f"pad_to: expected 'seq_length' or 'longest', found {pad_to!r}"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        loader(tmp_path / "nowhere", pad_to)


def test_what_is_expected_of_the_cache_is_compared_too(cache: Path) -> None:
    assert len(batches(cache, "longest", expect={"seq_length": SEQ_LENGTH})) == 3
    with pytest.raises(CacheFormatError, match=r"seq_length"):
        loader(cache, "longest", expect={"seq_length": SEQ_LENGTH + 1})


def test_nothing_to_collate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cannot collate an empty list of samples$"):
        PadToLongest(pad_token_id=0)([])
