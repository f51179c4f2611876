"""Caches from elsewhere that mean harm: refused by name, without waiting, without memory by their word, never run.

What a cache is fed to runs in a process of its own with a time and an amount of memory: `attempt`. Texts and headers
of any kind are in test_fuzz, damage in test_corruption, single faults in the tests of each parser; here are whole
caches, and what stands in the place of a file.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import socket
import stat
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from dspark_cache import CachedDSparkDataset, write_manifest
from dspark_cache.cli import main
from dspark_cache.dtypes import TensorSpec
from dspark_cache.errors import CacheFormatError
from dspark_cache.manifest import ragged_manifest
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS
from dspark_cache.shard_file import encode_header
from tests.repository import ROOT
from tests.test_fuzz import LAYOUTS, LENGTH, NUM_SAMPLES, make_sound, padded_manifest, sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILES = {
    "padded": ("manifest.json", "provenance.json", "shard-000001.safetensors", "target_weights.safetensors"),
    "ragged": (
        "manifest.json",
        "provenance.json",
        "shard-000001.safetensors",
        "samples-000001.safetensors",
        "target_weights.safetensors",
    ),
}
PLACES = [*(("ragged", name) for name in FILES["ragged"]), ("padded", "shard-000001.safetensors")]
"""Every kind of file. The others of the padded layout are read by the same lines as those of the ragged one."""


# Sound caches


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A sound cache of four samples in two shards in each layout."""
    return {layout: make_sound(tmp_path_factory.mktemp("hostile") / "cache", layout) for layout in LAYOUTS}


@pytest.fixture
def cache(sound: dict[str, Path], layout: str, tmp_path: Path) -> Path:
    """A copy of a sound cache whose files are links: they are replaced, never written through."""
    return shutil.copytree(sound[layout], tmp_path / "cache", copy_function=os.link)


def replace(path: Path, content: bytes | dict[str, Any]) -> None:
    path.unlink()
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


# What is tried with a cache

PROGRAM = r"""
import json, os, pickle, resource, signal, sys
from pathlib import Path
from dspark_cache import CachedDSparkDataset, read_target_weight_modules
from dspark_cache.cli import main
from dspark_cache.errors import DsparkCacheError, VerificationError
from dspark_cache.verify import CacheFolder, verify_cache

def verify(cache):
    findings = verify_cache(CacheFolder(cache), "values").findings
    if findings:
        raise VerificationError("; ".join(map(str, findings)))

def read(cache):
    dataset = CachedDSparkDataset(cache)
    return [dataset[index] for index in range(len(dataset))]

def inspect(*arguments):
    if main(["inspect", *map(str, arguments)]):
        raise DsparkCacheError("inspect exits with 1")

WAYS = {
    "open": CachedDSparkDataset,
    "read": read,
    "pickle": lambda cache: pickle.loads(pickle.dumps(CachedDSparkDataset(cache))),
    "weights": read_target_weight_modules,
    "verify": verify,
    "inspect": inspect,
    "inspect as JSON": lambda cache: inspect(cache, "--json"),
}

WATCHED = (
    "open", "import", "exec", "compile", "pickle.find_class", "marshal.loads", "subprocess.Popen", "os.system",
    "os.exec", "socket.connect", "ctypes.dlopen",
)

events = []
sys.addaudithook(lambda event, args: events.append([event, str(args[0])]) if event in WATCHED else None)
sys.stdout = open(os.devnull, "w", encoding="utf-8")

for line in sys.stdin:
    way, cache, headroom = json.loads(line)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + headroom, resource.RLIM_INFINITY))
    signal.alarm(20)
    events.clear()
    try:
        WAYS[way](Path(cache))
        said = ["accepted", ""]
    except DsparkCacheError as error:
        said = ["refused", str(error)]
    except Exception as error:
        said = [type(error).__name__, str(error)]
    seen = list(events)
    signal.alarm(0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    os.write(1, json.dumps([*said, seen]).encode() + b"\n")
"""

