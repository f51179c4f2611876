"""One rank's part of a capture: what it refuses before it loads anything, what it computes, and what it keeps."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from dspark_cache.blocks import BlockStore, Slice, block_name
from dspark_cache.capture_rank import Work, compute_work, kept_weights
from dspark_cache.capture_run import capture_features, capture_identity
from dspark_cache.errors import InputError, LockedError, SettingsError
from dspark_cache.files import put_file
from dspark_cache.forward import capture_environment
from dspark_cache.ranks import PeerLostError, Peers, Rank
from dspark_cache.schema import EMBED_KEY, LM_HEAD_KEY
from dspark_cache.settings import RuntimeSettings
from dspark_cache.shard_file import write_tensors
from dspark_cache.stage import StageContext, open_stage
from dspark_cache.target import read_target_facts
from dspark_cache.tokens import Tokens
from tests.repository import Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
NUM_ROWS = 6


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    root = tmp_path_factory.mktemp("rank") / "repository"
    target = {"layer_ids": [1, 3], "block_bytes": 1}
    repository = make_repository(root, num_rows=NUM_ROWS, data={"seq_length": 32}, target=target)
    repository.run("tokenize")
    return repository


@pytest.fixture(scope="module")
def alone(tokenized: Repository, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the stage makes in one process, by name."""
    root = tmp_path_factory.mktemp("alone") / "repository"
    shutil.copytree(tokenized.root, root)
    stage = open_stage("capture", root)
    assert capture_features(stage, Tokens(root / "tokens"))
    (folder,) = stage.scratch.glob("capture-*")
    return content(folder)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith(("block-", "weights"))}


class Rig:
    """A repository in which a rank is told what to compute."""

    def __init__(self, root: Path) -> None:
        self.repository = Repository(root)
        folder = root / "inputs/target"
        identity = capture_identity(self.stage, folder, read_target_facts(folder, trust_remote_code=False))
        self.store = BlockStore(self.stage.scratch, identity)
        with self.store.lock():
            self.store.prepare()

    @property
    def stage(self) -> StageContext:
        return open_stage("capture", self.repository.root)

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.repository.root / "tokens")

    def work(self, **changes: Any) -> Work:
        """Return what all ranks are told, as JSON gives it back: every sample is a block, the longest first."""
        tokens = self.tokens
        keys = tokens.keys()
        order = sorted(range(len(keys)), key=lambda index: -tokens.length(index))
        values = {
            "identity": self.store.identity,
            "target": dataclasses.asdict(self.stage.settings.target),
            "blocks": [(block_name([keys[index]]), [index]) for index in order],
            "num_tokens": tokens.num_tokens,
            "num_due": tokens.num_tokens,
            "present": [],
            "num_threads": 1,
            "group_size": 1,
            "keeps_weights": True,
            **changes,
        }
        return Work(**json.loads(json.dumps(values)))

    def compute(self, peers: Peers | None = None, **changes: Any) -> dict[str, bytes]:
        compute_work(self.stage, self.tokens, self.work(**changes), peers or Peers.alone())
        return content(self.store.folder)


@pytest.fixture
def rig(tokenized: Repository, tmp_path: Path) -> Rig:
    return Rig(shutil.copytree(tokenized.root, tmp_path / "repository"))


def ranks(count: int) -> list[Peers]:
    store = dist.HashStore()
    return [Peers(Rank(number, count, number, count), store) for number in range(count)]


def environment(**changes: Any) -> dict[str, Any]:
    return {**capture_environment(CPU, RuntimeSettings()), **changes}


def let_hear(peers: Peers, **changes: Any) -> None:
    """Say as rank 0 how it computes."""
    peers.tell("environment", json.dumps(environment(**changes)).encode())


# What is computed


def test_a_rank_alone_computes_what_the_stage_does(rig: Rig, alone: dict[str, bytes]) -> None:
    assert rig.compute() == alone


