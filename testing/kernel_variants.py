"""Finds the variants of Triton kernels that a forward would launch on a GPU, without Triton or
a GPU.

Models lie on torch's meta device, so that sizes are real and nothing is computed; in place of the
kernels stand recorders that note what Triton would compile a launch for.
"""

import ast
import importlib
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import foredraft
from foredraft import device_limits
from foredraft.kernel_launch import VARIANTS
from foredraft.layers import fused, skinny_gemm
from foredraft.layers.linear import CudaMethod, Linear

META = torch.device("meta")
KERNELS = (
    "foredraft.attention.exact_fold_kernels",
    "foredraft.attention.exact_kernels",
    "foredraft.attention.triton_kernels",
    "foredraft.layers.skinny_gemm_kernels",
    "foredraft.layers.triton_kernels",
)
UNITS = 132  # multiprocessors of an H200


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, function: ast.FunctionDef, met: set[Hashable]) -> None:
        self._name, self._met = function.name, met
        arguments = [*function.args.args, *function.args.kwonlyargs]
        self._names = [one.arg for one in arguments if one.annotation is None]
        self._same = _not_specialized(function)

    def __getitem__(self, grid: object) -> Any:
        return self._launch

    def _launch(self, *args: Any, **settings: Any) -> None:
        given = dict(zip(self._names, args, strict=False))
        constants = {name: value for name, value in settings.items() if name not in self._names}
        given |= {name: value for name, value in settings.items() if name in self._names}
        kinds = tuple(_kind(given[name], name in self._same) for name in self._names)
        self._met.add((self._name, kinds, tuple(sorted(constants.items()))))


def _kind(value: object, is_same: bool) -> object:
    """Returns the property that Triton specialises an argument for; see `triton.runtime.jit`."""
    if isinstance(value, torch.Tensor):
        is_aligned = value.storage_offset() * value.itemsize % 16 == 0
        return value.dtype, is_aligned or is_same
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return width if is_same else (width, 1 if value == 1 else value % 16 == 0)


def _not_specialized(function: ast.FunctionDef) -> set[str]:
    names: set[str] = set()
    for decorator in function.decorator_list:
        for keyword in getattr(decorator, "keywords", ()):
            if keyword.arg == "do_not_specialize":
                names |= set(ast.literal_eval(keyword.value))
    return names


def _stand_in(name: str, met: set[Hashable]) -> ModuleType:
    module = ModuleType(name)
    root = Path(foredraft.__file__).parents[1]
    tree = ast.parse((root / name.replace(".", "/")).with_suffix(".py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            setattr(module, node.name, Recorder(node, met))
    return module


@contextmanager
def recorded_launches() -> Iterator[set[Hashable]]:
    """Lets models on the meta device run as on a GPU; yields the variants launched so far."""
    met: set[Hashable] = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            package, _, own = name.rpartition(".")
            module = _stand_in(name, met)
            patch.setitem(sys.modules, name, module)
            patch.setattr(importlib.import_module(package), own, module, raising=False)
        patch.setattr(fused, "on_gpu", lambda x: True)
        patch.setattr(skinny_gemm, "supports", _supports)
        patch.setattr(device_limits, "INTERPRETED_UNITS", UNITS)
        yield met


def _supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Stands for `skinny_gemm.supports` on an H200."""
    return (
        not VARIANTS.are_few
        and 0 < x.shape[0] <= skinny_gemm.MOST_ROWS
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0
    )


def as_on_gpu(model: nn.Module) -> None:
    """Gives a model's matrices the products of a GPU."""
    for linear in model.modules():
        if isinstance(linear, Linear):
            linear.method = CudaMethod()