WAYS = ("open", "read", "pickle", "weights", "verify", "inspect", "inspect as JSON")
GIB = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """What came of one way to use a cache.

    Attributes:
        result: "accepted", "refused" for an error of the library's own, the name of any other error, or "died with N".
        words: Of the error.
        events: What Python saw being opened, imported or run.
    """

    result: str
    words: str = ""
    events: tuple[tuple[str, str], ...] = ()


class Attempts:
    """A process that tries things with caches, under limits of memory and time; started again should it die."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            text=True,
        )

    def __call__(self, cache: Path, *ways: str, headroom: int = GIB) -> dict[str, Outcome]:
        """Try ways to use a cache, one after the other; return what came of each."""
        return {way: self._try(cache, way, headroom) for way in ways}

    def _try(self, cache: Path, way: str, headroom: int) -> Outcome:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps([way, str(cache), headroom]) + "\n")
        stdin.flush()
        said = stdout.readline()
        if not said:
            self.close()
            code = self._process.returncode
            self._start()
            return Outcome(f"died with {code}")
        result, words, events = json.loads(said)
        return Outcome(result, words, tuple((event, argument) for event, argument in events))

    def close(self) -> None:
        with self._process as process:
            assert process.stdin
            process.stdin.close()


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempts]:
    attempts = Attempts()
    yield attempts
    attempts.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_cache_is_accepted_so_that_the_rest_is_about_the_harm(
    sound: dict[str, Path], layout: str, attempt: Attempts
) -> None:
    found = attempt(sound[layout], *WAYS)
    assert found.keys() == set(WAYS)
    assert {outcome.result for outcome in found.values()} == {"accepted"}, found


# What stands in the place of a file


def link_to(target: Callable[[Path], str | Path]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.symlink_to(target(path))

    return make


def moved(path: Path) -> Path:
    """Return the good file itself, outside of the cache."""
    return path.parent.parent / "elsewhere" / path.name


def in_a_store(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Put something where a content-addressed store would have a file, and a link to it in the cache."""

    def put(path: Path) -> None:
        kept = path.parent.parent / "blobs" / "0123"
        kept.parent.mkdir()
        make(kept)
        path.symlink_to(kept)

    return put


def by_way_of_a_store(path: Path) -> None:
    """Link to the good file by a path that only looks as if it led into a store."""
    store = path.parent.parent / "files/md5/aa"
    store.mkdir(parents=True)
    path.symlink_to(f"{store}/../../../elsewhere/{path.name}")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            server.bind(f"/proc/self/fd/{descriptor}/{path.name}")  # a socket's name has at most 107 bytes
        finally:
            os.close(descriptor)


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes device nodes")


KINDS: dict[str, Callable[[Path], None]] = {
    "absolute link": link_to(moved),
    "relative link": link_to(lambda path: Path("../elsewhere") / path.name),
    "link by way of a store": by_way_of_a_store,
    "dangling link": link_to(lambda path: path.parent / "nowhere"),
    "link to a folder": link_to(lambda path: path.parent.parent),
    "link to /dev/zero": link_to(lambda _: "/dev/zero"),
    "link to /proc/self/mem": link_to(lambda _: "/proc/self/mem"),
    "link to itself": link_to(lambda path: path),
    "fifo": os.mkfifo,
    "socket": make_socket,
    "folder": Path.mkdir,
    "device": make_device,
    "link into a store, to a fifo": in_a_store(os.mkfifo),
    "link into a store, to a socket": in_a_store(make_socket),
    "link into a store, to itself": in_a_store(link_to(lambda path: path)),
}
REFUSED = {
    "manifest.json": ("open", "verify", "inspect"),
    "provenance.json": ("verify", "inspect"),
    "target_weights.safetensors": ("weights", "verify"),
}
"""What must be refused where a file is another; with a shard, opening and verifying."""


