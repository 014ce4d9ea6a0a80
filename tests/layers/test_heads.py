"""Products that rotate heads and write the cache, against products and rotations apart; on a GPU or
interpreted.
"""

import pytest
import torch

from foredraft.layers import fused
from foredraft.layers.exact_linear import ExactMethod, Proofs
from foredraft.layers.heads import Heads
from foredraft.layers.linear import Linear
from testing.triton_device import DEVICE, INTERPRETED, needs_triton, true_casts
from tests.layers.test_quantized_cuda import DTYPES, make, rows

pytestmark = [needs_triton, pytest.mark.gpu]

INPUTS = 512
KINDS = {"as in rows": (DTYPES[0], (1.0, 1.0)), "8-bit": (torch.float8_e4m3fn, (0.25, 0.5))}


def projection(name, outputs, bias):
    if name != "plain":
        return make(name, (outputs, INPUTS), DTYPES[0], bias)[0]
    linear = Linear(INPUTS, outputs, bias, DTYPES[0], DEVICE, method=ExactMethod(Proofs()))
    for parameter in linear.parameters():
        generator = torch.Generator().manual_seed(outputs + parameter.dim())
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * INPUTS**-0.5)
    return linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "head_dim", "bias"),
    [("fp8", 64, True), ("fp8", 128, False), ("fp8-block", 128, True), ("plain", 64, True),
     ("plain", 128, False), ("plain", 256, False)],
)  # fmt: skip
def test_products_write_what_a_rotation_after_them_does(name, head_dim, bias, kind, monkeypatch):
    true_casts(monkeypatch)
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    num_heads, kv_heads, (dtype, scales) = 3, 2, KINDS[kind]
    linear = projection(name, (num_heads + 2 * kv_heads) * head_dim, bias)
    for count in (5,) if INTERPRETED else (1, 5, 17, 33, 64):
        x = rows(count, INPUTS, DTYPES[0])
        angle = torch.rand(count, 1, head_dim // 2, device=DEVICE).repeat(1, 1, 2) * 6
        sign = torch.tensor([-1.0, 1.0], device=DEVICE).repeat_interleave(head_dim // 2)
        angles = angle.cos(), angle.sin() * sign
        slots = torch.randperm(70, device=DEVICE)[:count]
        found, want = (
            [torch.zeros(kv_heads, 70, head_dim, device=DEVICE).to(dtype) for _ in "kv"]
            for _ in "ab"
        )
        heads = linear(x).view(count, -1, head_dim)
        place = Heads(num_heads, angles, *want, slots, scales)
        want += [fused.rotate_and_store(heads, place, None)]
        found += [linear.heads(x, None, Heads(num_heads, angles, *found, slots, scales))]
        for got, expected in zip(found, want, strict=True):
            assert float(expected.float().abs().sum()) > 0
            assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("name", ["fp8", "plain"])
def test_heads_of_other_widths_are_left_to_the_rotation(name, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    linear = projection(name, 4 * 96, False)
    x, keys = rows(1, INPUTS, DTYPES[0]), torch.zeros(1, 2, 96, device=DEVICE)
    slots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert linear.heads(x, None, Heads(2, (keys, keys), keys, keys, slots, (1.0, 1.0))) is None
