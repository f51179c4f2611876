"""open_cache: any version by repository and revision, fetched once, compared once, linked and never copied."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dvc.repo import Repo

from dspark_cache import CachedDSparkDataset
from dspark_cache.cli import main
from dspark_cache.errors import CacheFormatError, CacheNotFoundError, SettingsError
from dspark_cache.files import FileLock
from dspark_cache.version_store import LINKS_FOLDER, STORE_VARIABLE
from dspark_cache.versions import fetch_cache, open_cache
from tests.caches import change_content, equal, record_files
from tests.published import GOLDEN, Published, make_published, object_path, oid, stored

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.dvc, pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc.*")]  # of dvc's own calls

SHARD = "shard-000001.safetensors"
HEAD = ("manifest.json", "provenance.json")
WEIGHTS = "target_weights.safetensors"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A repository that no test changes."""
    return make_published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def published(shared: Published, tmp_path: Path) -> Published:
    """A copy of it, with its remote, to do with as a test likes."""
    made = Published(tmp_path / "published")
    shutil.copytree(shared.base, made.base, symlinks=True)
    config = made.root / ".dvc" / "config"
    config.write_text(config.read_text().replace(str(shared.base), str(made.base)))
    made.git("commit", "--quiet", "--all", "--message", "remote")
    for tag in ("v1", "v2"):  # what a tag says of the remote is read from the clone
        made.git("checkout", "--quiet", tag, "--", "cache.dvc")
        made.git("commit", "--quiet", "--allow-empty", "--all", "--message", tag)
        made.git("tag", "--force", tag)
    return made


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty DVC cache to fetch into."""
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


def ensure_same(dataset: CachedDSparkDataset, folder: Path) -> None:
    expected = CachedDSparkDataset(folder, shards=None if dataset.share is None else dataset.shards)
    assert len(dataset) == len(expected) > 0
    assert all(equal(dataset[index], expected[index]) for index in range(len(expected)))


def damage(path: Path, content: bytes | None = None) -> None:
    """Replace a read-only object by one with a flipped bit, or other content, which DVC trusts."""
    data = bytearray(path.read_bytes()) if content is None else content
    if content is None:
        data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    path.chmod(0o444)


def flip_unseen(path: Path) -> None:
    """Change a byte of a file so that only reading it can tell."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- what a source may be ----------------------------------------------------------------------------------------


def test_the_folder_of_a_cache_is_opened_as_it_is(shared: Published, store: Path) -> None:
    folder = shared.version("v1")
    dataset = open_cache(folder, shards=range(1, 3), expect={"seq_length": 16}, max_open_files=2)
    assert dataset.cache_dir == str(folder)
    assert dataset.share == [1, 3]
    ensure_same(dataset, folder)
    assert fetch_cache(str(folder)) == folder
    with pytest.raises(CacheFormatError, match=f"^the cache in {folder} was made with a different configuration, "):
        fetch_cache(folder, expect={"seq_length": 17})
    assert not store.exists()


def test_a_cache_has_no_revisions(shared: Published) -> None:
    folder = shared.version("v1")
    message = f"rev: {folder} is a cache, which has no revisions, found 'v1': give the repository that it is from"
    with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
        open_cache(folder, "v1")


@pytest.mark.parametrize("rev", ["", " "])
def test_an_empty_revision_is_no_default_branch(shared: Published, rev: str) -> None:
    """As that of a variable that is not set."""
    for source in (shared.url, shared.root, shared.version("v1")):
        message = f"rev: expected a tag, a branch or a commit, or None, found {rev!r}"
        with pytest.raises(SettingsError, match=f"^{re.escape(message)}$"):
            fetch_cache(source, rev)


def test_a_folder_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    message = f"no such folder: {tmp_path}/x; expected that of a cache or of a repository, or a URL"
    with pytest.raises(CacheNotFoundError, match=f"^{re.escape(message)}$"):
        open_cache(tmp_path / "x", "v1")


@pytest.mark.parametrize("is_url", [False, True])
def test_every_kind_of_revision_opens_its_version(shared: Published, store: Path, is_url: bool) -> None:
    source = shared.url if is_url else shared.root
    commit = shared.git("rev-parse", "v1^{commit}")
    for rev, tag in (("v1", "v1"), ("main", "v2"), (commit, "v1"), (None, "v2"), ("v2", "v2")):
        dataset = open_cache(source, rev)
        ensure_same(dataset, shared.version(tag))
        assert Path(dataset.cache_dir).is_relative_to(store)
    assert len(list((store / LINKS_FOLDER / "versions").iterdir())) == 2


