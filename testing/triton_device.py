"""The device of tests of Triton kernels: a GPU, or Triton's interpreter (TRITON_INTERPRET=1) on
the CPU. Marks tests that need a GPU.
"""

import importlib.util
import os
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Kernels run on the GPU where there is one; without it they need Triton and its interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE.type == "cpu" and not INTERPRETED),
    reason="needs Triton and a GPU, or TRITON_INTERPRET=1",
)


def true_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch cast to 8 bits: Triton 3.6's interpreter loses the carry where rounding reaches
    the next power of two.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    own = interpreter._convert_float
    casts = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}

    def convert(numbers: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source.name != "fp32" or target.name not in casts:
            return own(numbers, source, target, rounding)
        cast = torch.from_numpy(numbers.copy()).to(casts[target.name])
        return cast.view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)
