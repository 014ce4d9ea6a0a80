"""Reads a draft head's config.json in any of the published layouts. Torch-free.

The layouts are EAGLE's own, SGLang's and SpecForge's (`eagle_config`), the speculators library's (a
nested `transformer_layer_config`) and the block drafters' (`block_config`). MiMo's MTP layers may
lie in the target's own checkpoint.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foredraft.errors import CheckpointError
from foredraft.models.block_config import (
    BlockOptions,
    read_block_options,
    read_target_layers,
    stored_names,
)
from foredraft.models.config import ModelConfig, with_modelopts_file
from foredraft.models.config_keys import REFUSED_KINDS
from foredraft.models.config_reader import MAX_LAYERS, Reader, read_json
from foredraft.models.head_kinds import (
    BLOCK_KINDS,
    EAGLE3_KINDS,
    HeadAlgorithm,
    architecture_name,
    head_kind,
)
from foredraft.models.quantization_config import QUANTIZATION_KEYS

# Last parts of the names of tensors that do not belong to a quantised matrix.
_PLAIN_TENSORS = frozenset({"weight", "bias", "d2t", "t2d", "mask_hidden", "inv_freq"})
_MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
DEFAULT_PARALLEL_TOKENS = 7


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Configuration of a head that one of the classes in `draft_service.models` computes.

    Attributes:
        algorithm: Algorithm of the head.
        layer: Sizes of its decoder layers; `num_layers` is their number (for MTP of modules),
            `vocab_size` the target's.
        target_hidden_size: Width of the target's hidden states.
        draft_vocab_size: Number of rows of its own LM head; None where config.json does not say.
        fc_bias: Whether the fusing projection has a bias; None where config.json does not say.
        qkv_bias: Whether queries, keys and values have a bias; None where config.json does not say.
        num_streams: EAGLE-3: number of residual streams that are fused; 0 for the state after the
            final norm.
        streams: EAGLE-3: target layers whose inputs (residual streams) are fused; None for the
            usual ones.
        fc_norm: EAGLE-3.1: whether each stream is normalised by itself.
        norm_before_fc: EAGLE-3.1: whether the streams side by side are normalised.
        norm_before_residual: Whether the residual stream starts from the normalised features
            (speculators).
        norm_output: Whether the hidden state passed on is the normalised one.
        block: DFlash and DSpark: options of a block; None for all others.
        mask_token_id: P-EAGLE: token that stands for those still to be drafted.
        num_parallel: P-EAGLE: number of tokens that one forward usually proposes.
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
    block: BlockOptions | None = None
    mask_token_id: int | None = None
    num_parallel: int = DEFAULT_PARALLEL_TOKENS

    @classmethod
    def from_dir(
        cls, path: str | os.PathLike[str], algorithm: HeadAlgorithm | None = None
    ) -> "HeadConfig":
        """Reads config.json.

        Args:
            algorithm: Algorithm that the head must implement; None where config.json alone decides.

        Raises:
            CheckpointError: The file is missing or broken, or this is another kind of head or none.
        """
        directory, file = Path(path), Path(path) / "config.json"
        raw = with_modelopts_file(read_json(file), directory)
        return cls.from_dict(raw, algorithm, str(file), stored_names(directory))

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        algorithm: HeadAlgorithm | None = None,
        where: str = "config.json",
        tensors: Collection[str] = (),
    ) -> "HeadConfig":
        """Reads the content of config.json; `where` names it in errors.

        Args:
            tensors: Names of the checkpoint's tensors, which decide what config.json leaves open.

        Raises:
            CheckpointError: See `from_dir`.
        """
        found, architecture = head_kind(raw, algorithm, where, tensors)
        if algorithm is not None and found != algorithm:
            raise CheckpointError(
                f"{where}: {architecture_name(raw)!r} is a head for --speculative-algorithm"
                f" {found}, not {algorithm}"
            )
        if raw.get("layernorms"):
            raise CheckpointError(
                f"{where}: layernorms: EAGLE heads with additional norms are not supported"
            )
        layer, qkv_bias = _layers(raw, found, architecture, tensors, where)
        options = _Options(raw, where)
        if found in BLOCK_KINDS:
            return cls._of_block(raw, found, layer, tensors, where)
        if found not in EAGLE3_KINDS:
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
            target_hidden_size=Reader(raw, where).size("target_hidden_size", layer.hidden_size),
            draft_vocab_size=Reader(raw, where).size("draft_vocab_size", 0) or None,
            fc_bias=options.flag("bias", None),
            qkv_bias=qkv_bias,
            num_streams=num_streams,
            streams=streams,
            fc_norm=bool(options.flag("fc_norm", options.flag("use_aux_norm", False))),
            norm_before_fc=bool(options.flag("norm_before_fc", False)),
            norm_before_residual=bool(options.flag("norm_before_residual", False)),
            norm_output=bool(options.flag("norm_output", False)),
            mask_token_id=_mask_token(options, layer, where) if found == "PEAGLE" else None,
            num_parallel=_num_parallel(raw, where),
        )

    @classmethod
    def _of_block(
        cls,
        raw: Mapping[str, Any],
        found: HeadAlgorithm,
        layer: ModelConfig,
        tensors: Collection[str],
        where: str,
    ) -> "HeadConfig":
        """Reads the configuration of a block drafter, whose layers are read already."""
        block = read_block_options(raw, where, tensors)[1]
        if block.mask_token_id >= layer.vocab_size:
            raise CheckpointError(
                f"{where}: mask_token_id {block.mask_token_id} is not below vocab_size"
                f" {layer.vocab_size}"
            )
        streams = read_target_layers(raw, where)
        return cls(
            algorithm=found,
            layer=layer,
            target_hidden_size=Reader(raw, where).size("target_hidden_size", layer.hidden_size),
            draft_vocab_size=Reader(raw, where).size("draft_vocab_size", 0) or None,
            num_streams=len(streams) if streams else 0,
            streams=streams,
            block=block,
        )

    @staticmethod
    def algorithm_of(path: str | os.PathLike[str], asked: HeadAlgorithm) -> HeadAlgorithm:
        """Returns the algorithm of a directory's head; `asked` where config.json does not say.

        Raises:
            CheckpointError: There is no head.
        """
        file = Path(path) / "config.json"
        return head_kind(read_json(file), asked, str(file), stored_names(Path(path)))[0]

    @property
    def num_drafted(self) -> int | None:
        """Number of tokens that one forward proposes; None for a head that is run again for each
        level.
        """
        if self.block is not None:
            return self.block.num_drafted
        return self.num_parallel if self.algorithm == "PEAGLE" else None

    def captured_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Returns the target layers whose input (the residual stream) the head reads; empty for
        the state after the final norm.

        The usual ones are 2, n / 2 and n - 3 of n layers.

        Raises:
            CheckpointError: The target has no such layers.
        """
        if self.block is not None and self.streams is None:
            return self.block.usual_layers(num_target_layers, self.layer.num_layers)
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
                f"{self._layers_key}: the head reads the streams entering layers {list(layers)}; "
                f"the target has {num_target_layers} layers"
            )
        return layers

    @property
    def _layers_key(self) -> str:
        """Key of config.json that names the target's layers."""
        if self.block is None:
            return "eagle_aux_hidden_state_layer_ids"
        is_speculators = self.block.default_layers == "speculators"
        return "aux_hidden_state_layer_ids" if is_speculators else "target_layer_ids"

    def with_biases(self, names: Collection[str]) -> "HeadConfig":
        """Returns the configuration with its biases known: from config.json or, where it does
        not say, from the head's tensors.

        Args:
            names: Names of the tensors.
        """
        has_bias = self.qkv_bias
        if has_bias is None:
            prefix = "layers.0.self_attn."
            has_bias = any(f"{prefix}{part}_proj.bias" in names for part in ("q", "qkv"))
        layer = dataclasses.replace(
            self.layer,
            attention_bias=has_bias,
            attention_output_bias=has_bias and "layers.0.self_attn.o_proj.bias" in names,
        )
        return dataclasses.replace(self, layer=layer)

    def check_target(self, target: ModelConfig) -> None:
        """Raises CheckpointError, naming the field, when the head was made for another target."""
        if self.target_hidden_size != target.hidden_size:
            has_own = self.algorithm in EAGLE3_KINDS or self.block is not None
            field = "target_hidden_size" if has_own else "hidden_size"
            raise CheckpointError(
                f"{field}: the head's is {self.target_hidden_size}, the target's"
                f" {target.hidden_size}"
            )
        if self.layer.vocab_size != target.vocab_size:
            raise CheckpointError(
                f"vocab_size: the head's is {self.layer.vocab_size}, the target's"
                f" {target.vocab_size}"
            )
        if self.block is not None and self.block.num_target_layers not in (None, target.num_layers):
            raise CheckpointError(
                f"num_target_layers: the draft was made for {self.block.num_target_layers} layers, "
                f"the target has {target.num_layers}"
            )
        self.captured_layers(target.num_layers)