@pytest.mark.usefixtures("store")
def test_a_local_repository_without_a_revision_is_what_its_files_say(published: Published) -> None:
    assert open_cache(published.root).manifest["format_version"] == 2
    published.git("checkout", "v1", "--", "cache.dvc")  # and is not committed
    ensure_same(open_cache(published.root), published.version("v1"))
    assert open_cache(published.url).manifest["format_version"] == 2
    assert open_cache(published.root, "v1").manifest["format_version"] == 1
    published.git("tag", "--force", "v1", "v2")  # one's own tags may still move
    assert open_cache(published.root, "v1").manifest["format_version"] == 2


@pytest.mark.usefixtures("store")
def test_a_repository_inside_another_is_found_by_its_path(published: Published) -> None:
    inner = published.root / "sub"
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet", "--subdir"], cwd=make(inner), check=True)
    shutil.copy(published.root / ".dvc/config", inner / ".dvc/config")
    shutil.copy(published.root / "cache.dvc", inner / "cache.dvc")
    published.git("add", "--all")
    published.git("commit", "--quiet", "--message", "sub")
    ensure_same(open_cache(published.url, path="sub/cache/"), published.version("v2"))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


# --- bytes -------------------------------------------------------------------------------------------------------


def test_files_are_links_to_the_objects_of_dvc_s_cache(shared: Published, store: Path) -> None:
    dataset = open_cache(shared.url, "v2")
    for path in Path(dataset.cache_dir).iterdir():
        status, source = path.stat(), object_path(store, oid(path))
        assert (status.st_ino, status.st_nlink) == (source.stat().st_ino, 2)
        assert status.st_mode & 0o222 == 0
    assert stored(store) == shared.names("v2")


def test_a_local_repository_lends_its_own_cache(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    before = stored(published.root / ".dvc/cache")
    shutil.rmtree(published.remote)  # nothing is fetched
    dataset = open_cache(published.root, "v1")
    ensure_same(dataset, published.version("v1"))
    assert stored(published.root / ".dvc/cache") == before
    path = Path(dataset.cache_dir, SHARD)
    assert path.samefile(object_path(published.root / ".dvc/cache", oid(path)))


def test_what_two_versions_share_is_fetched_once_and_versions_lie_side_by_side(shared: Published, store: Path) -> None:
    first, second = open_cache(shared.url, "v1"), open_cache(shared.url, "v2")
    ensure_same(first, shared.version("v1"))
    ensure_same(second, shared.version("v2"))
    assert Path(first.cache_dir, WEIGHTS).samefile(Path(second.cache_dir, WEIGHTS))
    assert stored(store) == shared.names("v1") | shared.names("v2")


def test_a_share_fetches_the_objects_of_its_shards_alone(shared: Published, store: Path) -> None:
    files = [*HEAD, WEIGHTS]
    for shards in (range(1, 2), range(2, 3), range(1, 3), range(0, 3)):
        dataset = open_cache(shared.url, "v2", shards=shards)
        ensure_same(dataset, shared.version("v2"))
        files += [f"{kind}-00000{shard}.safetensors" for kind in ("shard", "samples") for shard in shards]
        assert stored(store) == shared.names("v2", *files)
        assert {path.name for path in Path(dataset.cache_dir).iterdir()} == set(files)


@pytest.mark.parametrize("shards", [range(2, 4), range(0, 3, 2), range(0)])
def test_a_share_that_is_none_is_refused_before_shards_are_fetched(
    shared: Published, store: Path, shards: range
) -> None:
    with pytest.raises(SettingsError, match=r"^shards: expected a range of step 1 with at least one of the shards 0"):
        open_cache(shared.url, "v2", shards=shards)
    assert stored(store) == shared.names("v2", *HEAD)
    with pytest.raises(SettingsError, match=r"^shards: expected a range of step 1 with at least one of the shards 0"):
        fetch_cache(shared.version("v2"), shards=shards)


def test_a_share_that_is_none_is_refused_without_asking_the_repository(published: Published, store: Path) -> None:
    open_cache(published.url, "v2")
    published.root.rename(published.root.with_name("away"))
    with pytest.raises(SettingsError, match=r"^shards: expected a range of step 1 with at least one of the shards 0"):
        open_cache(published.url, "v2", shards=range(0, 9))
    assert stored(store) == published.names("v2")


def test_a_cache_that_is_not_as_expected_is_refused_before_shards_are_fetched(shared: Published, store: Path) -> None:
    expect = {"seq_length": 17, "dtype": "fp32"}
    message = (
        f"the cache in {shared.url} at v2 was made with a different configuration, it does not match expect=: "
        "seq_length: expected 17, found 16; dtype: expected 'fp32', found 'bf16'"
    )
    for _ in range(2):
        with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
            open_cache(shared.url, "v2", expect=expect)
        assert stored(store) == shared.names("v2", *HEAD)
    fetch_cache(shared.url, "v2")
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message)}$"):
        fetch_cache(shared.url, "v2", expect=expect)  # also where nothing is left to fetch