def ensure_refused(cache: Path, name: str, attempt: Attempts) -> None:
    """Try what must be refused because of one file, and what must not crash or wait because of it."""
    due = REFUSED.get(name, ("open", "verify"))
    for way, outcome in attempt(cache, *dict.fromkeys(("open", *due))).items():
        assert outcome.result in ("accepted", "refused"), (way, outcome)
        if way in due:
            assert outcome.result == "refused", way
            assert name in outcome.words or way == "inspect"


@pytest.mark.parametrize(("layout", "name"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_the_cache_s_own_is_refused_by_name_and_at_once(
    cache: Path, name: str, kind: str, attempt: Attempts
) -> None:
    path = cache / name
    moved(path).parent.mkdir()
    path.rename(moved(path))
    KINDS[kind](path)
    ensure_refused(cache, name, attempt)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_link_to_a_whole_cache_is_as_good_as_the_cache(cache: Path, attempt: Attempts) -> None:
    link = cache.parent / "link"
    link.symlink_to("cache")
    found = attempt(link, *WAYS)
    assert {outcome.result for outcome in found.values()} == {"accepted"}, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["../manifest.json", "/etc/passwd", "shard-00000١.safetensors"])
def test_a_name_in_provenance_leads_nowhere(cache: Path, name: str, attempt: Attempts) -> None:
    content = json.loads((cache / "provenance.json").read_text())
    content["files"][name] = content["files"]["manifest.json"]
    replace(cache / "provenance.json", sealed(content))
    for outcome in attempt(cache, "verify", "inspect").values():
        assert outcome.result == "refused"
        assert not [path for event, path in outcome.events if event == "open" and Path(path).name in (name, "passwd")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_files_of_the_cache_are_opened_and_nothing_is_run(cache: Path, layout: str, attempt: Attempts) -> None:
    """As Python's audit hooks see it: unpickling a class, running code, starting a program."""
    for name in ("data.pkl", "pytorch_model.bin", "samples-000009.safetensors", "shard-00000١.safetensors", "x.py"):
        (cache / name).write_bytes(pickle.dumps(Bomb(cache / "exploded")))
    opened = set()
    for way, outcome in attempt(cache, "read", "weights", "verify", "inspect").items():
        assert outcome.result == ("refused" if way == "verify" else "accepted"), outcome.words
        assert {event for event, _ in outcome.events} <= {"open", "import"}
        opened |= {str(Path(path).relative_to(cache)) for event, path in outcome.events if event == "open"}
    shards = {name.replace("000001", "000000") for name in FILES[layout]}
    assert opened <= {*FILES[layout], *shards}
    assert "manifest.json" in opened
    assert not (cache / "exploded").exists()


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_worker_processes_unpickle_nothing_of_the_cache(cache: Path, layout: str) -> None:
    dataset = CachedDSparkDataset(cache)
    bomb = pickle.dumps(Bomb(cache / "exploded"))
    for name in ("data.pkl", "manifest.json", "provenance.json", "target_weights.safetensors"):
        (cache / name).unlink(missing_ok=True)
        (cache / name).write_bytes(bomb)
    loader = DataLoader(dataset, num_workers=1, multiprocessing_context="fork")
    assert [batch[INPUT_IDS].shape for batch in loader] == [(1, LENGTH)] * NUM_SAMPLES
    replace(cache / FILES[layout][2], bomb)
    with pytest.raises(CacheFormatError, match=FILES[layout][2]):
        dataset[NUM_SAMPLES - 1]
    with pytest.raises(CacheFormatError, match=r"manifest\.json is not valid JSON"):
        CachedDSparkDataset(cache)
    assert not (cache / "exploded").exists()


# Texts


def with_length(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


PIECES: dict[str, str] = {
    "duplicate keys": '"x": 1, "x": 1',
    "NaN": '"x": NaN',
    "minus infinity": '"x": [-Infinity]',
    "a number too large": '"x": 1e999',
    "21 digits": '"x": ' + "1" * 21,
    "10,000 digits": '"x": ' + "1" * 10_000,
    "nested 100,000 deep in lists": '"x": ' + "[" * 100_000 + "]" * 100_000,
    "nested 100,000 deep in objects": '"x": ' + '{"x":' * 100_000 + "1" + "}" * 100_000,
}
"""What no JSON object may hold, though every file here has room for something that its readers do not know."""


def insert(path: Path, piece: str) -> None:
    """Put an entry where any may be: among a manifest's keys, in a header's metadata, in the tokens of provenance."""
    content = path.read_bytes()
    if path.name == "manifest.json":
        replace(path, content.replace(b"{", b"{%b," % piece.encode(), 1))
    elif path.name == "provenance.json":
        text = content.decode().replace('"tokens": {', f'"tokens": {{{piece},')
        with suppress(RecursionError, ValueError):
            text = text.replace(json.loads(text)["sha256"], sealed(json.loads(text))["sha256"])
        replace(path, text.encode())
    else:
        length = 8 + int.from_bytes(content[:8], "little")
        header = content[8:length].replace(b"{", b'{"__metadata__":{%b},' % piece.encode(), 1)
        replace(path, with_length(header) + content[length:])
    if path.name != "provenance.json":  # whose digests would tell of any change
        (path.parent / "provenance.json").unlink()


@pytest.mark.parametrize(("layout", "name"), PLACES)
def test_an_entry_that_readers_do_not_know_is_accepted(cache: Path, name: str, attempt: Attempts) -> None:
    insert(cache / name, '"x": 1')
    found = attempt(cache, *WAYS)
    assert {outcome.result for outcome in found.values()} == {"accepted"}, found


@pytest.mark.parametrize(("layout", "name"), PLACES)
@pytest.mark.parametrize("kind", PIECES)
def test_an_entry_that_is_no_strict_json_is_refused_by_name(
    cache: Path, name: str, kind: str, attempt: Attempts
) -> None:
    insert(cache / name, PIECES[kind])
    ensure_refused(cache, name, attempt)


TEXTS: dict[str, bytes] = {
    "a list": b"[1]",
    "a pickle": pickle.dumps({"format_version": 1}),
    "UTF-16": '{"format_version": 1}'.encode("utf-16"),
    "nothing but zeros": bytes(1 << 20),
}


@pytest.mark.parametrize(("layout", "name"), PLACES)
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_no_json_object_is_refused_by_name(cache: Path, name: str, kind: str, attempt: Attempts) -> None:
    replace(cache / name, TEXTS[kind] if name.endswith(".json") else with_length(TEXTS[kind]))
    ensure_refused(cache, name, attempt)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "size"), [("manifest.json", 300_000_000), ("provenance.json", 300_000_000), ("manifest.json", 1 << 40)]
)
def test_a_huge_text_is_refused_unread(cache: Path, name: str, size: int, attempt: Attempts) -> None:
    content = (cache / name).read_bytes()
    replace(cache / name, content)
    os.truncate(cache / name, size)
    found = attempt(cache, "verify", "open", headroom=1 << 27)
    assert found["verify"].result == "refused"
    assert f"{cache / name} has {size} bytes, more than " in found["verify"].words
    assert found["open"].result == ("refused" if name == "manifest.json" else "accepted"), found["open"].words


def nested(depth: int, inner: str) -> str:
    return "[" * depth + inner + "]" * depth


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("depth", [50, 900])
def test_provenance_takes_memory_by_its_size_and_not_by_its_depth(cache: Path, depth: int, attempt: Attempts) -> None:
    """Some 400 KB, under a limit of 64 MiB."""
    content = json.loads((cache / "provenance.json").read_text())
    text = json.dumps({**content, "tokens": {"a": "HERE"}})
    deep = text.replace('"HERE"', nested(depth, ",".join(["1"] * 200_000)))
    replace(cache / "provenance.json", deep.encode())
    outcome = attempt(cache, "verify", headroom=GIB // 16)["verify"]
    assert outcome.result == "refused"
    assert "provenance.json" in outcome.words


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_opens_can_be_handed_to_workers(cache: Path, attempt: Attempts) -> None:
    """A manifest with a key that no reader knows, nested 900 deep."""
    text = (cache / "manifest.json").read_text().replace("{", '{"unknown": ' + nested(900, "") + ",", 1)
    replace(cache / "manifest.json", text.encode())
    found = attempt(cache, "open", "pickle")
    assert found["pickle"].result == found["open"].result, found["pickle"].words


LONG = "x" * 1_000_000
WORDY: dict[str, tuple[str, dict[str, Any]]] = {
    "version": ("manifest.json", {"format_version": LONG}),
    "layers": ("manifest.json", padded_manifest(target_layer_ids=list(range(100_000)))),
    "keys": ("target_weights.safetensors", {LONG: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    "entry": ("shard-000001.safetensors", {LONG: 5}),
}


@pytest.mark.parametrize("layout", ["padded"])
@pytest.mark.parametrize("kind", WORDY)
def test_a_refusal_is_short_whatever_the_file_says(cache: Path, kind: str, attempt: Attempts) -> None:
    name, content = WORDY[kind]
    text = json.dumps(content).encode()
    replace(cache / name, text if name.endswith(".json") else with_length(text))
    (cache / "provenance.json").unlink()
    outcome = attempt(cache, "verify")["verify"]
    assert outcome.result == "refused"
    assert name in outcome.words
    assert len(outcome.words) < 2000


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("identity", [True, 5, "x", [1]])
def test_what_provenance_says_of_the_capture_is_compared_whatever_it_is(
    cache: Path, layout: str, identity: object, attempt: Attempts
) -> None:
    content = json.loads((cache / "provenance.json").read_text())
    replace(cache / "provenance.json", sealed({**content, "capture": {"identity": identity}}))
    outcome = attempt(cache, "verify")["verify"]
    assert outcome.result in ("accepted", "refused"), (layout, outcome)


# Sizes that no machine has, in files that cost nothing


def put_sparse(path: Path, specs: dict[str, TensorSpec]) -> None:
    """Put a file with an honest header and nothing behind it but a hole."""
    header = encode_header(specs)
    path.unlink(missing_ok=True)
    path.write_bytes(header)
    try:
        os.truncate(path, len(header) + sum(spec.num_bytes for spec in specs.values()))
    except OSError as error:
        pytest.skip(f"no sparse file of that size here: {error}")


def put_hostile(cache: Path, layout: str, *, rows: int, length: int, width: int, vocab_size: int) -> None:
    """Turn a cache into one of one shard and of any sizes, without provenance, all of its tensors zeros."""
    for path in cache.iterdir():
        path.unlink()
    sizes = {"num_samples": rows, "shard_size": rows, "seq_length": length, "hidden_size": width}
    widths = {"target_last_hidden_dim": width, "target_layer_ids": [0], "target_hidden_dim": width}
    manifest = padded_manifest(**sizes, **widths, target_vocab_size=vocab_size)
    ids = TensorSpec(dtype=torch.int64, shape=(rows, length))
    states = TensorSpec(dtype=torch.bfloat16, shape=(rows, length, width))
    if layout == "ragged":
        manifest = ragged_manifest(manifest, pad_token_id=0, shard_samples=[rows])
        offsets = TensorSpec(dtype=torch.int64, shape=(rows + 1,))
        states = TensorSpec(dtype=torch.bfloat16, shape=(rows * length, width))
        ids, masks = (TensorSpec(dtype=dtype, shape=(rows * length,)) for dtype in (torch.int32, torch.uint8))
        tokens = {INPUT_IDS: ids, LOSS_MASK: masks, SAMPLE_OFFSETS: offsets}
        put_sparse(cache / "samples-000000.safetensors", tokens)
        put_sparse(cache / "shard-000000.safetensors", {HIDDEN: states, LAST_HIDDEN: states, SAMPLE_OFFSETS: offsets})
    else:
        tensors = {INPUT_IDS: ids, LOSS_MASK: ids, HIDDEN: states, LAST_HIDDEN: states}
        put_sparse(cache / "shard-000000.safetensors", tensors)
    weight = TensorSpec(dtype=torch.bfloat16, shape=(vocab_size, width))
    put_sparse(cache / "target_weights.safetensors", {"embed_tokens.weight": weight, "lm_head.weight": weight})
    write_manifest(cache, manifest)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sample_of_terabytes_is_refused_at_open(cache: Path, layout: str, attempt: Attempts) -> None:
    """Manifest, header and size agree: 2**31 tokens of 512 numbers, in a file without a block on the disk."""
    put_hostile(cache, layout, rows=1, length=1 << 31, width=512, vocab_size=2)
    assert (cache / "shard-000000.safetensors").stat().st_size > 1 << 41
    for way, outcome in attempt(cache, "open", "read", "verify", "inspect").items():
        words = outcome.words
        assert outcome.result == "refused", words
        # Ragged shards of nothing but zeros are refused by verify for their offsets before.
        assert way == "inspect" or f"{cache}: a sample has " in words or "sample_offsets do not cut" in words


@pytest.mark.parametrize("layout", ["ragged"])
@pytest.mark.parametrize("rows", [1 << 24, 1 << 28, 1 << 40])
@pytest.mark.parametrize("way", ["open", "verify"])
def test_a_shard_of_a_million_million_samples_takes_no_memory_by_their_number(
    cache: Path, layout: str, rows: int, way: str, attempt: Attempts
) -> None:
    put_hostile(cache, layout, rows=rows, length=1, width=1, vocab_size=2)
    outcome = attempt(cache, way)[way]
    assert outcome.result == "refused", outcome
    assert "-000000.safetensors" in outcome.words or "shard_samples" in outcome.words


@pytest.mark.parametrize("layout", ["padded"])
@pytest.mark.parametrize("num_samples", [1_000_001, 1 << 48])
def test_a_manifest_of_more_shards_than_have_names_is_refused(cache: Path, num_samples: int, attempt: Attempts) -> None:
    replace(cache / "manifest.json", {**padded_manifest(), "num_samples": num_samples, "shard_size": 1})
    (cache / "provenance.json").unlink()
    found = attempt(cache, "open", "verify", headroom=GIB // 32)
    assert found["open"].result == "refused"
    assert found["verify"].result == "refused", found["verify"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", ["weights", "verify"])
def test_weights_of_terabytes_are_refused(cache: Path, layout: str, way: str, attempt: Attempts) -> None:
    """A row, as a sample, fits into memory: 2**24 numbers."""
    put_hostile(cache, layout, rows=1, length=1, width=1 << 24, vocab_size=1 << 16)
    if layout == "ragged":  # whose offsets must be right for a way to get as far as the weights
        for kind in ("shard", "samples"):
            path = cache / f"{kind}-000000.safetensors"
            with path.open("r+b") as stream:
                stream.seek(-8, os.SEEK_END)
                stream.write((1).to_bytes(8, "little"))
    found = attempt(cache, "open", way, headroom=4 * GIB)
    assert found["open"].result == "accepted"
    assert found[way].result == "refused", found[way]
    assert "target_weights.safetensors" in found[way].words


@pytest.mark.parametrize("layout", ["padded"])
def test_extents_that_overflow_are_refused_though_there_are_no_bytes(cache: Path, attempt: Attempts) -> None:
    """A manifest of the few fields that are enough leaves it to the first shard to say what a sample is."""
    replace(cache / "manifest.json", {"format_version": 1, "num_samples": 1, "shard_size": 1})
    (cache / "shard-000001.safetensors").unlink()
    empty = TensorSpec(dtype=torch.int64, shape=(1, 0, 1 << 62, 1 << 62))
    put_sparse(cache / "shard-000000.safetensors", dict.fromkeys((INPUT_IDS, LOSS_MASK, HIDDEN, LAST_HIDDEN), empty))
    outcome = attempt(cache, "read")["read"]
    assert outcome.result == "refused", outcome


# What is shown to people


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "text",
    [
        "\ud800",
        "\u2028",
        "x" * 1_000_000,
    ],
    ids=["surrogate", "separator", "long"],
)
def test_inspect_survives_any_text_of_a_manifest(cache: Path, layout: str, text: str, attempt: Attempts) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    replace(cache / "manifest.json", {**manifest, "target_model": text})
    for way, outcome in attempt(cache, "inspect", "inspect as JSON").items():
        assert outcome.result == "accepted", (layout, way, outcome.words)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_hands_no_control_characters_to_the_terminal(
    cache: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which could clear the screen, or forge the lines after them."""
    manifest = json.loads((cache / "manifest.json").read_text())
    replace(cache / "manifest.json", {**manifest, "target_model": "\x1b[2Jx\nlayout  dense", "\x1b[1m": 1})
    assert main(["inspect", str(cache)]) == 0
    assert not set(capsys.readouterr().out) & {"\x1b", "\r"}, layout


@pytest.mark.parametrize("layout", ["padded"])
def test_inspect_shows_a_cache_whose_manifest_has_few_fields(cache: Path, attempt: Attempts) -> None:
    replace(cache / "manifest.json", {"format_version": 1, "num_samples": NUM_SAMPLES, "shard_size": 2})
    found = attempt(cache, "open", "inspect")
    assert found["open"].result == "accepted"
    assert found["inspect"].result in ("accepted", "refused"), found["inspect"]


@pytest.mark.parametrize("layout", ["padded"])
def test_a_file_s_name_forges_no_lines_of_a_report(cache: Path, attempt: Attempts) -> None:
    (cache / "x\n\x1b[2Jno findings").touch()
    outcome = attempt(cache, "verify")["verify"]
    assert outcome.result == "refused"
    assert not {"\n", "\x1b"} & set(outcome.words)


# Nothing is ever unpickled or run

SOURCES = sorted([*(ROOT / "dspark_cache").glob("**/*.py"), *(ROOT / "stages").glob("**/*.py")])
FORBIDDEN = {
    *("pickle", "_pickle", "marshal", "shelve", "dbm", "joblib", "dill", "cloudpickle", "copyreg"),
    *("torch.load", "torch.jit", "np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle"),
    *("eval", "exec", "compile", "__import__"),
}


def names_in(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield every module that is imported, name that is used and attribute that is taken of a name, with its place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0], node
            yield from ((f"{node.module}.{alias.name}", node) for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id, node
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node


def calls_in(tree: ast.AST, name: str) -> Iterator[dict[str, ast.expr]]:
    """Yield the keywords of each call of a function or method called `name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == name:
                yield {keyword.arg or "**": keyword.value for keyword in node.keywords}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_module_unpickles_or_runs_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    found = [f"{name} in line {getattr(node, 'lineno', 0)}" for name, node in names_in(tree) if name in FORBIDDEN]
    assert found == []
    assert all(ast.literal_eval(keywords["typ"]) == "safe" for keywords in calls_in(tree, "YAML"))
    assert not any("allow_pickle" in keywords for keywords in calls_in(tree, "load"))


def test_the_sources_are_all_there() -> None:
    assert len(SOURCES) > 40
    assert {"shard_file.py", "target.py", "verify.py", "tokenize.py"} <= {path.name for path in SOURCES}


def test_every_model_is_loaded_from_safetensors_only() -> None:
    """`from_pretrained` of a model, told apart from a tokenizer's and a configuration's by its dtype."""
    found = 0
    for path in SOURCES:
        for keywords in calls_in(ast.parse(path.read_text()), "from_pretrained"):
            if keywords.keys() & {"dtype", "torch_dtype", "attn_implementation"}:
                found += 1
                assert ast.literal_eval(keywords["use_safetensors"]) is True, path
            else:
                assert keywords.keys() <= {"trust_remote_code", "local_files_only", "use_fast"}, path
    assert found == 1
