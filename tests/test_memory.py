"""Memory for batches: never that of a tensor somebody still holds, otherwise what is there already."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch

from dspark_cache.dtypes import TensorSpec
from dspark_cache.memory import PAGES_FROM_BYTES, BatchMemory, empty

LARGE = PAGES_FROM_BYTES // 4


def spec(count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=(count,))


def kept(memory: BatchMemory) -> list[int]:
    return sorted(len(pages) for _, pages in memory._buffers)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (LARGE - 1,), (LARGE,), (2, LARGE + 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_an_empty_tensor_has_memory_of_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = [empty(shape, dtype).fill_(number) for number in range(3)]
    for number, tensor in enumerate(tensors):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert bool((tensor == number).all())
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_large_memory_asks_for_huge_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("this system has huge pages switched off")
    tensor = empty((64 << 20,), torch.uint8)
    name = f"{tensor.data_ptr():x}-"
    smaps = Path("/proc/self/smaps").read_text().splitlines()
    start = next(number for number, line in enumerate(smaps) if line.startswith(name))
    flags = next(line for line in smaps[start:] if line.startswith("VmFlags"))
    assert " hg" in flags


def test_fresh_large_tensors_are_zero_and_said_to_be() -> None:
    memory = BatchMemory()
    tensors, zeros = memory.tensors({"large": spec(LARGE), "small": spec(LARGE - 1)})
    assert zeros == {"large"}
    assert not tensors["large"].any()


def test_what_nobody_holds_is_used_again_and_no_longer_said_to_be_zero() -> None:
    memory = BatchMemory()
    first, _ = memory.tensors({"a": spec(LARGE + 8)})
    place = first["a"].fill_(7).data_ptr()
    del first
    again, zeros = memory.tensors({"a": spec(LARGE)})
    assert again["a"].data_ptr() == place
    assert zeros == set()
    assert again["a"].untyped_storage().nbytes() == 4 * LARGE


@pytest.mark.parametrize(
    "part", [lambda t: t[3:4], lambda t: t.view(-1, 2)[0], lambda t: t.numpy(), lambda t: t.detach()]
)
def test_what_somebody_holds_a_part_of_is_not(part: object) -> None:
    memory = BatchMemory()
    tensors, _ = memory.tensors({"a": spec(LARGE)})
    place = tensors["a"].fill_(7).data_ptr()
    held = part(tensors["a"])  # type: ignore[operator]
    del tensors
    other, zeros = memory.tensors({"a": spec(LARGE)})
    assert other["a"].data_ptr() != place
    assert zeros == {"a"}
    other["a"].fill_(9)
    assert (held == 7).all()
    del held, other
    gc.collect()
    last, _ = memory.tensors({"a": spec(LARGE), "b": spec(LARGE)})
    assert place in {tensor.data_ptr() for tensor in last.values()}


def test_what_is_too_small_is_let_go_and_no_more_than_two_are_kept_beside_those_in_use() -> None:
    memory = BatchMemory()
    memory.tensors({name: spec(LARGE + size) for name, size in zip("abcd", (0, 1, 2, 3), strict=True)})
    assert kept(memory) == [4 * (LARGE + size) for size in (0, 1, 2, 3)]
    in_use, _ = memory.tensors({"a": spec(LARGE)})
    assert kept(memory) == [4 * (LARGE + size) for size in (0, 2, 3)]
    larger, _ = memory.tensors({"a": spec(LARGE + 9)})
    assert kept(memory) == [4 * LARGE, 4 * (LARGE + 9)]
    del in_use, larger


def test_the_smallest_that_fits_is_taken() -> None:
    memory = BatchMemory()
    first, _ = memory.tensors({"large": spec(2 * LARGE), "small": spec(LARGE)})
    places = {key: tensor.data_ptr() for key, tensor in first.items()}
    del first
    again, _ = memory.tensors({"small": spec(LARGE), "large": spec(2 * LARGE)})
    assert {key: tensor.data_ptr() for key, tensor in again.items()} == places


def test_another_process_gets_memory_of_its_own() -> None:
    memory = BatchMemory()
    memory.tensors({"a": spec(LARGE)})
    other = pickle.loads(pickle.dumps(memory))
    assert kept(other) == []
    assert set(other.tensors({"a": spec(LARGE)})[0]) == {"a"}
