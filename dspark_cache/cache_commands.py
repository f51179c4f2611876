"""Commands about a cache: inspect, verify, check, convert, diff, fetch. They need no repository around them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark_cache.console import (
    add_command,
    add_json,
    has_colours,
    integers,
    paint,
    positive,
    say,
    say_json,
    show_progress,
    span,
    warn,
)
from dspark_cache.errors import SettingsError, VerificationError
from dspark_cache.schema import AUTO, PROVENANCE_NAME, SIGNIFICAND_BITS, VERIFY_LEVELS

if TYPE_CHECKING:
    import argparse

    from dspark_cache.cache_files import CacheFolder
    from dspark_cache.examine import Texts
    from dspark_cache.verify import Report


def add_cache_commands(commands: Any) -> None:
    """Add the commands to a parser's commands."""
    _add_inspect(commands)
    _add_verify(commands)
    _add_check(commands)
    _add_convert(commands)
    _add_diff(commands)
    _add_fetch(commands)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="CACHE", help="folder of the cache")


def _add_jobs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--jobs", type=positive, metavar="N", default=os.cpu_count() or 1, help=f"{what}; default: %(default)s"
    )


def _add_inspect(commands: Any) -> None:
    parser = add_command(
        commands,
        "inspect",
        _inspect,
        about="show what a cache is and what it holds, or one of its samples",
        details="A sample is shown as text, what is supervised in it marked, if the target's tokenizer is at hand.",
        examples="""
            dspark-cache inspect cache
            dspark-cache inspect cache 0 --tokenizer inputs/target
            dspark-cache inspect cache --json
        """,
    )
    _add_cache(parser)
    parser.add_argument("sample", type=int, nargs="?", metavar="SAMPLE", help="index of a sample; -1 is the last")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="the target's; default: the manifest's target_model"
    )
    add_json(parser)


def _inspect(parsed: argparse.Namespace) -> None:
    from dspark_cache.inspection import cache_text, describe_cache, describe_sample, sample_text

    if parsed.sample is None:
        found = describe_cache(parsed.cache)
        text = cache_text(found)
    else:
        found = describe_sample(parsed.cache, parsed.sample, parsed.tokenizer)
        text = sample_text(found, color=has_colours(sys.stdout))
    if parsed.json:
        say_json(found)
    else:
        say(text)


def _add_verify(commands: Any) -> None:
    parser = add_command(
        commands,
        "verify",
        _verify,
        about="check a cache; exit 1 if anything is not as it must be",
        details="Each level includes those before it: files (names, sizes), headers (dtypes, shapes), bytes (sha256),\n"
        "values (ids, masks, padding, finite states), supervision (what would train badly).",
        examples="""
            dspark-cache verify cache
            dspark-cache verify cache --level bytes --json
            dspark-cache verify cache --html verify.html --tokenizer inputs/target
        """,
    )
    _add_cache(parser)
    parser.add_argument("--level", choices=VERIFY_LEVELS, default="values", help="how far; default: %(default)s")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to read as well")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="the target's, for the samples of that page")
    _add_jobs(parser, "processors to use")
    add_json(parser)


def _verify(parsed: argparse.Namespace) -> None:
    from dspark_cache.cache_files import CacheFolder
    from dspark_cache.verify import verify_cache

    cache = CacheFolder(parsed.cache)
    texts = _page_texts(parsed, cache) if parsed.html else None
    if cache.provenance is None:
        warn(f"{parsed.cache} has no {PROVENANCE_NAME}: there are no digests to compare")
    with show_progress("verify", len(cache.shard_samples), "shards") as advance:
        report = verify_cache(cache, parsed.level, num_threads=parsed.jobs, advance=advance)
    if parsed.json:
        say_json(report.as_json())
    else:
        for finding in report.findings:
            say(paint(str(finding), "red"))
        if not report.findings:
            say(f"{parsed.cache} is {paint('sound', 'green')} up to the level {parsed.level}")
    if texts is not None:
        sys.stdout.flush()  # whatever becomes of the page
        _put_page(parsed.html, cache, report, texts)
    if report.findings:
        raise VerificationError(f"{parsed.cache} has {report.count} finding(s)")


