"""A trainer's own repository: a cache imported by dvc, trained from, updated, rolled back, opened and cleaned."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from dspark_cache import CachedDSparkDataset, build_cached_dspark_dataloader, read_target_weight_modules
from dspark_cache.errors import CacheFormatError
from dspark_cache.schema import HIDDEN, INPUT_IDS, LOSS_MASK
from dspark_cache.versions import STORE_VARIABLE, open_cache
from tests.published import Published, make_published, object_path, oid, stored
from tests.repository import Repository
from tests.test_versions import ensure_same

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.dvc, pytest.mark.filterwarnings("ignore::DeprecationWarning:dvc.*")]  # of dvc's own calls

PADDED = {"format_version": 1, "seq_length": 16, "num_samples": 9}
RAGGED = {**PADDED, "format_version": 2, "layout": "ragged"}


@dataclass(frozen=True)
class Trainer:
    """A repository that has imported v1 of another one's cache."""

    repository: Repository
    producer: Published

    @property
    def cache(self) -> Path:
        return self.repository.root / "cache"

    @property
    def store(self) -> Path:
        return self.repository.root / ".dvc/cache"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    base = tmp_path_factory.mktemp("trainer")
    producer = make_published(base)
    repository = Repository(base / "trainer")
    repository.root.mkdir()
    for arguments in (["init", "--quiet"], ["config", "user.email", "t@example.invalid"], ["config", "user.name", "t"]):
        repository.git(*arguments)
    repository.dvc("init", "--quiet")
    repository.dvc("config", "cache.type", "hardlink")
    repository.dvc("import", producer.url, "cache", "--rev", "v1")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "v1")
    return Trainer(repository, producer)


@pytest.fixture
def trainer(imported: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """A clone of it, in which the commands of a trainer run."""
    monkeypatch.delenv(STORE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    clone = Trainer(Repository(tmp_path / "trainer"), imported.producer)
    shutil.copytree(imported.repository.root, clone.repository.root)
    monkeypatch.chdir(clone.repository.root)
    yield clone
    assert not (tmp_path / "user").exists()


def train(cache: Path | str, expect: dict[str, object]) -> float:
    """Take one step of a draft that predicts the next token from the target's states; return the loss."""
    torch.manual_seed(0)
    _, lm_head = read_target_weight_modules(cache)
    loader = build_cached_dspark_dataloader(cache, 3, True, seed=0, expect=expect)
    draft = torch.nn.Linear(loader.dataset[0][HIDDEN].shape[-1], lm_head.weight.shape[1])
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.01)
    batch = next(iter(loader))
    logits = draft(batch[HIDDEN].float()) @ lm_head.weight.float().T
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch[INPUT_IDS][:, 1:].flatten(), reduction="none"
    )
    loss = (losses * batch[LOSS_MASK][:, 1:].flatten()).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def test_an_imported_version_is_trained_from_updated_and_rolled_back(trainer: Trainer) -> None:
    first = train("cache", PADDED)
    trainer.repository.dvc("update", "cache.dvc", "--rev", "v2")
    with pytest.raises(CacheFormatError, match=r"does not match expect=: format_version: expected 1, found 2$"):
        train("cache", PADDED)
    assert train("cache", RAGGED) == first  # the same samples in another layout
    trainer.repository.git("commit", "--quiet", "--all", "--message", "v2")
    trainer.repository.git("checkout", "--quiet", "HEAD~1", "--", "cache.dvc")
    shutil.move(trainer.producer.root, trainer.producer.root.with_name("away"))  # nothing is asked for
    trainer.repository.dvc("checkout")
    shutil.move(trainer.producer.root.with_name("away"), trainer.producer.root)
    assert train("cache", PADDED) == first
    assert trainer.repository.dvc("status", "--quiet", check=False).returncode == 0


def test_open_cache_fetches_into_the_trainer_s_own_cache_and_shares_it_with_what_was_imported(trainer: Trainer) -> None:
    before = stored(trainer.store)
    dataset = open_cache(trainer.producer.url, "v1", expect=PADDED)
    assert stored(trainer.store) == before
    ensure_same(dataset, trainer.cache)
    other = open_cache(trainer.producer.url, "v2", expect=RAGGED)
    assert Path(other.cache_dir).is_relative_to(trainer.store)
    assert stored(trainer.store) == before | trainer.producer.names("v2")
    assert train(other.cache_dir, RAGGED) == train(dataset.cache_dir, PADDED)


def test_a_repository_that_imported_a_cache_is_a_source_too(trainer: Trainer) -> None:
    shutil.rmtree(trainer.cache)
    shutil.rmtree(trainer.store)
    dataset = open_cache(trainer.repository.root, "HEAD", shards=range(1, 2))
    ensure_same(dataset, trainer.producer.version("v1"))
    assert trainer.producer.names("v1", "shard-000001.safetensors") <= stored(trainer.store)
    assert not trainer.producer.names("v1", "shard-000002.safetensors") & stored(trainer.store)


def test_cleaning_dvc_s_cache_keeps_versions_that_were_opened(trainer: Trainer) -> None:
    dataset = open_cache(trainer.producer.url, "v2")
    shard = Path(dataset.cache_dir, "shard-000000.safetensors")
    name = oid(shard)
    trainer.repository.dvc("gc", "--all-commits", "--force")
    assert not object_path(trainer.store, name).exists()
    assert not trainer.producer.names("v1") & stored(trainer.store)  # nor does dvc keep what was imported
    ensure_same(CachedDSparkDataset(dataset.cache_dir), trainer.producer.version("v2"))
    ensure_same(CachedDSparkDataset(trainer.cache), trainer.producer.version("v1"))
    shutil.rmtree(dataset.cache_dir)
    ensure_same(open_cache(trainer.producer.url, "v2"), trainer.producer.version("v2"))


@pytest.mark.parametrize("options", [["--rev", "v1.0.0"], ["--stage", "prod"], []])
def test_an_artifact_is_got_by_version_or_stage_without_a_network(
    trainer: Trainer, options: list[str], tmp_path: Path
) -> None:
    release(trainer.producer)
    trainer.repository.dvc(
        "artifacts", "get", trainer.producer.url, "target-cache", *options, "--out", str(tmp_path / "got")
    )
    ensure_same(CachedDSparkDataset(tmp_path / "got"), trainer.producer.version("v2"))
    for rev in ("target-cache@v1.0.0", "target-cache#prod#1"):
        ensure_same(open_cache(trainer.producer.url, rev), trainer.producer.version("v2"))


def release(producer: Published) -> None:
    """Name the latest version as docs/versions.md does, once."""
    if (producer.root / "dvc.yaml").exists():
        return
    (producer.root / "dvc.yaml").write_text("artifacts:\n  target-cache:\n    path: cache\n    type: dataset\n")
    producer.git("add", "--all")
    producer.git("commit", "--quiet", "--message", "artifact")
    for tag in ("target-cache@v1.0.0", "target-cache#prod#1"):
        producer.git("tag", "--annotate", "--message", tag, tag)
