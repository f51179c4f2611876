"""Conversions whose source is replaced, that meet a second one, that are killed, or find a record that is not whole.

The same at every point at which a conversion changes a file: `test_crash_sweep`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from dspark_cache import CachedDSparkDataset, write_shard
from dspark_cache.cli import main
from dspark_cache.convert import Conversion, convert_cache
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, SettingsError, VerificationError
from dspark_cache.provenance import read_provenance
from dspark_cache.schema import INPUT_IDS, LAST_HIDDEN, LOSS_MASK
from tests.caches import equal, record_files
from tests.repository import GOLDEN, kill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Hook = Callable[[str], None]

LOCK, BUILDING, RECORD = ".cache.building.lock", ".cache.building", ".cache.building.jsonl"
NUM_SAMPLES = 7
RAGGED = Conversion(layout="ragged", shard_bytes=1)
"""A shard of two files for each sample."""
FINISHED = [f"{kind}-{shard:06d}.safetensors" for shard in range(3) for kind in ("shard", "samples")]


class Stop(Exception):
    """Ends a conversion where a test wants it to end."""


def convert(source: Path, target: Path, conversion: Conversion = RAGGED, hook: Hook = lambda _: None) -> Path:
    """Convert; the hook is told of each unit of progress, by the name of the step and its number, as "convert 1"."""

    @contextmanager
    def progress(name: str, _total: int, _unit: str) -> Iterator[Callable[[int], None]]:
        done: list[int] = []

        def advance(units: int) -> None:
            done.append(units)
            hook(f"{name} {len(done)}")

        yield advance

    convert_cache(source, target, conversion, progress=progress)
    return target


def at(moment: str, act: Callable[[], object]) -> Hook:
    """Return a hook that acts at one moment."""
    return lambda reached: act() if reached == moment else None


def stop() -> None:
    raise Stop


def files(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir()}


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("s*-*.safetensors")}


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def source(make_cache: Callable[..., Path]) -> Path:
    cache = make_cache(NUM_SAMPLES, 2)
    record_files(cache)
    return cache


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "converted").mkdir()
    return folder


@pytest.fixture
def wanted(source: Path, tmp_path: Path) -> dict[str, bytes]:
    """The files of a conversion that nothing disturbs."""
    return files(convert(source, tmp_path / "wanted"))


@pytest.fixture
def interrupted(source: Path, folder: Path) -> dict[str, int]:
    """Three of seven shards are finished; return their files' inodes."""
    with pytest.raises(Stop):
        convert(source, folder / "cache", hook=at("convert 3", stop))
    assert left(folder) == [BUILDING, RECORD, LOCK]
    assert sorted(inodes(folder / BUILDING)) == sorted(FINISHED)
    return inodes(folder / BUILDING)


def other_states(cache: Path, copy: Path) -> Path:
    """Copy a cache, with other states in each shard."""
    shutil.copytree(cache, copy)
    for number, path in enumerate(sorted(copy.glob("shard-*"))):
        tensors = load_file(path)
        write_shard(copy, number, {**tensors, LAST_HIDDEN: -tensors[LAST_HIDDEN]})
    return copy


REPLACED = " was replaced while it was in use: manifest.json or provenance.json is another; open the cache again"


@pytest.mark.parametrize(
    ("moment", "message"),
    [
        ("lengths 1", f"{{source}}{REPLACED}"),
        ("lengths 7", "{source}/target_weights.safetensors: sha256 is .*, provenance.json says "),
        ("convert 1", "{source}/shard-000001.safetensors: sha256 is .*, provenance.json says "),
        ("convert 7", f"{{source}}{REPLACED}"),
    ],
)
def test_a_source_replaced_while_it_is_converted_is_refused(
    make_cache: Callable[..., Path], source: Path, folder: Path, tmp_path: Path, moment: str, message: str
) -> None:
    other = other_states(source, tmp_path / "other")
    shutil.copy(make_cache(2, 2) / "target_weights.safetensors", other)
    record_files(other)
    (folder / "cache").mkdir()
    (folder / "cache/manifest.json").touch()

    def replace() -> None:
        source.rename(tmp_path / "away")
        other.rename(source)

    with pytest.raises(CacheFormatError, match=message.format(source=re.escape(str(source)))):
        convert(source, folder / "cache", hook=at(moment, replace))
    assert left(folder / "cache") == ["manifest.json"]


