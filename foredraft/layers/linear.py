"""Linear layers: their weights, loading from a checkpoint, and division among ranks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from foredraft.layers import cpu_products, skinny_gemm, skinny_native
from foredraft.layers.heads import Heads
from foredraft.layers.normed import RoundedRows
from foredraft.layers.parameters import Target, new_parameter
from foredraft.parallel.group import SINGLE, Group, share

Split = Literal["none", "outputs", "inputs"]
# Returns the method of a layer that holds the named matrices; None for plain weights.
MethodChoice = Callable[[Iterable[str]], "LinearMethod | None"]


def plain_weights(names: Iterable[str]) -> "LinearMethod | None":
    """Returns None for all layers: the MethodChoice of a model that is not quantised."""
    return None


class ProductBytes(NamedTuple):
    """Bytes of GPU memory that a product takes beside its input.

    Attributes:
        result: Bytes of the result, its padding included.
        scratch: Bytes of whatever else is there until the result is.
        trial: Bytes, beyond the result's, of a trial that comes before the first product of so many
            rows, outside of graphs.
    """

    result: int
    scratch: int = 0
    trial: int = 0


class LinearMethod(ABC):
    """Keeps the weights of a `Linear` and multiplies with them. One object may serve many layers.

    Attributes:
        is_exact: Whether `apply` gives the same bits for a row in any batch of rows.
        rounds: Number of columns of x that share a scale, where `apply` rounds x to 8-bit floats
            on a GPU; 0 for all, None where it does not.
        early_rows: Number of rows up to which `apply` fetches weights on a GPU before it waits for
            the kernel ahead, which should let it start at once.
        has_heads: Whether `apply_heads` may have a kernel.
    """

    is_exact = False
    rounds: int | None = None
    early_rows = 0
    has_heads = False

    def create(self, linear: "Linear", dtype: torch.dtype, device: torch.device) -> None:
        """Creates the layer's parameters, without values."""
        linear.weight = new_parameter((linear.num_outputs, linear.num_inputs), dtype, device)

    def targets(self, linear: "Linear", rows: slice, total: int, first: int) -> dict[str, Target]:
        """Returns the memory that one matrix of the checkpoint fills, by the last part of its
        tensors' names.

        Args:
            linear: Layer that the matrix is a part of.
            rows: The layer's outputs that belong to this matrix.
            total: Number of outputs of the whole matrix, over all ranks.
            first: First output of the whole matrix that this rank holds.
        """
        return plain_target(linear, linear.weight[rows], total, first)

    def finish(self, linear: "Linear") -> None:  # noqa: B027
        """Converts the loaded tensors to the form used for products; may replace the layer's
        method.

        Raises:
            ValueError: The tensors contradict each other.
        """

    def fill_randomly(self, linear: "Linear", std: float) -> None:  # noqa: B027
        """Fills the layer with random weights where `create` made no parameters for them.

        Does the work of `finish` too.

        Args:
            linear: Layer to fill.
            std: Standard deviation of the weights.
        """

    @abstractmethod
    def apply(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """Computes x W^T + b, contiguous [num_rows, num_inputs] -> [num_rows, num_outputs]."""

    def product_bytes(self, linear: "Linear", num_rows: int, itemsize: int) -> ProductBytes:
        """Returns the maximum memory of `apply` and `apply_deferred` on a GPU.

        Args:
            linear: Layer that multiplies.
            num_rows: Number of rows of x.
            itemsize: Bytes of a number of x.
        """
        return ProductBytes(num_rows * linear.num_outputs * itemsize)

    def rows(self, linear: "Linear", outputs: torch.Tensor) -> torch.Tensor:
        """Returns the weights of some outputs, int64 [n] -> [n, num_inputs]."""
        return linear.weight[outputs]

    def apply_from(self, linear: "Linear", x: torch.Tensor, first: int) -> torch.Tensor:
        """Computes the outputs of `apply` from index `first` on."""
        return self.apply(linear, x)[:, first:].contiguous()

    def apply_deferred(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor:
        """Computes x W^T + b, as `apply` does or in parts whose sum the caller must take.

        Where parts are faster, returns them as float32 [parts, num_rows, num_outputs].
        """
        return self.apply(linear, x)

    def apply_gated(self, linear: "Linear", x: torch.Tensor) -> torch.Tensor | None:
        """Computes silu(first half of the outputs) * second half; None without a kernel for it."""
        return None

    def apply_rounded(
        self, linear: "Linear", x: torch.Tensor, rounded: RoundedRows
    ) -> torch.Tensor:
        """Computes `apply` of rows that are rounded already; for methods with `rounds` alone."""
        raise NotImplementedError

    def apply_gated_rounded(
        self, linear: "Linear", x: torch.Tensor, rounded: RoundedRows
    ) -> torch.Tensor | None:
        """Computes `apply_gated` of rows that are rounded already, as `apply_rounded` does."""
        raise NotImplementedError

    def apply_heads(
        self, linear: "Linear", x: torch.Tensor, rounded: RoundedRows | None, heads: Heads
    ) -> torch.Tensor | None:
        """Computes what `rotate_and_store` makes of the outputs, with the same bits; None without a
        kernel for it.
        """
        return None


class Linear(nn.Module):
    """Computes y = x W^T + b. W may hold several matrices of a checkpoint, stacked by rows.

    Args:
        num_inputs: Width of x, over all ranks.
        parts: Number of outputs of each matrix, over all ranks, by its name in a checkpoint and in
            the order of y; a single number for a matrix without a name.
        bias: Whether the layer has a bias b.
        dtype: Data type of plain weights and the bias.
        device: Device of the weights.
        split: Dimension that the ranks of the group divide: `outputs` (each computes some of every
            part), `inputs` (each reads some of x, and the products are summed over the ranks), or
            `none` (each computes all).
        group: Ranks that share the layer.
        method: Keeps the weights; None for the fastest method for plain weights on the device.
        replicas: Number of ranks that hold the same share of a part, by its name; 1 for parts
            without an entry.

    Attributes:
        weight: [num_outputs, num_inputs], plain weights of this rank; a quantised method keeps its
            own form.
        scales, zeros: Scales and zero points of a quantised method, in its own form.
        pieces: Layers of some outputs each, where a method multiplies with these instead.
        num_inputs, num_outputs: Widths of this rank's share.
    """

    weight: nn.Parameter
    scales: torch.Tensor
    zeros: torch.Tensor
    pieces: nn.ModuleList

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
        replicas: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.split, self.group = split, group
        self._parts = {"": parts} if isinstance(parts, int) else dict(parts)
        by_outputs = group if split == "outputs" else SINGLE
        self._replicas = dict(replicas or {})
        self._shares = {
            name: share(
                size * self._replicas.get(name, 1), by_outputs, f"outputs of {name or 'a matrix'}"
            )
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

    @property
    def part_sizes(self) -> list[int]:
        """Number of this rank's outputs of each part."""
        return list(self._shares.values())

    def targets(self, prefix: str) -> dict[str, Target]:
        """Returns the memory that each of the layer's tensors in a checkpoint fills, by name.

        Args:
            prefix: Beginning of the tensors' names.
        """
        found: dict[str, Target] = {}
        begin = 0
        for name, size in self._shares.items():
            rows, total = slice(begin, begin + size), self._parts[name]
            number = self.group.rank // self._replicas.get(name, 1)
            first = size * number if self.split == "outputs" else 0
            own = self.method.targets(self, rows, total, first)
            found |= {f"{prefix}{name}.{suffix}": target for suffix, target in own.items()}
            if self.bias is not None:
                found[f"{prefix}{name}.bias"] = Target(self.bias[rows], (total,), 0, first)
            elif self._elsewhere is not None:
                found[f"{prefix}{name}.bias"] = Target(self._elsewhere, (total,))
            begin += size
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes y, contiguous [num_rows, num_inputs] -> contiguous [num_rows, num_outputs]."""
        out = self.method.apply(self, x)
        return self.group.all_reduce(out) if self._adds_up else out

    def outputs_from(self, x: torch.Tensor, first: int) -> torch.Tensor:
        """Computes the outputs from index `first` on, contiguous [num_rows, num_outputs - first].

        Not for a layer whose inputs ranks divide.
        """
        return self.method.apply_from(self, x, first)

    def deferred(self, x: torch.Tensor, rounded: RoundedRows | None = None) -> torch.Tensor:
        """Computes y, as `forward` does or in parts whose sum the caller must take, and that of all
        ranks where they divide the inputs.

        Where parts are faster, returns them as float32 [parts, num_rows, num_outputs].

        Args:
            rounded: The rows of x as 8-bit floats, where the norm before this layer has made them.
                The result is not in parts then.
        """
        if rounded is not None:
            return self.method.apply_rounded(self, x, rounded)
        return self.method.apply_deferred(self, x)

    def gated(self, x: torch.Tensor, rounded: RoundedRows | None = None) -> torch.Tensor | None:
        """Computes silu(first half of the outputs) * second half; None without a kernel for it.

        Args:
            rounded: See `deferred`.
        """
        if rounded is not None:
            return self.method.apply_gated_rounded(self, x, rounded)
        return self.method.apply_gated(self, x)

    def heads(
        self, x: torch.Tensor, rounded: RoundedRows | None, heads: Heads
    ) -> torch.Tensor | None:
        """Computes queries, keys and values, rotates queries and keys, and writes keys and values
        to the cache; None without a kernel for it, and then writes nothing.

        Args:
            rounded: See `deferred`.

        Returns:
            Queries [num_rows, num_heads, head_dim].
        """
        return self.method.apply_heads(self, x, rounded, heads)


def plain_target(linear: Linear, weight: torch.Tensor, total: int, first: int) -> dict[str, Target]:
    """Returns the memory that a plain matrix of the checkpoint fills: `weight`, this rank's share.

    Args:
        total, first: See `LinearMethod.targets`.
    """
    if linear.split == "inputs":
        whole, begin = (linear.num_inputs * n for n in (linear.group.size, linear.group.rank))
        return {"weight": Target(weight, (total, whole), 1, begin)}
    return {"weight": Target(weight, (total, linear.num_inputs), 0, first)}


class PlainMethod(LinearMethod):
    """Plain weights, multiplied by torch on any device."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return F.linear(x, linear.weight, linear.bias)

    def apply_from(self, linear: Linear, x: torch.Tensor, first: int) -> torch.Tensor:
        """See LinearMethod."""
        return F.linear(x, linear.weight[first:], _from(linear.bias, first))


class Float32CpuMethod(LinearMethod):
    """Plain float32 weights on a CPU, multiplied by `cpu_products`."""

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return cpu_products.float32_linear(x, linear.weight, linear.bias)

    def apply_from(self, linear: Linear, x: torch.Tensor, first: int) -> torch.Tensor:
        """See LinearMethod."""
        weight, bias = linear.weight[first:], _from(linear.bias, first)
        return cpu_products.float32_linear(x, weight, bias)


class CudaMethod(LinearMethod):
    """Plain weights on a GPU, multiplied by our own kernels for few rows, else by cuBLAS."""

    has_heads = True

    def __init__(self, early_rows: int = 0) -> None:
        self.early_rows = early_rows

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return cuda_linear(x, linear.weight, linear.bias)

    def apply_from(self, linear: Linear, x: torch.Tensor, first: int) -> torch.Tensor:
        """See LinearMethod."""
        return cuda_linear(x, linear.weight[first:], _from(linear.bias, first))

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

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        outputs = linear.weight.shape[0]
        most = min(num_rows, skinny_gemm.MOST_ROWS) * skinny_gemm.most_parts(outputs) * 4
        return ProductBytes(outputs * max(num_rows * itemsize, most))

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        if skinny_gemm.supports(x, linear.weight):
            return skinny_gemm.multiply(x, linear.weight, linear.bias, gated=True)
        return None

    def apply_heads(
        self, linear: Linear, x: torch.Tensor, rounded: RoundedRows | None, heads: Heads
    ) -> torch.Tensor | None:
        """See LinearMethod."""
        return skinny_gemm.multiply_to_heads(x, linear.weight, linear.bias, heads)


def cuda_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes x W^T + b on a GPU, by our own kernel or cuBLAS, whichever is faster."""
    if skinny_gemm.supports(x, weight) and skinny_gemm.is_faster(x, weight):
        return skinny_gemm.multiply(x, weight, bias)
    return F.linear(x, weight, bias)


def _from(bias: torch.Tensor | None, first: int) -> torch.Tensor | None:
    return None if bias is None else bias[first:]


def plain_method(dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """Returns the fastest method for plain weights on a device."""
    if device.type == "cuda":
        return CudaMethod(skinny_native.early_rows(dtype, device))
    return Float32CpuMethod() if dtype == torch.float32 else PlainMethod()
