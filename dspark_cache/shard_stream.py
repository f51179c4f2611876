"""Reading a safetensors file once, from its first byte to its last, for who wants its digest and its values.

It comes in pieces through one buffer, and each is looked at while the processor's cache holds it. Of states, which are
nearly all of the bytes, only the largest magnitude of each row is kept: it is as finite and as zero as the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dspark_cache.errors import CacheFormatError
from dspark_cache.files import byte_view
from dspark_cache.fp8 import largest_magnitudes_
from dspark_cache.shard_file import physical_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dspark_cache.shard_file import ShardFile, TensorPlace

CHUNK_BYTES = 1 << 21
"""A piece has no more, unless one row has: it should fit into the cache of the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rows of one tensor that lie one after the other in a file.

    Attributes:
        key: The tensor's.
        start: Index of the first row.
        offset: Of the first byte in the file.
        num_bytes: All of them.
    """

    key: str
    start: int
    offset: int
    num_bytes: int


def cut_runs(places: Mapping[str, TensorPlace], widths: Mapping[str, int]) -> Iterator[Run]:
    """Cut a file's tensors into runs of whole rows, in the order of their bytes, each byte once.

    Args:
        places: Key to where its tensor lies.
        widths: Numbers of a row, which divide the tensor's last extent; of other keys each number is a row.
    """
    for key, place in sorted(places.items(), key=lambda item: item[1].offset):
        row_bytes = widths.get(key, 1) * place.spec.dtype.itemsize
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, place.spec.num_bytes // row_bytes, step):
            begin = start * row_bytes
            num_bytes = min(step * row_bytes, place.spec.num_bytes - begin)
            yield Run(key=key, start=start, offset=place.offset + begin, num_bytes=num_bytes)


def read_values(
    file: ShardFile, widths: Mapping[str, int], tell: Callable[[memoryview], object]
) -> dict[str, torch.Tensor]:
    """Read a whole file, with a buffer of `CHUNK_BYTES` or of one row beside what is returned.

    Args:
        file: The open file.
        widths: Numbers of a row of those tensors that are too large to keep; they divide the last extent.
        tell: Told of every byte of the file, in order.

    Returns:
        Key to its tensor [..., k * width], but [..., k] where it has a width: the largest magnitude of each row, not a
        number where the row holds one that is none.

    Raises:
        CacheFormatError: The file ends early, or what would be returned is more than this machine's memory.
    """
    values = _room(file, widths)
    size = max((run.num_bytes for run in cut_runs(file.places, widths)), default=0)
    buffer = torch.empty(size, dtype=torch.uint8)
    view = byte_view(buffer)
    _tell_header(file, tell)
    for run in cut_runs(file.places, widths):
        part = view[: run.num_bytes]
        file.read_at(run.offset, part)
        tell(part)
        rows = buffer[: run.num_bytes].view(values[run.key].dtype)
        if run.key in widths:
            rows = largest_magnitudes_(rows.view(-1, widths[run.key]))
        values[run.key].view(-1)[run.start : run.start + len(rows)] = rows
    return values


def _room(file: ShardFile, widths: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Return tensors for the values."""
    shapes = {
        key: (*place.spec.shape[:-1], place.spec.shape[-1] // widths[key]) if key in widths else place.spec.shape
        for key, place in file.places.items()
    }
    num_bytes = sum(place.spec.num_bytes // widths.get(key, 1) for key, place in file.places.items())
    if num_bytes > physical_memory():
        raise CacheFormatError(
            f"{file.name}: {num_bytes} bytes of ids, masks and magnitudes are more than the memory of this machine"
        )
    return {key: torch.empty(shape, dtype=file.places[key].spec.dtype) for key, shape in shapes.items()}


def _tell_header(file: ShardFile, tell: Callable[[memoryview], object]) -> None:
    """Tell of the bytes before the first tensor."""
    end = min((place.offset for place in file.places.values()), default=file.size)
    for offset in range(0, end, CHUNK_BYTES):
        part = memoryview(bytearray(min(CHUNK_BYTES, end - offset)))
        file.read_at(offset, part)
        tell(part)
