"""Creates attention and MLP of a layer from a model's configuration."""

from collections.abc import Callable, Iterable

import torch

from foredraft.errors import CheckpointError
from foredraft.layers.attention import SelfAttention
from foredraft.layers.embedding import VocabularyShare
from foredraft.layers.linear import LinearMethod, MethodChoice
from foredraft.layers.mlp import GatedMLP
from foredraft.layers.parameters import Target
from foredraft.models.config import ModelConfig
from foredraft.parallel.group import SINGLE, Group


def layer_parts(
    config: ModelConfig,
    layer: int,
    input_size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = SINGLE,
    forms: Callable[[str], MethodChoice] | None = None,
) -> tuple[SelfAttention, GatedMLP]:
    """Creates both parts of one layer, for weights still to come.

    Args:
        layer: Number of the layer; windows differ between layers.
        input_size: Width of what attention reads; a head's may read more than the hidden size.
        forms: Selects the form of weights by the part of the layer that they are in, "self_attn."
            or "mlp."; None for what `config.quantization` says.
    """
    forms = forms or (lambda part: _methods(config, f"model.layers.{layer}.{part}"))
    has_offset = config.norm_offset != 0.0
    attention = SelfAttention(
        input_size=input_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=config.windows[layer],
        scale=config.attention_scale,
        bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        qk_norm=(config.rms_norm_eps, has_offset) if config.qk_norm else None,
        dtype=dtype,
        device=device,
        group=group,
        methods=forms("self_attn."),
    )
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        config.activation,
        config.mlp_bias,
        dtype,
        device,
        group,
        forms("mlp."),
    )
    return attention, mlp


def _methods(config: ModelConfig, prefix: str) -> MethodChoice:
    """Selects the form of weights whose names in a checkpoint begin with `prefix`."""
    quantization = config.quantization

    def choose(names: Iterable[str]) -> LinearMethod | None:
        if quantization is None:
            return None
        full = [prefix + name for name in names]
        if quantization.types:
            from foredraft.layers.gguf import BlocksMethod

            schemes = [quantization.scheme_of(name) for name in full]
            return BlocksMethod(schemes) if any(schemes) else None
        skipped = [name for name in full if quantization.skips(name)]
        if len(skipped) == len(full):
            return None
        if skipped:
            raise CheckpointError(
                f"quantization_config leaves {', '.join(skipped)} out and quantises the rest of "
                f"{', '.join(full)}, which are computed together: mixed schemes are not supported"
            )
        if quantization.is_on_load:
            from foredraft.layers.quantizing import QuantizingMethod

            return QuantizingMethod(quantization.scheme)
        from foredraft.layers.quantized import StoredMethod

        return StoredMethod(quantization.scheme)

    return choose


def vocabulary_method(
    config: ModelConfig, name: str, device: torch.device, group: Group
) -> LinearMethod | None:
    """Returns a method for an embedding or LM head that stays quantised; None for plain ones, and
    for those that `vocabulary_targets` expands.

    Args:
        name: Name of the matrix in a checkpoint.

    Raises:
        CheckpointError: Ranks would have to share it.
    """
    quantization = config.quantization
    if quantization is None or (scheme := quantization.scheme_of(name)) is None:
        return None
    if quantization.types:
        if device.type != "cpu" or group.size > 1:
            return None
        from foredraft.layers.gguf import BlocksMethod

        return BlocksMethod([scheme])
    if group.size > 1:
        raise CheckpointError(
            "a quantised embedding and LM head are not shared by ranks: give"
            " --tensor-parallel-size 1"
        )
    from foredraft.layers.quantized import ExpandedMethod, StoredMethod

    method = StoredMethod if device.type == "cpu" else ExpandedMethod
    return method(scheme)


def vocabulary_targets(
    config: ModelConfig, name: str, share: VocabularyShare, weight: torch.Tensor
) -> dict[str, Target]:
    """Returns the memory that the tensors of an embedding or LM head of plain weights fill.

    Args:
        name: Name of the matrix in a checkpoint.
        share: Rows of this rank.
        weight: [rows, hidden].
    """
    scheme = config.quantization.scheme_of(name) if config.quantization is not None else None
    if scheme is None:
        return {f"{name}.weight": share.target(weight)}
    from foredraft.layers.gguf import expanded_targets

    own = expanded_targets(scheme, share.total, share.first, weight[: share.count])
    return {f"{name}.{suffix}": target for suffix, target in own.items()}
