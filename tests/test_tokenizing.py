"""Rows to samples: equal to the reference's, bad rows as values, the same on any number of processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dspark_cache.chat_templates import resolve_chat_template
from dspark_cache.conversations import parse_row
from dspark_cache.errors import InputError, RowError, SettingsError
from dspark_cache.rows import Rows, open_source, parsed_row
from dspark_cache.tokenizing import (
    ConversationTokenizer,
    TokenizedSample,
    TokenizeOptions,
    TokenizerSource,
    WorkerPlan,
    _chunks,
    load_tokenizer,
    tokenize_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parent / "data" / "golden"
TOKEN_ROWS = [json.loads(line) for line in (GOLDEN / "tokens.jsonl").read_text(encoding="utf-8").splitlines()]
REJECT_NAMES = json.loads((GOLDEN / "data" / "rejects.names.json").read_text())
REJECTS = json.loads((GOLDEN / "data" / "rejects.result.json").read_text())

BETTER = {
    # (form, template): why ours accepts what the reference refuses
    ("assistant_first", "chatml"): "the first answer is found by the difference of renders",
    ("assistant_first", "turns_bos"): "the first answer is found by the difference of renders",
    **{
        ("tool_calls_null", template): "Arrow writes null for absent tool calls"
        for template in ("chatml", "chatml_gen", "turns_bos", "inst_gen")
    },
}
REJECT_MODELS = {
    "chatml": "qwen3-tiny",
    "chatml_gen": "qwen3-tiny",
    "turns_bos": "gemma3-text-tiny",
    "inst_gen": "llama-tied-tiny",
}


def source(model: str) -> TokenizerSource:
    return TokenizerSource(path=str(GOLDEN / model), trust_remote_code=False)


def options(seq_length: int = 96, *, reasoning: bool = False, prompt: bool = False) -> TokenizeOptions:
    return TokenizeOptions(seq_length=seq_length, mask_reasoning_content=reasoning, mask_generation_prompt=prompt)


@cache
def golden_tokenizer(model: str) -> Any:
    return load_tokenizer(source(model))


@cache
def golden_rows(data: str) -> Rows:
    return open_source(GOLDEN / data, GOLDEN).rows


def golden_row(data: str, index: int) -> Any:
    return parsed_row(golden_rows(data).fetch(index))


def template_of(model: str, template: str | None) -> str:
    return resolve_chat_template(template and str(GOLDEN / template), golden_tokenizer(model))


def tokenize_golden(row: dict[str, Any]) -> TokenizedSample:
    wanted = options(row["seq_length"], reasoning=row["mask_reasoning_content"], prompt=row["mask_generation_prompt"])
    tokenizer = ConversationTokenizer(
        golden_tokenizer(row["model"]), template_of(row["model"], row["chat_template"]), wanted
    )
    return tokenizer(golden_row(row["data"], row["row"]))


def outcome(tokenizer: ConversationTokenizer, row: object) -> TokenizedSample | RowError:
    try:
        return tokenizer(row)
    except RowError as error:
        return error


def groups(rows: list[dict[str, Any]]) -> list[Any]:
    """Group the rows by all but their number: one test a group."""
    keys = ("model", "chat_template", "data", "seq_length", "mask_reasoning_content", "mask_generation_prompt")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault("-".join(Path(str(row[key])).stem for key in keys), []).append(row)
    return [pytest.param(group, id=name) for name, group in found.items()]


@pytest.mark.parametrize("group", groups([row for row in TOKEN_ROWS if "exception" not in row]))
def test_samples_equal_the_reference_s(group: list[dict[str, Any]]) -> None:
    for row in group:
        found = tokenize_golden(row)
        ids, mask, pads = row["input_ids"], [int(bit) for bit in row["loss_mask"]], row["seq_length"]
        pads -= len(found.input_ids)
        real = slice(pads, None) if golden_tokenizer(row["model"]).padding_side == "left" else slice(0, len(ids) - pads)
        padding = {golden_tokenizer(row["model"]).pad_token_id or 0}
        assert found.input_ids == ids[real]
        assert found.loss_mask == mask[real]
        del ids[real], mask[real]
        assert set(ids) <= padding
        assert 1 not in mask


@pytest.mark.parametrize("group", groups([row for row in TOKEN_ROWS if "exception" in row]))
def test_rows_that_the_reference_cannot_mask_are_masked(group: list[dict[str, Any]]) -> None:
    for row in group:
        found = tokenize_golden(row)
        tokenizer = golden_tokenizer(row["model"])
        assert 1 in found.loss_mask
        if row["model"].endswith("leftpad-tiny"):
            # The reference fails on the padding or the cut, both on the left; the rule is the plain one.
            assert found.notes == ()
            continue
        assert found.notes == ("span_by_difference",)
        # Every answer that lies in the window is supervised, and no other message is.
        left = tokenizer.decode([i for i, bit in zip(found.input_ids, found.loss_mask, strict=True) if bit])
        for message in parse_row(golden_row(row["data"], row["row"])).messages:
            if message["role"] != "assistant":
                assert f"{message['role']}\n{message['content']}" not in left
            elif not found.truncated:
                assert f"{message['content']}<|im_end|>\n" in left


@pytest.mark.parametrize("template", list(REJECT_MODELS))
@pytest.mark.parametrize("name", REJECT_NAMES)
def test_odd_rows_are_accepted_and_refused_as_by_the_reference(name: str, template: str) -> None:
    model = f"models/{REJECT_MODELS[template]}"
    tokenizer = ConversationTokenizer(
        golden_tokenizer(model), template_of(model, f"templates/{template}.jinja"), options()
    )
    row = golden_row("data/rejects.jsonl", REJECT_NAMES.index(name))
    expected, found = REJECTS[name][template], outcome(tokenizer, row)
    if isinstance(found, RowError):
        assert not expected["ok"], found
        assert (name, template) not in BETTER
        assert found.reason not in ("", "template_error")
    else:
        assert expected["ok"] or (name, template) in BETTER
        assert sum(found.loss_mask) == expected.get("loss", sum(found.loss_mask))


def test_system_text_is_merged_where_the_template_knows_no_system_role() -> None:
    model = "models/gemma3-text-tiny"
    tokenizer = ConversationTokenizer(golden_tokenizer(model), template_of(model, None), options())
    row = {"messages": [{"role": r, "content": c} for r, c in (("system", "s"), ("user", "u"), ("assistant", "a"))]}
    text = golden_tokenizer(model).decode(tokenizer(row).input_ids)
    assert text == "<bos><start_of_turn>user\ns\nu<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n"


@pytest.mark.parametrize(
    ("template", "reason", "message"),
    [
        ("{{ '' }}", "empty_render", "expected at least one token, but the chat template renders nothing"),
        (
            "{{ raise_exception('not today') }}",
            "template_error",
            "the chat template cannot render this row: TemplateError: not today",
        ),
        (
            "{{ 1 + messages }}",
            "template_error",
            "the chat template cannot render this row: TypeError: unsupported operand type(s) for +",
        ),
    ],
)
def test_templates_that_fail_are_row_errors(template: str, reason: str, message: str) -> None:
    rows = golden_rows("data/one.jsonl")
    ((index, found),) = tokenize_rows(rows, [0], source("models/qwen3-tiny"), template, options(), 0)
    assert index == 0
    assert isinstance(found, RowError)
    assert found.reason == reason
    assert str(found).startswith(message)


def test_long_samples_are_cut_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = golden_tokenizer("models/qwen3-tiny")
    long = {"messages": [{"role": "user", "content": "a b " * 5000}, {"role": "assistant", "content": "y"}]}
    for template in ("chatml", "chatml_gen"):
        make = ConversationTokenizer(
            tokenizer, template_of("models/qwen3-tiny", f"templates/{template}.jinja"), options(7)
        )
        found = make(long)
        assert found.truncated
        assert len(found.input_ids) == 7
        assert found.loss_mask == [0] * 7
    assert not caplog.records


def test_a_sequence_length_below_one_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"data\.seq_length: expected an integer >= 1, found 0"):
        options(0)


def test_tokenizers_that_cannot_be_loaded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"target\.model: no such file: .*/qwen3-tny; did you mean .*/qwen3-tiny\?"):
        load_tokenizer(source("models/qwen3-tny"))
    with pytest.raises(InputError, match=r"target\.model: no tokenizer can be loaded from '.*': "):
        load_tokenizer(TokenizerSource(path=str(tmp_path), trust_remote_code=False))


@pytest.fixture
def mixed_rows(tmp_path: Path) -> Rows:
    path = tmp_path / "mixed.jsonl"
    good = (GOLDEN / "data" / "conversations.jsonl").read_text(encoding="utf-8")
    bad = (GOLDEN / "data" / "rejects.jsonl").read_text(encoding="utf-8")
    path.write_text((good + "{broken\n" + bad) * 4, encoding="utf-8")
    return open_source(path, path.parent).rows


@pytest.mark.parametrize(
    ("plan", "done", "seconds", "pays"),
    [
        # processes, rows, seconds until a worker is ready
        ((2, 1000, 4.0), 100, 2.0, True),  # 18 s are left, of which two processes save 9
        ((2, 1000, 4.0), 200, 4.0, False),  # 16 s are left: they would save no more than twice the start
        ((2, 1000, 4.0), 200, 4.1, True),
        ((8, 1000, 4.0), 200, 2.5, True),  # 10 s are left, of which eight save 8.75
        ((2, 1000, 4.0), 200, 2.5, False),
        ((2, 10**6, 4.0), 99, 0.99, False),  # too early to tell
        ((2, 10**6, 4.0), 100, 1.0, True),
        ((1, 10**6, 4.0), 100, 1000.0, False),  # one worker would only take this process's place
        ((2, 10, 0.0), 1, 0.001, True),
        ((2, 10, 0.0), 10, 1.0, False),  # nothing is left
        ((2, 10, 0.0), 12, 1.0, False),  # the limit was no limit of rows
    ],
)
def test_workers_are_started_only_where_they_clearly_save_time(
    plan: tuple[int, int, float], done: int, seconds: float, pays: bool
) -> None:
    processes, num_rows, start_seconds = plan
    found = WorkerPlan(processes=processes, num_rows=num_rows, start_seconds=start_seconds)
    assert found.pays(done, seconds) is pays


class Recorded:
    """Rows that tell how many were fetched."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.fetched = rows, 0

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, index: int) -> object:
        self.fetched += 1
        return self.rows.fetch(index)

    def where(self, index: int) -> str:
        return self.rows.where(index)


