"""Which captured layers an inference engine can hand to a draft, and how its configuration names them.

Layer id i is the output of decoder layer i, -1 the output of the embedding, and the last layer's id the output of
the final norm (transformers' `hidden_states[i + 1]`). Engines differ in all three. Nothing is imported: these are
facts about other programs, each with where it was read; none was tried on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SGLANG: Final = "SGLang"
VLLM: Final = "vLLM"

# SGLang: models/qwen3.py and speculative/dflash_utils.py at commits 01b5f572b7b6 and 00731f0bc9fa: it captures before
# decoder layer k, and adds 1 itself to each id that a draft's configuration gives, for EAGLE-3 as for DFlash. DSpark's
# ids are DFlash's (speculators issue 753).
# vLLM: v1/worker/gpu/spec_decode/eagle/eagle3_utils.py at commit 0cfdd2e15d69: `eagle_aux_hidden_state_layer_ids` is
# taken as it is and counts from 1, 0 being the embedding; 1 is added to the ids of the other two.
CONFIG_KEYS: Final[dict[str, dict[str, int]]] = {
    SGLANG: {
        "dflash_config.target_layer_ids": 0,
        "target_layer_ids": 0,
        "eagle_config.eagle_aux_hidden_state_layer_ids": 0,
    },
    VLLM: {
        "dflash_config.target_layer_ids": 0,
        "target_layer_ids": 0,
        "eagle_aux_hidden_state_layer_ids": 1,
    },
}
"""Engine to the keys of a draft's config.json that name layers, and what each adds to our ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unservable:
    """Captured layers whose states an engine does not give to a draft.

    Attributes:
        engine: Key of `CONFIG_KEYS`.
        layer_ids: Our ids of them.
        reason: What the engine does instead.
    """

    engine: str
    layer_ids: list[int]
    reason: str

    def __str__(self) -> str:
        """Say it in a sentence."""
        return f"layer ids {self.layer_ids} cannot be served by {self.engine}: {self.reason}"

    def as_json(self) -> dict[str, Any]:
        """Return the three values."""
        return {"engine": self.engine, "layer_ids": self.layer_ids, "reason": self.reason}


def serving_findings(layer_ids: Sequence[int], num_layers: int) -> list[Unservable]:
    """Return which of a draft's layers which engine cannot give it; nothing where all can be served."""
    return list(_findings([layer for layer in layer_ids if layer in (-1, num_layers - 1)], num_layers))


def _findings(odd: list[int], num_layers: int) -> Iterator[Unservable]:
    # Automodel issue 3082; sglang issue 32204: an IndexError at the start for Qwen3.5. dflash_utils.py, as above,
    # refuses ids below 0. An EAGLE-3 draft's -1 would reach what enters layer 0, in some models only.
    if odd:
        yield Unservable(
            engine=SGLANG,
            layer_ids=odd,
            reason=f"it captures what enters the decoder layers 1 to {num_layers - 1}, neither the embedding's output "
            "nor the final norm's",
        )
    # Model-Optimizer pull request 1846 and speculators pull request 313: the state of the last layer is taken before
    # the final norm. For the embedding see `EagleModelMixin` and its callers: index 0 is captured before layer 0.
    if num_layers - 1 in odd:
        yield Unservable(
            engine=VLLM,
            layer_ids=[num_layers - 1],
            reason="it hands on the last layer's output before the final norm, the cache holds it after the norm",
        )


def engine_layer_ids(engine: str, layer_ids: Sequence[int]) -> dict[str, list[int]]:
    """Return what to write into a draft's config.json for an engine: each key that it reads, to the ids in its terms.

    Only one of the keys belongs into a configuration; which, the draft's kind decides.

    Raises:
        KeyError: `engine` is none of `CONFIG_KEYS`.
    """
    return {key: [layer + offset for layer in layer_ids] for key, offset in CONFIG_KEYS[engine].items()}


def serving_of(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how engines name the captured layers of a cache, and which they cannot serve; None if it has not said."""
    layer_ids, num_layers = manifest.get("target_layer_ids"), manifest.get("num_hidden_layers")
    if layer_ids is None or num_layers is None:
        return None
    return {
        "layer_ids": {engine: engine_layer_ids(engine, layer_ids) for engine in CONFIG_KEYS},
        "unservable": [finding.as_json() for finding in serving_findings(layer_ids, num_layers)],
    }


def serving_lines(serving: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each engine of what `serving_of` gave."""
    if serving is None:
        return
    for engine, keys in serving["layer_ids"].items():
        odd = sorted({i for item in serving["unservable"] if item["engine"] == engine for i in item["layer_ids"]})
        named: dict[str, list[str]] = {}
        for key, layer_ids in keys.items():
            named.setdefault(str(layer_ids), []).append(key)
        text = "; ".join(f"{' or '.join(names)}: {layer_ids}" for layer_ids, names in named.items())
        yield f"draft in {engine}", text + (f"; layers {odd} cannot be served" if odd else "")
