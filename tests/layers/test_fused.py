"""The layers' Triton kernels against the layers on the CPU; on a GPU or in Triton's interpreter."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused
from foredraft.layers.fp8_cuda import quantize_rows
from foredraft.layers.heads import Heads
from foredraft.layers.linear import PlainMethod
from foredraft.layers.mlp import ACTIVATIONS
from foredraft.layers.norm import RMSNorm
from foredraft.layers.rotary import Rotary, rotate
from testing.triton_device import DEVICE, needs_gpu, needs_triton, true_casts

pytestmark = [needs_triton, pytest.mark.gpu]

CPU = torch.device("cpu")
# Kernels round less often than torch does on the CPU, so in 16 bits two roundings may differ.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype):
    torch.testing.assert_close(
        got.cpu().float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def random_norm(size, full_precision, dtype, seed=1):
    norm = RMSNorm(size, 1e-5, full_precision, dtype, CPU)
    norm.weight.copy_(1 + 0.3 * random(size, seed=seed))
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("full_precision", [False, True])
@pytest.mark.parametrize("size", [40, 4096, 5120])
def test_norm(dtype, full_precision, size):
    norm = random_norm(size, full_precision, dtype)
    x = random(3, size, dtype=dtype)
    moved, weight = x.to(DEVICE), norm.weight.to(DEVICE)
    close(fused.rms_norm(moved, weight, 1e-5, norm.full_precision), norm(x), dtype)
    wide = torch.zeros(3, 2 * size, dtype=dtype, device=DEVICE)
    fused.rms_norm(moved, weight, 1e-5, norm.full_precision, wide[:, size:])
    close(wide[:, size:], norm(x), dtype)
    assert not bool(wide[:, :size].any())
    heads = random(2, 3, size, dtype=dtype)
    got = fused.rms_norm(heads.to(DEVICE), weight, 1e-5, norm.full_precision)
    close(got, norm(heads), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 4096])
def test_norm_of_rows_of_a_table(dtype, size):
    norm, table = random_norm(size, False, dtype), random(9, size, dtype=dtype)
    rows = torch.tensor([8, 0, 3, 3, 7])
    weight, moved = norm.weight.to(DEVICE), table.to(DEVICE)
    out = torch.zeros(5, 2 * size, dtype=dtype, device=DEVICE)
    copy = torch.zeros(5, size, dtype=dtype, device=DEVICE)
    fused.norm_of_rows(moved, rows.to(DEVICE), weight, 1e-5, False, out[:, size:], copy)
    close(out[:, size:], norm(table[rows]), dtype)
    assert torch.equal(copy.cpu(), table[rows])
    assert not bool(out[:, :size].any())
    want = torch.zeros(5, size, dtype=dtype)
    norm.of_rows(table, rows, want)
    assert torch.equal(want, norm(table[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_post", [False, True])
@pytest.mark.parametrize("with_copy", [False, True])
def test_adding_and_norm(dtype, with_post, with_copy):
    size = 200
    norm, post_norm = random_norm(size, True, dtype), random_norm(size, True, dtype, 2)
    stream, delta = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=3)
    moved, moved_delta = stream.clone().to(DEVICE), delta.clone().to(DEVICE)
    wide = torch.zeros(5, 3 * size, dtype=dtype, device=DEVICE)
    want_copy = torch.zeros(5, size, dtype=dtype)
    want = norm.add(
        stream, delta, post_norm if with_post else None, want_copy if with_copy else None
    ).rows
    got = fused.add_norm(
        moved,
        moved_delta,
        norm.weight.to(DEVICE),
        1e-5,
        norm.full_precision,
        (post_norm.weight.to(DEVICE), 1e-5) if with_post else None,
        wide[:, size : 2 * size] if with_copy else None,
    ).rows
    close(moved, stream, dtype)
    close(got, want, dtype)
    close(wide[:, size : 2 * size], want_copy, dtype)
    assert torch.equal(moved_delta.cpu(), delta)


@pytest.mark.parametrize("rounds", [0, 128])  # a scale for a row, or for its blocks
@pytest.mark.parametrize("size", [384, 4096])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_rounding_with_the_norm_is_rounding_after_it(monkeypatch, dtype, size, rounds):
    true_casts(monkeypatch)
    stream, delta, weight = (
        random(*shape, dtype=dtype, seed=seed).to(DEVICE)
        for seed, shape in enumerate(((70, size), (70, size), (size,)))
    )
    reader = PlainMethod()
    reader.rounds = rounds
    got, rounded = fused.add_norm(stream, delta, weight, 1e-5, False, reader=reader)
    assert rounded is not None
    want = quantize_rows(got, rounds)
    assert torch.equal(rounded.numbers.view(torch.uint8), want.numbers.view(torch.uint8))
    assert torch.equal(rounded.scales, want.scales)
    assert fused.add_norm(stream, delta, weight, 1e-5, False).rounded is None
    rows = torch.tensor([3, 0, 69], device=DEVICE)
    got = torch.empty_like(got[:3])
    again = fused.norm_of_rows(stream, rows, weight, 1e-5, False, got, reader=reader)
    assert again is not None
    want = quantize_rows(got, rounds)
    assert torch.equal(again.numbers.view(torch.uint8), want.numbers.view(torch.uint8))
    assert torch.equal(again.scales, want.scales)


def rope(kind, factor=1.0):
    return SimpleNamespace(
        theta=10000.0,
        kind=kind,
        factor=4.0,
        original_max_positions=64,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=True,
        attention_factor=factor,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_adding_parts(dtype, num_parts):
    size = 200
    norm, post_norm = random_norm(size, False, dtype), random_norm(size, False, dtype, 2)
    stream, parts = random(5, size, dtype=dtype), random(num_parts, 5, size, seed=3)
    moved = stream.clone().to(DEVICE)
    want = norm.add(stream, parts.sum(0).to(dtype), post_norm).rows
    got = fused.add_norm(
        moved,
        parts.to(DEVICE),
        norm.weight.to(DEVICE),
        1e-5,
        norm.full_precision,
        (post_norm.weight.to(DEVICE), 1e-5),
    ).rows
    close(moved, stream, dtype)
    close(got, want, dtype)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_angles(kind):
    config = rope(kind, 1.3 if kind == "yarn" else 1.0)
    positions = torch.tensor([0, 1, 77, 4095, 131071])
    want = Rotary(config, 40, CPU).angles(positions, torch.float32)
    frequencies = Rotary(config, 40, DEVICE)._frequencies
    got = fused.angles(positions.to(DEVICE), frequencies, config.attention_factor)
    for one, other in zip(got, want, strict=True):
        # The frequencies' last bit may differ between devices; times the largest position that is
        # the angle's error.
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0.02)
        torch.testing.assert_close(one.cpu()[:3], other[:3], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [None, False, True])
@pytest.mark.parametrize("rows", [1, 6, 70])
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_rotates_and_stores(dtype, norms, rows, head_dim, num_parts):
    q_heads, kv_heads = 6, 2
    # Triton's interpreter does not round to 16 bits as a GPU does.
    parts = (random(num_parts, rows, q_heads + 2 * kv_heads, head_dim) * 16).round() / 16
    heads = parts.sum(0).to(dtype)
    positions = torch.arange(rows) * 5
    angles = Rotary(rope("default"), head_dim, CPU).angles(positions, torch.float32)
    q, k, v = heads.split([q_heads, kv_heads, kv_heads], 1)
    weights = None
    if norms is not None:
        q_norm, k_norm = (random_norm(head_dim, norms, dtype, seed) for seed in (5, 6))
        q, k = q_norm(q), k_norm(k)
        weights = (q_norm.weight.to(DEVICE), k_norm.weight.to(DEVICE), 1e-5, q_norm.full_precision)
    want_q = rotate(q.float(), *angles)
    want_k = rotate(k.float(), *angles)
    kv = PagedKV(2, 30, 4, kv_heads, head_dim, dtype, DEVICE)
    slots = torch.randperm(120, generator=torch.Generator().manual_seed(0))[:rows]
    moved_angles = tuple(x.to(DEVICE) for x in angles)
    given = heads.clone().to(DEVICE) if num_parts == 1 else parts.to(DEVICE)
    queries = given.new_empty(rows, q_heads, head_dim, dtype=dtype) if num_parts > 1 else None
    place = Heads(q_heads, moved_angles, kv.keys(1), kv.values(1), slots.to(DEVICE))
    got = fused.rotate_and_store(given, place, weights, queries=queries)
    assert queries is None or got.data_ptr() == queries.data_ptr()
    close(got, want_q, dtype)
    close(kv.keys(1)[:, slots.to(DEVICE)].transpose(0, 1), want_k, dtype)
    assert torch.equal(kv.values(1)[:, slots.to(DEVICE)].transpose(0, 1).cpu(), v)
    assert not bool(kv.data[0].any())
    free = [slot for slot in range(120) if slot not in slots.tolist()]
    assert not bool(kv.data[1][:, free].any()), "no other slot is touched"


def test_a_cache_of_more_elements_than_32_bits_count():
    q_heads, kv_heads, head_dim, num_slots = 2, 8, 64, (1 << 22) + 4
    heads = random(2, q_heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16).to(DEVICE)
    angles = Rotary(rope("default"), head_dim, CPU).angles(torch.tensor([3, 70]), torch.float32)
    angles = tuple(x.to(DEVICE) for x in angles)
    kept = []
    for size in (4, num_slots):
        # On a CPU only pages that are written take memory.
        data = torch.empty(2 * kv_heads, size, head_dim, dtype=torch.float8_e4m3fn, device=DEVICE)
        slots = torch.tensor([1, size - 1], device=DEVICE)
        keys, values = data[:kv_heads], data[kv_heads:]
        place = Heads(q_heads, angles, keys, values, slots)
        fused.rotate_and_store(heads.clone(), place, None)
        kept.append(torch.stack([data[:, 1], data[:, size - 1]]).float())
    assert kv_heads * num_slots * head_dim > 1 << 31
    assert torch.equal(*kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_product(dtype, kind):
    size = 1500
    both = random(3, 2 * size, dtype=dtype) * 3
    want = ACTIVATIONS[kind](both[:, :size].float()) * both[:, size:].float()
    close(fused.gated(both.to(DEVICE), kind), want, dtype)


@needs_gpu
@pytest.mark.parametrize("norms", [False, True])
def test_a_row_is_rotated_to_the_same_bits_beside_any_number(norms):
    """The order of a head norm's sum follows the layout of a block of heads."""
    q_heads, kv_heads, head_dim, most = 8, 2, 128, 100
    parts = random(2, most, q_heads + 2 * kv_heads, head_dim).to(DEVICE)
    heads = (parts[0] + parts[1]).bfloat16()
    frequencies = random(head_dim // 2).abs().to(DEVICE)
    angles = fused.angles(torch.arange(most, device=DEVICE), frequencies, 1.0)
    weights = random_norm(head_dim, False, torch.bfloat16).weight.to(DEVICE)
    given = (weights, weights, 1e-6, False) if norms else None

    def rotated(count, in_parts=False):
        caches = torch.zeros(2, kv_heads, most, head_dim, dtype=torch.bfloat16, device=DEVICE)
        slots = torch.arange(count, device=DEVICE)
        own = tuple(part[:count] for part in angles)
        mine = parts[:, :count] if in_parts else heads[:count].clone()
        out = heads.new_empty(count, q_heads, head_dim) if in_parts else None
        place = Heads(q_heads, own, caches[0], caches[1], slots)
        queries = fused.rotate_and_store(mine, place, given, queries=out)
        return queries, caches[:, :, :count]

    queries, caches = rotated(most)
    for count, in_parts in itertools.product((1, 4, 5, 64, 65), (False, True)):
        for variants in (nullcontext(), few_variants(cut_keys=True)):
            with variants:
                found, stored = rotated(count, in_parts)
            assert torch.equal(found, queries[:count]), (count, in_parts)
            assert torch.equal(stored, caches[:, :, :count]), (count, in_parts)
