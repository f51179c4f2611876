"""Reading under fault: a cache replaced in mid-epoch, few open files, killed workers, many readers at once.

Whatever happens, a reader gives the samples of the cache that it opened, or an error that names what is wrong.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, get_worker_info

from dspark_cache import CachedDSparkDataset, build_cached_dspark_dataloader, read_manifest, write_manifest
from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.loaders import build_cached_dataloader, collate_dspark
from dspark_cache.ragged import samples_name
from dspark_cache.reader import MAX_OPEN_FILES
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, SAMPLE_OFFSETS
from dspark_cache.shards import shard_name
from dspark_cache.verify import verify_cache
from tests.caches import equal, make_ragged, record_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from multiprocessing.connection import Connection

    MakeCache = Callable[..., Path]
    Sample = dict[str, torch.Tensor]

LAYOUTS = ("padded", "ragged")
WORKERS_READ_AHEAD = 4
"""Two workers, two batches each."""
HANG_SECONDS = 120

DIED = r"DataLoader worker \((pid|pid\(s\)) \d+\) (is killed by signal: Killed|exited unexpectedly)"
"""What torch says of a dead worker: the first if it is told by a signal, the second if it looked itself."""

forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def digest(samples: Iterable[Sample]) -> str:
    """Return the sha256 of samples in their order."""
    found = hashlib.sha256()
    for sample in samples:
        for key in sorted(sample):
            found.update(sample[key].contiguous().view(torch.uint8).numpy())
    return found.hexdigest()


def rows(batches: Iterable[Sample]) -> Iterator[Sample]:
    """Take batches apart into samples."""
    for batch in batches:
        for row in range(len(batch[INPUT_IDS])):
            yield {key: tensor[row] for key, tensor in batch.items()}


@pytest.fixture(scope="module", autouse=True)
def _quick_processes() -> None:
    """Let processes of the fork server have torch imported, which takes longer than what they do."""
    multiprocessing.set_forkserver_preload([__name__])


def run(target: Callable[[Path], Any], folder: Path) -> Any:
    """Run a function in a process of its own; return what it returns. One that hangs is a failure."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, target, folder))
    process.start()
    sender.close()
    try:
        assert receiver.poll(HANG_SECONDS), f"{target} hangs"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


def _answer(sender: Connection, target: Callable[[Path], Any], folder: Path) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody's fork server started
    sender.send(target(folder))


def make(make_cache: MakeCache, layout: str, num_samples: int, shard_size: int) -> Path:
    """Write a cache with provenance in either layout."""
    folder = make_cache(num_samples, shard_size)
    if layout == "ragged":
        counts = [min(shard_size, num_samples - start) for start in range(0, num_samples, shard_size)]
        folder = make_ragged(folder, counts)
    record_files(folder)
    return folder


def make_other(folder: Path) -> Path:
    """Copy a cache and change every number in its shards: the manifest is the same, no sample is."""
    other = folder.with_name("other")
    shutil.copytree(folder, other)
    for path in other.glob("s*-*.safetensors"):
        tensors = load_file(path)
        save_file({key: value if key == SAMPLE_OFFSETS else value + 1 for key, value in tensors.items()}, path)
    record_files(other)
    return other


# --- a cache that is replaced in mid-epoch ------------------------------------------------------------------------


def replace_folder(folder: Path, other: Path) -> None:
    """Put another folder in place by renames, as `dvc repro` does."""
    folder.rename(folder.with_name("aside"))
    other.rename(folder)


def replace_files(folder: Path, other: Path, pattern: str = "*") -> None:
    """Remove files, then link others in their place, as `dvc checkout` does."""
    names = sorted(path.name for path in other.glob(pattern))
    for name in names:
        (folder / name).unlink()
    for name in names:
        (folder / name).hardlink_to(other / name)


def remove_folder(folder: Path, _other: Path) -> None:
    shutil.rmtree(folder)


def remove_files(folder: Path, _other: Path) -> None:
    """Remove the shards, as `dvc checkout` does before it links others."""
    for path in folder.glob("s*-*.safetensors"):
        path.unlink()


def copy_files(folder: Path, _other: Path) -> None:
    """Put the same bytes in place under another inode and time."""
    for path in sorted(folder.iterdir()):
        shutil.copy(path, path.with_name("copy"))
        path.with_name("copy").rename(path)