def _page_texts(parsed: argparse.Namespace, cache: CacheFolder) -> Texts:
    """Return the texts of the page; what would keep it from being written is refused before hours of reading.

    So is a page inside the cache.

    Raises:
        SettingsError: Listing every fault.
        InputError: `--tokenizer` is no folder with a tokenizer.
    """
    from dspark_cache.report import folder_texts

    page: Path = parsed.html
    faults = []
    if page.resolve().is_relative_to(parsed.cache.resolve()):
        faults.append(f"--html: {page} lies in the cache, into which it does not belong: write it elsewhere")
    if page.is_dir():
        faults.append(f"--html: {page} is a folder: expected a file")
    elif not page.absolute().parent.is_dir():
        faults.append(f"--html: {page.parent} is no folder: make it first")
    elif not os.access(page.absolute().parent, os.W_OK):
        faults.append(f"--html: {page.parent} cannot be written to: write the page elsewhere")
    if parsed.tokenizer is not None and not parsed.tokenizer.is_dir():
        faults.append(f"--tokenizer: {parsed.tokenizer} is no folder")
    if faults:
        raise SettingsError("; ".join(faults))
    return folder_texts(parsed.tokenizer, cache.provenance)


def _put_page(page: Path, cache: CacheFolder, report: Report, texts: Texts) -> None:
    from dspark_cache.files import put_bytes
    from dspark_cache.report import render_cache_report

    put_bytes(page, render_cache_report(cache, report, texts).encode())


def _add_check(commands: Any) -> None:
    parser = add_command(
        commands,
        "check",
        _check,
        about="compare a trainer's configuration with a cache, before GPU time is spent; exit 1 if they do not fit",
        details="FILE is a recipe of NeMo AutoModel (recipe_args) or a params.yaml. Layers that SGLang or vLLM cannot\n"
        "hand to a draft are warned of; with --strict warnings are errors.",
        examples="""
            dspark-cache check cache --train-config train_dspark.yaml
            dspark-cache check cache --train-config params.yaml --strict --json
        """,
    )
    _add_cache(parser)
    parser.add_argument("--train-config", type=Path, required=True, metavar="FILE", help="the trainer's YAML")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where training will run: NeMo on a CPU needs fp32")
    parser.add_argument("--strict", action="store_true", help="take warnings for errors")
    add_json(parser)


def _check(parsed: argparse.Namespace) -> None:
    from dspark_cache.config_differences import ERROR
    from dspark_cache.manifest import read_manifest
    from dspark_cache.serving import serving_lines, serving_of
    from dspark_cache.train_config import check_train_config, describe

    found = check_train_config(parsed.cache, parsed.train_config, strict=parsed.strict, device=parsed.device)
    serving = serving_of(read_manifest(parsed.cache))
    if parsed.json:
        say_json({"differences": [item.as_json() for item in found], "serving": serving})
    else:
        say(describe(found))
        for name, text in serving_lines(serving):
            say(f"{name}: {text}")
    errors = sum(item.severity == ERROR for item in found)
    if errors:
        raise SettingsError(f"{parsed.train_config} does not fit {parsed.cache}: {errors} error(s)")


