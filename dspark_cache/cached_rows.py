"""Rows of a cache that is there, as the source of another one: cut, with fewer layers, and checked by digest.

Used by conversions and comparisons, which read what no trainer does: samples without padding, dtypes as they lie.
"""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_cache.files import file_digest
from dspark_cache.manifest import is_ragged
from dspark_cache.reader import CachedDSparkDataset
from dspark_cache.schema import HIDDEN, HIDDEN_SCALES, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, TARGET_WEIGHTS_NAME
from dspark_cache.shard_file import open_cache_file
from dspark_cache.target_weights import target_weights_path
from dspark_cache.tokens import sample_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark_cache.shard_file import ShardFile


class CachedRows:
    """Rows of a cache; a sample is named by its index there.

    Of a padded cache a sample ends before the pad tokens at its end that are not supervised; where the cache promises
    zero states at padding, at its last state that is not zero. A shard's sha256 is compared with provenance.json when
    it is first used, which reads it once more, into the page cache.
    """

    def __init__(
        self,
        source: Path,
        *,
        layer_ids: list[int] | None = None,
        seq_length: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        """Open a cache.

        Args:
            source: Its folder.
            layer_ids: Layers to give, among those of the cache; None: all.
            seq_length: Positions to give at the start of each sample; None: all.
            pad_token_id: Id at padding, of a cache that does not say.

        Raises:
            CacheNotFoundError, CacheFormatError: It is refused by `CachedDSparkDataset`.
            SettingsError: It does not say how it is padded, and the caller does not either.
        """
        self.folder = CacheFolder(source)
        self.dataset = CachedDSparkDataset(source)
        self.manifest = self.folder.manifest
        self.dtype: str = self.manifest["dtype"]
        self.pad_token_id = self._known_pad_token_id(pad_token_id)
        there = self.manifest["target_layer_ids"]
        self._columns = None if layer_ids in (None, there) else [there.index(layer) for layer in layer_ids or ()]
        self._checked: set[int] = set()
        self._checking = threading.Lock()
        self._lengths = array("q", bytes(8 * len(self.dataset)))
        self._limit = min(seq_length or self.manifest["seq_length"], self.manifest["seq_length"])

    def _known_pad_token_id(self, given: int | None) -> int:
        known = self.folder.provenance.pad_token_id if self.folder.provenance else self.manifest.get("pad_token_id")
        if known is not None and given not in (None, known):
            raise SettingsError(f"--pad-token-id: {given}, but {self.folder.path} says {known}")
        found = known if known is not None else given
        if found is None:
            last = [int(self.dataset[index][INPUT_IDS][-1]) for index in range(min(len(self.dataset), 8))]
            raise SettingsError(
                f"{self.folder.path} does not say which token is at padding: pass --pad-token-id, the target's "
                f"tokenizer's pad_token_id, or 0 if it has none; the first samples end in the ids {last}"
            )
        return int(found)

    def stamps(self) -> list[list[Any]]:
        """Return name, size and time of change of the files of a cache that records no digests; else nothing."""
        if self.folder.provenance is not None:
            return []
        entries = sorted(self.folder.path.iterdir())
        return [[entry.name, entry.stat().st_size, entry.stat().st_mtime_ns] for entry in entries]

    def num_tokens(self, sample: int) -> int:
        """Return the tokens of a sample that are kept; they are looked for once, and 0 stands for not yet.

        Raises:
            CacheFormatError: A padded sample has no real token.
        """
        if not self._lengths[sample]:
            stored = self.dataset.stored_length(sample)
            length = stored if is_ragged(self.manifest) else self._real_length(sample, stored)
            self._lengths[sample] = min(length, self._limit)
        return self._lengths[sample]

    def _real_length(self, sample: int, positions: int) -> int:
        if self.folder.provenance is not None:
            length = self._first_zero(sample, positions)
        else:
            ids, mask = (self.dataset.stored_rows(key, sample, 0, positions) for key in (INPUT_IDS, LOSS_MASK))
            real = ((ids != self.pad_token_id) | (mask != 0)).nonzero()
            length = int(real[-1]) + 1 if len(real) else 0
        if length < 1:
            raise CacheFormatError(f"{self.folder.path}: sample {sample} has no real token, nothing but padding")
        return length

    def _first_zero(self, sample: int, positions: int) -> int:
        """Return the first position with a zero state: all after it are zero, all before it are not."""
        low, high = 0, positions
        while low < high:
            middle = (low + high) // 2
            if bool(self.dataset.stored_rows(LAST_HIDDEN, sample, middle, middle + 1).any()):
                low = middle + 1
            else:
                high = middle
        return low

    def key(self, sample: int) -> str:
        """Return the key of a sample's kept ids."""
        return sample_key(self.dataset.stored_rows(INPUT_IDS, sample, 0, self.num_tokens(sample)))

    def supervised(self, sample: int) -> int:
        """Count the supervised tokens of a sample that are kept."""
        return int(self.dataset.stored_rows(LOSS_MASK, sample, 0, self.num_tokens(sample)).sum(dtype=torch.int64))

    def rows(self, key: str, sample: int, start: int, stop: int) -> torch.Tensor:
        """Return tokens start (included) to stop (excluded), of the layers that are kept.

        Raises:
            CacheFormatError: The shard's bytes are not those that provenance.json records.
        """
        self._check(self.dataset.shard_of(sample))
        rows = self.dataset.stored_rows(key, sample, start, stop)
        if self._columns is None or key not in (HIDDEN, HIDDEN_SCALES):
            return rows
        layers = len(self.manifest["target_layer_ids"])
        return rows.view(len(rows), layers, -1)[:, self._columns].flatten(1)

    def features_of(self, samples: Sequence[int]) -> None:
        """Return nothing: files of another cache are not shared, they may be replaced there."""

    def open_weights(self) -> ShardFile:
        """Open the target weights.

        Raises:
            CacheFormatError: Their bytes are not those that provenance.json records.
        """
        file = open_cache_file(Path(target_weights_path(self.folder.path)))
        self._ensure_recorded(TARGET_WEIGHTS_NAME)
        return file

    def _check(self, shard: int) -> None:
        with self._checking:
            if shard not in self._checked:
                for name in self.folder.names_of(shard):
                    self._ensure_recorded(name)
                self._checked.add(shard)

    def _ensure_recorded(self, name: str) -> None:
        """Refuse a file that is not the one recorded; a cache of another producer records none."""
        if self.folder.provenance is None:
            return
        recorded, found = self.folder.recorded(name), file_digest(self.folder.path / name)
        if recorded is None or recorded.sha256 != found:
            raise CacheFormatError(
                f"{self.folder.path / name}: sha256 is {found}, provenance.json says "
                f"{recorded.sha256 if recorded else 'nothing'}: dspark-cache verify {self.folder.path}"
            )
