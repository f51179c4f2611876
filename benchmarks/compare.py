"""Compare two runs of the benchmarks: ends with 1 where a ratio has fallen by more than a tenth.

python -m benchmarks.compare OLD.json NEW.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.workspace import print_table

MOST_LOST = 0.1


def compare(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[list[str]], list[str]]:
    """Return a table of all rows of two runs, and the names of those that have fallen, or are not there any more."""
    ratios = [{row["name"]: row["ratio"] for row in run["rows"]} for run in (old, new)]
    table, fallen = [["", "old", "new", "new by old"]], []
    for name in [*ratios[0], *(name for name in ratios[1] if name not in ratios[0])]:
        before, now = (run.get(name) for run in ratios)
        words = ["" if value is None else f"{value:.2f}" for value in (before, now)]
        table.append([name, *words, f"{now / before:.2f}" if before and now is not None else ""])
        if before is not None and (now is None or now < before * (1 - MOST_LOST)):
            fallen.append(name)
    return table, fallen


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a ratio has fallen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parsed = parser.parse_args(arguments)
    table, fallen = compare(*(json.loads(path.read_text()) for path in (parsed.old, parsed.new)))
    print_table(table)
    for name in fallen:
        print(f"fell by more than {MOST_LOST:.0%}, or is gone: {name}", file=sys.stderr)
    return int(bool(fallen))


if __name__ == "__main__":
    sys.exit(main())
