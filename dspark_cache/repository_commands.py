"""Commands about a repository of the pipeline: init, estimate, doctor, fingerprint, clean."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.console import (
    add_command,
    add_json,
    confirm,
    paint,
    positive,
    positive_number,
    say,
    say_json,
    show_progress,
    warn,
)
from dspark_cache.errors import LockedError, SettingsError
from dspark_cache.schema import GIB

if TYPE_CHECKING:
    import argparse


def add_repository_commands(commands: Any) -> None:
    """Add the commands to a parser's commands."""
    _add_init(commands)
    _add_doctor(commands)
    _add_estimate(commands)
    _add_fingerprint(commands)
    _add_clean(commands)


def _add_init(commands: Any) -> None:
    parser = add_command(
        commands,
        "init",
        _init,
        about="put the pipeline into a repository, or begin one in an empty folder",
        details="Stages join an existing dvc.yaml, parameters an existing params.yaml; comments stay. Nothing is\n"
        "overwritten: if anything is in the way, all of it is listed and nothing is written.",
        examples="""
            dspark-cache init
            dspark-cache init --dry-run
            dspark-cache init drafts/cache --no-sample
        """,
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", default=Path(), help="default: this one")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, as a diff, and change nothing")
    parser.add_argument("--no-sample", action="store_true", help="without the sample conversations and tiny target")
    add_json(parser)


def _init(parsed: argparse.Namespace) -> None:
    from dspark_cache.init_repository import plan_init

    plan = plan_init(parsed.folder, sample=not parsed.no_sample)
    if not parsed.dry_run:
        plan.apply()
    if parsed.json:
        say_json({**plan.as_json(), "applied": not parsed.dry_run})
        return
    if parsed.dry_run and plan.changes:
        say(plan.diff().rstrip())
    elif not parsed.dry_run:
        for command in plan.commands:
            say(f"{paint('ran     ', 'green')} {' '.join(command)}")
        for change in plan.changes:
            say(f"{paint('made    ' if change.old is None else 'added to', 'green')} {change.name}")
    if not plan.changes:
        say("there is nothing to add")
    for name in plan.kept:
        say(f"{'kept':8} {name}, which differs from what is shipped")
    for line in plan.advice:
        say(f"{paint('advice  ', 'yellow')} {line}")
    if not parsed.dry_run:
        move = "" if parsed.folder == Path() else f"cd {shlex.quote(str(parsed.folder))} && "
        say(f"next: {move}dvc repro")


def _add_doctor(commands: Any) -> None:
    parser = add_command(
        commands,
        "doctor",
        _doctor,
        about="check the settings of this repository; exit 1 if any is to be changed",
        details="It looks at DVC's configuration, remotes, links and ignore files, at locks and at free disk.",
        examples="""
            dspark-cache doctor
            dspark-cache doctor --json
        """,
    )
    add_json(parser)


def _doctor(parsed: argparse.Namespace) -> None:
    from dspark_cache.doctor import examine
    from dspark_cache.stage import open_stage

    advice = examine(open_stage("verify"))
    if parsed.json:
        say_json([item.as_json() for item in advice])
    else:
        for item in advice:
            word = paint(f"{'change':7}", "bold", "yellow") if item.remedy else paint(f"{'ok':7}", "green")
            say(f"{word} {item.subject}: {item.found}")
            if item.remedy:
                say(f"{'':8}{item.remedy}")
    to_change = sum(bool(item.remedy) for item in advice)
    if to_change:
        raise SettingsError(f"{to_change} of {len(advice)} settings are to be changed")


def _add_estimate(commands: Any) -> None:
    parser = add_command(
        commands,
        "estimate",
        _estimate,
        about="say what a run of this repository will take, before it",
        details="Samples, tokens, bytes of every form, disk and memory, from params.yaml and the data; no target runs.",
        examples="""
            dspark-cache estimate
            dspark-cache estimate --rows 1000 --tokens-per-second 20000
        """,
    )
    parser.add_argument(
        "--rows", type=positive, metavar="N", help="tokenise N conversations only, and take them for all"
    )
    parser.add_argument(
        "--tokens-per-second", type=positive_number, metavar="N", help="real tokens a second of capture, for the time"
    )
    add_json(parser, "print JSON; sizes in bytes")


def _estimate(parsed: argparse.Namespace) -> None:
    from dspark_cache.doctor import holds_outputs_twice
    from dspark_cache.estimate import describe, estimate_run, read_samples
    from dspark_cache.stage import open_stage

    stage = open_stage("tokenize")
    samples, origin = read_samples(stage, max_rows=parsed.rows, progress=show_progress)
    found = estimate_run(
        stage, samples, tokens_per_second=parsed.tokens_per_second, link_doubling=holds_outputs_twice(stage)
    )
    if parsed.json:
        say_json({"from": origin, **found})
    else:
        say(describe(found, origin))


