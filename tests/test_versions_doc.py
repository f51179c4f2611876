"""docs/versions.md, each block run as it stands there: two releases, promoted, rolled back and trained from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from dvc.schema import COMPILED_MULTI_STAGE_SCHEMA

from dspark_cache import CachedDSparkDataset
from dspark_cache.cache_files import CacheFolder
from dspark_cache.schema import INPUT_IDS
from dspark_cache.verify import verify_cache
from tests.pages import Page
from tests.published import stored
from tests.repository import ROOT, Repository, free_port, make_repository, read_yaml

pytestmark = pytest.mark.dvc

PAGE = Page("docs/versions.md")
URL = "git@host:team/drafts.git"
SMALL = {
    "data": {"seq_length": 64},
    "target": {"layer_ids": [1, 3]},
    "cache": {"shard_size": 2},
    "verify": {"recompute_samples": 0},
}
SECTIONS = {
    "Release": "producer",
    "Compare": "producer",
    "Promote": "producer",
    "Roll back": "producer",
    "Train in another repository": "trainer",
    "Train without importing: `open_cache`": "anywhere",
    "Each machine a share": "anywhere",
}
"""Heading to the folder in which its blocks are run."""
MACHINES = {"Each machine a share": 2}
"""Heading to the machines on which its blocks are run at once, as torchrun would with one process each."""


@dataclass
class Reader:
    """Somebody who runs the page.

    Attributes:
        base: Folder of the repositories.
        said: What each block printed, by its heading.
        samples: Samples of `cache/` after each block, by its heading.
    """

    base: Path
    said: dict[str, list[str]] = field(default_factory=dict)
    samples: dict[str, list[int]] = field(default_factory=dict)

    def run(self, folder: Path, language: str, code: str, machines: int = 1) -> str:
        code = code.replace(URL, f"file://{self.base}/origin.git")
        lines = [re.sub(r"\s{2,}#.*", "", line) + " || exit" for line in code.splitlines()]
        command = [sys.executable, "-c", code] if language == "python" else ["bash", "-uc", "\n".join(lines)]
        environment = Repository(folder).environment(PYTHONPATH=str(ROOT))
        started = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, "XDG_CACHE_HOME": str(self.base / f"user-{machine}"), **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for machine, variables in enumerate(rank_variables(machines))
        ]
        printed = [process.communicate() for process in started]
        assert not any(process.returncode for process in started), f"{code}{printed}"
        return "".join(out for out, _ in printed)

    def read(self, heading: str) -> None:
        """Run the blocks below a heading."""
        text = PAGE.text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        folder = self.base / SECTIONS[heading]
        for language, code in PAGE.blocks:
            if f"```{language}\n{code}" in text:
                said = self.run(folder, language, code, MACHINES.get(heading, 1))
                self.said.setdefault(heading, []).append(said)
                there = (folder / "cache/manifest.json").exists()
                count = len(CachedDSparkDataset(folder / "cache")) if there else 0
                self.samples.setdefault(heading, []).append(count)


def rank_variables(machines: int) -> list[dict[str, str]]:
    """Return what torchrun tells the one process of each machine; nothing if there is one machine."""
    if machines == 1:
        return [{}]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(machines)}
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return [{**common, **local, "RANK": str(machine), "GROUP_RANK": str(machine)} for machine in range(machines)]


def begin(folder: Path) -> Repository:
    """Make a git repository on the branch `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    repository = Repository(folder)
    repository.git("init", "--quiet", "--initial-branch", "main")
    repository.git("config", "user.email", "test@example.invalid")
    repository.git("config", "user.name", "test")
    return repository


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Run the whole page."""
    base = tmp_path_factory.mktemp("versions")
    producer = begin(make_repository(base / "producer", num_rows=6, **SMALL).root)
    subprocess.run(["git", "init", "--quiet", "--bare", "-b", "main", str(base / "origin.git")], check=True)
    producer.git("remote", "add", "origin", str(base / "origin.git"))
    producer.dvc("remote", "add", "--default", "store", str(base / "remote"))
    producer.git("add", ".")
    producer.git("commit", "--quiet", "--message", "pipeline")
    producer.git("push", "--quiet", "--set-upstream", "origin", "main")
    trainer = begin(base / "trainer")
    trainer.dvc("init", "--quiet")
    trainer.git("commit", "--quiet", "--message", "begin")
    (base / "anywhere").mkdir()
    found = Reader(base)
    for heading in SECTIONS:
        if heading == "Compare":
            producer.set_params(data={"limit": 4})
        if heading in ("Release", "Compare"):
            reproduce(producer)
        found.read(heading)
    return found


def reproduce(repository: Repository) -> None:
    """Run the stages in this process, which has imported what they need, so that `dvc repro` has only to look."""
    repository.run()
    repository.dvc("commit", "--force")


def test_every_block_is_run(reader: Reader) -> None:
    assert sum(map(len, reader.said.values())) == len(PAGE.blocks)


def test_a_release_is_a_tag_that_names_its_objects(reader: Reader) -> None:
    tags = subprocess.run(["git", "tag"], cwd=reader.base / "origin.git", capture_output=True, text=True, check=True)
    versions = {"target-cache@v1.0.0", "target-cache@v1.1.0"}
    assert set(tags.stdout.split()) == versions | {"target-cache#prod#1", "target-cache#prod#2"}
    assert reader.samples["Release"] == [6]


def test_comparing_shows_what_was_asked_for_and_what_came_of_it(reader: Reader) -> None:
    released, compared = reader.said["Compare"]
    assert re.search(r"params.yaml +data.limit +(None|-) +4\b", released)
    assert re.search(r"reports/verify.json +\S*num_samples +6 +4 +-2\b", released)
    assert "samples removed: 2, the first: 4, 5" in compared
    assert "samples in both: 4, in the same order" in compared
    assert reader.samples["Compare"] == [4, 4]


def test_promotion_is_a_tag_and_gives_its_version(reader: Reader) -> None:
    assert re.search(r"target-cache +. v1.1.0", reader.said["Promote"][0])
    assert len(CachedDSparkDataset(reader.base / "prod")) == 4


def test_rolling_back_computes_nothing(reader: Reader) -> None:
    assert reader.samples["Roll back"] == [4, 4]
    producer = Repository(reader.base / "producer")
    producer.git("checkout", "--quiet", "target-cache@v1.0.0")
    assert "Running stage" not in producer.dvc("checkout").stdout
    assert len(CachedDSparkDataset(producer.root / "cache")) == 6
    assert not verify_cache(CacheFolder(producer.root / "cache"), "bytes").findings
    producer.git("checkout", "--quiet", "main")
    producer.dvc("checkout")


def test_a_trainer_imports_trains_updates_and_goes_back(reader: Reader) -> None:
    heading = "Train in another repository"
    assert reader.samples[heading] == [6, 6, 6]
    assert reader.said[heading][1] == "torch.Size([2, 64, 128])\n" * 3
    trainer = reader.base / "trainer"
    assert read_yaml(trainer / "cache.dvc")["deps"][0]["repo"]["rev"] == "target-cache@v1.0.0"
    log = subprocess.run(["git", "log", "--format=%s"], cwd=trainer, capture_output=True, text=True, check=True)
    assert log.stdout.split("\n")[:2] == ["Train on v1.1.0", "Train on v1.0.0"]
    assert not verify_cache(CacheFolder(trainer / "cache"), "bytes").findings


def test_without_importing_a_share_is_fetched(reader: Reader) -> None:
    (printed,) = reader.said["Train without importing: `open_cache`"]
    folder, *counts = printed.split()
    assert counts == ["2", "2"]
    store = reader.base / "user-0/dspark-cache"
    assert Path(folder).is_relative_to(store / "dspark/versions")
    assert len(stored(store)) == len(os.listdir(folder)) == 4  # noqa: PTH208 - names only


def test_each_machine_fetches_and_reads_its_share(reader: Reader) -> None:
    (printed,) = reader.said["Each machine a share"]
    expected = [sample[INPUT_IDS].sum().item() for sample in CachedDSparkDataset(reader.base / "prod")]
    assert len(expected) == 4
    for epoch in (0, 1):
        found = re.findall(rf"^{epoch} (\d) (\d+)$", printed, re.MULTILINE)
        by_machine = [sorted(int(total) for machine, total in found if machine == name) for name in "01"]
        assert by_machine == [sorted(expected[:2]), sorted(expected[2:])]
    (folder,) = (reader.base / "user-1/dspark-cache/dspark/versions").iterdir()
    assert {path.name for path in folder.glob("shard-*")} == {"shard-000001.safetensors"}


def test_the_artifact_is_as_dvc_wants_it() -> None:
    pipeline = read_yaml(ROOT / "dvc.yaml")
    COMPILED_MULTI_STAGE_SCHEMA(pipeline)
    assert pipeline["artifacts"]["target-cache"]["path"] == "cache"
    assert pipeline["artifacts"]["target-cache"]["type"] == "dataset"
    assert "cache" in pipeline["stages"]["shards"]["outs"]
