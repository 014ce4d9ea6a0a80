"""EAGLE-3 heads: fused streams of three target layers, attention over [embedding; feature].

By Li et al. 2025 (arXiv 2503.01840).
"""

import torch
from torch import nn

from draft_service.models.draft_head import HeadSpec, LevelHead, Pass
from foredraft.layers.fusion import Fusion
from foredraft.layers.parameters import Target
from foredraft.types import FusionShape


class Eagle3Head(LevelHead):
    """A first layer that attends to [norm(embedding); norm(feature)], further usual layers, a
    final norm.

    The feature passed on is the residual stream before the final norm, or after it with
    `norm_output`.

    Args:
        spec: See `DraftHead`. The layout decides what config.json leaves open: whether fc has a
            bias or is there at all, whether the LM head is the head's own and how many rows it has,
            and how the norms of further layers are called.
    """

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__(spec)
        config, layout = spec.config, spec.layout
        dtype, device = spec.dtype, spec.device
        layer = config.layer
        size, width = layer.hidden_size, self.hidden_width
        bias = config.fc_bias if config.fc_bias is not None else "fc.bias" in layout
        is_stored = any(name.startswith("fc.") for name in layout)
        has_fc = config.num_streams > 0 or width != size or is_stored
        streams = max(1, config.num_streams) if config.fc_norm else 0
        shape = FusionShape(
            num_inputs=width,
            num_outputs=size,
            has_projection=has_fc,
            num_stream_norms=streams,
            normalizes_input=config.norm_before_fc,
            has_bias=bias,
            eps=layer.rms_norm_eps,
        )
        self.fusion = Fusion(shape, dtype, device, self._forms.of("")(["fc"]))
        self.embedding_norm = self.make_norm(size)
        self._layers = [
            self.make_layer(index, size if index else 2 * size) for index in range(layer.num_layers)
        ]
        self._norms = [self.make_norm(size) for _ in self._layers]
        self.layers, self.norms = nn.ModuleList(self._layers), nn.ModuleList(self._norms)
        # SGLang calls every layer's norm hidden_norm; speculators calls the first one so, and the
        # others input_layernorm.
        self._norm_names = ["layers.0.hidden_norm.weight"] + [
            f"layers.{index}.{name}.weight"
            for index in range(1, layer.num_layers)
            for name in ("input_layernorm", "hidden_norm")
            if (name == "hidden_norm") == (f"layers.{index}.hidden_norm.weight" in layout)
        ]
        self.norm = self.make_norm(size)
        self._own_lm_head = self.make_lm_head(is_tied=layer.tie_word_embeddings)

    def targets(self) -> dict[str, Target]:
        """See DraftHead."""
        assert self.fusion is not None
        found = self.fusion.projection.targets("fc") if self.fusion.projection is not None else {}
        norms: dict[str, torch.Tensor] = {
            "norm.weight": self.norm.weight,
            "layers.0.input_layernorm.weight": self.embedding_norm.weight,
        }
        for name, weight in self.fusion.norms().items():
            # Streams' norms are fc_norm.0 and so on.
            norms[f"{name.replace('stream_norm', 'fc_norm')}.weight"] = weight
        for index, layer in enumerate(self._layers):
            found |= self.layer_targets(f"layers.{index}.", layer)
            norms[self._norm_names[index]] = self._norms[index].weight
        found |= {name: Target.whole(weight) for name, weight in norms.items()}
        if self._own_lm_head:
            found["lm_head.weight"] = Target.whole(self.lm_head.weight)
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
        num_rows, size = len(tokens), features.shape[-1]
        x = torch.empty(num_rows, 2 * size, dtype=self._dtype, device=self._device)
        if self.embedding.is_plain:
            self.embedding_norm.of_rows(self.embedding.weight, tokens, x[:, :size])
        else:
            self.embedding_norm(self.embedding(tokens), x[:, :size])
        normed = x[:, size:]
        if sources is None:
            self._norms[0](features, normed)
        else:
            picked = features.new_empty(num_rows, size)
            self._norms[0].of_rows(features, sources, normed, picked)
            features = picked
        stream = normed if self.config.norm_before_residual else features
        norms = [*self._norms[1:], self.norm]
        for layer, next_norm in zip(self._layers, norms, strict=True):
            stream, x = layer(x, stream, run, layer is self._layers[-1], next_norm)
        out = x
        return out, out if self.config.norm_output else stream
