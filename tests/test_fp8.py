"""States in 8 bits: how far from what they were, and exactly what is read back."""

from __future__ import annotations

import pytest
import torch

from dspark_cache.dtypes import STORED_DTYPES
from dspark_cache.fp8 import _parts, dequantise, largest_magnitudes_, quantise
from dspark_cache.recompute import ROUNDING_TOLERANCE, relative_l2


def states(layers: int, size: int, factor: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layers * size)
    rows = torch.randn(50, layers * size, generator=generator) * factor
    rows[:, ::size] *= 1000  # as massive activations are
    return rows


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1.0, 1e20])
def test_a_layer_is_near_what_it_was_whatever_its_size(layers: int, dtype: torch.dtype, factor: float) -> None:
    rows = states(layers, 64, factor).to(dtype)
    numbers, scales = quantise(rows, layers)
    assert (numbers.dtype, numbers.shape) == (torch.float8_e4m3fn, rows.shape)
    assert (scales.dtype, list(scales.shape)) == (torch.float32, [50, layers])
    read = dequantise(numbers, scales)
    assert read.dtype == torch.bfloat16
    for found, expected in zip(read.split(64, dim=1), rows.split(64, dim=1), strict=True):
        assert float(relative_l2(found, expected).max()) < ROUNDING_TOLERANCE["fp8_e4m3"]


def test_what_is_read_is_exactly_number_times_scale_and_scales_are_powers_of_two() -> None:
    numbers, scales = quantise(states(2, 64, 3.7), 2)
    exact = numbers.double().view(50, 2, 64) * scales.double()[..., None]
    assert torch.equal(dequantise(numbers, scales).double(), exact.flatten(1))
    fractions, _ = torch.frexp(scales)
    assert bool((fractions == 0.5).all())


@pytest.mark.parametrize(
    ("largest", "scale", "number"), [(448.0, 1.0, 448.0), (450.0, 2.0, 224.0), (224.0, 0.5, 448.0)]
)
def test_the_scale_is_the_smallest_with_which_the_largest_number_fits(
    largest: float, scale: float, number: float
) -> None:
    numbers, scales = quantise(torch.tensor([[largest, -1.0]]), 1)
    assert float(scales) == scale
    assert float(numbers[0, 0]) == number


@pytest.mark.parametrize("width", [256, 255])
def test_every_byte_is_read_as_torch_reads_it(width: int) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)[:width].repeat(2, 1)
    numbers[1] = numbers[1].flip(0)
    scales = torch.tensor([[1.0], [0.25]])
    read = dequantise(numbers.view(torch.float8_e4m3fn), scales).float()
    expected = numbers.view(torch.float8_e4m3fn).float() * scales
    assert torch.equal(read.isnan(), expected.isnan())
    assert torch.equal(read.nan_to_num(), expected.nan_to_num())


def every_number(dtype: torch.dtype) -> torch.Tensor:
    integers = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(integers)
    return torch.arange(limits.min, limits.max + 1, dtype=torch.int32).to(integers).view(dtype)


@pytest.mark.parametrize("exponent", [-133, -127, -101, -100, -99, -8, 0, 1, 8, 9, 60, 127])
def test_every_bf16_number_is_rounded_as_torch_rounds_it(exponent: int) -> None:
    """Beside each of several largest ones."""
    numbers = every_number(torch.bfloat16)
    largest = torch.ldexp(torch.tensor(1.75), torch.tensor(exponent)).to(torch.bfloat16)
    numbers = numbers[numbers.abs() <= largest]
    rows = torch.stack([numbers, torch.full_like(numbers, float(largest))])
    found, scales = quantise(rows, 1)
    scale = 2.0 ** max(exponent - 8, -100)
    assert scales.flatten().tolist() == [scale, scale]
    expected = (rows.double() / scale).to(torch.bfloat16).to(torch.float8_e4m3fn)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("width", [6, 9])
@pytest.mark.parametrize("part", [1, 6, 17, 18, 19, 1000])
def test_it_is_the_same_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch, width: int, part: int) -> None:
    rows = states(3, width // 3, 3.7)
    before = rows.clone()
    expected = quantise(rows, 3)
    read = dequantise(*expected)
    monkeypatch.setattr("dspark_cache.fp8._PART_NUMBERS", part)
    found = quantise(rows, 3)
    assert torch.equal(rows, before)
    assert torch.equal(found[0].float(), expected[0].float())
    assert torch.equal(found[1], expected[1])
    assert torch.equal(dequantise(*found), read)


def test_bf16_rows_are_left_as_they_are() -> None:
    rows = states(2, 8, 1.0).to(torch.bfloat16)
    before = rows.clone()
    quantise(rows, 2)
    assert torch.equal(rows, before)


def test_parts_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark_cache.fp8._PART_NUMBERS", 20)
    tensors = torch.zeros(7, 8), torch.zeros(7, 2)
    assert [[len(part) for part in parts] for parts in _parts(*tensors)] == [[2, 2], [2, 2], [2, 2], [1, 1]]


@pytest.mark.parametrize("dtype", STORED_DTYPES.values(), ids=STORED_DTYPES)
def test_the_largest_magnitude_is_that_of_the_row_whatever_is_in_it(dtype: torch.dtype) -> None:
    some = torch.tensor([0.0, 1.0, -2.0, 0.5, float("nan"), float("inf"), -float("inf")]).to(dtype)
    numbers = every_number(dtype) if dtype.itemsize < 4 else torch.cat([some, torch.randn(300) * 1e30])
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 7, 32, 100):
        rows = numbers[torch.randint(len(numbers), (64, 2, size), generator=generator)]
        if size < 32:
            rows[:8] = some[torch.randint(len(some), (8, 2, size), generator=generator)]
        expected = rows.float().abs().amax(dim=-1)
        found = largest_magnitudes_(rows.clone()).float()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(-1), expected.nan_to_num(-1))


def test_zero_stays_zero() -> None:
    numbers, scales = quantise(torch.zeros(2, 4), 1)
    assert not bool(numbers.float().any())
    assert bool((scales == 1).all())
