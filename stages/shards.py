"""Stage 3: tokens, ledger and its blocks in, the published cache out (`cache/`)."""

from __future__ import annotations

import sys

from dspark_cache.blocks import BlockStore
from dspark_cache.ledger import read_ledger
from dspark_cache.progress import Progress
from dspark_cache.publish import Captured, publish_cache
from dspark_cache.stage import CACHE_PATH, LEDGER_PATH, TOKENS_PATH, open_stage, run_stage
from dspark_cache.tokens import Tokens


def main() -> None:
    """Write the shards and put `cache/` in place."""
    stage = open_stage("shards")
    ledger = read_ledger(stage.root / LEDGER_PATH)
    captured = Captured(
        tokens=Tokens(stage.root / TOKENS_PATH),
        ledger=ledger,
        store=BlockStore(stage.scratch, ledger.identity),
    )
    publish_cache(captured, stage.settings, stage.root / CACHE_PATH, lambda tokens: Progress("shards", tokens, "tok"))


if __name__ == "__main__":
    sys.exit(run_stage(main))
