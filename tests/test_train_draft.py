"""The example that trains a draft: it learns, goes on where it was, and loses nothing by reading a cache."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import train_draft
from dspark_cache import build_cached_dspark_dataloader, read_manifest, write_manifest
from dspark_cache.convert import Conversion, convert_cache
from dspark_cache.errors import CacheFormatError, SettingsError
from dspark_draft import BlockLayer, Draft, means
from tests.caches import change_content
from tests.repository import ROOT, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = ROOT / "examples/train_draft.py"
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"cache": {"dtype": "fp32"}, "data": {"eval_samples": 8}},
    "bf16": {"cache": {"dtype": "bf16"}},
    "ragged": {"cache": {"dtype": "fp32", "layout": "ragged", "shard_bytes": 1 << 21}},
    "fp8": {"cache": {"dtype": "fp8_e4m3", "layout": "ragged"}},
}


@pytest.fixture(scope="module")
def cache_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the shipped sample's cache in a form."""
    made: dict[str, Path] = {}

    def give(form: str) -> Path:
        if form not in made:
            sections = {"verify": {"recompute_samples": 0}, **FORMS[form]}
            repository = make_repository(tmp_path_factory.mktemp("train") / form, **sections)
            repository.run("tokenize", "capture", "shards")
            made[form] = repository.root / "cache"
        return made[form]

    return give


def run(cache: Path, *options: object) -> list[torch.Tensor]:
    """Train in this process, on few anchors."""
    return list(train_draft.train(train_draft.parse(arguments(cache, *options))))


def arguments(cache: Path, *options: object) -> list[str]:
    return ["--cache", str(cache), "--device", "cpu", "--anchors", "4", *map(str, options)]


def losses(history: list[torch.Tensor]) -> list[float]:
    return [means(sums)["loss"] for sums in history]


