"""Reading a published cache: lazy, random access, refused at open if anything is not as its manifest says.

Opening reads the manifest, the folder's names and the header of each shard, never a sample. Samples are read by
position, in one copy: those of a batch into one tensor a key. Few files are open at a time; none crosses into another
process by pickling, and positional reads make inherited ones safe after a fork.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from dspark_cache.batch_reading import Padding, Piece, ReadThreads, Samples, cut_pieces
from dspark_cache.dtypes import READ_DTYPES, TensorSpec
from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_cache.identity import ensure_expected
from dspark_cache.manifest import (
    PathLike,
    is_ragged,
    manifest_path,
    read_manifest,
    read_offline_manifest,
    require_fields,
)
from dspark_cache.memory import BatchMemory, empty
from dspark_cache.pins import Pin, folder_digest
from dspark_cache.ragged import RaggedShape, RaggedShard
from dspark_cache.schema import (
    CACHE_KEYS,
    DSPARK_FORMAT_VERSION,
    DSPARK_NAME,
    HIDDEN,
    INPUT_IDS,
    LAST_HIDDEN,
    LOSS_MASK,
)
from dspark_cache.shard_file import Header, open_cache_file, physical_memory
from dspark_cache.shards import (
    existing_shard_indices,
    num_shards,
    shard_path,
    shard_rows,
    validate_contiguous_shards,
)
from dspark_cache.slabs import slab_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dspark_cache.shard_file import ShardFile
    from dspark_cache.slabs import Slabs

logger = logging.getLogger(__name__)

SLOW_SECONDS = 10.0
"""Opening a cache says how far it is as often, as on a network disk with many shards."""
MAX_OPEN_FILES = 16
"""Default bound: under a strict `ulimit -n` of 64 torch takes some 24 in a worker, for what it shares."""
READ_THREADS = 4
"""Default: more keep a network busier."""


class CachedTensorDataset(Dataset[dict[str, torch.Tensor]]):
    """Read samples of a cache of fixed-key safetensors shards by index.

    Items are dicts of `disk_keys`, each the sample's tensor without the shard's first dimension. Negative indices
    count from the end. Instances pickle and work in forked and spawned workers, also after items were read.

    `__getitems__`, by which a `DataLoader` asks for a whole batch, reads samples straight into the batch: in a worker
    process into shared memory, with `pin_memory` into page-locked memory.

    Attributes:
        manifest: The checked manifest, of the whole cache.
        shards: The shards that are read, all or a share of them.
        num_samples: Samples in those shards.
        shard_size: Samples of every shard but the last; of a ragged cache, of its largest shard.
        slabs: In a worker process, where batches go.
    """

    def __init__(
        self,
        cache_dir: PathLike,
        cache_name: str,
        format_version: int,
        disk_keys: tuple[str, ...],
        *,
        shards: range | None = None,
        max_open_files: int = MAX_OPEN_FILES,
        read_threads: int = READ_THREADS,
        pin_memory: bool = False,
    ) -> None:
        """Open the cache and check its manifest, names, sizes and headers.

        Args:
            cache_dir: Folder of the cache.
            cache_name: Kind of cache, for messages.
            format_version: Version of the manifest that is read.
            disk_keys: Keys that every shard has.
            shards: The shards to read, consecutive; the folder may lack the others. Samples are counted from the first
                of them. None: all.
            max_open_files: Most shard files kept open.
            read_threads: Threads of each process that read at a time.
            pin_memory: Read into page-locked memory, outside of worker processes; needs CUDA.

        Raises:
            CacheNotFoundError: No manifest or no such folder.
            CacheFormatError: Anything is not as the manifest says; the file is named.
            SettingsError: `shards` are no such range, or `pin_memory` without CUDA.
            ValueError: `max_open_files` or `read_threads` below 1.
        """
        if max_open_files < 1:
            raise ValueError(f"max_open_files must be at least 1, found {max_open_files}")
        if pin_memory and not torch.cuda.is_available():
            raise SettingsError("pin_memory: page-locked memory needs CUDA, which is not available here")
        self._threads = ReadThreads(read_threads)
        self._memory = BatchMemory(pinned=pin_memory)
        self.slabs: Slabs | None = None
        self.cache_dir = str(cache_dir)
        self.disk_keys = tuple(disk_keys)
        pin = folder_digest(Path(cache_dir))
        self.manifest = self._read_manifest(cache_name, format_version)
        self._max_open_files = max_open_files
        self._open_handles: OrderedDict[int, Any] = OrderedDict()
        self._renew_lock()
        self._find_shards(cache_name, shards)
        self._pin = Pin(Path(cache_dir), pin, self._check_headers())
        self._pin.ensure_same_folder()

    @property
    def _files_per_shard(self) -> int:
        return 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Read one sample.

        Raises:
            IndexError: `index` is outside -len..len-1.
            TypeError: `index` is no integer.
            CacheFormatError: The shard is no longer what it was when the cache was opened.
            CacheNotFoundError: The shard is gone.
        """
        return self._read([self._position(index)], None)[0]

    def __getitems__(self, indices: Sequence[int]) -> Samples:
        """Read samples; their tensors share the memory of one batch. Errors as for a single one."""
        return self._read([self._position(index) for index in indices], self.slabs)

    def _read(self, positions: Sequence[int], slabs: Slabs | None) -> Samples:
        specs = self._batch_specs(len(positions), self._width(positions))
        tensors = slabs.tensors(specs) if slabs else None
        batch, zeros = (tensors, set()) if tensors else self._memory.tensors(specs)
        samples, padding = self._samples(batch, positions, zeros)
        step = max(1, self._max_open_files // self._files_per_shard)
        for start in range(0, len(positions), step):
            pieces, padding = padding, []
            for position, sample in zip(positions[start : start + step], samples[start : start + step], strict=True):
                shard, row = self._locate(position)
                file, length = self._handle(shard), self.stored_length(position)
                for key, tensor in sample.items():
                    pieces += cut_pieces(file, key, row, tensor if length is None else tensor[:length])
            self._threads.read(pieces)
        return samples

    def _position(self, index: int) -> int:
        position = operator.index(index)
        if not -self.num_samples <= position < self.num_samples:
            raise IndexError(f"sample {position} of a cache of {self.num_samples}")
        return position % self.num_samples

    def batch_bytes(self, batch_size: int) -> int:
        """Return the bytes of the largest batch of so many samples."""
        return slab_bytes(self._batch_specs(batch_size, self._width(range(self.num_samples))))

    def _batch_specs(self, batch_size: int, width: int | None) -> dict[str, TensorSpec]:
        """Return the tensors of a batch; `width` takes the place of the samples' first extent, unless it is None."""
        return {
            key: (spec if width is None else spec.resized(width)).stacked(batch_size)
            for key, spec in self._sample_specs.items()
        }

    def _width(self, positions: Sequence[int]) -> int | None:  # noqa: ARG002
        """Return the positions of a batch of these samples, None if those are of any samples the same."""
        return None

    def _samples(
        self,
        batch: dict[str, torch.Tensor],
        positions: Sequence[int],
        zeros: set[str],  # noqa: ARG002
    ) -> tuple[Samples, list[Piece]]:
        """Cut a batch that is to be filled into samples.

        Returns:
            The samples, and what no file fills: padding, but of `zeros`, which are zero already.
        """
        return Samples([{key: batch[key][row] for key in self.disk_keys} for row in range(len(positions))], batch), []

    def stored_length(self, index: int) -> int | None:
        """Return the stored positions of sample `index` (0..len-1); None: the whole of its tensors."""

    def ensure_unchanged(self) -> None:
        """Refuse a cache that was replaced since it was opened.

        Raises:
            CacheFormatError: Manifest or provenance are others.
        """
        self._pin.ensure_same_folder()

    @property
    def digest(self) -> str:
        """sha256 of manifest and provenance, which between them name every byte of a cache of ours."""
        return self._pin.digest

    @property
    def share(self) -> list[int] | None:
        """The first shard that is read and the one after the last; None: all are read."""
        return None if self.num_samples == self._num_all else [self.shards.start, self.shards.stop]

    @property
    def shard_samples(self) -> list[int]:
        """Number of samples of each shard that is read."""
        return [len(self.samples_of(shard)) for shard in self._shard_indices]

    def shard_of(self, index: int) -> int:
        """Return the number of the shard that holds sample `index` (0..len-1)."""
        return self._locate(index)[0]

    def samples_of(self, shard: int) -> range:
        """Return the indices of the samples of shard `shard`, one of `shards`."""
        start, stop = self._start_of(shard) - self._first_sample, self._start_of(shard + 1) - self._first_sample
        return range(start, stop)

    def _start_of(self, shard: int) -> int:
        """Return the first sample of a shard in the whole cache; after the last shard, the number of samples."""
        return min(shard * self.shard_size, self._num_all)

    def _locate(self, position: int) -> tuple[int, int]:
        """Return shard and row of a sample."""
        return divmod(self._first_sample + position, self.shard_size)

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files and the lock behind: the other process opens its own."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_open_handles", "_lock", "slabs")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without open files."""
        self.__dict__.update(state)
        self.slabs = None
        self._open_handles = OrderedDict()
        self._renew_lock()

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()
        self._lock_owner = os.getpid()

    def _read_manifest(self, cache_name: str, format_version: int) -> dict[str, Any]:
        return read_offline_manifest(self.cache_dir, cache_name, format_version)

    def _find_shards(self, cache_name: str, share: range | None) -> None:
        """Take the sizes from the manifest and check the names of the shards that are read."""
        self._num_all, self.shard_size = self._sizes()
        count = num_shards_of(self.manifest)
        if share is None:
            names = (count, 1) if is_ragged(self.manifest) else (self._num_all, self.shard_size)
            validate_contiguous_shards(self.cache_dir, cache_name, *names)
        else:
            ensure_share(share, count)
            _ensure_shards_of_share(self.cache_dir, cache_name, share, count)
        self.shards = range(count) if share is None else share
        self._shard_indices = list(self.shards)
        self._first_sample = self._start_of(self.shards.start)
        self.num_samples: int = self._start_of(self.shards.stop) - self._first_sample

    def _sizes(self) -> tuple[int, int]:
        """Return the number of samples of the whole cache, and that of its largest shard."""
        require_fields(self.manifest, ("num_samples", "shard_size"), name=manifest_path(self.cache_dir))
        return self.manifest["num_samples"], self.manifest["shard_size"]

    def _handle(self, shard_index: int) -> Any:
        """Return the open shard, opening and checking it if need be; the least recently used one goes."""
        if self._lock_owner != os.getpid():
            # A forked process may have inherited the lock from a thread that it does not have.
            self._renew_lock()
        with self._lock:
            file = self._open_handles.get(shard_index)
            if file is None:
                with self._pin.explaining():
                    file = self._open(shard_index)
                self._pin.ensure_same(shard_index - self.shards.start, self._files_of(file))
                self._open_handles[shard_index] = file
                if len(self._open_handles) * self._files_per_shard > max(self._max_open_files, self._files_per_shard):
                    self._open_handles.popitem(last=False)
            self._open_handles.move_to_end(shard_index)
            return file

    def _open(self, shard_index: int) -> Any:
        """Open a shard and compare its header with what every shard of this cache must have."""
        rows = shard_rows(self._num_all, self.shard_size, shard_index)
        header = self._headers.get(rows)
        if header is None:
            header = Header.of({key: spec.stacked(rows) for key, spec in self._sample_specs.items()})
            self._headers[rows] = header
        file = open_cache_file(Path(shard_path(self.cache_dir, shard_index)), lambda _: header)
        if not file.is_likely:
            file.expect({key: place.spec for key, place in header.places.items()}, exactly=False)
        return file

    def _files_of(self, file: Any) -> tuple[ShardFile, ...]:
        """Return the files that an open shard consists of."""
        return (file,)

    def _check_headers(self) -> array[int]:
        """Open each shard once; return the states of their files. The first says what a sample is, if nobody else."""
        self._headers: dict[int, Header] = {}
        self._sample_specs = self._specs_of_manifest()
        if not self._sample_specs and self._shard_indices:
            self._sample_specs = self._specs_of_first_shard()
        ensure_sample_fits(self._sample_specs, self.cache_dir)
        states = array("Q")
        said = time.monotonic()
        for number, shard_index in enumerate(self._shard_indices):
            if time.monotonic() - said >= SLOW_SECONDS:
                said = time.monotonic()
                logger.warning("%s: opened %d of %d shards", self.cache_dir, number, len(self._shard_indices))
            shard = self._open(shard_index)
            self._note_lengths(shard)
            for file in self._files_of(shard):
                states.extend(file.state)
        return states

    def _note_lengths(self, shard: Any) -> None:
        """Take the lengths of a shard's samples, where they are not all the same."""

    def _specs_of_manifest(self) -> dict[str, TensorSpec]:
        """Return dtype and shape of one sample's tensors as far as the manifest fixes them all, or nothing."""
        return {}

    def _specs_of_first_shard(self) -> dict[str, TensorSpec]:
        file = open_cache_file(Path(shard_path(self.cache_dir, self.shards.start)))
        missing = [key for key in self.disk_keys if key not in file.places]
        scalars = [key for key in self.disk_keys if key in file.places and not file.places[key].spec.shape]
        if missing or scalars:
            raise CacheFormatError(f"{file.name}: missing required keys {missing}, keys without samples {scalars}")
        specs = {key: file.places[key].spec for key in self.disk_keys}
        return {key: TensorSpec(dtype=spec.dtype, shape=spec.shape[1:]) for key, spec in specs.items()}