# --- the second time ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("store")
def test_a_tag_or_commit_that_is_there_is_opened_without_the_repository_or_hashing(published: Published) -> None:
    commit = published.git("rev-parse", "v1^{commit}")
    for rev in ("v1", commit, "main"):
        open_cache(published.url, rev, shards=range(0, 2))
    published.base.rename(published.base.with_name("away"))
    for rev in ("v1", commit):
        dataset = open_cache(published.url, rev, shards=range(0, 2))
        assert len(dataset) == 6
    flip_unseen(Path(dataset.cache_dir, SHARD))
    open_cache(published.url, "v1", shards=range(1, 2))
    with pytest.raises(CacheNotFoundError, match=r"cannot be opened: NotGitRepository: "):  # a branch may have moved
        open_cache(published.url, "main", shards=range(0, 2))
    with pytest.raises(CacheNotFoundError, match=r"cannot be opened: NotGitRepository: "):
        open_cache(published.url, "v1")


@pytest.mark.usefixtures("store")
def test_a_branch_that_moved_is_opened_where_it_is(published: Published) -> None:
    assert open_cache(published.url, "main").manifest["format_version"] == 2
    published.git("checkout", "v1", "--", "cache.dvc")
    published.git("commit", "--quiet", "--message", "back")
    assert open_cache(published.url, "main").manifest["format_version"] == 1


@pytest.mark.usefixtures("store")
def test_bytes_that_were_compared_are_not_read_again(published: Published) -> None:
    """Of a version whose folder is gone, of another version, and after a fetch that did not get everything."""
    folder = fetch_cache(published.root, "v1")
    flip_unseen(folder / SHARD)
    shutil.rmtree(folder)
    assert fetch_cache(published.root, "v1") == folder
    assert oid(folder / SHARD) not in published.names("v1")
    flip_unseen(folder / WEIGHTS)
    other = fetch_cache(published.root, "v2")
    assert (folder / WEIGHTS).samefile(other / WEIGHTS)


def test_a_file_that_changed_is_fetched_again(published: Published, store: Path) -> None:
    folder = fetch_cache(published.url, "v1")
    path = folder / SHARD
    path.chmod(0o644)
    os.truncate(path, 100)
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
    (folder / WEIGHTS).unlink()
    damage(object_path(store, oid(published.version("v1") / WEIGHTS)))
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
    assert stored(store) == published.names("v1")
    assert {oid(path) for path in folder.iterdir()} == published.names("v1")


def test_a_file_that_changed_in_place_is_found_by_every_version_that_has_it(published: Published, store: Path) -> None:
    """Files of versions are links to the same object: who writes to one writes to all."""
    first, second = fetch_cache(published.url, "v1"), fetch_cache(published.url, "v2")
    name = oid(first / WEIGHTS)
    damage_in_place(first / WEIGHTS)
    assert oid(second / WEIGHTS) != name
    ensure_same(open_cache(published.url, "v2"), published.version("v2"))
    assert oid(second / WEIGHTS) == name
    for source, rev in ((published.url, "v1"), (published.root, "v1")):
        assert oid(fetch_cache(source, rev) / WEIGHTS) == name
    assert stored(store) == published.names("v1") | published.names("v2")


