"""Tiny random models of the families that transformers has, and their states taken in three ways.

`python -m tests.families` prints the tables of docs/families.md.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from dspark_cache import target_logits
from dspark_cache.forward import Capturer, check_state
from dspark_cache.recompute import recompute_sample, relative_l2
from dspark_cache.settings import TargetSettings
from dspark_cache.target import UNSUPPORTED_MODEL_TYPES, Target, TargetFacts, load_target, read_target_facts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMON = tuple(
    """
    deepseek_v3 gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4_moe gpt_oss llama mistral olmo2 phi3 qwen2 qwen3
    qwen3_moe
    """.split()  # noqa: SIM905 - names read better than a column of quotes
)
"""Families tested in every run."""

FURTHER = tuple(
    """
    afmoe apertus apertus1p5 apertus1p5_text arcee aria aria_text axk1 axk2 aya_vision bailing_hybrid bamba beam
    biogpt bitnet bloom chameleon cohere cohere2 cohere2_moe cohere2_vision cohere_compass cohere_compass_text
    cosmos3_edge cosmos3_omni cwm dbrx deepseek_ocr2 deepseek_v2 deepseek_v32 deepseek_v4 deepseek_vl
    deepseek_vl_hybrid diffllama doge dots1 dots3_note dots3_note_text ernie4_5 ernie4_5_moe ernie4_5_vl_moe exaone
    exaone4 exaone4_5 exaone_moe falcon falcon_h1 flex_olmo flint fuyu gemma gemma3n_text gemma4_unified
    gemma4_unified_text glm glm4 glm46v glm4_moe_lite glm4v glm4v_moe glm5_next glm_moe_dsa glm_ocr glmga got_ocr2
    gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese granite granite4_vision granite_docling granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl
    hy_v3 hy_v4 hy_v4_vl hyperclovax hyperclovax_vision_v2 idefics2 idefics3 inkling2 inkling2_loop
    inkling2_loop_text inkling2_text internlm3 internvl iquestcoder jais2 jamba janus jetmoe kimi_k25 kimi_linear
    kolibri1 kosmos-2.5 laguna lara_mini lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl lighton_ocr llama4 llama4_text llava
    llava_next llava_next_video llava_onevision mellum mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 minimax
    minimax_m2 minimax_m3_vl minimax_m3_vl_text ministral ministral3 mistral3 mistral4 mistral_large4 mixtral molmo2
    moshi moss_transcribe_diarize mpt muse_glimmer muse_spark nanochat nemotron nemotron_h olmo olmo3 olmo_hybrid
    olmoe openai-gpt opt ovis2 paddleocr_vl persimmon phi4_multimodal phimoe pp_chart2table qianfan_ocr
    qwen2_5_omni_thinker qwen2_5_vl qwen2_moe qwen2_vl qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
    qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe recurrent_gemma sarvam_mla sarvam_moe seed_oss smollm3 smolvlm
    solar_open stablelm starcoder2 step3p7 unlimited_ocr vaultgemma video_llama_3 video_llava vipllava xglm xlstm
    youtu zamba zamba2 zaya
    """.split()  # noqa: SIM905 - as above
)
"""Families tested by the longer runs."""

NOT_BUILT = {
    "fast_vlm": "its image encoder needs timm, which is not installed here",
    "gemma3n": "its image encoder needs timm, which is not installed here; its text decoder is gemma3n_text",
    "perception_lm": "its image encoder needs timm, which is not installed here",
}
"""Families that no tiny model was made of, and why; the refused ones are `UNSUPPORTED_MODEL_TYPES`."""

NO_FINAL_NORM = ("gemma3n_text",)
"""Families whose last hidden_states entry is not what goes into lm_head."""

LEFT_OUT = ("aya_vision", "cohere2_vision", "gemma3", "mpt")
"""Families of which transformers leaves out a scale or cap that the configuration of their text decoder has."""

NUM_LAYERS = 4
VOCAB_SIZE = 128
NUM_TEXT_IDS = 112
"""Ids below this are text; the placeholders of multimodal families lie above."""
WINDOW = 5

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    # between lm_head and logits
    "final_logit_softcapping": 1.0,
    "logits_soft_cap": 1.0,
    "output_logit_soft_cap": 1.0,
    "logit_scale": 0.5,
    "logits_scaling": 8.0,
    "lm_head_multiplier": 0.5,
    "output_multiplier": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    # mixture of experts
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # state space and linear attention
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "mamba_d_state": 16,
    "mamba_d_head": 16,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "state_size": 16,
    "n_groups": 1,
    "chunk_size": 8,
    # encoders of other modalities
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "num_heads": 4,
    "embed_dim": 64,
    "out_hidden_size": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "ffn_dim": 96,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "codebook_dim": 64,
    "adapter_in_dim": 64,
    "adapter_input_size": 64,
    "adapter_output_size": 64,
    "adapter_out_dim": 64,
}
"""What makes a model tiny, as far as its configuration has the names."""

MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
CONVOLVED = ["conv", "full_attention", "conv", "full_attention"]
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.5}
PER_LAYER_INPUT = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 16}


def rope_of_axes(*sections: int) -> dict[str, Any]:
    """Return rope parameters of positions on several axes (time, height, width); the sections sum to half a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


