"""Attention in C against a float64 loop over rows and keys, and the bits of rows in other
company.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.attention.base import SequenceSpan
from foredraft.attention.cpu import CpuAttention
from foredraft.cpu import _kernels, products
from foredraft.kvcache.paged_kv import PagedKV
from testing.attention_spans import SCALE, batch_of, brute_force, random_span, slots_of
from testing.interpreter_lock import lets_others_run

KERNELS = range(len(products.KERNELS))
WINDOWS = (None, 3, 1, 100, 61)


def filled(rng, num_kv_heads, head_dim, page_size, num_pages):
    kv = PagedKV(2, num_pages, page_size, num_kv_heads, head_dim, torch.float32, "cpu")
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    return kv


def attend(kv, spans, queries, layer, window, kernel=0):
    """Returns [num_rows, num_heads * head_dim]."""
    backend, group = CpuAttention(kernel), queries.shape[1] // kv.num_kv_heads
    plan = backend.plan(batch_of(spans, kv.page_size), kv, WINDOWS, group)
    out = torch.full((queries.shape[0], queries.shape[1] * queries.shape[2]), float("nan"))
    backend.attend(plan, queries, layer, window, SCALE, out)
    return out


def compare(kv, spans, queries, layer, window, atol=2e-6):
    """Compares every kernel with a loop over rows and keys."""
    found = [attend(kv, spans, queries, layer, window, kernel) for kernel in KERNELS]
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, kv.page_size, 0, span.num_keys)
        keys, values = (x[:, slots].double() for x in (kv.keys(layer), kv.values(layer)))
        want = brute_force(span, queries[rows].double(), keys, values, window)
        for got in found:
            torch.testing.assert_close(got[rows].double(), want, rtol=1e-5, atol=atol)


def random_spans(rng, page_size, num_pages, count, max_rows, max_prefix, contiguous):
    free = list(range(num_pages))[::-1] if contiguous else list(rng.permutation(num_pages))
    spans = []
    for _ in range(count):
        first_row = sum(span.num_rows for span in spans)
        spans.append(
            random_span(
                rng, first_row, free, page_size, contiguous=contiguous, max_rows=max_rows,
                max_prefix=max_prefix,
            )
        )  # fmt: skip
    return spans


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (7, 1), (16, 2), (24, 8)])
@pytest.mark.parametrize("seed", range(4))
def test_equals_brute_force(heads, seed):
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    head_dim = int(rng.choice([8, 20, 64]))
    kv = filled(rng, num_kv_heads, head_dim, 4, 150)
    spans = random_spans(rng, 4, 150, 3, 20, 150, contiguous=seed == 1)
    num_rows = sum(span.num_rows for span in spans)
    queries = torch.from_numpy(rng.normal(size=(num_rows, num_heads, head_dim))).float()
    for layer, window in ((0, None), (1, None), (1, 3), (0, 1), (1, 100), (0, 61)):
        compare(kv, spans, queries, layer, window)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 112, 128, 256])
def test_widths_of_heads(head_dim):
    rng = np.random.default_rng(head_dim)
    kv = filled(rng, 2, head_dim, 16, 40)
    spans = random_spans(rng, 16, 40, 3, 20, 150, contiguous=False)
    queries = torch.randn(sum(span.num_rows for span in spans), 6, head_dim)
    compare(kv, spans, queries, 1, None)


def test_a_long_chunk_by_several_threads():
    rng = np.random.default_rng(0)
    kv = filled(rng, 2, 64, 16, 40)
    _kernels.set_num_threads(4)
    try:
        for window in (None, 61):
            span = SequenceSpan(0, np.arange(90, 390), rng.permutation(40), 3, 90, 90)
            queries = torch.randn(300, 6, 64)
            compare(kv, [span], queries, 0, window)
    finally:
        _kernels.set_num_threads(1)


def test_other_python_threads_run_meanwhile(monkeypatch):
    """Also where one thread computes: who answers health checks must not wait for a long prompt."""
    rng = np.random.default_rng(0)
    kv, calls, attend_in_c = filled(rng, 2, 64, 16, 40), [], _kernels.attend
    monkeypatch.setattr(_kernels, "attend", lambda *arguments: calls.append(arguments))
    backend, queries, out = CpuAttention(), torch.randn(300, 6, 64), torch.empty(300, 6 * 64)
    span = SequenceSpan(0, np.arange(90, 390), np.arange(40), 3, 90, 90)
    plan = backend.plan(batch_of([span], 16), kv, WINDOWS, 3)
    backend.attend(plan, queries, 0, None, SCALE, out)
    (arguments,) = calls
    assert lets_others_run(lambda: attend_in_c(*arguments))


def one_row(span, row):
    """The row alone, after the keys of its path, as it is decoded token by token."""
    if span.tail_mask is None:
        seen = np.arange(span.prefix_len + row + 1)
    else:
        seen = np.concatenate(
            [np.arange(span.prefix_len), span.prefix_len + np.flatnonzero(span.tail_mask[row])]
        )
    return seen, len(seen) - 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_has_the_bits_of_the_same_row_decoded_alone(kernel, seed):
    """Rows of prompts and trees, whose keys are moved to where one decodes them token by token."""
    rng = np.random.default_rng(seed)
    page_size, head_dim, num_heads = 4, 40, 6
    kv = filled(rng, 2, head_dim, page_size, 300)
    spans = []
    while len(spans) < 4:
        first_row = sum(span.num_rows for span in spans)
        free = list(rng.permutation(75) + 75 * len(spans))
        span = random_span(
            rng, first_row, free, page_size, contiguous=False, max_rows=40, max_prefix=200
        )
        if span.write_index == span.prefix_len:
            spans.append(span)
    queries = torch.randn(sum(span.num_rows for span in spans), num_heads, head_dim)
    for window in WINDOWS:
        got = attend(kv, spans, queries, 1, window, kernel)
        for span in spans:
            slots = slots_of(span, page_size, 0, span.num_keys)
            for row in range(span.num_rows):
                seen, position = one_row(span, row)
                assert position == span.positions[row]
                alone = PagedKV(2, 80, 7, 2, head_dim, torch.float32, "cpu")
                alone.data[:, :, : len(seen)] = kv.data[:, :, slots[seen]]
                own = SequenceSpan(
                    0, np.array([position]), np.arange(80), span.prefix_start, position, position
                )
                at = span.first_row + row
                want = attend(alone, [own], queries[at : at + 1], 1, window, kernel)
                assert torch.equal(got[at], want[0]), (window, row)


def test_all_instruction_sets_that_fuse_give_the_same_bits():
    rng = np.random.default_rng(3)
    kv = filled(rng, 2, 40, 4, 150)
    spans = random_spans(rng, 4, 150, 3, 20, 150, contiguous=False)
    queries = torch.randn(sum(span.num_rows for span in spans), 6, 40)
    fusing = [i for i in KERNELS if products.KERNELS[i] != "portable"]
    results = [attend(kv, spans, queries, 0, 61, kernel) for kernel in fusing]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_keys_that_a_row_does_not_see_are_not_read():
    rng = np.random.default_rng(5)
    kv = filled(rng, 2, 24, 4, 60)
    span = random_span(rng, 0, list(range(60)), 4, contiguous=True, max_prefix=150)
    while span.tail_mask is None or span.num_rows < 4:
        span = random_span(rng, 0, list(range(60)), 4, contiguous=True, max_prefix=150)
    queries = torch.randn(span.num_rows, 4, 24)
    before = attend(kv, [span], queries, 0, 61)
    row = span.num_rows - 1
    hidden = span.prefix_len + torch.nonzero(~span.tail_mask[row])[:, 0].numpy()
    slots = slots_of(span, 4, 0, span.num_keys)
    old = np.arange(max(0, int(span.positions[row]) - 60))
    kv.data[:, :, slots[np.concatenate([hidden, old])]] = float("nan")
    assert torch.equal(attend(kv, [span], queries, 0, 61)[row], before[row])


def test_large_scores():
    rng = np.random.default_rng(6)
    kv = filled(rng, 1, 16, 4, 60)
    span = SequenceSpan(0, np.arange(150, 160), rng.permutation(60), 0, 150, 150)
    queries = 200 * torch.randn(10, 2, 16)
    # Scores of hundreds are rounded to 2e-5, and a weight is e to the power of them.
    compare(kv, [span], queries, 0, None, atol=1e-4)


def test_pages_outside_the_cache_are_refused():
    rng = np.random.default_rng(0)
    kv = filled(rng, 1, 16, 4, 6)
    span = SequenceSpan(0, np.array([9]), np.array([0, 6, 1]), 0, 9, 9)
    batch = batch_of([replace(span, pages=np.array([0, 1, 2]))], 4)
    batch.spans = [span]
    with pytest.raises(ValueError, match="outside the cache"):
        CpuAttention().plan(batch, kv, (None,), 1)
    batch.spans = [replace(span, pages=np.array([0, 1 << 62, 1]))]  # times 4 it is 0
    with pytest.raises(ValueError, match="outside the cache"):
        CpuAttention().plan(batch, kv, (None,), 1)
    batch.spans = [replace(span, pages=np.array([0, 1]))]
    with pytest.raises(ValueError, match="do not hold"):
        CpuAttention().plan(batch, kv, (None,), 1)


def test_spans_that_contradict_themselves_are_refused():
    kv = filled(np.random.default_rng(0), 1, 16, 4, 6)
    causal = SequenceSpan(0, np.arange(9, 12), np.arange(3), 0, 9, 9)
    mask, positions = torch.ones(3, 5, dtype=torch.bool), np.arange(7, 12)
    tree = replace(causal, prefix_len=7, tail_mask=mask, tail_positions=positions)
    wrong = [
        replace(causal, positions=causal.positions.astype(np.int32)),
        replace(causal, pages=causal.pages.astype(np.uint64)),
        replace(causal, prefix_len=7),
        replace(causal, write_index=8),
        replace(causal, prefix_start=-1),
        replace(causal, first_row=1),
        replace(causal, first_row=-1),
        replace(tree, tail_positions=positions[:4]),
        replace(tree, tail_positions=positions.astype(np.float64)),
        replace(tree, tail_mask=mask[:, :4]),
        replace(tree, tail_mask=mask.byte()),
    ]
    batch = batch_of([causal], 4)
    for span in wrong:
        batch.spans = [span]
        with pytest.raises(ValueError, match=r"rows|mask|int64"):
            CpuAttention().plan(batch, kv, (None,), 1)
    for span in (causal, tree):
        batch.spans = [span]
        CpuAttention().plan(batch, kv, (None,), 1)


def test_queries_and_results_in_other_memory():
    kv = filled(np.random.default_rng(0), 2, 16, 4, 6)
    span = SequenceSpan(0, np.arange(9, 12), np.arange(3), 0, 9, 9)
    queries, backend = torch.randn(3, 4, 16), CpuAttention()
    plan = backend.plan(batch_of([span], 4), kv, (None,), 2)
    want = attend(kv, [span], queries, 0, None)
    strided = torch.randn(3, 4, 32)[..., ::2].copy_(queries)
    wide = torch.full((3, 80), 7.0)
    places = torch.zeros(3, 64, dtype=torch.float64), wide[:, 8:72], torch.zeros(64, 3).t()
    for own, out in itertools.product((queries, strided), places):
        backend.attend(plan, own, 0, None, SCALE, out)
        assert torch.equal(out.float(), want)
    assert bool((wide[:, :8] == 7).all())
    assert bool((wide[:, 72:] == 7).all())
    for own, out in ((queries[:2], want[:2]), (queries[:, :2], want), (queries, want[:, :32])):
        with pytest.raises(ValueError, match="3 rows of 4 heads"):
            backend.attend(plan, own, 0, None, SCALE, out)