def num_shards_of(manifest: Mapping[str, Any]) -> int:
    """Return how many shards a cache has by its manifest."""
    if is_ragged(manifest):
        return len(manifest["shard_samples"])
    return num_shards(manifest["num_samples"], manifest["shard_size"])


def ensure_share(share: range, count: int) -> None:
    """Refuse what is no run of shards 0..count-1.

    Raises:
        SettingsError: No range, empty, of another step than 1, or beyond the shards that there are.
    """
    is_run = isinstance(share, range) and share.step == 1
    if not is_run or not 0 <= share.start < share.stop <= count:
        raise SettingsError(
            f"shards: expected a range of step 1 with at least one of the shards 0..{count - 1}, such as "
            f"range(0, {min(count, 2)}), found {share!r:.80}"
        )


def _ensure_shards_of_share(cache_dir: str, cache_name: str, share: range, count: int) -> None:
    """Refuse a folder that lacks shards of a share, or has shards that the cache does not have."""
    found = existing_shard_indices(cache_dir)
    missing = [index for index in share if index not in found]
    surplus = sorted(index for index in found if index >= count)
    if missing or surplus:
        raise CacheFormatError(
            f"the {cache_name} cache in {cache_dir} must have shards {share.start} to {share.stop - 1} of "
            f"0..{count - 1}; missing shard indices {missing[:10]}, unexpected shard indices {surplus[:10]}"
        )