OVERRIDES: dict[str, dict[str, Any]] = {
    "apertus1p5": {"image_token_offset": 112, "audio_token_offset": 120},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8},
    "bailing_hybrid": {"layer_group_size": 2, "num_expert_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "cosmos3_edge_text": rope_of_axes(2, 3, 3),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "doge": {"num_experts": 16},
    "dots1": {"layer_types": WINDOWED},
    "dots3_note_text": {
        f"swa_{name}": SMALL[name]
        for name in (
            "num_attention_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "v_head_dim",
            "head_dim",
            "qk_rope_head_dim",
        )
    }
    | {"swa_num_key_value_heads": 4},
    "dots3_note_vision_encoder": {"num_hidden_layers": 42},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], **rope_of_axes(3, 3, 2)},
    "falcon_h1": {"mamba_d_ssm": 128, "embedding_multiplier": 2.0},
    "gemma3_text": {"layer_types": WINDOWED},
    "gemma3n_text": {"layer_types": WINDOWED, "num_kv_shared_layers": 1, **PER_LAYER_INPUT},
    "gemma4_text": {"layer_types": WINDOWED, **PER_LAYER_INPUT},
    "glm4v_moe_text": rope_of_axes(2, 1, 1),
    "glm4v_text": rope_of_axes(2, 3, 3),
    "glm5_next_text": {"index_kpool": 2, "qk_rope_head_dim": 0, "qk_head_dim": 8},
    "glm_ocr_text": rope_of_axes(2, 3, 3),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granite": GRANITE,
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [1, 1, 2, 2],
        "downsample_rate": "1/2",
    },
    "granite4_vision_text": {"num_hidden_layers": 5},
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": {"layer_types": MIXED, **GRANITE},
    "granitemoeshared": GRANITE,
    "hunyuan_vl_text": rope_of_axes(2, 2, 2, 2),
    "hy_v4_vl_text": rope_of_axes(2, 1, 1),
    "inkling2_loop_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_text": {"unpadded_vocab_size": VOCAB_SIZE},
    "inkling2_vision": {"text_hidden_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vision_model": {"projection_dim": 64},
    "janus_vqgan": {"num_embeddings": 64, "projection_dim": 64, "image_token_embed_dim": 64},
    "kimi_linear": {"layer_types": MIXED},
    "kolibri1": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "laguna": {"layer_types": WINDOWED},
    "lfm2": {"layer_types": CONVOLVED},
    "lfm2_moe": {"layer_types": CONVOLVED},
    "mamba2": {"num_heads": 8},
    "ministral": {"layer_types": WINDOWED},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [28, 28]},
    "muse_glimmer": {"projector_hidden_size": 64},
    "muse_spark": {"projector_hidden_size": 64},
    "muse_spark_audio": {"patch_sizes": [2, 2], "hidden_sizes": [32, 64], "depths": [1, 1], "num_hidden_layers": 2},
    "paddleocr_vl_text": rope_of_axes(2, 3, 3),
    "qwen2": {"use_sliding_window": True, "layer_types": WINDOWED},
    "qwen2_5_omni_text": rope_of_axes(2, 3, 3),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 120},
    "qwen2_5_vl_text": rope_of_axes(2, 3, 3),
    "qwen2_vl_text": rope_of_axes(2, 3, 3),
    "qwen3": {"use_sliding_window": True, "layer_types": WINDOWED},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 120},
    "wavtokenizer_encoder": {"codebook_size": 8},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What the names above do not make small, or would leave unused: one kind of layer only, a scale of one."""


def tiny_values(cls: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the values that make a configuration of this class tiny, and the configurations inside it."""
    known = inspect.signature(cls.__init__).parameters
    renamed = {cls.attribute_map.get(name, name): value for name, value in SMALL.items()}
    values = {name: value for name, value in {**renamed, **SMALL}.items() if name in known}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        values["num_key_value_heads"] = values["num_attention_heads"]
    default = cls() if cls.sub_configs else None
    for name in cls.sub_configs:
        inner = type(getattr(default, name))
        if issubclass(inner, PreTrainedConfig):
            values[name] = inner(**tiny_values(inner))
    return {**values, **OVERRIDES.get(cls.model_type, {})}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return the configuration of a tiny model of the family."""
    cls = CONFIG_MAPPING[model_type]
    config: PreTrainedConfig = cls(**tiny_values(cls))
    return config


def build_tiny(model_type: str, folder: Path) -> None:
    """Save a tiny random model of the family in float32, a multimodal one whole."""
    config = tiny_config(model_type)
    nested = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto_class = AutoModelForImageTextToText if nested else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32)
    disturb_norms(model)
    model.save_pretrained(folder)


@torch.no_grad()
def disturb_norms(model: torch.nn.Module) -> None:
    """Change the weights of norms, which start as ones or zeros and would hide which norm a state has passed."""
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape))


States = dict[str, torch.Tensor]
"""Name of a state to its rows [T, H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How far the ways to the states of one family are apart, and what is special about it.

    Attributes:
        hooks: Largest relative L2 of any token and state between capture in a padded batch and the hooks of
            `recompute_sample` on each sample alone.
        whole: The same between capture and the whole model's `output_hidden_states=True` on each sample alone.
        prefix: The same between a sample that begins another one and the first tokens of that one.
        apart: Smallest relative L2 of any token between two captured layers: a mistaken layer would show.
        special: What is special, in words.
        logits: The same between the model's logits and `target_logits` of what goes into lm_head.
        facts: What `read_target_facts` says of it.
        loaded_as: Class of the loaded model.
    """

    hooks: float
    whole: float
    prefix: float
    apart: float
    special: list[str]
    logits: float
    facts: TargetFacts
    loaded_as: str


def make_samples() -> list[torch.Tensor]:
    """Return samples of 12, 7 and 3 tokens; the third begins the first."""
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randint(0, NUM_TEXT_IDS, (n,), generator=generator, dtype=torch.int32) for n in (12, 7))
    return [first, second, first[:3]]


def load_tiny(folder: Path) -> tuple[TargetFacts, Target]:
    """Read and load a saved model as the pipeline does."""
    facts = read_target_facts(folder, trust_remote_code=False)
    return facts, load_target(folder, TargetSettings(), "fp32", torch.device("cpu"))


def named(hidden: torch.Tensor, last: torch.Tensor, layer_ids: Sequence[int]) -> States:
    """Return captured rows [T, D] and [T, H] by the names of their states."""
    parts = hidden.split(last.shape[1], dim=-1)
    return {f"layer {layer}": part for layer, part in zip(layer_ids, parts, strict=True)} | {"last hidden": last}


def capture_states(
    target: Target, facts: TargetFacts, samples: list[torch.Tensor], layer_ids: list[int]
) -> list[States]:
    """Capture all samples in one padded batch."""
    states = Capturer(target, layer_ids, facts.hidden_size)(samples)
    lengths = [len(sample) for sample in samples]
    rows = zip(states.hidden.split(lengths), states.last.split(lengths), strict=True)
    return [named(hidden, last, layer_ids) for hidden, last in rows]


def hook_states(target: Target, facts: TargetFacts, ids: torch.Tensor, layer_ids: list[int]) -> States:
    """Take one sample's states as verify does."""
    recomputed = recompute_sample(target, ids, layer_ids, facts.hidden_size)
    return named(recomputed.hidden, recomputed.last, layer_ids)


@torch.inference_mode()
def whole_model_states(target: Target, facts: TargetFacts, ids: torch.Tensor, layer_ids: list[int]) -> States:
    """Take one sample's states from all hidden_states of the whole model."""
    output = target.model(input_ids=ids.long()[None], use_cache=False, output_hidden_states=True)
    shape = (1, len(ids), facts.hidden_size)
    assert len(output.hidden_states) == facts.num_hidden_layers + 1
    states = {
        f"layer {layer}": check_state(output.hidden_states[layer + 1], f"layer {layer}", shape)[0]
        for layer in layer_ids
    }
    if facts.model_type in NO_FINAL_NORM:
        del states[f"layer {facts.num_hidden_layers - 1}"]
    return states


def worst(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest relative L2 of any token and state that is expected."""
    return float(torch.stack([relative_l2(found[name], rows).max() for name, rows in expected.items()]).max())


def measure(model_type: str, folder: Path) -> Measured:
    """Build a family's tiny model, take its states in three ways and compare them."""
    build_tiny(model_type, folder)
    facts, target = load_tiny(folder)
    samples = make_samples()
    layer_ids = [-1, 0, 1, facts.num_hidden_layers - 1]
    captured = capture_states(target, facts, samples, layer_ids)
    pairs = list(zip(samples, captured, strict=True))
    first = list(captured[0].values())[: len(layer_ids)]
    special, logits = describe(target, facts, samples[0])
    return Measured(
        hooks=max(worst(states, hook_states(target, facts, ids, layer_ids)) for ids, states in pairs),
        whole=max(worst(states, whole_model_states(target, facts, ids, layer_ids)) for ids, states in pairs),
        prefix=worst(captured[2], {name: rows[: len(samples[2])] for name, rows in captured[0].items()}),
        apart=min(float(relative_l2(*two).min()) for two in pairwise(first)),
        special=special,
        logits=logits,
        facts=facts,
        loaded_as=type(target.model).__name__,
    )


@torch.inference_mode()
def describe(target: Target, facts: TargetFacts, ids: torch.Tensor) -> tuple[list[str], float]:
    """Return what is special about a family, and the distance of `target_logits` from its logits."""
    seen: dict[str, Any] = {}
    modules = {
        "embedding": target.model.get_input_embeddings(),
        "layer": target.layers[0],
        "head": target.model.get_output_embeddings(),
    }
    handles = [
        module.register_forward_hook(lambda _m, given, output, name=name: seen.update({name: (output, given)}))
        for name, module in modules.items()
    ]
    arguments = {"input_ids": ids.long()[None], "use_cache": False}
    output = target.model(**arguments, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    selected = target.base(**arguments, output_hidden_states=[1], return_dict=True).hidden_states
    logits, (head, (last,)) = output.logits, seen["head"]
    rules = {} if facts.model_type in LEFT_OUT else facts.logits
    embedded = output.hidden_states[0]
    first = seen["layer"][0]
    special = {
        "4-D residual, streams averaged": embedded.dim() == 4,
        "layer -1 is not the embedding module's output": not is_close(embedded, seen["embedding"][0]),
        "a layer returns a tuple": isinstance(first, tuple | list),
        "all hidden states are kept during a forward": sum(state is not None for state in selected) > 1,
        "the last entry of hidden_states is not what goes into lm_head": facts.model_type in NO_FINAL_NORM,
        f"logits capped or scaled ({', '.join(facts.logits)})": not is_close(logits, head),
        f"transformers leaves out {', '.join(facts.logits)}": facts.model_type in LEFT_OUT,
    }
    expected = target_logits(last, target.head_weight, rules)
    return [words for words, holds in special.items() if holds], float(relative_l2(logits, expected).max())


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Say whether two tensors agree, of whatever shapes."""
    return found.shape == expected.shape and torch.allclose(found, expected)


def print_tables() -> None:
    """Print the tables of docs/families.md."""
    torch.set_num_threads(1)  # tiny models gain nothing from more
    lines = ["| model_type | loaded as | special | hooks | hidden_states | prefix |", "|---|---|---|---|---|---|"]
    for model_type in sorted((*COMMON, *FURTHER)):
        with TemporaryDirectory() as folder:
            found = measure(model_type, Path(folder))
        figures = " | ".join(f"{figure:.1e}" for figure in (found.hooks, found.whole, found.prefix))
        lines.append(f"| {model_type} | {found.loaded_as} | {'; '.join(found.special)} | {figures} |")
    for table in (UNSUPPORTED_MODEL_TYPES, NOT_BUILT):
        lines += ["", "| model_type | why |", "|---|---|"]
        lines += [f"| {model_type} | {reason} |" for model_type, reason in sorted(table.items())]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    print_tables()
