"""Linear layers: what they hold, how a checkpoint fills them, and how a group of ranks shares them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers import cpu_products, skinny_gemm
from foredraft.layers.parameters import Target, new_parameter
from foredraft.parallel.group import SINGLE, Group, share

Split = Literal["none", "outputs", "inputs"]


class LinearMethod(ABC):
    """How a `Linear` keeps its weights and multiplies with them. One object may serve many layers."""

    def create(self, linear: "Linear", dtype: torch.dtype, device: torch.device) -> None:
        """Gives the layer its parameters, still to be filled."""
        linear.weight = new_parameter((linear.num_outputs, linear.num_inputs), dtype, device)

    def targets(self, linear: "Linear", rows: slice, total: int, first: int) -> dict[str, Target]:
        """The memory that one matrix of the checkpoint fills, by the last part of its tensors' names.

        Args:
            rows: Outputs of the layer that are this matrix's.
            total: Number of outputs of the whole matrix, over all ranks.
            first: Output of the whole matrix with which the share of this rank begins.
        """
        weight = linear.weight[rows]
        if linear.split == "inputs":
            whole = linear.num_inputs * linear.group.size
            begin = linear.num_inputs * linear.group.rank
            return {"weight": Target(weight, (total, whole), 1, begin)}
        return {"weight": Target(weight, (total, linear.num_inputs), 0, first)}

    @abstractmethod
    def apply(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """x W^T + b: contiguous [num_rows, num_inputs] -> contiguous [num_rows, num_outputs]."""

    def apply_deferred(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """As `apply`; or, where that is faster, float32 [parts, num_rows, num_outputs], whose sum it is."""
        return self.apply(linear, x)

    def apply_gated(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor | None:
        """silu(first half of the outputs) * second half, where one kernel does both; else None."""
        return None


class Linear(nn.Module):
    """y = x W^T + b. W may be several matrices of a checkpoint, one below the other.

    Args:
        num_inputs: Width of x, over all ranks.
        parts: Number of outputs of each matrix, over all ranks, by its name in a checkpoint and in the order of y; a single
            number for a matrix without a name.
        bias: Whether there is b.
        split: What the ranks of the group share: `outputs` (each computes some of every part), `inputs` (each reads some of x,
            and the products are summed over the ranks), or `none` (each computes all).
        method: How the weights are kept; None for what is fastest for plain weights on the device.

    Attributes:
        weight: [num_outputs, num_inputs] of this rank, for plain weights.
        scales: A quantised method's factors, in a form of its own.
        num_inputs, num_outputs: Widths of this rank's share.
    """

    weight: nn.Parameter
    scales: torch.Tensor

    def __init__(
        self,
        num_inputs: int,
        parts: Mapping[str, int] | int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        split: Split = "none",
        group: Group = SINGLE,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        self.split, self.group = split, group
        self._parts = {"": parts} if isinstance(parts, int) else dict(parts)
        by_outputs = group if split == "outputs" else SINGLE
        self._shares = {
            name: share(size, by_outputs, f"outputs of {name or 'a matrix'}")
            for name, size in self._parts.items()
        }
        self.num_inputs = share(num_inputs, group if split == "inputs" else SINGLE, "inputs")
        self.num_outputs = sum(self._shares.values())
        # The sum over ranks must hold the bias once.
        keeps_bias = split != "inputs" or group.rank == 0
        self.bias = (
            new_parameter((self.num_outputs,), dtype, device) if bias and keeps_bias else None
        )
        self._elsewhere = torch.empty(0) if bias and not keeps_bias else None
        self._adds_up = split == "inputs" and group.size > 1
        self.method = method or plain_method(dtype, device)
        self.method.create(self, dtype, device)

    def targets(self, prefix: str) -> dict[str, Target]:
        """The memory that each of the layer's tensors in a checkpoint fills; their names begin with `prefix`."""
        found: dict[str, Target] = {}
        begin = 0
        for name, size in self._shares.items():
            rows, total = slice(begin, begin + size), self._parts[name]
            first = size * self.group.rank if self.split == "outputs" else 0
            own = self.method.targets(self, rows, total, first)
            found |= {f"{prefix}{name}.{suffix}": target for suffix, target in own.items()}
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = Target(self.bias[rows], (total,), 0, first)
            elif self._elsewhere is not None:
                found[f"{prefix}{name}.bias"] = Target(self._elsewhere, (total,))
            begin += size
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Contiguous [num_rows, num_inputs] -> contiguous [num_rows, num_outputs]."""
        out = self.method.apply(self, x)
        return self.group.all_reduce(out) if self._adds_up else out

    def deferred(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`; or, where that is faster, float32 [parts, num_rows, num_outputs], whose sum it is."""
        return self(x) if self._adds_up else self.method.apply_deferred(self, x)

    def gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """silu(first half of the outputs) * second half, where one kernel does both; else None."""
        return self.method.apply_gated(self, x)


class PlainMethod(LinearMethod):
    """Weights in a type that torch multiplies with on any device."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return F.linear(x, linear.weight, linear.bias)


class Float32CpuMethod(LinearMethod):
    """float32 weights on a CPU."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return cpu_products.float32_linear(x, linear.weight, linear.bias)


class CudaMethod(LinearMethod):
    """Plain weights on a GPU: our own kernels for few rows, else cuBLAS."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        weight = linear.weight
        if skinny_gemm.supports(x, weight) and skinny_gemm.is_faster(x, weight):
            return skinny_gemm.multiply(x, weight, linear.bias)
        return F.linear(x, weight, linear.bias)

    def apply_deferred(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        weight = linear.weight
        if (
            linear.bias is None
            and skinny_gemm.supports(x, weight)
            and (parts := skinny_gemm.num_parts(x, weight)) > 1
        ):
            return skinny_gemm.multiply_in_parts(x, weight, parts)
        return self.apply(linear, x)

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        if skinny_gemm.supports(x, linear.weight):
            return skinny_gemm.multiply(x, linear.weight, linear.bias, gated=True)
        return None


def plain_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The fastest method for weights kept as checkpoints store them."""
    if device.type == "cuda":
        return CudaMethod()
    return Float32CpuMethod() if dtype == torch.float32 else PlainMethod()
