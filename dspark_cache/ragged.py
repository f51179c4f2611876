"""Shards of the ragged layout (format version 2): two files each, which hold real tokens only.

`shard-NNNNNN.safetensors` has the states, `samples-NNNNNN.safetensors` ids and masks, so that another mask leaves the
large file as it is. Both have the same `sample_offsets`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.dtypes import STORED_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError
from dspark_cache.fp8 import dequantise
from dspark_cache.schema import (
    FP8,
    HIDDEN,
    HIDDEN_SCALES,
    INPUT_IDS,
    LAST_HIDDEN,
    LAST_HIDDEN_SCALES,
    LOSS_MASK,
    SAMPLE_OFFSETS,
    SAMPLES_PREFIX,
    SCALES_OF,
    STATES_PREFIX,
)
from dspark_cache.shard_file import Header, file_bytes, open_cache_file
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dspark_cache.manifest import PathLike
    from dspark_cache.shard_file import ShardFile


_DECODE_BYTES = 1 << 18
"""8-bit numbers decoded at a time: they and what becomes of them stay in a core's cache."""


def shard_files(shard_index: int, *, ragged: bool) -> tuple[str, ...]:
    """Return the names of the files of a shard, that with the states first."""
    return (shard_name(shard_index), samples_name(shard_index)) if ragged else (shard_name(shard_index),)


