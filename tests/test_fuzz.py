"""Every parser of a file that may come from elsewhere, fed with anything: a checked value or a refusal by name.

Four kinds of input for each: bytes, JSON of any values, a valid document with changes to its structure, and a valid
text with changes to its bytes. A few hundred each time, ten thousand a parser under the mark `slow`. The inputs tried
are printed: `pytest -rP tests/test_fuzz.py`. What is refused with which words is in each parser's own tests.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import tracemalloc
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark_cache import CachedDSparkDataset, write_manifest, write_shard, write_target_weights
from dspark_cache.blocks import Block, BlockStore, PlannedBlock, block_name
from dspark_cache.cache_files import CacheFolder
from dspark_cache.errors import DsparkCacheError
from dspark_cache.files import file_digest
from dspark_cache.ledger import Ledger, place_samples, read_ledger
from dspark_cache.manifest import ragged_manifest, read_manifest
from dspark_cache.provenance import FileRecord, Provenance, read_provenance
from dspark_cache.schema import HIDDEN, INPUT_IDS, LAST_HIDDEN, LOSS_MASK, SAMPLE_OFFSETS
from dspark_cache.shard_file import ShardFile, write_tensors
from dspark_cache.strict_json import read_json_object
from dspark_cache.tokens import Tokens
from dspark_cache.verify import verify_cache
from tests import caches
from tests.conftest import VOCAB_SIZE, padded_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Tally

Document = dict[str, Any]
DIGEST = "0123456789abcdef" * 4


def key(number: int) -> str:
    return f"{number:032x}"


# Valid documents

MANIFEST: Document = caches.MANIFEST | {"chat_template_sha256": DIGEST, "format_version": 1}
RAGGED: Document = {name: value for name, value in MANIFEST.items() if name != "shard_size"} | {
    "format_version": 2,
    "layout": "ragged",
    "pad_token_id": 0,
    "shard_samples": [2, 4, 1],
}
RECORD: Document = {"bytes": 633, "sha256": DIGEST, "samples": 2, "tokens": 9, "supervised_tokens": 4}
PROVENANCE: Document = {
    "provenance_version": 2,
    "layout": "padded",
    "shards_version": 2,
    "pad_token_id": 995,
    "tokens": {"chat_template": "{{ x }}\n", "seq_length": 8, "train_split": None, "notes": {"a": 1}},
    "capture": {"dropped": {key(9): "not finite"}, "identity": {"hidden_size": 4}, "logits": {"logit_scale": 0.5}},
    "files": {
        "manifest.json": {"bytes": 1, "sha256": DIGEST},
        "shard-000000.safetensors": RECORD,
        "samples-000000.safetensors": {"bytes": 72, "sha256": DIGEST},
    },
}
BLOCK: Document = {
    "name": "block-00000000000000a3",
    "samples": [key(1), key(2)],
    "lengths": [2, 3],
    "bytes": 100,
    "sha256": DIGEST,
    "dropped": {key(9): "layer 1 is not finite"},
    "environment": {"accelerator": "cpu", "threads": 2},
}
LEDGER: Document = {
    "capture_version": 2,
    "identity": {"hidden_size": 4, "target_layer_ids": [-1, 3], "compute_dtype": "bf16", "weights": "sha256:0"},
    "target_model": "inputs/target",
    "target_model_type": "qwen3",
    "vocab_size": 32,
    "num_hidden_layers": 6,
    "logits": {"logit_scale": 0.5},
    "weights_bytes": 7,
    "weights_sha256": DIGEST,
    "blocks": [BLOCK, {**BLOCK, "name": "block-00000000000000a4", "samples": [], "lengths": [], "dropped": {}}],
}
PLAN: Document = {"blocks": [[key(1), key(2)], []]}
TOKENS: Document = {
    "num_samples": 3,
    "num_tokens": 6,
    "supervised_tokens": 2,
    "seq_length": 3,
    "pad_token_id": 0,
    "sha256": DIGEST,
    "train_data_path": "data",
    "train_split": None,
    "chat_template_sha256": DIGEST,
    "mask_reasoning_content": False,
    "mask_generation_prompt": False,
    "shuffle_seed": 42,
    "dropped": {},
}
HEADER: Document = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "I64", "shape": [1], "data_offsets": [12, 20]},
    "c": {"dtype": "BOOL", "shape": [0, 5], "data_offsets": [20, 20]},
}


# What a value that is given back must be, said apart from the code that checks it


def is_whole(value: object, minimum: int, maximum: int) -> bool:
    return type(value) is int and minimum <= value <= maximum


def is_digest(value: object) -> bool:
    return type(value) is str and len(value) == 64 and all(digit in "0123456789abcdef" for digit in value)


def is_key(value: object) -> bool:
    return type(value) is str and len(value) == 32 and all(digit in "0123456789abcdef" for digit in value)


def is_block_name(value: object) -> bool:
    return (
        type(value) is str
        and value[:6] == "block-"
        and len(value) == 22
        and all(digit in "0123456789abcdef" for digit in value[6:])
    )


def are_layers(value: object) -> bool:
    return (
        type(value) is list
        and all(is_whole(layer, -1, 10**20) for layer in value)
        and all(one < other for one, other in pairwise(value))
    )


EXTENT = (1, 1 << 31)
MANIFEST_RANGES = {
    "hidden_size": EXTENT,
    "num_hidden_layers": EXTENT,
    "num_samples": (0, 1 << 48),
    "seq_length": EXTENT,
    "shuffle_seed": (1 - (1 << 63), (1 << 63) - 1),
    "target_hidden_dim": EXTENT,
    "target_last_hidden_dim": EXTENT,
    "target_vocab_size": EXTENT,
}


def check_manifest(folder: Path, manifest: Document) -> None:
    written = json.loads((folder / "manifest.json").read_bytes())
    assert manifest == {"mask_reasoning_content": False, "mask_generation_prompt": False} | written
    version = manifest["format_version"]
    assert is_whole(version, 1, 2)
    assert manifest.get("complete", True) is True
    ranges = MANIFEST_RANGES | ({"shard_size": (1, 1 << 48)} if version == 1 else {"pad_token_id": (0, 1 << 31)})
    for name, (minimum, maximum) in ranges.items():
        assert name not in manifest or is_whole(manifest[name], minimum, maximum)
    for name in ("mask_reasoning_content", "mask_generation_prompt"):
        assert type(manifest[name]) is bool
    for name in ("target_model", "target_model_type", "train_data_path"):
        assert type(manifest.get(name, "")) is str
    assert type(manifest.get("train_split", "")) in (str, type(None))
    assert manifest.get("dtype", "bf16") in ("bf16", "fp16", "fp32")
    assert is_digest(manifest.get("chat_template_sha256", DIGEST))
    assert are_layers(manifest.get("target_layer_ids", []))
    if {"hidden_size", "target_layer_ids", "target_hidden_dim", "target_last_hidden_dim"} <= manifest.keys():
        assert manifest["target_last_hidden_dim"] == manifest["hidden_size"]
        assert manifest["target_hidden_dim"] == manifest["hidden_size"] * len(manifest["target_layer_ids"])
    if version == 2:
        assert RAGGED.keys() <= manifest.keys()
        assert manifest["layout"] == "ragged"
        assert all(is_whole(count, 1, 1 << 48) for count in manifest["shard_samples"])
        assert sum(manifest["shard_samples"]) == manifest["num_samples"]


def sealed(document: Document) -> Document:
    """Return provenance with the digest of itself that goes with it."""
    content = {name: value for name, value in document.items() if name != "sha256"}
    text = json.dumps(content, separators=(",", ":"), sort_keys=True)
    return {**content, "sha256": hashlib.sha256(text.encode("ascii")).hexdigest()}


def check_provenance(folder: Path, provenance: Provenance) -> None:
    written = json.loads((folder / "provenance.json").read_bytes())
    assert sealed(written) == written
    assert provenance.origin().items() <= written.items()
    assert provenance.layout in ("padded", "ragged")
    assert is_whole(provenance.shards_version, 1, (1 << 63) - 1)
    assert is_whole(provenance.pad_token_id, 0, (1 << 63) - 1)
    assert type(provenance.tokens) is type(provenance.capture) is dict
    assert provenance.files.keys() == written["files"].keys()
    for name, record in provenance.files.items():
        kind, _, rest = name.partition("-")
        digits = rest.removesuffix(".safetensors")
        is_shard = kind in ("shard", "samples") and len(digits) == 6 and digits.isascii() and digits.isdecimal()
        assert name in ("manifest.json", "target_weights.safetensors") or (is_shard and name == f"{kind}-{rest}")
        assert is_whole(record.num_bytes, 0, (1 << 63) - 1)
        assert is_digest(record.sha256)
        assert record.counts.keys() <= {"samples", "tokens", "supervised_tokens"}
        assert all(is_whole(count, 0, (1 << 63) - 1) for count in record.counts.values())
        assert record.as_json() == written["files"][name]
    assert is_whole(provenance.total("tokens"), 0, 1 << 70)


def check_block(_: Path, block: Block) -> None:
    assert is_block_name(block.name)
    assert len(block.samples) == len(block.lengths)
    assert all(map(is_key, (*block.samples, *block.dropped)))
    assert all(is_whole(length, 1, 10**20) for length in block.lengths)
    assert block.num_tokens == sum(block.lengths)
    assert is_whole(block.num_bytes, 0, (1 << 63) - 1)
    assert is_digest(block.sha256)
    assert type(block.dropped) is type(block.environment) is dict
    assert all(type(reason) is str for reason in block.dropped.values())
    assert block.as_json().keys() == BLOCK.keys()


def check_ledger(folder: Path, ledger: Ledger) -> None:
    written = json.loads((folder / "features.json").read_bytes())
    assert ledger.identity == written["identity"]
    assert is_whole(ledger.hidden_size, 1, (1 << 63) - 1)
    assert are_layers(ledger.layer_ids)
    assert ledger.layer_ids
    assert ledger.compute_dtype in ("bf16", "fp16", "fp32")
    assert type(ledger.target_model) is type(ledger.target_model_type) is str
    for count in (ledger.vocab_size, ledger.num_hidden_layers, ledger.weights_bytes):
        assert is_whole(count, 1, (1 << 63) - 1)
    assert is_digest(ledger.weights_sha256)
    assert all(type(number) in (int, float) for number in ledger.logits.values())
    assert len(ledger.blocks) == len(written["blocks"])
    for block in ledger.blocks:
        check_block(folder, block)
    # What the stages after capture ask of a ledger.
    assert len(ledger.environments()) <= len(ledger.blocks)
    lengths: dict[str, int] = {}
    for block in ledger.blocks:
        lengths |= zip(block.samples, block.lengths, strict=True)
    if lengths:
        assert None not in place_samples(ledger, list(lengths), list(lengths.values()))


def check_plan(_: Path, plan: list[PlannedBlock]) -> None:
    for block in plan:
        assert is_block_name(block.name)
        assert type(block.samples) is tuple
        assert all(map(is_key, block.samples))
        assert block.name == block_name(block.samples)


def check_tokens(_: Path, tokens: Tokens) -> None:
    assert (len(tokens), tokens.num_tokens) == (3, 6)
    assert [tokens.length(index) for index in range(3)] == [1, 2, 3]
    assert tokens.input_ids(2).tolist() == [3, 4, 5]
    assert is_whole(tokens.seq_length, 3, (1 << 63) - 1)
    assert is_whole(tokens.pad_token_id, 0, (1 << 63) - 1)
    assert is_digest(tokens.sha256)
    assert type(tokens.identity["train_data_path"]) is str
    assert type(tokens.identity["mask_reasoning_content"]) is bool
    assert is_whole(tokens.identity["shuffle_seed"], 0, (1 << 63) - 1)


def check_header(folder: Path, file: ShardFile) -> None:
    path = folder / "a.safetensors"
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    due = 8 + length
    for place in sorted(file.places.values(), key=lambda place: (place.offset, place.spec.num_bytes)):
        assert place.offset == due
        assert isinstance(place.spec.dtype, torch.dtype)
        assert type(place.spec.shape) is tuple
        assert all(is_whole(extent, 0, (1 << 63) - 1) for extent in place.spec.shape)
        due += place.spec.num_bytes
    assert due == size == file.size
    for name, place in file.places.items():
        if place.spec.shape and 0 < place.spec.num_bytes < 1 << 16:
            assert file.read_rows(name, 0, place.spec.shape[0]).shape == place.spec.shape


# Parsers


@dataclass(frozen=True)
class Parser:
    """One parser and what it is fed with.

    Attributes:
        document: A valid document.
        file: Name of the file inside a folder, or what it begins with, that messages must name.
        read: Folder to the value.
        check: Asserts of the folder and the value.
        put: Folder, text and a number to draw from: writes the file, and what belongs to it.
    """

    document: Document
    file: str
    read: Callable[[Path], Any]
    check: Callable[[Path, Any], None]
    put: Callable[[Path, bytes, int], None] | None = None

    @property
    def text(self) -> bytes:
        """The document as its producer would write it."""
        return json.dumps(self.document, indent=2, sort_keys=True).encode()

    def write(self, folder: Path, text: bytes, number: int) -> None:
        if self.put is None:
            (folder / self.file).write_bytes(text)
        else:
            self.put(folder, text, number)


def put_provenance(folder: Path, text: bytes, number: int) -> None:
    """Write provenance, every other time with the right digest, so that what lies behind it is reached."""
    if number % 2:
        with suppress(ValueError, AttributeError, RecursionError):
            text = json.dumps(sealed(json.loads(text))).encode()
    (folder / "provenance.json").write_bytes(text)


def put_header(folder: Path, text: bytes, number: int) -> None:
    """Write a file with this header: mostly of the size that it asks for, or of any, or with any header length."""
    way, number = number % 6, number // 6
    length = number % (1 << 64) if way == 0 else len(text)
    size = {1: 20, 2: number % (1 << 42)}.get(way, asked_size(text))
    path = folder / "a.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)


def asked_size(text: bytes) -> int:
    """Return the bytes of data that a header asks for, as far as it says and up to 4 TiB, of which none are written."""
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(text).items() if name != "__metadata__"]
        return min(max(0, *ends), 1 << 42) if ends else 0
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
        return 0


def put_tokens(folder: Path, text: bytes, _: int) -> None:
    path = folder / "tokens.safetensors"
    if not path.exists():
        path.touch()
        offsets = torch.tensor([0, 1, 3, 6])
        ids = torch.arange(6, dtype=torch.int32)
        tensors = {"input_ids": ids, "loss_mask": ids.to(torch.uint8) % 2, "sample_offsets": offsets}
        write_tensors(path, tensors)
    (folder / "tokens.json").write_bytes(text)


def put_plan(folder: Path, text: bytes, _: int) -> None:
    store = BlockStore(folder, LEDGER["identity"])
    store.folder.mkdir(exist_ok=True)
    (store.folder / "plan.json").write_bytes(text)


def read_block(folder: Path) -> Block:
    path = folder / f"{BLOCK['name']}.json"
    return Block.parse(read_json_object(path), name=str(path))


PARSERS = {
    "manifest": Parser(MANIFEST, "manifest.json", read_manifest, check_manifest),
    "ragged manifest": Parser(RAGGED, "manifest.json", read_manifest, check_manifest),
    "provenance": Parser(sealed(PROVENANCE), "provenance.json", read_provenance, check_provenance, put_provenance),
    "ledger": Parser(LEDGER, "features.json", lambda f: read_ledger(f / "features.json"), check_ledger),
    "block": Parser(BLOCK, f"{BLOCK['name']}.json", read_block, check_block),
    "plan": Parser(PLAN, "", lambda f: BlockStore(f, LEDGER["identity"]).read_plan(), check_plan, put_plan),
    "tokens": Parser(TOKENS, "tokens.", Tokens, check_tokens, put_tokens),
    "header": Parser(HEADER, "a.safetensors", lambda f: ShardFile(f / "a.safetensors"), check_header, put_header),
}


# Whole caches

LAYOUTS = ("padded", "ragged")
NUM_SAMPLES, LENGTH, WIDTH, LAYERS = 4, 8, 4, 2


def padded_manifest(**changes: Any) -> dict[str, Any]:
    sizes = {"num_samples": NUM_SAMPLES, "seq_length": LENGTH, "hidden_size": WIDTH, "target_last_hidden_dim": WIDTH}
    layers = {"target_layer_ids": [0, 1], "target_hidden_dim": WIDTH * LAYERS, "target_vocab_size": VOCAB_SIZE}
    return {**MANIFEST, **sizes, **layers, **changes}


def put_shard(folder: Path, layout: str, index: int, samples: list[dict[str, torch.Tensor]]) -> None:
    """Write a shard of padded samples in either layout."""
    if layout == "padded":
        write_shard(folder, index, {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
        return
    lengths = [int((sample[LAST_HIDDEN] != 0).any(dim=-1).sum()) for sample in samples]
    joined = {
        key: torch.cat([sample[key][:length] for sample, length in zip(samples, lengths, strict=True)])
        for key in samples[0]
    }
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    states = {HIDDEN: joined[HIDDEN], LAST_HIDDEN: joined[LAST_HIDDEN], SAMPLE_OFFSETS: offsets}
    tokens = {INPUT_IDS: joined[INPUT_IDS].int(), LOSS_MASK: joined[LOSS_MASK].byte(), SAMPLE_OFFSETS: offsets}
    for kind, tensors in (("shard", states), ("samples", tokens)):
        path = folder / f"{kind}-{index:06d}.safetensors"
        path.touch()
        write_tensors(path, tensors)


def record_files(folder: Path, layout: str, samples: list[dict[str, torch.Tensor]]) -> None:
    """Record every file of a cache as it is, with two samples in each shard."""
    files = {}
    for path in sorted(folder.iterdir()):
        own = samples[2 * int(path.stem[-6:]) :][:2] if path.name.startswith("shard-") else []
        counts = {
            "samples": len(own),
            "tokens": sum(int((sample[LAST_HIDDEN] != 0).any(dim=-1).sum()) for sample in own),
            "supervised_tokens": sum(int(sample[LOSS_MASK].sum()) for sample in own),
        }
        size, digest = path.stat().st_size, file_digest(path)
        files[path.name] = FileRecord(num_bytes=size, sha256=digest, counts=counts if own else {})
    tokens = {"seq_length": LENGTH, "train_split": None}
    capture = {"identity": {"hidden_size": WIDTH}, "dropped": {}, "logits": {}}
    Provenance(layout=layout, shards_version=2, pad_token_id=0, tokens=tokens, capture=capture, files=files).put(folder)


def make_sound(folder: Path, layout: str) -> Path:
    """Write a sound cache of four samples in two shards."""
    samples = [padded_sample(index, LENGTH, WIDTH, LAYERS, torch.bfloat16) for index in range(NUM_SAMPLES)]
    manifest = padded_manifest()
    if layout == "ragged":
        manifest = ragged_manifest(manifest, pad_token_id=0, shard_samples=[2, 2])
    write_manifest(folder, manifest)
    for index in range(2):
        put_shard(folder, layout, index, samples[2 * index : 2 * index + 2])
    weights = torch.nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
    torch.nn.init.ones_(weights.weight)
    write_target_weights(folder, weights, weights, torch.bfloat16)
    record_files(folder, layout, samples)
    return folder


# Inputs

ODD_TEXTS = [
    "",
    "ragged",
    "padded",
    "bf16",
    "BF16",
    "I64",
    "block-00000000000000a1",
    "block-000000000000000١",
    DIGEST,
    DIGEST[:-1],
    key(7),
    "\ud800",
    "\0",
]
EDGES = [0, 1, 2, 1 << 31, 1 << 48, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**19, 10**20, 10**30, 10**400]
texts = st.sampled_from(ODD_TEXTS) | st.text(max_size=6)
numbers = st.integers(-2, 12) | st.sampled_from(EDGES) | st.sampled_from(EDGES).map(int.__neg__)
leaves = st.none() | st.booleans() | numbers | st.floats() | texts
values = st.recursive(
    leaves, lambda parts: st.lists(parts, max_size=4) | st.dictionaries(texts, parts, max_size=4), max_leaves=8
)
PIECES = [
    b'"a":1,"a":2,',
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"-0",
    b"0.0",
    b'"\\ud800"',
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\0",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"9" * 5000,
    b"{}",
    b",",
    b"null",
    b"true",
]


def encode(value: object, *, ascii_only: bool) -> bytes:
    """Write JSON as Python does, NaN and lone surrogates included."""
    return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", errors="surrogatepass")


@st.composite
def any_json(draw: st.DrawFn, document: Document) -> bytes:
    """Draw any values, most of them under keys of the document, now and then nested as deep as can be."""
    keys = st.sampled_from(sorted(document)) | texts
    value = draw(st.dictionaries(keys, values, max_size=6) | values)
    if isinstance(value, dict) and draw(st.booleans()):
        value = document | value
    text = encode(value, ascii_only=draw(st.booleans()))
    depth = draw(st.just(0) | st.sampled_from([0, 1, 20, 100_000]))
    opened, closed = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'{"identity":[', b"]}")]))
    text = opened * depth + text + closed * depth
    if depth and draw(st.booleans()):
        text = b'{"' + draw(st.sampled_from(sorted(document))).encode() + b'":' + text + b"}"
    return text


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a document but the document itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in items:
        yield (*path, name)
        yield from places(part, (*path, name))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    """Return what is at a place of a document."""
    for part in path:
        document = document[part]
    return document


@st.composite
def changed_document(draw: st.DrawFn, document: Document) -> bytes:
    """Draw one to three changes of the structure: an entry deleted, replaced, added, or exchanged with another."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        paths = list(places(document))
        if not paths:
            break
        *path, name = draw(st.sampled_from(paths))
        holder = at(document, tuple(path))
        change = draw(st.sampled_from(["delete", "replace", "nudge", "add", "exchange", "none"]))
        if change == "delete":
            del holder[name]
        elif change == "replace" or (change == "nudge" and type(holder[name]) is not int):
            holder[name] = draw(values)
        elif change == "nudge":
            holder[name] += draw(st.sampled_from([-1, 1, 8, 1 << 32]))
        elif change == "add" and isinstance(holder, dict):
            holder[draw(texts)] = draw(values)
        elif change == "add":
            holder.insert(name, draw(values))
        elif change == "exchange":
            other = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            holder[name], holder[other] = holder[other], holder[name]
    return encode(document, ascii_only=draw(st.booleans()))


