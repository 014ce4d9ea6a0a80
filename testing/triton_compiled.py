"""Compiles Triton kernels for cards that are not here, and reports the shared memory of their
launches.
"""

import re
from collections.abc import Callable
from typing import Any

import torch

# Bytes that a program may have, by compute capability.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 120: 101376}
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


def _type_of(value: Any) -> str:
    if hasattr(value, "block_shape"):  # a tensor descriptor of Gluon
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "i32" if isinstance(value, int) else "fp32"


class Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **settings: Any) -> None:
            names = self._kernel.arg_names
            self.launches.append({**dict(zip(names, args, strict=False)), **settings})

        return launch

    def shared_memory(self, capability: int) -> list[int]:
        """Returns the bytes of shared memory that each launch's program takes on a card."""
        return [self._compile(launch, capability).metadata.shared for launch in self.launches]

    def reductions(self, capability: int) -> list[list[str]]:
        """Returns for each launch how the elements of its reductions are laid out over threads,
        which decides the order of a sum.
        """
        found = []
        for launch in self.launches:
            text = self._compile(launch, capability).asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.M))
            names = re.findall(r'"tt\.reduce".*?: \(tensor<\w+xf32, (#\w+)>\)', text, re.S)
            found.append([layouts[name] for name in names])
        return found

    def _compile(self, launch: dict[str, Any], capability: int) -> Any:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self._kernel.params):
            value = launch[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            parts = value if isinstance(value, tuple) else (value,)
            types = tuple(_type_of(part) for part in parts)
            signature[parameter.name] = types if isinstance(value, tuple) else types[0]
            for j, part in enumerate(parts):
                is_tensor = isinstance(part, torch.Tensor)
                if is_tensor or (isinstance(part, int) and part % 16 == 0):
                    place = (i, j) if isinstance(value, tuple) else (i,)
                    attributes[place] = [["tt.divisibility", 16]]
        kind = GluonASTSource if self._kernel.is_gluon() else ASTSource
        source = kind(self._kernel, signature, constants, attributes)
        options = {name: launch[name] for name in OPTIONS if name in launch}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
