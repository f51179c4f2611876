"""Shards of the ragged layout (format version 2): two files each, which hold real tokens only.

`shard-NNNNNN.safetensors` has the states, `samples-NNNNNN.safetensors` ids and masks, so that another mask leaves the
large file as it is. Both have the same `sample_offsets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
    READ_DTYPES,
    SAMPLE_OFFSETS,
    SCALES_OF,
    STORED_DTYPES,
    TensorSpec,
)
from dspark_cache.shard_file import open_cache_file
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dspark_cache.manifest import PathLike
    from dspark_cache.shard_file import ShardFile


def samples_name(shard_index: int) -> str:
    """Return the name of the file with ids and masks of a shard."""
    return shard_name(shard_index).replace("shard-", "samples-", 1)


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


class RaggedShard:
    """Both open files of one shard; gives samples padded, as a padded cache would, or as they are."""

    def __init__(self, cache_dir: PathLike, shard_index: int, num_samples: int, shape: RaggedShape) -> None:
        """Open the files and check headers, sizes and offsets.

        Raises:
            CacheNotFoundError: A file is missing.
            CacheFormatError: A file is not as the manifest says; it is named.
        """
        self._shape = shape
        self._states = open_cache_file(Path(cache_dir) / shard_name(shard_index))
        self._tokens = open_cache_file(Path(cache_dir) / samples_name(shard_index))
        self._states.require((LAST_HIDDEN,))
        tokens = (self._states.places[LAST_HIDDEN].spec.shape or (0,))[0]
        self._states.expect(feature_specs(tokens, num_samples, shape.form), exactly=True)
        self._tokens.expect(samples_specs(tokens, num_samples), exactly=True)
        offsets = self._states.read_rows(SAMPLE_OFFSETS, 0, num_samples + 1)
        if not torch.equal(offsets, self._tokens.read_rows(SAMPLE_OFFSETS, 0, num_samples + 1)):
            raise CacheFormatError(f"{self._tokens.name}: its sample_offsets are not those of {self._states.name}")
        lengths = offsets.diff()
        fits = bool(((lengths > 0) & (lengths <= shape.seq_length)).all())
        if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or not fits:
            raise CacheFormatError(
                f"{self._states.name}: sample_offsets do not cut {tokens} tokens into samples of 1 to "
                f"{shape.seq_length} tokens"
            )
        self._offsets = offsets

    @property
    def files(self) -> tuple[ShardFile, ShardFile]:
        """The file of states and the file of ids and masks."""
        return self._states, self._tokens

    def length(self, row: int) -> int:
        """Return the tokens of a sample."""
        return int(self._offsets[row + 1] - self._offsets[row])

    def rows(self, key: str, row: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded) of a sample as they are stored."""
        first = int(self._offsets[row])
        file = self._tokens if key in (INPUT_IDS, LOSS_MASK) else self._states
        return file.read_rows(key, first + start, first + stop)

    def read(self, row: int, *, padded: bool) -> dict[str, torch.Tensor]:
        """Return one sample in memory of its own, with S positions or as many as it has tokens."""
        start, stop = self._offsets[row : row + 2].tolist()
        positions = self._shape.seq_length if padded else stop - start
        sample = {}
        for key in (INPUT_IDS, LOSS_MASK):
            fill = self._shape.pad_token_id if key == INPUT_IDS else 0
            sample[key] = torch.full((positions,), fill, dtype=torch.int64)
            sample[key][: stop - start] = self._tokens.read_rows(key, start, stop)
        for key in (HIDDEN, LAST_HIDDEN):
            width = self._states.places[key].spec.shape[1]
            sample[key] = torch.empty(positions, width, dtype=READ_DTYPES[self._shape.form.dtype])
            self._read_states(key, start, sample[key][: stop - start])
            sample[key][stop - start :] = 0
        return sample

    def _read_states(self, key: str, start: int, into: torch.Tensor) -> None:
        """Fill rows [T, ...] from token `start` of the shard on."""
        if self._shape.form.dtype != FP8:
            self._states.read_into(key, start, into)
            return
        stop = start + len(into)
        into.copy_(
            dequantise(self._states.read_rows(key, start, stop), self._states.read_rows(SCALES_OF[key], start, stop))
        )
