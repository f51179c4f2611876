"""What a change costs a ragged cache: what is forwarded, which files change, and which objects a push adds.

One repository goes through four steps, each reproduced, committed to git and pushed to a real remote; the tests look
at what every step left, and at what clones of some of them get.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from dspark_cache import CachedDSparkDataset
from dspark_cache.errors import CacheNotFoundError, VerificationError
from dspark_cache.schema import INPUT_IDS
from dspark_cache.tokens import Tokens
from tests.repository import ROOT, Repository, make_repository, read_yaml
from tests.test_dvc_faults import dvc as dvc_process
from tests.test_dvc_faults import flip

if TYPE_CHECKING:
    from pathlib import Path

    from tests.test_dvc_faults import Dvc

pytestmark = pytest.mark.dvc
dvc = dvc_process  # the fixture; one process for all commands of this module

PARAMS: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 64, "eval_samples": 3},
    "target": {"layer_ids": [1, 2, 3], "block_bytes": 130 * 1024},
    "cache": {"layout": "ragged", "dtype": "fp32", "shard_bytes": 130 * 1024},
    "verify": {"recompute_samples": 0},
    "runtime": {"device": "cpu", "num_workers": 1},
}
"""A token's states take 1024 bytes, so a shard or block holds two samples of 64 tokens."""

ROWS = (6, 19, 0, 1, 2, 3, 4, 5, 7, 29, 9, 10)
"""Shipped conversations: 6, 19 and 29 have reasoning; 0 and 2 are of 16 tokens, the others cut at 64.

Shards held out: (6 19) (0). Shards to train from: (1 2) (3 4) (5 7) (29 9) (10).
"""

APPENDED = (33, 11, 12, 13, 1, 0)
"""Four new ones and two that are there. Held out: (6 19) (0 0). To train from: (1 2) ... (10 33) (11 12) (13 1)."""


class File(NamedTuple):
    """A file's content and, where that must not be written again, which file it is."""

    md5: str
    size: int
    inode: int
    mtime_ns: int


@dataclass(frozen=True)
class Step:
    """What a repository and its remote hold after a change was reproduced and pushed.

    Attributes:
        said: What dvc and the stages said.
        files: Outputs by their paths.
        blocks: Blocks in scratch by their names.
        objects: Objects in the remote by their digests.
        folders: Digests of the lists of files that dvc.lock names.
        ledger: Records of features.json by the names of their blocks.
        keys: Key of each sample in `tokens/`.
        ids: Ids of each sample of `tokens/`, `cache/` and `cache-eval/`.
        report: The report of `verify`.
    """

    said: str
    files: dict[str, File]
    blocks: dict[str, File]
    objects: dict[str, File]
    folders: set[str]
    ledger: dict[str, Any]
    keys: list[str]
    ids: dict[str, list[tuple[int, ...]]]
    report: dict[str, Any]

    @property
    def contents(self) -> set[str]:
        """Digests of all that dvc stores of the outputs."""
        return {file.md5 for file in self.files.values()} | self.folders

    def shards(self) -> dict[str, File]:
        return {name: file for name, file in self.files.items() if "/shard-" in name}


def look_at(path: Path) -> File:
    status = path.stat()
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    return File(digest, status.st_size, status.st_ino, status.st_mtime_ns)


def read_ids(folder: Path) -> list[tuple[int, ...]]:
    """Return the ids of every sample of a cache; an empty folder has none."""
    if not any(folder.iterdir()):
        return []
    dataset = CachedDSparkDataset(folder, padded=False)
    return [tuple(dataset[index][INPUT_IDS].tolist()) for index in range(len(dataset))]


def look_around(repository: Repository, said: str) -> Step:
    root = repository.root
    stages = read_yaml(root / "dvc.lock")["stages"].values()
    digests = {out["md5"] for stage in stages for out in stage["outs"] if "md5" in out}
    tokens = Tokens(root / "tokens")
    outputs = [path for name in ("tokens", "cache", "cache-eval") for path in (root / name).iterdir()]
    remote = root.with_name("remote") / "files/md5"
    return Step(
        said=said,
        files={str(path.relative_to(root)): look_at(path) for path in [root / "features.json", root / PAGE, *outputs]},
        blocks={path.stem: look_at(path) for path in root.glob(".work/capture-*/block-*.safetensors")},
        objects={path.parent.name + path.name: look_at(path) for path in remote.glob("*/*")},
        folders={digest for digest in digests if digest.endswith(".dir")},
        ledger={block["name"]: block for block in json.loads((root / "features.json").read_bytes())["blocks"]},
        keys=tokens.keys(),
        ids={
            "tokens": [tuple(tokens.input_ids(index).tolist()) for index in range(len(tokens))],
            **{name: read_ids(root / name) for name in ("cache", "cache-eval")},
        },
        report=json.loads((root / "reports/verify.json").read_bytes()),
    )


