"""Memory for weights, and how a checkpoint's tensors get there."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Target:
    """The memory that one tensor of a checkpoint fills, and which part of the tensor it keeps.

    Attributes:
        memory: The memory, of the part's shape; any device and type. Without elements where another rank keeps the tensor.
        shape: Shape that the checkpoint's tensor must have.
        dim: Dimension in which a part is cut out.
        first: Index in that dimension at which the part begins.
    """

    memory: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0

    @classmethod
    def whole(cls, memory: torch.Tensor) -> "Target":
        """A target that keeps the whole tensor."""
        return cls(memory, tuple(memory.shape))


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory for a weight that a loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
