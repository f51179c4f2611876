"""The frozen target: which layers are captured, what its configuration says, and loading it.

What can be read from the configuration is, without weights. A loaded target is checked to be the checkpoint: no
missing tensor, no pickled weights, no silent change of precision.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from dspark_cache.dtypes import DTYPE_MAP, SAFETENSORS_NAMES
from dspark_cache.errors import InputError, SettingsError
from dspark_cache.inputs import fetch_snapshot
from dspark_cache.schema import LOGIT_CAPS, LOGIT_FACTORS
from dspark_cache.serving import serving_findings
from dspark_cache.shard_file import ShardFile

if TYPE_CHECKING:
    from pathlib import Path

    from dspark_cache.inputs import Input
    from dspark_cache.settings import TargetSettings

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
_UNSUPPORTED = {
    "its hidden_states are not the layers' outputs": "dory falcon_mamba mamba mamba2 mllama rwkv",
    "its layers are not one list that each token passes once": "blt cpmant hrm_text idefics longcat_flash reformer",
    "its residual is wider than hidden_size": "qwen4_exp qwen4_exp_text",
    "what goes into lm_head is not its last hidden state": "inkling_mm_model inkling_text minicpm3 modernbert-decoder",
    "its lm_head has a bias, which the cache format has no place for": "codegen ctrl git gptj phi",
    "its tokens see later ones": (
        "bert bert-generation big_bird camembert data2vec-text diffusion_gemma electra ernie megatron-bert paligemma "
        "rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod"
    ),
    "it is an encoder-decoder or a part of one": (
        "bart bigbird_pegasus blenderbot blenderbot-small florence2 marian mbart musicgen musicgen_melody mvp pegasus "
        "pix2struct plbart pp_formulanet prophetnet t5gemma2 trocr udop vision-encoder-decoder whisper"
    ),
    "it takes no text alone": "blip blip-2 instructblip instructblipvideo kosmos-2 pi0 shieldgemma2",
    "it is a draft itself, and reads another model's states": "gemma4_assistant gemma4_unified_assistant",
    "transformers does not load its text decoder and lm_head from its checkpoints": "emu3 evolla nemotron_h_omni",
}
UNSUPPORTED_MODEL_TYPES = {name: reason for reason, names in _UNSUPPORTED.items() for name in names.split()}
"""Families that are refused before any work, and why; docs/families.md lists the others."""


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Spread layer ids evenly from the second layer to the last.

    `num_draft_layers` is clamped to num_target_layers - 1; one id is the last layer.

    Raises:
        SettingsError: A target with fewer than two layers, or no draft layer.
    """
    if num_target_layers < 2 or num_draft_layers < 1:
        raise SettingsError(
            f"default layer ids need a target of at least 2 layers and at least 1 draft layer, found "
            f"{num_target_layers} and {num_draft_layers}; set target.layer_ids"
        )
    count = min(num_draft_layers, num_target_layers - 1)
    if count == 1:
        return [num_target_layers - 1]
    step = (num_target_layers - 2) / (count - 1)
    return sorted({round(1 + index * step) for index in range(count)})


def resolve_layer_ids(layer_ids: list[int] | None, draft_num_hidden_layers: int, num_layers: int) -> list[int]:
    """Return the layer ids to capture, checked against the target's number of layers.

    Raises:
        SettingsError: Empty, not strictly increasing, or outside -1..num_layers-1.
    """
    if layer_ids is None:
        default = build_target_layer_ids(num_layers, draft_num_hidden_layers)
        if len(default) < draft_num_hidden_layers:
            logger.warning(
                "a target of %d layers has only the ids %s to spread, target.draft_num_hidden_layers asks for %d",
                num_layers,
                default,
                draft_num_hidden_layers,
            )
        return default
    valid = f"strictly increasing ids from -1 (embedding) to {num_layers - 1} (final norm)"
    if not layer_ids or sorted(set(layer_ids)) != layer_ids or layer_ids[0] < -1 or layer_ids[-1] >= num_layers:
        raise SettingsError(f"target.layer_ids: expected {valid}, found {layer_ids}")
    return list(layer_ids)


def warn_unservable(layer_ids: list[int], num_layers: int) -> None:
    """Warn of layer ids that inference engines cannot hand to a draft."""
    for finding in serving_findings(layer_ids, num_layers):
        logger.warning("%s; set target.layer_ids", finding)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a target's configuration says of it."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    dtype: str
    """The checkpoint's own dtype, a key of `DTYPE_MAP`."""
    remote_code: bool
    """Whether the checkpoint's own code is run."""
    logits: dict[str, float]
    """Soft cap and scales between lm_head and the logits, as far as the configuration has them."""


