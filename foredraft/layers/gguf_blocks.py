"""Unpacks the blocks of GGUF files.

A row of a GGUF matrix is blocks of 32 or 256 inputs, each with its scales and numbers. Blocks of 32
have one float16 scale, and with a minimum (`_1`) a float16 offset. Blocks of 256 (`_K`) have groups
of 16 or 32 inputs, whose scales and minima are small integers times a float16 of the block.
"""

import torch

from foredraft.layers.quantized_matrix import Matrix
from foredraft.layers.weight_scheme import GGUF_BLOCKS, WeightScheme

_MADE_UP_MULTIPLE = 32  # of units, in random weights: half of 6 bits' range


def decode(kind: str, blocks: torch.Tensor) -> Matrix:
    """Unpacks blocks, uint8 [outputs, blocks, bytes]; all products of a weight's parts are exact in
    float32.

    Args:
        kind: Type of the blocks, a key of `GGUF_BLOCKS`.
    """
    if kind == "Q6_K":
        return _q6_k(blocks)
    if kind.endswith("_K"):
        return _k(blocks, has_fifth=kind == "Q5_K")
    scales, rest = _float16(blocks, 0), blocks[:, :, 2:]
    offsets = None
    if kind.endswith("_1"):
        offsets, rest = _float16(blocks, 2), blocks[:, :, 4:]
    if kind == "Q8_0":
        return Matrix(_flat(rest.view(torch.int8)), scales)
    fifth = None
    if kind.startswith("Q5"):
        fifth, rest = _bits(rest[:, :, :4, None], 1).flatten(2), rest[:, :, 4:]
    numbers = torch.cat((rest & 15, rest >> 4), 2)
    if fifth is not None:
        numbers |= fifth << 4
    if offsets is None:
        numbers = numbers.view(torch.int8) - (8 if fifth is None else 16)
    return Matrix(_flat(numbers), scales, offsets=offsets)


def _k(blocks: torch.Tensor, has_fifth: bool) -> Matrix:
    # 64 numbers are 32 bytes: the lower halves, then the upper ones. Bit i of byte j of the fifth
    # bits is that of number 32 i + j.
    halves = blocks[:, :, 48 if has_fifth else 16 :].unflatten(2, (4, 1, 32))
    numbers = torch.cat((halves & 15, halves >> 4), 3).flatten(2)
    if has_fifth:
        fifth = _bits(blocks[:, :, None, 16:48], 1)
        numbers |= fifth.flatten(2) << 4
    low, middle, high = blocks[:, :, 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), 2)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), 2)
    return Matrix(
        _flat(numbers),
        _flat(scales).view(torch.int8),
        offsets=_flat(minima).view(torch.int8),
        scale_units=_float16(blocks, 0),
        offset_units=-_float16(blocks, 2),
    )


def _q6_k(blocks: torch.Tensor) -> Matrix:
    # 128 numbers are 64 bytes of lower bits (the lower halves, then the upper ones) and 32 bytes of
    # upper bits, two for each 32 numbers.
    halves = blocks[:, :, :128].unflatten(2, (2, 1, 64))
    lower = torch.cat((halves & 15, halves >> 4), 3).flatten(2)
    upper = _bits(blocks[:, :, 128:192].unflatten(2, (2, 1, 32)), 2).flatten(2)
    numbers = (lower | upper << 4).view(torch.int8) - 32
    scales = blocks[:, :, 192:208].view(torch.int8)
    return Matrix(_flat(numbers), _flat(scales), scale_units=_float16(blocks, 208))


def _bits(values: torch.Tensor, count: int) -> torch.Tensor:
    """Splits bytes into numbers of `count` bits, from the lowest on, along the dimension of one."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8, device=values.device)
    dim = values.shape.index(1, 2)
    shape = [1] * values.dim()
    shape[dim] = len(shifts)
    return values >> shifts.view(shape) & ((1 << count) - 1)


def _float16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at a byte of each block, [outputs, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(len(values), -1)


def made_up(
    scheme: WeightScheme, num_outputs: int, num_inputs: int, std: float, device: torch.device
) -> Matrix:
    """Returns random weights of a type, of about standard deviation `std`."""
    kind = scheme.gguf_type
    size, num_bytes = GGUF_BLOCKS[kind]
    shape = (num_outputs, -(-num_inputs // size), num_bytes)
    matrix = decode(kind, torch.randint(0, 256, shape, dtype=torch.uint8, device=device))
    num_groups = scheme.num_groups(num_inputs)
    matrix.numbers = matrix.numbers[:, :num_inputs]
    matrix.scales = matrix.scales[:, :num_groups]
    bits = int(kind[1])
    scale = std / (1 << bits) * 12**0.5
    least = -scale * (1 << (bits - 1))
    if matrix.scale_units is None:
        matrix.scales = torch.full_like(matrix.scales, scale)
        if matrix.offsets is not None:
            matrix.offsets = torch.full_like(matrix.scales, least)
        return matrix
    matrix.scales = torch.full_like(matrix.scales, _MADE_UP_MULTIPLE)
    matrix.scale_units = torch.full_like(matrix.scale_units, scale / _MADE_UP_MULTIPLE)
    if matrix.offset_units is not None:
        matrix.offsets = matrix.scales
        matrix.offset_units = torch.full_like(matrix.offset_units, least / _MADE_UP_MULTIPLE)
    return matrix
