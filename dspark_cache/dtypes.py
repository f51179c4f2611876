"""Dtypes by their names in manifests and safetensors files, and the dtype and shape of a tensor in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from dspark_cache.schema import FP8

DTYPE_MAP: Final[dict[str, torch.dtype]] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
STORED_DTYPES: Final[dict[str, torch.dtype]] = {**DTYPE_MAP, FP8: torch.float8_e4m3fn}
"""Dtypes in which a cache may store states; fp8 in the ragged layout only."""
READ_DTYPES: Final[dict[str, torch.dtype]] = {**DTYPE_MAP, FP8: torch.bfloat16}
"""Dtype in which a reader gets the states of a cache, and in which its target weights are stored."""
SAFETENSORS_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
SAFETENSORS_NAMES: Final = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def resized(self, extent: int) -> TensorSpec:
        """Return the spec with another first extent."""
        return TensorSpec(dtype=self.dtype, shape=(extent, *self.shape[1:]))

    def stacked(self, rows: int) -> TensorSpec:
        """Return the spec of `rows` such tensors, one after the other along a new first dimension."""
        return TensorSpec(dtype=self.dtype, shape=(rows, *self.shape))

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        size = self.dtype.itemsize
        for extent in self.shape[1:]:
            size *= extent
        return size

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.row_bytes * self.shape[0] if self.shape else self.dtype.itemsize
