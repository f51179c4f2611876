"""How long commands take before they do anything: imports of each stage, the library and the command line."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.ratios import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = {
    "import dspark_cache": "import dspark_cache",
    "import stages.tokenize": "import stages.tokenize",
    "import stages.capture": "import stages.capture",
    "import stages.shards": "import stages.shards",
    "import stages.verify": "import stages.verify",
    "dspark-cache --help": "import sys; import dspark_cache.cli as cli; sys.argv = ['', '--help']; cli.main()",
}


def rows(rounds: int) -> Iterator[Row]:
    """Measure whole processes and give a row each, as the share that `import torch` alone takes of it."""
    seconds: dict[str, list[float]] = {name: [] for name in ("import torch", *WAYS)}
    for number in range(rounds + 1):
        for name, code in {"import torch": "import torch", **WAYS}.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
            if number:
                seconds[name].append(time.perf_counter() - start)
    torch_alone = statistics.median(seconds["import torch"])
    for name in WAYS:
        median = statistics.median(seconds[name])
        yield Row(
            name=f"start: {name}, by import torch alone",
            ratio=torch_alone / median,
            target=None,
            detail=f"{median:.2f} s, torch alone {torch_alone:.2f} s",
        )