def test_a_source_without_provenance_is_told_apart_by_its_files_and_its_manifest(
    make_cache: Callable[..., Path], folder: Path, tmp_path: Path
) -> None:
    source, same = make_cache(NUM_SAMPLES, 2), Conversion(layout="ragged", shard_bytes=1, pad_token_id=0)
    others = [other_states(source, tmp_path / "other"), make_cache(NUM_SAMPLES, 2, train_data_path="other")]

    def replace() -> None:
        shutil.rmtree(source)
        others.pop(0).rename(source)

    with pytest.raises(CacheFormatError, match=r"shard-000001.safetensors is another file with no recorded sha256"):
        convert(source, folder / "cache", same, at("lengths 2", replace))
    with pytest.raises(CacheFormatError, match=re.escape(f"{source}{REPLACED}")):
        convert(source, folder / "cache", same, at("convert 7", replace))
    assert not (folder / "cache").exists()


def test_a_source_that_goes_away_is_refused(source: Path, folder: Path, tmp_path: Path) -> None:
    gone = f"{source} was changed while it was in use: no such file: {source}/shard-000001.safetensors; open it again"
    with pytest.raises(CacheNotFoundError, match=re.escape(gone)):
        convert(source, folder / "cache", hook=at("lengths 1", lambda: source.rename(tmp_path / "away")))
    assert left(folder) == []


def test_a_source_replaced_once_it_is_read_changes_nothing(
    source: Path, wanted: dict[str, bytes], folder: Path, tmp_path: Path
) -> None:
    other = other_states(source, tmp_path / "other")

    def replace() -> None:
        source.rename(tmp_path / "away")
        other.rename(source)

    assert files(convert(source, folder / "cache", hook=at("verify 1", replace))) == wanted


@pytest.mark.parametrize("has_provenance", [True, False])
def test_what_is_finished_of_another_source_is_not_gone_on_with(
    make_cache: Callable[..., Path], folder: Path, tmp_path: Path, *, has_provenance: bool
) -> None:
    """Another target may have made a cache with the same manifest."""
    source, conversion = make_cache(NUM_SAMPLES, 2), replace(RAGGED, pad_token_id=0)
    other = other_states(source, tmp_path / "other")
    for cache in (source, other) if has_provenance else ():
        record_files(cache)
    with pytest.raises(Stop):
        convert(source, folder / "cache", conversion, at("convert 3", stop))
    source.rename(tmp_path / "away")
    other.rename(source)
    found = convert(source, folder / "cache", conversion)
    assert files(found) == files(convert(source, tmp_path / "wanted", conversion))


def lose_line(folder: Path) -> None:
    """Tear the last line: of what a power loss left of it, the file system may give zeros."""
    content = (folder / RECORD).read_bytes()
    (folder / RECORD).write_bytes(content[:-9] + bytes(9))


def lose_file(folder: Path) -> None:
    (folder / BUILDING / FINISHED[-1]).unlink()


