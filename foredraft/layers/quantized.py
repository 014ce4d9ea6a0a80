"""Linear methods for quantised weights: their form in memory, and the products of each device."""

import torch
import torch.nn.functional as F

from foredraft.layers import exact_gemm
from foredraft.layers.fp8_cuda import Fp8Method
from foredraft.layers.linear import Linear, LinearMethod, ProductBytes, plain_method
from foredraft.layers.parameters import Target, frozen_parameter
from foredraft.layers.quantized_cpu import TiledMethod
from foredraft.layers.quantized_matrix import ROWS_AT_ONCE, Matrix, dequantize
from foredraft.layers.stored_weights import StoredMatrix
from foredraft.layers.weight_scheme import BLOCK, WeightScheme
from foredraft.layers.words_cuda import WordsMethod


class StoredMethod(LinearMethod):
    """Loads quantised matrices from a checkpoint.

    `finish` replaces it by the method that multiplies.

    Args:
        scheme: Format in which the checkpoint stores the matrices.
    """

    def __init__(self, scheme: WeightScheme) -> None:
        self._scheme = scheme
        self._stored: list[StoredMatrix] = []
        self._surplus: list[torch.Tensor] = []

    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """See LinearMethod; `targets` allocates the memory."""
        self._dtype, self._device = dtype, device

    def targets(self, linear: Linear, rows: slice, total: int, first: int) -> dict[str, Target]:
        """See LinearMethod.

        Raises:
            ValueError: The ranks cannot share the matrix.
        """
        stored = self._new_matrix(self._scheme, linear, rows, total, first)
        self._stored.append(stored)
        found = stored.targets
        if self._scheme.layout == "gptq" and linear.bias is None:
            # Old GPTQ files have biases of zeros for layers without a bias.
            bias = torch.zeros(total, device=self._device)
            self._surplus.append(bias)
            found = found | {"bias": Target(bias, (total,), is_optional=True)}
        return found

    def _new_matrix(
        self, scheme: WeightScheme, linear: Linear, rows: slice, total: int, first: int
    ) -> StoredMatrix:
        num_inputs = linear.num_inputs
        if linear.split == "inputs":
            num_inputs *= linear.group.size
            first, count = linear.num_inputs * linear.group.rank, linear.num_inputs
        else:
            count = rows.stop - rows.start
        shape = (total, num_inputs)
        return StoredMatrix(scheme, shape, linear.split, first, count, self._device)

    def finish(self, linear: Linear) -> None:
        """See LinearMethod."""
        if any(bool(bias.any()) for bias in self._surplus):
            raise ValueError("there is a bias, and config.json says that there is none")
        matrix = merge([stored.decode() for stored in self._stored])
        self._stored.clear()
        self._keep(linear, matrix)

    def _keep(self, linear: Linear, matrix: Matrix) -> None:
        set_matrix(linear, matrix, self._scheme, self._dtype, self._device)

    def fill_randomly(self, linear: Linear, std: float) -> None:
        """See LinearMethod."""
        set_random_matrix(linear, self._scheme, std, self._dtype, self._device)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Raises an error, since weights must be loaded before the layer can multiply."""
        raise RuntimeError("weights are still to be loaded")


class ExpandedMethod(StoredMethod):
    """Loads a quantised matrix from a checkpoint and keeps it as plain weights."""

    def _keep(self, linear: Linear, matrix: Matrix) -> None:
        order = _sort_inputs(matrix)
        weight = dequantize(matrix, self._scheme.group_size or BLOCK, self._dtype)
        if order is not None:
            weight = weight[:, torch.argsort(order)]
        linear.weight = frozen_parameter(weight)
        linear.method = plain_method(self._dtype, self._device)

    def fill_randomly(self, linear: Linear, std: float) -> None:
        """See LinearMethod."""
        shape = (linear.num_outputs, linear.num_inputs)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device).normal_(0.0, std)
        linear.weight = frozen_parameter(weight)
        linear.method = plain_method(self._dtype, self._device)


def _sort_inputs(matrix: Matrix) -> torch.Tensor | None:
    """Puts the inputs of each group side by side (act-order).

    Returns:
        int64 [inputs], for each column its input's index before; None where nothing moved.
    """
    if matrix.groups is None:
        return None
    order = torch.argsort(matrix.groups, stable=True)
    matrix.numbers = matrix.numbers[:, order]
    return order


def merge(parts: list[Matrix]) -> Matrix:
    """Stacks matrices by rows."""
    if not all(_same(part.groups, parts[0].groups) for part in parts):
        raise ValueError(
            "matrices that are computed together have different act-orders (g_idx); "
            "quantize the model again with desc_act false"
        )
    return Matrix(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        _stacked([part.zeros for part in parts]),
        parts[0].groups,
        _stacked([part.offsets for part in parts]),
        _stacked([part.scale_units for part in parts]),
        _stacked([part.offset_units for part in parts]),
    )


def _stacked(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def set_matrix(
    linear: Linear, matrix: Matrix, scheme: WeightScheme, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives a layer quantised weights and the fastest method for them on the device.

    Args:
        linear: Layer that takes the weights.
        matrix: The quantised weights.
        scheme: Format of the weights.
        dtype: Data type of the activations.
        device: Device of the layer.
    """
    if device.type == "cpu" and scheme.layout == "fp8":
        # CPUs cannot multiply 8-bit floats.
        linear.weight = frozen_parameter(dequantize(matrix, BLOCK, dtype))
        linear.method = plain_method(dtype, device)
        return
    method: TiledMethod | WordsMethod | Fp8Method | UnpackedMethod
    if device.type == "cpu":
        method = TiledMethod(scheme)
    elif device.type == "cuda" and WordsMethod.takes(matrix, scheme, dtype):
        method = WordsMethod(scheme, linear.num_inputs, linear.num_outputs, dtype)
    elif device.type == "cuda" and Fp8Method.takes(matrix, scheme):
        method = Fp8Method(scheme)
    else:
        method = UnpackedMethod(scheme, dtype)
    order = _sort_inputs(matrix)
    method.set_matrix(linear, matrix)
    linear.method = method if order is None else OrderedMethod(method, order)