@st.composite
def changed_text(draw: st.DrawFn, text: bytes) -> bytes:
    """Draw one to four changes of the bytes: flipped, set, inserted, deleted, repeated, cut off."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop = min(len(text), start + draw(st.integers(1, 20)))
        change = draw(st.sampled_from(["flip", "set", "insert", "delete", "repeat", "cut"]))
        if change == "flip" and text:
            text = text[:start] + bytes([text[start] ^ 1 << draw(st.integers(0, 7))]) + text[start + 1 :]
        elif change == "set":
            text = text[:start] + draw(st.binary(min_size=1, max_size=1)) + text[start + 1 :]
        elif change == "insert":
            text = text[:start] + draw(st.sampled_from(PIECES) | st.binary(max_size=4)) + text[start:]
        elif change == "delete":
            text = text[:start] + text[stop:]
        elif change == "repeat":
            text = text[:stop] + text[start:]
        else:
            text = text[:start]
    return text


KINDS: dict[str, Callable[[Parser], st.SearchStrategy[bytes]]] = {
    "bytes": lambda _: st.binary(max_size=200),
    "any json": lambda parser: any_json(parser.document),
    "changed document": lambda parser: changed_document(parser.document),
    "changed text": lambda parser: changed_text(parser.text),
}


# Tests

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all inputs: each overwrites the file before it."""
    return tmp_path_factory.mktemp("fuzz")


