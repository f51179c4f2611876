"""Rows to samples: token ids and loss mask of each conversation, on one process or several.

Last module of the tokenize stage's flow. `ConversationTokenizer` makes one sample; `tokenize_rows` makes all, in
order, and hands bad rows back as values, so that the caller can count them and name them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dspark_cache.chat_templates import (
    ChatRenderer,
    ChatTokenizer,
    merge_system_message,
    refuses_system_role,
    template_error,
)
from dspark_cache.conversations import is_token_row, parse_row, parse_token_row
from dspark_cache.errors import InputError, RowError, SettingsError
from dspark_cache.inputs import missing_file
from dspark_cache.loss_masks import MASK_OPTIONS_NOT_APPLIED, MaskedRender, cut_to_window, masked_render

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from dspark_cache.rows import Rows

SERIAL_BELOW: Final = 2000
"""Fewer rows than this are tokenized in the calling process: starting workers would take longer."""

_CHUNK_ROWS: Final = 64
_CHUNKS_PER_WORKER: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeOptions:
    """How samples are cut and masked.

    Attributes:
        seq_length: Tokens a sample is cut to, on the tokenizer's truncation side.
        mask_reasoning_content: Do not supervise reasoning.
        mask_generation_prompt: Do not supervise what a generation prompt already gives.
        vocab_size: Rows of the target's embedding; larger ids are refused. None: not checked.
    """

    seq_length: int
    mask_reasoning_content: bool
    mask_generation_prompt: bool
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Check the length."""
        if self.seq_length < 1:
            raise SettingsError(f"data.seq_length: expected an integer >= 1, found {self.seq_length}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedSample:
    """One sample, without padding.

    Attributes:
        input_ids: Token ids [T], 1 <= T <= `seq_length`.
        loss_mask: 1 where a token is supervised, else 0 [T].
        truncated: Whether tokens were cut off.
        notes: Sorted stable codes of what was unusual, as in `loss_masks`.
    """

    input_ids: list[int]
    loss_mask: list[int]
    truncated: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """The folder that a tokenizer is loaded from."""

    path: str
    trust_remote_code: bool


class ConversationTokenizer:
    """Makes the sample of one row."""

    def __init__(self, tokenizer: ChatTokenizer, chat_template: str, options: TokenizeOptions) -> None:
        """Render with `chat_template`, whatever the tokenizer's own is."""
        self._renderer = ChatRenderer(tokenizer, chat_template)
        self._options = options

    def __call__(self, row: object) -> TokenizedSample:
        """Return the sample of a row of messages, or of one that is tokenised already.

        Raises:
            RowError: The row is neither; it has ids that the target does not know; the template refuses it or
                renders nothing; or there is no answer to supervise.
        """
        options, renderer = self._options, self._renderer
        if is_token_row(row):
            ids, mask = parse_token_row(row)
            notes = {MASK_OPTIONS_NOT_APPLIED} if self._asks_for_masks else set()
            return self._sample(MaskedRender(ids=ids, mask=mask, notes=notes), marked=False)
        conversation = parse_row(row)
        masks: dict[str, Any] = {
            "window": options.seq_length,
            "without_reasoning": options.mask_reasoning_content,
            "without_prompt": options.mask_generation_prompt,
        }
        try:
            whole = masked_render(renderer, conversation, **masks)
        except RowError as error:
            if not refuses_system_role(error):
                raise
            whole = masked_render(renderer, merge_system_message(conversation), **masks)
        if not whole.ids:
            raise RowError("empty_render", "expected at least one token, but the chat template renders nothing")
        return self._sample(whole, marked=renderer.has_markers)

    @property
    def _asks_for_masks(self) -> bool:
        return self._options.mask_reasoning_content or self._options.mask_generation_prompt

    def _sample(self, whole: MaskedRender, *, marked: bool) -> TokenizedSample:
        """Cut a whole sample and check its ids."""
        vocab_size = self._options.vocab_size
        if vocab_size is not None and max(whole.ids) >= vocab_size:
            raise RowError("bad_tokens", f"token id {max(whole.ids)}: the target has {vocab_size} embeddings only")
        kept = cut_to_window(whole, self._options.seq_length, left=self._renderer.truncates_left, marked=marked)
        return TokenizedSample(
            input_ids=kept.ids,
            loss_mask=kept.mask,
            truncated=len(kept.ids) < len(whole.ids),
            notes=tuple(sorted(kept.notes)),
        )


def load_tokenizer(source: TokenizerSource) -> Any:
    """Load a tokenizer; a folder is read without asking the hub.

    Raises:
        InputError: There is none, or it cannot be loaded as the settings allow.
    """
    from transformers import AutoTokenizer

    path = Path(source.path)
    if path.is_absolute() and not path.exists():
        raise missing_file("target.model", path)
    try:
        return AutoTokenizer.from_pretrained(
            source.path,
            trust_remote_code=source.trust_remote_code,
            local_files_only=path.exists(),
        )
    except Exception as error:
        raise InputError(f"target.model: no tokenizer can be loaded from {source.path!r}: {error}") from error


def tokenize_rows(
    rows: Rows,
    order: Iterable[int],
    source: TokenizerSource,
    chat_template: str,
    options: TokenizeOptions,
    num_workers: int,
    *,
    serial_below: int = SERIAL_BELOW,
) -> Iterator[tuple[int, TokenizedSample | RowError]]:
    """Yield (index, sample) for each index of `order`, in that order; a bad row gives its `RowError` instead.

    The error does not say where the row is; `rows.where(index)` does. Memory holds a bounded number of rows.

    Args:
        rows: Read in this process only.
        order: Indices of rows.
        source: Tokenizer that each process loads once.
        chat_template: The effective template.
        options: How samples are cut and masked.
        num_workers: Processes; 0 works in this one.
        serial_below: With fewer rows than this, this process does the work whatever `num_workers` is.
    """
    indices = iter(order)
    first = list(islice(indices, serial_below))
    if num_workers < 1 or len(first) < serial_below:
        tokenizer = ConversationTokenizer(load_tokenizer(source), chat_template, options)
        for index in chain(first, indices):
            yield index, _tokenize(tokenizer, _read(rows, index))
    else:
        yield from _tokenize_parallel(rows, chain(first, indices), (source, chat_template, options), num_workers)


def _read(rows: Rows, index: int) -> object:
    try:
        return rows.read(index)
    except RowError as error:
        return error


def _tokenize(tokenizer: ConversationTokenizer, row: object) -> TokenizedSample | RowError:
    if isinstance(row, RowError):
        return row
    try:
        return tokenizer(row)
    except RowError as error:
        # Without its cause, which may not cross a process boundary.
        return RowError(error.reason, str(error))
    except MemoryError:
        raise
    except Exception as error:
        return template_error(error)


def _tokenize_parallel(
    rows: Rows, indices: Iterable[int], settings: tuple[TokenizerSource, str, TokenizeOptions], num_workers: int
) -> Iterator[tuple[int, TokenizedSample | RowError]]:
    remaining = iter(indices)
    pending: deque[tuple[list[int], Future[list[TokenizedSample | RowError]]]] = deque()
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=settings)
    try:
        while True:
            while len(pending) < num_workers * _CHUNKS_PER_WORKER and (chunk := list(islice(remaining, _CHUNK_ROWS))):
                pending.append((chunk, executor.submit(_work, [_read(rows, index) for index in chunk])))
            if not pending:
                return
            chunk, future = pending.popleft()
            yield from zip(chunk, future.result(), strict=True)
    except BrokenProcessPool as error:
        raise SettingsError(
            "a tokenizing worker ended without an answer (killed, or out of memory); lower runtime.num_workers"
        ) from error
    finally:
        # Also after KeyboardInterrupt or a generator closed early: no worker is left behind.
        executor.shutdown(wait=True, cancel_futures=True)


_worker: ConversationTokenizer | None = None
"""The tokenizer of this worker process; None in every other process."""


def _start_worker(source: TokenizerSource, chat_template: str, options: TokenizeOptions) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker = ConversationTokenizer(load_tokenizer(source), chat_template, options)


def _die_with_parent() -> None:
    """End this process when its parent is gone: a queue alone would keep it waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(rows: list[object]) -> list[TokenizedSample | RowError]:
    if _worker is None:
        raise RuntimeError("called outside a worker process")
    return [_tokenize(_worker, row) for row in rows]