def test_a_copy_of_a_store_is_compared_once_without_the_repository(
    published: Published, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_cache(published.url, "v1")
    other = store.with_name("copy")
    shutil.copytree(store, other, copy_function=shutil.copy2)
    shutil.rmtree(published.remote)
    published.root.rename(published.root.with_name("away"))
    copied = fetch_cache(published.url, "v1", store_dir=other)
    assert copied == other / folder.relative_to(store)
    flip_unseen(copied / SHARD)
    assert fetch_cache(published.url, "v1", store_dir=other) == copied  # not read again
    os.utime(copied / SHARD)
    with pytest.raises(CacheNotFoundError, match=f"^cache of {published.url} at v1 cannot be opened: "):
        fetch_cache(published.url, "v1", store_dir=other)
    assert f"{copied / SHARD} has sha256 " in capsys.readouterr().err


def test_a_damaged_file_that_cannot_be_fetched_again_is_named_and_left_in_dvc_s_cache(
    published: Published, store: Path
) -> None:
    """It may be all that is left of it; no reader gets it."""
    folder = fetch_cache(published.url, "v1")
    damage_in_place(folder / SHARD)
    content = (folder / SHARD).read_bytes()
    (folder / WEIGHTS).unlink()
    name = oid(published.version("v1") / SHARD)
    remote = object_path(published.remote, name)
    remote.rename(remote.with_suffix(".kept"))
    for _ in range(2):
        with pytest.raises(
            CacheNotFoundError, match=rf"could they be fetched, \['{SHARD}'\].*; damaged here: {SHARD} has sha256 "
        ):
            open_cache(published.url, "v1")
        assert not (folder / SHARD).exists()
        assert object_path(store, name).read_bytes() == content
        assert stored(store) == published.names("v1")
    remote.with_suffix(".kept").rename(remote)
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
    assert stored(store) == published.names("v1")


def damage_in_place(path: Path) -> None:
    flip_unseen(path)
    os.utime(path)


def test_what_was_compared_is_on_the_disk_before_it_counts(
    shared: Published, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    open_cache(shared.url, "v1")
    assert {object_path(store, name) for name in shared.names("v1")} <= set(flushed)


def test_links_keep_what_a_cleaned_dvc_cache_has_lost(published: Published, store: Path) -> None:
    folder = fetch_cache(published.url, "v2", shards=range(0, 1))
    shutil.rmtree(store / "files")
    ensure_same(open_cache(published.url, "v2", shards=range(0, 1)), published.version("v2"))
    open_cache(published.url, "v2")
    kept = published.names("v2", *HEAD, WEIGHTS, "shard-000000.safetensors", "samples-000000.safetensors")
    assert stored(store) == published.names("v2") - kept
    assert {oid(path) for path in folder.iterdir()} == published.names("v2")


def test_what_is_remembered_may_be_lost_or_damaged(published: Published, store: Path) -> None:
    open_cache(published.url, "v1")
    for name in ("revisions.json", "checked.jsonl"):
        (store / LINKS_FOLDER / name).write_text('{"x": 1, "')
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
    assert json.loads((store / LINKS_FOLDER / "revisions.json").read_text()).keys() != {"x"}
    revisions = store / LINKS_FOLDER / "revisions.json"
    revisions.write_text(json.dumps(dict.fromkeys(json.loads(revisions.read_text()), "../..")))
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))


# --- faults ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rev", "path", "error", "message"),
    [
        ("v9", "cache", SettingsError, "cache of {} at v9: unknown Git revision 'v9': expected a tag, a branch or a "
         "commit"),
        ("v1", "x", CacheNotFoundError, "x of {} at v1: there is no such path, in git or as an output of DVC"),
        ("v1", "docs", CacheFormatError, "docs of {} at v1: expected a folder that is an output of DVC, found another "
         "file or folder"),
        ("v1", "cache/" + SHARD, CacheFormatError, "cache/" + SHARD + " of {} at v1: expected a folder that is an "
         "output of DVC, found another file or folder"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*unclosed [Pp]ack:ResourceWarning")  # dvc leaves a clone of no such revision open
@pytest.mark.parametrize("is_url", [False, True])
def test_what_a_repository_does_not_have_is_said(
    shared: Published, store: Path, is_url: bool, rev: str, path: str, error: type[Exception], message: str
) -> None:
    source = shared.url if is_url else str(shared.root)
    with pytest.raises(error, match=f"^{re.escape(message.format(source))}$"):
        open_cache(source, rev, path=path)
    assert stored(store) == set()
    gc.collect()


@pytest.mark.usefixtures("store")
def test_a_repository_that_cannot_be_cloned_is_named_without_its_password() -> None:
    message = (
        "cache of https://127.0.0.1:9/x at v1 cannot be opened: ConnectionRefusedError: [Errno 111] Connection refused"
    )
    with pytest.raises(CacheNotFoundError, match=f"^{re.escape(message)}$") as caught:
        open_cache("https://user:secret@127.0.0.1:9/x", "v1")
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("store")
def test_a_folder_of_no_repository_has_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(CacheNotFoundError, match=r": there is no such path, in git or as an output of DVC$"):
        open_cache(make(tmp_path / "empty"))
    with pytest.raises(CacheNotFoundError, match=r" at v1 cannot be opened: .* is not a git repository$"):
        open_cache(tmp_path / "empty", "v1")


def change_manifest(cache: Path, **values: Any) -> None:
    path = cache / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    record_files(cache)


def record_a_huge_file(cache: Path) -> None:
    record_files(cache)
    change_content(cache, lambda content: content["files"][SHARD].update(bytes=1 << 60))


NO_CACHES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no manifest": (
        lambda cache: (cache / "manifest.json").unlink(),
        CacheFormatError,
        r"^cache of .* at bad is no cache: it has no manifest.json, but \['provenance.json', 'shard-000000.safetens",
    ),
    "incomplete": (lambda cache: change_manifest(cache, complete=False), CacheFormatError, r" is incomplete: "),
    "more shards": (
        lambda cache: change_manifest(cache, num_samples=4),
        CacheFormatError,
        r"is not what its manifest.json says: missing \[\], surplus \['shard-000002.safetensors'\]$",
    ),
    "fewer shards": (
        lambda cache: change_manifest(cache, num_samples=11),
        CacheFormatError,
        r"is not what its manifest.json says: missing \['shard-000003.safetensors'\], surplus \[\]$",
    ),
    "a huge file": (
        record_a_huge_file,
        SettingsError,
        r"^1152921504\d+ bytes of cache of .* at bad are to be written to .* or name another DVC cache by store_dir= "
        r"or DSPARK_CACHE_DIR$",
    ),
    "provenance of something else": (
        lambda cache: (cache / "provenance.json").write_text("{}"),
        CacheFormatError,
        r"provenance.json: ",
    ),
}


