"""States in 8 bits: how far from what they were, and exactly what is read back."""

from __future__ import annotations

import pytest
import torch

from dspark_cache.fp8 import dequantise, quantise
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


def test_zero_stays_zero() -> None:
    numbers, scales = quantise(torch.zeros(2, 4), 1)
    assert not bool(numbers.float().any())
    assert bool((scales == 1).all())
