"""Rows to samples: token ids and loss mask of each conversation, on one process or several.

Last module of the tokenize stage's flow. `ConversationTokenizer` makes one sample; `tokenize_rows` makes all, in
order, and hands bad rows back as values, so that the caller can count them and name them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from array import array
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
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
from dspark_cache.rows import parsed_row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dspark_cache.rows import Rows

_CHUNK_ROWS: Final = 32
_CHUNK_BYTES: Final = 1 << 20
_CHUNKS_PER_WORKER: Final = 4

_FORK_SECONDS: Final = 0.1
_LONGEST_START_SECONDS: Final = 20.0
_STARTS_TO_SAVE: Final = 2
_MEASURED_SHARE_OF_START: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What decides whether starting workers pays.

    Attributes:
        processes: How many can tokenise at the same time, this one included, at least 1.
        num_rows: Rows to tokenise in all.
        start_seconds: From the start of a worker to its first sample.
    """

    processes: int
    num_rows: int
    start_seconds: float

    def pays(self, done: int, seconds: float) -> bool:
        """Say whether workers will finish clearly sooner than this process, which took `seconds` for `done` rows.

        Never before this process has worked for a quarter of `start_seconds`; and only if what the workers save is
        more than twice that time.
        """
        left = seconds / done * (self.num_rows - done)
        saved = left * (1 - 1 / self.processes)
        is_measured = seconds >= self.start_seconds * _MEASURED_SHARE_OF_START
        return is_measured and saved > self.start_seconds * _STARTS_TO_SAVE


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as bytes: workers send their samples so."""
        return _unpacked, (array("i", self.input_ids), bytes(self.loss_mask), self.truncated, self.notes)


def _unpacked(ids: array[int], mask: bytes, truncated: bool, notes: tuple[str, ...]) -> TokenizedSample:
    return TokenizedSample(input_ids=ids.tolist(), loss_mask=list(mask), truncated=truncated, notes=notes)


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
    order: Collection[int],
    source: TokenizerSource,
    chat_template: str,
    options: TokenizeOptions,
    num_workers: int,
    *,
    tokenizer: ChatTokenizer | None = None,
    limit: int | None = None,
    start_seconds: float | None = None,
) -> Iterator[tuple[int, TokenizedSample | RowError]]:
    """Yield (index, sample) for each index of `order`, in that order; a bad row gives its `RowError` instead.

    This process begins; workers are started only if they pay (`WorkerPlan`), and then take most of the rows. The
    error does not say where the row is; `rows.where(index)` does. Memory holds a bounded number of rows.

    Args:
        rows: Fetched in this process, parsed where they are tokenised.
        order: Indices of rows.
        source: Tokenizer that each process loads once.
        chat_template: The effective template.
        options: How samples are cut and masked.
        num_workers: Most processes that tokenise, this one included; nor are there more than processors.
        tokenizer: That of `source`, if the caller has loaded it.
        limit: Rows that the caller will take at least, where it may stop early.
        start_seconds: From the start of a worker to its first sample; None: next to nothing if it is forked, else the
            processor time of this process, which has imported and loaded what a worker has to, up to 20 s.
    """
    make = ConversationTokenizer(load_tokenizer(source) if tokenizer is None else tokenizer, chat_template, options)
    plan = WorkerPlan(
        processes=max(1, min(num_workers, _usable_processors())),
        num_rows=len(order) if limit is None else min(limit, len(order)),
        start_seconds=_start_seconds() if start_seconds is None else start_seconds,
    )
    remaining = iter(order)
    seconds = 0.0
    for done, index in enumerate(remaining, start=1):
        start = time.perf_counter()
        result = _tokenize(make, rows.fetch(index))
        seconds += time.perf_counter() - start
        yield index, result
        if plan.pays(done, seconds):
            settings = (source, chat_template, options)
            yield from _tokenize_parallel(rows, remaining, make, settings, plan.processes - 1)


def _start_seconds() -> float:
    return _FORK_SECONDS if start_method() == "fork" else min(time.process_time(), _LONGEST_START_SECONDS)


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _tokenize(tokenizer: ConversationTokenizer, fetched: object) -> TokenizedSample | RowError:
    try:
        return tokenizer(parsed_row(fetched))
    except RowError as error:
        # Without its cause, which may not cross a process boundary.
        return RowError(error.reason, str(error))
    except MemoryError:
        raise
    except Exception as error:
        return template_error(error)


def _tokenize_parallel(
    rows: Rows,
    remaining: Iterator[int],
    make: ConversationTokenizer,
    settings: tuple[TokenizerSource, str, TokenizeOptions],
    num_workers: int,
) -> Iterator[tuple[int, TokenizedSample | RowError]]:
    """Start workers, work in this process alone until the first is ready, then together with them."""
    global _worker
    context = multiprocessing.get_context(start_method())
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker, initargs=settings)
    try:
        _worker = make
        ready = [executor.submit(_work, []) for _ in range(num_workers)]
        _worker = None
        for index in remaining:
            yield index, _tokenize(make, rows.fetch(index))
            if any(future.done() for future in ready):
                break
        yield from _spread(executor, _chunks(rows, remaining), make, num_workers * _CHUNKS_PER_WORKER)
    except BrokenProcessPool as error:
        raise SettingsError(
            "a tokenizing worker ended without an answer (killed, or out of memory); lower runtime.num_workers"
        ) from error
    finally:
        # Also after KeyboardInterrupt or a generator closed early: no worker is left behind.
        executor.shutdown(wait=True, cancel_futures=True)


def _chunks(rows: Rows, indices: Iterable[int]) -> Iterator[tuple[list[int], list[object]]]:
    """Yield indices and fetched rows, up to 32 at once; fewer where their lines reach 1 MiB."""
    chunk: list[int] = []
    fetched: list[object] = []
    size = 0
    for index in indices:
        row = rows.fetch(index)
        chunk.append(index)
        fetched.append(row)
        size += len(row) if isinstance(row, bytes) else 0
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk, fetched
            chunk, fetched, size = [], [], 0
    if chunk:
        yield chunk, fetched


def _spread(
    executor: ProcessPoolExecutor,
    chunks: Iterator[tuple[list[int], list[object]]],
    make: ConversationTokenizer,
    ahead: int,
) -> Iterator[tuple[int, TokenizedSample | RowError]]:
    """Let workers tokenise chunks, and this process others while the next one is not there yet.

    At most `ahead` chunks are with the workers, and as many again wait to be taken.
    """
    pending: deque[tuple[list[int], Future[list[TokenizedSample | RowError]]]] = deque()
    while True:
        with_workers = sum(not future.done() for _, future in pending)
        for chunk, fetched in islice(chunks, min(ahead - with_workers, 2 * ahead - len(pending))):
            pending.append((chunk, executor.submit(_work, fetched)))
        if not pending:
            return
        own = None
        if not pending[0][1].done() and len(pending) < 2 * ahead:
            own = next(chunks, None)
        if own:
            done: Future[list[TokenizedSample | RowError]] = Future()
            done.set_result([_tokenize(make, row) for row in own[1]])
            pending.append((own[0], done))
        else:
            chunk, future = pending.popleft()
            yield from zip(chunk, future.result(), strict=True)


_worker: ConversationTokenizer | None = None
"""The tokenizer of this worker process; in others None but while workers are forked."""


def start_method() -> str:
    """Return how workers are started: by fork, in no time, where no other thread could hold a lock just then."""
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


def _start_worker(source: TokenizerSource, chat_template: str, options: TokenizeOptions) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    if _worker is None:
        _worker = ConversationTokenizer(load_tokenizer(source), chat_template, options)


def _die_with_parent() -> None:
    """End this process when its parent is gone: a queue alone would keep it waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _work(fetched: list[object]) -> list[TokenizedSample | RowError]:
    if _worker is None:
        raise RuntimeError("called outside a worker process")
    return [_tokenize(_worker, row) for row in fetched]
