"""Multi-token prediction modules as MiMo has them (Xiaomi 2025, arXiv 2505.07608; DeepSeek-V3,
arXiv 2412.19437, section 2.2).
"""

import torch
from torch import nn

from draft_service.models.draft_head import LevelHead, Pass, SharedWeights, block_tensors
from foredraft.layers.linear import Linear
from foredraft.models.head_config import HeadConfig


class MTPModule(nn.Module):
    """The projections and norms of one module; its decoder layer is `layer`."""

    def __init__(self, head: "MTPHead", index: int) -> None:
        super().__init__()
        size = head.config.layer.hidden_size
        self.token_norm, self.hidden_norm = head.make_norm(size), head.make_norm(size)
        self.attention_norm, self.final_norm = head.make_norm(size), head.make_norm(size)
        self.projection = Linear(2 * size, size, False, head.dtype, head.device)
        self.layer = head.make_layer(index, size)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, run: Pass
    ) -> torch.Tensor:
        """Computes x = input_proj([norm(feature); norm(embedding)]), a decoder layer, the final
        norm.
        """
        # The embedding at position 0 is that of no token that follows another: the format zeroes
        # it.
        embeds = embeds * (positions != 0).unsqueeze(1)
        stream = self.projection(
            torch.cat((self.hidden_norm(features), self.token_norm(embeds)), -1)
        )
        x = self.attention_norm(stream)
        return self.layer(x, stream, run, True, self.final_norm)[1]


class MTPHead(LevelHead):
    """Applies one module repeatedly, or one module for each depth.

    The LM head reads a module's output after its final norm. The output is also the next feature:
    for the next token (one module), or for the same position in the next module, which pairs it
    with the following token (several modules).
    """

    def __init__(
        self,
        config: HeadConfig,
        shared: SharedWeights,
        num_target_layers: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(config, shared, num_target_layers, dtype, device)
        self._modules_by_depth = [
            MTPModule(self, index) for index in range(config.layer.num_layers)
        ]
        self.mtp_layers = nn.ModuleList(self._modules_by_depth)

    @property
    def num_modules(self) -> int:
        """See LevelHead."""
        return len(self._modules_by_depth)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See LevelHead."""
        found: dict[str, torch.Tensor] = {}
        for index, module in enumerate(self._modules_by_depth):
            prefix = f"mtp_layers.{index}."
            found |= block_tensors(prefix, module.layer.attention, module.layer.mlp)
            found |= {
                f"{prefix}token_layernorm.weight": module.token_norm.weight,
                f"{prefix}hidden_layernorm.weight": module.hidden_norm.weight,
                f"{prefix}input_proj.weight": module.projection.weight,
                f"{prefix}input_layernorm.weight": module.attention_norm.weight,
                f"{prefix}post_attention_layernorm.weight": module.layer.mlp_norm.weight,
                f"{prefix}final_layernorm.weight": module.final_norm.weight,
            }
        return found

    def compute(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        sources: torch.Tensor | None,
        run: Pass,
        module: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LevelHead."""
        embeds, features = self.read(tokens, features, sources)
        out = self._modules_by_depth[module](embeds, features, run.batch.positions, run)
        return out, out