def touch_files(folder: Path, _other: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, ns=(1, 1))


def replace_by_another_shape(folder: Path, other: Path) -> None:
    """Put a cache in place whose shards have a sample more each."""
    for path in other.glob("s*-*.safetensors"):
        save_file({key: torch.cat([value, value[-1:]]) for key, value in load_file(path).items()}, path)
    replace_folder(folder, other)


FILE = r"/s\w+-00000\d\.safetensors"
REPLACED = "was replaced while it was in use: manifest.json or provenance.json is another; open the cache again$"
OTHER_BYTES = (
    rf"was changed while it was in use: [^:]*{FILE} is another file with another sha256 than provenance\.json records; "
    "open the cache again$"
)
GONE = rf"was changed while it was in use: no such file: \S*{FILE}; open it again$"
OTHER_SHAPE = rf"was changed while it was in use: [^:]*{FILE}: \w+: expected .*; open it again$"

WAYS: dict[str, tuple[Callable[[Path, Path], None], str, str, type[Exception]]] = {
    "the folder": (replace_folder, "s*-*", REPLACED, CacheFormatError),
    "every file": (replace_files, "s*-*", REPLACED, CacheFormatError),
    "shards only": (partial(replace_files, pattern="s*-*"), "s*-*", OTHER_BYTES, CacheFormatError),
    "one shard": (partial(replace_files, pattern="s*-000001.*"), "s*-000001.*", OTHER_BYTES, CacheFormatError),
    "another shape": (replace_by_another_shape, "s*-*", OTHER_SHAPE, CacheFormatError),
    "folder removed": (remove_folder, "s*-*", GONE, CacheNotFoundError),
    "shards removed": (remove_files, "s*-*", GONE, CacheNotFoundError),
    "same bytes": (copy_files, "", "", CacheFormatError),
    "touched": (touch_files, "", "", CacheFormatError),
}
"""How a cache is replaced, which of its files are others then, and what is said of a shard that is not open."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_replaced_after_any_sample_is_refused_or_gives_its_old_samples(
    make_cache: MakeCache, tmp_path: Path, way: str, layout: str
) -> None:
    """Shards that are open go on giving the old samples; every other one is refused, each time it is asked for."""
    replace, pattern, words, kind = WAYS[way]
    original = make(make_cache, layout, 6, 2)
    other = make_other(original)
    expected = [CachedDSparkDataset(original)[index] for index in range(6)]
    replaced = {int(path.name.split("-")[1][:6]) for path in original.glob(pattern)} if pattern else set()
    folder, spare = tmp_path / "cache", tmp_path / "spare"
    for bound in (1, 4):
        for after in range(7):
            for path in (folder, spare, tmp_path / "aside"):
                shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(original, folder)
            shutil.copytree(other, spare)
            dataset = CachedDSparkDataset(folder, max_open_files=bound)
            assert all(equal(dataset[index], expected[index]) for index in range(after))
            replace(folder, spare)
            for index in range(6):
                if dataset.shard_of(index) in replaced - dataset._open_handles.keys():
                    with pytest.raises(kind, match=f"^{re.escape(str(folder))} {words}"):
                        dataset[index]
                else:
                    assert equal(dataset[index], expected[index])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_two_caches_open_only_for_verify_to_tell(make_cache: MakeCache, layout: str) -> None:
    """What was replaced before the opening has the right names and sizes; only its digest is another."""
    folder = make(make_cache, layout, 6, 2)
    replace_files(folder, make_other(folder), f"{shard_name(1)}*")
    assert len(CachedDSparkDataset(folder)) == 6
    (finding,) = verify_cache(CacheFolder(folder), "bytes").findings
    assert str(finding).startswith(f"[bytes] {shard_name(1)}: sha256 is ")


def test_a_shard_cut_short_under_an_open_file_is_named(make_cache: MakeCache) -> None:
    """A mapped file would kill the process here."""
    folder = make(make_cache, "padded", 4, 4)
    dataset = CachedDSparkDataset(folder)
    assert len(dataset[0]) == 4
    os.truncate(folder / shard_name(0), 700)
    name = re.escape(str(folder / shard_name(0)))
    with pytest.raises(CacheFormatError, match=rf"^{name} ends at byte \d+, \d+ bytes are missing$"):
        dataset[3]


# --- replaced under a dataloader ----------------------------------------------------------------------------------


Ended = tuple[type[Exception], str] | None


def read_on(loader: Iterable[Sample], after: int, replace: Callable[[], None]) -> tuple[list[Sample], Ended]:
    """Read an epoch, replacing the cache after some batches; return the samples that came and the error, if any."""
    batches = iter(loader)
    found = list(rows(islice(batches, after)))
    replace()
    try:
        for batch in batches:
            found += rows([batch])
    except (CacheFormatError, CacheNotFoundError) as error:
        # Else its frames keep torch's iterator, and the next loader's forked workers inherit it.
        traceback.clear_frames(error.__traceback__)
        return found, (type(error), str(error).strip())
    return found, None


def used(folder: Path) -> CachedDSparkDataset:
    """Open a cache and read from it, so that workers inherit an open file."""
    dataset = CachedDSparkDataset(folder, max_open_files=1)
    assert len(dataset[-1]) == 4
    return dataset


@forks
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", ["the folder", "every file", "shards only", "folder removed"])
def test_the_training_process_hears_that_its_cache_was_replaced(
    make_cache: MakeCache, tmp_path: Path, way: str, num_workers: int
) -> None:
    """After any number of batches: those that come are the old samples in order, and the epoch never ends early."""
    replace, _, words, kind = WAYS[way]
    original = make(make_cache, "padded", 9, 1)
    other = make_other(original)
    expected = [CachedDSparkDataset(original)[index] for index in range(9)]
    folder, spare = tmp_path / "cache", tmp_path / "spare"
    ahead = WORKERS_READ_AHEAD if num_workers else 0
    for after in range(10):
        for path in (folder, spare, tmp_path / "aside"):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, folder)
        shutil.copytree(other, spare)
        loader = build_cached_dataloader(used(folder), 1, False, collate_dspark, num_workers)
        found, ended = read_on(loader, after, partial(replace, folder, spare))
        assert all(equal(*pair) for pair in zip(found, expected, strict=False))
        if ended is None:
            assert len(found) == 9
            assert after + ahead >= 9
        else:
            assert after <= len(found) <= after + ahead
            assert ended[0] in (kind, CacheNotFoundError)  # a worker may look between two steps of the replacing
            assert re.search(f"{re.escape(str(folder))} ({words}|{GONE})", ended[1])


@forks
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_any_kind_read_after_the_parent_did_and_notice_that_the_cache_was_replaced(
    make_cache: MakeCache, method: str
) -> None:
    folder = make(make_cache, "padded", 9, 1)
    other = make_other(folder)
    expected = [CachedDSparkDataset(folder)[index] for index in range(9)]
    loader = DataLoader(
        used(folder),
        batch_size=1,
        num_workers=2,
        collate_fn=collate_dspark,
        multiprocessing_context=method,
        persistent_workers=True,
    )
    assert all(equal(*pair) for pair in zip(rows(loader), expected, strict=True))
    found, ended = read_on(loader, 2, partial(replace_files, folder, other))
    assert 2 <= len(found) <= 2 + WORKERS_READ_AHEAD
    assert all(equal(*pair) for pair in zip(found, expected, strict=False))
    assert ended is not None
    assert re.search(f"{re.escape(str(folder))} ({REPLACED}|{GONE})", ended[1])
    again = build_cached_dspark_dataloader(folder, 1, False)
    assert not any(equal(*pair) for pair in zip(rows(again), expected, strict=True))


@forks
def test_a_worker_forked_while_a_thread_of_the_parent_opens_a_file_does_not_wait_for_that_thread(
    make_cache: MakeCache,
) -> None:
    folder = make(make_cache, "padded", 4, 2)
    dataset = used(folder)
    expected = [dataset[index] for index in range(4)]
    loader = DataLoader(dataset, 2, num_workers=1, collate_fn=collate_dspark, timeout=HANG_SECONDS)
    with dataset._lock:
        found = list(rows(loader))
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))


# --- a parent that uses CUDA --------------------------------------------------------------------------------------


def test_workers_of_a_parent_that_initialised_cuda_are_not_forked_from_it(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    folder = make(make_cache, "padded", 9, 2)
    loader = build_cached_dspark_dataloader(folder, 2, False, num_workers=2)
    dataset: Any = loader.dataset
    expected = [dataset[index] for index in range(9)]
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert all(equal(*pair) for pair in zip(rows(loader), expected, strict=True))
    assert build_cached_dspark_dataloader(folder, 2, False).multiprocessing_context is None


@pytest.mark.gpu
def test_workers_read_for_a_parent_that_uses_a_gpu(make_cache: MakeCache) -> None:
    torch.ones(1, device="cuda")
    folder = make(make_cache, "padded", 9, 2)
    expected = [CachedDSparkDataset(folder)[index] for index in range(9)]
    loader = build_cached_dspark_dataloader(folder, 2, False, num_workers=2)
    batches = list(loader)
    assert all(tensor.is_pinned() for batch in batches for tensor in batch.values())
    on_gpu = [{key: tensor.cuda(non_blocking=True) for key, tensor in batch.items()} for batch in batches]
    torch.cuda.synchronize()
    found = rows({key: tensor.cpu() for key, tensor in batch.items()} for batch in on_gpu)
    assert all(equal(*pair) for pair in zip(found, expected, strict=True))


# --- a worker that is killed --------------------------------------------------------------------------------------


def kill_workers(folder: Path) -> dict[str, Any]:
    """Kill each worker after some batches, then read a whole epoch."""
    loader = build_cached_dspark_dataloader(folder, 1, False, num_workers=2)
    epochs = [kill_worker(loader, victim, after) for victim in (0, 1) for after in range(1, 5)]
    whole = digest(rows(loader))
    return {"epochs": epochs, "whole": whole, "left": len(multiprocessing.active_children())}


def kill_worker(loader: Iterable[Sample], victim: int, after: int) -> tuple[int, int, str, str]:
    """Kill a worker after some batches; return their number, what came in all, and the words of the error."""
    found: list[Sample] = []
    batches: Any = iter(loader)
    words = "no error"
    try:
        found += rows(islice(batches, 1))  # workers are started now
        pid = sorted(child.pid or 0 for child in multiprocessing.active_children())[victim]
        found += rows(islice(batches, after - 1))
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        found += rows(batches)
    except RuntimeError as error:
        words = str(error).replace(str(pid), "PID")
        traceback.clear_frames(error.__traceback__)
    return after, len(found), digest(found), words


def test_a_killed_worker_is_an_error_and_the_next_epoch_is_whole(make_cache: MakeCache) -> None:
    """As the kernel kills one when memory runs out. Neither a hang nor a short epoch."""
    folder = make(make_cache, "padded", 40, 5)
    expected = [CachedDSparkDataset(folder)[index] for index in range(40)]
    result = run(kill_workers, folder)
    assert len(result["epochs"]) == 8
    for after, count, found, words in result["epochs"]:
        assert words.startswith("DataLoader worker (pid PID) is killed by signal: Killed.")
        assert after <= count <= after + WORKERS_READ_AHEAD
        assert found == digest(expected[:count])
    assert result["whole"] == digest(expected)
    assert result["left"] == 0


def die_while_asking(features: list[Sample]) -> Sample:
    """Collate; at the sixth sample die as a worker does that is killed while it asks whether to go on."""
    worker = get_worker_info()
    if worker and torch.equal(features[0][INPUT_IDS], worker.dataset[5][INPUT_IDS]):
        frame: Any = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        lock = getattr(frame.f_locals["done_event"], "_cond", None)
        if lock:
            lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    return collate_dspark(features)


def read_until_one_dies(folder: Path) -> dict[str, str]:
    """Read with workers of each way to start them; return how it ended."""
    dataset, found = CachedDSparkDataset(folder), {}
    for way in ("fork", "forkserver"):
        multiprocessing.set_start_method(way, force=True)
        try:
            list(build_cached_dataloader(dataset, 1, False, die_while_asking, num_workers=2))
        except RuntimeError as error:
            found[way] = str(error)
            traceback.clear_frames(error.__traceback__)
    return found


def test_a_worker_killed_while_it_asks_whether_to_go_on_is_an_error(make_cache: MakeCache) -> None:
    """With the lock of torch's own event in the hands of the dead worker, the end of the loader would never come."""
    found = run(read_until_one_dies, make(make_cache, "padded", 40, 5))
    assert list(found) == ["fork", "forkserver"]
    assert all(re.match(DIED, words) for words in found.values())


