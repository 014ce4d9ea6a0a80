"""EAGLE-1 and EAGLE-2 heads: decoder layers over fused embedding and feature.

By Li et al. 2024 (arXiv 2401.15077 and 2406.16858).
"""

import torch
from torch import nn

from draft_service.models.draft_head import HeadSpec, LevelHead, Pass
from foredraft.layers.parameters import Target


class EagleHead(LevelHead):
    """x = fc([embedding; feature]), then decoder layers without a final norm.

    The first decoder layer has no norm before attention. The output predicts the target's own state
    after its final norm: it is the next feature, and the target's LM head reads it.

    Args:
        spec: See `DraftHead`.
        fc_bias: Whether fc has a bias.
    """

    def __init__(self, spec: HeadSpec, fc_bias: bool) -> None:
        super().__init__(spec)
        config = spec.config
        size = config.layer.hidden_size
        self.fc = self.make_linear("fc", 2 * size, size, fc_bias)
        self._layers = [self.make_layer(index, size) for index in range(config.layer.num_layers)]
        self._norms = [self.make_norm(size) for _ in self._layers[1:]]
        self.layers, self.norms = nn.ModuleList(self._layers), nn.ModuleList(self._norms)

    def targets(self) -> dict[str, Target]:
        """See DraftHead."""
        found = self.fc.targets("fc")
        for index, layer in enumerate(self._layers):
            found |= self.layer_targets(f"layers.{index}.", layer)
        for index, norm in enumerate(self._norms, 1):
            found[f"layers.{index}.input_layernorm.weight"] = Target.whole(norm.weight)
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
        stream = self.fc(torch.cat((embeds, features), -1))
        x = stream
        norms = [*self._norms, None]
        for layer, next_norm in zip(self._layers, norms, strict=True):
            stream, x = layer(x, stream, run, next_norm is None, next_norm)
        return stream, stream
