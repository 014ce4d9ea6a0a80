"""Linear methods for the matrices of GGUF files, whose types differ within a layer."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from foredraft.layers import gguf_blocks
from foredraft.layers.linear import Linear, LinearMethod, plain_method, plain_target
from foredraft.layers.parameters import Target, new_parameter
from foredraft.layers.quantized import StoredMethod, merge, set_matrix
from foredraft.layers.quantized_matrix import Matrix, dequantize
from foredraft.layers.stored_weights import StoredMatrix
from foredraft.layers.weight_scheme import GGUF_ON_GPUS, GGUF_SCHEMES, WeightScheme

# Types that kernels for GPUs multiply, in the form that these take.
_ON_GPUS = {
    name: WeightScheme("packed", GGUF_SCHEMES[name].bits, "group", 32) for name in GGUF_ON_GPUS
}
Part = tuple[WeightScheme | None, Matrix | torch.Tensor]  # a matrix, or plain weights without type


class BlocksMethod(StoredMethod):
    """Loads the matrices of a layer, each in its own type.

    On a CPU they stay packed, and neighbours of one type become one matrix. On a GPU they become
    plain weights, unless all are of one type that its kernels multiply.

    Args:
        schemes: Form of each part of the layer, in their order; None for plain weights.
    """

    def __init__(self, schemes: Sequence[WeightScheme | None]) -> None:
        self._schemes = list(schemes)
        self._loaded: list[tuple[WeightScheme | None, StoredMatrix | torch.Tensor]] = []

    def targets(self, linear: Linear, rows: slice, total: int, first: int) -> dict[str, Target]:
        """See LinearMethod.

        Raises:
            ValueError: The ranks cannot share the matrix.
        """
        scheme = self._schemes[len(self._loaded)]
        if scheme is not None:
            stored = self._new_matrix(scheme, linear, rows, total, first)
            self._loaded.append((scheme, stored))
            return stored.targets
        shape = (rows.stop - rows.start, linear.num_inputs)
        weight = new_parameter(shape, self._dtype, self._device)
        self._loaded.append((None, weight))
        return plain_target(linear, weight, total, first)

    def finish(self, linear: Linear) -> None:
        """See LinearMethod."""
        parts: list[Part] = [
            (scheme, one.decode() if isinstance(one, StoredMatrix) else one)
            for scheme, one in self._loaded
        ]
        self._loaded.clear()
        self._keep_parts(linear, parts)

    def fill_randomly(self, linear: Linear, std: float) -> None:
        """See LinearMethod."""
        parts: list[Part] = []
        for scheme, num_outputs in zip(self._schemes, linear.part_sizes, strict=True):
            shape = (num_outputs, linear.num_inputs)
            if scheme is None:
                weight = torch.empty(shape, dtype=self._dtype, device=self._device)
                parts.append((None, weight.normal_(0.0, std)))
            else:
                parts.append((scheme, gguf_blocks.made_up(scheme, *shape, std, self._device)))
        self._keep_parts(linear, parts)

    def _keep_parts(self, linear: Linear, parts: list[Part]) -> None:
        if self._device.type != "cpu":
            parts = [self._on_gpu(parts)]
        runs = [
            _joined(scheme, [part for _, part in run])
            for scheme, run in itertools.groupby(parts, lambda part: part[0])
        ]
        if len(runs) == 1:
            self._keep_part(linear, *runs[0])
            return
        pieces: list[Linear] = []
        first = 0
        for scheme, part in runs:
            size = len(part.numbers if isinstance(part, Matrix) else part)
            method = BlocksMethod([scheme])
            piece = Linear(linear.num_inputs, size, False, self._dtype, self._device, method=method)
            if linear.bias is not None:
                piece.bias = _parameter(linear.bias[first : first + size])
            self._keep_part(piece, scheme, part)
            pieces.append(piece)
            first += size
        linear.bias = None
        linear.pieces = nn.ModuleList(pieces)
        linear.method = PiecesMethod(pieces)

    def _keep_part(
        self, linear: Linear, scheme: WeightScheme | None, part: Matrix | torch.Tensor
    ) -> None:
        if scheme is not None and isinstance(part, Matrix):
            set_matrix(linear, part, scheme, self._dtype, self._device)
        elif isinstance(part, torch.Tensor):
            linear.weight = _parameter(part)
            linear.method = plain_method(self._dtype, self._device)

    def _on_gpu(self, parts: list[Part]) -> Part:
        """Returns the parts as one."""
        kinds = {scheme.gguf_type if scheme is not None else "" for scheme, _ in parts}
        kept = _ON_GPUS.get(kinds.pop()) if len(kinds) == 1 else None
        if kept is not None:
            matrix = merge([part for _, part in parts if isinstance(part, Matrix)])
            middle = 1 << (kept.bits - 1)
            matrix.numbers = (matrix.numbers + middle).view(torch.uint8)
            matrix.scales = matrix.scales.float()
            matrix.zeros = torch.full_like(matrix.scales, middle, dtype=torch.uint8)
            return kept, matrix
        weights = [
            dequantize(part, scheme.group_size, self._dtype)
            if scheme is not None and isinstance(part, Matrix)
            else part
            for scheme, part in parts
        ]
        return None, torch.cat([one for one in weights if isinstance(one, torch.Tensor)])


def _joined(scheme: WeightScheme | None, parts: Sequence[Matrix | torch.Tensor]) -> Part:
    plain = [part for part in parts if isinstance(part, torch.Tensor)]
    if plain:
        return None, torch.cat(plain)
    return scheme, merge([part for part in parts if isinstance(part, Matrix)])


class PiecesMethod(LinearMethod):
    """Multiplies with layers that hold some of the outputs each, one after the other."""

    def __init__(self, pieces: list[Linear]) -> None:
        self._pieces = pieces
        self.is_exact = all(piece.method.is_exact for piece in pieces)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        return torch.cat([piece.method.apply(piece, x) for piece in self._pieces], 1)


def expanded_targets(
    scheme: WeightScheme, total: int, first: int, weight: torch.Tensor
) -> dict[str, Target]:
    """Returns the memory of a quantised table, by the last part of its tensors' names, whose plain
    rows go to `weight` when it is filled.

    Args:
        scheme: Form of the table.
        total: Number of rows of the whole table.
        first: First row that belongs into `weight`.
        weight: [rows, inputs], any float type.
    """
    shape = (total, weight.shape[1])
    stored = StoredMatrix(scheme, shape, "outputs", first, len(weight), weight.device)

    def expand() -> None:
        weight.copy_(dequantize(stored.decode(), scheme.group_size, weight.dtype))

    return {
        name: dataclasses.replace(target, on_filled=expand)
        for name, target in stored.targets.items()
    }


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