def until_workers_began(samples: Iterator[Any], rows: Recorded) -> list[Any]:
    """Take samples until rows are fetched ahead of them, which only workers need."""
    taken = [next(samples)]
    while rows.fetched == len(taken):
        taken.append(next(samples))
    return taken


QWEN = source("models/qwen3-tiny")
needs_two_processors = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor starts no workers")


class UntilAhead:
    """Indices over and over, and some more once rows are fetched ahead of those that were taken."""

    def __init__(self, indices: list[int], rows: Recorded, more: int) -> None:
        self.indices, self.rows, self.more = indices, rows, more
        self.taken: list[Any] = []

    def __len__(self) -> int:
        return 1_000_000

    def __iter__(self) -> Iterator[int]:
        place = 0
        while self.rows.fetched == len(self.taken):
            yield self.indices[place % len(self.indices)]
            place += 1
        yield from (self.indices[(place + step) % len(self.indices)] for step in range(self.more))


@needs_two_processors
def test_workers_give_what_one_process_gives(mixed_rows: Rows) -> None:
    indices = [*range(len(mixed_rows) - 1, -1, -1), 3, 3]
    settings = (QWEN, template_of("models/qwen3-tiny", "templates/think.jinja"), options(40))
    order = UntilAhead(indices, Recorded(mixed_rows), more=2 * len(indices) + 1)
    for pair in tokenize_rows(order.rows, order, *settings, 2, start_seconds=0):
        order.taken.append(pair)
    serial = list(tokenize_rows(mixed_rows, indices, *settings, 0))
    assert len(order.taken) > 2 * len(indices)
    for (index, found), (at, expected) in zip(order.taken, cycle(serial), strict=False):
        assert (index, repr(found), getattr(found, "reason", "")) == (
            at,
            repr(expected),
            getattr(expected, "reason", ""),
        )
    reasons = {found.reason for _, found in serial if isinstance(found, RowError)}
    assert {"bad_json", "bad_role", "no_assistant", "row_not_object"} <= reasons
    assert any(isinstance(found, TokenizedSample) for _, found in serial)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("num_workers", "limit", "start_seconds"),
    [(0, None, 0.0), (1, None, 0.0), (2, None, 1e6), (2, 1, 0.0)],
)
def test_no_worker_is_started_where_it_does_not_pay(
    mixed_rows: Rows, num_workers: int, limit: int | None, start_seconds: float | None
) -> None:
    rows = Recorded(mixed_rows)
    template = template_of("models/qwen3-tiny", "templates/chatml.jinja")
    order = range(len(mixed_rows))
    samples = tokenize_rows(
        rows, order, QWEN, template, options(), num_workers, limit=limit, start_seconds=start_seconds
    )
    for count, _ in enumerate(samples, start=1):
        assert rows.fetched == count
        assert not multiprocessing.active_children()
    assert rows.fetched == len(order)


