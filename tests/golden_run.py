"""Runs the pipeline on golden cases: `python -m tests.golden_run OUT CASE...`, one repository a case below OUT.

A process of its own, because the reference's caches were computed with these two variables, which torch reads
when it is imported: with them its kernels give the same bytes on any x86 machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dspark_cache.errors import DsparkCacheError
from dspark_cache.inputs import Fingerprints
from tests.repository import GOLDEN, ROOT, Repository, make_repository

REFUSAL = "refusal.txt"
PORTABLE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}


def params_of(argv: list[str]) -> dict[str, dict[str, Any]]:
    """Translate the reference's command line into our params."""
    options: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            options[word[2:]] = values = []
        else:
            values.append(word)
    data: dict[str, Any] = {"path": options["input-data"][0], "seq_length": int(options["seq-length"][0])}
    target: dict[str, Any] = {"model": options["target-model"][0]}
    data["split"] = options.get("split", [None])[0]
    data["shuffle_seed"] = int(options.get("shuffle-seed", ["42"])[0])
    for flag in ("mask-reasoning-content", "mask-generation-prompt"):
        data[flag.replace("-", "_")] = flag in options
    if "target-layer-ids" in options:
        target["layer_ids"] = [int(value) for value in options["target-layer-ids"]]
    template = options.get("chat-template", [None])[0]
    target["chat_template"] = template if template is None or "{" in template else f"inputs/{template}"
    cache = {"dtype": options["dtype"][0], "shard_size": int(options["shard-size"][0])}
    return {"data": data, "target": target, "cache": cache, "runtime": {"max_tokens_per_batch": 512}}


RESUMED = "q3-resume"
"""Made by an interrupted run and its resume, so no single command line is recorded; its manifest tells."""


def golden_argv(case: str) -> list[str]:
    """Return the command line of a case, as its case.json has it."""
    if case == RESUMED:
        options = "--target-model models/qwen3-tiny --input-data data/plain.jsonl --seq-length 24 --shard-size 4"
        return [*options.split(), "--dtype", "bf16", "--target-layer-ids", "2"]
    argv: list[str] = json.loads((GOLDEN / "cases" / case / "case.json").read_text())["argv"]
    return argv


def golden_repository(root: Path, case: str) -> Repository:
    """Lay the case's inputs out under the names that its manifest records."""
    params = params_of(golden_argv(case))
    repository = make_repository(root, **params)
    for folder in ("models", "data"):
        shutil.copytree(GOLDEN / folder, repository.root / folder)
    shutil.copytree(GOLDEN / "templates", repository.root / "inputs/templates")
    pins = Fingerprints(None)
    repository.set_params(
        data={"revision": pins.of(repository.root / params["data"]["path"])},
        target={"revision": pins.of(repository.root / params["target"]["model"])},
    )
    return repository


def run_cases(out: Path, cases: list[str]) -> None:
    """Run the cases in a process with the reference's kernels."""
    command = [sys.executable, "-m", "tests.golden_run", str(out), *cases]
    environment = {**os.environ, **PORTABLE, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    for name in sys.argv[2:]:
        repository = golden_repository(Path(sys.argv[1]) / name, name)
        try:
            repository.run()
        except DsparkCacheError as refusal:
            (repository.root / REFUSAL).write_text(str(refusal))
