"""Stage 1: conversations and chat template in, ragged ids and loss masks out (`tokens/`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dspark_cache.chat_templates import (
    chat_template_sha256,
    check_template,
    has_generation_markers,
    resolve_chat_template,
)
from dspark_cache.files import put_folder
from dspark_cache.inputs import data_path, ensure_pinned
from dspark_cache.progress import Progress
from dspark_cache.row_order import row_order
from dspark_cache.rows import open_source
from dspark_cache.stage import TOKENS_PATH, open_stage, run_stage
from dspark_cache.target import is_tokenizer_file, read_target_facts, target_folder
from dspark_cache.tokenizing import TokenizeOptions, TokenizerSource, load_tokenizer, tokenize_rows
from dspark_cache.tokens import KeepRules, TokensWriter, ensure_supervision, keep_samples, report_supervision

if TYPE_CHECKING:
    from dspark_cache.stage import StageContext


def main() -> None:
    """Tokenise every row and put `tokens/` in place."""
    stage = open_stage("tokenize")
    data, target = stage.settings.data, stage.settings.target
    fingerprints = stage.fingerprints()
    path = data_path(stage.data, stage.root)
    folder = target_folder(stage.target, stage.root, trust_remote_code=target.trust_remote_code, weights=False)
    ensure_pinned(stage.data, path, fingerprints, key="data.path")
    ensure_pinned(stage.target, folder, fingerprints, key="target.model")
    facts = read_target_facts(folder, trust_remote_code=target.trust_remote_code)
    tokenizer_source = TokenizerSource(path=str(folder), trust_remote_code=target.trust_remote_code)
    tokenizer = load_tokenizer(tokenizer_source)
    template = resolve_chat_template(target.chat_template, tokenizer)
    check_template(template)
    source = open_source(path, stage.scratch, is_hub=stage.data.kind == "hub")
    shuffle = source.is_shuffled if data.shuffle is None else data.shuffle
    order = row_order(source.splits, split=data.split, shuffle=shuffle, seed=data.shuffle_seed)
    options = TokenizeOptions(
        seq_length=data.seq_length,
        mask_reasoning_content=data.mask_reasoning_content,
        mask_generation_prompt=data.mask_generation_prompt,
        vocab_size=facts.vocab_size,
    )
    rules = KeepRules(min_loss_tokens=data.min_loss_tokens, skip_invalid=data.skip_invalid, limit=data.limit)
    results = tokenize_rows(source.rows, order, tokenizer_source, template, options, stage.settings.runtime.num_workers)
    identity = _identity(stage) | {
        "chat_template": template,
        "chat_template_sha256": chat_template_sha256(template),
        "data_fingerprint": fingerprints.of_input(stage.data, path),
        "pad_token_id": tokenizer.pad_token_id or 0,
        "tokenizer_fingerprint": fingerprints.of_input(stage.target, folder, accept=is_tokenizer_file),
    }
    with (
        put_folder(stage.root / TOKENS_PATH) as building,
        TokensWriter(building) as writer,
        Progress("tokenize", len(order), "rows") as progress,
    ):
        named = ((source.rows.where(index), result) for index, result in results)
        for sample in keep_samples(named, rules, writer.counts):
            writer.add(sample)
            progress.advance(1)
        ensure_supervision(writer.counts, path=data.path)
        writer.finish(identity)
    report_supervision(
        writer.counts,
        has_markers=has_generation_markers(template),
        masks_prompt=data.mask_generation_prompt,
        decode=tokenizer.decode,
    )


def _identity(stage: StageContext) -> dict[str, Any]:
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


if __name__ == "__main__":
    sys.exit(run_stage(main))
