"""Changes the linear layers of a loaded model: a draft's to the form that a flag names, a target's
to exact products.

What a form needs is imported when it is asked for.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from foredraft.layers.linear import CudaMethod, Linear


def _unquant(module: nn.Module, device: torch.device) -> None:
    return


def _int8(module: nn.Module, device: torch.device) -> None:
    from foredraft.layers.draft_quantization import quantize_int8

    quantize_int8(module)


def _fp8(module: nn.Module, device: torch.device) -> None:
    from foredraft.layers.draft_quantization import check_fp8, quantize_fp8

    check_fp8(device)
    quantize_fp8(module)


_CONVERSIONS: dict[str, Callable[[nn.Module, torch.device], None]] = {
    "unquant": _unquant,
    "int8": _int8,
    "fp8": _fp8,
}


def convert_linears(module: nn.Module, kind: str, device: torch.device) -> None:
    """Converts every plain `Linear` of a module to another form.

    Args:
        kind: `unquant` (as they are), `int8` or `fp8`.
        device: Device that the module will compute on.

    Raises:
        ConfigError: The device cannot compute with that form.
    """
    _CONVERSIONS[kind](module, device)


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

    proofs, others = Proofs(proof_file), []
    for name, linear in module.named_modules():
        if isinstance(linear, Linear):
            if isinstance(linear.method, CudaMethod) and exact_gemm.supports(linear.weight):
                linear.method = ExactMethod(proofs, linear.method.early_rows)
            elif not linear.method.is_exact:
                others.append(f"{name} ({type(linear.method).__name__})")
    return others
