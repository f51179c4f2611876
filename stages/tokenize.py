"""Stage 1: conversations and chat template in, ragged ids and loss masks out (`tokens/`)."""

from __future__ import annotations

import sys

from dspark_cache.files import put_folder
from dspark_cache.progress import Progress
from dspark_cache.stage import TOKENS_PATH, open_stage, run_stage
from dspark_cache.tokenize_run import open_conversations
from dspark_cache.tokens import TokensWriter, ensure_supervision


def main() -> None:
    """Tokenise every row and put `tokens/` in place."""
    stage = open_stage("tokenize")
    conversations = open_conversations(stage)
    identity = conversations.identity()
    with (
        put_folder(stage.root / TOKENS_PATH) as building,
        TokensWriter(building) as writer,
        Progress("tokenize", len(conversations.order), "rows") as progress,
    ):
        for sample in conversations.samples(writer.counts):
            writer.add(sample)
            progress.advance(1)
        ensure_supervision(writer.counts, path=stage.settings.data.path)
        writer.finish(identity)
    conversations.report(writer.counts)


if __name__ == "__main__":
    sys.exit(run_stage(main))
