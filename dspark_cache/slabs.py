"""Shared memory in which worker processes hand batches over without a copy, and which they use again and again.

A loader makes the slabs before it starts its workers; each worker fills those that are its own. In the loader's
process a batch is a set of tensors on its slab, which is free again when the last of them is gone, there and in the
worker. Ids and masks are small and are copied out, so that to keep them keeps no slab.
"""

from __future__ import annotations

import itertools
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info

from dspark_cache.errors import SettingsError
from dspark_cache.files import byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dspark_cache.dtypes import TensorSpec

    Batch = dict[str, torch.Tensor]

_ALIGNMENT = 64
_COPIED_BELOW_BYTES = 1 << 20
_SHARED_MEMORY = Path("/dev/shm")


def slab_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of a slab that holds tensors."""
    return sum(_aligned(spec.num_bytes) for spec in specs.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class SlabBatch:
    """A batch on its way from a worker: which slab it is in, and where; tensors that are elsewhere come with it."""

    slab: int
    places: dict[str, tuple[int, torch.dtype, tuple[int, ...]]]
    others: Batch

    def pin_memory(self) -> SlabBatch:
        """Return itself: the loader pins what it takes out."""
        return self


class Slabs:
    """The slabs of all workers of a loader."""

    def __init__(self, num_workers: int, slabs_per_worker: int, size: int) -> None:
        """Make slabs of `size` bytes; a page is taken from the system when it is first written to.

        Raises:
            SettingsError: There is not as much shared memory.
        """
        count = num_workers * slabs_per_worker
        _ensure_shared_memory(count * size, num_workers)
        self._per_worker = slabs_per_worker
        self._size = size
        self._memory = _shared(max(1, count * size))
        self._free = _shared(count).fill_(1)
        self._taken: list[int] = []
        self._views: dict[int, list[weakref.ref[memoryview]]] = {}

    def tensors(self, specs: Mapping[str, TensorSpec]) -> Batch | None:
        """Return tensors, of any content, on a free slab of this worker; None if none is free or large enough."""
        worker = get_worker_info()
        slab = self._take(worker.id) if worker and slab_bytes(specs) <= self._size else None
        if slab is None:
            return None
        found, memory, start = {}, byte_view(self._memory), slab * self._size
        for key, spec in specs.items():
            view = memory[start : start + spec.num_bytes]
            self._views[slab].append(weakref.ref(view))
            found[key] = torch.frombuffer(view, dtype=spec.dtype).view(spec.shape)
            start += _aligned(spec.num_bytes)
        return found

    def _take(self, worker: int) -> int | None:
        flags = byte_view(self._free)
        for slab in range(worker * self._per_worker, (worker + 1) * self._per_worker):
            if flags[slab] and all(view() is None for view in self._views.get(slab, ())):
                flags[slab] = 0
                self._taken.append(slab)
                self._views[slab] = []
                return slab
        return None

    def _release(self, slab: int) -> None:
        byte_view(self._free)[slab] = 1

    def pack(self, batch: Batch) -> SlabBatch | Batch:
        """Return a batch as it is to be handed over; slabs of which it holds nothing are let go."""
        packed: SlabBatch | Batch = batch
        for slab in self._taken:
            begin = self._memory.data_ptr() + slab * self._size
            places = {
                key: (tensor.data_ptr() - begin, tensor.dtype, tuple(tensor.shape))
                for key, tensor in batch.items()
                if begin <= tensor.data_ptr() < begin + self._size and tensor.is_contiguous()
            }
            if places and packed is batch:
                packed = SlabBatch(slab, places, {key: batch[key] for key in batch.keys() - places.keys()})
            else:
                self._release(slab)
        self._taken.clear()
        return packed

    def unpack(self, packed: SlabBatch) -> Batch:
        """Return the batch that a worker has packed, in the order of its keys."""
        memory = byte_view(self._memory)[packed.slab * self._size :]
        large = [key for key, place in packed.places.items() if _num_bytes(place) >= _COPIED_BELOW_BYTES]
        release = _Countdown(len(large), lambda: self._release(packed.slab))
        batch = {}
        for key, (offset, dtype, shape) in packed.places.items():
            view = memory[offset : offset + _num_bytes(packed.places[key])]
            tensor = torch.frombuffer(view, dtype=dtype).view(shape)
            if key in large:
                weakref.finalize(view, release).atexit = False
            batch[key] = tensor if key in large else tensor.clone()
        if not large:
            self._release(packed.slab)
        return {**batch, **packed.others}


def _num_bytes(place: tuple[int, torch.dtype, tuple[int, ...]]) -> int:
    return torch.Size(place[2]).numel() * place[1].itemsize


class WorkersDone:
    """Tells workers that no more batches are asked for; stands in for the `Event` that torch makes for it.

    An `Event` is read under a lock, and a worker that is killed while it holds the lock leaves it locked: the loader,
    which sets the event when it ends, would wait for ever instead of naming the killed worker.
    """

    def __init__(self) -> None:
        """Make it, not set."""
        self._flag = _shared(1).fill_(0)

    def set(self) -> None:
        """Set it."""
        byte_view(self._flag)[0] = 1

    def is_set(self) -> bool:
        """Return whether it is set."""
        return bool(byte_view(self._flag)[0])


class _Countdown:
    """Calls a function when it was called itself as often as was said."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._count = count
        self._calls = itertools.count(1)  # tensors are freed by any thread
        self._then = then

    def __call__(self) -> None:
        if next(self._calls) == self._count:
            self._then()


def _shared(size: int) -> Any:
    # What torch's own collate calls in workers; every way of starting a process hands it over.
    storage: torch.UntypedStorage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _ensure_shared_memory(size: int, num_workers: int) -> None:
    if not _SHARED_MEMORY.is_dir():
        return
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if size > free:
        raise SettingsError(
            f"num_workers: {num_workers} workers need {size} bytes of shared memory for their batches, "
            f"{_SHARED_MEMORY} has {free} free: make it larger (docker run --shm-size), take smaller batches or fewer "
            "workers, or none and read_ahead=2, which needs no shared memory"
        )
