"""Tells which algorithm a draft head is for, by its config.json and its tensors. Torch-free."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from foredraft.errors import CheckpointError
from foredraft.models.block_config import is_block_draft, read_block_options

HeadAlgorithm = Literal["EAGLE", "EAGLE3", "MTP", "PEAGLE", "DFLASH", "DSPARK"]
EAGLE3_KINDS = ("EAGLE3", "PEAGLE")
BLOCK_KINDS = ("DFLASH", "DSPARK")
# Kinds that may bring an LM head and a map of their own.
OWN_VOCABULARY = (*EAGLE3_KINDS, *BLOCK_KINDS)

# Architectures as config.json names them: the algorithm, and the decoder whose layer the head has.
_ARCHITECTURES: dict[str, tuple[HeadAlgorithm, str]] = {
    "LlamaForCausalLMEagle": ("EAGLE", "LlamaForCausalLM"),
    "EagleLlamaForCausalLM": ("EAGLE", "LlamaForCausalLM"),
    "Qwen2ForCausalLMEagle": ("EAGLE", "Qwen2ForCausalLM"),
    "LlamaForCausalLMEagle3": ("EAGLE3", "LlamaForCausalLM"),
    "Eagle3LlamaForCausalLM": ("EAGLE3", "LlamaForCausalLM"),
    "Eagle3LLamaforCausalLM": ("EAGLE3", "LlamaForCausalLM"),  # AngelSlim's first heads
    "Qwen3ForCausalLMEagle3": ("EAGLE3", "Qwen3ForCausalLM"),
    "MiMoMTP": ("MTP", "MiMoForCausalLM"),
    "MiMoForCausalLM": ("MTP", "MiMoForCausalLM"),
}
# EAGLE's own heads carry their target's architecture; what they are, the flag says.
_PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_SPECULATORS: dict[str, HeadAlgorithm] = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "peagle": "PEAGLE",
}
_SPECULATORS_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MASK_HIDDEN = "mask_hidden"  # the tensor that gives P-EAGLE away


def head_kind(
    raw: Mapping[str, Any],
    algorithm: HeadAlgorithm | None,
    where: str,
    tensors: Collection[str],
) -> tuple[HeadAlgorithm, str]:
    """Returns the head's algorithm and the architecture of its layer.

    Args:
        raw: Content of config.json.
        algorithm: Algorithm that is expected; None for any.
        where: Name of the file in errors.
        tensors: Names of the checkpoint's tensors.

    Raises:
        CheckpointError: This is no head.
    """
    if is_block_draft(raw):
        return read_block_options(raw, where, tensors)[0], "Qwen3ForCausalLM"
    found, architecture = _chain_kind(raw, algorithm, where)
    is_parallel = any(name.endswith(_MASK_HIDDEN) for name in tensors) or algorithm == "PEAGLE"
    if found == "EAGLE3" and is_parallel:
        found = "PEAGLE"
    return found, architecture


def _chain_kind(
    raw: Mapping[str, Any], algorithm: HeadAlgorithm | None, where: str
) -> tuple[HeadAlgorithm, str]:
    """Does the work of `head_kind` for heads other than block drafters, from config.json alone."""
    if kind := raw.get("speculators_model_type"):
        layer = raw.get("transformer_layer_config")
        model_type = layer.get("model_type") if isinstance(layer, Mapping) else None
        if str(kind) not in _SPECULATORS or str(model_type) not in _SPECULATORS_LAYERS:
            raise CheckpointError(
                f"{where}: a speculators model of type {kind!r} with {model_type!r} layers is not"
                " supported"
            )
        return _SPECULATORS[str(kind)], _SPECULATORS_LAYERS[str(model_type)]
    name = architecture_name(raw)
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if name in _PLAIN and algorithm in ("EAGLE", *EAGLE3_KINDS):
        # Only EAGLE-3 has a vocabulary of its own.
        has_own = raw.get("draft_vocab_size") is not None or algorithm in EAGLE3_KINDS
        return ("EAGLE3" if has_own else "EAGLE"), name
    raise CheckpointError(
        f"{where}: architectures: {name!r} is not a draft head; known: {', '.join(_ARCHITECTURES)}"
    )


def architecture_name(raw: Mapping[str, Any]) -> Any:
    """Returns the entry of `architectures`, or whatever stands there if it is not one name."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 else names