def do(dvc: Dvc, repository: Repository, *arguments: str) -> str:
    """Run a dvc command that succeeds and return what was said."""
    done = dvc(repository, *arguments)
    assert done.code == 0, done.text
    return str(done.text)


def put_rows(repository: Repository, rows: tuple[int, ...]) -> None:
    """Make shipped conversations, by their numbers, the data."""
    shipped = (ROOT / "inputs/data/conversations.jsonl").read_text().splitlines(keepends=True)
    (repository.root / "inputs/data/conversations.jsonl").write_text("".join(shipped[row] for row in rows))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, dvc: Dvc) -> Repository:
    """A repository with a remote beside it; nothing was reproduced yet."""
    base = tmp_path_factory.mktemp("small")
    repository = make_repository(base / "repository", num_rows=None, **PARAMS)
    repository.git("init", "--quiet")
    repository.git("config", "user.email", "test@example.invalid")
    repository.git("config", "user.name", "test")
    do(dvc, repository, "remote", "add", "-d", "storage", str(base / "remote"))
    return repository


@pytest.fixture(scope="module")
def steps(repository: Repository, dvc: Dvc) -> dict[str, Step]:
    """Make and push a cache, other masks of it, one of more data, and one of few samples with none held out."""
    steps = {}

    def keep(name: str, said: str) -> None:
        repository.git("add", "--all")
        repository.git("commit", "--quiet", "--message", name)
        repository.git("tag", name)
        do(dvc, repository, "push")
        steps[name] = look_around(repository, said)

    put_rows(repository, ROWS)
    repository.run()
    keep("first", do(dvc, repository, "commit", "--force"))
    repository.set_params(data={"mask_reasoning_content": True})
    keep("masks", do(dvc, repository, "repro", "shards"))
    put_rows(repository, ROWS + APPENDED)
    keep("grown", do(dvc, repository, "repro"))
    repository.set_params(data={"limit": 5, "eval_samples": 0})
    keep("trial", do(dvc, repository, "repro"))
    return steps


def changed(before: Step, after: Step) -> set[str]:
    """Return the outputs whose content is another one, or that were not there."""
    return {
        name for name, file in after.files.items() if name not in before.files or before.files[name].md5 != file.md5
    }


def pushed(before: Step, after: Step) -> dict[str, File]:
    """Return the objects that a push added; those that were there must be the same files as before."""
    assert before.objects.items() <= after.objects.items()
    return {digest: file for digest, file in after.objects.items() if digest not in before.objects}


ABOUT = {f"{part}/{name}" for part in ("cache", "cache-eval") for name in ("manifest.json", "provenance.json")}
TOKENS = {"tokens/tokens.safetensors", "tokens/tokens.json"}
PAGE = "reports/verify.html"


def test_the_first_push_holds_each_content_once(steps: dict[str, Step]) -> None:
    first = steps["first"]
    assert first.objects.keys() == first.contents
    assert len(first.shards()) == 7
    assert first.files["cache/target_weights.safetensors"] == first.files["cache-eval/target_weights.safetensors"]


def test_other_masks_forward_nothing_and_push_no_states(steps: dict[str, Step]) -> None:
    before, after = steps["first"], steps["masks"]
    assert "on cpu" not in after.said
    assert after.blocks == before.blocks
    assert after.ledger == before.ledger
    names = {"cache-eval/samples-000000.safetensors", "cache/samples-000003.safetensors"}
    assert changed(before, after) == ABOUT | TOKENS | names
    assert after.files.keys() == before.files.keys()
    new = pushed(before, after)
    assert new.keys() == {after.files[name].md5 for name in ABOUT | TOKENS | names} | (after.folders - before.folders)
    assert max(file.size for file in new.values()) < min(file.size for file in after.shards().values())


def test_appended_conversations_are_all_that_is_forwarded(steps: dict[str, Step]) -> None:
    before, after = steps["masks"], steps["grown"]
    assert "on cpu" in after.said
    assert before.blocks.items() < after.blocks.items()
    assert before.ledger.items() < after.ledger.items()
    assert after.blocks.keys() == after.ledger.keys()
    forwarded = [key for name in after.ledger.keys() - before.ledger.keys() for key in after.ledger[name]["samples"]]
    assert sorted(forwarded) == sorted(set(after.keys) - set(before.keys))
    assert len(forwarded) == 4
    assert after.keys[: len(before.keys)] == before.keys