# --- few open files -----------------------------------------------------------------------------------------------


def read_with_few_files(folder: Path) -> str:
    """Read a cache at random; return the digest of its samples."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    dataset = CachedDSparkDataset(folder)
    found = {index: dataset[index] for index in torch.randperm(len(dataset)).tolist()}
    assert len(open_files(folder)) == MAX_OPEN_FILES
    return digest(found[index] for index in range(len(dataset)))


def load_with_few_files(folder: Path) -> list[str]:
    """Read a cache at random by workers that inherit open files; return the sorted digests of its samples."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    loader: Any = build_cached_dspark_dataloader(folder, 8, True, num_workers=2)
    assert [len(loader.dataset[index]) for index in range(MAX_OPEN_FILES)] == [4] * MAX_OPEN_FILES
    return sorted(digest([sample]) for sample in rows(loader))


def open_files(folder: Path) -> list[Path]:
    """Return the cache's files that this process has open."""
    links = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.parent == folder]


def multiply(folder: Path, count: int) -> list[Sample]:
    """Make a cache of one sample one of `count` shards of other samples each; return them."""
    sample = CachedDSparkDataset(folder)[0]
    changed = (INPUT_IDS, HIDDEN, LAST_HIDDEN)
    for name in (shard_name, samples_name):
        if (folder / name(0)).exists():
            tensors = load_file(folder / name(0))
            for index in range(count):
                other = {key: value + index if key in changed else value for key, value in tensors.items()}
                save_file(other, folder / name(index))
    manifest = read_manifest(folder)
    sizes = {"shard_samples": [1] * count} if "shard_samples" in manifest else {}
    write_manifest(folder, {**manifest, "num_samples": count, **sizes})
    return [
        {key: value + index if key in changed else value for key, value in sample.items()} for index in range(count)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thousand_shards_are_read_under_a_limit_of_64_files(make_cache: MakeCache, layout: str) -> None:
    folder = make_cache(1, 1, seq_length=2)
    if layout == "ragged":
        folder = make_ragged(folder, [1])
    expected = multiply(folder, 1000)
    assert run(read_with_few_files, folder) == digest(expected)
    assert run(load_with_few_files, folder) == sorted(digest([sample]) for sample in expected)


# --- many readers -------------------------------------------------------------------------------------------------


def read_by_many(folder: Path) -> tuple[list[str], list[str]]:
    """Start eight readers and a verification at once; return the readers' digests and the findings."""
    context = multiprocessing.get_context("fork")
    start, digests = context.Barrier(9), context.SimpleQueue()
    readers = [context.Process(target=read_by_threads, args=(folder, seed, start, digests)) for seed in range(8)]
    for reader in readers:
        reader.start()
    start.wait()
    report = verify_cache(CacheFolder(folder), "values", num_threads=2)
    found = [digests.get() for _ in readers]
    for reader in readers:
        reader.join()
    return found, [str(finding) for finding in report.findings]


def read_by_threads(folder: Path, seed: int, start: Any, digests: Any) -> None:
    found: dict[int, Sample] = {}
    start.wait()
    try:
        dataset = CachedDSparkDataset(folder, max_open_files=2)
        order = list(range(len(dataset))) * 2
        random.Random(seed).shuffle(order)
        with ThreadPoolExecutor(4) as threads:
            found = dict(zip(order, threads.map(dataset.__getitem__, order), strict=True))
    finally:
        digests.put(digest(found[index] for index in sorted(found)))


def test_many_processes_and_threads_read_a_cache_while_it_is_verified(make_cache: MakeCache) -> None:
    folder = make(make_cache, "padded", 60, 4)
    expected = digest(CachedDSparkDataset(folder)[index] for index in range(60))
    assert run(read_by_many, folder) == ([expected] * 8, [])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_share_a_dataset_that_keeps_one_file_open(make_cache: MakeCache, layout: str) -> None:
    """Files are closed while another thread reads from them, and stay open until it has."""
    folder = make(make_cache, layout, 8, 1)
    dataset = CachedDSparkDataset(folder, max_open_files=1)
    expected = [dataset[index] for index in range(8)]
    order = [index % 8 for index in range(400)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(dataset.__getitem__, order))
    finally:
        sys.setswitchinterval(interval)
    assert all(equal(item, expected[index]) for index, item in zip(order, found, strict=True))
    assert len(dataset._open_handles) == 1
