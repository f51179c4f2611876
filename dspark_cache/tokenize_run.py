"""The tokenize stage's work as one object: inputs opened and checked, then samples one by one.

The stage writes the samples; an estimate only counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dspark_cache.chat_templates import (
    chat_template_sha256,
    check_template,
    has_generation_markers,
    resolve_chat_template,
)
from dspark_cache.inputs import data_path, ensure_pinned
from dspark_cache.row_order import row_order
from dspark_cache.rows import open_source
from dspark_cache.target import is_tokenizer_file, read_target_facts, target_folder
from dspark_cache.tokenizing import TokenizeOptions, TokenizerSource, load_tokenizer, tokenize_rows
from dspark_cache.tokens import KeepRules, keep_samples, report_supervision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dspark_cache.rows import Source
    from dspark_cache.stage import StageContext
    from dspark_cache.tokenizing import TokenizedSample
    from dspark_cache.tokens import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Rows that are ready to be tokenised.

    Attributes:
        stage: Settings and inputs.
        path: The data.
        folder: The target.
        source: The rows.
        order: Indices of the rows, in the order of the samples.
        tokenizer: The target's tokenizer.
        template: The chat template in effect.
        options: How samples are cut and masked.
    """

    stage: StageContext
    path: Path
    folder: Path
    source: Source
    order: Sequence[int]
    tokenizer: Any
    template: str
    options: TokenizeOptions

    def samples(self, counts: TokenCounts, order: Sequence[int] | None = None) -> Iterator[TokenizedSample]:
        """Yield the samples to keep, counting in `counts` what is dropped; of the rows `order`, if it is given.

        Raises:
            InputError: A row is no conversation and `data.skip_invalid` is off; it is named.
        """
        data = self.stage.settings.data
        rules = KeepRules(min_loss_tokens=data.min_loss_tokens, skip_invalid=data.skip_invalid, limit=data.limit)
        rows = self.source.rows
        results = tokenize_rows(
            rows,
            self.order if order is None else order,
            _tokenizer_source(self.stage, self.folder),
            self.template,
            self.options,
            self.stage.settings.runtime.num_workers,
            tokenizer=self.tokenizer,
            limit=data.limit,
        )
        yield from keep_samples(((rows.where(index), result) for index, result in results), rules, counts)

    def identity(self) -> dict[str, Any]:
        """Return what the samples are made from: params, template, fingerprints of data and tokenizer."""
        stage, fingerprints = self.stage, self.stage.fingerprints()
        return params_identity(stage) | {
            "chat_template": self.template,
            "chat_template_sha256": chat_template_sha256(self.template),
            "data_fingerprint": fingerprints.of_input(stage.data, self.path),
            "pad_token_id": self.tokenizer.pad_token_id or 0,
            "tokenizer_fingerprint": fingerprints.of_input(stage.target, self.folder, accept=is_tokenizer_file),
        }

    def report(self, counts: TokenCounts) -> None:
        """Log the counts, and warn of masks that look wrong."""
        report_supervision(
            counts,
            has_markers=has_generation_markers(self.template),
            masks_prompt=self.options.mask_generation_prompt,
            decode=self.tokenizer.decode,
        )


def open_conversations(stage: StageContext, *, check_pins: bool = True) -> Conversations:
    """Open data, tokenizer and template, and put the rows in order.

    Args:
        stage: Settings and inputs.
        check_pins: Compare pinned inputs with their fingerprints, for which a target's weights must be there.

    Raises:
        InputError: Data, tokenizer, template or target cannot be used, or a pinned one has changed.
        SettingsError: A split that does not fit the data.
    """
    data, target = stage.settings.data, stage.settings.target
    path = data_path(stage.data, stage.root)
    folder = target_folder(stage.target, stage.root, trust_remote_code=target.trust_remote_code, weights=False)
    if check_pins:
        fingerprints = stage.fingerprints()
        ensure_pinned(stage.data, path, fingerprints, key="data.path")
        ensure_pinned(stage.target, folder, fingerprints, key="target.model")
    facts = read_target_facts(folder, trust_remote_code=target.trust_remote_code)
    tokenizer = load_tokenizer(_tokenizer_source(stage, folder))
    template = resolve_chat_template(target.chat_template, tokenizer)
    check_template(template)
    source = open_source(path, stage.scratch, is_hub=stage.data.kind == "hub")
    shuffle = source.is_shuffled if data.shuffle is None else data.shuffle
    return Conversations(
        stage=stage,
        path=path,
        folder=folder,
        source=source,
        order=row_order(source.splits, split=data.split, shuffle=shuffle, seed=data.shuffle_seed),
        tokenizer=tokenizer,
        template=template,
        options=TokenizeOptions(
            seq_length=data.seq_length,
            mask_reasoning_content=data.mask_reasoning_content,
            mask_generation_prompt=data.mask_generation_prompt,
            vocab_size=facts.vocab_size,
        ),
    )


def _tokenizer_source(stage: StageContext, folder: Path) -> TokenizerSource:
    return TokenizerSource(path=str(folder), trust_remote_code=stage.settings.target.trust_remote_code)


def params_identity(stage: StageContext) -> dict[str, Any]:
    """Return the params that decide the samples, under the names of the manifest where it has them."""
    data = stage.settings.data
    return {
        "train_data_path": data.path,
        "train_split": data.split,
        "shuffle": data.shuffle,
        "shuffle_seed": data.shuffle_seed,
        "seq_length": data.seq_length,
        "mask_reasoning_content": data.mask_reasoning_content,
        "mask_generation_prompt": data.mask_generation_prompt,
        "min_loss_tokens": data.min_loss_tokens,
        "skip_invalid": data.skip_invalid,
        "limit": data.limit,
    }
