"""Attention by Triton kernels against a float64 loop over rows and keys; on a GPU or in Triton's
interpreter.
"""

import dataclasses

import numpy as np
import pytest
import torch

from foredraft import device_limits
from foredraft.attention.base import SequenceSpan
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.sdpa import SdpaAttention
from foredraft.attention.triton_plan import splits_for
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from testing.attention_spans import SCALE, batch_of, brute_force, random_span, slots_of
from testing.triton_device import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def filled_cache(rng, num_pages, page_size, num_kv_heads, head_dim, dtype):
    kv = PagedKV(2, num_pages, page_size, num_kv_heads, head_dim, dtype, DEVICE)
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    return kv


def check(kv, spans, num_heads, window, num_splits=None, dtype=None):
    """Compares all rows of one layer with the loop."""
    dtype = dtype or kv.data.dtype
    batch = batch_of(spans, kv.page_size)
    batch.positions = batch.positions.to(DEVICE)
    rng = np.random.default_rng(batch.num_rows)
    head_dim = kv.data.shape[-1]
    queries = torch.from_numpy(rng.normal(size=(batch.num_rows, num_heads, head_dim)))
    queries = queries.to(DEVICE, dtype)
    backend = TritonAttention()
    plan = backend.plan(batch, kv, (window,), num_heads // kv.num_kv_heads)
    if num_splits is not None:
        plan.num_splits = num_splits
    out = torch.full((batch.num_rows, num_heads * head_dim), torch.nan, dtype=dtype, device=DEVICE)
    backend.attend(plan, queries, 1, window, SCALE, out)
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, kv.page_size, 0, span.num_keys)
        keys, values = (x.cpu().double()[:, slots] for x in (kv.keys(1), kv.values(1)))
        want = brute_force(span, queries[rows].cpu().double(), keys, values, window)
        got = out[rows].cpu().double()
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (7, 1)])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force(heads, window, seed):
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    kv = filled_cache(rng, 60, 4, num_kv_heads, 8, torch.float32)
    free = list(rng.permutation(60))
    spans = []
    for _ in range(3):
        first_row = sum(span.num_rows for span in spans)
        spans.append(
            random_span(rng, first_row, free, 4, contiguous=False, max_rows=14, max_prefix=50)
        )
    check(kv, spans, num_heads, window, num_splits=2**seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_types_and_head_sizes(dtype, head_dim):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies the bits of bfloat16")
    rng = np.random.default_rng(head_dim)
    kv = filled_cache(rng, 40, 4, 2, head_dim, dtype)
    free = list(rng.permutation(40))
    spans = []
    for _ in range(2):
        first_row = sum(span.num_rows for span in spans)
        spans.append(
            random_span(rng, first_row, free, 4, contiguous=False, max_rows=20, max_prefix=40)
        )
    check(kv, spans, 4, None)
    check(kv, spans, 4, 5)


@pytest.mark.parametrize("cut_keys", [False, True])
def test_few_variants_compute_the_same(cut_keys):
    rng = np.random.default_rng(11)
    kv = filled_cache(rng, 60, 4, 2, 64, torch.float16)
    for has_trees in (False, True):
        free = list(rng.permutation(60))
        spans = []
        while len(spans) < 2:
            first_row = sum(span.num_rows for span in spans)
            span = random_span(
                rng, first_row, free, 4, contiguous=False, max_rows=30, max_prefix=40
            )
            if span.tail_mask is None or has_trees:
                spans.append(span)
        with few_variants(cut_keys):
            check(kv, spans, 8, None)
            if cut_keys and not has_trees:
                check(kv, spans, 8, None, num_splits=2)
                check(kv, spans, 8, 9, num_splits=8)


@pytest.mark.parametrize("window", [None, 40])
def test_a_long_chunk_is_cut_into_blocks_of_rows(window):
    rng = np.random.default_rng(5)
    kv = filled_cache(rng, 20, 16, 1, 16, torch.float32)
    pages = rng.permutation(20)
    chunk = SequenceSpan(0, np.arange(37, 137), pages[:9], 3, 37, 37)
    row = SequenceSpan(100, np.array([70]), pages[9:], 0, 70, 70)
    check(kv, [chunk, row], 2, window)
    check(kv, [chunk, row], 2, window, num_splits=4)


def test_causal_rows_with_positions_of_their_own():
    rng = np.random.default_rng(6)
    kv = filled_cache(rng, 8, 4, 1, 16, torch.float32)
    positions = np.array([12, 15, 16])
    span = SequenceSpan(0, positions, rng.permutation(8), 0, 12, 12, None, positions)
    check(kv, [span], 2, 4)


def test_padding_sequences_disturb_nobody():
    rng = np.random.default_rng(7)
    kv = filled_cache(rng, 8, 4, 1, 16, torch.float32)
    span = SequenceSpan(0, np.array([10, 11]), rng.permutation(8), 0, 10, 10)
    padding = SequenceSpan(2, np.array([5, 6]), rng.permutation(8), 0, 5, 5)
    batch = batch_of([span, padding], 4)
    batch.positions = batch.positions.to(DEVICE)
    queries = torch.randn(4, 2, 16, device=DEVICE)
    backend = TritonAttention()
    plan = backend.plan(batch, kv, (None,), 2)
    plan.num_rows = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for num_splits in (1, 4):
        parts = dataclasses.replace(plan, num_splits=num_splits)
        out = torch.full((4, 32), 7.0, device=DEVICE)
        backend.attend(parts, queries, 0, None, SCALE, out)
        want = torch.empty(4, 32, device=DEVICE)
        alone = SdpaAttention().plan(batch_of([span], 4), kv, (None,), 2)
        SdpaAttention().attend(alone, queries, 0, None, SCALE, want)
        torch.testing.assert_close(out[:2], want[:2], rtol=2e-5, atol=2e-5)
        if num_splits == 1:
            assert bool((out[2:] == 7.0).all())


def test_a_batch_that_brings_its_plan_keeps_it():
    kv = PagedKV(1, 4, 4, 1, 16, torch.float32, DEVICE)
    batch = batch_of([SequenceSpan(0, np.array([1]), np.array([0]), 0, 1, 1)], 4)
    backend = TritonAttention()
    plan = backend.plan(batch, kv, (None,), 1)
    batch.plan = plan
    assert backend.plan(batch, kv, (None,), 1) is plan


def test_splits_fill_the_device_and_no_more(monkeypatch):
    monkeypatch.setattr(device_limits, "INTERPRETED_UNITS", 100)
    kv = PagedKV(1, 1, 4, 8, 16, torch.float32, "cpu")
    assert splits_for(1, 1, kv, 100_000) == 32
    assert splits_for(1, 1, kv, 300) == 4
    assert splits_for(8, 1, kv, 100_000) == 4
    eight_bit = PagedKV(1, 1, 4, 8, 16, torch.float8_e4m3fn, "cpu")
    assert splits_for(24, 1, kv, 100_000) == 2
    assert splits_for(24, 1, eight_bit, 100_000) == 1
    assert splits_for(8, 4, kv, 100_000) == 2
    assert splits_for(1, 32, kv, 4096) == 4
    assert splits_for(8, 32, kv, 100_000) == 1
    assert splits_for(64, 32, kv, 100_000) == 1


def test_agrees_with_sdpa():
    rng = np.random.default_rng(8)
    kv = filled_cache(rng, 60, 4, 2, 16, torch.float32)
    free = list(rng.permutation(60))
    spans = []
    for _ in range(4):
        first_row = sum(span.num_rows for span in spans)
        spans.append(random_span(rng, first_row, free, 4, contiguous=False))
    batch = batch_of(spans, 4)
    batch.positions = batch.positions.to(DEVICE)
    queries = torch.randn(batch.num_rows, 6, 16, device=DEVICE)
    outs = []
    for backend in (SdpaAttention(), TritonAttention()):
        plan = backend.plan(batch, kv, (None, 7), 3)
        for window in (None, 7):
            outs.append(torch.empty(batch.num_rows, 96, device=DEVICE))
            backend.attend(plan, queries, 0, window, SCALE, outs[-1])
    torch.testing.assert_close(outs[0], outs[2], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(outs[1], outs[3], rtol=2e-5, atol=2e-5)
