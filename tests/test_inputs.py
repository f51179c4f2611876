"""Where inputs lie and how a change in them is seen; whatever DVC would not see is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from dspark_cache.errors import InputError
from dspark_cache.inputs import (
    Fingerprints,
    Input,
    data_path,
    ensure_pinned,
    input_files,
    is_inline_template,
    is_watched,
    locate_inputs,
    missing_file,
)
from dspark_cache.settings import check_settings

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PIN = "sha256:" + "0a" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with sound inputs, and things beside them that DVC does not watch."""
    root = tmp_path / "repository"
    for name in (
        "inputs/data/rows.jsonl",
        "inputs/target/config.json",
        "inputs/templates/chat.jinja",
        "elsewhere/rows.jsonl",
        "elsewhere/model/config.json",
        "elsewhere/chat.jinja",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def locate(root: Path, data: dict[str, Any] | None = None, target: dict[str, Any] | None = None) -> tuple[Input, Input]:
    sections = {"data": {"path": "inputs/data/rows.jsonl", **(data or {})}, "target": target or {}}
    return locate_inputs(check_settings(sections), root)


def faults(root: Path, data: dict[str, Any] | None = None, target: dict[str, Any] | None = None) -> list[str]:
    with pytest.raises(InputError) as error:
        locate(root, data, target)
    first, *rest = str(error.value).split("\n  ")
    assert first == "the inputs have faults:"
    return rest


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ({}, Input(text="inputs/target", kind="watched", revision=None)),
        ({"model": "./inputs/../inputs/target"}, "watched"),
        ({"model": "elsewhere/model", "revision": PIN}, "pinned"),
        ({"model": "inputs/../elsewhere/model", "revision": PIN}, "pinned"),
        ({"model": "owner/name.with-dots_1", "revision": COMMIT}, "hub"),
        ({"model": "gpt2", "revision": COMMIT}, "hub"),
    ],
)
def test_how_a_change_in_the_target_is_seen(root: Path, target: dict[str, Any], expected: Input | str) -> None:
    if isinstance(expected, str):
        expected = Input(text=target["model"], kind=expected, revision=target.get("revision"))  # type: ignore[arg-type]
    data, found = locate(root, target=target)
    assert found == expected
    assert data == Input(text="inputs/data/rows.jsonl", kind="watched", revision=None)


def test_absolute_paths_are_watched_or_pinned_as_relative_ones_are(root: Path) -> None:
    data, target = locate(
        root,
        {"path": str(root / "inputs/data")},
        {"model": str(root / "elsewhere/model"), "revision": PIN},
    )
    assert (data.kind, target.kind) == ("watched", "pinned")


def test_a_folder_whose_name_only_begins_like_inputs_is_not_watched(root: Path) -> None:
    assert is_watched(Path("inputs/x"), root)
    assert not is_watched(Path("inputs2/x"), root)
    assert not is_watched(Path("inputs/../x"), root)


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:7], COMMIT.upper(), COMMIT + "0", PIN, None])
def test_a_hub_id_needs_a_whole_commit(root: Path, revision: str | None) -> None:
    assert faults(root, target={"model": "owner/name", "revision": revision}) == [
        "target.model: owner/name is no local path, and as a hub id it needs target.revision to be a commit of 40 "
        f"hexadecimal digits (branches and tags move); found {revision!r}"
    ]


@pytest.mark.parametrize("revision", [None, COMMIT, "sha256:" + "0A" * 32, PIN + "0", PIN[7:]])
def test_a_path_outside_inputs_needs_a_fingerprint(root: Path, revision: str | None) -> None:
    assert faults(root, data={"path": "elsewhere/rows.jsonl", "revision": revision}) == [
        "data.path: elsewhere/rows.jsonl lies outside inputs/, where DVC does not watch it: move it there, or set "
        f"data.revision to its fingerprint (dspark-cache fingerprint elsewhere/rows.jsonl); found {revision!r}"
    ]


@pytest.mark.parametrize("model", ["inputs/targt", "./owner/name", "../name", "/nowhere/model", "a/b/c", "owner/na me"])
def test_what_is_neither_path_nor_hub_id_is_a_missing_file(root: Path, model: str) -> None:
    (found,) = faults(root, target={"model": model, "revision": COMMIT})
    assert found.startswith(f"target.model: no such file: {root / model}")


def test_data_may_be_a_hub_id_as_well(root: Path) -> None:
    data, _ = locate(root, {"path": "owner/name", "revision": COMMIT})
    assert data == Input(text="owner/name", kind="hub", revision=COMMIT)
    assert faults(root, data={"path": "owner/name"})[0].startswith("data.path: owner/name is no local path, and as a ")


@pytest.mark.parametrize("path", ["rows.jsonl", "owner/rows.parquet", "elsewhere/name", "inputs/name", "../name"])
def test_a_mistyped_path_is_no_hub_id(root: Path, path: str) -> None:
    (found,) = faults(root, data={"path": path, "revision": COMMIT})
    assert found.startswith(f"data.path: no such file: {root / path}")


