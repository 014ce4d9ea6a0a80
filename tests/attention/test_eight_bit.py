"""A cache of 8-bit floats: what is written, and attention over it, against float64 over numbers
rounded by torch's own cast.

The CPU's operations everywhere; the kernels on a GPU or in Triton's interpreter.
"""

import numpy as np
import pytest
import torch

from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.sdpa import SdpaAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.layers import fused
from foredraft.layers.heads import Heads
from testing.attention_spans import SCALE, batch_of, brute_force, random_span, slots_of
from testing.triton_device import DEVICE, INTERPRETED, needs_triton, true_casts
from verify_service.executor.kernels.trees import commit_paths

TYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
SCALES = ((0.5, 2.0), (0.037, 0.11))
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
PAGE_SIZE, NUM_PAGES, KV_HEADS = 4, 60, 2


@pytest.fixture(autouse=True)
def casts(monkeypatch):
    true_casts(monkeypatch)


def rounded(rows, scales, dtype):
    """Returns float64 rows [n, 2 * KV_HEADS, d] after writing with a layer's scales and reading."""
    factors = torch.tensor([scales[0]] * KV_HEADS + [scales[1]] * KV_HEADS).double().view(-1, 1)
    limit = torch.finfo(dtype).max
    return (rows / factors).clamp(-limit, limit).to(dtype).double() * factors


def nearly_all_close(got, want, tolerance):
    """Numbers between two that are kept may fall to either side by another type's rounding: one in
    a thousand.
    """
    far = (got - want).abs() > tolerance * (1 + want.abs())
    assert float(far.double().mean()) < 1e-3, (got - want).abs().max()


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_scaled_rounded_and_bounded(dtype):
    kv = PagedKV(2, 8, PAGE_SIZE, KV_HEADS, 8, dtype, "cpu", 1, SCALES)
    assert kv.bytes_per_page() == 2 * 2 * KV_HEADS * PAGE_SIZE * 8
    rows = torch.randn(5, 2 * KV_HEADS, 8) * 3
    rows[1, 0, :4] = torch.tensor([1e6, -1e6, torch.inf, -torch.inf])
    rows[2] *= 1e-4  # among the smallest that are kept, and below
    slots = torch.tensor([17, 2, 30, 9, 35])
    kv.write(1, slots, rows)
    want = rounded(rows.double(), SCALES[1], dtype)
    for places, scale, part in (
        (kv.keys(1), SCALES[1][0], want[:, :KV_HEADS]),
        (kv.values(1), SCALES[1][1], want[:, KV_HEADS:]),
    ):
        got = places[:, slots].double().transpose(0, 1) * scale
        assert bool(got.isfinite().all())
        nearly_all_close(got, part, 1e-6)
    assert float(kv.keys(1)[0, 2, 0]) == torch.finfo(dtype).max
    assert not kv.data.float()[0].any()
    kv.copy_slots(torch.tensor([17, 2]), torch.tensor([2, 30]))
    bits = kv.data.view(torch.uint8)
    assert torch.equal(bits[1, :, 2], bits[1, :, 17])
    assert float(kv.keys(1)[0, 30, 0]) == torch.finfo(dtype).max, "read before anything is written"


def filled(rng, dtype, head_dim, device):
    """A cache of numbers of all sizes, and what is to be read of its layer 1 in float64."""
    kv = PagedKV(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, head_dim, dtype, device, 0, SCALES)
    num_slots = NUM_PAGES * PAGE_SIZE
    rows = torch.from_numpy(rng.normal(size=(num_slots, 2 * KV_HEADS, head_dim))).float()
    kv.write(1, torch.arange(num_slots, device=device), rows.to(device))
    known = rounded(rows.double(), SCALES[1], dtype).transpose(0, 1)
    return kv, known[:KV_HEADS], known[KV_HEADS:]