def target_folder(target: Input, root: Path, *, trust_remote_code: bool, weights: bool) -> Path:
    """Return the target's folder; a hub snapshot is fetched first, without its weights unless they are asked for.

    Raises:
        InputError: The hub or its cache does not have it.
    """
    if target.kind != "hub":
        return root / target.text
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
    patterns += ["*.py"] if trust_remote_code else []
    patterns += ["*.safetensors"] if weights else []
    return fetch_snapshot(target, key="target.model", repo_type="model", patterns=patterns)


def read_target_facts(folder: Path, *, trust_remote_code: bool) -> TargetFacts:
    """Read the configuration of a target, without its weights.

    Raises:
        InputError: No readable configuration, remote code that is not allowed, a quantised checkpoint, or a
            family whose states cannot be captured.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise InputError(
            f"target.model: {folder} has no usable configuration: {error}"
            + ("" if trust_remote_code else " (target.trust_remote_code is false)")
        ) from error
    if config.model_type in UNSUPPORTED_MODEL_TYPES:
        reason = UNSUPPORTED_MODEL_TYPES[config.model_type]
        raise InputError(f"target.model: {config.model_type} cannot be captured: {reason}")
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"target.model: {folder} is quantised, which capture refuses: use the unquantised checkpoint")
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise InputError(
            f"target.model: {config.model_type} cannot be captured: its tokens see later ones "
            "(use_bidirectional_attention)"
        )
    return TargetFacts(
        model_type=config.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_hidden_layers=text.num_hidden_layers,
        dtype=_checkpoint_dtype(folder, getattr(text, "dtype", None) or getattr(config, "dtype", None)),
        remote_code=trust_remote_code and bool(getattr(config, "auto_map", None)),
        logits=_logit_rules(text),
    )


def _logit_rules(text: Any) -> dict[str, float]:
    """Return what a text configuration has between lm_head and logits, as `target_logits` takes it."""
    values = {name: getattr(text, name, None) for name in (*LOGIT_CAPS, *LOGIT_FACTORS)}
    rules = {name: float(value) for name, value in values.items() if isinstance(value, int | float) and value}
    if text.model_type == "hyperclovax" and "logits_scaling" in rules:
        rules["logit_scale"] = rules.pop("logits_scaling")  # here it multiplies, in the granite families it divides
    return rules


def _checkpoint_dtype(folder: Path, configured: Any) -> str:
    """Return the dtype the configuration names, else the one most bytes of the weights have."""
    names = {dtype: name for name, dtype in DTYPE_MAP.items()}
    if isinstance(configured, str):
        configured = getattr(torch, configured, None)
    if configured in names:
        return names[configured]
    sizes: dict[torch.dtype, int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for place in ShardFile(file).places.values():
            sizes[place.spec.dtype] = sizes.get(place.spec.dtype, 0) + place.spec.num_bytes
    dtype = max(sizes, key=lambda item: sizes[item], default=None)
    if dtype not in names:
        found = SAFETENSORS_NAMES.get(dtype, "nothing") if dtype else "no weights"
        raise InputError(
            f"target.model: {folder}: cannot tell the checkpoint's dtype ({found}): set target.compute_dtype"
        )
    return names[dtype]


def is_weight_file(name: str) -> bool:
    """Say whether a file of a target decides its states: weights, their index, the configuration, its code."""
    return name == "config.json" or name.endswith((*WEIGHT_SUFFIXES, ".py"))


def is_tokenizer_file(name: str) -> bool:
    """Say whether a file of a target may decide token ids."""
    return not name.endswith((*WEIGHT_SUFFIXES, ".bin", ".pt", ".pth", ".gguf")) and name not in (
        "config.json",
        "generation_config.json",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target.

    Attributes:
        model: The whole model, with lm_head.
        base: The largest part of it without lm_head. A multimodal model's is its wrapper, which treats
            placeholder ids otherwise than the bare text decoder does.
        layers: The decoder's layers, as hooks need them.
        device: Where it is.
    """

    model: Any
    base: Any
    layers: torch.nn.ModuleList
    device: torch.device

    @property
    def embed_weight(self) -> torch.Tensor:
        """Weight of the input embedding, [V, H]; of a sharded target this rank's part of it, a DTensor."""
        weight: torch.Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of lm_head, as the embedding's; the same tensor where they are tied."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight


def load_target(folder: Path, settings: TargetSettings, compute_dtype: str, device: torch.device) -> Target:
    """Load the target for inference and check that all of it came from the checkpoint.

    Raises:
        InputError: Pickled weights only, tensors missing or of another shape, no lm_head or one with a bias, or
            layers that are not found.
    """
    return as_target(load_model(folder, settings, compute_dtype).to(device), device)


