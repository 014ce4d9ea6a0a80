"""Measures bounds of speed: the rates of a large matrix product and of a model's own shapes."""

from collections.abc import Callable

import torch
from torch import Tensor

from training.lm.model import LlamaShape

LARGE = 8192  # rows and columns


def matmul_tflops(device: torch.device) -> float:
    """Measures the bf16 rate of a large square product on random data, in TFLOP/s."""
    size = LARGE
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / _seconds(lambda: a @ b, 20) / 1e12


def shape_tflops(shape: LlamaShape, tokens: int, device: torch.device) -> float:
    """Measures the rate of one training step's products at this model's shapes, in TFLOP/s.

    Forward, input gradient and weight gradient of every linear map of a layer, and of the output
    head once; nothing else. No training step of this model can be faster than these.
    """
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = [
        (shape.hidden_size, qkv),
        (shape.num_heads * shape.head_dim, shape.hidden_size),
        (shape.hidden_size, 2 * shape.intermediate_size),
        (shape.intermediate_size, shape.hidden_size),
    ]
    maps = [(size, shape.num_layers) for size in layer]
    maps.append(((shape.hidden_size, shape.vocab_size), 1))
    seconds = flops = 0.0
    for (inputs, outputs), count in maps:
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        gradient = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        for product in (
            lambda x=x, w=weight: x @ w.mT,
            lambda g=gradient, w=weight: g @ w,
            lambda g=gradient, x=x: g.mT @ x,
        ):
            seconds += count * _seconds(product, 5)
            flops += count * 2.0 * tokens * inputs * outputs
    return flops / seconds / 1e12


def _seconds(run: Callable[[], Tensor], repeats: int) -> float:
    for _ in range(3):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats
