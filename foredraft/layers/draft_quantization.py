"""Quantises a draft's linear layers once they are loaded: to 8-bit integers, or on newer GPUs to
8-bit floats, with a scale for each output.
"""

import torch
from torch import nn

from foredraft.errors import ConfigError
from foredraft.layers.linear import Linear, LinearMethod
from foredraft.layers.quantized import set_matrix
from foredraft.layers.quantizing import quantize
from foredraft.layers.weight_scheme import WeightScheme

_INT8 = WeightScheme("int8", 8, "channel")
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_FP8_CAPABILITY = (8, 9)  # lowest capability of cards that multiply 8-bit floats (Ada)
_FP8_MULTIPLE = 16  # both widths of a matrix that those products take


def check_fp8(device: torch.device) -> None:
    """Raises ConfigError when the device does not multiply 8-bit floats."""
    reason = _why_no_fp8(device)
    if reason:
        raise ConfigError(
            f"--speculative-draft-model-quantization fp8: {reason}; int8 works everywhere"
        )


def _why_no_fp8(device: torch.device) -> str:
    if device.type != "cuda":
        return "a CPU has no products of 8-bit floats"
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"{name} is sm_{capability[0]}{capability[1]}, and they need sm_89 or newer"
    return ""


@torch.no_grad()
def quantize_fp8(module: nn.Module) -> None:
    """Turns the weights of all `Linear` in a module into float8_e4m3fn, each row scaled by its
    largest magnitude.

    Activations are rounded to the same type row by row in each product, as SGLang's fp8 does. A
    matrix whose widths are no multiples of 16 stays as it is, and so does an embedding that is an
    output matrix too.
    """
    for linear in module.modules():
        if not isinstance(linear, Linear) or linear.weight.element_size() == 1:
            continue
        weight = linear.weight
        if weight.shape[0] % _FP8_MULTIPLE or weight.shape[1] % _FP8_MULTIPLE:
            continue
        rounded, scales = _to_fp8(weight)
        linear.weight = nn.Parameter(rounded, requires_grad=False)
        linear.scales, linear.method = scales.t(), Fp8RowsMethod()


def _to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts rows [n, k] to float8, and returns their scales, float32 [n, 1]."""
    scales = rows.abs().amax(1, keepdim=True).float().div_(_FP8_MAX).clamp_min_(1e-12)
    return (rows / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8), scales


class Fp8RowsMethod(LinearMethod):
    """8-bit floats with a scale for each output, float32 [1, num_outputs]; rows of x are rounded to
    8-bit floats too.
    """

    def apply(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See LinearMethod."""
        rows, scales = _to_fp8(x)
        # The kernel gives bfloat16 alone where scales go by rows.
        out = torch._scaled_mm(
            rows,
            linear.weight.t(),
            scale_a=scales,
            scale_b=linear.scales,
            out_dtype=torch.bfloat16,
        ).to(x.dtype)
        return out if linear.bias is None else out.add_(linear.bias)


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.is_floating_point() and weight.element_size() > 1


@torch.no_grad()
def quantize_int8(module: nn.Module) -> None:
    """Turns the weights of all `Linear` in a module into int8, symmetric, each row by its largest
    magnitude.

    Memory falls to about a quarter of float32. A matrix that is an embedding too stays there as it
    is.
    """
    for linear in module.modules():
        if not isinstance(linear, Linear) or not _is_plain(linear.weight):
            continue
        weight = linear.weight
        matrix = quantize(weight, _INT8)
        set_matrix(linear, matrix, _INT8, weight.dtype, weight.device)