@pytest.mark.parametrize("name", NO_CACHES)
def test_what_is_no_whole_cache_is_refused_before_its_shards_are_fetched(
    published: Published, store: Path, name: str
) -> None:
    change, error, message = NO_CACHES[name]
    published.publish("bad", published.version("v1"), change)
    with pytest.raises(error, match=message):
        open_cache(published.url, "bad")
    assert stored(store) <= published.names("bad", *HEAD)


def test_files_that_the_remote_lacks_are_named(published: Published, store: Path) -> None:
    source = object_path(published.remote, oid(published.version("v1") / SHARD))
    content = source.read_bytes()
    source.unlink()
    message = (
        f"cache of {published.url} at v1: 1 of its files are neither in {store}/files/md5 nor could they be fetched, "
        f"['{SHARD}']; dvc push where it was made"
    )
    with pytest.raises(CacheNotFoundError, match=f"^{re.escape(message)}$"):
        open_cache(published.url, "v1")
    (folder,) = (store / LINKS_FOLDER / "versions").iterdir()
    with pytest.raises(CacheFormatError, match="must have shard indices"):
        CachedDSparkDataset(folder)
    source.write_bytes(content)
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))


@pytest.mark.usefixtures("store")
def test_a_remote_without_the_list_of_files_is_named(published: Published) -> None:
    shutil.rmtree(published.remote)
    with pytest.raises(
        CacheNotFoundError, match=r"dvc cannot read the list of its files, \w{32}.dir, here or from the "
    ) as caught:
        open_cache(published.url, "v1")
    assert str(published.remote) in str(caught.value)
    assert str(caught.value).endswith("; dvc push where it was made")


def test_a_list_of_files_that_is_another_is_refused(published: Published, store: Path) -> None:
    """A remote whose list of v1's files is that of v2: each file would be sound."""
    lists = {tag: object_path(published.remote, published.folder_oid(tag)) for tag in ("v1", "v2")}
    damage(lists["v1"], lists["v2"].read_bytes())
    keys = [published.folder_oid(tag).removesuffix(".dir") for tag in ("v2", "v1")]
    message = "cache of {} at v1: the list of its files has md5 {}, the repository says {}: mend the remote"
    with pytest.raises(CacheFormatError, match=f"^{re.escape(message.format(published.url, *keys))}$"):
        open_cache(published.url, "v1")
    assert stored(store) == set()


@pytest.mark.parametrize("content", [None, b"[", b"{}", b"[]"])
def test_a_damaged_list_of_files_is_fetched_again(published: Published, store: Path, content: bytes | None) -> None:
    """Both here, in the clone's own DVC cache, and once the remote is mended."""
    name = published.folder_oid("v2")
    remote, here = object_path(published.remote, name), object_path(published.root / ".dvc" / "cache", name)
    sound = remote.read_bytes()
    damage(here, content)
    ensure_same(open_cache(published.root, store_dir=published.root / ".dvc" / "cache"), published.version("v2"))
    damage(remote, content)
    for rev in (None, "HEAD"):
        with pytest.raises(CacheFormatError, match=r": the list of its files has md5 \w{32}, .*: mend the remote$"):
            open_cache(published.root, rev)
    damage(remote, sound)
    for rev in (None, "HEAD"):
        ensure_same(open_cache(published.root, rev), published.version("v2"))
    assert stored(store) == published.names("v2")


@pytest.mark.parametrize("content", [b"[1]", b"nothing", b'[{"relpath": "manifest.json", "md5": "../../../x"}]'])
def test_a_list_of_files_that_dvc_does_not_write_is_refused(published: Published, store: Path, content: bytes) -> None:
    """Though it has the digest that the repository names: nothing in it may become a path."""
    name = hashlib.md5(content, usedforsecurity=False).hexdigest() + ".dir"
    make(object_path(published.remote, name).parent).joinpath(name[2:]).write_bytes(content)
    file = published.root / "cache.dvc"
    file.write_text(file.read_text().replace(published.folder_oid("v2"), name))
    published.git("commit", "--quiet", "--all", "--message", "list")
    with pytest.raises(CacheFormatError, match=f"^cache of {published.url}: the list of its files is none that dvc"):
        open_cache(published.url)
    assert stored(store) == set()