def _layers(
    raw: Mapping[str, Any],
    found: HeadAlgorithm,
    architecture: str,
    tensors: Collection[str],
    where: str,
) -> tuple[ModelConfig, bool | None]:
    """Returns the sizes of a head's decoder layers, and `HeadConfig.qkv_bias`."""
    inner = dict(Reader(raw, where).mapping("transformer_layer_config") or raw)
    inner["architectures"] = [architecture]
    if found in BLOCK_KINDS:
        _settle_block_layers(inner, raw, where)
    # Keys of the target, left in a config.json that began as a copy of the target's.
    for key in ("num_nextn_predict_layers", *REFUSED_KINDS):
        inner.pop(key, None)
    for key in QUANTIZATION_KEYS:
        # Tools write it beside speculators' nested configuration of the layers.
        inner[key] = raw.get(key) or inner.get(key)
        if _are_plain(tensors, found):
            del inner[key]
    types = inner.get("layer_types")
    if isinstance(types, list) and types and all(kind == "full_attention" for kind in types):
        del inner["layer_types"]
    if found == "MTP":
        inner["num_hidden_layers"] = Reader(raw, where).size(
            "num_nextn_predict_layers", 1, MAX_LAYERS
        )
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
    return layer, qkv_bias


def _are_plain(tensors: Collection[str], algorithm: HeadAlgorithm) -> bool:
    """Returns whether a head has plain tensors alone, whatever a config.json says that began as a
    copy of its target's.
    """
    own = [name for name in tensors if algorithm != "MTP" or "mtp_layers." in name]
    return bool(own) and all(name.rpartition(".")[2] in _PLAIN_TENSORS for name in own)


