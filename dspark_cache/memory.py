"""Host memory for what is read or computed, in huge pages where that pays, and used again where that is safe.

Fresh memory costs a page fault for every 4 KiB, which takes longer than to copy them. Huge pages make it cheap, memory
that was used before makes it free.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dspark_cache.dtypes import TensorSpec

PAGES_FROM_BYTES = 1 << 20
"""Smaller tensors come from the heap, whose pages are in use already."""
_SPARE = 2
"""Buffers that are kept for the next batch: more than one, since a batch has large tensors of several sizes."""


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in memory of its own, of any content."""
    size = math.prod(shape) * dtype.itemsize
    if size < PAGES_FROM_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(_pages(size), dtype=dtype).view(shape)


def _pages(size: int) -> mmap.mmap:
    """Return memory that the kernel fills with zeros when it is first touched."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class BatchMemory:
    """Memory for batches of a like size, each used again once nobody holds a tensor of it any more.

    Beside what is held it keeps at most two buffers, none larger than the largest tensor that was asked for.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        """Keep nothing yet; `pinned` memory is page-locked, and needs CUDA, which keeps it for itself."""
        self._pinned = pinned
        self._buffers: list[tuple[weakref.ref[memoryview], mmap.mmap]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        """Leave the memory behind; what another process gets is its own, and not page-locked."""
        return BatchMemory, ()

    def tensors(self, specs: Mapping[str, TensorSpec]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """Return a tensor for each of `specs`, and the keys of those that are zero already."""
        tensors, zeros = {}, set()
        for key, spec in specs.items():
            tensors[key], is_zero = self._tensor(spec)
            if is_zero:
                zeros.add(key)
        return tensors, zeros

    def _tensor(self, spec: TensorSpec) -> tuple[torch.Tensor, bool]:
        if self._pinned or spec.num_bytes < PAGES_FROM_BYTES:
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned), False
        view, is_zero = self._take(spec.num_bytes)
        return torch.frombuffer(view, dtype=spec.dtype).view(spec.shape), is_zero

    def _take(self, size: int) -> tuple[memoryview, bool]:
        """Return memory of `size` bytes, and whether it is zero."""
        with self._lock:
            free = sorted((pages for held, pages in self._buffers if held() is None), key=len)
            chosen = next((pages for pages in free if len(pages) >= size), None)
            pages = _pages(size) if chosen is None else chosen
            # What is too small now will be again; of the rest the largest serve most.
            spare = [] if chosen is None else [other for other in free if other is not chosen][-_SPARE:]
            view = memoryview(pages)[:size]
            kept = {id(other) for other in spare}
            self._buffers = [entry for entry in self._buffers if entry[0]() is not None or id(entry[1]) in kept]
            self._buffers.append((weakref.ref(view), pages))
        return view, chosen is None