def test_appended_conversations_push_the_last_shards_and_new_ones(steps: dict[str, Step]) -> None:
    before, after = steps["masks"], steps["grown"]
    numbers = {"cache": (4, 5, 6), "cache-eval": (1,)}
    names = {
        f"{part}/{kind}-{number:06d}.safetensors"
        for part in numbers
        for number in numbers[part]
        for kind in ("shard", "samples")
    }
    assert changed(before, after) == ABOUT | TOKENS | names | {"features.json", PAGE}
    assert before.files.keys() < after.files.keys()
    added = {after.files[name].md5 for name in changed(before, after)} | (after.folders - before.folders)
    assert pushed(before, after).keys() == added


@pytest.mark.parametrize(("name", "links"), [("first", 7), ("masks", 7), ("grown", 6), ("trial", 1)])
def test_shards_that_are_blocks_stay_names_of_them_when_dvc_has_stored_them(
    steps: dict[str, Step], name: str, links: int
) -> None:
    """Of the grown cache (0 0), (10 33) and (13 1) are in two blocks, or twice in one, and are written."""
    step = steps[name]
    blocks = {file.md5: file.inode for file in step.blocks.values()}
    linked = {shard.md5: shard.inode for shard in step.shards().values() if shard.md5 in blocks}
    assert len(linked) == links
    assert linked.items() <= blocks.items()


@pytest.mark.parametrize("name", ["first", "masks", "grown"])
def test_what_is_held_out_shares_no_ids_with_the_rest_and_nothing_is_lost(steps: dict[str, Step], name: str) -> None:
    step = steps[name]
    train, held = step.ids["cache"], step.ids["cache-eval"]
    assert not set(train) & set(held)
    assert Counter(train) + Counter(held) == Counter(step.ids["tokens"])
    assert set(held) == set(steps["first"].ids["tokens"][:3])
    assert len(held) == (4 if name == "grown" else 3)


def test_verify_reports_both_parts(steps: dict[str, Step]) -> None:
    report = steps["grown"].report
    assert report["num_findings"] == report["eval"]["num_findings"] == 0
    assert report["supervision"]["num_samples"] == 14
    assert report["eval"]["supervision"]["num_samples"] == 4


def clone_of(repository: Repository, name: str, path: Path) -> Repository:
    """Clone a step: what has nothing but git and the remote."""
    command = ["git", "clone", "--quiet", "--branch", name, str(repository.root), str(path / "clone")]
    subprocess.run(command, check=True, capture_output=True)
    return Repository(path / "clone")


def test_a_clone_pulls_both_parts_and_verifies_them(
    steps: dict[str, Step], repository: Repository, dvc: Dvc, tmp_path: Path
) -> None:
    clone = clone_of(repository, "grown", tmp_path)
    do(dvc, clone, "pull")
    do(dvc, clone, "status", "--quiet")
    assert {name: read_ids(clone.root / name) for name in ("cache", "cache-eval")} == {
        name: steps["grown"].ids[name] for name in ("cache", "cache-eval")
    }
    (clone.root / "reports/verify.json").unlink()
    clone.run("verify")
    assert json.loads((clone.root / "reports/verify.json").read_bytes()) == steps["grown"].report
    flip(clone.root / "cache-eval/shard-000001.safetensors")
    with pytest.raises(VerificationError, match=r"the eval cache has 1 finding.*\n.*shard-000001"):
        clone.run("verify")


def test_a_trial_of_five_samples_is_a_sound_cache(steps: dict[str, Step]) -> None:
    before, trial = steps["grown"], steps["trial"]
    assert "on cpu" not in trial.said
    assert trial.report["num_findings"] == 0
    assert trial.report["supervision"]["num_samples"] == 5
    assert "eval" not in trial.report
    assert trial.ids["cache"] == trial.ids["tokens"] == before.ids["tokens"][:5]
    assert trial.ids["cache-eval"] == []
    assert trial.blocks == before.blocks


def test_a_clone_pulls_an_empty_folder_where_nothing_is_held_out(
    steps: dict[str, Step], repository: Repository, dvc: Dvc, tmp_path: Path
) -> None:
    assert pushed(steps["grown"], steps["trial"]).keys() == steps["trial"].contents - steps["grown"].objects.keys()
    clone = clone_of(repository, "trial", tmp_path)
    do(dvc, clone, "pull")
    do(dvc, clone, "status", "--quiet")
    assert list((clone.root / "cache-eval").iterdir()) == []
    assert read_ids(clone.root / "cache") == steps["trial"].ids["cache"]
    with pytest.raises(CacheNotFoundError):
        CachedDSparkDataset(clone.root / "cache-eval")
    clone.run("verify")