def test_an_import_that_is_here_is_opened_without_the_repository_that_it_is_from(
    published: Published, tmp_path: Path
) -> None:
    trainer = Published(tmp_path / "trainer")
    trainer.root.mkdir(parents=True)
    trainer.git("init", "--quiet")
    with contextlib.chdir(trainer.root), Repo.init() as repo:
        repo.imp(published.url, "cache", rev="v1", out="x")
    published.root.rename(published.root.with_name("away"))
    ensure_same(open_cache(trainer.root, path="x"), published.version("v1"))


@pytest.mark.usefixtures("store")
def test_a_path_is_one_of_the_dvc_project_with_and_without_a_revision(published: Published, tmp_path: Path) -> None:
    """A project may be a folder of a git repository that has a project of its own."""
    whole = Published(tmp_path / "whole")
    shutil.copytree(published.root, whole.root, ignore=shutil.ignore_patterns("tmp", "cache"))
    project = whole.root / "a b" / "ml"
    shutil.copytree(whole.root / ".dvc", project / ".dvc")
    (project / "cache.dvc").write_text(published.git("show", "v1:cache.dvc"))
    whole.git("add", "--all")
    whole.git("commit", "--quiet", "--message", "project")
    for rev in (None, "HEAD"):
        ensure_same(open_cache(project, rev), published.version("v1"))
        ensure_same(open_cache(whole.root, rev), published.version("v2"))
    ensure_same(open_cache(whole.url, path="a b/ml/cache"), published.version("v1"))


def break_config(published: Published) -> None:
    (published.root / ".dvc" / "config").write_text("[core")


def name_no_remote(published: Published) -> None:
    (published.root / ".dvc" / "config").write_text("[core]\n    remote = nowhere\n")


def need_a_package(published: Published) -> None:
    config = published.root / ".dvc" / "config"
    config.write_text(config.read_text().replace(str(published.remote), "gs://bucket/x"))


@pytest.mark.filterwarnings("ignore:.*unclosed [Pp]ack:ResourceWarning")
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (break_config, CacheNotFoundError, r"^cache of .* cannot be opened: "),
        (name_no_remote, CacheNotFoundError, r"^cache of .* cannot be opened: .*nowhere"),
        (need_a_package, SettingsError, r"pip install dvc, and dvc-s3 or the like for its remote \(gs is supported"),
    ],
)
@pytest.mark.usefixtures("store")
def test_what_a_repository_s_settings_lead_to_is_an_error_of_ours(
    published: Published, fault: Callable[[Published], None], kind: type[Exception], message: str
) -> None:
    fault(published)
    published.git("commit", "--quiet", "--all", "--message", "settings")
    for source, rev in ((published.url, None), (published.root, None), (published.root, "HEAD")):
        with pytest.raises(kind, match=message):
            open_cache(source, rev)


def test_a_repository_without_a_commit_is_an_error_of_ours(store: Path, tmp_path: Path) -> None:
    empty = Published(tmp_path)
    empty.root.mkdir()
    empty.git("init", "--quiet")
    with contextlib.chdir(empty.root):
        Repo.init().close()
    with pytest.raises((CacheNotFoundError, SettingsError), match=f"^cache of {empty.root} at HEAD"):
        open_cache(empty.root, "HEAD")
    assert not (store / "files").exists()


def test_settings_of_the_repository_around_are_an_error_of_ours(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_config(published)
    monkeypatch.chdir(published.root)
    message = rf"^the DVC repository around {published.root} cannot be opened: .*; mend it, or name a DVC cache by "
    with pytest.raises(SettingsError, match=message):
        open_cache("file:///nowhere")


@pytest.mark.parametrize("times", [1, 2])
def test_files_that_dvc_gc_takes_away_are_fetched_again_or_said_to_be_gone(
    published: Published, store: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """After a file was found and before it is read; whoever takes it twice will take it again."""
    shutil.copytree(published.root / ".dvc" / "cache" / "files", store / "files")
    path, fsync, left = object_path(store, oid(published.version("v1") / SHARD)), os.fsync, [*range(times)]

    def take_away(descriptor: int) -> None:
        fsync(descriptor)
        if left and Path(f"/proc/self/fd/{descriptor}").readlink() == path:
            left.pop()
            path.unlink()

    monkeypatch.setattr(os, "fsync", take_away)
    if times == 2:
        message = f"were removed from {store}/files/md5 while they were fetched, as dvc gc does, ['{SHARD}']: open it"
        with pytest.raises(CacheNotFoundError, match=re.escape(message)):
            open_cache(published.url, "v1")
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
    assert not left


@pytest.mark.usefixtures("store")
def test_a_repository_without_a_remote_says_so(published: Published) -> None:
    (published.root / ".dvc/config").write_text("")
    published.git("commit", "--quiet", "--all", "--message", "no remote")
    with pytest.raises(CacheNotFoundError, match=r"dvc cannot read the list of its files"):
        open_cache(published.url)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"has sha256 \w{64}, provenance.json says \w{64}"),
        (b"short", r"has 5 bytes, provenance.json says \d+"),
    ],
)
def test_a_damaged_file_of_the_remote_is_named_and_not_kept(
    published: Published, store: Path, content: bytes | None, fault: str
) -> None:
    name = oid(published.version("v1") / SHARD)
    sound = object_path(published.remote, name).read_bytes()
    damage(object_path(published.remote, name), content)
    for _ in range(2):
        with pytest.raises(CacheFormatError, match=rf"mend the remote: {SHARD} {fault}$"):
            open_cache(published.url, "v1")
        assert not object_path(store, name).exists()
    ensure_same(open_cache(published.url, "v1", shards=range(2, 3)), published.version("v1"))
    damage(object_path(published.remote, name), sound)
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))


