"""Quantises plain matrices of a checkpoint during loading, each as soon as it is complete."""

import dataclasses

import torch

from foredraft.layers.linear import Linear, LinearMethod
from foredraft.layers.parameters import Target
from foredraft.layers.quantized import set_matrix, set_random_matrix
from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_factors import are_offsets_exact

_FLOAT8 = torch.float8_e4m3fn
_SMALLER = (64, 32)  # groups
_ROWS_AT_ONCE = 4096  # outputs that are quantised together
# Parts of a group's range that are tried for 4 bits: cutting the largest weights costs less than
# coarser steps for all.
_RANGES = tuple(1 - 0.025 * step for step in range(13))


@torch.no_grad()
def quantize(weight: torch.Tensor, scheme: WeightScheme) -> Matrix:
    """Rounds a matrix [outputs, inputs] of any floating-point type.

    8 bits take each output's largest magnitude as their range. 4 bits have zero points, and of 13
    ranges for each group the one with the least squared error.
    """
    parts = [_quantize_rows(rows.float(), scheme) for rows in weight.split(_ROWS_AT_ONCE)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return Matrix(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _quantize_rows(rows: torch.Tensor, scheme: WeightScheme) -> Matrix:
    if scheme.bits == 4:
        return _quantize_groups(rows, scheme.group_size)
    most = torch.finfo(_FLOAT8).max if scheme.layout == "fp8" else 127.0
    scales = rows.abs().amax(1, keepdim=True).div_(most).clamp_min_(torch.finfo(torch.float32).tiny)
    values = rows / scales
    if scheme.layout == "fp8":
        return Matrix(values.clamp_(-most, most).to(_FLOAT8), scales)
    return Matrix(values.round_().clamp_(-most, most).to(torch.int8), scales)


def _quantize_groups(rows: torch.Tensor, size: int) -> Matrix:
    num_rows, num_inputs = rows.shape
    padding = -num_inputs % size
    groups = torch.nn.functional.pad(rows, (0, padding)).view(num_rows, -1, size)
    low = groups.amin(2, keepdim=True).clamp_max_(0)
    high = groups.amax(2, keepdim=True).clamp_min_(0)
    least = torch.full_like(low, torch.inf)
    scales, zeros = torch.ones_like(low), torch.zeros_like(low)
    for part in _RANGES:
        # Rounded as the products keep it.
        scale = ((high - low) * (part / 15)).bfloat16().float().clamp_min_(1e-8)
        zero = (-low * part / scale).round_().clamp_(0, 15)
        scale = _with_exact_offset(scale, zero)
        rounded = (groups / scale + zero).round_().clamp_(0, 15)
        error = rounded.sub_(zero).mul_(scale).sub_(groups).square_().sum(2, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scales, zeros = torch.where(is_better, scale, scales), torch.where(is_better, zero, zeros)
    numbers = (groups / scales + zeros).round_().clamp_(0, 15).to(torch.uint8)
    numbers = numbers.view(num_rows, -1)[:, :num_inputs]
    return Matrix(numbers, scales.squeeze(2), zeros.squeeze(2).to(torch.uint8))


def _with_exact_offset(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Rounds scales to as many bits as leave zero * scale or (15 - zero) * scale exact in bfloat16,
    for which GPUs have a faster form, see `words_factors`.
    """
    mantissas, exponents = torch.frexp(scales)
    found = scales
    for bits in (4, 5, 6, 7, 8):  # a zero point has 4 bits, a bfloat16 8
        rounded = torch.ldexp((mantissas * 2**bits).round_(), exponents - bits)
        is_exact = are_offsets_exact(rounded, zeros, torch.bfloat16)
        is_exact |= are_offsets_exact(rounded, 15 - zeros, torch.bfloat16)
        found = torch.where(is_exact, rounded, found)
    return found


def _fitting(scheme: WeightScheme, num_inputs: int) -> WeightScheme:
    """Selects smaller groups where these divide the inputs and the scheme's do not.

    Kernels for GPUs take whole groups.
    """
    sizes = (size for size in _SMALLER if size < scheme.group_size and num_inputs % size == 0)
    if scheme.granularity != "group" or num_inputs % scheme.group_size == 0:
        return scheme
    return dataclasses.replace(scheme, group_size=next(sizes, scheme.group_size))


class QuantizingMethod(LinearMethod):
    """Collects a layer's plain matrices in host memory during loading, and quantises them when
    all are there.

    Args:
        scheme: Form that the matrices are quantised to.
    """

    def __init__(self, scheme: WeightScheme) -> None:
        self._scheme = scheme
        self._waiting: list[torch.Tensor] = []
        self._num_missing = 0

    def create(self, linear: Linear, dtype: torch.dtype, device: torch.device) -> None:
        """See LinearMethod; the memory comes with `targets`."""
        self._dtype, self._device = dtype, device

    def targets(self, linear: Linear, rows: slice, total: int, first: int) -> dict[str, Target]:
        """See LinearMethod."""
        whole, begin, dim = linear.num_inputs, first, 0
        if linear.split == "inputs":
            whole, dim = linear.num_inputs * linear.group.size, 1
            begin = linear.num_inputs * linear.group.rank
        # Unwritten pages take no memory.
        memory = torch.empty((rows.stop - rows.start, linear.num_inputs), dtype=self._dtype)
        self._waiting.append(memory)
        self._num_missing += 1

        def filled() -> None:
            self._num_missing -= 1
            if not self._num_missing:
                self._quantize(linear)

        return {"weight": Target(memory, (total, whole), dim, begin, on_filled=filled)}

    def _quantize(self, linear: Linear) -> None:
        weight = torch.cat([part.to(self._device) for part in self._waiting])
        for part in self._waiting:
            part.untyped_storage().resize_(0)  # the loader still holds the tensor
        self._waiting.clear()
        scheme = _fitting(self._scheme, linear.num_inputs)
        set_matrix(linear, quantize(weight, scheme), scheme, self._dtype, self._device)

    def fill_randomly(self, linear: Linear, std: float) -> None:
        """See LinearMethod."""
        scheme = _fitting(self._scheme, linear.num_inputs)
        set_random_matrix(linear, scheme, std, self._dtype, self._device)

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod; loading makes a layer that computes."""
        raise RuntimeError("weights are still to be loaded")
