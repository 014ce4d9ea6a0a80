"""Other forms of a loaded model's linear layers, by name. What a form needs is imported when it is asked for."""

from collections.abc import Callable

import torch
from torch import nn


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
    """Brings every plain `Linear` of a module into another form.

    Args:
        kind: `unquant` (as they are), `packed` (copies for few rows on a CPU), `int8` or `fp8`.
        device: Where the module will compute.

    Returns:
        Bytes of memory that are taken in addition.

    Raises:
        ConfigError: The device cannot compute with that form.
    """
    return _CONVERSIONS[kind](module, device)
