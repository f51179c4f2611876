"""Shards of the ragged layout (format version 2): two files each, which hold real tokens only.

`shard-NNNNNN.safetensors` has the states, `samples-NNNNNN.safetensors` ids and masks, so that another mask leaves the
large file as it is. Both have the same `sample_offsets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark_cache.errors import CacheFormatError
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS, TensorSpec
from dspark_cache.shard_file import open_cache_file
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from dspark_cache.manifest import PathLike
    from dspark_cache.shard_file import ShardFile


def samples_name(shard_index: int) -> str:
    """Return the name of the file with ids and masks of a shard."""
    return shard_name(shard_index).replace("shard-", "samples-", 1)


def offsets_spec(num_samples: int) -> TensorSpec:
    """Return dtype and shape of the offsets of n samples, int64 [n+1]."""
    return TensorSpec(dtype=torch.int64, shape=(num_samples + 1,))


def feature_specs(tokens: int, num_samples: int, sample: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors of a shard's states: [T, D], [T, H], offsets [n+1]; `sample` has the padded sample's."""
    specs = {key: TensorSpec(dtype=spec.dtype, shape=(tokens, *spec.shape[1:])) for key, spec in sample.items()}
    return {HIDDEN: specs[HIDDEN], LAST_HIDDEN: specs[LAST_HIDDEN], SAMPLE_OFFSETS: offsets_spec(num_samples)}


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
        sample: Dtype and shape of a padded sample's tensors, as the reader returns them.
        pad_token_id: Id at padding.
    """

    sample: dict[str, TensorSpec]
    pad_token_id: int

    @property
    def seq_length(self) -> int:
        """S."""
        return self.sample[INPUT_IDS].shape[0]


class RaggedShard:
    """Both open files of one shard; gives samples padded to S, as a padded cache would."""

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
        self._states.expect(feature_specs(tokens, num_samples, shape.sample), exactly=True)
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

    def read(self, row: int) -> dict[str, torch.Tensor]:
        """Return one sample, padded, in memory of its own."""
        start, stop = self._offsets[row : row + 2].tolist()
        sample = {}
        for key, spec in self._shape.sample.items():
            fill = self._shape.pad_token_id if key == INPUT_IDS else 0
            padded = torch.full(spec.shape, fill, dtype=spec.dtype)
            if key in (HIDDEN, LAST_HIDDEN):
                self._states.read_into(key, start, padded[: stop - start])
            else:
                padded[: stop - start] = self._tokens.read_rows(key, start, stop)
            sample[key] = padded
        return sample
