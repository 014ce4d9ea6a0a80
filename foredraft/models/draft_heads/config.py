"""What a draft head is, read from its checkpoint's config.json or, for MTP layers, from the target's. Torch-free."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.models.config import ModelConfig

# A head's decoder layer is that of this architecture.
_LAYERS = {
    "LlamaForCausalLMEagle": "LlamaForCausalLM",
    "Qwen2ForCausalLMEagle": "Qwen2ForCausalLM",
    "LlamaForCausalLMEagle3": "LlamaForCausalLM",
    "MiMoMTP": "Qwen2ForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
}
_KINDS = {
    "EAGLE": ("LlamaForCausalLMEagle", "Qwen2ForCausalLMEagle", "LlamaForCausalLM"),
    "EAGLE3": ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
    "MTP": ("MiMoMTP", "MiMoForCausalLM"),
}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A draft head.

    Attributes:
        algorithm: EAGLE (EAGLE-2's head), EAGLE3 or MTP.
        layer: Sizes of its decoder layers; `num_layers` is their number.
        target_hidden_size: Width of one of the target's hidden states.
        aux_layers: EAGLE-3: target layers whose entering residual streams are fused; empty for others.
        draft_vocab_size: Rows of an output matrix of its own; 0 where it uses the target's.
        fc_bias: Whether the fusing projection has a bias.
        norm_output: EAGLE-3.1: the feature handed on is the normed one.
    """

    algorithm: str
    layer: ModelConfig
    target_hidden_size: int
    aux_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    fc_bias: bool = False
    norm_output: bool = False

    @property
    def input_width(self) -> int:
        """Elements of a row of hidden states that the verifier sends."""
        return self.target_hidden_size * max(1, len(self.aux_layers))

    @classmethod
    def from_dir(cls, path: Path, algorithm: str, target: ModelConfig) -> "HeadConfig":
        """Reads a head's config.json.

        Raises:
            CheckpointError: It is missing, or not a head of that algorithm that fits the target; names the field.
        """
        file = path / "config.json"
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        architecture = (raw.get("architectures") or ["?"])[0]
        if architecture not in _KINDS[algorithm]:
            known = ", ".join(_KINDS[algorithm])
            raise CheckpointError(
                f"{file}: architectures is {architecture}; {algorithm} takes {known}"
            )
        if algorithm == "MTP" and raw.get("num_nextn_predict_layers", 0) != 1:
            raise CheckpointError(
                f"{file}: num_nextn_predict_layers is {raw.get('num_nextn_predict_layers', 0)}; "
                "one MTP layer is served"
            )
        shape = {**raw, "architectures": [_LAYERS.get(architecture, architecture)]}
        shape["tie_word_embeddings"] = False
        if algorithm == "MTP":
            shape["num_hidden_layers"] = 1
        layer = ModelConfig.from_dict(shape, where=str(file))
        if algorithm == "EAGLE3" and layer.num_layers != 1:
            raise CheckpointError(f"{file}: num_hidden_layers is {layer.num_layers}; 1 is served")
        target_hidden = raw.get("target_hidden_size") or target.hidden_size
        wanted = {
            "vocab_size": (layer.vocab_size, target.vocab_size),
            "target_hidden_size": (target_hidden, target.hidden_size),
            "hidden_size": (layer.hidden_size, target.hidden_size),
        }
        for field, (has, needs) in wanted.items():
            if has != needs:
                raise CheckpointError(f"{file}: {field} is {has}, the target's is {needs}")
        is_eagle3 = algorithm == "EAGLE3"
        return cls(
            algorithm=algorithm,
            layer=dataclasses.replace(layer, dtype=target.dtype),
            target_hidden_size=target_hidden,
            aux_layers=_aux_layers(raw, target.num_layers) if is_eagle3 else (),
            draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size if is_eagle3 else 0,
            fc_bias=bool(raw.get("bias", algorithm == "EAGLE")),
            norm_output=bool(raw.get("norm_output", False)),
        )


def _aux_layers(raw: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers whose entering streams are captured. A checkpoint lists outputs: layer i's enters layer i + 1."""
    eagle = raw.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    listed = raw.get(key) or eagle.get(key)
    if listed:
        layers = tuple(index + 1 for index in listed)
    else:
        layers = (2, num_layers // 2, max(num_layers - 3, 1))
    if any(not 0 <= layer <= num_layers for layer in layers):
        raise CheckpointError(f"{key} {listed} do not fit a target of {num_layers} layers")
    return layers