def test_a_missing_file_is_named_with_the_nearest_name(root: Path) -> None:
    (found,) = faults(root, data={"path": "inputs/data/row.jsonl"})
    place = root / "inputs/data"
    assert found == f"data.path: no such file: {place / 'row.jsonl'}; did you mean {place / 'rows.jsonl'}?"


def test_the_nearest_name_is_that_of_the_first_part_that_is_missing(root: Path) -> None:
    error = missing_file("KEY", root / "inputz/data/rows.jsonl")
    assert str(error) == f"KEY: no such file: {root / 'inputz/data/rows.jsonl'}; did you mean {root / 'inputs'}?"
    assert str(missing_file("KEY", root / "zzz")) == f"KEY: no such file: {root / 'zzz'}"


@pytest.mark.parametrize("text", ["{% for m in messages %}", "{{ messages }}"])
def test_an_inline_template_has_no_place(root: Path, text: str) -> None:
    assert is_inline_template(text)
    locate(root, target={"chat_template": text})


def test_a_template_file_lies_under_inputs(root: Path) -> None:
    assert not is_inline_template("inputs/templates/chat.jinja")
    locate(root, target={"chat_template": "inputs/templates/chat.jinja"})
    assert faults(root, target={"chat_template": "elsewhere/chat.jinja"}) == [
        "target.chat_template: elsewhere/chat.jinja lies outside inputs/, where DVC does not watch it: move it there"
    ]
    (found,) = faults(root, target={"chat_template": "inputs/templates/chat.j2"})
    assert found == (
        f"target.chat_template: no such file: {root / 'inputs/templates/chat.j2'}; "
        f"did you mean {root / 'inputs/templates/chat.jinja'}?"
    )
    (found,) = faults(root, target={"chat_template": "inputs/templates"})
    assert found.startswith(f"target.chat_template: no such file: {root / 'inputs/templates'}")


def test_a_long_text_without_jinja_is_a_missing_template_file(root: Path) -> None:
    (found,) = faults(root, target={"chat_template": "x" * 300})
    assert found.startswith("target.chat_template: no such file: ")