def check(backend, kv, keys, values, rng, dtype, window, num_splits=None, max_rows=14):
    """Compares random spans with a loop over rows and keys."""
    free = list(rng.permutation(NUM_PAGES))
    spans = []
    for _ in range(3):
        first_row = sum(span.num_rows for span in spans)
        spans.append(
            random_span(
                rng, first_row, free, PAGE_SIZE, contiguous=False, max_rows=max_rows, max_prefix=50
            )
        )
    batch = batch_of(spans, PAGE_SIZE)
    device, head_dim, num_heads = kv.data.device, kv.data.shape[-1], 4
    batch.positions = batch.positions.to(device)
    plan = backend.plan(batch, kv, (window,), num_heads // KV_HEADS)
    if num_splits is not None:
        plan.num_splits = num_splits
    queries = torch.from_numpy(rng.normal(size=(batch.num_rows, num_heads, head_dim))).to(dtype)
    out = torch.full((batch.num_rows, num_heads * head_dim), torch.nan, dtype=dtype, device=device)
    backend.attend(plan, queries.to(device), 1, window, SCALE, out)
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, PAGE_SIZE, 0, span.num_keys)
        want = brute_force(span, queries[rows].double(), keys[:, slots], values[:, slots], window)
        torch.testing.assert_close(
            out[rows].cpu().double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5])
def test_sdpa_reads_what_was_kept(dtype, activations, window):
    rng = np.random.default_rng(3)
    check(SdpaAttention(), *filled(rng, dtype, 16, "cpu"), rng, activations, window)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activations", list(TOLERANCE))
@pytest.mark.parametrize(
    ("head_dim", "window", "splits", "max_rows"),
    [(64, None, 1, 8), (80, 5, 4, 8), (64, None, 2, 45)] + [(128, None, 4, 8)] * (not INTERPRETED),
)
def test_kernels_read_what_was_kept(dtype, activations, head_dim, window, splits, max_rows):
    """Few rows take values four at a time, many one by one."""
    rng = np.random.default_rng(head_dim)
    cache = filled(rng, dtype, head_dim, DEVICE)
    check(TritonAttention(), *cache, rng, activations, window, splits, max_rows)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activations", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 20])
def test_the_kernel_writes_what_the_cpu_writes(dtype, activations, rows):
    q_heads, head_dim = 6, 80
    generator = torch.Generator().manual_seed(rows)
    heads = torch.randn(rows, q_heads + 2 * KV_HEADS, head_dim, generator=generator)
    heads[0, q_heads, 0] = 1e4  # larger than anything that is kept, whatever it is rotated to
    heads[0, -1, :2] = torch.tensor([6e4, -6e4])
    heads = heads.to(activations)
    turned = torch.ones(rows, 1, head_dim), torch.zeros(rows, 1, head_dim)  # by nothing
    slots = torch.randperm(40, generator=generator)[:rows]
    ours = PagedKV(2, 10, PAGE_SIZE, KV_HEADS, head_dim, dtype, DEVICE, 0, SCALES)
    angles = tuple(x.to(DEVICE) for x in turned)
    place = Heads(q_heads, angles, ours.keys(1), ours.values(1), slots.to(DEVICE), SCALES[1])
    fused.rotate_and_store(heads.clone().to(DEVICE), place, None)
    theirs = PagedKV(2, 10, PAGE_SIZE, KV_HEADS, head_dim, dtype, "cpu", 0, SCALES)
    theirs.write(1, slots, heads[:, q_heads:])
    assert torch.equal(ours.data.cpu().view(torch.uint8), theirs.data.view(torch.uint8))
    assert float(ours.values(1)[-1, slots[0], 0]) == torch.finfo(dtype).max


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
def test_accepted_rows_are_moved_bit_by_bit(dtype):
    kv = PagedKV(3, 8, PAGE_SIZE, KV_HEADS, 80, dtype, DEVICE)
    bits = kv.data.view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
    want = bits.clone()
    table, committed, path = [5, 2, 7, 0], 3, [0, 2, 3, 6]
    for index, row in enumerate(path):
        source, target = (
            table[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE
            for key in (committed + row, committed + index)
        )
        want[:, :, target] = bits[:, :, source]
    table, committed, path, length = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([table], [committed], [path + [-1] * 4], [len(path)])
    )
    commit_paths(kv, table, committed, path, length)
    assert torch.equal(bits, want)