def come_of(parser: Parser, folder: Path, text: bytes, number: int) -> str:
    """Feed one input to a parser; say what came of it, and fail on all but the two things that may."""
    parser.write(folder, text, number)
    try:
        value = parser.read(folder)
    except DsparkCacheError as error:
        assert parser.file  # the plan's parser has no refusals
        named = (str(folder / parser.file), f"the cache in {folder} is incomplete: its manifest ")
        assert any(name in str(error) for name in named)  # noqa: PT017 - both outcomes are right
        return "refused"
    parser.check(folder, value)
    return "refused" if value == [] else "accepted"


@pytest.mark.parametrize("name", PARSERS)
def test_a_valid_document_is_accepted_so_that_the_rest_is_about_the_changes(name: str, folder: Path) -> None:
    assert come_of(PARSERS[name], folder, PARSERS[name].text, 4) == "accepted"


@pytest.mark.parametrize("examples", [75, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PARSERS)
def test_anything_gives_a_checked_value_or_a_refusal_by_name(
    name: str, kind: str, examples: int, folder: Path, tally: Tally
) -> None:
    parser = PARSERS[name]
    outcomes = Counter(tried=0, accepted=0, refused=0)

    @settings(
        max_examples=examples,
        derandomize=examples == 75,  # the same each time, where a failure would stop somebody's work
        deadline=None,
        database=None,
        suppress_health_check=SLOW,
    )
    @given(text=KINDS[kind](parser), number=st.integers(0, (1 << 70) - 1))
    def feed(text: bytes, number: int) -> None:
        outcomes["tried"] += 1
        outcomes[come_of(parser, folder, text, number)] += 1

    feed()
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{name}, {kind}: inputs {counts}, losses 0")  # noqa: T201 - for people, by -rP
    tally(f"fuzzed {name}", outcomes["tried"])
    tally("losses", 0)
    assert outcomes["tried"] >= examples
    assert outcomes["tried"] == outcomes["accepted"] + outcomes["refused"]
    if kind == "changed document":  # else nothing but the JSON parser would have been tried
        assert outcomes["accepted"] > examples / 50
        assert outcomes["refused"] > examples / 50


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {layout: make_sound(tmp_path_factory.mktemp("fuzz") / "cache", layout) for layout in LAYOUTS}


@pytest.mark.parametrize("examples", [50, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["manifest.json", "provenance.json"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_with_any_manifest_or_provenance_is_used_or_refused(
    caches: dict[str, Path], layout: str, name: str, examples: int, tally: Tally
) -> None:
    """Whatever its digest lets through is compared with all the other files."""
    path = caches[layout] / name
    original = path.read_bytes()
    document = json.loads(original)
    outcomes = Counter(tried=0, accepted=0, refused=0)

    @settings(
        max_examples=examples, derandomize=examples == 50, deadline=None, database=None, suppress_health_check=SLOW
    )
    @given(text=changed_document(document) | any_json(document))
    def feed(text: bytes) -> None:
        outcomes["tried"] += 1
        path.write_bytes(text) if name == "manifest.json" else put_provenance(path.parent, text, 1)
        outcome = "refused"
        with suppress(DsparkCacheError):
            dataset = CachedDSparkDataset(path.parent)
            assert len([dataset[index] for index in range(len(dataset))]) == NUM_SAMPLES
        with suppress(DsparkCacheError):
            if not verify_cache(CacheFolder(path.parent), "values").findings:
                outcome = "accepted"
        outcomes[outcome] += 1
        assert outcome == "refused" or name == "provenance.json"  # which may say anything of where a cache is from

    feed()
    path.write_bytes(original)
    assert verify_cache(CacheFolder(path.parent), "values").findings == []
    print(f"{layout} cache by its {name}: inputs {dict(outcomes)}, losses 0")  # noqa: T201 - for people, by -rP
    tally(f"fuzzed caches by {name}", outcomes["tried"])
    assert outcomes["tried"] == outcomes["accepted"] + outcomes["refused"] >= examples


@pytest.mark.parametrize("name", PARSERS)
def test_no_number_in_a_document_makes_a_parser_take_memory(name: str, folder: Path) -> None:
    parser = PARSERS[name]
    paths = [path for path in places(parser.document) if type(at(parser.document, path)) is int]
    for path in paths:
        for number in (1 << 40, 1 << 62, (1 << 63) - 1):
            document = copy.deepcopy(parser.document)
            at(document, path[:-1])[path[-1]] = number
            text = encode(sealed(document) if name == "provenance" else document, ascii_only=True)
            tracemalloc.start()
            try:
                come_of(parser, folder, text, 4)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert peak < 1 << 19, (path, number)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("block", ("name",), "block-000000000000000١"),
        ("block", ("name",), "block-000001"),
        ("plan", ("blocks", 0, 0), f"{key(1)[:-1]}١"),
        ("plan", ("blocks", 0), {key(1): key(2)}),
        ("plan", ("blocks", 0), {"name": "block-000001", "samples": [key(1)]}),
        ("block", ("dropped", key(9)), 5),
        ("ledger", ("logits", "logit_scale"), "x"),
    ],
)
def test_what_would_hardly_be_drawn_is_refused_too(
    name: str, path: tuple[Any, ...], value: object, folder: Path
) -> None:
    document = copy.deepcopy(PARSERS[name].document)
    at(document, path[:-1])[path[-1]] = value
    assert come_of(PARSERS[name], folder, encode(document, ascii_only=False), 4) == "refused"