def test_bytes_are_compared_by_us_alone_where_dvc_would_verify_the_remote(published: Published, store: Path) -> None:
    """DVC itself would say no more than that something could not be fetched, after hashing everything."""
    with (published.root / ".dvc/config").open("a") as config:
        config.write("    verify = true\n")
    published.git("commit", "--quiet", "--all", "--message", "verify")
    damage(object_path(published.remote, oid(published.version("v2") / SHARD)))
    with pytest.raises(CacheFormatError, match=rf"mend the remote: {SHARD} has sha256 "):
        open_cache(published.url)
    assert stored(store) == published.names("v2") - published.names("v2", SHARD)


@pytest.mark.parametrize("name", ["manifest.json", WEIGHTS])
@pytest.mark.usefixtures("store")
def test_a_cache_without_provenance_is_compared_by_dvc_s_own_hash(published: Published, name: str) -> None:
    published.publish("plain", GOLDEN, lambda cache: (cache / SHARD).chmod(0o644))
    source = object_path(published.remote, oid(GOLDEN / name))
    sound = source.read_bytes()
    damage(source)
    with pytest.raises(
        CacheFormatError, match=rf"mend the remote: {re.escape(name)} has md5 \w{{32}}, dvc says \w{{32}}$"
    ):
        open_cache(published.url, "plain")
    damage(source, sound)
    ensure_same(open_cache(published.url, "plain"), GOLDEN)


