"""Stage 2: tokens and target in, the ledger of captured states out (`features.json`); blocks stay in scratch."""

from __future__ import annotations

import sys

from dspark_cache.capture_run import capture_features
from dspark_cache.stage import LEDGER_PATH, TOKENS_PATH, open_stage, run_stage
from dspark_cache.tokens import Tokens


def main() -> None:
    """Capture what is missing and put `features.json` in place; one rank of several does that, and no slice."""
    stage = open_stage("capture")
    ledger = capture_features(stage, Tokens(stage.root / TOKENS_PATH))
    if ledger is not None:
        ledger.write(stage.root / LEDGER_PATH)


if __name__ == "__main__":
    sys.exit(run_stage(main))
