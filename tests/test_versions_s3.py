"""open_cache with a remote on S3, of which every request is counted: bytes are asked for once, then never again."""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import boto3
import pytest
from moto.server import ThreadedMotoServer

from dspark_cache import CachedDSparkDataset
from dspark_cache.errors import CacheFormatError, CacheNotFoundError
from dspark_cache.versions import STORE_VARIABLE, fetch_cache, open_cache
from tests.published import Published, make_published, object_path, oid, stored
from tests.test_versions import ensure_same, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

pytestmark = [pytest.mark.dvc, pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc.*")]  # of dvc's own calls

BUCKET = "caches"
SHARD = "shard-000001.safetensors"
_REQUEST = re.compile(r"([A-Z]+) /caches/(\S*) HTTP")


class Requests(logging.Handler):
    """What the server was asked for since `clear`: methods and keys."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen += _REQUEST.findall(record.getMessage())

    def clear(self) -> None:
        self.seen.clear()

    @property
    def files(self) -> Counter[str]:
        """How often the bytes of each object of a file were asked for."""
        keys = [key.partition("files/md5/")[2].replace("/", "") for method, key in self.seen if method == "GET"]
        return Counter(key for key in keys if re.fullmatch(r"\w{32}", key))

    @property
    def lists(self) -> int:
        """How often lists of files were asked for."""
        return sum(method == "GET" and key.endswith(".dir") for method, key in self.seen)


@dataclass(frozen=True)
class OnS3:
    """A repository whose remote is a bucket."""

    published: Published
    requests: Requests
    client: Any

    def key(self, name: str) -> str:
        digest = oid(self.published.version("v1") / name)
        return f"store/files/md5/{digest[:2]}/{digest[2:]}"

    def names(self, *names: str) -> set[str]:
        return self.published.names("v1", *names)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnS3]:
    """Start an S3 on loopback, and push a repository's versions to it."""
    requests = Requests()
    logging.getLogger("werkzeug").addHandler(requests)
    server = ThreadedMotoServer(port=0, verbose=True)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        host, port = server.get_host_and_port()
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket=BUCKET)
        published = make_published(
            tmp_path_factory.mktemp("s3"), f"s3://{BUCKET}/store", f"    endpointurl = http://{host}:{port}\n"
        )
        yield OnS3(published, requests, client)
    server.stop()
    logging.getLogger("werkzeug").removeHandler(requests)


@pytest.fixture
def s3(served: OnS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnS3:
    """Fetch into an empty DVC cache, and count from here."""
    monkeypatch.setenv(STORE_VARIABLE, str(tmp_path / "store"))
    served.requests.clear()
    return served


def test_each_object_is_asked_for_once_and_a_second_call_asks_nothing(s3: OnS3, tmp_path: Path) -> None:
    ensure_same(open_cache(s3.published.url, "v1"), s3.published.version("v1"))
    assert s3.requests.files == Counter(s3.names())
    assert stored(tmp_path / "store") == s3.names()
    s3.requests.clear()
    ensure_same(open_cache(s3.published.url, "v1"), s3.published.version("v1"))
    ensure_same(open_cache(s3.published.root, "v1"), s3.published.version("v1"))
    assert s3.requests.seen == []


def test_a_share_asks_for_its_objects_alone(s3: OnS3) -> None:
    open_cache(s3.published.url, "v1", shards=range(1, 2))
    expected = s3.names("manifest.json", "provenance.json", "target_weights.safetensors", SHARD)
    assert s3.requests.files == Counter(expected)
    s3.requests.clear()
    open_cache(s3.published.url, "v1", shards=range(1, 3))
    assert s3.requests.files == Counter(s3.names("shard-000002.safetensors"))


def test_a_version_whose_folder_was_deleted_asks_for_its_list_of_files_alone(s3: OnS3) -> None:
    folder = fetch_cache(s3.published.url, "v1")
    shutil.rmtree(folder)
    s3.requests.clear()
    ensure_same(open_cache(s3.published.url, "v1"), s3.published.version("v1"))
    assert s3.requests.files == Counter()
    assert s3.requests.lists > 0


def test_processes_of_a_machine_ask_for_each_object_once(s3: OnS3) -> None:
    processes = [start(s3.published.url, "v1") for _ in range(2)]
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert s3.requests.files == Counter(s3.names())


def test_a_damaged_object_is_named_and_fetched_again_by_the_next_call(s3: OnS3, tmp_path: Path) -> None:
    key = s3.key(SHARD)
    sound = s3.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CacheFormatError, match=rf"mend the remote: {SHARD} has sha256 \w{{64}}, provenance.json says "):
        open_cache(s3.published.url, "v1")
    assert not object_path(tmp_path / "store", oid(s3.published.version("v1") / SHARD)).exists()
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=sound)
    s3.requests.clear()
    ensure_same(open_cache(s3.published.url, "v1"), s3.published.version("v1"))
    assert s3.requests.files == Counter(s3.names(SHARD))


def test_an_object_that_is_not_there_is_named_and_the_next_call_completes(s3: OnS3, tmp_path: Path) -> None:
    key = s3.key(SHARD)
    sound = s3.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    s3.client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(CacheNotFoundError, match=rf"could they be fetched, \['{SHARD}'\]; dvc push where it was made$"):
        open_cache(s3.published.url, "v1")
    (folder,) = (tmp_path / "store/dspark/versions").iterdir()
    with pytest.raises(CacheFormatError, match="must have shard indices"):
        CachedDSparkDataset(folder)
    s3.client.put_object(Bucket=BUCKET, Key=key, Body=sound)
    ensure_same(open_cache(s3.published.url, "v1"), s3.published.version("v1"))


def test_a_remote_that_refuses_says_why(s3: OnS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nowhere")
    with pytest.raises(CacheNotFoundError, match=r"dvc cannot read the list of its files, \w{32}.dir, .*: \w+: "):
        open_cache(s3.published.url, "v2")
