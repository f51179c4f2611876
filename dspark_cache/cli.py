"""`dspark-cache`, the command line for people; the stages have no flags and are run by DVC."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_cache.errors import DsparkCacheError, LockedError, SettingsError, VerificationError
from dspark_cache.schema import PROVENANCE_NAME, VERIFY_LEVELS, VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 1 refused (the reason is on stderr), 2 wrong usage, 130 interrupted.
    """
    parsed = _parser().parse_args(arguments)
    try:
        parsed.run(parsed)
    except (DsparkCacheError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dspark-cache", description=__doc__)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    inspect = commands.add_parser("inspect", help="show what a cache is and what it holds")
    inspect.add_argument("cache", type=Path, help="folder of the cache")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    fingerprint = commands.add_parser("fingerprint", help="print the value of `revision` for a path outside inputs/")
    fingerprint.add_argument("path", type=Path, help="file or folder")
    fingerprint.set_defaults(run=_fingerprint)

    verify = commands.add_parser("verify", help="check a cache; exit 1 if anything is not as it must be")
    verify.add_argument("cache", type=Path, help="folder of the cache")
    verify.add_argument("--level", choices=VERIFY_LEVELS, default="values", help="how far; default: %(default)s")
    verify.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="shards at a time; default: %(default)s")
    verify.add_argument("--json", action="store_true", help="print JSON")
    verify.set_defaults(run=_verify)

    doctor = commands.add_parser("doctor", help="check the settings of this repository; exit 1 if any is to be changed")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)

    clean = commands.add_parser("clean", help="remove captured states that the current features.json does not use")
    clean.add_argument("--yes", action="store_true", help="do not ask")
    clean.add_argument("--all", action="store_true", help="remove the current capture's blocks as well")
    clean.add_argument("--break-lock", action="store_true", help="forget the holder of a lock on a host that is gone")
    clean.set_defaults(run=_clean)
    return parser


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


def _fingerprint(parsed: argparse.Namespace) -> None:
    from dspark_cache.inputs import Fingerprints, missing_file

    if not parsed.path.exists():
        raise missing_file("PATH", parsed.path)
    print(Fingerprints(None).of(parsed.path))


def _verify(parsed: argparse.Namespace) -> None:
    from dspark_cache.verify import CacheFolder, verify_cache

    if parsed.jobs < 1:
        raise SettingsError(f"--jobs: expected at least 1, found {parsed.jobs}")
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
    from dspark_cache.files import break_lock
    from dspark_cache.stage import writer_locks

    scratch = _scratch()
    kept = None if parsed.all else _current_folder(scratch)
    folders = [(folder, size) for folder, size in scratch_folders(scratch) if folder != kept]
    if parsed.break_lock:
        for lock in writer_locks(Path(), scratch):
            if break_lock(lock):
                print(f"forgot the holder of {lock}")
        return
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
    from dspark_cache.blocks import LOCK_NAME
    from dspark_cache.files import FileLock

    try:
        with FileLock(folder / LOCK_NAME):
            shutil.rmtree(folder)
    except LockedError as error:
        print(f"kept {folder}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