def as_target(model: Any, device: torch.device) -> Target:
    """Prepare a loaded model for inference and find its parts.

    Raises:
        InputError: No lm_head or one with a bias, or layers that are not found.
    """
    model.eval().requires_grad_(False)
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"target.model: {type(model).__name__} has no lm_head")
    if getattr(head, "bias", None) is not None:
        raise InputError("target.model: lm_head has a bias, which the cache format has no place for")
    layers = find_layers(model)
    return Target(model=model, base=find_base(model, layers), layers=layers, device=device)


def _model_class(folder: Path, settings: TargetSettings) -> tuple[Any, Any]:
    """Return the auto class that a target is loaded by, and its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = AutoConfig.from_pretrained(folder, trust_remote_code=settings.trust_remote_code, local_files_only=True)
    remote = settings.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    causal = remote or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return (AutoModelForCausalLM if causal else AutoModelForImageTextToText), config


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a target's whole model takes, lm_head included.

    Attributes:
        num_bytes: Bytes of its parameters.
        ties_weights: Whether lm_head is the embedding.
    """

    num_bytes: int
    ties_weights: bool


def read_model_size(folder: Path, settings: TargetSettings, compute_dtype: str) -> ModelSize:
    """Work out a target's size from its configuration, without its weights.

    Raises:
        InputError: No model can be made of it.
    """
    auto_class, config = _model_class(folder, settings)
    try:
        with torch.device("meta"):
            model = auto_class.from_config(
                config, dtype=DTYPE_MAP[compute_dtype], trust_remote_code=settings.trust_remote_code
            )
    except (ValueError, ImportError, RuntimeError) as error:
        raise InputError(f"target.model: no model can be made of the configuration in {folder}: {error}") from error
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return ModelSize(num_bytes=size, ties_weights=head is not None and head.weight is embed.weight)


def load_model(folder: Path, settings: TargetSettings, compute_dtype: str, **how: Any) -> Any:
    """Load the whole model as transformers does, and check that all of it came from the checkpoint.

    Args:
        folder: Folder of the checkpoint.
        settings: Section `target` of the settings.
        compute_dtype: Key of `DTYPE_MAP`.
        how: Further arguments of `from_pretrained`.

    Raises:
        InputError: Pickled weights only, or tensors missing or of another shape.
    """
    from transformers.utils.logging import disable_progress_bar

    if not any(folder.glob("*.safetensors")):
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        raise InputError(
            f"target.model: {folder} has no *.safetensors weights"
            + (f"; {pickled[0]} is pickled and never loaded, convert it with save_pretrained" if pickled else "")
        )
    auto_class, _ = _model_class(folder, settings)
    if not sys.stderr.isatty():
        disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=DTYPE_MAP[compute_dtype],
            attn_implementation=settings.attn_implementation,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **how,
        )
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise InputError(f"target.model: {folder} cannot be loaded: {error}") from error
    model, info = loaded
    faults = {
        key: sorted(map(str, info[key])) for key in ("missing_keys", "mismatched_keys", "error_msgs") if info.get(key)
    }
    if faults:
        raise InputError(
            f"target.model: the checkpoint in {folder} does not fit the model: {json.dumps(faults)[:2000]}"
        )
    return model


def find_layers(model: Any) -> torch.nn.ModuleList:
    """Return the decoder's layers: the one list of all of them in a model that also holds the embedding.

    Raises:
        InputError: There is not exactly one.
    """
    from transformers import PreTrainedModel

    count = model.config.get_text_config(decoder=True).num_hidden_layers
    embedding = model.get_input_embeddings()
    found = [
        child
        for module in model.modules()
        if isinstance(module, PreTrainedModel) and any(part is embedding for part in module.modules())
        for child in module.children()
        if isinstance(child, torch.nn.ModuleList) and len(child) == count
    ]
    if len(found) != 1:
        raise InputError(
            f"target.model: {type(model).__name__}: expected one decoder with {count} layers, found {len(found)}"
        )
    return found[0]


def find_base(model: Any, layers: torch.nn.ModuleList) -> Any:
    """Return the outermost model around the layers that does not hold lm_head.

    Raises:
        InputError: Every model around the layers holds lm_head.
    """
    from transformers import PreTrainedModel

    head = model.get_output_embeddings()
    for module in model.modules():
        inside = list(module.modules()) if isinstance(module, PreTrainedModel) else []
        if any(part is layers for part in inside) and not any(part is head for part in inside):
            return module
    raise InputError(f"target.model: {type(model).__name__} has no part that gives hidden states without lm_head")
