"""A draft's projection of the target's hidden states to one row of features for each token.

The draft computes it, or the verifier with the draft's weights, so that fewer numbers travel for
each token.
"""

import torch
from torch import nn

from foredraft.layers.linear import Linear, LinearMethod
from foredraft.layers.norm import RMSNorm
from foredraft.types import FusionShape


class Fusion(nn.Module):
    """Computes norm(W [norm of each stream] + b), with the parts that the shape names.

    Args:
        method: Keeps W; None for plain weights.

    Attributes:
        shape: Shape of the projection.
    """

    def __init__(
        self,
        shape: FusionShape,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        stream = shape.num_inputs // max(1, shape.num_stream_norms)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, shape.eps, False, dtype, device)

        self.projection: Linear | None = None
        if shape.has_projection:
            sizes = shape.num_inputs, shape.num_outputs
            self.projection = Linear(*sizes, shape.has_bias, dtype, device, method=method)
        self.stream_norms = nn.ModuleList([norm(stream) for _ in range(shape.num_stream_norms)])
        self.input_norm = norm(shape.num_inputs) if shape.normalizes_input else None
        self.output_norm = norm(shape.num_outputs) if shape.normalizes_output else None

    @property
    def is_plain(self) -> bool:
        """Whether there is a projection, and its weights are plain."""
        if self.projection is None:
            return False
        weight = self.projection.weight
        return weight.is_floating_point() and weight.element_size() > 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the weights by name; the projection's must be plain."""
        found: dict[str, torch.Tensor] = {}
        if self.projection is not None:
            found["weight"] = self.projection.weight
            if self.projection.bias is not None:
                found["bias"] = self.projection.bias
        return found | self.norms()

    def norms(self) -> dict[str, torch.Tensor]:
        """Returns the norms' weights by name."""
        found: dict[str, torch.Tensor] = {}
        for index, norm in enumerate(self.stream_norms):
            assert isinstance(norm, RMSNorm)
            found[f"stream_norm.{index}"] = norm.weight
        for name, whole in (("input_norm", self.input_norm), ("output_norm", self.output_norm)):
            if whole is not None:
                found[name] = whole.weight
        return found

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Projects [n, num_inputs] -> [n, num_outputs]."""
        if self.stream_norms:
            streams = rows.split(rows.shape[-1] // len(self.stream_norms), -1)
            pairs = zip(self.stream_norms, streams, strict=True)
            rows = torch.cat([norm(stream) for norm, stream in pairs], -1)
        if self.input_norm is not None:
            rows = self.input_norm(rows)
        if self.projection is not None:
            rows = self.projection(rows)
        return rows if self.output_norm is None else self.output_norm(rows)