def test_a_loaded_tokenizer_is_not_loaded_again(tmp_path: Path) -> None:
    nowhere = TokenizerSource(path=str(tmp_path), trust_remote_code=False)
    template = template_of("models/qwen3-tiny", "templates/chatml.jinja")
    tokenizer = golden_tokenizer("models/qwen3-tiny")
    ((_, found),) = tokenize_rows(
        golden_rows("data/one.jsonl"), [0], nowhere, template, options(), 0, tokenizer=tokenizer
    )
    assert isinstance(found, TokenizedSample)


@needs_two_processors
def test_stopping_early_leaves_no_worker_and_fetches_a_bounded_number_of_rows(mixed_rows: Rows) -> None:
    rows = Recorded(mixed_rows)
    template = template_of("models/qwen3-tiny", "templates/chatml.jinja")
    samples = tokenize_rows(rows, [0] * 1_000_000, QWEN, template, options(), 2, start_seconds=0)
    taken = len(until_workers_began(samples, rows))
    ahead = []
    for _ in range(300):
        next(samples)
        taken += 1
        ahead.append(rows.fetched - taken)
    samples.close()
    # Eight chunks of 32 rows, less the row that was taken; with the last one's place taken by the next chunk.
    assert max(ahead) == 8 * 32 - 1
    assert not multiprocessing.active_children()


