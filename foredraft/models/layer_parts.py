"""The attention and the MLP of a layer, as a model's configuration describes them."""

import torch

from foredraft.layers.attention import SelfAttention
from foredraft.layers.mlp import GatedMLP
from foredraft.models.config import ModelConfig
from foredraft.parallel.group import SINGLE, Group


def layer_parts(
    config: ModelConfig,
    layer: int,
    input_size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = SINGLE,
) -> tuple[SelfAttention, GatedMLP]:
    """Both parts of one layer, for weights still to come.

    Args:
        layer: Number of the layer, by which windows differ.
        input_size: Width of what attention reads; a head's may read more than the hidden size.
    """
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
    )
    mlp = GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        config.activation,
        config.mlp_bias,
        dtype,
        device,
        group,
    )
    return attention, mlp
