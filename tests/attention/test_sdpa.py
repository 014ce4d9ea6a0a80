"""SDPA attention over pages against a float64 loop over rows and keys."""

import numpy as np
import pytest
import torch

from foredraft.attention import sdpa
from foredraft.attention.base import Batch, SequenceSpan
from foredraft.attention.sdpa import SdpaAttention
from foredraft.kvcache.paged_kv import PagedKV
from testing.attention_spans import SCALE, batch_of, brute_force, random_span, slots_of

PAGE_SIZE, NUM_PAGES, HEAD_DIM = 4, 40, 8


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(heads, contiguous, seed, monkeypatch):
    monkeypatch.setattr(sdpa, "BLOCK_ROWS", 3)
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    kv = PagedKV(2, NUM_PAGES, PAGE_SIZE, num_kv_heads, HEAD_DIM, torch.float64, "cpu")
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    free = list(range(NUM_PAGES))[::-1] if contiguous else list(rng.permutation(NUM_PAGES))
    spans = []
    for _ in range(3):
        first_row = sum(span.num_rows for span in spans)
        spans.append(random_span(rng, first_row, free, PAGE_SIZE, contiguous=contiguous))
    num_rows = sum(span.num_rows for span in spans)
    batch = batch_of(spans, PAGE_SIZE)
    backend = SdpaAttention()
    windows = (None, 3, 1, 100)
    plan = backend.plan(batch, kv, windows, num_heads // num_kv_heads)
    queries = torch.from_numpy(rng.normal(size=(num_rows, num_heads, HEAD_DIM)))
    for layer, window in ((0, None), (1, None), (1, 3), (0, 1), (1, 100)):
        out = torch.zeros(num_rows, num_heads * HEAD_DIM, dtype=torch.float64)
        backend.attend(plan, queries, layer, window, SCALE, out)
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            slots = slots_of(span, PAGE_SIZE, 0, span.num_keys)
            want = brute_force(
                span, queries[rows], kv.keys(layer)[:, slots], kv.values(layer)[:, slots], window
            )
            torch.testing.assert_close(out[rows], want, rtol=1e-9, atol=1e-9)


def test_consecutive_pages_are_read_in_place():
    kv = PagedKV(1, 8, PAGE_SIZE, 1, HEAD_DIM, torch.float32, "cpu")
    batch = Batch(
        tokens=torch.zeros(1, dtype=torch.int64),
        positions=torch.tensor([13]),
        slots=torch.tensor([2 * PAGE_SIZE + 13]),
        spans=[SequenceSpan(0, np.array([13]), np.array([2, 3, 4, 5]), 0, 13, 13)],
    )
    plan = SdpaAttention().plan(batch, kv, (None, 6), 1)
    assert plan.spans[None][0].keys == slice(8, 22)
    assert plan.spans[6][0].keys == slice(16, 22), "a window reads its own keys alone"
    assert plan.spans[None][0].mask is None
    assert plan.spans[6][0].mask is None


def test_write_and_copy_slots():
    kv = PagedKV(2, 4, 2, 2, 3, torch.float32, "cpu", num_scratch_pages=1)
    assert list(kv.scratch_pages) == [4]
    assert kv.bytes_per_page() == 2 * 2 * 2 * 2 * 3 * 4
    rows = torch.randn(3, 4, 3)
    kv.write(1, torch.tensor([5, 0, 9]), rows)
    assert torch.equal(kv.keys(1)[:, 5], rows[0, :2])
    assert torch.equal(kv.values(1)[:, 9], rows[2, 2:])
    assert not kv.data[0].any()
    kv.copy_slots(torch.tensor([0, 5]), torch.tensor([5, 9]))
    assert torch.equal(kv.keys(1)[:, 5], rows[1, :2])
    assert torch.equal(kv.values(1)[:, 9], rows[0, 2:]), "read before anything is written"