def cut_file(folder: Path) -> None:
    path = folder / BUILDING / FINISHED[-1]
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [lose_line, lose_file, cut_file])
def test_a_file_that_is_not_recorded_or_not_as_recorded_is_written_anew(
    source: Path, wanted: dict[str, bytes], folder: Path, interrupted: dict[str, int], harm: Callable[[Path], None]
) -> None:
    harm(folder)
    assert files(convert(source, folder / "cache")) == wanted
    found = inodes(folder / "cache")
    assert [name for name in FINISHED if found[name] != interrupted[name]] == FINISHED[-1:]
    assert left(folder) == [LOCK, "cache"]


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [b"\xff\xfe\0"],
        [b"null"],
        [b'{"key": 1}'],
        [b'"another key"', b'["shard-000000.safetensors", {"bytes": 1, "sha256": ""}]'],
        [b"KEY", b"5"],
        [b"KEY", b"[1]"],
        [b"KEY", b'[[], {"bytes": 1}]'],
        [b"KEY", b'["shard-000000.safetensors", 5]'],
        [b"KEY", b'["shard-000000.safetensors", {}]'],
        [b"KEY", b'["shard-000000.safetensors", {"bytes": 5}]'],
        [b"[" * 100_000],
    ],
)
@pytest.mark.usefixtures("interrupted")
def test_a_record_that_nobody_wrote_is_not_believed(
    source: Path, wanted: dict[str, bytes], folder: Path, lines: list[bytes]
) -> None:
    key = (folder / RECORD).read_bytes().splitlines()[0]
    (folder / RECORD).write_bytes(b"".join(line.replace(b"KEY", key) + b"\n" for line in lines))
    assert files(convert(source, folder / "cache")) == wanted
    assert left(folder) == [LOCK, "cache"]


@pytest.mark.usefixtures("interrupted")
def test_finished_files_that_rot_are_not_put_in_place_and_made_anew_by_the_next_run(
    source: Path, wanted: dict[str, bytes], folder: Path
) -> None:
    path = folder / BUILDING / FINISHED[0]
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # the offsets of samples come last
    path.write_bytes(content)
    with pytest.raises(VerificationError, match=rf"\[bytes\] {FINISHED[0]}: sha256 is "):
        convert(source, folder / "cache")
    assert left(folder) == [LOCK]
    assert files(convert(source, folder / "cache")) == wanted


@pytest.mark.parametrize("name", [BUILDING, RECORD])
def test_a_link_in_the_way_of_what_is_built_is_not_followed(
    source: Path, wanted: dict[str, bytes], folder: Path, tmp_path: Path, name: str
) -> None:
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").write_text("precious")
    (folder / name).symlink_to(precious if name == BUILDING else precious / "file")
    assert files(convert(source, folder / "cache")) == wanted
    assert left(precious) == ["file"]
    assert (precious / "file").read_text() == "precious"
    assert left(folder) == [LOCK, "cache"]


def test_the_folders_that_the_destination_lacks_are_made(source: Path, wanted: dict[str, bytes], folder: Path) -> None:
    assert files(convert(source, folder / "a/b/cache")) == wanted


PAUSING = """
import sys
from contextlib import contextmanager
from dspark_cache import cache_commands, cli

@contextmanager
def progress(name, total, unit):
    def advance(units):
        print(name, flush=True)
        sys.stdin.readline()
    yield advance

cache_commands.show_progress = progress
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command line, waiting for a line after each unit of progress."""


def arguments(source: Path, folder: Path) -> list[str]:
    return ["convert", str(source), str(folder / "cache"), "--layout", "ragged", "--shard-bytes", "1", "--jobs", "1"]


