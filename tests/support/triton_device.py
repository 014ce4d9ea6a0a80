"""Where tests of Triton kernels run: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Kernels run on the GPU where there is one; without it they need Triton and its interpreter.
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE.type == "cpu" and not INTERPRETED),
    reason="needs Triton and a GPU, or TRITON_INTERPRET=1",
)
