"""The gated feed-forward block."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers.linear import Linear, MethodChoice, plain_weights
from foredraft.layers.normed import RoundedRows
from foredraft.layers.parameters import Target
from foredraft.layers.row_kernels import kernels_for
from foredraft.parallel.group import SINGLE, Group

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """Computes down(activation(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202).

    Args:
        methods: Selects the form in which the weights of each matrix are kept.

    Attributes:
        gate_up: Projection whose outputs are the gate's, then those of the up projection.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = SINGLE,
        methods: MethodChoice = plain_weights,
    ) -> None:
        super().__init__()
        self._kind, self._activation = activation, ACTIVATIONS[activation]
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = Linear(
            hidden_size, halves, bias, dtype, device, "outputs", group, methods(halves)
        )
        down = {"down_proj": hidden_size}
        self.down = Linear(
            intermediate_size, down, bias, dtype, device, "inputs", group, methods(down)
        )
        self._size = self.down.num_inputs

    def targets(self, prefix: str) -> dict[str, Target]:
        """Returns the memory of the block's weights by tensor name; names begin with `prefix`."""
        return self.gate_up.targets(prefix) | self.down.targets(prefix)

    def forward(
        self, x: torch.Tensor, later: bool = False, rounded: RoundedRows | None = None
    ) -> torch.Tensor:
        """Computes the block, [num_rows, hidden] -> [num_rows, hidden].

        Args:
            later: Whether the result may be the parts of `Linear.deferred`.
            rounded: See `Linear.deferred`.
        """
        down = self.down.deferred if later else self.down
        inner = self.gate_up.gated(x, rounded) if self._kind == "silu" else None
        if inner is not None:
            return down(inner)
        both = self.gate_up(x) if rounded is None else self.gate_up.deferred(x, rounded)
        if (kernels := kernels_for(both)) is not None:
            return down(kernels.gated(both, self._kind))
        return down(self._activation(both[:, : self._size]).mul_(both[:, self._size :]))
