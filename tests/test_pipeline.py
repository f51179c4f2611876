"""The four stages on small data: which changes cost a forward, and what bad input leaves behind."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark_cache import CachedDSparkDataset
from dspark_cache.capture_run import IDENTITY_EXEMPT_KEYS, IDENTITY_KEYS
from dspark_cache.errors import DsparkCacheError, InputError, LockedError, SettingsError, VerificationError
from dspark_cache.files import FileLock
from dspark_cache.schema import STAGE_VERSIONS
from dspark_cache.settings import TargetSettings
from tests.caches import change_content
from tests.repository import GOLDEN, OUTPUTS, Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SMALL: dict[str, dict[str, Any]] = {
    "data": {"seq_length": 48},
    "target": {"layer_ids": [1, 3]},
    "verify": {"recompute_samples": 2},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    repository = make_repository(tmp_path_factory.mktemp("pipeline") / "repository", num_rows=8, **SMALL)
    repository.run()
    return repository


@pytest.fixture
def repository(made: Repository, tmp_path: Path) -> Repository:
    shutil.copytree(made.root, tmp_path / "repository")
    return Repository(tmp_path / "repository")


@contextmanager
def forwarded_samples() -> Iterator[list[int]]:
    """Count the rows of every batch that goes through an embedding of any model."""
    rows: list[int] = []

    def count(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(args[0].shape[0])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield rows
    finally:
        handle.remove()


def captured(repository: Repository) -> int:
    """Run tokenize, capture and shards and return the number of samples that were forwarded."""
    with forwarded_samples() as rows:
        repository.run("tokenize", "capture")
    repository.run("shards")
    return sum(rows)


def append_rows(repository: Repository, *texts: str) -> None:
    with (repository.root / "inputs/data/conversations.jsonl").open("a") as data:
        for text in texts:
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]
            data.write(json.dumps({"messages": messages}) + "\n")


def test_a_first_run_forwards_every_sample_once_and_the_next_none(tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repository", num_rows=8, **SMALL)
    assert captured(repository) == 8
    before = repository.digests("tokens", "features.json", "cache")
    assert captured(repository) == 0
    assert repository.digests("tokens", "features.json", "cache") == before


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "mask_generation_prompt", True),
        ("data", "mask_reasoning_content", True),
        ("data", "min_loss_tokens", 10),
        ("data", "limit", 3),
        ("data", "split", "train[2:6]"),
        ("data", "shuffle", True),
        ("target", "nonfinite", "drop"),
        ("target", "block_bytes", 4096),
        ("cache", "dtype", "fp32"),
        ("cache", "shard_size", 3),
    ],
)
def test_changes_that_cost_no_forward(repository: Repository, section: str, key: str, value: object) -> None:
    blocks = repository.blocks()
    repository.set_params(**{section: {key: value}})
    assert captured(repository) == 0
    assert repository.blocks() == blocks
    repository.run("verify")


def test_a_comment_in_the_template_costs_no_forward(repository: Repository) -> None:
    template = repository.root / "inputs/target/chat_template.jinja"
    template.write_text("{#- a comment -#}" + template.read_text())
    before = repository.digests("features.json")
    assert captured(repository) == 0
    assert repository.digests("features.json") == before


def test_appended_conversations_cost_a_forward_each_and_old_blocks_stay(repository: Repository) -> None:
    blocks = repository.blocks()
    append_rows(repository, "one more", "and another one", "one more")
    assert captured(repository) == 2  # the third is the first again: the same ids, the same states
    assert len(CachedDSparkDataset(repository.root / "cache")) == 11
    assert blocks.items() < repository.blocks().items()
    repository.run("verify")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_implementation", "eager"),
        ("compute_dtype", "bf16"),
        ("layer_ids", [1, 4]),
        ("draft_num_hidden_layers", 2),
    ],
)
def test_changes_of_the_target_capture_every_sample_in_a_folder_of_its_own(
    repository: Repository, key: str, value: object
) -> None:
    blocks, old = repository.blocks(), set(repository.scratch_folders())
    more = {"layer_ids": None} if key == "draft_num_hidden_layers" else {}
    repository.set_params(target={key: value, **more})
    assert captured(repository) == 8
    assert len(set(repository.scratch_folders()) - old) == 1
    assert blocks.items() < repository.blocks().items()
    repository.run("verify")


def test_a_changed_weight_captures_every_sample_and_keeps_the_tokens_bytes(repository: Repository) -> None:
    tokens = repository.digests("tokens")
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    assert captured(repository) == 8
    assert repository.digests("tokens") == tokens


def test_every_key_of_target_is_identity_or_exempt_with_a_reason() -> None:
    keys = set(TargetSettings.__dataclass_fields__)
    assert keys == IDENTITY_KEYS.keys() | IDENTITY_EXEMPT_KEYS.keys()
    assert not IDENTITY_KEYS.keys() & IDENTITY_EXEMPT_KEYS.keys()


def test_batch_budget_of_another_run_is_not_mixed_in_unless_allowed(repository: Repository) -> None:
    append_rows(repository, "something new")
    repository.set_params(runtime={"max_tokens_per_batch": 64})
    repository.run("tokenize")
    with pytest.raises(SettingsError, match=r"max_tokens_per_batch: 8192 then, 64 now.*runtime\.allow_mixed: true"):
        repository.run("capture")
    repository.set_params(runtime={"allow_mixed": True})
    repository.run("capture")
    repository.set_params(runtime={"max_tokens_per_batch": 32})
    repository.run("capture")  # nothing to compute, nothing to mix


def test_blocks_in_other_groups_give_the_same_cache(tmp_path: Path) -> None:
    caches = []
    for block_bytes in (1, 1 << 14, 1 << 30):
        params = {**SMALL, "target": {"layer_ids": [1, 3], "block_bytes": block_bytes}}
        repository = make_repository(tmp_path / str(block_bytes), num_rows=8, **params)
        repository.run("tokenize", "capture", "shards")
        caches.append(CachedDSparkDataset(repository.root / "cache"))
    for index in range(8):
        first, *others = (cache[index] for cache in caches)
        for other in others:
            for key, value in first.items():
                torch.testing.assert_close(other[key], value, rtol=1e-2, atol=1e-4)


def test_the_shipped_sample_reads_back_with_expectations_from_params(made: Repository) -> None:
    dataset = CachedDSparkDataset(made.root / "cache", expect=made.root / "params.yaml")
    assert len(dataset) == 8


# --- bad input: what is said, and what is left on disk -------------------------------------------------------------


def refused(repository: Repository, stage: str, error: type[DsparkCacheError], match: str) -> None:
    """Run a stage that must refuse, and leave every output as it was."""
    existing = [name for name in OUTPUTS if (repository.root / name).exists()]
    before = repository.digests(*existing)
    with pytest.raises(error, match=match):
        repository.run(stage)
    assert repository.digests(*existing) == before
    assert [name for name in OUTPUTS if (repository.root / name).exists()] == existing


def verification(repository: Repository) -> list[str]:
    """Run verify, which must find something; return the findings of its report."""
    before = repository.digests("cache")
    with pytest.raises(VerificationError):
        repository.run("verify")
    assert repository.digests("cache") == before
    report = json.loads((repository.root / "reports/verify.json").read_text())
    assert report["num_findings"] == len(report["findings"])
    findings: list[str] = report["findings"]
    return findings


@pytest.mark.parametrize("stage", ["tokenize", "capture", "shards", "verify"])
def test_faulty_params_are_refused_by_every_stage_all_at_once(repository: Repository, stage: str) -> None:
    repository.set_params(data={"seq_lenght": 3}, cache={"shard_size": 0, "dtype": "int8"})
    refused(
        repository,
        stage,
        SettingsError,
        r"(?s)3 fault.*data\.seq_lenght, did you mean 'seq_length'.*cache\.dtype: expected one of bf16, fp16, fp32"
        r".*cache\.shard_size: expected an integer of at least 1 or auto, found 0",
    )


def test_a_missing_data_file_is_refused_with_the_nearest_name(repository: Repository) -> None:
    repository.set_params(data={"path": "inputs/data/conversation.jsonl"})
    refused(repository, "tokenize", InputError, r"data\.path: no such file: .*; did you mean .*conversations\.jsonl\?")


def test_no_usable_sample_is_refused_with_counts(repository: Repository) -> None:
    repository.set_params(data={"min_loss_tokens": 48})
    refused(
        repository, "tokenize", InputError, r"no usable samples, dropped by reason: \{'min_loss_tokens': 8\}; check"
    )


def test_no_supervised_token_is_refused_and_names_the_template(repository: Repository) -> None:
    template = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"
    repository.set_params(target={"chat_template": template})
    refused(repository, "tokenize", InputError, r"no supervised token in any of 8 samples .*target\.chat_template")


def test_a_row_that_is_no_conversation_is_refused_by_line_or_skipped_and_counted(repository: Repository) -> None:
    with (repository.root / "inputs/data/conversations.jsonl").open("a") as data:
        data.write('{"messages": []}\n{"text": "x"}\nnot json\n')
    refused(
        repository,
        "tokenize",
        InputError,
        r"conversations\.jsonl:9: messages: expected at least one message.*data\.skip_invalid: true skips",
    )
    repository.set_params(data={"skip_invalid": True})
    repository.run("tokenize")
    counts = json.loads((repository.root / "tokens/tokens.json").read_text())
    assert counts["dropped"] == {"bad_json": 1, "empty_messages": 1, "no_messages": 1}
    assert counts["num_samples"] == 8


@pytest.mark.parametrize("layer_ids", [[1, 6], [-1, 7]])
def test_layer_ids_out_of_range_are_refused_with_the_range_before_loading(
    repository: Repository, layer_ids: list[int]
) -> None:
    repository.set_params(target={"layer_ids": layer_ids})
    (repository.root / "inputs/target/model.safetensors").write_bytes(b"not even a checkpoint")
    refused(
        repository, "capture", SettingsError, r"target\.layer_ids: expected strictly increasing ids from -1 .* to 5"
    )


@pytest.mark.parametrize(("layer_ids", "odd"), [([-1, 2], "-1"), ([2, 5], "5")])
def test_embedding_and_last_layer_are_warned_of(
    repository: Repository, layer_ids: list[int], odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    repository.set_params(target={"layer_ids": layer_ids})
    repository.run("capture", "shards", "verify")
    assert f"layer ids [{odd}] cannot be served by SGLang: " in caplog.text


def test_a_hub_id_without_a_commit_and_a_template_outside_inputs_are_refused_together(repository: Repository) -> None:
    (repository.root / "mine.jinja").write_text("{{ messages }}")
    repository.set_params(target={"model": "someone/model", "revision": "main", "chat_template": "mine.jinja"})
    refused(
        repository,
        "tokenize",
        InputError,
        r"(?s)target\.revision to be a commit of 40 .*found 'main'.*chat_template: mine\.jinja lies outside inputs",
    )


def test_a_pinned_path_that_changed_prints_what_to_write(repository: Repository) -> None:
    shutil.copy(repository.root / "inputs/data/conversations.jsonl", repository.root / "mine.jsonl")
    repository.set_params(data={"path": "mine.jsonl", "revision": "sha256:" + "0" * 64})
    refused(
        repository,
        "tokenize",
        InputError,
        r"data\.path: mine\.jsonl has changed: .*found revision: sha256:[0-9a-f]{64}",
    )


def test_a_linked_folder_under_inputs_is_refused_by_name(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (repository.root / "inputs/data/linked").symlink_to(tmp_path / "elsewhere")
    refused(repository, "tokenize", InputError, r"inputs/data/linked links to a folder")


def test_a_checkpoint_with_a_missing_tensor_is_refused_by_its_name(repository: Repository) -> None:
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    refused(repository, "capture", InputError, r"does not fit the model: .*model\.layers\.2\.mlp\.up_proj\.weight")


def test_pickled_weights_are_never_loaded(repository: Repository) -> None:
    path = repository.root / "inputs/target/model.safetensors"
    torch.save(load_file(path), path.with_name("pytorch_model.bin"))
    path.unlink()
    refused(repository, "capture", InputError, r"no \*\.safetensors weights; pytorch_model\.bin is pickled and never")


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_states_that_are_not_finite_stop_the_run_or_are_dropped(repository: Repository, policy: str) -> None:
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    ids = load_file(repository.root / "tokens/tokens.safetensors")
    only_in_first = set(ids["input_ids"][: ids["sample_offsets"][1]].tolist())
    only_in_first -= set(ids["input_ids"][ids["sample_offsets"][1] :].tolist())
    weights["model.embed_tokens.weight"][only_in_first.pop()] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    repository.set_params(target={"nonfinite": policy})
    if policy == "error":
        refused(repository, "capture", DsparkCacheError, r"sample 0: layer 1 holds numbers that are not finite")
        return
    repository.run("capture", "shards", "verify")
    assert len(CachedDSparkDataset(repository.root / "cache")) == 7
    dropped = json.loads((repository.root / "cache/provenance.json").read_text())["capture"]["dropped"]
    assert list(dropped.values()) == ["layer 1 is not finite"]
    repository.set_params(target={"nonfinite": "error"})
    refused(repository, "capture", DsparkCacheError, r"1 samples are not finite: sample 0 \(layer 1 is not finite\)")


def test_gone_blocks_are_refused_with_the_ways_out(repository: Repository) -> None:
    for folder in repository.scratch_folders():
        for block in folder.glob("block-*"):
            block.unlink()
    refused(
        repository,
        "shards",
        DsparkCacheError,
        r"captured states in .*capture-.* are gone .*revert the param .* dvc repro -f -s capture && dvc repro",
    )


def test_keep_blocks_false_removes_them_once_the_cache_is_verified(repository: Repository) -> None:
    before, blocks = repository.digests("cache"), repository.blocks()
    (folder,) = repository.scratch_folders()
    repository.set_params(runtime={"keep_blocks": False})
    repository.run("shards")
    assert repository.blocks() == blocks
    (repository.root / "cache/left-over").touch()
    assert verification(repository) == ["[files] left-over: does not belong into a cache"]
    assert repository.blocks() == blocks
    (repository.root / "cache/left-over").unlink()
    others = {path.name for path in folder.iterdir() if not path.name.startswith("block-")}
    with FileLock(folder / "lock"), pytest.raises(LockedError, match=f"/{folder.name} is being written by process "):
        repository.run("verify")
    assert repository.blocks() == blocks
    repository.run("verify")
    assert {path.name for path in folder.iterdir()} == others
    assert repository.digests("cache") == before
    repository.run("verify")  # nothing left to remove


def test_damage_to_a_shard_that_is_a_block_is_found_and_mended_by_capturing_that_block(repository: Repository) -> None:
    """The remedy that docs/operations.md gives; a shard of its own is mended by `shards` alone."""
    repository.set_params(cache={"layout": "ragged", "dtype": "fp32"})
    repository.run("shards", "verify")
    before = repository.digests("cache")
    shard = repository.root / "cache/shard-000000.safetensors"
    (block,) = (repository.root / name for name in repository.blocks())
    assert shard.samefile(block)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    with shard.open("r+b") as file:  # in place, as a disk does
        file.write(content)
    repository.run("capture", "shards")
    assert any("shard-000000.safetensors: sha256 is" in finding for finding in verification(repository))
    repository.set_params(runtime={"check_blocks": "digest"})
    with forwarded_samples() as rows:
        repository.run("capture", "shards", "verify")
    assert sum(rows) > 0
    assert repository.digests("cache") == before


def test_a_relabelled_cache_is_refused(repository: Repository) -> None:
    path = repository.root / "cache/manifest.json"
    path.write_text(path.read_text().replace("    1,\n    3\n", "    2,\n    3\n"))
    with pytest.raises(VerificationError, match=r"target_layer_ids: expected \[1, 3\], found \[2, 3\]"):
        repository.run("verify")
    assert json.loads((repository.root / "reports/verify.json").read_text())["num_findings"] > 0


def test_a_cache_of_a_foreign_tokenizer_is_refused(repository: Repository) -> None:
    shutil.copy(GOLDEN / "models/qwen3-tiny/tokenizer.json", repository.root / "inputs/target/tokenizer.json")
    repository.run("tokenize", "capture")
    with pytest.raises(VerificationError, match=r"\[values\] .* sample 0: input_ids are not those"):
        repository.run("verify")


# --- where a cache comes from ---------------------------------------------------------------------------------------


def test_a_cache_without_provenance_is_not_the_stage_s(repository: Repository) -> None:
    (repository.root / "cache/provenance.json").unlink()
    assert verification(repository) == ["[files] provenance.json: is missing: nothing says what the bytes must be"]


ORIGIN: list[tuple[str, object, str]] = [
    ("layout", "ragged", "'padded'"),
    ("shards_version", 1, str(STAGE_VERSIONS["shards"])),
    ("pad_token_id", 1, "995"),
    ("tokens.seq_length", 64, "48"),
    ("tokens.sha256", None, "'"),
    ("tokens.limit", 7, "None"),
    ("tokens.dropped.bad_json", 1, "nothing"),
    ("tokens.more", [], "nothing"),
    ("capture.environments", [], "[{'accelerator': 'cpu', "),
    ("capture.dropped.abcd", "layer 1 is not finite", "nothing"),
    ("capture.logits.scale", 0.5, "nothing"),
    ("capture.identity.weights", "sha256:0", "'sha256:"),
    ("capture.identity.target_layer_ids", [1, 2], "[1, 3]"),
    ("capture.identity.attn_implementation", "eager", "None"),
]


def set_leaf(content: dict[str, Any], key: str, value: object) -> None:
    """Set a value inside of objects, by its full key."""
    *parents, last = key.split(".")
    for parent in parents:
        content = content[parent]
    content[last] = value


@pytest.mark.parametrize(("key", "value", "now"), ORIGIN)
def test_provenance_of_another_origin_is_found(repository: Repository, key: str, value: object, now: str) -> None:
    repository.set_params(verify={"level": "files"})
    change_content(repository.root / "cache", lambda content: set_leaf(content, key, value))
    (finding,) = verification(repository)
    assert finding.startswith(
        f"[files] provenance.json: {key}: found {value!r}; tokens/, features.json and params.yaml give {now}"
    )


def test_everything_of_another_origin_is_named_sorted_and_cut(repository: Repository) -> None:
    repository.set_params(verify={"level": "files"})
    path = repository.root / "cache"

    def change(content: dict[str, Any]) -> None:
        for key, value, _ in ORIGIN:
            set_leaf(content, key, value)
        del content["tokens"]["tokenizer_fingerprint"]
        content["tokens"]["chat_template"] = "x" * 300

    change_content(path, change)
    findings = verification(repository)
    keys = sorted([*(key for key, _, _ in ORIGIN), "tokens.chat_template", "tokens.tokenizer_fingerprint"])
    assert [finding.split(": ")[1] for finding in findings] == keys
    assert findings[-1].startswith("[files] provenance.json: tokens.tokenizer_fingerprint: found nothing; tokens/, ")
    (template,) = [finding for finding in findings if ": tokens.chat_template: " in finding]
    found, given = template.split("; tokens/, features.json and params.yaml give ")
    assert found.startswith(f"[files] provenance.json: tokens.chat_template: found '{'x' * 197}")
    assert (found.count("x") < 202, 197 < len(given) < 205) == (True, True)


@pytest.mark.parametrize("section", ["tokens", "capture"])
def test_an_emptied_section_is_found_by_what_it_lacks(repository: Repository, section: str) -> None:
    repository.set_params(verify={"level": "files"})
    content = json.loads((repository.root / "cache/provenance.json").read_text())[section]
    change_content(repository.root / "cache", lambda content: content.update({section: {}}))
    keys = {finding.split(": ")[1] for finding in verification(repository)}
    assert keys >= {f"{section}.{key}" for key, value in content.items() if value and not isinstance(value, dict)}
    assert all(key.startswith(f"{section}.") for key in keys)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("tokens", "limit", None),  # was null
        ("tokens", "dropped", None),  # was {}
        ("capture", "logits", None),  # was {}
        ("tokens", "dropped", {"more": {}}),
    ],
)
def test_what_is_null_or_empty_or_gone_is_found_too(
    repository: Repository, section: str, key: str, value: object
) -> None:
    repository.set_params(verify={"level": "files"})

    def change(content: dict[str, Any]) -> None:
        if value is None:
            del content[section][key]
        else:
            content[section][key] = value

    change_content(repository.root / "cache", change)
    (finding,) = verification(repository)
    assert finding.startswith(f"[files] provenance.json: {section}.{key}")


def test_a_cache_of_other_params_is_found_by_manifest_and_provenance(repository: Repository) -> None:
    repository.set_params(cache={"layout": "ragged"}, verify={"level": "files"})
    findings = verification(repository)
    assert [finding.split(":")[0] for finding in findings][-1] == "[files] provenance.json"
    assert findings[-1].startswith("[files] provenance.json: layout: found 'padded'; tokens/, features.json and ")
    assert len(findings) > 1
    assert all(finding.startswith("[files] manifest.json: ") for finding in findings[:-1])


def test_states_of_another_capture_are_found_though_every_digest_agrees(repository: Repository) -> None:
    """The cache of a target that was changed and captured again, but not published again."""
    path = repository.root / "inputs/target/model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    before = json.loads((repository.root / "cache/provenance.json").read_text())["capture"]["identity"]["weights"]
    repository.run("tokenize", "capture")
    now = json.loads((repository.root / "features.json").read_text())["identity"]["weights"]
    assert now != before
    assert verification(repository) == [
        f"[files] provenance.json: capture.identity.weights: found {before!r}; tokens/, features.json and params.yaml "
        f"give {now!r}"
    ]


def test_supervision_is_judged_where_the_level_asks_for_it(repository: Repository) -> None:
    """Also where params ask for no workers, as many of which check shards."""
    template = repository.root / "inputs/target/chat_template.jinja"
    template.write_text("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    repository.set_params(runtime={"num_workers": 0})
    repository.run()
    repository.set_params(verify={"level": "supervision"})
    (finding,) = verification(repository)
    assert finding == (
        "[supervision] manifest.json: 100.0 % of all tokens are supervised: does the chat template mark only answers?"
    )
