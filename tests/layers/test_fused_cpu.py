"""The layers' C kernels for a CPU against float64 and torch, and the bits of rows in other
company.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from foredraft.cpu import _kernels
from foredraft.cpu.products import KERNELS
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused_cpu
from foredraft.layers.attention import SelfAttention
from foredraft.layers.heads import Heads
from foredraft.layers.norm import RMSNorm
from foredraft.layers.rotary import Rotary, rotate
from foredraft.layers.row_kernels import kernels_for
from testing.interpreter_lock import lets_others_run

CPU = torch.device("cpu")
ALL = range(len(KERNELS))
FUSING = [i for i in ALL if KERNELS[i] != "portable"]
SIZES = [1, 5, 8, 24, 64, 100, 320, 1153, 5120]
ULP = 2.0**-23


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=4 * ULP, atol=1e-7)


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("size", SIZES)
def test_norm(size, kernel):
    x, weight = random(7, size), 1 + 0.3 * random(size, seed=1)
    got = fused_cpu.rms_norm(x, weight, 1e-5, False, kernel=kernel)
    close(got, norm64(x, weight, 1e-5))
    for row in range(7):
        alone = fused_cpu.rms_norm(x[row : row + 1].clone(), weight, 1e-5, False, kernel=kernel)
        assert torch.equal(got[row], alone[0])
    wide = torch.zeros(7, 3 * size)
    fused_cpu.rms_norm(x, weight, 1e-5, False, wide[:, size : 2 * size], kernel=kernel)
    assert torch.equal(wide[:, size : 2 * size], got)
    assert not bool(wide[:, :size].any())
    assert not bool(wide[:, 2 * size :].any())
    heads = random(2, 3, size)
    close(
        fused_cpu.rms_norm(heads, weight, 1e-5, False, kernel=kernel), norm64(heads, weight, 1e-5)
    )


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("size", [40, 333])
def test_norm_of_rows_of_a_table(size, kernel):
    table, weight, rows = random(9, size), random(size, seed=1), torch.tensor([8, 0, 3, 3, 7])
    out, copy = torch.zeros(5, 2 * size), torch.zeros(5, 3 * size)
    fused_cpu.norm_of_rows(
        table, rows, weight, 1e-5, False, out[:, size:], copy[:, :size], kernel=kernel
    )
    close(out[:, size:], norm64(table[rows], weight, 1e-5))
    assert torch.equal(copy[:, :size], table[rows])
    assert not bool(out[:, :size].any())
    assert not bool(copy[:, size:].any())


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize("size", [24, 100, 320])
def test_adding_and_norm(size, with_post, kernel):
    weight, post = 1 + random(size, seed=1), 1 + random(size, seed=2)
    stream, delta = random(6, size), random(6, size, seed=3)
    added = stream.double() + (norm64(delta, post, 1e-3) if with_post else delta.double())
    moved, copy = stream.clone(), torch.zeros(6, 3 * size)
    got = fused_cpu.add_norm(
        moved, delta, weight, 1e-5, False, (post, 1e-3) if with_post else None,
        copy[:, size : 2 * size], kernel=kernel,
    ).rows  # fmt: skip
    torch.testing.assert_close(moved.double(), added, rtol=1e-6, atol=1e-6)
    # Of the sum as it was rounded.
    close(got, norm64(moved, weight, 1e-5))
    assert torch.equal(copy[:, size : 2 * size], moved)
    assert not bool(copy[:, :size].any())
    assert not bool(copy[:, 2 * size :].any())


def test_many_rows_are_shared_by_threads():
    x, weight, delta = random(900, 320), random(320, seed=1), random(900, 320, seed=2)
    alone, together = x.clone(), x.clone()
    want = fused_cpu.add_norm(alone, delta, weight, 1e-5, False).rows
    _kernels.set_num_threads(3)
    try:
        got = fused_cpu.add_norm(together, delta, weight, 1e-5, False).rows
    finally:
        _kernels.set_num_threads(1)
    assert torch.equal(got, want)
    assert torch.equal(together, alone)


def rope(factor=1.0):
    return SimpleNamespace(theta=10000.0, kind="default", attention_factor=factor)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_angles(factor):
    positions = torch.tensor([[0, 5], [1, 5], [77, 5], [4095, 5], [131071, 5]])[:, 0]
    rotary = Rotary(rope(factor), 40, CPU)
    cos, sin = rotary.angles(positions, torch.float32)
    angles = (positions[:, None].float() * rotary._frequencies).double()
    for got, own, first in ((cos, angles.cos(), 1.0), (sin, angles.sin(), -1.0)):
        want = torch.cat((first * own, own), 1) * factor
        torch.testing.assert_close(got[:, 0].double(), want, rtol=0, atol=2 * ULP)
    assert rotary.angles(positions, torch.bfloat16)[0].dtype == torch.bfloat16


def test_angles_of_a_long_prompt():
    """Shared by threads, they are those of rows alone; other threads of Python run meanwhile."""
    positions, frequencies = torch.arange(20_000), Rotary(rope(), 64, CPU)._frequencies
    alone = [fused_cpu.angles(one[None], frequencies, 1.3) for one in positions[::997]]
    _kernels.set_num_threads(3)
    try:
        found = fused_cpu.angles(positions, frequencies, 1.3)
    finally:
        _kernels.set_num_threads(1)
    for both, ones in zip(found, zip(*alone, strict=True), strict=True):
        assert torch.equal(both[::997], torch.cat(ones))
    # Beside the kernel's own, torch's operations let other threads run.
    addresses = [tensor.data_ptr() for tensor in (positions, frequencies, *found)]
    assert lets_others_run(lambda: _kernels.angles(*addresses, 20_000, 32, 1.3))


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 256])
@pytest.mark.parametrize("q_heads", [0, 6])
def test_rotates_and_stores(q_heads, head_dim, with_norms, kernel):
    rows, kv_heads = 9, 2
    heads = random(rows, q_heads + 2 * kv_heads, head_dim)
    positions = torch.arange(rows) * 5
    angles = Rotary(rope(), head_dim, CPU).angles(positions, torch.float32)
    weights = [1 + 0.3 * random(head_dim, seed=seed) for seed in (5, 6)]
    q, k, v = heads.double().split([q_heads, kv_heads, kv_heads], 1)
    if with_norms:
        q, k = norm64(q, weights[0], 1e-5), norm64(k, weights[1], 1e-5)
    want_q, want_k = (rotate(x, *(a.double() for a in angles)) for x in (q, k))
    slots = torch.randperm(120, generator=torch.Generator().manual_seed(0))[: 2 * rows : 2]
    norms = (*weights, 1e-5, False) if with_norms else None

    def rotated(first, end):
        kv = PagedKV(2, 30, 4, kv_heads, head_dim, torch.float32, "cpu")
        own = tuple(a[first:end] for a in angles)
        place = Heads(q_heads, own, kv.keys(1), kv.values(1), slots[first:end])
        found = fused_cpu.rotate_and_store(heads[first:end].clone(), place, norms, kernel=kernel)
        return found, kv

    got, kv = rotated(0, rows)
    torch.testing.assert_close(got.double(), want_q, rtol=1e-6, atol=1e-6)
    stored = kv.keys(1)[:, slots].transpose(0, 1).double()
    torch.testing.assert_close(stored, want_k, rtol=1e-6, atol=1e-6)
    assert torch.equal(kv.values(1)[:, slots].transpose(0, 1), v.float())
    assert not bool(kv.data[0].any())
    free = [slot for slot in range(120) if slot not in slots.tolist()]
    assert not bool(kv.data[1][:, free].any()), "no other slot is touched"
    for row in range(rows):
        alone, own_kv = rotated(row, row + 1)
        assert torch.equal(alone[0], got[row])
        assert torch.equal(own_kv.data[1, :, slots[row]], kv.data[1, :, slots[row]])


def activation64(x, kind):
    x = x.double()
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return x * torch.special.erfc(-x / math.sqrt(2)) / 2
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activations(kind, kernel):
    """A dense range of numbers, their tails and every number's own result within a few units of
    the last place.
    """
    x = torch.cat((torch.linspace(-30, 30, 100_003), torch.logspace(-30, 2, 999), torch.zeros(1)))
    x = torch.cat((x, -x))
    got = fused_cpu.gated(torch.stack((x, torch.ones_like(x))).flatten()[None], kind, kernel)[0]
    want = activation64(x, kind)
    units = torch.full_like(want, 6)
    # The argument's rounding is a relative error of its square or cube, in the result's tail.
    powers = {"silu": x.abs(), "gelu": x.square() / 4, "gelu_tanh": x.abs() ** 3 / 2}
    units += powers[kind].double()
    bound = units * ULP * want.abs() + 1.2e-38 * (1 + x.double().abs())
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), x[(error / bound).argmax()]


@pytest.mark.parametrize("kernel", ALL)
@pytest.mark.parametrize("size", [1, 7, 832, 1501])
def test_gated_products(size, kernel):
    both = 3 * random(5, 2 * size)
    for kind in ("silu", "gelu", "gelu_tanh"):
        got = fused_cpu.gated(both, kind, kernel)
        want = activation64(both[:, :size], kind) * both[:, size:].double()
        torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=1e-9)
        for row in range(5):
            assert torch.equal(fused_cpu.gated(both[row : row + 1], kind, kernel)[0], got[row])


def test_extreme_numbers():
    both = torch.tensor([[math.inf, -math.inf, math.nan, 1e38, -1e38, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for kernel in ALL:
        got = fused_cpu.gated(both, "silu", kernel)[0].tolist()
        assert got[0] == math.inf
        assert got[3] == pytest.approx(1e38)
        assert got[4] == 0
        assert math.isnan(got[2])


def test_instruction_sets_that_fuse_give_the_same_bits():
    x, weight, delta = random(5, 333), random(333, seed=1), random(5, 333, seed=2)
    results = []
    for kernel in FUSING:
        stream = x.clone()
        normed = fused_cpu.add_norm(
            stream, delta, weight, 1e-5, False, (weight, 1e-5), kernel=kernel
        ).rows
        gates = [
            fused_cpu.gated(x[:, :332].contiguous(), kind, kernel) for kind in fused_cpu._KINDS
        ]
        results.append([stream, normed, *gates])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "cache"), [
    (torch.float32, torch.float32), (torch.float32, torch.float8_e4m3fn),
    (torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16),
])  # fmt: skip
def test_only_float32_uses_kernels(dtype, cache, monkeypatch):
    x, kv = random(3, 64).to(dtype), PagedKV(1, 4, 4, 2, 16, cache, "cpu")
    block = SelfAttention(
        input_size=64, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, window=None,
        scale=0.25, bias=False, output_bias=False, qk_norm=(1e-5, False), dtype=dtype, device=CPU,
    )  # fmt: skip
    for parameter in block.parameters():
        parameter.copy_(random(*parameter.shape) / 8)
    uses = kernels_for(x, kv.data) is not None
    assert uses == (dtype is cache is torch.float32)
    angles = Rotary(rope(), 16, CPU).angles(torch.tensor([0, 1, 2]), dtype)
    block.store(x, angles, 0, torch.tensor([5, 1, 7]), kv)
    heads = torch.nn.functional.linear(x.double(), block.qkv.weight.double())[:, 64:]
    keys, values = heads.view(3, 4, 16).split(2, 1)
    want = rotate(norm64(keys, block.k_norm.weight, 1e-5), *(a.double() for a in angles))
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    tolerance = 0.1 if cache is torch.float8_e4m3fn else tolerance
    got = kv.data[0][:, [5, 1, 7]].transpose(0, 1).double()
    torch.testing.assert_close(got, torch.cat((want, values), 1), rtol=tolerance, atol=tolerance)


def test_modules_choose_by_type():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        norm = RMSNorm(40, 1e-5, True, dtype, CPU)
        norm.weight.copy_(1 + 0.3 * random(40))
        x = random(3, 40).to(dtype)
        tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-6
        torch.testing.assert_close(
            norm(x).double(), norm64(x, norm.weight, 1e-5), rtol=tolerance, atol=tolerance
        )


def test_modules_write_to_any_type():
    norm, post = (RMSNorm(40, 1e-5, True, torch.float32, CPU) for _ in range(2))
    for number, one in enumerate((norm, post)):
        one.weight.copy_(1 + 0.3 * random(40, seed=number))
    x, delta, rows = random(3, 40), random(40, 3, seed=5).t(), torch.tensor([2, 0, 2])
    places = [
        torch.zeros(40, 3).t(),
        torch.zeros(3, 40, dtype=torch.float64),
        torch.zeros(3, 80)[:, ::2],
    ]
    for out, copy in itertools.permutations(places, 2):
        norm(x, out)
        close(out, norm64(x, norm.weight, 1e-5))
        norm.of_rows(x, rows, out, copy)
        close(out, norm64(x[rows], norm.weight, 1e-5))
        assert torch.equal(copy.float(), x[rows])
        stream = x.clone()
        got = norm.add(stream, delta, post, copy).rows
        assert torch.equal(copy.float(), stream)
        torch.testing.assert_close(
            stream.double(), x.double() + norm64(delta, post.weight, 1e-5), rtol=1e-6, atol=1e-6
        )
        close(got, norm64(stream, norm.weight, 1e-5))
    for strided in places:
        strided.copy_(x)
        close(norm(strided.float()), norm64(x, norm.weight, 1e-5))


def refused_norms():
    x, weight, picked = random(3, 40), random(40), torch.tensor([2, 0])
    narrow, place = random(3, 32), torch.zeros(2, 40)
    norm, add, of_rows = fused_cpu.rms_norm, fused_cpu.add_norm, fused_cpu.norm_of_rows
    yield ValueError, lambda: norm(x, random(39), 1e-5, False)
    yield ValueError, lambda: norm(x, weight, 1e-5, False, torch.zeros(2, 40))
    yield ValueError, lambda: add(x, narrow, weight, 1e-5, False)
    yield ValueError, lambda: add(x, x[None], weight, 1e-5, False)
    yield ValueError, lambda: add(x, x.clone(), random(32), 1e-5, False)
    yield ValueError, lambda: add(x, x.clone(), weight, 1e-5, False, (random(32), 1e-5))
    yield ValueError, lambda: add(x, x.clone(), weight, 1e-5, False, None, narrow)
    yield ValueError, lambda: of_rows(x, picked, weight, 1e-5, False, torch.zeros(3, 40))
    yield ValueError, lambda: of_rows(x, picked, weight, 1e-5, False, place, narrow)
    yield ValueError, lambda: of_rows(x, picked.int(), weight, 1e-5, False, place)
    for wrong in (-1, 3, 1 << 40):
        rows = torch.tensor([0, wrong])
        yield IndexError, lambda rows=rows: of_rows(x, rows, weight, 1e-5, False, place)


def refused_rotations():
    kv, slots = PagedKV(1, 4, 4, 2, 16, torch.float32, "cpu"), torch.tensor([3, 1, 7])
    weights = random(16), random(16), 1e-5, False
    right = {
        "heads": random(3, 5, 16), "num_heads": 1, "norms": weights, "keys": kv.keys(0),
        "angles": (random(3, 1, 16), random(3, 1, 16)), "values": kv.values(0), "slots": slots,
    }  # fmt: skip

    def rotate(change=None):
        given = right | (change or {})
        heads, norms = given.pop("heads"), given.pop("norms")
        fused_cpu.rotate_and_store(heads, Heads(**given), norms)

    rotate()
    wrong = [
        {"heads": random(3, 6, 16)}, {"heads": random(5, 3, 16).transpose(0, 1)},
        {"heads": random(3, 5, 8)}, {"angles": (random(3, 1, 16), random(2, 1, 16))},
        {"angles": tuple(random(16, 1, 3).transpose(0, 2) for _ in range(2))},
        {"norms": (random(16), random(8), 1e-5, False)}, {"values": kv.values(0)[:, ::2]},
        {"slots": slots[:2]}, {"slots": slots.int()},
    ]  # fmt: skip
    for change in wrong:
        yield ValueError, lambda change=change: rotate(change)
    for slot in (-1, 16, 1 << 40):
        change = {"slots": torch.tensor([0, 1, slot])}
        yield IndexError, lambda change=change: rotate(change)
    positions = torch.arange(3, dtype=torch.int32)
    yield ValueError, lambda: fused_cpu.angles(positions, random(8), 1.0)


@pytest.mark.parametrize("refused", [refused_norms, refused_rotations])
def test_what_does_not_fit_is_refused(refused):
    for error, call in refused():
        with pytest.raises(error):
            call()


def test_gated_products_of_rows_in_pieces():
    both = random(4, 90)
    got = fused_cpu.gated(both[:, 5:85], "silu")
    assert torch.equal(got, fused_cpu.gated(both[:, 5:85].contiguous(), "silu"))