def test_only_what_is_told_is_computed(rig: Rig, alone: dict[str, bytes]) -> None:
    blocks = rig.work().blocks[1:3]
    names = {f"{name}{suffix}" for name, _ in blocks for suffix in (".json", ".safetensors")}
    assert rig.compute(blocks=blocks, keeps_weights=False) == {name: alone[name] for name in names}


def test_without_a_block_that_is_due_the_weights_are_kept(rig: Rig, alone: dict[str, bytes]) -> None:
    names = ("weights.json", "weights.safetensors")
    assert rig.compute(blocks=[], num_due=0) == {name: alone[name] for name in names}


def test_another_rank_than_the_first_keeps_no_weights(rig: Rig, alone: dict[str, bytes]) -> None:
    """Rank 0 has them too, and writes them."""
    first, second = ranks(2)
    let_hear(first)
    assert rig.compute(second) == {name: value for name, value in alone.items() if name.startswith("block-")}


def test_threads_are_those_that_were_told(rig: Rig) -> None:
    before = torch.get_num_threads()
    try:
        rig.compute(num_threads=2, blocks=[], num_due=0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_rank_stops_where_another_one_has_failed(rig: Rig) -> None:
    first, second = ranks(2)
    let_hear(first)
    first.fail("rank 0 on host: no")
    with pytest.raises(PeerLostError, match=r"^rank 0 on host: no$"):
        rig.compute(second)


# Locks


@pytest.mark.parametrize(("part", "name"), [(None, "lock-rank-1"), ("2/3", "lock-slice-2-of-3-rank-1")])
def test_a_rank_holds_a_lock_of_its_own(rig: Rig, part: str | None, name: str) -> None:
    """So that one that outlives its run is in the way of the next."""
    first, second = ranks(2)
    let_hear(first)
    if part:
        rig.repository.set_params(runtime={"slice": part})
    with rig.store.rank_lock(Slice.parse(part) if part else None, 1), pytest.raises(LockedError, match=rf"/{name}\)$"):
        rig.compute(second)
    assert rig.compute(second)


def test_a_rank_alone_has_the_run_s_lock_only(rig: Rig) -> None:
    rig.compute(blocks=[], num_due=0)
    assert [path.name for path in rig.store.folder.glob("lock*")] == ["lock"]


# What is refused before anything is loaded


@pytest.fixture
def unloadable(rig: Rig) -> Rig:
    """The same, where nothing can be loaded."""
    (rig.repository.root / "inputs/target/model.safetensors").unlink()
    return rig


def test_another_target_than_rank_0_s_is_refused(unloadable: Rig) -> None:
    work = unloadable.work()
    unloadable.repository.set_params(target={"nonfinite": "drop"})
    with pytest.raises(SettingsError) as error:
        compute_work(unloadable.stage, unloadable.tokens, work, Peers.alone())
    assert str(error.value) == f"params.yaml: section target is another one than rank 0's: {work.target}"


def test_blocks_that_were_captured_otherwise_are_not_mixed_with(unloadable: Rig) -> None:
    present = [environment(torch="2.12", used_tokens_per_batch=8), {**environment(), "threads": 3}]
    with pytest.raises(SettingsError) as error:
        unloadable.compute(present=present)
    assert str(error.value) == (
        f"blocks in {unloadable.store.folder} were captured differently: threads: 3 then, 1 now; torch: '2.12' then, "
        f"{torch.__version__!r} now; last bits would differ between samples: capture as before, set "
        "runtime.allow_mixed: true, or remove the folder to start again"
    )


def test_a_rank_that_would_compute_otherwise_than_rank_0_is_refused(unloadable: Rig) -> None:
    first, second = ranks(2)
    let_hear(first, accelerator="NVIDIA H200", torch="2.12")
    with pytest.raises(SettingsError) as error:
        unloadable.compute(second)
    assert str(error.value) == (
        "this rank would not compute as rank 0 (then): accelerator: 'NVIDIA H200' then, 'cpu' now; torch: '2.12' "
        f"then, {torch.__version__!r} now; last bits would differ: take equal machines, or set "
        "runtime.allow_mixed: true"
    )


def test_mixing_can_be_allowed(rig: Rig) -> None:
    first, second = ranks(2)
    let_hear(first, torch="2.12")
    rig.repository.set_params(runtime={"allow_mixed": True})
    assert len(rig.compute(second, present=[environment(threads=3)])) == 2 * NUM_ROWS


def test_rank_0_says_how_it_computes(rig: Rig) -> None:
    first, second = ranks(2)
    second.tell("all finished", b"")  # nobody waits for it here
    rig.compute(first, blocks=[], num_due=0)
    assert json.loads(second.hear("environment")) == environment()


def swap(tokens: Path) -> None:
    """Put other conversations there, of the same lengths."""
    path = tokens / "tokens.safetensors"
    tensors = load_file(path)
    tensors["input_ids"] = tensors["input_ids"].flip(0)
    with put_file(path) as temporary:
        write_tensors(temporary, tensors)


def test_fewer_tokens_than_rank_0_s_are_refused(rig: Rig) -> None:
    work = rig.work()
    name, indices = work.blocks[0]
    beyond = dataclasses.replace(work, blocks=[(name, [*indices, len(rig.tokens)])])
    with pytest.raises(InputError) as error:
        compute_work(rig.stage, rig.tokens, beyond, Peers.alone())
    assert str(error.value) == f"tokens/ does not hold the samples of {name} that rank 0 has: share one folder"


def test_other_tokens_than_rank_0_s_are_refused(rig: Rig) -> None:
    work = rig.work()
    swap(rig.repository.root / "tokens")
    with pytest.raises(InputError) as error:
        compute_work(rig.stage, rig.tokens, work, Peers.alone())
    assert str(error.value) == (
        f"tokens/ does not hold the samples of {work.blocks[0][0]} that rank 0 has: share one folder"
    )


# Embedding and lm_head


def test_kept_weights_are_the_target_s(rig: Rig) -> None:
    assert kept_weights(rig.store) is None
    rig.compute(blocks=[], num_due=0)
    size, digest = kept_weights(rig.store) or (0, "")
    path = rig.store.folder / "weights.safetensors"
    assert size == path.stat().st_size
    assert digest == json.loads(path.with_suffix(".json").read_text())["sha256"]
    weights = load_file(rig.repository.root / "inputs/target/model.safetensors")
    kept = load_file(path)
    assert kept.keys() <= {EMBED_KEY, LM_HEAD_KEY}
    assert torch.equal(kept[EMBED_KEY], weights["model.embed_tokens.weight"])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("doctor", "said"),
    [
        (lambda folder: (folder / "weights.json").unlink(), None),
        (lambda folder: (folder / "weights.json").write_text("{"), "is not valid JSON"),
        (lambda folder: (folder / "weights.json").write_text('{"bytes": 0, "sha256": 1}'), "bytes: expected"),
        (lambda folder: (folder / "weights.json").write_text('{"bytes": 1, "x": 1}'), "missing required keys"),
        (lambda folder: (folder / "weights.safetensors").unlink(), "no such file"),
        (lambda folder: truncate(folder / "weights.safetensors"), "its header asks for"),
    ],
)
def test_weights_that_are_not_as_recorded_are_written_again(
    rig: Rig,
    alone: dict[str, bytes],
    doctor: Callable[[Path], object],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig.compute(blocks=[], num_due=0)
    caplog.clear()
    doctor(rig.store.folder)
    assert kept_weights(rig.store) is None
    assert [message.startswith("not accepted, written again: ") for message in caplog.messages] == [True] * bool(said)
    assert (said or "") in caplog.text
    assert rig.compute(blocks=[], num_due=0)["weights.safetensors"] == alone["weights.safetensors"]
    assert kept_weights(rig.store)


def test_weights_of_another_size_than_recorded_are_not_taken(rig: Rig) -> None:
    rig.compute(blocks=[], num_due=0)
    record = rig.store.folder / "weights.json"
    values = json.loads(record.read_text())
    record.write_text(json.dumps({**values, "bytes": values["bytes"] + 1}))
    assert kept_weights(rig.store) is None