def set_random_matrix(
    linear: Linear, scheme: WeightScheme, std: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives a layer random quantised weights of about standard deviation `std`, as `set_matrix`
    does.
    """
    shape = (linear.num_outputs, linear.num_inputs)
    if scheme.layout == "fp8":
        numbers = torch.randn(shape, device=device).mul_(64).to(torch.float8_e4m3fn)
        spread = 64.0
    else:
        numbers = torch.randint(0, 1 << scheme.bits, shape, dtype=torch.uint8, device=device)
        spread = (1 << scheme.bits) * 12**-0.5
    groups = scheme.num_groups(linear.num_inputs)
    scales = torch.full((len(numbers), groups), std / spread, device=device)
    zeros = None
    if scheme.layout != "fp8":
        zeros = torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.uint8)
    set_matrix(linear, Matrix(numbers, scales, zeros), scheme, dtype, device)


class UnpackedMethod(LinearMethod):
    """Quantised weights of any format on a GPU; each product dequantises the whole matrix.

    Parameters of the layer: `weight` [outputs, inputs], 8 bits or two numbers of 4 bits in a byte;
    `scales` [outputs, groups]; `zeros` uint8 [outputs, groups].
    """

    def __init__(self, scheme: WeightScheme, dtype: torch.dtype) -> None:
        self._group_size = scheme.group_size or BLOCK
        self._dtype = dtype
        self._is_packed = scheme.bits == 4

    def set_matrix(self, linear: Linear, matrix: Matrix) -> None:
        """Stores the weights in the layer."""
        self.is_exact = matrix.numbers.is_cuda and self._dtype.itemsize == 2
        numbers, scales = matrix.numbers, matrix.scales
        if self._is_packed:
            numbers = F.pad(numbers, (0, numbers.shape[1] % 2))
            numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
        if matrix.zeros is not None:
            scales = scales.to(self._dtype)
            linear.zeros = frozen_parameter(matrix.zeros)
        linear.weight, linear.scales = frozen_parameter(numbers), frozen_parameter(scales)

    def dequantized(self, linear: Linear) -> torch.Tensor:
        """Returns the weights [outputs, inputs] in the activations' data type."""
        numbers: torch.Tensor = linear.weight
        if self._is_packed:
            numbers = torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)
            numbers = numbers[:, : linear.num_inputs]
        zeros = getattr(linear, "zeros", None)
        return dequantize(Matrix(numbers, linear.scales, zeros), self._group_size, self._dtype)

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        numbers = linear.num_outputs * linear.num_inputs
        # Numbers of 4 bits are taken apart first. Then some rows at a time become float32, beside
        # a float32 zero point for each, then a scale.
        unpacked = 2 * numbers if self._is_packed else 0
        some = min(ROWS_AT_ONCE, linear.num_outputs) * linear.num_inputs * 4 * 2
        return ProductBytes(
            num_rows * linear.num_outputs * itemsize, numbers * itemsize + unpacked + some
        )

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        weight = self.dequantized(linear)
        if self.is_exact:
            return exact_gemm.multiply(x, weight, linear.bias)
        return F.linear(x, weight, linear.bias)


class OrderedMethod(LinearMethod):
    """Multiplies weights whose inputs are in another order (act-order), by reordering x first.

    Args:
        method: Method of the reordered weights.
        order: int64 [inputs], for each column of the weights the index of its input in x.
    """

    def __init__(self, method: LinearMethod, order: torch.Tensor) -> None:
        self._method, self._order = method, order
        self.is_exact = method.is_exact

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self._method.apply(linear, x[:, self._order])

    def apply_deferred(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return self._method.apply_deferred(linear, x[:, self._order])

    def apply_gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor | None:
        """See LinearMethod."""
        return self._method.apply_gated(linear, x[:, self._order])

    def product_bytes(self, linear: Linear, num_rows: int, itemsize: int) -> ProductBytes:
        """See LinearMethod."""
        product = self._method.product_bytes(linear, num_rows, itemsize)
        reordered = num_rows * linear.num_inputs * itemsize
        return ProductBytes(product.result, product.scratch + reordered)
