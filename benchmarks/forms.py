"""Bytes, time and reading rates of a cache in each form, against the plain way to write and read it.

    python -m benchmarks.forms --target DIR --data FILE --work DIR

The plain way is what the reference does: samples padded to seq_length, collected to a shard by batches, `save_file`;
one `get_slice` for each key and sample, `torch.stack`. All forms are made from one capture. Conversions among them are
compared byte for byte with direct production.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stages.shards
from benchmarks.plain import PlainDataset, plain_loader, write_plainly
from benchmarks.workspace import Measured, Workspace, held_bytes, logical_bytes, measure, print_table
from dspark_cache import CachedDSparkDataset, build_cached_dspark_dataloader
from dspark_cache.convert import Conversion, convert_cache
from dspark_cache.files import file_digest
from dspark_cache.schema import PROVENANCE_NAME
from dspark_cache.shards import shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARD_BYTES = 1 << 28
BATCH = 8
FORMS: dict[str, dict[str, Any]] = {
    "padded, holes": {"layout": "padded", "dtype": "bf16", "shard_size": "auto", "shard_bytes": SHARD_BYTES},
    "ragged": {"layout": "ragged", "dtype": "bf16", "shard_bytes": SHARD_BYTES},
    "ragged fp8": {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES},
    "ragged fp32": {"layout": "ragged", "dtype": "fp32", "shard_bytes": SHARD_BYTES},
}
CONVERSIONS = (
    ("padded, holes", "ragged", {"layout": "ragged", "shard_bytes": SHARD_BYTES}),
    ("ragged", "padded, holes", {"layout": "padded", "shard_size": "auto", "shard_bytes": SHARD_BYTES}),
    ("ragged", "ragged fp8", {"dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES}),
    ("padded, holes", "ragged fp8", {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": SHARD_BYTES}),
)


def main() -> None:
    """Measure and print the tables."""
    parsed = _arguments()
    workspace = captured(parsed)
    if parsed.capture_only:
        return
    written = write_all(workspace, parsed.work)
    tokens = _tokens(parsed.work / "ragged")
    rates = read_all(parsed.work, parsed.repeats)
    converted = convert_all(parsed.work)
    table = [["form", "bytes", "bytes on the disk", "bytes written", "seconds"]]
    for name, taken in written.items():
        folder = parsed.work / name
        sizes = [logical_bytes(folder), taken.result, taken.written]
        table.append([name, *(f"{size / 1e6:.1f} MB" for size in sizes), f"{taken.seconds:.2f}"])
    print_table(table)
    print()
    print_table([["read", "real tokens/s", "ratio"], *_rate_rows(rates, tokens)])
    print()
    print_table([["conversion", "bytes written", "seconds", "bytes of direct production"], *converted])
    if parsed.json:
        found = {"written": table, "tokens": tokens, "seconds_to_read": rates, "converted": converted}
        parsed.json.write_text(json.dumps(found, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--capture-only", action="store_true", help="measure later, on an idle machine")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def captured(parsed: argparse.Namespace) -> Workspace:
    """Return the repository of an earlier run in the same folder, or make it and capture."""
    root = parsed.work / "repository"
    if (root / "features.json").exists():
        return Workspace(root)
    workspace = Workspace.make(
        root,
        parsed.data,
        parsed.target,
        data={"seq_length": parsed.seq_length, "limit": parsed.limit},
        target={"block_bytes": SHARD_BYTES},
    )
    for stage in ("tokenize", "capture"):
        workspace.run(stage)
    return workspace


def write_all(workspace: Workspace, work: Path) -> dict[str, Measured]:
    """Make the cache in every form; return what each took, with the disk blocks that it holds as result."""
    found = {}
    for name, form in FORMS.items():
        workspace.set_params(cache=form)
        found[name] = measure(_publish, workspace.root, work / name)
    return {"padded, dense": measure(_write_plainly, work / "padded, holes", work / "padded, dense"), **found}


def _publish(root: Path, path: Path) -> int:
    with contextlib.chdir(root):
        stages.shards.main()
        held = held_bytes(Path("cache"))
        Path("cache").rename(path)
    return held


def _write_plainly(source: Path, path: Path) -> int:
    """Write padded shards as the reference does, of the samples of another cache."""
    path.mkdir()
    dataset = CachedDSparkDataset(source)
    size = dataset.manifest["shard_size"]
    for number, start in enumerate(range(0, len(dataset), size)):
        order = range(start, min(start + size, len(dataset)))
        write_plainly(path / shard_name(number), plain_loader(dataset, order, 4))
    os.sync()
    return held_bytes(path)


def _tokens(ragged: Path) -> int:
    dataset = CachedDSparkDataset(ragged, padded=False)
    return sum(dataset.stored_length(index) for index in range(len(dataset)))


def read_all(work: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds that reading every sample took, in order, batches of 8, by reader; one round warms up."""
    readers: dict[str, Callable[[], object]] = {
        "plain, padded dense": lambda: _read_plainly(work / "padded, dense", work / "padded, holes"),
        "padded, holes": lambda: _read(work / "padded, holes"),
        "ragged": lambda: _read(work / "ragged"),
        "ragged fp8": lambda: _read(work / "ragged fp8"),
        "ragged, pad_to longest": lambda: _read(work / "ragged", pad_to="longest"),
        "ragged fp8, pad_to longest": lambda: _read(work / "ragged fp8", pad_to="longest"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(repeats + 1):
        for name, read in readers.items():
            start = time.perf_counter()
            read()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _read(cache: Path, **options: Any) -> None:
    for _ in build_cached_dspark_dataloader(str(cache), batch_size=BATCH, shuffle=False, **options):
        pass


def _read_plainly(cache: Path, manifest_of: Path) -> None:
    size, total = (CachedDSparkDataset(manifest_of).manifest[key] for key in ("shard_size", "num_samples"))
    for _ in plain_loader(PlainDataset(cache, total, size), range(total), BATCH):
        pass


def _rate_rows(rates: dict[str, list[float]], tokens: int) -> list[list[str]]:
    medians = {name: statistics.median(seconds) for name, seconds in rates.items()}
    plain = next(iter(medians.values()))
    return [[name, f"{tokens / median:,.0f}", f"{plain / median:.2f}"] for name, median in medians.items()]


def convert_all(work: Path) -> list[list[str]]:
    """Convert among the forms; return a row for each, with yes or no for equal bytes."""
    rows = []
    for number, (source, target, changes) in enumerate(CONVERSIONS):
        path = work / f"converted-{number}"
        taken = measure(_convert, work / source, path, changes)
        is_same = "yes" if _files(path) == _files(work / target) else "no"
        rows.append([f"{source} to {target}", f"{taken.written / 1e6:.1f} MB", f"{taken.seconds:.2f}", is_same])
    return rows


@contextmanager
def _silent(_name: str, _total: int, _unit: str) -> Iterator[Callable[[int], None]]:
    yield lambda _: None


def _convert(source: Path, target: Path, changes: dict[str, Any]) -> None:
    convert_cache(source, target, Conversion(**changes), progress=_silent, num_threads=os.cpu_count() or 1)


def _files(cache: Path) -> dict[str, str]:
    """Return the sha256 of all files but provenance.json, which tells how a cache came to be."""
    return {path.name: file_digest(path) for path in cache.iterdir() if path.name != PROVENANCE_NAME}


if __name__ == "__main__":
    main()
