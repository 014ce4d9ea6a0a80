"""What kernels for weights of 4 bits on GPUs multiply numbers by.

A 4-bit number in the lowest bits of a 16-bit float is so many times the smallest one, 2**-133 in
bfloat16 and 2**-24 in float16, and four bits higher 16 times that: no conversion is needed. Each
output and group has two factors of 16 bits in an int32 word, the second in the upper half; `Form`
says which.
"""

from enum import IntEnum

import torch

STEPS = {torch.bfloat16: 6, torch.float16: 9}  # k of Form.STEPS
OFFSET_STEP = 129  # with offsets
_MOST_LOW, _MOST_HIGH = 2.0**-5, 2.0**-1  # below these, scales with offsets are finite


class Form(IntEnum):
    """How weights are made; `words.cu` has the same numbers.

    Attributes:
        STEPS: Factors are scale * 2**k and -zero / 2**k: number - zero, which is exact, then the
            product.
        OFFSETS: Of bfloat16, scale * 2**129 and -zero * scale: number * scale + offset, in one
            step. It has the same bits where the offset is exact: for zero points of few bits such
            as 8, and scales of few bits. Numbers in the lowest bits take scale * 2**133.
        LARGE_OFFSETS: The same for scales times which 2**133 is too large: all numbers are moved
            from the lowest bits first.
    """

    STEPS = 0
    OFFSETS = 1
    LARGE_OFFSETS = 2


def are_finite(scales: torch.Tensor, dtype: torch.dtype) -> bool:
    """Returns whether scales times 2**k are finite in the activations' data type."""
    most = torch.finfo(dtype).max / 2 ** STEPS[dtype]
    return bool((scales.to(dtype).abs() <= most).all())


def with_exact_offsets(
    numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replaces numbers by 15 - number, zero points by 15 - zero and scales by -scale, which leaves
    weights as they are, in groups where that makes the offset exact; in none where some would
    stay inexact.

    Args:
        numbers: uint8 [outputs, inputs], of 4 bits.
        scales, zeros: [outputs, groups]; zeros are uint8.
        dtype: Data type of the activations.
    """
    is_exact = are_offsets_exact(scales.to(dtype).float(), zeros, dtype)
    swaps = ~is_exact & are_offsets_exact(scales.to(dtype).float(), 15 - zeros, dtype)
    if not bool(swaps.any()) or not bool((is_exact | swaps).all()):
        return numbers, scales, zeros
    by_inputs = swaps.repeat_interleave(numbers.shape[1] // swaps.shape[1], 1)
    return (
        torch.where(by_inputs, 15 - numbers, numbers),
        torch.where(swaps, -scales, scales),
        torch.where(swaps, 15 - zeros, zeros),
    )


def are_offsets_exact(
    scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Returns for each scale whether `dtype` holds zero * scale exactly, as float32 does."""
    offsets = zeros.float() * scales
    return offsets.to(dtype).float() == offsets


def factor_words(
    scales: torch.Tensor, zeros: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, Form]:
    """Returns the words of factors, int32 as `scales`, and the fastest form that they allow.

    Args:
        scales: Scales, which are rounded to `dtype`.
        zeros: uint8, zero points, as `scales`.
        dtype: Data type of the activations.
    """
    scales = scales.to(dtype).float()
    largest = float(scales.abs().amax())
    are_exact = dtype == torch.bfloat16 and bool(are_offsets_exact(scales, zeros, dtype).all())
    if are_exact and largest < _MOST_HIGH:
        form = Form.OFFSETS if largest < _MOST_LOW else Form.LARGE_OFFSETS
        first, second = scales * 2.0**64 * 2.0 ** (OFFSET_STEP - 64), -zeros.float() * scales
    else:
        form, step = Form.STEPS, 2.0 ** STEPS[dtype]
        first, second = scales * step, -zeros.float() / step
    low, high = (part.to(dtype).contiguous().view(torch.int16).int() for part in (first, second))
    return low & 0xFFFF | high << 16, form
