"""Memory for weights, and the way of a checkpoint's tensors into it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Target:
    """The memory that one tensor of a checkpoint fills, and the part of the tensor that it
    keeps.

    Attributes:
        memory: The memory, of the part's shape; any device and type. Without elements where another
            rank keeps the tensor.
        shape: Shape that the checkpoint's tensor must have.
        dim: Dimension in which a part is cut out.
        first: Index in that dimension at which the part begins.
        is_flat: Dimensions of one may be left out or added.
        is_optional: The checkpoint may lack the tensor.
        on_filled: Called when the memory has been filled, after which the loader reads it no more.
    """

    memory: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    first: int = 0
    is_flat: bool = False
    is_optional: bool = False
    on_filled: Callable[[], None] | None = None

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Returns whether a tensor of this shape fits."""
        if not self.is_flat:
            return shape == self.shape
        return [size for size in shape if size != 1] == [size for size in self.shape if size != 1]

    @classmethod
    def whole(cls, memory: torch.Tensor) -> "Target":
        """Creates a target that keeps the whole tensor."""
        return cls(memory, tuple(memory.shape))


def new_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Allocates a weight that a loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def frozen_parameter(tensor: torch.Tensor) -> nn.Parameter:
    """Returns a contiguous weight of these values, which is not trained."""
    return nn.Parameter(tensor.contiguous(), requires_grad=False)
