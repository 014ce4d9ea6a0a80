"""Keys and values of all layers by two kernels against those of `SelfAttention.store`; on a GPU or
in Triton's interpreter.
"""

import pytest
import torch

from draft_service.models.context_keys import ContextKeys
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers.attention import SelfAttention
from foredraft.layers.rotary import Rotary
from foredraft.models.rope_config import RopeConfig
from testing.triton_device import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

CPU = torch.device("cpu")
LAYERS, HEADS, PAGE = 3, 4, 8


def blocks_of(
    size: int, kv_heads: int, head_dim: int, qk_norm: tuple[float, bool] | None, dtype: torch.dtype
) -> list[SelfAttention]:
    blocks = [
        SelfAttention(
            input_size=size,
            hidden_size=size,
            num_heads=HEADS,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            window=None,
            scale=1.0,
            bias=False,
            output_bias=False,
            qk_norm=qk_norm,
            dtype=dtype,
            device=CPU,
        )
        for _ in range(LAYERS)
    ]
    generator = torch.Generator().manual_seed(3)
    for block in blocks:
        for name, weight in block.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            weight.data.copy_(1 + values if "norm" in name else values * size**-0.5)
    return blocks


@pytest.mark.parametrize("qk_norm", [None, (1e-5, False), (1e-5, True)])
@pytest.mark.parametrize(
    ("rows", "size", "kv_heads", "head_dim"),
    [(1, 256, 2, 64), (9, 256, 3, 64), (17, 136, 1, 40), (72, 128, 2, 64), (128, 256, 2, 32)],
)
def test_they_are_those_of_the_layers(
    rows: int, size: int, kv_heads: int, head_dim: int, qk_norm: tuple[float, bool] | None
) -> None:
    dtype = torch.float16  # the interpreter multiplies the bits of bfloat16
    blocks = blocks_of(size, kv_heads, head_dim, qk_norm, dtype)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    slots = torch.randperm(20 * PAGE, generator=generator)[:rows]
    positions = torch.randint(1000, (rows,), generator=generator)
    rope = RopeConfig(theta=10000.0)

    def cache(device: torch.device) -> PagedKV:
        return PagedKV(LAYERS, 20, PAGE, kv_heads, head_dim, dtype, device)

    want = cache(CPU)
    angles = Rotary(rope, head_dim, CPU).angles(positions, dtype)
    for index, block in enumerate(blocks):
        block.store(x, angles, index, slots, want)
    moved = [block.to(DEVICE) for block in blocks]
    context, found = ContextKeys(moved, HEADS * head_dim), cache(DEVICE)
    assert context.takes(x.to(DEVICE), found)
    angles = Rotary(rope, head_dim, CPU).angles(positions, torch.float32)
    context.store(
        x.to(DEVICE), (angles[0].to(DEVICE), angles[1].to(DEVICE)), slots.to(DEVICE), found
    )
    torch.testing.assert_close(found.data.cpu(), want.data, rtol=4e-3, atol=4e-3)
    assert not context.takes(x.new_zeros(129, size), found)
