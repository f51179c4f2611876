"""Plain facts of the formats: names, keys, dtypes, versions. Each fact has its one home here.

Second module of the flow: it imports nothing, so that a command line can begin before torch is there.

Shape letters used in all docstrings:

    B  samples in a batch          T  real tokens of one or more samples, without padding
    S  `seq_length`                L  captured layers
    n  samples of one shard        H  hidden size of the target
    V  vocabulary of the target    D  L * H, width of `target_hidden_states`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = "0.1.0"
GIB: Final = 1 << 30

MANIFEST_NAME: Final = "manifest.json"
PROVENANCE_NAME: Final = "provenance.json"
TARGET_WEIGHTS_NAME: Final = "target_weights.safetensors"
STATES_PREFIX: Final = "shard-"
"""Of the files that hold states; in the padded layout ids and masks too."""
SAMPLES_PREFIX: Final = "samples-"
"""Of the files with ids and masks of the ragged layout."""
EMBED_KEY: Final = "embed_tokens.weight"
LM_HEAD_KEY: Final = "lm_head.weight"

DSPARK_NAME: Final = "DSpark"
DSPARK_FORMAT_VERSION: Final = 1
"""Padded: every sample has S positions in its shard. NeMo AutoModel reads and writes it."""
RAGGED_FORMAT_VERSION: Final = 2
"""Ragged: a shard holds real tokens only; another number, so that readers of version 1 refuse it."""
DSPARK_PRODUCER: Final = "dvc repro"

INPUT_IDS: Final = "input_ids"
LOSS_MASK: Final = "loss_mask"
HIDDEN: Final = "target_hidden_states"
LAST_HIDDEN: Final = "target_last_hidden_states"
CACHE_KEYS: Final = (INPUT_IDS, LOSS_MASK, HIDDEN, LAST_HIDDEN)
"""Keys of a padded shard, in the order in which they lie in the file."""

HIDDEN_SCALES: Final = "target_hidden_states_scales"
"""float32 [T, L] of an fp8 shard: what the values of each token and layer are multiplied by."""
LAST_HIDDEN_SCALES: Final = "target_last_hidden_states_scales"
"""float32 [T, 1]."""
SCALES_OF: Final = {HIDDEN: HIDDEN_SCALES, LAST_HIDDEN: LAST_HIDDEN_SCALES}

SAMPLE_OFFSETS: Final = "sample_offsets"
"""int64 [n+1]: sample i of a ragged file is rows offsets[i] (included) to offsets[i+1] (excluded)."""

LOGIT_CAPS: Final = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Fields of a configuration by which logits are bounded: cap * tanh(logits / cap)."""
LOGIT_FACTORS: Final = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1, "output_multiplier": 1}
"""Fields by which logits are multiplied before that, to the power with which each counts."""

FP8: Final = "fp8_e4m3"
SIGNIFICAND_BITS: Final = {"bf16": 8, "fp16": 11, "fp32": 24, FP8: 4}
"""Dtype in which a cache may store states to its significant bits: none is converted to one with more."""

STAGE_VERSIONS: Final = {"tokenize": 1, "capture": 2, "shards": 4, "verify": 5}
"""Raised when the same input would give other output; `stages/versions.yaml` holds the same numbers."""

VERIFY_LEVELS: Final = ("files", "headers", "bytes", "values", "supervision")
"""How far a cache is checked; each level includes those before it."""

AUTO: Final = "auto"
"""Value of `cache.shard_size` that leaves it to `cache.shard_bytes`."""

IDENTITY_EXEMPT: Final = ("format_version", "complete")
"""Manifest keys that describe the state of the files, not what they were made from."""

TRAIN: Final = "train"
EVAL: Final = "eval"
"""The two parts of a data set some samples of which are held out."""

MANIFEST_DEFAULTS: Final[Mapping[str, bool]] = {
    "mask_reasoning_content": False,
    "mask_generation_prompt": False,
}
"""Values of manifest keys that are younger than the format: what an older producer did."""