@pytest.fixture
def paused(source: Path, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion in a process of its own that waits after its third shard, until its stdin ends."""
    with subprocess.Popen(
        [sys.executable, "-c", PAUSING, *arguments(source, folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout
        for expected in [*["lengths"] * NUM_SAMPLES, *["convert"] * 3]:
            assert process.stdout.readline() == f"{expected}\n", process.communicate()
            if expected == "lengths" or sorted(inodes(folder / BUILDING)) != sorted(FINISHED):
                process.stdin.write("\n")
                process.stdin.flush()
        yield process
        process.kill()


def test_a_second_conversion_to_the_same_folder_is_refused_and_the_first_ends_well(
    source: Path,
    wanted: dict[str, bytes],
    folder: Path,
    paused: subprocess.Popen[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(source, folder)) == 1
    holder = f"process {paused.pid} on host {os.uname().nodename} (lock {folder}/{LOCK})"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {folder} is being written by {holder}"
    out, err = paused.communicate()
    assert (paused.returncode, err) == (0, "")
    assert out.endswith(f"verify\n{folder}/cache is made and verified\n")
    assert files(folder / "cache") == wanted
    assert left(folder) == [LOCK, "cache"]


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (signal.SIGKILL, -9, ""),
        pytest.param(signal.SIGTERM, 143, "terminated\n", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "interrupted\n", marks=pytest.mark.slow),
    ],
)
def test_a_killed_conversion_goes_on_where_it_was(
    source: Path,
    wanted: dict[str, bytes],
    folder: Path,
    paused: subprocess.Popen[str],
    how: signal.Signals,
    code: int,
    words: str,
) -> None:
    assert kill(paused, how) == (code, words)
    assert left(folder) == [BUILDING, RECORD, LOCK]
    finished = inodes(folder / BUILDING)
    assert sorted(finished) == sorted(FINISHED)
    assert main(arguments(source, folder)) == 0
    assert files(folder / "cache") == wanted
    assert inodes(folder / "cache").items() >= finished.items()
    assert left(folder) == [LOCK, "cache"]


CASE, PAD_TOKEN_ID = GOLDEN / "cases/q3-markers-bf16/cache", 707


def test_a_cache_of_the_reference_is_converted_in_two_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At padding the reference has the states of pad tokens, which are no sample's."""
    with pytest.raises(Stop):
        convert(
            CASE,
            folder / "cache",
            replace(RAGGED, shard_bytes=1 << 18, pad_token_id=PAD_TOKEN_ID),
            at("convert 2", stop),
        )
    finished = inodes(folder / BUILDING)
    options = ["--layout", "ragged", "--shard-bytes", str(1 << 18), "--jobs", "1"]
    command = ["convert", str(CASE), str(folder / "cache"), *options]
    assert main(command) == 1
    assert capsys.readouterr().err == (
        f"error: {CASE} does not say which token is at padding: pass --pad-token-id, the target's tokenizer's "
        "pad_token_id, or 0 if it has none; the first samples end in the ids [707, 707, 707, 707, 707, 707, 613, 343]\n"
    )
    assert main([*command, "--pad-token-id", str(PAD_TOKEN_ID)]) == 0
    assert inodes(folder / "cache").items() >= finished.items()
    assert len(finished) == 4
    old, new = CachedDSparkDataset(CASE), CachedDSparkDataset(folder / "cache", padded=False)
    assert len(new) == len(old) == 24
    for sample, expected in zip(new, old, strict=True):
        length = len(sample[INPUT_IDS])
        assert equal(sample, {key: value[:length] for key, value in expected.items()})
        assert (expected[INPUT_IDS][length:] == PAD_TOKEN_ID).all()
        assert not expected[LOSS_MASK][length:].any()


def test_samples_that_a_cut_leaves_without_enough_supervision_are_dropped(
    make_cache: Callable[..., Path], folder: Path
) -> None:
    """Of samples of 3 to 8 tokens, each supervised from its middle on, a cut to 4 tokens leaves 2, 2, 2, 1, 1 and 0."""
    source = make_cache(NUM_SAMPLES, 2)
    record_files(source, tokens={"min_loss_tokens": 2})
    whole = CachedDSparkDataset(convert(source, folder / "whole", Conversion(samples=(1, 7))))
    assert len(whole) == 6
    found = convert(source, folder / "cut", Conversion(samples=(1, 7), seq_length=4))
    kept = CachedDSparkDataset(found)
    assert [int(sample[LOSS_MASK].sum()) for sample in kept] == [2, 2, 2]
    for index, sample in enumerate(kept):
        assert equal(sample, {key: value[:4] for key, value in whole[index].items()})
    provenance = read_provenance(found)
    assert provenance
    assert provenance.conversions[-1]["dropped_min_loss_tokens"] == 3
    assert provenance.conversions[-1]["changes"] == {"num_samples": 3, "seq_length": 4}
    with pytest.raises(SettingsError, match=f"^no sample of {source} is left, 7 have too few supervised tokens$"):
        convert(source, folder / "none", Conversion(seq_length=1))