@pytest.mark.parametrize("is_store_named", [False, True])
def test_without_dvc_the_error_says_what_to_install(
    shared: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_store_named: bool
) -> None:
    for name in ("dvc.fs", "dvc.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    message = r"^a cache of a repository is fetched by dvc, which cannot be imported: pip install dvc, and dvc-s3 or "
    with pytest.raises(SettingsError, match=message):
        open_cache(shared.url, "v1", store_dir=tmp_path / "store" if is_store_named else None)
    assert len(open_cache(shared.version("v1"))) == 9


# --- where it is fetched to --------------------------------------------------------------------------------------


def test_the_cache_that_is_fetched_into_is_chosen_in_this_order(
    shared: Published, published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Published(tmp_path / "here")
    shutil.copytree(published.root / ".dvc", make(here.base) / "producer/.dvc", ignore=shutil.ignore_patterns("cache"))
    here.git("init", "--quiet")
    monkeypatch.chdir(here.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "named"))
    share = range(0, 1)
    assert folder(shared.url, store_dir="given", shards=share) == here.root / "given"
    assert folder(published.root, shards=share) == tmp_path / "named"
    monkeypatch.delenv(STORE_VARIABLE)
    assert folder(published.root, shards=share) == published.root / ".dvc/cache"
    assert folder(shared.url, shards=share) == here.root / ".dvc/cache"
    monkeypatch.chdir(tmp_path)
    assert folder(shared.url, shards=share) == tmp_path / "user/dspark-cache"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert folder(shared.url, shards=share) == tmp_path / "home/.cache/dspark-cache"


def folder(source: Path | str, **options: Any) -> Path:
    return fetch_cache(source, "v1", **options).parents[2]


def test_a_folder_that_cannot_be_written_to_is_said(shared: Published) -> None:
    with pytest.raises(SettingsError, match=r"^/proc/x/dspark cannot be written to \(.*\): name another DVC cache by "):
        open_cache(shared.url, "v1", store_dir="/proc/x")


def test_where_hard_links_are_not_possible_links_are_symbolic(shared: Published, store: Path, tmp_path: Path) -> None:
    if Path("/dev/shm").stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is the disk of temporary files")
    with contextlib.ExitStack() as stack:
        other = Path("/dev/shm", f"dspark-{os.getpid()}")
        (other / "files").mkdir(parents=True)
        stack.callback(shutil.rmtree, other)
        (make(store) / "files").symlink_to(other / "files")
        dataset = open_cache(shared.url, "v2")
        assert all(path.is_symlink() for path in Path(dataset.cache_dir).iterdir())
        ensure_same(dataset, shared.version("v2"))
        ensure_same(open_cache(shared.url, "v2"), shared.version("v2"))
        shutil.rmtree(other / "files/md5")
        ensure_same(open_cache(shared.url, "v2"), shared.version("v2"))


def test_where_no_links_are_possible_files_are_copied_and_it_is_said(
    shared: Published, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "links are not for this file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        patch.setattr(os, "symlink", refuse)
        dataset = open_cache(shared.url, "v2", shards=range(0, 1))
    ensure_same(dataset, shared.version("v2"))
    path = Path(dataset.cache_dir, WEIGHTS)
    message = f"{path} is copied, since it cannot be a link ([Errno 1] links are not for this file system): its bytes"
    assert message in capsys.readouterr().err
    assert not path.samefile(object_path(store, oid(path)))
    flip_unseen(path)
    assert fetch_cache(shared.url, "v2", shards=range(0, 1)) == path.parent
    assert not path.samefile(object_path(store, oid(shared.version("v2") / WEIGHTS)))  # neither read nor copied again


# --- several processes -------------------------------------------------------------------------------------------

OPEN = """
import sys
from dspark_cache.versions import open_cache
dataset = open_cache(sys.argv[1], sys.argv[2])
print(len(dataset), dataset.cache_dir)
"""


def start(source: str, rev: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", OPEN, source, rev], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_processes_that_open_it_at_once_all_get_it(shared: Published, store: Path) -> None:
    processes = [start(shared.url, "v1") for _ in range(3)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert sum("fetch cache" in err for _, err in said) == 1
    assert stored(store) == shared.names("v1")


def test_the_command_prints_the_folder(published: Published, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", published.url, "--rev", "v1", "--shards", "1:2"]) == 0
    folder = capsys.readouterr().out.removesuffix("\n")
    assert Path(folder).parent == store / LINKS_FOLDER / "versions"
    assert main(["fetch", published.url, "--rev", "v1", "--shards", "1:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": folder}
    assert main(["fetch", published.url, "--path", "none"]) == 1
    assert "there is no such path" in capsys.readouterr().err


def test_open_cache_takes_what_it_is_asked_for_in_this_order() -> None:
    for function in (open_cache, fetch_cache):
        assert list(inspect.signature(function).parameters)[:3] == ["path_or_repo", "rev", "expect"]


def test_who_waits_says_for_whom_and_takes_what_that_one_fetched(published: Published, store: Path) -> None:
    fetch_cache(published.url, "v1")
    revisions = store / LINKS_FOLDER / "revisions.json"
    revisions.rename(revisions.with_suffix(".kept"))
    with FileLock(store / LINKS_FOLDER / "lock"):
        process = start(published.url, "v1")
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"waiting: {store}/dspark is being written by process {os.getpid()} on host ")
        revisions.with_suffix(".kept").rename(revisions)
        published.base.rename(published.base.with_name("away"))
        assert process.poll() is None
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("9 ")
    assert "waiting" not in err


def test_who_waits_for_a_host_that_is_gone_is_told_how_to_go_on(published: Published, store: Path) -> None:
    (store / LINKS_FOLDER).mkdir(parents=True)
    (store / LINKS_FOLDER / "lock").write_text(json.dumps({"host": "gone.invalid", "pid": 5}))
    process = start(published.url, "v1")
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.endswith(f": dspark-cache clean --break-lock {store}/dspark\n")
    assert main(["clean", "--break-lock", str(store / "dspark")]) == 0
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.startswith("9 ")


def test_a_fetch_that_is_killed_leaves_nothing_a_reader_accepts(published: Published, store: Path) -> None:
    """One object of the remote is a pipe into which nobody writes: who fetches it hangs in the middle."""
    source = object_path(published.remote, oid(published.version("v1") / SHARD))
    source.rename(source.with_suffix(".kept"))
    os.mkfifo(source)
    process = start(published.url, "v1")
    while not list(store.glob("dspark/versions/*/manifest.json")) and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (folder,) = (store / LINKS_FOLDER / "versions").iterdir()
    with pytest.raises(CacheFormatError, match="must have shard indices"):
        CachedDSparkDataset(folder)
    source.unlink()
    source.with_suffix(".kept").rename(source)
    ensure_same(open_cache(published.url, "v1"), published.version("v1"))
