"""`dspark-cache`, the command line for people; the stages have no flags and are run by DVC."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.errors import DsparkCacheError, LockedError, SettingsError
from dspark_cache.schema import PROVENANCE_NAME, VERSION
from dspark_cache.strict_json import is_int

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    clean = commands.add_parser("clean", help="remove captured states that the current features.json does not use")
    clean.add_argument("--yes", action="store_true", help="do not ask")
    clean.add_argument("--all", action="store_true", help="remove the current capture's blocks as well")
    clean.add_argument("--break-lock", action="store_true", help="forget the holder of a lock on a host that is gone")
    clean.set_defaults(run=_clean)
    return parser


def _inspect(parsed: argparse.Namespace) -> None:
    from dspark_cache.reader import CachedDSparkDataset
    from dspark_cache.strict_json import read_json_object

    dataset = CachedDSparkDataset(parsed.cache)
    files = {entry.name: entry.stat().st_size for entry in sorted(parsed.cache.iterdir())}
    recorded: Any = None
    if PROVENANCE_NAME in files:
        recorded = read_json_object(parsed.cache / PROVENANCE_NAME).get("files")
    entries = [entry for entry in recorded.values() if isinstance(entry, dict)] if isinstance(recorded, dict) else []
    content = {
        "manifest": dataset.manifest,
        "shards": len([name for name in files if name.startswith("shard-")]),
        "bytes": sum(files.values()),
        "tokens": _total(entries, "tokens"),
        "supervised_tokens": _total(entries, "supervised_tokens"),
    }
    if parsed.json:
        print(json.dumps(content, indent=2))
        return
    for key, value in sorted(dataset.manifest.items()):
        print(f"{key:26} {value}")
    print(f"{'files':26} {len(files)}, {content['shards']} shards, {content['bytes'] / GIB:.3f} GiB")
    if content["tokens"]:
        positions = len(dataset) * dataset.manifest["seq_length"]
        share = content["supervised_tokens"] or 0
        print(f"{'tokens':26} {content['tokens']} of {positions} positions, {share} supervised")


def _total(entries: list[dict[str, Any]], key: str) -> int | None:
    """Add up a count of provenance.json; None where it has none."""
    return sum(entry[key] for entry in entries if is_int(entry.get(key))) or None


def _fingerprint(parsed: argparse.Namespace) -> None:
    from dspark_cache.inputs import Fingerprints, missing_file

    if not parsed.path.exists():
        raise missing_file("PATH", parsed.path)
    print(Fingerprints(None).of(parsed.path))


def _clean(parsed: argparse.Namespace) -> None:
    from dspark_cache.blocks import LOCK_NAME, scratch_folders
    from dspark_cache.files import break_lock, building_lock
    from dspark_cache.stage import CACHE_PATH, LEDGER_PATH, REPORT_PATH, TOKENS_PATH

    scratch = _scratch()
    kept = None if parsed.all else _current_folder(scratch)
    folders = [(folder, size) for folder, size in scratch_folders(scratch) if folder != kept]
    if parsed.break_lock:
        building = [building_lock(path) for path in (TOKENS_PATH, LEDGER_PATH, CACHE_PATH, REPORT_PATH)]
        for lock in [*(folder / LOCK_NAME for folder, _ in scratch_folders(scratch)), *building]:
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
