"""Multi-token prediction modules as MiMo has them (Xiaomi 2025, arXiv 2505.07608; DeepSeek-V3,
arXiv 2412.19437, section 2.2).
"""

import torch
from torch import nn

from draft_service.models.draft_head import HeadSpec, LevelHead, Pass
from foredraft.layers.parameters import Target

PREFIX = "mtp_layers."


class MTPModule(nn.Module):
    """The projections and norms of one module; its decoder layer is `layer`."""

    def __init__(self, head: "MTPHead", index: int) -> None:
        super().__init__()
        size = head.config.layer.hidden_size
        self.token_norm, self.hidden_norm = head.make_norm(size), head.make_norm(size)
        self.attention_norm, self.final_norm = head.make_norm(size), head.make_norm(size)
        name = f"{PREFIX}{index}.input_proj"
        self.projection = head.make_linear(name, 2 * size, size, False)
        self.layer = head.make_layer(index, size, PREFIX)

    def forward(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, run: Pass
    ) -> torch.Tensor:
        """Computes x = input_proj([norm(feature); norm(embedding)]), a decoder layer, the final
        norm.
        """
        # The token at position 0 follows no other, so the format zeroes its embedding.
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

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        config = spec.config
        self._modules_by_depth = [
            MTPModule(self, index) for index in range(config.layer.num_layers)
        ]
        self.mtp_layers = nn.ModuleList(self._modules_by_depth)

    @property
    def num_modules(self) -> int:
        """See LevelHead."""
        return len(self._modules_by_depth)

    def targets(self) -> dict[str, Target]:
        """See DraftHead."""
        found: dict[str, Target] = {}
        for index, module in enumerate(self._modules_by_depth):
            prefix = f"{PREFIX}{index}."
            found |= self.layer_targets(prefix, module.layer)
            found |= module.projection.targets(f"{prefix}input_proj")
            norms = {
                "token_layernorm": module.token_norm,
                "hidden_layernorm": module.hidden_norm,
                "input_layernorm": module.attention_norm,
                "final_layernorm": module.final_norm,
            }
            for name, norm in norms.items():
                found[f"{prefix}{name}.weight"] = Target.whole(norm.weight)
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