class Lines:
    """Rows that are lines of given lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def fetch(self, index: int) -> object:
        return b" " * self.lengths[index] if self.lengths[index] else {}

    def where(self, index: int) -> str:
        return str(index)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([9] * 32, [32]),
        ([9] * 70, [32, 32, 6]),
        ([0] * 33, [32, 1]),  # values are not measured
        ([1 << 19] * 5, [2, 2, 1]),
        ([1 << 21, 9, 1 << 20, 9], [1, 2, 1]),
    ],
)
def test_chunks_hold_a_bounded_number_of_rows_and_bytes(lengths: list[int], expected: list[int]) -> None:
    rows = Lines(lengths)
    chunks = list(_chunks(rows, range(len(rows))))
    assert [len(indices) for indices, _ in chunks] == expected
    assert [index for indices, _ in chunks for index in indices] == list(range(len(rows)))
    assert [row for _, fetched in chunks for row in fetched] == [rows.fetch(index) for index in range(len(rows))]


def test_samples_cross_a_process_boundary_as_bytes() -> None:
    sample = TokenizedSample(input_ids=[2**31 - 1, 0] * 500, loss_mask=[0, 1] * 500, truncated=True, notes=("a", "b"))
    sent = pickle.dumps(sample)
    assert pickle.loads(sent) == sample
    assert type(pickle.loads(sent).loss_mask) is list
    assert len(sent) < 5 * 1000 + 300


class Deadly:
    """A row that ends the process which receives it."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return os._exit, (3,)


class DeadlyRows:
    def __len__(self) -> int:
        return 1

    def fetch(self, index: int) -> object:  # noqa: ARG002 - all are the same
        return Deadly()

    def where(self, index: int) -> str:
        return str(index)


@needs_two_processors
def test_a_worker_that_dies_is_reported() -> None:
    with pytest.raises(
        SettingsError, match=r"a tokenizing worker ended without an answer .*; lower runtime\.num_workers"
    ):
        for _ in tokenize_rows(DeadlyRows(), range(10**9), QWEN, "{{ messages }}", options(), 2, start_seconds=0):
            pass
    assert not multiprocessing.active_children()


ENDLESS = """
import pathlib, sys
import dspark_cache.rows, dspark_cache.tokenizing as tokenizing
source = tokenizing.TokenizerSource(path=sys.argv[1], trust_remote_code=False)
options = tokenizing.TokenizeOptions(seq_length=9, mask_reasoning_content=False, mask_generation_prompt=False)
rows = dspark_cache.rows.open_source(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[1])).rows
fetched = 0
class Endless:
    def fetch(self, index):
        global fetched
        fetched += 1
        return rows.fetch(0)
template = "{% for m in messages %}x{{ m.content }}{% endfor %}"
is_told = False
for count, _ in enumerate(tokenizing.tokenize_rows(
    Endless(), range(10**12), source, template, options, 2, start_seconds=0
), start=1):
    if fetched > count and not is_told:
        print("started", flush=True)
        is_told = True
"""


@needs_two_processors
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals) -> None:
    arguments = [str(GOLDEN / "models" / "qwen3-tiny"), str(GOLDEN / "data" / "one.jsonl")]
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        parent.send_signal(how)
        # The workers hold the other end of this pipe too: it ends when the last of them has ended.
        try:
            parent.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            parent.kill()
            raise
    assert parent.returncode == -how


# --- rows that are tokenised already -----------------------------------------------------------------------------


