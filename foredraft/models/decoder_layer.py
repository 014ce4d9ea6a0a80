"""A layer of a decoder, and the rows that it computes together."""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import nn

from foredraft.attention.base import AttentionBackend, Batch, WantedRows
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.linear import Linear
from foredraft.layers.norm import RMSNorm
from foredraft.layers.normed import Normed
from foredraft.layers.parameters import Target
from foredraft.models.config import ModelConfig
from foredraft.models.layer_parts import layer_parts
from foredraft.parallel.group import Group, SumGroup

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Describes rows of a forward that are computed together.

    Attributes:
        first: Index of the first row in the forward.
        batch: The rows.
        kv: Cache that their keys and values go to.
        attention: Attention backend.
        plan: The backend's plan of the rows.
        group: Ranks that compute these rows together.
        wanted: Rows that the last layer returns; None for all.
    """

    first: int
    batch: Batch
    kv: PagedKV
    attention: AttentionBackend
    plan: object
    group: SumGroup
    wanted: WantedRows | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the part's rows of a tensor [num_rows, ...]."""
        return x[self.first : self.first + self.batch.num_rows]


class DecoderLayer(nn.Module):
    """Attention and MLP around the residual stream; norms before each, and with `sandwich_norms`
    after each too.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
    ) -> None:
        super().__init__()
        self._layer = layer
        offset = config.norm_offset != 0.0

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, offset, dtype, device)

        self.attention, self.mlp = layer_parts(
            config, layer, config.hidden_size, dtype, device, group
        )
        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.attention_post_norm = norm() if config.sandwich_norms else None
        self.mlp_post_norm = norm() if config.sandwich_norms else None

    def forward(
        self,
        x: Normed,
        stream: torch.Tensor,
        angles: Angles,
        part: Part,
        next_norm: RMSNorm,
        next_reader: Linear | None,
        copy: torch.Tensor | None,
        wanted: WantedRows | None = None,
    ) -> Generator[None, None, Normed]:
        """Computes the next layer's input [num_rows, hidden_size], or of the wanted rows, in two
        steps: each ends when it has begun a sum over the ranks.

        Adding to the stream and its next norm are one pass.

        Args:
            x: [num_rows, hidden_size], the stream after `attention_norm`.
            stream: [num_rows, hidden_size], added to in place unless some rows are wanted.
            part: What is computed.
            next_norm: Norm that the stream gets after this layer.
            next_reader: Layer that reads the result first; None for none that gains from it.
            copy: Second place for the stream after this layer, or None.
            wanted: Rows to return; None for all. Of the others only keys and values are computed.
        """
        group = part.group
        own = angles, self._layer, part.batch, part.kv, part.attention, part.plan
        # Attention's result is let go before the MLP, which may use its memory.
        delta = self.attention(x.rows, *own, later=True, rounded=x.rounded, wanted=wanted)
        delta = group.begin_sum(delta)
        if wanted is not None:
            stream = stream[wanted.index]
        yield
        post = self.attention_post_norm
        x = self.mlp_norm.add(stream, delta, post, None, group, self.mlp.gate_up)
        del delta
        delta = group.begin_sum(self.mlp(x.rows, later=True, rounded=x.rounded))
        yield
        return next_norm.add(stream, delta, self.mlp_post_norm, copy, group, next_reader)

    def targets(self, prefix: str) -> dict[str, Target]:
        """Returns the memory of the layer's weights by tensor name; names begin with `prefix`."""
        found = self.attention.targets(f"{prefix}self_attn.") | self.mlp.targets(f"{prefix}mlp.")
        norms = {"input_layernorm": self.attention_norm}
        if self.attention_post_norm is not None and self.mlp_post_norm is not None:
            norms["post_attention_layernorm"] = self.attention_post_norm
            norms["pre_feedforward_layernorm"] = self.mlp_norm
            norms["post_feedforward_layernorm"] = self.mlp_post_norm
        else:
            norms["post_attention_layernorm"] = self.mlp_norm
        for name, norm in norms.items():
            found[f"{prefix}{name}.weight"] = Target.whole(norm.weight)
        return found
