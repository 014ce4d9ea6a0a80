"""Converts a loaded model's linear layers to other forms, by name.

What a form needs is imported when it is asked for.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from foredraft.layers.linear import CudaMethod, Linear


def _unquant(module: nn.Module, device: torch.device) -> int:
    return 0


def _packed(module: nn.Module, device: torch.device) -> int:
    from foredraft.layers.packed import pack_linears

    return pack_linears(module)


def _int8(module: nn.Module, device: torch.device) -> int:
    from foredraft.layers.quantization import quantize_int8

    quantize_int8(module)
    return 0


def _fp8(module: nn.Module, device: torch.device) -> int:
    from foredraft.layers.quantization import check_fp8, quantize_fp8

    check_fp8(device)
    quantize_fp8(module)
    return 0


_CONVERSIONS: dict[str, Callable[[nn.Module, torch.device], int]] = {
    "unquant": _unquant,
    "packed": _packed,
    "int8": _int8,
    "fp8": _fp8,
}


def convert_linears(module: nn.Module, kind: str, device: torch.device) -> int:
    """Converts every plain `Linear` of a module to another form.

    Args:
        kind: `unquant` (as they are), `packed` (copies for few rows on a CPU), `int8` or `fp8`.
        device: Device that the module will compute on.

    Returns:
        Number of additional bytes of memory.

    Raises:
        ConfigError: The device cannot compute with that form.
    """
    return _CONVERSIONS[kind](module, device)


def make_exact(module: nn.Module, proof_file: Path | None) -> list[str]:
    """Gives plain matrices on a GPU products whose bits for a row do not depend on the other rows;
    see `exact_linear`.

    Args:
        proof_file: File for the results of comparisons with cuBLAS; None to keep nothing.

    Returns:
        Names of the layers whose products do depend on them, each with its method's.
    """
    from foredraft.layers import exact_gemm
    from foredraft.layers.exact_linear import ExactMethod, Proofs

    method = ExactMethod(Proofs(proof_file))
    others = []
    for name, linear in module.named_modules():
        if isinstance(linear, Linear):
            if isinstance(linear.method, CudaMethod) and exact_gemm.supports(linear.weight):
                linear.method = method
            elif not linear.method.is_exact:
                others.append(f"{name} ({type(linear.method).__name__})")
    return others
