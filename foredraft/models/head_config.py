"""What a draft head is, read from its config.json in any of the layouts that are published. Torch-free.

Known are EAGLE's own layout, SGLang's and SpecForge's (`eagle_config`), that of the speculators library (a nested
`transformer_layer_config`), and MiMo's MTP layers, which may lie in the target's own checkpoint.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from foredraft.errors import CheckpointError
from foredraft.models.config import ModelConfig
from foredraft.models.config_keys import REFUSED_KINDS
from foredraft.models.config_reader import read_json

HeadAlgorithm = Literal["EAGLE", "EAGLE3", "MTP"]

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
_SPECULATORS: dict[str, HeadAlgorithm] = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
_SPECULATORS_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head that `eagle.EagleHead`, `eagle3.Eagle3Head` or `mtp.MTPHead` can be.

    Attributes:
        algorithm: Which of them.
        layer: Sizes of its decoder layers; `num_layers` is their number (MTP: of modules), `vocab_size` the target's.
        target_hidden_size: Width of the target's hidden states.
        draft_vocab_size: Rows of its own LM head; None where config.json does not say.
        fc_bias: Whether the fusing projection has a bias; None where config.json does not say.
        qkv_bias: Whether queries, keys and values have one; None where config.json does not say.
        num_streams: EAGLE-3: residual streams that are fused; 0 for the state after the final norm.
        streams: EAGLE-3: target layers whose entering residual streams they are; None for the usual ones.
        fc_norm: EAGLE-3.1: each stream is normalised by itself.
        norm_before_fc: EAGLE-3.1: the streams side by side are normalised.
        norm_before_residual: The residual stream starts from the normalised features (speculators).
        norm_output: The hidden state passed on is the normalised one.
    """

    algorithm: HeadAlgorithm
    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int | None = None
    fc_bias: bool | None = None
    qkv_bias: bool | None = None
    num_streams: int = 0
    streams: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @classmethod
    def from_dir(
        cls, path: str | os.PathLike[str], algorithm: HeadAlgorithm | None = None
    ) -> "HeadConfig":
        """Reads config.json.

        Args:
            algorithm: What the head has to be; None where config.json alone must tell.

        Raises:
            CheckpointError: The file is missing or broken, or this is another kind of head or none.
        """
        file = Path(path) / "config.json"
        return cls.from_dict(read_json(file), algorithm, str(file))

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        algorithm: HeadAlgorithm | None = None,
        where: str = "config.json",
    ) -> "HeadConfig":
        """Reads the content of config.json; `where` names it in errors.

        Raises:
            CheckpointError: See `from_dir`.
        """
        found, architecture = _kind(raw, algorithm, where)
        if algorithm is not None and found != algorithm:
            raise CheckpointError(
                f"{where}: {_name(raw)!r} is a head for --speculative-algorithm {found}, "
                f"not {algorithm}"
            )
        if raw.get("layernorms"):
            raise CheckpointError(
                f"{where}: layernorms: EAGLE heads with additional norms are not supported"
            )
        inner = dict(raw.get("transformer_layer_config") or raw)
        inner["architectures"] = [architecture]
        # What a config.json that began as a copy of the target's says of the target alone.
        for key in ("num_nextn_predict_layers", *REFUSED_KINDS):
            inner.pop(key, None)
        if set(inner.get("layer_types") or ()) == {"full_attention"}:
            del inner["layer_types"]
        if found == "MTP":
            inner["num_hidden_layers"] = _count(raw, "num_nextn_predict_layers", 1, where)
            # A target's own entry: its layers' kinds say nothing about the modules.
            inner.pop("layer_types", None)
        layer = ModelConfig.from_dict(inner, where=where, is_whole_model=False)
        if layer.norm_offset or layer.sandwich_norms:
            raise CheckpointError(f"{where}: heads with {architecture} layers are not supported")
        # EAGLE's own key; Qwen2's layers have no other.
        qkv_bias = inner.get("qkv_bias")
        if qkv_bias is None and architecture != "Qwen2ForCausalLM":
            qkv_bias = inner.get("attention_bias")
        if qkv_bias is not None:
            layer = dataclasses.replace(layer, attention_bias=bool(qkv_bias))
        options = _Options(raw, where)
        if found != "EAGLE3":
            return cls(
                algorithm=found,
                layer=layer,
                target_hidden_size=layer.hidden_size,
                qkv_bias=qkv_bias,
                fc_bias=options.flag("bias", options.flag("fusion_bias", None)),
            )
        streams, num_streams = _streams(options, raw, where)
        return cls(
            algorithm=found,
            layer=layer,
            target_hidden_size=_count(raw, "target_hidden_size", layer.hidden_size, where),
            draft_vocab_size=_count(raw, "draft_vocab_size", 0, where) or None,
            fc_bias=options.flag("bias", None),
            qkv_bias=qkv_bias,
            num_streams=num_streams,
            streams=streams,
            fc_norm=bool(options.flag("fc_norm", options.flag("use_aux_norm", False))),
            norm_before_fc=bool(options.flag("norm_before_fc", False)),
            norm_before_residual=bool(options.flag("norm_before_residual", False)),
            norm_output=bool(options.flag("norm_output", False)),
        )

    @staticmethod
    def algorithm_of(path: str | os.PathLike[str], asked: HeadAlgorithm) -> HeadAlgorithm:
        """What a directory's head is for, where config.json tells; `asked` where it does not.

        Raises:
            CheckpointError: There is no head.
        """
        file = Path(path) / "config.json"
        return _kind(read_json(file), asked, str(file))[0]

    def captured_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Target layers whose entering residual stream the head reads; empty for the state after the final norm.

        The usual ones are 2, n / 2 and n - 3 of n layers.

        Raises:
            CheckpointError: The target has no such layers.
        """
        if not self.num_streams:
            return ()
        layers = self.streams
        if layers is None:
            layers = (2, num_target_layers // 2, num_target_layers - 3)
        if self.num_streams != len(layers):
            raise CheckpointError(
                f"num_aux_hidden_states is {self.num_streams}, but the layers are {list(layers)}"
            )
        if not all(0 <= layer <= num_target_layers for layer in layers):
            raise CheckpointError(
                f"eagle_aux_hidden_state_layer_ids: the head reads the streams entering layers {list(layers)}; "
                f"the target has {num_target_layers} layers"
            )
        return layers

    def with_biases(self, names: Collection[str]) -> "HeadConfig":
        """As config.json says and, where it does not, as the tensors of the head's checkpoint are.

        Args:
            names: Of the tensors.
        """
        has_bias = self.qkv_bias
        if has_bias is None:
            has_bias = "layers.0.self_attn.q_proj.bias" in names
        layer = dataclasses.replace(
            self.layer,
            attention_bias=has_bias,
            attention_output_bias=has_bias and "layers.0.self_attn.o_proj.bias" in names,
        )
        return dataclasses.replace(self, layer=layer)

    def check_target(self, target: ModelConfig) -> None:
        """Raises CheckpointError, naming the field, when the head was made for another target."""
        if self.target_hidden_size != target.hidden_size:
            field = "hidden_size" if self.algorithm != "EAGLE3" else "target_hidden_size"
            raise CheckpointError(
                f"{field}: the head's is {self.target_hidden_size}, the target's {target.hidden_size}"
            )
        if self.layer.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"vocab_size: the head's is {self.layer.vocab_size}, the target's {target.vocab_size}"
            )
        self.captured_layers(target.num_layers)


class _Options:
    """Keys that stand at the top or inside `eagle_config`."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        nested = raw.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{where}: eagle_config is not an object")
        self._raw, self._nested = raw, nested

    def get(self, key: str) -> Any:
        value = self._nested.get(key)
        return self._raw.get(key) if value is None else value

    def flag(self, key: str, default: bool | None) -> bool | None:
        value = self.get(key)
        return default if value is None else bool(value)


