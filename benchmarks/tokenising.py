"""Tokenising on two processes, against one: a long pass, and one so short that a second process must not cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.ratios import Row, in_turn, rate, ratio
from dspark_cache.rows import open_source
from dspark_cache.tokenizing import TokenizeOptions, TokenizerSource, load_tokenizer, tokenize_rows
from dspark_cache.tokens import KeepRules, TokensWriter, keep_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
ROWS, FEW_ROWS = 16_000, 400
SEQ_LENGTH = 4096


def rows(work: Path, target: Path, conversations: Path, rounds: int) -> Iterator[Row]:
    """Measure and give the rows.

    Args:
        work: Folder to write to.
        target: Folder of a target with a fast tokenizer.
        conversations: JSON lines, repeated as often as need be.
        rounds: How often.
    """
    lines = [line for line in conversations.read_text(encoding="utf-8").splitlines() if line]
    data = work / "conversations.jsonl"
    data.write_text("".join(lines[number % len(lines)] + "\n" for number in range(ROWS)), encoding="utf-8")
    source = TokenizerSource(path=str(target), trust_remote_code=False)
    tokenizer = load_tokenizer(source)
    for count, words, target_ratio in ((ROWS, "long", 1.7), (FEW_ROWS, "short", 0.95)):
        found = in_turn(
            {
                str(processes): lambda processes=processes, count=count: _tokenise(  # type: ignore[misc]
                    work, data, source, tokenizer, count, processes
                )
                for processes in (1, 2)
            },
            rounds,
        )
        rates = [f"{rate(count, found[processes]):,.0f}" for processes in ("2", "1")]
        yield Row(
            name=f"tokenise, {words} pass, 2 processes: 1",
            ratio=ratio(found["1"], found["2"]),
            target=target_ratio,
            detail=f"{' and '.join(rates)} rows/s of {count:,}",
        )


def _tokenise(work: Path, data: Path, source: TokenizerSource, tokenizer: Any, count: int, processes: int) -> None:
    options = TokenizeOptions(seq_length=SEQ_LENGTH, mask_reasoning_content=False, mask_generation_prompt=False)
    rules = KeepRules(min_loss_tokens=0, skip_invalid=True, limit=None)
    opened = open_source(data, work).rows
    with TokensWriter(work) as writer:
        made = tokenize_rows(opened, range(count), source, TEMPLATE, options, processes, tokenizer=tokenizer)
        for sample in keep_samples(((opened.where(index), one) for index, one in made), rules, writer.counts):
            writer.add(sample)