class _Options:
    """Reads keys that stand at the top or inside `eagle_config`."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        nested = raw.get("eagle_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{where}: eagle_config is not an object")
        self._raw, self._nested, self._where = raw, nested, where

    def get(self, key: str) -> Any:
        value = self._nested.get(key)
        return self._raw.get(key) if value is None else value

    def flag(self, key: str, default: bool | None) -> bool | None:
        value = self.get(key)
        return default if value is None else Reader({key: value}, self._where).flag(key, False)


def _streams(
    options: _Options, raw: Mapping[str, Any], where: str
) -> tuple[tuple[int, ...] | None, int]:
    """Returns which residual streams are fused, and their number."""
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
    count = len(streams) if streams is not None else 3
    key = "num_aux_hidden_states"
    return streams, Reader({key: options.get(key)}, where).size(key, count)


def _settle_block_layers(inner: dict[str, Any], raw: Mapping[str, Any], where: str) -> None:
    """Converts the keys of a block drafter's layers, Qwen3's whatever their target, to the form
    that is read.
    """
    reader = Reader(inner, where)
    if inner.get("model_type") not in (None, "qwen3") and not inner.get("head_dim"):
        inner["head_dim"] = reader.size("hidden_size") // reader.size("num_attention_heads")
    nested = raw.get("dflash_config") or {}
    num_layers = reader.size("num_hidden_layers", most=MAX_LAYERS)
    types = inner.get("layer_types")
    if nested.get("use_swa"):
        inner["sliding_window"] = nested.get("swa_window_size")
        types = types or ["sliding_attention"] * num_layers
    # Without a list all layers are full, whatever else was copied from the target's config.json.
    inner["layer_types"] = types or ["full_attention"] * num_layers
    inner["use_sliding_window"] = isinstance(types, list) and "sliding_attention" in types


def _mask_token(options: _Options, layer: ModelConfig, where: str) -> int:
    for key in _MASK_TOKEN_KEYS:
        value = options.get(key)
        if value is not None:
            if type(value) is not int or not 0 <= value < layer.vocab_size:
                raise CheckpointError(
                    f"{where}: {key} must be a token id below {layer.vocab_size}, not {value!r}"
                )
            return value
    raise CheckpointError(f"{where}: mask_token_id is missing")


def _num_parallel(raw: Mapping[str, Any], where: str) -> int:
    """Returns the number of tokens of one proposal by `speculators_config`."""
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, Mapping) else None
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], Mapping):
        return DEFAULT_PARALLEL_TOKENS
    return Reader(methods[0], where).size("speculative_tokens", DEFAULT_PARALLEL_TOKENS)