def command(cache: Path, *options: object, processes: int = 0) -> list[str]:
    """Return a command that trains in a process of its own, or below torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    return [sys.executable, *launcher, str(SCRIPT), *arguments(cache, *options)]


# --- it learns ----------------------------------------------------------------------------------------------------


def test_the_loss_falls_and_a_seed_decides_it(cache_of: Callable[[str], Path]) -> None:
    options = ("--lr", 1e-2, "--anchors", 8)
    history = run(cache_of("fp32"), "--steps", 40, *options)
    first, last = (means(torch.stack(part).sum(dim=0)) for part in (history[:10], history[-10:]))
    assert last["loss"] < 0.9 * first["loss"]
    assert last["ce"] < 0.8 * first["ce"]
    assert last["acceptance"] > 1.2 * first["acceptance"]
    assert losses(run(cache_of("fp32"), "--steps", 3, *options)) == losses(history[:3])
    assert losses(run(cache_of("fp32"), "--steps", 3, *options, "--seed", 1)) != losses(history[:3])


def test_every_epoch_has_an_order_of_its_own(cache_of: Callable[[str], Path]) -> None:
    def orders(seed: int) -> list[list[list[int]]]:
        options = train_draft.parse(arguments(cache_of("ragged"), "--batch-size", 64, "--seed", seed))
        batches = train_draft.batches(train_draft.open_loader(options), 0)
        return [batch["input_ids"].tolist() for _, batch in zip(range(2), batches, strict=False)]

    found = [*orders(0), *orders(7)]
    assert all(one != other for one, other in itertools.combinations(found, 2))
    assert all(sorted(order) == sorted(found[0]) for order in found)


def test_lines_are_means_since_the_last_one(
    cache_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    history = run(cache_of("fp32"), "--steps", 5, "--every", 3)
    *steps, held_out = capsys.readouterr().out.splitlines()
    assert steps == [line("step 3", history[:3]), line("step 5", history[3:])]
    assert re.findall(r"(\w+) \d", held_out) == ["loss", "ce", "tv", "confidence", "acceptance"]


def line(what: str, part: list[torch.Tensor]) -> str:
    """Return what is printed of some steps."""
    return f"{what}: " + ", ".join(f"{name} {value:.4f}" for name, value in means(sum_of(part)).items())


def sum_of(part: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(part).sum(dim=0)


def test_a_resumed_run_prints_the_lines_of_one_that_was_not_cut(
    cache_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, options = cache_of("ragged"), ("--every", 3, "--checkpoint", tmp_path / "draft.pt")
    history = run(cache, "--steps", 12, "--every", 3)
    whole = capsys.readouterr().out.splitlines()
    run(cache, *options, "--steps", 6)
    run(cache, *options, "--steps", 12, "--resume")
    assert capsys.readouterr().out.splitlines() == whole
    # A run that ends between two lines prints one more, and the next line counts from there on.
    run(cache, *options, "--steps", 4)
    run(cache, *options, "--steps", 9, "--resume")
    parts = {"step 3": history[:3], "step 4": history[3:4], "step 6": history[4:6], "step 9": history[6:9]}
    assert capsys.readouterr().out.splitlines() == [line(what, part) for what, part in parts.items()]


def test_every_seed_and_step_has_numbers_of_its_own() -> None:
    seeds, steps = (0, 1, -1, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1), (0, 1, 2, 1 << 32)
    found = [train_draft.draw(seed, step, 2, 8) for seed, step in itertools.product(seeds, steps)]
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))
    assert torch.equal(train_draft.draw(-1, 2, 2, 8), found[seeds.index(-1) * len(steps) + 2])
    assert torch.equal(torch.stack(found), torch.stack(found).clamp(0, 1))
    assert found[0].shape == (2, 8)


def test_samples_that_were_held_out_are_evaluated_alike_each_time(cache_of: Callable[[str], Path]) -> None:
    cache = cache_of("fp32")
    torch.manual_seed(0)
    draft = Draft(cache, 4, 16)
    held_out = cache.with_name("cache-eval")
    by_three, by_eight = (train_draft.evaluate(draft, held_out, size) for size in (3, 8))
    assert torch.equal(by_three, train_draft.evaluate(draft, held_out, 3))
    assert by_three[0] > 0
    # Anchors depend on the batch, but with all of them in use nothing does.
    draft.num_anchors = 256
    torch.testing.assert_close(*(train_draft.evaluate(draft, held_out, size) for size in (3, 8)))
    assert not torch.allclose(by_eight, train_draft.evaluate(draft, held_out, 8))


# --- what the draft sees and learns from --------------------------------------------------------------------------


def batch_of(cache: Path, size: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    return next(iter(build_cached_dspark_dataloader(cache, size, False, **options)))


def test_a_block_sees_what_lies_before_its_anchor_and_itself(cache_of: Callable[[str], Path]) -> None:
    torch.manual_seed(0)
    draft = Draft(cache_of("fp32"), 3, 2)
    batch = batch_of(cache_of("fp32"), 1)
    ids, features = batch["input_ids"], batch["target_hidden_states"]
    places = torch.tensor([[20, 40]])[:, :, None] + torch.arange(3)

    def moved(position: int, *, token: bool = False) -> list[list[bool]]:
        """Say which slots of the two blocks change with a position's features, or with its token."""
        other_ids, other_features = ids.clone(), features.clone()
        if token:
            other_ids[0, position] += 1
        else:
            other_features[0, position] += 1
        difference = draft.hidden(features, ids, places) - draft.hidden(other_features, other_ids, places)
        return (difference.abs().amax(dim=-1) > 1e-6)[0].tolist()

    none, every = [False] * 3, [True] * 3
    assert moved(19) == [every, every]
    assert moved(20) == moved(39) == [none, every]
    assert moved(40) == moved(41) == moved(200) == [none, none]
    assert moved(20, token=True) == [every, none]
    assert moved(21, token=True) == moved(19, token=True) == [none, none]


def test_attention_knows_distances_alone() -> None:
    layer = BlockLayer(128)
    query, key = torch.randn(2, 1, 1, 128)

    def score(of_query: int, of_key: int) -> torch.Tensor:
        heads = [layer.split(states, torch.tensor([[place]])) for states, place in ((query, of_query), (key, of_key))]
        return (heads[0] * heads[1]).sum(dim=-1)

    torch.testing.assert_close(score(9, 2), score(107, 100))
    assert not torch.allclose(score(9, 2), score(9, 3))


