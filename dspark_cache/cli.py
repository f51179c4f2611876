"""`dspark-cache`, the command line for people; the stages have no flags and are run by DVC."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import DsparkCacheError, LockedError, SettingsError, Terminated, VerificationError
from dspark_cache.schema import AUTO, PROVENANCE_NAME, SIGNIFICAND_BITS, VERIFY_LEVELS, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 1 refused (the reason is on stderr), 2 wrong usage, 130 interrupted, 143 terminated.
    """
    parsed = _parser().parse_args(arguments)
    try:
        with _terminated_by_exception():
            parsed.run(parsed)
    except (DsparkCacheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Terminated:
        print("terminated", file=sys.stderr)
        return 143
    return 0


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that what was begun is put in order."""

    def terminate(*_: object) -> None:
        raise Terminated

    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # ignored, or handled by whoever calls `main`
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark-cache", description=__doc__)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="show what a cache is and what it holds")
    inspect.add_argument("cache", type=Path, help="folder of the cache")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    _add_convert(commands)
    diff = commands.add_parser("diff", help="compare two caches: what made them, samples, how far states are apart")
    diff.add_argument("first", type=Path, help="folder of a cache")
    diff.add_argument("second", type=Path, help="folder of another")
    diff.add_argument("--max-samples", type=int, default=64, help="common samples to compare; default: %(default)s")
    diff.add_argument("--all", action="store_true", help="compare all common samples")
    diff.add_argument("--pad-token-id", type=int, help="id at padding, of caches that do not say")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=_diff)

    estimate = commands.add_parser("estimate", help="say what a run of this repository will take, before it")
    estimate.add_argument("--rows", type=int, help="tokenise as many conversations only, and take them for all")
    estimate.add_argument("--tokens-per-second", type=float, help="real tokens a second of capture, for the time")
    estimate.add_argument("--json", action="store_true", help="print JSON; sizes in bytes")
    estimate.set_defaults(run=_estimate)

    fingerprint = commands.add_parser("fingerprint", help="print the value of `revision` for a path outside inputs/")
    fingerprint.add_argument("path", type=Path, help="file or folder")
    fingerprint.set_defaults(run=_fingerprint)

    verify = commands.add_parser("verify", help="check a cache; exit 1 if anything is not as it must be")
    verify.add_argument("cache", type=Path, help="folder of the cache")
    verify.add_argument("--level", choices=VERIFY_LEVELS, default="values", help="how far; default: %(default)s")
    verify.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processors to use; default: %(default)s")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    doctor = commands.add_parser("doctor", help="check the settings of this repository; exit 1 if any is to be changed")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)

    clean = commands.add_parser("clean", help="remove captured states that the current features.json does not use")
    clean.add_argument("--yes", action="store_true", help="do not ask")
    clean.add_argument("--all", action="store_true", help="remove the current capture's blocks as well")
    clean.add_argument("--break-lock", action="store_true", help="forget the holder of a lock on a host that is gone")
    clean.add_argument("folders", type=Path, nargs="*", help="with --break-lock: what conversions make")
    clean.set_defaults(run=_clean)
    return parser


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="make a cache from another one, without the target")
    convert.add_argument("source", type=Path, help="folder of a cache, also of NeMo AutoModel")
    convert.add_argument("target", type=Path, help="folder of the new cache")
    convert.add_argument("--layout", choices=("padded", "ragged"))
    convert.add_argument("--dtype", choices=tuple(SIGNIFICAND_BITS), help="with no more significant bits than SOURCE")
    convert.add_argument("--shard-size", type=_shard_size, help="samples a padded shard, or auto")
    convert.add_argument("--shard-bytes", type=int, help="bytes of states at which a ragged shard is full; 2 GiB")
    convert.add_argument("--layers", type=_layers, help="layer ids to keep, as 1,9,17")
    convert.add_argument("--seq-length", type=int, help="positions to keep of each sample")
    convert.add_argument("--samples", type=_sample_range, help="samples to keep, as START:STOP")
    convert.add_argument("--eval-samples", type=int, help="distinct samples, the first ones, to hold out")
    convert.add_argument("--part", choices=("train", "eval"), default="train", help="which part to write then")
    convert.add_argument("--pad-token-id", type=int, help="id at padding, of a source that does not say")
    convert.add_argument("--no-check-disk", action="store_true", help="begin although too little disk is free")
    convert.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="threads that convert, then verify")
    convert.set_defaults(run=_convert)


def _shard_size(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _sample_range(text: str) -> tuple[int, int]:
    start, _, stop = text.partition(":")
    return int(start or 0), int(stop)


def _convert(parsed: argparse.Namespace) -> None:
    from dspark_cache.convert import Conversion, convert_cache

    _check_positive("--jobs", parsed.jobs)
    convert_cache(
        parsed.source,
        parsed.target,
        Conversion(
            layout=parsed.layout,
            dtype=parsed.dtype,
            shard_size=parsed.shard_size,
            shard_bytes=parsed.shard_bytes,
            layer_ids=parsed.layers,
            seq_length=parsed.seq_length,
            samples=parsed.samples,
            eval_samples=parsed.eval_samples,
            part=parsed.part,
            pad_token_id=parsed.pad_token_id,
        ),
        check_disk=not parsed.no_check_disk,
        num_threads=parsed.jobs,
        progress=_progress,
    )
    print(f"{parsed.target} is made and verified")


def _diff(parsed: argparse.Namespace) -> None:
    from dspark_cache.diff import describe, diff_caches

    _check_positive("--max-samples", parsed.max_samples)
    count = None if parsed.all else parsed.max_samples
    found = diff_caches(parsed.first, parsed.second, max_samples=count, pad_token_id=parsed.pad_token_id)
    print(json.dumps(found, indent=2) if parsed.json else describe(found))


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and value <= 0:
        raise SettingsError(f"{name}: expected more than 0, found {value}")


def _inspect(parsed: argparse.Namespace) -> None:
    from dspark_cache.provenance import read_provenance
    from dspark_cache.reader import CachedDSparkDataset
    from dspark_cache.strict_json import printable

    dataset = CachedDSparkDataset(parsed.cache)
    files = {entry.name: entry.stat().st_size for entry in sorted(parsed.cache.iterdir())}
    provenance = read_provenance(parsed.cache)
    content = {
        "manifest": dataset.manifest,
        "shards": len([name for name in files if name.startswith("shard-")]),
        "bytes": sum(files.values()),
        "tokens": provenance and provenance.total("tokens"),
        "supervised_tokens": provenance and provenance.total("supervised_tokens"),
    }
    if parsed.json:
        print(json.dumps(content, indent=2))
        return
    for key, value in sorted(dataset.manifest.items()):
        print(f"{printable(key):26} {printable(str(value))}")
    print(f"{'files':26} {len(files)}, {content['shards']} shards, {content['bytes'] / GIB:.3f} GiB")
    if provenance:
        length = dataset.manifest.get("seq_length")
        positions = f" of {len(dataset) * length} positions" if length else ""
        print(f"{'tokens':26} {content['tokens']}{positions}, {content['supervised_tokens']} supervised")


def _estimate(parsed: argparse.Namespace) -> None:
    from dspark_cache.doctor import holds_outputs_twice
    from dspark_cache.estimate import describe, estimate_run, read_samples
    from dspark_cache.progress import Progress
    from dspark_cache.stage import open_stage

    _check_positive("--rows", parsed.rows)
    _check_positive("--tokens-per-second", parsed.tokens_per_second)
    stage = open_stage("tokenize")
    samples, origin = read_samples(
        stage, max_rows=parsed.rows, progress=lambda total: Progress("tokenize", total, "rows")
    )
    found = estimate_run(
        stage, samples, tokens_per_second=parsed.tokens_per_second, link_doubling=holds_outputs_twice(stage)
    )
    print(json.dumps({"from": origin, **found}, indent=2) if parsed.json else describe(found, origin))


def _fingerprint(parsed: argparse.Namespace) -> None:
    from dspark_cache.inputs import Fingerprints, missing_file

    if not parsed.path.exists():
        raise missing_file("PATH", parsed.path)
    print(Fingerprints(None).of(parsed.path))


def _verify(parsed: argparse.Namespace) -> None:
    from dspark_cache.verify import CacheFolder, verify_cache

    _check_positive("--jobs", parsed.jobs)
    cache = CacheFolder(parsed.cache)
    if cache.provenance is None:
        print(f"{parsed.cache} has no {PROVENANCE_NAME}: there are no digests to compare", file=sys.stderr)
    with _progress("verify", len(cache.shard_samples), "shards") as advance:
        report = verify_cache(cache, parsed.level, num_threads=parsed.jobs, advance=advance)
    if parsed.json:
        print(json.dumps(report.as_json(), indent=2))
    for finding in report.findings if not parsed.json else ():
        print(finding)
    if report.findings:
        raise VerificationError(f"{parsed.cache} has {len(report.findings)} finding(s)")
    if not parsed.json:
        print(f"{parsed.cache} is sound up to the level {parsed.level}")


@contextmanager
def _progress(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Give what is told of finished units; training machines may lack the extra that draws a bar."""
    try:
        from dspark_cache.progress import Progress
    except ImportError:
        yield lambda _: None
        return
    with Progress(name, total, unit) as progress:
        yield progress.advance


def _doctor(parsed: argparse.Namespace) -> None:
    from dspark_cache.doctor import examine
    from dspark_cache.stage import open_stage

    advice = examine(open_stage("verify"))
    if parsed.json:
        print(json.dumps([item.as_json() for item in advice], indent=2))
    else:
        for item in advice:
            print(f"{'change' if item.remedy else 'ok':7} {item.subject}: {item.found}")
            if item.remedy:
                print(f"{'':8}{item.remedy}")
    to_change = sum(bool(item.remedy) for item in advice)
    if to_change:
        raise SettingsError(f"{to_change} of {len(advice)} settings are to be changed")


def _clean(parsed: argparse.Namespace) -> None:
    from dspark_cache.blocks import scratch_folders
    from dspark_cache.files import break_lock, building_lock
    from dspark_cache.stage import writer_locks

    if parsed.break_lock:
        locks = [building_lock(folder) for folder in parsed.folders] or writer_locks(Path(), _scratch())
        for lock in locks:
            if break_lock(lock):
                print(f"forgot the holder of {lock}")
        return
    scratch = _scratch()
    kept = None if parsed.all else _current_folder(scratch)
    folders = [(folder, size) for folder, size in scratch_folders(scratch) if folder != kept]
    for folder, size in folders:
        print(f"{size / GIB:10.3f} GiB  {folder}")
    if not folders:
        print(f"nothing to remove in {scratch}" + (f"; kept {kept}" if kept else ""))
    elif parsed.yes or _confirmed(f"remove {len(folders)} folder(s)?"):
        for folder, _ in folders:
            _remove(folder)


def _scratch() -> Path:
    from dspark_cache.settings import load_settings
    from dspark_cache.stage import PARAMS_PATH

    return Path(os.environ.get("DVC_ROOT") or "") / load_settings(PARAMS_PATH, os.environ).runtime.scratch_dir


def _current_folder(scratch: Path) -> Path | None:
    from dspark_cache.blocks import BlockStore
    from dspark_cache.ledger import read_ledger
    from dspark_cache.stage import LEDGER_PATH

    return BlockStore(scratch, read_ledger(LEDGER_PATH).identity).folder if LEDGER_PATH.exists() else None


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise SettingsError(f"{question} nobody to ask: pass --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _remove(folder: Path) -> None:
    from dspark_cache.blocks import lock_folder

    try:
        with lock_folder(folder):
            shutil.rmtree(folder)
    except LockedError as error:
        print(f"kept {folder}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
