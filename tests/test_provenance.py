"""provenance.json: written canonically, read back exactly, and refused with every fault named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from dspark_cache.errors import CacheFormatError
from dspark_cache.provenance import MAX_PROVENANCE_BYTES, FileRecord, read_provenance
from dspark_cache.schema import LAST_HIDDEN
from dspark_cache.strict_json import MAX_DEPTH
from tests.caches import COUNTS, DIGEST, FILES, SAMPLES, SHARD, change_content, digest_of, provenance, record_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# What is written is read back


def test_a_cache_without_provenance_gives_none(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) is None
    assert read_provenance(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": "padded", "files": {}, "tokens": {}, "capture": {}},
        {"shards_version": 1, "pad_token_id": (1 << 63) - 1},
        {"files": {SAMPLES: FileRecord(num_bytes=(1 << 63) - 1, sha256=DIGEST, counts={})}},
        {"files": {SHARD: FileRecord(num_bytes=0, sha256=DIGEST, counts={**COUNTS, "tokens": (1 << 63) - 1})}},
        {"files": {"target_weights.safetensors": FileRecord(num_bytes=1, sha256=DIGEST, counts={})}},
        {"files": {"shard-999999.safetensors": FileRecord(num_bytes=1, sha256=DIGEST, counts=COUNTS)}},
        {"tokens": {"text": "\ud800\n\t\x00\u2028", "list": [1, -1.5, 1e300, None, True, {}]}},
    ],
)
def test_what_is_put_is_read_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    made = provenance(**changes)
    made.put(tmp_path)
    assert read_provenance(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == ["provenance.json"]


def test_the_bytes_are_golden(tmp_path: Path) -> None:
    """If this fails on purpose, raise PROVENANCE_VERSION, and STAGE_VERSIONS["shards"] with stages/versions.yaml."""
    provenance().put(tmp_path)
    assert (tmp_path / "provenance.json").read_text() == GOLDEN
    content = json.loads(GOLDEN)
    recorded = content.pop("sha256")
    assert digest_of(content) == recorded


GOLDEN = """{
  "capture": {
    "dropped": {},
    "logits": {
      "scale": 0.5
    }
  },
  "files": {
    "manifest.json": {
      "bytes": 0,
      "sha256": "0000000000000000000000000000000000000000000000000000000000000000"
    },
    "shard-000000.safetensors": {
      "bytes": 5,
      "samples": 2,
      "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
      "supervised_tokens": 3,
      "tokens": 7
    }
  },
  "layout": "ragged",
  "pad_token_id": 0,
  "provenance_version": 2,
  "sha256": "32636c1363aebefc792ca9231ee7eec229c42210d6f7be72927bbf5f062a8d0f",
  "shards_version": 2,
  "tokens": {
    "name": "\\u00e9",
    "seed": 42
  }
}
"""


def test_the_bytes_do_not_depend_on_the_order_of_keys(tmp_path: Path) -> None:
    provenance().put(tmp_path)
    expected = (tmp_path / "provenance.json").read_bytes()
    mixed = {name: FILES[name] for name in reversed(FILES)}
    provenance(files=mixed, tokens={"name": "é", "seed": 42}).put(tmp_path)
    assert (tmp_path / "provenance.json").read_bytes() == expected


def test_another_layout_of_the_same_json_is_the_same_provenance(tmp_path: Path) -> None:
    """The digest is one of what is said, not of spaces."""
    provenance().put(tmp_path)
    path = tmp_path / "provenance.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items())), ensure_ascii=False))
    assert read_provenance(tmp_path) == provenance()


def test_the_origin_is_everything_but_the_files(tmp_path: Path) -> None:
    made = provenance()
    made.put(tmp_path)
    content = json.loads((tmp_path / "provenance.json").read_text())
    assert made.origin() == {key: value for key, value in content.items() if key not in ("files", "sha256")}
    assert made.origin() == provenance(files={}).origin()


def test_counts_are_added_up_over_files_that_have_them() -> None:
    files = {
        **FILES,
        "shard-000001.safetensors": FileRecord(
            num_bytes=1, sha256=DIGEST, counts={"samples": 1, "tokens": 10, "supervised_tokens": 0}
        ),
    }
    made = provenance(files=files)
    assert [made.total(count) for count in ("samples", "tokens", "supervised_tokens")] == [3, 17, 3]
    assert provenance(files={}).total("tokens") == 0


# Faults


def refusal(cache: Path) -> list[str]:
    """Return the faults for which provenance is refused."""
    with pytest.raises(CacheFormatError) as caught:
        read_provenance(cache)
    prefix = f"{cache / 'provenance.json'}: "
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix).split("; ")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    provenance().put(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "key", ["provenance_version", "layout", "shards_version", "pad_token_id", "tokens", "capture", "files"]
)
def test_a_missing_field_is_named(cache: Path, key: str) -> None:
    change_content(cache, lambda content: content.pop(key))
    assert refusal(cache) == [f"missing required keys ['{key}']"]


def test_a_missing_digest_of_itself_is_named(cache: Path) -> None:
    content = json.loads((cache / "provenance.json").read_text())
    del content["sha256"]
    (cache / "provenance.json").write_text(json.dumps(content))
    assert refusal(cache) == ["missing required keys ['sha256']"]


VERSION = "provenance_version: expected 2, as this version of dspark-cache writes it, found "


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("provenance_version", 1, VERSION + "1"),
        ("provenance_version", 3, VERSION + "3"),
        ("provenance_version", True, VERSION + "True"),
        ("provenance_version", "2", VERSION + "'2'"),
        ("provenance_version", 2.0, VERSION + "2.0"),
        ("layout", "dense", "layout: expected padded or ragged, found 'dense'"),
        ("layout", ["padded"], "layout: expected padded or ragged, found ['padded']"),
        ("shards_version", 0, "shards_version: expected an integer >= 1, found 0"),
        ("shards_version", "2", "shards_version: expected an integer >= 1, found '2'"),
        ("pad_token_id", -1, "pad_token_id: expected an integer >= 0, found -1"),
        ("pad_token_id", None, "pad_token_id: expected an integer >= 0, found None"),
        ("tokens", [], "tokens: expected an object, found []"),
        ("capture", "x", "capture: expected an object, found 'x'"),
        ("files", None, "files: expected an object, found None"),
        ("files", [], "files: expected an object, found []"),
    ],
)
def test_a_field_that_is_not_as_it_must_be_is_named(cache: Path, key: str, value: object, fault: str) -> None:
    change_content(cache, lambda content: content.update({key: value}))
    assert refusal(cache) == [fault]


@pytest.mark.parametrize(
    "name",
    [
        "../shard-000000.safetensors",
        "/etc/passwd",
        "sub/shard-000000.safetensors",
        "..",
        "",
        "shard-00000.safetensors",
        "shard-0000000.safetensors",
        "shard-٠٠٠٠٠٠.safetensors",
        "shard-000000.safetensors\n",
        "shard-000000xsafetensors",
        "shard-000000.safetensors.bak",
        "xshard-000000.safetensors",
        "Manifest.json",
        "manifestxjson",
        "provenance.json",
        "target_weightsxsafetensors",
    ],
)
def test_a_name_that_no_file_of_a_cache_has_is_refused(cache: Path, name: str) -> None:
    record = GOOD if name.startswith("shard-") else {"bytes": 1, "sha256": DIGEST}
    change_content(cache, lambda content: content["files"].update({name: record}))
    assert refusal(cache) == [f"files: {name!r} is no name of a file of a cache"]


def test_a_long_name_is_cut_and_a_wrong_record_under_it_is_told_too(cache: Path) -> None:
    name, record = "shard-" + "0" * 100, {"bytes": 1, "sha256": DIGEST}
    change_content(cache, lambda content: content["files"].update({name: record}))
    assert refusal(cache) == [
        f"files: {name!r:.80} is no name of a file of a cache",
        f"files: {STATES_EXPECTED} of {name!r:.80}, found {record}",
    ]


GOOD = {"bytes": 1, "sha256": DIGEST, "samples": 1, "tokens": 2, "supervised_tokens": 1}
STATES_EXPECTED = "expected sha256 and the numbers ['bytes', 'samples', 'tokens', 'supervised_tokens']"
OTHERS_EXPECTED = "expected sha256 and the numbers ['bytes']"


@pytest.mark.parametrize(
    "record",
    [
        5,
        None,
        [],
        {},
        {"bytes": 1},
        {"sha256": DIGEST},
        {"bytes": 1, "sha256": DIGEST},
        {key: value for key, value in GOOD.items() if key != "bytes"},
        {key: value for key, value in GOOD.items() if key != "sha256"},
        {key: value for key, value in GOOD.items() if key != "samples"},
        {key: value for key, value in GOOD.items() if key != "tokens"},
        {key: value for key, value in GOOD.items() if key != "supervised_tokens"},
        {**GOOD, "bytes": -1},
        {**GOOD, "bytes": 1.0},
        {**GOOD, "bytes": True},
        {**GOOD, "bytes": "1"},
        {**GOOD, "bytes": 1 << 63},
        {**GOOD, "sha256": DIGEST.upper()},
        {**GOOD, "sha256": DIGEST[:-1]},
        {**GOOD, "sha256": None},
        {**GOOD, "samples": None},
        {**GOOD, "samples": -1},
        {**GOOD, "tokens": 1.5},
        {**GOOD, "tokens": 1 << 63},
        {**GOOD, "supervised_tokens": "1"},
        {**GOOD, "supervised_tokens": False},
        {**GOOD, "md5": "x"},
    ],
)
def test_a_record_of_states_that_is_not_as_it_must_be_is_refused(cache: Path, record: object) -> None:
    change_content(cache, lambda content: content["files"].update({SHARD: record}))
    found = dict(sorted(record.items())) if isinstance(record, dict) else record  # as the file has it
    assert refusal(cache) == [f"files: {STATES_EXPECTED} of {SHARD!r}, found {found!r:.200}"]


def test_a_long_record_is_cut(cache: Path) -> None:
    change_content(cache, lambda content: content["files"].update({SHARD: ["x" * 1000]}))
    (fault,) = refusal(cache)
    assert fault.startswith(f"files: {STATES_EXPECTED} of {SHARD!r}, found ['{'x' * 197}")
    assert fault.count("x") < 202


@pytest.mark.parametrize("name", [SAMPLES, "manifest.json", "target_weights.safetensors"])
@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        {"bytes": 1},
        {"sha256": DIGEST},
        {"bytes": -1, "sha256": DIGEST},
        {"bytes": 1, "sha256": None},
        {"bytes": 1, "sha256": DIGEST, "samples": 1},
        {"bytes": 1, "sha256": DIGEST, "tokens": 2},
        {"bytes": 1, "sha256": DIGEST, "supervised_tokens": 0},
        GOOD,
    ],
)
def test_counts_are_refused_of_a_file_without_states_as_is_anything_else_that_must_not_be(
    cache: Path, name: str, record: object
) -> None:
    """Such counts would be added up a second time."""
    change_content(cache, lambda content: content["files"].update({name: record}))
    found = dict(sorted(record.items())) if isinstance(record, dict) else record
    assert refusal(cache) == [f"files: {OTHERS_EXPECTED} of {name!r}, found {found!r:.200}"]


def test_a_record_of_each_kind_is_read(cache: Path) -> None:
    plain = {"bytes": 1, "sha256": DIGEST}
    change_content(cache, lambda content: content["files"].update({SAMPLES: plain, SHARD: GOOD}))
    found = read_provenance(cache)
    assert found is not None
    counts = {"samples": 1, "tokens": 2, "supervised_tokens": 1}
    assert found.files[SAMPLES] == FileRecord(num_bytes=1, sha256=DIGEST, counts={})
    assert found.files[SHARD] == FileRecord(num_bytes=1, sha256=DIGEST, counts=counts)
    assert (found.files[SAMPLES].as_json(), found.files[SHARD].as_json()) == (plain, GOOD)


def test_all_faults_are_reported_at_once(cache: Path) -> None:
    content = json.loads((cache / "provenance.json").read_text())
    del content["tokens"], content["capture"]
    content |= {"layout": 1, "pad_token_id": -1, "files": {"a": {"bytes": 1, "sha256": DIGEST}, SHARD: {"bytes": 1}}}
    (cache / "provenance.json").write_text(json.dumps(content))
    recorded = content.pop("sha256")
    found = digest_of(content)
    assert refusal(cache) == [
        "missing required keys ['capture', 'tokens']",
        "layout: expected padded or ragged, found 1",
        "pad_token_id: expected an integer >= 0, found -1",
        "files: 'a' is no name of a file of a cache",
        f"files: {STATES_EXPECTED} of {SHARD!r}, found {{'bytes': 1}}",
        f"sha256: its content has {found}, it says {recorded}",
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"bytes": 5', '"bytes": 6'),
        ('"pad_token_id": 0', '"pad_token_id": 1'),
        ('"scale": 0.5', '"scale": 0.25'),
        ('"seed": 42', '"sees": 42'),
        ('"tokens": {', '"tokens": {"more": 1,'),
        ('"layout": ', '"unknown": 1, "layout": '),
    ],
)
def test_a_change_of_anything_is_noticed_by_the_digest(cache: Path, old: str, new: str) -> None:
    path = cache / "provenance.json"
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    content = json.loads(path.read_text())
    recorded = content.pop("sha256")
    found = digest_of(content)
    assert refusal(cache) == [f"sha256: its content has {found}, it says {recorded}"]


@pytest.mark.parametrize("digest", ["0" * 64, "x", None, 5, DIGEST.upper()])
def test_a_digest_that_is_not_its_own_is_refused(cache: Path, digest: object) -> None:
    content = json.loads((cache / "provenance.json").read_text())
    own = content["sha256"]
    (cache / "provenance.json").write_text(json.dumps({**content, "sha256": digest}))
    if digest == "0" * 64:
        assert refusal(cache) == [f"sha256: its content has {own}, it says {digest}"]
    else:
        assert refusal(cache) == [f"sha256: expected 64 hexadecimal digits, found {digest!r}"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": NaN}', '{"files": 1, "files": 2}', "\udc80"])
def test_what_is_no_strict_json_object_is_refused(cache: Path, text: str) -> None:
    path = cache / "provenance.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CacheFormatError, match=r"provenance\.json (is not valid JSON|must hold a JSON object)"):
        read_provenance(cache)


@pytest.mark.parametrize(("start", "end"), [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("place", ["tokens", "files", "layout", "unknown"])
def test_provenance_that_is_nested_too_deep_is_refused_as_such(cache: Path, start: str, end: str, place: str) -> None:
    """What is read can be digested, compared and shown: far from the depth at which any of it would give up."""
    path = cache / "provenance.json"
    content = json.dumps({**json.loads(path.read_text()), place: "here"})
    for depth in (MAX_DEPTH - 1, MAX_DEPTH, 900, *range(960, 1000, 3), 100_000):
        path.write_text(content.replace('"here"', start * depth + (end == "}") * "1" + end * depth))
        with pytest.raises(CacheFormatError) as caught:
            read_provenance(cache)
        too_deep = str(caught.value) == f"{path} is not valid JSON: nested too deep"
        assert too_deep == (depth >= MAX_DEPTH)


def test_provenance_of_the_greatest_depth_is_read_back(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {}
    for _ in range(MAX_DEPTH - 2):
        tokens = {"a": tokens}
    made = provenance(tokens=tokens)
    made.put(tmp_path)
    assert read_provenance(tmp_path) == made


def test_a_file_too_large_is_refused_before_it_is_read(cache: Path) -> None:
    path = cache / "provenance.json"
    with path.open("r+b") as stream:
        stream.truncate(MAX_PROVENANCE_BYTES + 1)
    with pytest.raises(CacheFormatError) as caught:
        read_provenance(cache)
    size = MAX_PROVENANCE_BYTES + 1
    assert str(caught.value) == f"{path} has {size} bytes, more than the {size - 1} that such a file may have"


# Links and odd files


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    provenance().put(tmp_path)
    path = tmp_path / "cache/provenance.json"
    path.symlink_to("../provenance.json")
    with pytest.raises(CacheFormatError) as caught:
        read_provenance(tmp_path / "cache")
    assert str(caught.value) == f"{path} is a link to ../provenance.json: a cache holds files, copy it there"
    (tmp_path / "provenance.json").unlink()
    with pytest.raises(CacheFormatError, match="is a link to"):
        read_provenance(tmp_path / "cache")


@pytest.mark.parametrize("store", ["files/md5/ab/cdef", "blobs/0123"])
def test_a_link_into_a_store_is_read_and_refused_if_it_leads_nowhere(cache: Path, tmp_path: Path, store: str) -> None:
    kept, path = tmp_path / store, cache / "provenance.json"
    kept.parent.mkdir(parents=True)
    path.rename(kept)
    path.symlink_to(kept)
    assert read_provenance(cache) == provenance()
    kept.unlink()
    with pytest.raises(CacheFormatError, match=r"provenance\.json is no regular file$"):
        read_provenance(cache)


def test_a_folder_is_no_provenance(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").mkdir()
    with pytest.raises(CacheFormatError, match=r"provenance\.json is no regular file$"):
        read_provenance(tmp_path)


# A cache whose files are recorded


def test_a_recorded_cache_has_a_record_of_each_file(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(3, 2)
    made = record_files(cache)
    assert read_provenance(cache) == made
    assert set(made.files) == {path.name for path in cache.iterdir()} - {"provenance.json"}
    states = torch.cat([load_file(cache / f"shard-00000{number}.safetensors")[LAST_HIDDEN] for number in (0, 1)])
    assert made.total("tokens") == int(states.any(dim=-1).sum()) == 2 + 3 + 4
    assert made.total("samples") == 3
