"""Anonymous memory of capture and shards above the loaded target, against the bound that a user sets.

    python -m benchmarks.memory --work EMPTY_DIR [--gb 4] [--host-memory-gb 1]

A wide target with next to no computation, so that states come fast and the disk has to keep up. What is measured is
the largest RssAnon of a stage's process, less that of the same stage with one sample of 16 tokens, against
1.2 x runtime.host_memory_gb plus the states of one batch. Ends with 1 where a stage needs more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.workspace import Workspace, logical_bytes, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

GIB = 1 << 30
LENGTH = 2048
HIDDEN = 2048
LAYERS = [0, 1, 2, 3, 4]
TOKEN_BYTES = 4 * HIDDEN * (len(LAYERS) + 1)
MAX_TOKENS = 8192


def main() -> int:
    """Measure every form and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gb", type=float, default=4, help="size of the cache")
    parser.add_argument("--host-memory-gb", type=float, default=1, help="the bound, in GiB")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    target = make_target(parsed.work / "target")
    lengths = [LENGTH - 7 * (number % 40) for number in range(int(parsed.gb * 1e9 / TOKEN_BYTES / (LENGTH - 140)))]
    whole = measure_stages(parsed, "whole", target, lengths)
    small = measure_stages(parsed, "small", target, [16])
    bound = 1.2 * parsed.host_memory_gb * GIB + MAX_TOKENS * TOKEN_BYTES
    table = [["stage", "largest RssAnon", "above a run of one sample", "bound"]]
    for name, largest in whole.items():
        sizes = (largest, largest - small[name], bound)
        table.append([name, *(f"{size / GIB:.2f} GiB" for size in sizes)])
    above = {name: whole[name] - small[name] for name in whole}
    print_table(table)
    if parsed.json:
        parsed.json.write_text(json.dumps({"above_bytes": above, "bound_bytes": bound}, indent=2) + "\n")
    return int(max(above.values()) > bound)


def make_target(folder: Path) -> Path:
    """Save a Qwen3 with wide states, thin layers and random weights, with the shipped target's tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "inputs/target")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measure_stages(parsed: argparse.Namespace, name: str, target: Path, lengths: Sequence[int]) -> dict[str, int]:
    """Run the pipeline on samples of these lengths; return the largest RssAnon by stage and form."""
    data = parsed.work / "samples.jsonl"
    generator = torch.Generator().manual_seed(0)
    with data.open("w") as file:
        for length in lengths:
            ids = torch.randint(0, 900, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")
    block = int(parsed.host_memory_gb * GIB) // 4
    workspace = Workspace.make(
        parsed.work / name,
        data,
        target,
        data={"seq_length": LENGTH},
        target={"layer_ids": LAYERS, "block_bytes": block},
        runtime={"host_memory_gb": parsed.host_memory_gb, "max_tokens_per_batch": MAX_TOKENS, "num_workers": 1},
    )
    workspace.run("tokenize")
    found = {"capture": workspace.run("capture")}
    forms = {
        "padded": {"layout": "padded", "shard_size": 16},
        "ragged, blocks linked": {"layout": "ragged", "shard_bytes": block},
        "ragged, copied": {"layout": "ragged", "shard_bytes": 1 << 40},
        "ragged fp8": {"layout": "ragged", "dtype": "fp8_e4m3", "shard_bytes": 1 << 40},
    }
    for form, cache in forms.items():
        workspace.set_params(cache={"dtype": "fp32", **cache})
        found[f"shards, {form}"] = workspace.run("shards")
        print(f"{name}, {form}: {logical_bytes(workspace.root / 'cache') / 1e9:.2f} GB", file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
