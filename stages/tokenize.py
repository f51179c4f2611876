"""Stage 1: conversations and chat template in, ragged ids and loss masks out (`tokens/`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from dspark_cache.chat_templates import chat_template_sha256, check_template, resolve_chat_template
from dspark_cache.files import put_folder
from dspark_cache.inputs import ensure_pinned
from dspark_cache.progress import Progress
from dspark_cache.rows import default_shuffle, open_rows, row_order
from dspark_cache.stage import TOKENS_PATH, open_stage, run_stage
from dspark_cache.target import is_tokenizer_file, target_folder
from dspark_cache.tokenizing import TokenizeOptions, TokenizerSource, load_tokenizer, tokenize_rows
from dspark_cache.tokens import KeepRules, TokensWriter, ensure_supervision, keep_samples, report_supervision

if TYPE_CHECKING:
    from dspark_cache.stage import StageContext


def main() -> None:
    """Tokenise every row and put `tokens/` in place."""
    stage = open_stage("tokenize")
    data, target = stage.settings.data, stage.settings.target
    fingerprints = stage.fingerprints()
    path = stage.root / data.path
    folder = target_folder(stage.target, stage.root, trust_remote_code=target.trust_remote_code, weights=False)
    ensure_pinned(stage.data, path, fingerprints, key="data.path")
    ensure_pinned(stage.target, folder, fingerprints, key="target.model")
    source = TokenizerSource(path=str(folder), trust_remote_code=target.trust_remote_code)
    tokenizer = load_tokenizer(source)
    template = resolve_chat_template(target.chat_template, tokenizer)
    check_template(template)
    rows = open_rows(path)
    shuffle = default_shuffle(path) if data.shuffle is None else data.shuffle
    order = row_order(len(rows), split=data.split, shuffle=shuffle, seed=data.shuffle_seed)
    options = TokenizeOptions(
        seq_length=data.seq_length,
        mask_reasoning_content=data.mask_reasoning_content,
        mask_generation_prompt=data.mask_generation_prompt,
    )
    rules = KeepRules(min_loss_tokens=data.min_loss_tokens, skip_invalid=data.skip_invalid, limit=data.limit)
    results = tokenize_rows(rows, order, source, template, options, stage.settings.runtime.num_workers)
    identity = _identity(stage) | {
        "chat_template": template,
        "chat_template_sha256": chat_template_sha256(template),
        "data_fingerprint": fingerprints.of(path),
        "pad_token_id": tokenizer.pad_token_id or 0,
        "tokenizer_fingerprint": fingerprints.of(folder, accept=is_tokenizer_file),
    }
    with (
        put_folder(stage.root / TOKENS_PATH) as building,
        TokensWriter(building) as writer,
        Progress("tokenize", len(order), "rows") as progress,
    ):
        for sample in keep_samples(((rows.where(index), result) for index, result in results), rules, writer.counts):
            writer.add(sample)
            progress.advance(1)
        ensure_supervision(writer.counts, path=data.path)
        writer.finish(identity)
    report_supervision(writer.counts)


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