def _add_convert(commands: Any) -> None:
    parser = add_command(
        commands,
        "convert",
        _convert,
        about="make a cache from another one, without the target",
        details="What is not given stays as in SOURCE. DESTINATION appears complete and verified, or not at all;\n"
        "run again after an interruption it goes on. A cache that is there is replaced, anything else is refused.",
        examples="""
            dspark-cache convert cache padded --layout padded
            dspark-cache convert cache small --layers 1,9 --seq-length 2048 --samples 0:1000
            dspark-cache convert cache cache-eval --eval-samples 500 --part eval
        """,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder of a cache, also of NeMo AutoModel")
    parser.add_argument("destination", type=Path, metavar="DESTINATION", help="folder of the new cache")
    parser.add_argument("--layout", choices=("padded", "ragged"))
    parser.add_argument("--dtype", choices=tuple(SIGNIFICAND_BITS), help="with no more significant bits than SOURCE")
    parser.add_argument("--shard-size", type=_shard_size, metavar="N", help="samples a padded shard, or auto")
    parser.add_argument(
        "--shard-bytes", type=positive, metavar="N", help="bytes of states at which a ragged shard is full; 2 GiB"
    )
    parser.add_argument("--layers", type=integers, metavar="IDS", help="layer ids to keep, as 1,9,17")
    parser.add_argument("--seq-length", type=positive, metavar="N", help="positions to keep of each sample")
    parser.add_argument("--samples", type=span, metavar="START:STOP", help="samples to keep, without STOP")
    parser.add_argument("--eval-samples", type=positive, metavar="N", help="distinct samples, the first, to hold out")
    parser.add_argument("--part", choices=("train", "eval"), default="train", help="which part to write then")
    parser.add_argument("--pad-token-id", type=int, metavar="ID", help="id at padding, of a source that does not say")
    parser.add_argument("--no-check-disk", action="store_true", help="begin although too little disk is free")
    _add_jobs(parser, "threads that convert, then verify")
    add_json(parser, "print what was made as JSON, as `inspect` does")


def _shard_size(text: str) -> int | str:
    return text if text == AUTO else positive(text)


def _convert(parsed: argparse.Namespace) -> None:
    from dspark_cache.convert import Conversion, convert_cache
    from dspark_cache.inspection import describe_cache

    convert_cache(
        parsed.source,
        parsed.destination,
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
        progress=show_progress,
    )
    if parsed.json:
        say_json(describe_cache(parsed.destination))
    else:
        say(f"{parsed.destination} is made and verified")


def _add_diff(commands: Any) -> None:
    parser = add_command(
        commands,
        "diff",
        _diff,
        about="compare two caches: what made them, samples, how far states are apart",
        details="Samples are the same if their token ids are. It exits 0 whatever it finds.",
        examples="""
            dspark-cache diff cache old/cache
            dspark-cache diff cache old/cache --all --json
        """,
    )
    parser.add_argument("first", type=Path, metavar="FIRST", help="folder of a cache")
    parser.add_argument("second", type=Path, metavar="SECOND", help="folder of another")
    parser.add_argument(
        "--max-samples", type=positive, metavar="N", default=64, help="common samples to compare; default: %(default)s"
    )
    parser.add_argument("--all", action="store_true", help="compare all common samples")
    parser.add_argument("--pad-token-id", type=int, metavar="ID", help="id at padding, of caches that do not say")
    add_json(parser)


def _diff(parsed: argparse.Namespace) -> None:
    from dspark_cache.diff import describe, diff_caches

    count = None if parsed.all else parsed.max_samples
    found = diff_caches(
        parsed.first, parsed.second, max_samples=count, pad_token_id=parsed.pad_token_id, progress=show_progress
    )
    if parsed.json:
        say_json(found)
    else:
        say(describe(found))


def _add_fetch(commands: Any) -> None:
    parser = add_command(
        commands,
        "fetch",
        _fetch,
        about="get a version of a cache from a git and DVC repository; print its folder",
        details="What is missing is fetched into DVC's cache, compared with its recorded sha256, and linked.\n"
        "`open_cache` in Python does the same and opens it.",
        examples="""
            dspark-cache fetch git@host:team/drafts.git --rev v1
            dspark-cache fetch . --rev v1 --shards 0:10
        """,
    )
    parser.add_argument("repository", metavar="REPOSITORY", help="its URL, or folder")
    parser.add_argument("--rev", help="tag, branch or commit; default: the default branch, or the folder as it is")
    parser.add_argument("--path", default="cache", help="the cache's path in it; default: %(default)s")
    parser.add_argument("--shards", type=span, metavar="START:STOP", help="shards to get, without STOP")
    add_json(parser)


def _fetch(parsed: argparse.Namespace) -> None:
    from dspark_cache.versions import fetch_cache

    shards = range(*parsed.shards) if parsed.shards else None
    folder = fetch_cache(parsed.repository, parsed.rev, path=parsed.path, shards=shards)
    if parsed.json:
        say_json({"folder": str(folder)})
    else:
        say(str(folder))