def samples_name(shard_index: int) -> str:
    """Return the name of the file with ids and masks of a shard."""
    return shard_name(shard_index).replace(STATES_PREFIX, SAMPLES_PREFIX, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesForm:
    """How states are stored.

    Attributes:
        dtype: Key of `STORED_DTYPES`.
        hidden_dim: D.
        last_dim: H.
    """

    dtype: str
    hidden_dim: int
    last_dim: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StatesForm:
        """Return what a DSpark manifest says."""
        return cls(
            dtype=manifest["dtype"],
            hidden_dim=manifest["target_hidden_dim"],
            last_dim=manifest["target_last_hidden_dim"],
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states, scales included."""
        return sum(spec.num_bytes for spec in self.states(1).values())

    def states(self, tokens: int) -> dict[str, TensorSpec]:
        """Return the tensors of T tokens: [T, D], [T, H], and of fp8 their scales, [T, L] and [T, 1]."""
        dtype = STORED_DTYPES[self.dtype]
        specs = {
            HIDDEN: TensorSpec(dtype=dtype, shape=(tokens, self.hidden_dim)),
            LAST_HIDDEN: TensorSpec(dtype=dtype, shape=(tokens, self.last_dim)),
        }
        if self.dtype == FP8:
            layers = self.hidden_dim // self.last_dim
            specs[HIDDEN_SCALES] = TensorSpec(dtype=torch.float32, shape=(tokens, layers))
            specs[LAST_HIDDEN_SCALES] = TensorSpec(dtype=torch.float32, shape=(tokens, 1))
        return specs


def offsets_spec(num_samples: int) -> TensorSpec:
    """Return dtype and shape of the offsets of n samples, int64 [n+1]."""
    return TensorSpec(dtype=torch.int64, shape=(num_samples + 1,))


def feature_specs(tokens: int, num_samples: int, form: StatesForm) -> dict[str, TensorSpec]:
    """Return the tensors of a file with the states of n samples, and their offsets [n+1], in the file's order."""
    return {**form.states(tokens), SAMPLE_OFFSETS: offsets_spec(num_samples)}


def samples_specs(tokens: int, num_samples: int) -> dict[str, TensorSpec]:
    """Return the tensors of a shard's ids and masks: int32 [T], uint8 [T], offsets [n+1]."""
    return {
        INPUT_IDS: TensorSpec(dtype=torch.int32, shape=(tokens,)),
        LOSS_MASK: TensorSpec(dtype=torch.uint8, shape=(tokens,)),
        SAMPLE_OFFSETS: offsets_spec(num_samples),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedShape:
    """What every shard of a ragged cache has in common.

    Attributes:
        form: How states are stored.
        seq_length: S.
        pad_token_id: Id at padding.
    """

    form: StatesForm
    seq_length: int
    pad_token_id: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> RaggedShape:
        """Return what a manifest of version 2 says."""
        return cls(
            form=StatesForm.of(manifest), seq_length=manifest["seq_length"], pad_token_id=manifest["pad_token_id"]
        )

    def likely_header(self, num_samples: int) -> Callable[[int], Header]:
        """Return what gives, for a file of n samples' states, the header by its size, from which its tokens follow."""
        rest, token_bytes = _bytes_beside_tokens(self.form, num_samples)
        return lambda size: Header.of(feature_specs((size - rest) // token_bytes, num_samples, self.form))


@lru_cache
def _bytes_beside_tokens(form: StatesForm, num_samples: int) -> tuple[int, int]:
    """Return about the bytes of a file of n samples' states without any token, and those of a token."""
    return file_bytes(feature_specs(0, num_samples, form)), form.token_bytes


class RaggedShard:
    """Both open files of one shard; gives samples padded, as a padded cache would, or as they are."""

    def __init__(self, cache_dir: PathLike, shard_index: int, num_samples: int, shape: RaggedShape) -> None:
        """Open the files and check headers, sizes and offsets.

        Raises:
            CacheNotFoundError: A file is missing.
            CacheFormatError: A file is not as the manifest says; it is named.
        """
        self._shape = shape
        self._states = open_cache_file(f"{cache_dir}/{shard_name(shard_index)}", shape.likely_header(num_samples))
        self._states.require((LAST_HIDDEN,))
        tokens = (self._states.places[LAST_HIDDEN].spec.shape or (0,))[0]
        if not self._states.is_likely:
            self._states.expect(feature_specs(tokens, num_samples, shape.form), exactly=True)
        specs = samples_specs(tokens, num_samples)
        self._tokens = open_cache_file(f"{cache_dir}/{samples_name(shard_index)}", lambda _: Header.of(specs))
        if not self._tokens.is_likely:
            self._tokens.expect(specs, exactly=True)
        offsets, others = (file.read_bytes(SAMPLE_OFFSETS) for file in self.files)
        if offsets != others:
            raise CacheFormatError(f"{self._tokens.name}: its sample_offsets are not those of {self._states.name}")
        self._offsets = array("q", bytes(offsets))
        lengths = self.lengths()
        fits = min(lengths, default=1) > 0 and max(lengths, default=1) <= shape.seq_length
        if self._offsets[0] != 0 or self._offsets[-1] != tokens or not fits:
            raise CacheFormatError(
                f"{self._states.name}: sample_offsets do not cut {tokens} tokens into samples of 1 to "
                f"{shape.seq_length} tokens"
            )

    @property
    def files(self) -> tuple[ShardFile, ShardFile]:
        """The file of states and the file of ids and masks."""
        return self._states, self._tokens

    def lengths(self) -> list[int]:
        """Return the tokens of each sample."""
        return [stop - start for start, stop in pairwise(self._offsets)]

    def rows(self, key: str, row: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded) of a sample as they are stored."""
        first = self._offsets[row]
        file = self._tokens if key in (INPUT_IDS, LOSS_MASK) else self._states
        return file.read_rows(key, first + start, first + stop)

    def read_positions(self, key: str, row: int, start: int, into: torch.Tensor) -> None:
        """Fill `into` from token `start` of a sample on, with what a reader gets: int64 ids, states not in 8 bits."""
        first = self._offsets[row] + start
        if key in (INPUT_IDS, LOSS_MASK):
            into.copy_(self._tokens.read_rows(key, first, first + len(into)))
        elif self._shape.form.dtype != FP8:
            self._states.read_into(key, first, into)
        else:
            step = max(1, _DECODE_BYTES // self._states.places[key].spec.row_bytes)
            for begin in range(0, len(into), step):
                part = into[begin : begin + step]
                rows = (first + begin, first + begin + len(part))
                numbers, scales = (self._states.read_rows(name, *rows) for name in (key, SCALES_OF[key]))
                dequantise(numbers, scales, part)