def test_links_that_dvc_does_not_see_through_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside.jsonl").write_text("x")
    (root / "inputs/data/inside.jsonl").symlink_to(root / "elsewhere/rows.jsonl")
    locate(root)
    (root / "inputs/data/folder").symlink_to(root / "elsewhere/model")
    (root / "inputs/data/out.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (root / "inputs/target/broken").symlink_to("/nowhere/at/all")
    assert sorted(faults(root)) == [
        "inputs/data/folder links to a folder, which DVC does not look into: put the folder itself there",
        "inputs/data/out.jsonl links out of the repository: put the file itself there",
        "inputs/target/broken links out of the repository: put the file itself there",
    ]


def test_a_repository_that_is_itself_behind_a_link_is_fine(root: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(root)
    (root / "inputs/data/inside.jsonl").symlink_to(root / "elsewhere/rows.jsonl")
    assert locate(tmp_path / "link")[0].kind == "watched"


def test_all_faults_are_reported_at_once(root: Path) -> None:
    (root / "inputs/data/folder").symlink_to(root / "elsewhere")
    found = faults(root, {"path": "inputs/none"}, {"model": "owner/name", "chat_template": "elsewhere/chat.jinja"})
    assert [fault.split()[0] for fault in found] == [
        "data.path:",
        "target.model:",
        "target.chat_template:",
        "inputs/data/folder",
    ]


# Fingerprints


def folder(path: Path, **files: str) -> Path:
    for name, content in files.items():
        file = path / name.replace("__", "/").replace("_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return path


def test_a_file_s_fingerprint_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"abc")
    assert Fingerprints(None).of(tmp_path / "rows.jsonl") == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_a_folder_s_fingerprint_is_that_of_the_listing_sha256sum_prints(tmp_path: Path) -> None:
    path = folder(tmp_path / "data", b_json="2", a__z_json="1", a_json="3")
    names = ["a.json", "a/z.json", "b.json"]
    assert [name for name, _ in input_files(path)] == names
    listing = subprocess.run(["sha256sum", *names], cwd=path, capture_output=True, check=True).stdout
    told: list[int] = []
    assert Fingerprints(None, told.append).of(path) == "sha256:" + hashlib.sha256(listing).hexdigest()
    assert told == [1, 1, 1]


def test_what_is_no_input_does_not_count(tmp_path: Path) -> None:
    path = folder(tmp_path / "data", a_json="1", b__c_json="2")
    before = Fingerprints(None).of(path)
    folder(path, README_md="x", readme="x", b__ReadMe_rst="x", a_json_dvc="x")
    for name in (".gitignore", ".cache/x.json", "b/.hidden", "__pycache__/x.pyc"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("x")
    assert Fingerprints(None).of(path) == before
    with pytest.raises(InputError) as error:
        Fingerprints(None).of(path, accept=lambda name: name.endswith(".dvc"))
    assert str(error.value) == f"{path} holds no input files"


def test_content_names_and_choice_of_files_decide(tmp_path: Path) -> None:
    prints = Fingerprints(None)
    found = [
        prints.of(folder(tmp_path / "one", a_json="1", b_json="2")),
        prints.of(folder(tmp_path / "content", a_json="1", b_json="3")),
        prints.of(folder(tmp_path / "swapped", a_json="2", b_json="1")),
        prints.of(folder(tmp_path / "renamed", a_json="1", c_json="2")),
        prints.of(folder(tmp_path / "deeper", a_json="1", b__b_json="2")),
        prints.of(tmp_path / "one", accept=lambda name: name == "a.json"),
    ]
    assert len(set(found)) == len(found)
    assert prints.of(folder(tmp_path / "same", a_json="1", b_json="2")) == found[0]


def doctor_memo(memo: Path) -> None:
    """Replace every remembered digest by one that no file has."""
    content = json.loads(memo.read_text())
    memo.write_text(json.dumps({key: [*value[:3], "f" * 64] for key, value in content.items()}))


def test_a_remembered_digest_is_used_while_inode_size_and_mtime_are_the_same(tmp_path: Path) -> None:
    file, memo = tmp_path / "rows.jsonl", tmp_path / "deep" / "memo.json"
    file.write_text("abc")
    true = Fingerprints(memo).of(file)
    doctor_memo(memo)
    assert Fingerprints(memo).of(file) == "sha256:" + "f" * 64
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert Fingerprints(memo).of(file) == true
    doctor_memo(memo)
    file.write_text("abcd")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    longer = "sha256:" + hashlib.sha256(b"abcd").hexdigest()
    assert Fingerprints(memo).of(file) == longer
    doctor_memo(memo)
    shutil.copy2(file, tmp_path / "copy")
    os.replace(tmp_path / "copy", file)  # noqa: PTH105 - another inode, the same size and time
    assert Fingerprints(memo).of(file) == longer
    assert json.loads(memo.read_text())[str(file.resolve())][3] == longer.removeprefix("sha256:")


@pytest.mark.parametrize("content", ["", "[", "[]", '{"x": 1, "x": 2}', "\udcff"])
def test_an_unreadable_memo_is_forgotten(tmp_path: Path, content: str) -> None:
    file, memo = tmp_path / "rows.jsonl", tmp_path / "memo.json"
    file.write_text("abc")
    memo.write_bytes(content.encode("utf-8", "surrogateescape"))
    found = Fingerprints(memo).of(file)
    assert found == Fingerprints(None).of(file)
    assert list(json.loads(memo.read_text())) == [str(file.resolve())]


@pytest.mark.parametrize("value", [None, 1, "x", [], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_an_odd_entry_of_the_memo_is_not_used(tmp_path: Path, value: object) -> None:
    file, memo = tmp_path / "rows.jsonl", tmp_path / "memo.json"
    file.write_text("abc")
    memo.write_text(json.dumps({str(file.resolve()): value}))
    assert Fingerprints(memo).of(file) == Fingerprints(None).of(file)


def test_a_pinned_input_that_changed_is_refused_with_the_value_to_write(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("abc")
    found = Fingerprints(None).of(file)
    pinned = Input(text="../rows.jsonl", kind="pinned", revision=found)
    ensure_pinned(pinned, file, Fingerprints(None), key="data.path")
    file.write_text("abd")
    now = Fingerprints(None).of(file)
    with pytest.raises(InputError) as error:
        ensure_pinned(pinned, file, Fingerprints(None), key="data.path")
    assert str(error.value) == f"data.path: ../rows.jsonl has changed: expected {found}, found revision: {now}"


@pytest.mark.parametrize("kind", ["watched", "hub"])
def test_other_kinds_are_not_hashed(tmp_path: Path, kind: Any) -> None:
    ensure_pinned(Input(text="x", kind=kind, revision=None), tmp_path / "none", Fingerprints(None), key="data.path")


def test_a_hub_commit_identifies_content_as_it_is(tmp_path: Path) -> None:
    path = folder(tmp_path / "data", a_json="1", b_json="2")
    prints = Fingerprints(None)
    hub = Input(text="owner/name", kind="hub", revision=COMMIT)
    assert prints.of_input(hub, tmp_path / "none") == f"hub:owner/name@{COMMIT}"
    watched = Input(text="data", kind="watched", revision=None)
    assert prints.of_input(watched, path) == prints.of(path)
    only = prints.of_input(watched, path, accept=lambda name: name == "a.json")
    assert only == prints.of(path, accept=lambda name: name == "a.json")


def test_a_hub_data_set_is_found_in_the_hub_s_cache_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    hub = Input(text="nobody/nothing", kind="hub", revision=COMMIT)
    with pytest.raises(InputError, match=f"^data.path: cannot fetch nobody/nothing at {COMMIT}: "):
        data_path(hub, tmp_path)
    snapshot = tmp_path / "datasets--nobody--nothing" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert data_path(hub, tmp_path) == snapshot
    local = Input(text="inputs/data", kind="watched", revision=None)
    assert data_path(local, tmp_path) == tmp_path / "inputs/data"