def _kind(
    raw: Mapping[str, Any], algorithm: HeadAlgorithm | None, where: str
) -> tuple[HeadAlgorithm, str]:
    """The head's algorithm and the architecture of its layer."""
    if kind := raw.get("speculators_model_type"):
        layer = raw.get("transformer_layer_config")
        model_type = layer.get("model_type") if isinstance(layer, Mapping) else None
        if kind not in _SPECULATORS or model_type not in _SPECULATORS_LAYERS:
            raise CheckpointError(
                f"{where}: a speculators model of type {kind!r} with {model_type!r} layers is not supported"
            )
        return _SPECULATORS[kind], _SPECULATORS_LAYERS[model_type]
    name = _name(raw)
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if name in _PLAIN and algorithm in ("EAGLE", "EAGLE3"):
        # Only EAGLE-3 has a vocabulary of its own.
        return ("EAGLE3" if raw.get("draft_vocab_size") is not None else algorithm), name
    raise CheckpointError(
        f"{where}: architectures: {name!r} is not a draft head; known: {', '.join(_ARCHITECTURES)}"
    )


def _name(raw: Mapping[str, Any]) -> Any:
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 else names


def _streams(
    options: _Options, raw: Mapping[str, Any], where: str
) -> tuple[tuple[int, ...] | None, int]:
    """Which residual streams are fused, and how many."""
    if options.flag("use_aux_hidden_state", True) is False:
        return None, 0
    ids = options.get("eagle_aux_hidden_state_layer_ids")
    streams = None
    if ids is not None and ids != []:  # Model Optimizer's heads leave the list empty
        if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
            raise CheckpointError(
                f"{where}: eagle_aux_hidden_state_layer_ids must be a list of integers, not {ids!r}"
            )
        # speculators names the layer that a stream enters, all others the layer that it leaves.
        shift = 0 if raw.get("speculators_model_type") else 1
        streams = tuple(layer + shift for layer in ids)
    given = options.get("num_aux_hidden_states")
    count = len(streams) if streams is not None else 3
    return streams, count if given is None else _count({"n": given}, "n", 0, where)


def _count(raw: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {key} must be a positive integer, not {value!r}")
    return value
