"""The page of a verification: what it says, that nothing in it is trusted, and the data of the plots."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from dspark_cache import CachedDSparkDataset
from dspark_cache.cache_files import CacheFolder, Finding
from dspark_cache.errors import InputError, VerificationError
from dspark_cache.examine import Examined, ShownSample, ShownSpan, VerifiedPart, no_texts, verified_part
from dspark_cache.plots import plot_data
from dspark_cache.provenance import read_provenance
from dspark_cache.report import (
    MAX_REPORTED,
    MAX_VALUE,
    REMEDIES,
    folder_texts,
    render_cache_report,
    render_report,
    size_text,
    visible,
)
from dspark_cache.schema import HIDDEN, INPUT_IDS, TRAIN, VERIFY_LEVELS
from dspark_cache.verify import Distance, Report, verify_cache
from tests.caches import make_ragged
from tests.repository import ROOT, Repository, make_repository

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PLOTS = ("anchors", "lengths", "norms", "recompute", "supervised")
HOSTILE = (
    "</style><script>alert(1)</script><img src=x onerror=alert(1)>\N{RIGHT-TO-LEFT OVERRIDE}\x1b[2J&'\"{{ 7 * 7 }}"
)
HARMLESS = (
    "&lt;/style&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;"
    "&lt;U+202E&gt;&lt;U+001B&gt;[2J&amp;&#39;&#34;{{ 7 * 7 }}"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """A repository after all stages; one that changes it takes a copy."""
    repository = make_repository(
        tmp_path_factory.mktemp("report") / "repository",
        num_rows=12,
        data={"seq_length": 64, "eval_samples": 3},
        target={"layer_ids": [1, 3]},
        verify={"recompute_samples": 1},
    )
    repository.run()
    return repository


@pytest.fixture
def repository(made: Repository, tmp_path: Path) -> Repository:
    shutil.copytree(made.root, tmp_path / "repository", symlinks=True)
    return Repository(tmp_path / "repository")


def page_of(repository: Repository) -> str:
    return (repository.root / "reports/verify.html").read_text()


def plots_of(repository: Repository) -> dict[str, list[dict[str, Any]]]:
    return {path.stem: json.loads(path.read_text()) for path in (repository.root / "reports/plots").iterdir()}


def part_of(cache: Path) -> VerifiedPart:
    folder = CacheFolder(cache)
    return verified_part(folder, verify_cache(folder, "values"), no_texts("of the test"))


class Outline(HTMLParser):
    """What a page consists of; an element that is not closed, or closed twice, is an error."""

    VOID = ("meta", "link", "line", "rect", "circle")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag
        if tag in ("td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def words(page: str) -> str:
    return " ".join(Outline(page).text.split())


# The stage


def test_the_page_says_first_that_a_sound_cache_is_sound(made: Repository) -> None:
    text = words(page_of(made))
    assert "Verification of the cache of inputs/target Sound: nothing was found up to the level values. " in text
    assert "train: 0 findings; 1 sample recomputed by the target. eval: 0 findings; 1 sample recomputed" in text
    assert text.index("Sound") < text.index("target_layer_ids [1, 3]") < text.index("Part train: cache")
    assert text.index("Part train: cache") < text.index("Part eval: cache-eval")


def test_numbers_are_those_of_the_metrics(made: Repository) -> None:
    text = words(page_of(made))
    report = json.loads((made.root / "reports/verify.json").read_text())
    for part in (report, report["eval"]):
        counts = part["supervision"]
        assert f"Samples {counts['num_samples']} Shards 1 Tokens {counts['num_tokens']} " in text
        assert f"Supervised tokens {counts['supervised_tokens']} ({100 * counts['supervised_fraction']:.1f} %)" in text
        assert f"row) {counts['anchors']} Samples without a supervised token 0" in text
        assert f"{part['recompute']['worst_relative_l2']:.4g}" in text


def test_samples_are_text_with_what_is_supervised_marked(made: Repository) -> None:
    page = page_of(made)
    answers = re.findall(r"<mark>(.*?)</mark>", page, re.DOTALL)
    assert len(answers) > 6
    assert "&lt;|im_start|&gt;assistant\n<mark>" in page
    assert any(answer.endswith("&lt;|im_end|&gt;") for answer in answers)
    assert "Text by the tokenizer of inputs/target, sha256:" in page


def test_the_same_inputs_give_the_same_bytes_and_nothing_of_the_machine(repository: Repository) -> None:
    before = repository.digests("reports/verify.html", "reports/plots", "reports/verify.json")
    assert str(repository.root.parent) not in page_of(repository)
    shutil.rmtree(repository.root / "reports")
    repository.run("verify")
    assert repository.digests("reports/verify.html", "reports/plots", "reports/verify.json") == before


def test_findings_are_reported_and_said_what_to_do_before_the_stage_fails(repository: Repository) -> None:
    shard = repository.root / "cache-eval/shard-000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-2 * 64 * 64] ^= 1  # of the longest sample, which fills its window, and comes last
    shard.unlink()
    shard.write_bytes(content)
    with pytest.raises(VerificationError, match=r"the eval cache has 1 finding\(s\), see reports/verify.html:\n"):
        repository.run("verify")
    text = words(page_of(repository))
    assert "inputs/target 1 finding: do not train on this cache. bytes: Bytes changed since" in text
    assert "train: 0 findings; 1 sample recomputed by the target. eval: 1 finding; no sample was recomputed" in text
    assert "Part eval: cache-eval Findings [bytes] shard-000000.safetensors: sha256 is " in text
    assert "None: there are no samples, or not all of their values are sound." in text
    assert page_of(repository).count("<svg") == 4
    assert {row["eval"] for row in plots_of(repository)["lengths"]} == {None}


@pytest.mark.parametrize("level", VERIFY_LEVELS)
def test_each_level_has_a_page_and_plots(repository: Repository, level: str) -> None:
    repository.set_params(verify={"level": level, "recompute_samples": 0}, target={"model": "inputs/target"})
    repository.run("verify")
    page, plots = page_of(repository), plots_of(repository)
    has_values = level in ("values", "supervision")
    assert plots.keys() == set(PLOTS)
    assert f"up to the level {level}." in words(page)
    assert (f"None: the level {level} reads no values." in words(page)) != has_values
    assert ("<svg" in page) == has_values
    assert "no sample was recomputed by the target." in words(page)
    assert {row["train_worst"] for row in plots["recompute"]} == {None}
    assert ({row["train_p50"] for row in plots["norms"]} == {None}) != has_values


def test_without_the_target_ids_are_shown_and_it_is_said(repository: Repository) -> None:
    repository.set_params(verify={"recompute_samples": 0})
    for path in (repository.root / "inputs/target").iterdir():
        if path.name != "README.md":
            path.unlink()
    repository.run("verify")
    text = words(page_of(repository))
    assert "Token ids are shown, since the target inputs/target is not at hand." in text
    assert re.search(r"Sample 0: [^:]+\d+ tokens, \d+ supervised\.( \d+)+", text)


def test_another_tokenizer_is_not_used(repository: Repository) -> None:
    path = repository.root / "inputs/target/tokenizer.json"
    path.write_text(path.read_text().replace("<|im_start|>", "<|im_begin|>"))
    repository.set_params(verify={"recompute_samples": 0})
    repository.run("verify")
    text = words(page_of(repository))
    assert re.search(
        r"shown, since the tokenizer of inputs/target is sha256:\w+, that of the samples was sha256:\w+\.", text
    )
    assert "im_begin" not in text


def test_plots_have_a_column_for_each_part(made: Repository) -> None:
    plots = plots_of(made)
    assert plots.keys() == set(PLOTS)
    for name in ("anchors", "lengths", "supervised"):
        for part in ("train", "eval"):
            assert sum(row[part] for row in plots[name]) == pytest.approx(100, abs=0.01)
    assert [row["tokens"] for row in plots["lengths"]] == list(range(0, 65, 5))
    assert [row["percent"] for row in plots["supervised"]] == list(range(0, 101, 5))
    for name in ("norms", "recompute"):
        layers = [(row["state"], row["layer"]) for row in plots[name]]
        assert layers == [("layer 1", 1), ("layer 3", 3), ("last hidden", 5)]
    for row in plots["norms"]:
        assert 0 < row["train_p5"] <= row["train_p50"] <= row["train_p95"]
        assert row["eval_p50"] > 0
    for row in plots["recompute"]:
        assert 0 < row["eval_mean"] <= row["eval_worst"] < 0.01
        assert 0 < row["train_mean"] <= row["train_worst"] < 0.01


def test_lengths_are_those_of_the_samples(made: Repository) -> None:
    dataset = CachedDSparkDataset(made.root / "cache-eval")
    lengths = [int((sample[HIDDEN] != 0).any(dim=-1).sum()) for sample in (dataset[index] for index in range(3))]
    for row in plots_of(made)["lengths"]:
        inside = sum(row["tokens"] <= length < row["tokens"] + 5 for length in lengths)
        assert row["eval"] == pytest.approx(100 * inside / 3, abs=0.001)
    assert CachedDSparkDataset(made.root / "cache")[0][INPUT_IDS].shape == (64,)


# The page of any cache


def test_a_cache_without_provenance_has_a_page(make_cache: Callable[..., Path]) -> None:
    folder = CacheFolder(make_cache(9, 4))
    text = words(render_cache_report(folder, verify_cache(folder, "values"), folder_texts(None, folder.provenance)))
    assert "Verification of the cache of models/tiny Sound: nothing was found up to the level values." in text
    assert "train: 0 findings; no sample was recomputed by the target." in text
    assert "Token ids are shown, since no folder with the target's tokenizer was given." in text


def test_a_ragged_cache_has_no_padding_and_its_list_of_shards_is_left_out(make_cache: Callable[..., Path]) -> None:
    padded = make_cache(9, 4)
    text = words(render_report({TRAIN: part_of(padded)}))
    ragged = words(render_report({TRAIN: part_of(make_ragged(padded, [4, 5]))}))
    assert "Tokens 45 Tokens a sample, mean 5.0 Padding 37.5 % Supervised tokens 24 (53.3 %)" in text
    assert "Tokens 45 Tokens a sample, mean 5.0 Padding none stored Supervised tokens 24 (53.3 %)" in ragged
    assert re.search(r"Shards, bytes [\d,.]+ (KiB|bytes) Target weights, bytes", text)
    assert re.search(r"Shards, bytes [^:]+ Ids and masks, bytes [^:]+ Target weights, bytes", ragged)
    assert "target_vocab_size 32" in ragged
    assert "shard_samples" not in ragged


def test_a_cache_without_samples_has_a_page_and_plots(make_cache: Callable[..., Path]) -> None:
    part = part_of(make_cache(0, 2))
    assert part.report.has_sound_values
    text = words(render_report({TRAIN: part}))
    assert "Samples 0 Shards 0 Target weights, bytes" in text
    assert "None: there are no samples, or not all of their values are sound." in text
    assert {row["train"] for row in plot_data({TRAIN: part})["lengths"]} == {None}


def test_masks_that_are_garbage_have_a_page_too(make_cache: Callable[..., Path]) -> None:
    cache = make_cache(3, 3)
    path = cache / "shard-000000.safetensors"
    tensors = load_file(path)
    tensors["loss_mask"][0] = -(1 << 40)
    tensors["loss_mask"][1] = 1 << 40
    save_file(tensors, path)
    part = part_of(cache)
    assert "<li>[values] shard-000000.safetensors: sample 0: loss mask values other than" in render_report(
        {TRAIN: part}
    )
    assert {row["train"] for row in plot_data({TRAIN: part})["lengths"]} == {None}


def test_long_values_are_cut(make_cache: Callable[..., Path]) -> None:
    text = words(render_report({TRAIN: part_of(make_cache(3, 3, train_data_path="x" * 1234))}))
    assert f"train_data_path {'x' * MAX_VALUE} … (234 more characters)" in text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3,072.00 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_one_part_of_a_split_cache_has_a_page_with_text(made: Repository) -> None:
    folder = CacheFolder(made.root / "cache-eval")
    texts = folder_texts(ROOT / "inputs/target", folder.provenance)
    page = render_cache_report(folder, verify_cache(folder, "supervision"), texts)
    assert "Part eval: cache-eval" in words(page)
    assert "Part train" not in page
    assert "&lt;|im_start|&gt;assistant\n<mark>" in page


def test_a_captured_last_layer_is_the_last_hidden_state_and_plotted_once(make_cache: Callable[..., Path]) -> None:
    plots = plot_data({TRAIN: part_of(make_cache(3, 3, target_layer_ids=[0, 3]))})
    assert [row["state"] for row in plots["norms"]] == ["layer 0", "layer 3"]


def test_states_that_are_zero_have_numbers_but_no_place_on_a_logarithmic_scale(make_cache: Callable[..., Path]) -> None:
    part = part_of(make_cache(3, 3))
    assert part.examined is not None
    norms = [replace(row, p5=0.0) if row.state == "layer 0" else row for row in part.examined.norms]
    page = render_report({"cache": replace(part, examined=replace(part.examined, norms=norms))})
    assert page.count('<line class="range"') == 2
    assert page.count('<th scope="row">layer 0</th>') == 1
    none = render_report({"cache": replace(part, examined=replace(part.examined, norms=[]))})
    assert "L2 norm of a token" not in none


def test_everything_from_the_cache_is_escaped_and_visible(make_cache: Callable[..., Path]) -> None:
    folder = CacheFolder(make_cache(3, 3, target_model=HOSTILE, train_data_path=HOSTILE))
    findings = [Finding(level="files", file=HOSTILE, message=HOSTILE)]
    span = ShownSpan(head=HOSTILE, omitted=1000, tail=HOSTILE, supervised=True)
    sample = ShownSample(index=0, why=HOSTILE, num_tokens=2, supervised_tokens=1, shown_tokens=1, spans=[span])
    examined = Examined(norms=[], norm_samples=0, norm_tokens=0, samples=[sample], note=HOSTILE)
    report = Report(level="values", findings=findings)
    page = render_report({"cache": VerifiedPart(cache=folder, report=report, examined=examined)})
    outline = Outline(page)
    assert outline.all("script") == outline.all("img") == []
    assert page.count("<style>") == page.count("</style>") == 1
    assert page.count(HARMLESS) >= 8
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in page
    assert "\x1b" not in page
    assert "&lt;U+202E&gt;" in page
    assert "… 1,000 characters …" in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï \N{GRINNING FACE}\n\tx", "plain ünï \N{GRINNING FACE}\n\tx"),
        ("\x00\x07\r\x7f\x9b", "<U+0000><U+0007><U+000D><U+007F><U+009B>"),
        ("\N{LEFT-TO-RIGHT EMBEDDING}\N{ZERO WIDTH SPACE}\ufeff", "<U+202A><U+200B><U+FEFF>"),
        ("\u034f\u2800\u3164\ufe00\U000e0100", "<U+034F><U+2800><U+3164><U+FE00><U+E0100>"),
        ("\u2764\ufe0f", "\u2764\ufe0f"),
        ("\N{LINE SEPARATOR}\udc80\ue000\U000e0041", "<U+2028><U+DC80><U+E000><U+E0041>"),
        ("\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}", "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}"),
    ],
)
def test_what_does_not_show_is_spelled(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_values_that_are_no_text_are_left_alone() -> None:
    assert visible(5) == 5


def test_each_level_has_a_remedy() -> None:
    assert REMEDIES.keys() == {*VERIFY_LEVELS, "recompute"}


def test_more_findings_than_the_page_lists_are_counted(make_cache: Callable[..., Path]) -> None:
    findings = [Finding(level=level, file=f"f{number}", message="x") for level in REMEDIES for number in range(40)]
    report = Report(level="values", findings=findings)
    part = VerifiedPart(cache=CacheFolder(make_cache(3, 3)), report=report, examined=None)
    page = render_report({"cache": part})
    assert page.count("<li>") == MAX_REPORTED
    assert f"and {len(findings) - MAX_REPORTED} more, which <code>dspark-cache verify</code> lists." in page
    assert f'id="verdict">{len(findings)} findings: ' in page
    findings.append(Finding(level="values", file="f", message="and others"))
    assert f'id="verdict">At least {len(findings)} findings: ' in render_report({"cache": part})
    text = words(page)
    for level, remedy in REMEDIES.items():
        assert f"{level}: {remedy.replace('`', '')}" in text
    assert "(<code>dvc checkout</code>, <code>dvc pull</code>), or" in page


def test_a_distance_beyond_its_tolerance_is_said_to_be(make_cache: Callable[..., Path]) -> None:
    distances = [
        Distance(state="layer 0", mean=0.1, worst=0.6, limit=0.5),
        Distance(state="layer 1", mean=0.1, worst=0.5, limit=0.5),
    ]
    report = Report(level="values", num_recomputed=2, distances=distances)
    part = VerifiedPart(cache=CacheFolder(make_cache(3, 3)), report=report, examined=None)
    text = words(render_report({"cache": part}))
    assert "layer 0 0.1 0.6 0.5 120.0 % beyond layer 1 0.1 0.5 0.5 100.0 % Charts" in text


def test_the_page_is_whole_and_names_what_it_shows(made: Repository) -> None:
    outline = Outline(page_of(made))
    assert outline.all("html") == [{"lang": "en"}]
    assert [len(outline.all(tag)) for tag in ("h1", "main", "header", "footer", "title")] == [1] * 5
    assert all(attributes.get("scope") in ("row", "col") for attributes in outline.all("th"))
    assert len(outline.all("caption")) == len(outline.all("table"))
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = [name for _, attributes in outline.elements for name in (attributes.get("aria-labelledby") or "").split()]
    assert set(named) <= set(ids)
    charts = outline.all("svg")
    assert len(charts) == 8
    assert all(chart["role"] == "img" and chart["aria-labelledby"] for chart in charts)
    assert len(outline.all("details")) == len(charts) + 1
    outside = [
        attributes for _, attributes in outline.elements for name in ("src", "href", "action") if name in attributes
    ]
    assert outside == [{"rel": "icon", "href": "data:,"}]
    assert outline.all("script") == []
    assert not re.search(r"url\(|@import|https?:", page_of(made))


# The tokenizer of a folder


def test_a_folder_s_tokenizer_is_compared_with_what_provenance_says(made: Repository, tmp_path: Path) -> None:
    provenance = read_provenance(made.root / "cache")
    assert folder_texts(None, provenance).note == (
        "Token ids are shown, since no folder with the target's tokenizer was given."
    )
    known = folder_texts(ROOT / "inputs/target", provenance)
    assert known.note.startswith("Text by the tokenizer of target, sha256:")
    assert "nothing says" not in known.note
    assert "nothing says" in folder_texts(ROOT / "inputs/target", None).note
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert "that of the samples was sha256:" in folder_texts(tmp_path, provenance).note
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no input files"):
        folder_texts(tmp_path / "empty", provenance)


def test_a_fingerprint_that_names_a_hub_commit_cannot_be_compared(made: Repository) -> None:
    provenance = read_provenance(made.root / "cache")
    assert provenance is not None
    hub = replace(provenance, tokens={**provenance.tokens, "tokenizer_fingerprint": f"hub:a/b@{'0' * 40}"})
    texts = folder_texts(ROOT / "inputs/target", hub)
    assert texts.tokenizer is not None
    assert "nothing says" in texts.note
