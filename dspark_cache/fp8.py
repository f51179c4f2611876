"""States in 8 bits: float8_e4m3 numbers with one scale for each token and layer, a power of two.

A scale is the smallest power of two with which the largest number of its token and layer fits. Being a power of two it
costs no precision: what is read back in bf16 is exactly the stored number times its scale. Wider states are rounded to
bf16 first, so that it is the same whether a cache was made from captured states or from a bf16 cache of them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch

from dspark_cache.dtypes import STORED_DTYPES
from dspark_cache.memory import empty
from dspark_cache.schema import FP8

if TYPE_CHECKING:
    from collections.abc import Iterator

_LARGEST = torch.finfo(STORED_DTYPES[FP8]).max
_MIN_EXPONENT = -100
"""Smaller scales would lead to numbers that bf16 has no bits for."""
_PART_NUMBERS = 1 << 19
"""Numbers converted at a time: they and what becomes of them on the way stay in the processor's cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def largest_magnitudes_(rows: torch.Tensor) -> torch.Tensor:
    """Clear the signs of rows [..., H] and return the largest number of each, shape [...].

    That is not a number where the row holds one that is none. Without signs, floating point numbers of any dtype are in
    the order of their bits, and torch is many times as fast with integers.
    """
    integers = _INTEGERS[rows.dtype.itemsize]
    return rows.view(integers).bitwise_and_(torch.iinfo(integers).max).amax(dim=-1).view(rows.dtype)


def quantise(rows: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round states [T, k * H] of k = `num_layers` layers to 8 bits.

    All numbers must be finite in bf16: torch would round an infinity to the largest number there is.

    Returns:
        The numbers, float8_e4m3fn [T, k * H], and the scales, float32 [T, k].
    """
    numbers = empty(tuple(rows.shape), STORED_DTYPES[FP8])
    scales = torch.empty(len(rows), num_layers)
    # One copy to work on for all parts: on a thread the allocator gives memory back to the system at once.
    scratch = torch.empty(
        (min(len(rows), _part_tokens(rows)), num_layers, rows.shape[1] // num_layers), dtype=torch.bfloat16
    )
    for part, into, scale in _parts(rows, numbers, scales):
        layers, work = part.view(*scale.shape, -1), scratch[: len(part)]
        exponents = _exponents(largest_magnitudes_(work.copy_(layers)).float())
        torch.ldexp(torch.ones_like(scale), exponents, out=scale)
        inverse = torch.ldexp(torch.ones_like(scale), -exponents).to(torch.bfloat16)
        into.view(layers.shape).copy_(work.copy_(layers).mul_(inverse[..., None]))
    return numbers, scales


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut tensors [T, ...] alike into parts of so many tokens that those of the first have few enough numbers."""
    step = _part_tokens(tensors[0])
    for start in range(0, len(tensors[0]), step):
        yield tuple(tensor[start : start + step] for tensor in tensors)


def _part_tokens(rows: torch.Tensor) -> int:
    return max(1, _PART_NUMBERS // rows.shape[1])


def _exponents(largest: torch.Tensor) -> torch.Tensor:
    """Return the exponents of the smallest powers of two with which `largest` fit."""
    fraction, exponent = torch.frexp(largest / _LARGEST)
    return torch.where(fraction == 0.5, exponent - 1, exponent).clamp_min(_MIN_EXPONENT)


def are_scales_right(scales: torch.Tensor, states: torch.Tensor) -> bool:
    """Say whether scales [T, k] are as `quantise` gives them for what it gave, read back as `states` [T, k * H]."""
    fractions, exponents = torch.frexp(scales)
    largest = states.float().view(*scales.shape, -1).abs().amax(dim=-1)
    # A number just above half of the largest may have been rounded down to it, but no further.
    is_too_large = (largest / scales < _LARGEST / 2) & (largest > 0) & (exponents > _MIN_EXPONENT + 1)
    return bool(((fractions == 0.5) & ~is_too_large).all())


def dequantise(numbers: torch.Tensor, scales: torch.Tensor, states: torch.Tensor | None = None) -> torch.Tensor:
    """Return states [T, k * H] in bf16 from what `quantise` gave; they are written to `states`, if that is given."""
    if states is None:
        states = empty(tuple(numbers.shape), torch.bfloat16)
    for part, scale, into in _parts(numbers, scales, states):
        if numbers.shape[1] % 2:
            into.copy_(part)
        else:
            pairs = part.view(torch.uint16).to(torch.int32)
            torch.index_select(_decoded_pairs(), 0, pairs.flatten(), out=into.view(torch.int32).view(-1))
        into.view(*scale.shape, -1).mul_(scale.to(torch.bfloat16)[..., None])
    return states


@cache
def _decoded_pairs() -> torch.Tensor:
    """Return the bf16 numbers of every two bytes, int32 [65536]; torch's own conversion takes three times as long."""
    one = torch.arange(256, dtype=torch.uint8).view(STORED_DTYPES[FP8]).to(torch.bfloat16)
    return torch.stack([one.repeat(256), one.repeat_interleave(256)], dim=1).view(torch.int32).flatten()
