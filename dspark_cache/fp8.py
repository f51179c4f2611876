"""States in 8 bits: float8_e4m3 numbers with one scale for each token and layer, a power of two.

A scale is the smallest power of two with which the largest number of its token and layer fits. Being a power of two it
costs no precision: what is read back in bf16 is exactly the stored number times its scale. Wider states are rounded to
bf16 first, so that it is the same whether a cache was made from captured states or from a bf16 cache of them.
"""

from __future__ import annotations

from functools import cache

import torch

from dspark_cache.schema import FP8, STORED_DTYPES

_LARGEST = torch.finfo(STORED_DTYPES[FP8]).max
_MIN_EXPONENT = -100
"""Smaller scales would lead to numbers that bf16 has no bits for."""


def quantise(rows: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round states [T, k * H] of k = `num_layers` layers to 8 bits.

    All numbers must be finite in bf16: torch would round an infinity to the largest number there is.

    Returns:
        The numbers, float8_e4m3fn [T, k * H], and the scales, float32 [T, k].
    """
    layers = rows.to(torch.bfloat16).view(len(rows), num_layers, -1)
    smallest, largest = layers.aminmax(dim=-1)
    largest = torch.maximum(largest, -smallest).float()
    fraction, exponent = torch.frexp(largest / _LARGEST)
    exponent = torch.where(fraction == 0.5, exponent - 1, exponent).clamp_min(_MIN_EXPONENT)
    one = torch.ones_like(largest)
    numbers = layers * torch.ldexp(one, -exponent).to(torch.bfloat16)[..., None]
    return numbers.to(STORED_DTYPES[FP8]).flatten(-2), torch.ldexp(one, exponent)


def are_scales_right(scales: torch.Tensor, states: torch.Tensor) -> bool:
    """Say whether scales [T, k] are as `quantise` gives them for what it gave, read back as `states` [T, k * H]."""
    fractions, exponents = torch.frexp(scales)
    largest = states.float().view(*scales.shape, -1).abs().amax(dim=-1)
    # A number just above half of the largest may have been rounded down to it, but no further.
    is_too_large = (largest / scales < _LARGEST / 2) & (largest > 0) & (exponents > _MIN_EXPONENT + 1)
    return bool(((fractions == 0.5) & ~is_too_large).all())


def dequantise(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return states [T, k * H] in bf16 from what `quantise` gave."""
    if numbers.shape[1] % 2:
        states = numbers.to(torch.bfloat16)
    else:
        pairs = numbers.view(torch.int16).int().bitwise_and_(0xFFFF)
        states = torch.index_select(_decoded_pairs(), 0, pairs.flatten()).view(torch.bfloat16)
    return states.view(*scales.shape, -1).mul_(scales.to(torch.bfloat16)[..., None]).flatten(-2)


@cache
def _decoded_pairs() -> torch.Tensor:
    """Return the bf16 numbers of every two bytes, int32 [65536]; torch's own conversion takes three times as long."""
    one = torch.arange(256, dtype=torch.uint8).view(STORED_DTYPES[FP8]).to(torch.bfloat16)
    return torch.stack([one.repeat(256), one.repeat_interleave(256)], dim=1).view(torch.int32).flatten()