def _add_fingerprint(commands: Any) -> None:
    parser = add_command(
        commands,
        "fingerprint",
        _fingerprint,
        about="print the value of `revision` for a path outside inputs/",
        details="It is the sha256 of a file, or of what `sha256sum` prints of a folder's files.",
        examples="dspark-cache fingerprint /data/conversations.jsonl",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="file or folder")
    add_json(parser)


def _fingerprint(parsed: argparse.Namespace) -> None:
    from dspark_cache.inputs import Fingerprints, input_files, missing_file

    if not parsed.path.exists():
        raise missing_file("PATH", parsed.path)
    total = sum(file.stat().st_size for _, file in input_files(parsed.path))
    with show_progress("fingerprint", total, "B") as advance:
        found = Fingerprints(None, advance).of(parsed.path)
    if parsed.json:
        say_json({"path": str(parsed.path), "revision": found})
    else:
        say(found)


def _add_clean(commands: Any) -> None:
    parser = add_command(
        commands,
        "clean",
        _clean,
        about="remove captured states that the current features.json does not use",
        details="It lists them and asks. With --json it does not ask: without --yes it only lists.",
        examples="""
            dspark-cache clean
            dspark-cache clean --all --yes
            dspark-cache clean --break-lock
        """,
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--all", action="store_true", help="remove the current capture's blocks as well")
    parser.add_argument("--break-lock", action="store_true", help="forget the holder of a lock on a host that is gone")
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="with --break-lock: what is locked")
    add_json(parser)
    parser.set_defaults(refuse=parser.error)


def _clean(parsed: argparse.Namespace) -> None:
    if parsed.break_lock:
        _break_locks(parsed)
        return
    if parsed.folders:
        parsed.refuse("FOLDER is what --break-lock takes: without it, remove a folder of blocks by hand")
    from dspark_cache.blocks import scratch_folders

    scratch = _scratch()
    folders = scratch_folders(scratch)
    kept = _current_folder(scratch) if folders and not parsed.all else None
    folders = [(folder, size) for folder, size in folders if folder != kept]
    if parsed.json:
        removed = _remove(folders) if parsed.yes else []
        say_json([{"folder": str(folder), "bytes": size, "removed": folder in removed} for folder, size in folders])
        return
    for folder, size in folders:
        say(f"{size / GIB:10.3f} GiB  {folder}")
    if not folders:
        say(f"nothing to remove in {scratch}" + (f"; kept {kept}" if kept else ""))
    elif parsed.yes or confirm(f"remove {len(folders)} folder(s)?"):
        _remove(folders)


def _break_locks(parsed: argparse.Namespace) -> None:
    from dspark_cache.files import break_lock, building_lock
    from dspark_cache.stage import writer_locks

    named = [lock for folder in parsed.folders for lock in (building_lock(folder), folder / "lock")]
    locks = named or writer_locks(Path(), _scratch())
    broken = [lock for lock in locks if break_lock(lock)]
    if parsed.json:
        say_json([{"lock": str(lock)} for lock in broken])
        return
    for lock in broken:
        say(f"forgot the holder of {lock}")


def _scratch() -> Path:
    from dspark_cache.settings import load_settings
    from dspark_cache.stage import PARAMS_PATH, scratch_root

    return scratch_root(Path()) / load_settings(PARAMS_PATH, os.environ).runtime.scratch_dir


def _current_folder(scratch: Path) -> Path:
    """Return the folder of the blocks that features.json lists.

    Raises:
        SettingsError: There is no such file, as DVC removes it before `capture` runs: an interrupted one goes on from
            blocks that it does not list yet.
    """
    from dspark_cache.blocks import BlockStore
    from dspark_cache.ledger import read_ledger
    from dspark_cache.stage import LEDGER_PATH

    if not LEDGER_PATH.exists():
        raise SettingsError(
            f"there is no {LEDGER_PATH}, so blocks in {scratch} may be those of an interrupted capture, which goes on "
            "from them: run dvc repro or dvc checkout first, or pass --all to remove every folder"
        )
    return BlockStore(scratch, read_ledger(LEDGER_PATH).identity).folder


def _remove(folders: list[tuple[Path, int]]) -> list[Path]:
    """Remove folders of given sizes but those that somebody writes; return which are gone."""
    from dspark_cache.blocks import lock_folder

    removed = []
    with show_progress("remove", sum(size for _, size in folders), "B") as advance:
        for folder, size in folders:
            try:
                with lock_folder(folder):
                    shutil.rmtree(folder)
                removed.append(folder)
            except LockedError as error:
                warn(f"kept {folder}: {error}")
            advance(size)
    return removed