_SPEC_FIELDS = ("dtype", "seq_length", "target_hidden_dim", "target_last_hidden_dim")


class CachedDSparkDataset(CachedTensorDataset):
    """Read samples of a DSpark cache.

    Items: `input_ids` [S] and `loss_mask` [S] int64, `target_hidden_states` [S, D] and
    `target_last_hidden_states` [S, H] in the cache's dtype, bf16 where that is fp8. Positions past a sample's end hold
    the pad token, mask 0 and, in caches of this producer, zero states; with `padded=False` there are none of them, and
    the first extent is the sample's own T.
    """

    def __init__(
        self,
        cache_dir: PathLike,
        *,
        expect: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        shards: range | None = None,
        max_open_files: int = MAX_OPEN_FILES,
        padded: bool = True,
        read_threads: int = READ_THREADS,
        pin_memory: bool = False,
    ) -> None:
        """Open the cache and check its manifest, names, sizes and headers.

        Args:
            cache_dir: Folder of the cache.
            expect: Manifest fields that must have these values, or the path of a params.yaml whose explicit
                values are compared.
            shards: The shards to read, consecutive (`range(10, 20)`); the folder may lack the others. Samples are
                counted from the first of them. None: all.
            max_open_files: Most shard files kept open.
            padded: Fill samples up to S positions; False needs the ragged layout.
            read_threads: Threads of each process that read at a time.
            pin_memory: Read into page-locked memory, outside of worker processes; needs CUDA.

        Raises:
            CacheNotFoundError: No manifest or no such folder.
            CacheFormatError: Incomplete, anything is not as the manifest says, or `expect` differs.
            SettingsError: `expect` has unknown keys or cannot be read; `shards` are no such range; or unpadded samples
                of a padded cache.
        """
        self._expect = expect
        self._padded = padded
        self._lengths = array("i")
        super().__init__(
            cache_dir,
            DSPARK_NAME,
            DSPARK_FORMAT_VERSION,
            CACHE_KEYS,
            shards=shards,
            max_open_files=max_open_files,
            read_threads=read_threads,
            pin_memory=pin_memory,
        )
        if not padded and not is_ragged(self.manifest):
            raise SettingsError(
                f"{self.cache_dir} is padded: it does not say how long its samples are; dspark-cache convert "
                "--layout ragged makes a cache that does"
            )

    def _read_manifest(self, cache_name: str, format_version: int) -> dict[str, Any]:  # noqa: ARG002
        manifest = read_manifest(self.cache_dir)
        if self._expect is not None:
            ensure_expected(manifest, self._expect, cache_dir=self.cache_dir)
        return manifest

    def _specs_of_manifest(self) -> dict[str, TensorSpec]:
        if any(field not in self.manifest for field in _SPEC_FIELDS):
            return {}
        return sample_specs(self.manifest)

    @property
    def _files_per_shard(self) -> int:
        return 2 if is_ragged(self.manifest) else 1

    def _files_of(self, file: Any) -> tuple[ShardFile, ...]:
        return file.files if isinstance(file, RaggedShard) else super()._files_of(file)

    def _sizes(self) -> tuple[int, int]:
        if not is_ragged(self.manifest):
            return super()._sizes()
        counts = self.manifest["shard_samples"]
        self._starts = [0, *accumulate(counts)]
        return self.manifest["num_samples"], max(counts, default=1)

    def _start_of(self, shard: int) -> int:
        return self._starts[shard] if is_ragged(self.manifest) else super()._start_of(shard)

    def _locate(self, position: int) -> tuple[int, int]:
        if not is_ragged(self.manifest):
            return super()._locate(position)
        index = self._first_sample + position
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def _open(self, shard_index: int) -> Any:
        if not is_ragged(self.manifest):
            return super()._open(shard_index)
        shape = RaggedShape.of(self.manifest)
        return RaggedShard(self.cache_dir, shard_index, self.manifest["shard_samples"][shard_index], shape)

    def _note_lengths(self, shard: Any) -> None:
        if isinstance(shard, RaggedShard):
            self._lengths.extend(shard.lengths())

    def _width(self, positions: Sequence[int]) -> int | None:
        if self._padded:
            return None
        whole = len(positions) == self.num_samples
        return max(self._lengths if whole else map(self._lengths.__getitem__, positions), default=0)

    def _samples(
        self, batch: dict[str, torch.Tensor], positions: Sequence[int], zeros: set[str]
    ) -> tuple[Samples, list[Piece]]:
        if not is_ragged(self.manifest):
            return super()._samples(batch, positions, zeros)
        lengths, pad = [self._lengths[position] for position in positions], self.manifest["pad_token_id"]
        fills = dict.fromkeys(CACHE_KEYS, 0) | {INPUT_IDS: pad}
        padding = [
            piece
            for key, fill in fills.items()
            if fill or key not in zeros
            for row, length in zip(batch[key], lengths, strict=True)
            if length < len(row)
            for piece in cut_pieces(Padding(fill), key, 0, row[length:])
        ]
        ends = [None if self._padded else length for length in lengths]
        samples = [{key: batch[key][row, :end] for key in CACHE_KEYS} for row, end in enumerate(ends)]
        return Samples(samples, batch, None if self._padded else pad), padding

    def stored_length(self, index: int) -> int:
        """Return the stored positions of sample `index` (0..len-1): its tokens, or S in a padded cache."""
        length: int = self._lengths[index] if is_ragged(self.manifest) else self._sample_specs[INPUT_IDS].shape[0]
        return length

    def stored_rows(self, key: str, index: int, start: int, stop: int) -> torch.Tensor:
        """Return positions start (included) to stop (excluded) of a sample as its file has them, scales of fp8 too."""
        shard, row = self._locate(index)
        file = self._handle(shard)
        if isinstance(file, RaggedShard):
            return file.rows(key, row, start, stop)
        spec = self._sample_specs[key]
        rows = empty((stop - start, *spec.shape[1:]), spec.dtype)
        file.read_positions(key, row, start, rows)
        return rows


def sample_specs(manifest: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Return dtype and shape of one padded sample's tensors as a full DSpark manifest says."""
    length, dtype = manifest["seq_length"], READ_DTYPES[manifest["dtype"]]
    return {
        INPUT_IDS: TensorSpec(dtype=torch.int64, shape=(length,)),
        LOSS_MASK: TensorSpec(dtype=torch.int64, shape=(length,)),
        HIDDEN: TensorSpec(dtype=dtype, shape=(length, manifest["target_hidden_dim"])),
        LAST_HIDDEN: TensorSpec(dtype=dtype, shape=(length, manifest["target_last_hidden_dim"])),
    }


def ensure_sample_fits(specs: Mapping[str, TensorSpec], cache_dir: str) -> None:
    """Refuse a cache of which one sample is larger than this machine's memory: its manifest may be anybody's.

    Raises:
        CacheFormatError: It is.
    """
    size = sum(spec.num_bytes for spec in specs.values())
    if size > physical_memory():
        raise CacheFormatError(
            f"{cache_dir}: a sample has {size} bytes by the manifest, more than the {physical_memory()} of this "
            "machine's memory"
        )