def capped(logits: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(logits / 3)


def slow_sums(draft: Draft, batch: dict[str, torch.Tensor], chosen: list[list[int]]) -> torch.Tensor:
    """Add up weights and terms slot by slot, each block alone."""
    sums = torch.zeros(4)
    for row, anchors in enumerate(chosen):
        ids, mask, last = (batch[key][row] for key in ("input_ids", "loss_mask", "target_last_hidden_states"))
        for anchor in anchors:
            places = torch.arange(anchor, anchor + draft.block_size)[None, None]
            states = draft.hidden(batch["target_hidden_states"][row : row + 1], ids[None], places)[0, 0]
            for slot, place in enumerate(range(anchor, anchor + draft.block_size)):
                if place + 1 >= len(ids) or not mask[place + 1]:
                    break
                markov = draft.previous.weight[ids[place]]
                logits = capped(draft.lm_head @ states[slot]) + draft.markov.weight @ markov
                teacher = capped(draft.lm_head @ last[place].float()).softmax(dim=-1)
                tv = 1 - torch.minimum(logits.softmax(dim=-1), teacher).sum()
                foretold = draft.confidence(torch.cat([states[slot], markov])).sigmoid()[0]
                confidence = -(1 - tv) * foretold.log() - tv * (1 - foretold).log()
                ce = -logits.log_softmax(dim=-1)[ids[place + 1]]
                weight = torch.exp(torch.tensor(-slot / 4.0))
                sums += weight * torch.stack([torch.tensor(1.0), ce, tv, confidence])
    return sums


@torch.no_grad()
@pytest.mark.parametrize("num_anchors", [2, 400])
def test_sums_are_those_of_each_block_alone(cache_of: Callable[[str], Path], num_anchors: int) -> None:
    torch.manual_seed(1)
    draft = Draft(cache_of("fp32"), 5, num_anchors)
    draft.logit_rules = {"final_logit_softcapping": 3.0}
    batch = batch_of(cache_of("fp32"), 3)
    batch["loss_mask"][:, ::7] = 0  # answers that end and begin again within a block
    draws = train_draft.draw(7, 1, 3, 256)
    chosen = []
    for mask, numbers in zip(batch["loss_mask"].tolist(), draws.tolist(), strict=True):
        possible = [place for place in range(255) if mask[place] and mask[place + 1]]
        chosen.append(sorted(possible, key=lambda place: -numbers[place])[:num_anchors])
    assert all(len(anchors) >= 2 for anchors in chosen)
    torch.testing.assert_close(draft(batch, draws), slow_sums(draft, batch, chosen), rtol=1e-4, atol=1e-4)


def test_a_step_follows_the_gradient_of_the_mean_loss(cache_of: Callable[[str], Path]) -> None:
    found, expected = (Draft(cache_of("fp32"), 4, 4) for _ in range(2))
    expected.load_state_dict(found.state_dict())
    batch, draws = batch_of(cache_of("fp32")), torch.rand(4, 256)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    for _ in range(2):
        train_draft.train_step(found, optimizer, batch, draws)
        weight, ce, tv, confidence = expected(batch, draws)
        loss = (0.1 * ce + 0.9 * tv + 1.0 * confidence) / weight
        for parameter, slope in zip(
            expected.parameters(), torch.autograd.grad(loss, [*expected.parameters()]), strict=True
        ):
            parameter.data -= 0.1 * slope
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_to_foretell_acceptance_changes_no_token(cache_of: Callable[[str], Path]) -> None:
    draft = Draft(cache_of("fp32"), 4, 4)
    confidence = draft(batch_of(cache_of("fp32")), torch.rand(4, 256))[3]
    slopes = torch.autograd.grad(confidence, [draft.markov.weight, draft.confidence.weight])
    assert [bool(slope.any()) for slope in slopes] == [False, True]


def test_what_the_target_does_to_logits_comes_from_provenance(cache_of: Callable[[str], Path], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(cache_of("fp32"), cache)
    assert Draft(cache, 4, 4).logit_rules == {}
    change_content(cache, lambda content: content["capture"]["logits"].update(logit_scale=0.5))
    assert Draft(cache, 4, 4).logit_rules == {"logit_scale": 0.5}


def test_batches_without_anchors_train_nothing(cache_of: Callable[[str], Path]) -> None:
    draft = Draft(cache_of("fp32"), 4, 16)
    optimizer = torch.optim.SGD(draft.parameters(), lr=1.0)
    before = [parameter.clone() for parameter in draft.parameters()]
    for positions in (1, 256):
        batch = {key: tensor[:, :positions] for key, tensor in batch_of(cache_of("fp32")).items()}
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
        assert train_draft.train_step(draft, optimizer, batch, torch.rand(4, 256)).tolist() == [0, 0, 0, 0]
    assert all(torch.equal(*pair) for pair in zip(before, draft.parameters(), strict=True))


# --- every way to read ---------------------------------------------------------------------


def test_padding_changes_nothing(cache_of: Callable[[str], Path]) -> None:
    cache = cache_of("ragged")
    torch.manual_seed(0)
    draft = Draft(cache, 4, 16)
    padded, longest = batch_of(cache), batch_of(cache, pad_to="longest")
    assert longest["input_ids"].shape[1] < padded["input_ids"].shape[1]
    draws = torch.rand(padded["input_ids"].shape)
    torch.testing.assert_close(draft(padded, draws), draft(longest, draws))
    padded["target_hidden_states"][:, longest["input_ids"].shape[1] :] = 1e3
    torch.testing.assert_close(draft(padded, draws), draft(longest, draws))


@pytest.mark.parametrize("way", [("--read-ahead", 2), ("--num-workers", 1)])
def test_the_way_of_reading_changes_nothing(cache_of: Callable[[str], Path], way: tuple[str, int]) -> None:
    loader = train_draft.open_loader(train_draft.parse(arguments(cache_of("ragged"), *way)))
    assert way[1] in (loader.num_workers, loader._read_ahead)
    expected = losses(run(cache_of("ragged"), "--steps", 10))
    assert losses(run(cache_of("ragged"), "--steps", 10, *way)) == expected


# --- the cache against the target itself ----------------------------------------------------------------------------

ONLINE_TOLERANCE = {"fp32": 1e-6, "bf16": 5e-4, "fp8": 5e-3}
"""Largest relative difference of a loss in two epochs; measured were 1e-7, 5e-5 and 4e-4."""


@torch.no_grad()
def captured_online(target: Any, layer_ids: list[int], batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with states that the target has just computed, in its own dtype."""
    states = target.model(input_ids=batch["input_ids"], use_cache=False, output_hidden_states=True)
    features = [states.hidden_states[layer + 1] for layer in layer_ids]
    last = states.last_hidden_state
    return {**batch, "target_hidden_states": torch.cat(features, dim=-1), "target_last_hidden_states": last}


@pytest.mark.parametrize("form", ONLINE_TOLERANCE)
def test_losses_are_those_of_online_capture(
    cache_of: Callable[[str], Path], form: str, record_property: Callable[[str, object], None]
) -> None:
    cache = cache_of(form)
    target = AutoModelForCausalLM.from_pretrained(ROOT / "inputs/target", dtype=torch.float32)
    layer_ids = read_manifest(cache)["target_layer_ids"]
    histories = []
    for is_online in (False, True):
        torch.manual_seed(0)
        draft = Draft(cache, 4, 16)
        if is_online:
            draft.embed, draft.lm_head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
        optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-3)
        loader = build_cached_dspark_dataloader(cache, 8, "shard", seed=0)
        history = []
        for step, batch in enumerate((*loader, *loader)):
            given = captured_online(target, layer_ids, batch) if is_online else batch
            draws = train_draft.draw(0, step, 8, 256)[: len(batch["input_ids"])]
            history.append(train_draft.train_step(draft, optimizer, given, draws))
        histories.append(torch.tensor(losses(history)))
    cached, online = histories
    difference = float(((cached - online) / online).abs().max())
    record_property("largest relative difference of a loss", difference)
    assert 0 < difference < ONLINE_TOLERANCE[form]


# --- interrupted, and on several processes --------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [8, 5])
def test_training_goes_on_with_the_same_losses(
    cache_of: Callable[[str], Path], tmp_path: Path, batch_size: int
) -> None:
    cache, checkpoint = cache_of("ragged"), tmp_path / "draft.pt"
    options = ("--batch-size", batch_size, "--checkpoint", checkpoint, "--every", 100)
    whole = losses(run(cache, "--steps", 19, "--batch-size", batch_size))
    per_epoch = -(-read_manifest(cache)["num_samples"] // batch_size)
    parts = losses(run(cache, "--steps", 3, *options))
    (tmp_path / "earlier.pt").hardlink_to(checkpoint)
    for steps in (per_epoch, per_epoch + 2, 19):  # stopped in an epoch, at its end, and in the next one
        parts += losses(run(cache, "--steps", steps, *options, "--resume"))
    assert parts == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft.pt", "earlier.pt"]
    # A checkpoint takes the place of the one before and never overwrites it.
    assert [torch.load(path, weights_only=True)["step"] for path in (tmp_path / "earlier.pt", checkpoint)] == [3, 19]


def test_a_killed_process_goes_on_from_its_last_checkpoint(cache_of: Callable[[str], Path], tmp_path: Path) -> None:
    cache, checkpoint = cache_of("ragged"), tmp_path / "draft.pt"
    options = ("--checkpoint", checkpoint, "--every", 3)
    with subprocess.Popen(
        command(cache, *options, "--steps", 100000, "--read-ahead", 2), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step 12:"):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = torch.load(checkpoint, weights_only=True)["step"]
    assert done >= 9
    assert done % 3 == 0
    rest = losses(run(cache, *options, "--steps", done + 5, "--resume"))
    assert rest == losses(run(cache, "--steps", done + 5))[done:]


PROCESSES_TOLERANCE = 2e-4
"""Largest difference of a loss as printed, with four digits: two processes add their sums in another order."""


def printed(text: str) -> list[dict[str, float]]:
    """Return the numbers of each line; the last one is of the samples that were held out."""
    lines = text.splitlines()
    assert [line.startswith("held out: ") for line in lines] == [False] * (len(lines) - 1) + [True]
    return [{name: float(value) for name, value in re.findall(r"(\w+) (\d+\.\d+)", line)} for line in lines]


@pytest.mark.parametrize("samples", [None, 15, 9])
def test_one_and_two_processes_have_the_same_losses(
    cache_of: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], samples: int | None
) -> None:
    """Also where the second process ends its epochs with a repeated sample, the last of a batch or alone in one.

    Epochs of 15 or 9 samples have two steps: the run is cut in the middle of the sixth.
    """
    cache, checkpoint = cache_of("fp32"), tmp_path / "two.pt"
    if samples:
        shutil.copytree(f"{cache}-eval", tmp_path / "part-eval")
        convert_cache(cache, tmp_path / "part", Conversion(samples=(0, samples)))
        cache = tmp_path / "part"
    options = ("--every", 1, "--checkpoint")
    steps = 11 if samples else 12
    done = subprocess.run(
        command(cache, "--batch-size", 4, "--steps", steps, *options, checkpoint, processes=2),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    run(cache, "--steps", 14, *options, tmp_path / "one.pt")
    one, two = printed(capsys.readouterr().out), printed(done.stdout)
    assert len(two) == steps + 1
    for found, expected in zip(two[:-1], one, strict=False):
        assert found == pytest.approx(expected, abs=PROCESSES_TOLERANCE)
    # One process goes on where two were: the order and the anchors are those of a whole step.
    run(cache, "--steps", 14, *options, checkpoint, "--resume")
    for found, expected in zip(printed(capsys.readouterr().out), one[steps:], strict=True):
        assert found == pytest.approx(expected, abs=PROCESSES_TOLERANCE)


@pytest.mark.gpu
def test_a_gpu_has_the_losses_of_the_cpu(cache_of: Callable[[str], Path]) -> None:
    found = run(cache_of("ragged"), "--steps", 8, "--device", "cuda")
    assert losses(found) == pytest.approx(losses(run(cache_of("ragged"), "--steps", 8)), rel=1e-2)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_to_resume_needs_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_draft.main(["--resume"])
    assert "--resume needs --checkpoint" in capsys.readouterr().err


def test_a_cache_without_samples_is_refused(make_cache: Callable[..., Path]) -> None:
    empty = make_cache(0, 2)
    with pytest.raises(SystemExit, match=r"cache-0 has no samples to train on$"):
        run(empty)


def test_another_cache_than_the_expected_is_refused(cache_of: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("data:\n  seq_length: 4096\n")
    with pytest.raises(CacheFormatError, match="seq_length: expected 4096, found 256"):
        run(cache_of("fp32"), "--expect", tmp_path / "params.yaml")


def test_a_checkpoint_of_another_cache_is_refused(make_cache: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "draft.pt"
    run(make_cache(4, 2), "--steps", 1, "--checkpoint", checkpoint)
    other = make_cache(4, 2)
    write_manifest(other, {**read_manifest(other), "shuffle_seed": 7})
    with pytest.raises(SettingsError, match="this state cannot be resumed: cache: "):
        run(other, "--steps", 2, "--checkpoint", checkpoint, "--resume")