def token_row(tokenizer_options: dict[str, Any] | None = None, **row: Any) -> TokenizedSample:
    settings = {"seq_length": 8, "mask_reasoning_content": False, "mask_generation_prompt": False}
    make = ConversationTokenizer(
        golden_tokenizer("models/qwen3-tiny"), "{{ messages }}", TokenizeOptions(**settings | (tokenizer_options or {}))
    )
    return make(row)


def test_token_rows_are_taken_as_they_are_and_cut() -> None:
    sample = token_row(input_ids=[5, 6, 7], loss_mask=[0, 1, True])
    assert (sample.input_ids, sample.loss_mask, sample.truncated, sample.notes) == ([5, 6, 7], [0, 1, 1], False, ())
    long = token_row(input_ids=list(range(20)), loss_mask=[1] * 20)
    assert (long.input_ids, long.loss_mask, long.truncated) == (list(range(8)), [1] * 8, True)


@pytest.mark.parametrize("option", ["mask_reasoning_content", "mask_generation_prompt"])
def test_mask_options_that_token_rows_cannot_follow_are_noted(option: str) -> None:
    sample = token_row({option: True}, input_ids=[1], loss_mask=[1])
    assert sample.notes == ("mask_options_not_applied_to_token_rows",)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": []}, "input_ids: expected a list of token ids, found []"),
        ({"input_ids": "1 2"}, "input_ids: expected a list of token ids, found '1 2'"),
        ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "input_ids: expected a list of token ids, found [1, -2]"),
        ({"input_ids": [1, True], "loss_mask": [0, 1]}, "input_ids: expected a list of token ids, found [1, True]"),
        ({"input_ids": [1]}, "loss_mask: expected a list of 0 and 1 beside input_ids, found nothing"),
        ({"input_ids": [1], "loss_mask": [2]}, "loss_mask: expected a list of 0 and 1 beside input_ids, found [2]"),
        ({"input_ids": [1], "loss_mask": [0.5]}, "loss_mask: expected a list of 0 and 1 beside input_ids, found [0.5]"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids and loss_mask: expected one length, found 2 and 1"),
    ],
)
def test_malformed_token_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError) as caught:
        token_row(**row)
    assert (caught.value.reason, str(caught.value)) == ("bad_tokens", message)


def test_ids_that_the_target_does_not_know_are_refused() -> None:
    assert token_row({"vocab_size": 8}, input_ids=[7], loss_mask=[1]).input_ids == [7]
    with pytest.raises(RowError, match=r"token id 8: the target has 8 embeddings only"):
        token_row({"vocab_size": 8}, input_ids=[1, 8], loss_mask=[1, 1])


FORKED = """
import multiprocessing, os, signal, sys, threading
from pathlib import Path
from dspark_cache import tokenizing
from dspark_cache.errors import SettingsError
from dspark_cache.rows import open_source

target, data, kill = sys.argv[1:]
source = tokenizing.TokenizerSource(path=target, trust_remote_code=False)
tokenizer = tokenizing.load_tokenizer(source)
options = tokenizing.TokenizeOptions(seq_length=64, mask_reasoning_content=False, mask_generation_prompt=False)
settings = (source, tokenizer.chat_template, options)
rows = open_source(Path(data), Path(data).parent).rows
assert tokenizing.start_method() == "fork"
serial = list(tokenizing.tokenize_rows(rows, range(len(rows)), *settings, 0, tokenizer=tokenizer))
tokenizing.load_tokenizer = None  # a forked worker has it at once
children, found = set(), []
try:
    for pair in tokenizing.tokenize_rows(rows, range(len(rows)), *settings, 2, tokenizer=tokenizer, start_seconds=0):
        found.append(pair)
        alive = {child.pid for child in multiprocessing.active_children()}
        if kill == "kill" and alive and not children:
            os.kill(min(alive), signal.SIGKILL)
        children |= alive
except SettingsError as error:
    assert kill == "kill" and "a tokenizing worker ended without an answer" in str(error)
else:
    assert kill == "no" and found == serial and len(children) == 1
assert not multiprocessing.active_children()
held = threading.Event()
threading.Thread(target=held.wait, daemon=True).start()
assert tokenizing.start_method() == "spawn"
print("done")
"""


@needs_two_processors
@pytest.mark.parametrize("kill", ["no", "kill"])
def test_a_process_of_one_thread_forks_workers_that_need_load_nothing(tmp_path: Path, kill: str) -> None:
    data = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "there " * 9}]
    data.write_text((json.dumps({"messages": messages}) + "\n") * 4000)
    target = Path(__file__).parents[1] / "inputs/target"
    done = subprocess.run(
        [sys.executable, "-c", FORKED, target, data, kill], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "done\n", done.stderr
