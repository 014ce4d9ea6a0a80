"""SDPA attention over pages against a float64 loop over rows and keys."""

import numpy as np
import pytest
import torch

from foredraft.attention import sdpa
from foredraft.attention.base import Batch, SequenceSpan
from foredraft.attention.sdpa import SdpaAttention
from foredraft.kvcache.paged_kv import PagedKV

PAGE_SIZE, NUM_PAGES, HEAD_DIM = 4, 40, 8
SCALE = 0.31


def brute_force(span, queries, keys, values, window):
    """Row by row, key by key. keys, values: [num_kv_heads, num_keys, head_dim]; queries: [n, heads, head_dim]."""
    out = torch.zeros_like(queries)
    group = queries.shape[1] // keys.shape[0]
    for row in range(span.num_rows):
        seen = []
        for key in range(span.num_keys):
            tail = key - span.prefix_len
            position = key
            if tail < 0:
                visible = key >= span.prefix_start
            elif span.tail_mask is None:
                visible = tail <= row
            else:
                visible = bool(span.tail_mask[row, tail])
            if tail >= 0 and span.tail_positions is not None:
                position = int(span.tail_positions[tail])
            if window is not None and position <= int(span.positions[row]) - window:
                visible = False
            if visible:
                seen.append(key)
        for head in range(queries.shape[1]):
            scores = keys[head // group, seen] @ queries[row, head] * SCALE
            out[row, head] = torch.softmax(scores, 0) @ values[head // group, seen]
    return out.flatten(1)


def random_span(rng, first_row, free_pages, *, contiguous):
    """A causal chunk, a tree, or a draft's scratch rows behind a hole."""
    kind = rng.choice(["chunk", "row", "tree", "scratch"])
    prefix_len = int(rng.integers(0, 20))
    prefix_start = int(rng.integers(0, prefix_len + 1)) if rng.random() < 0.3 else 0
    num_rows = 1 if kind == "row" else int(rng.integers(1, 9))
    write_index, mask, tail_positions = prefix_len, None, None
    positions = np.arange(prefix_len, prefix_len + num_rows)
    if kind in ("tree", "scratch"):
        hole = int(rng.integers(0, 7)) if kind == "scratch" else 0
        write_index = prefix_len + hole
        mask = torch.zeros(num_rows, hole + num_rows, dtype=torch.bool)
        depth = np.zeros(num_rows, dtype=np.int64)
        for row in range(num_rows):
            parent = int(rng.integers(-1, row)) if row else -1
            if parent >= 0:
                mask[row] = mask[parent]
                depth[row] = depth[parent] + 1
            mask[row, hole + row] = True
            if hole:
                mask[row, int(rng.integers(0, hole))] = True
        positions = prefix_len + depth
        tail_positions = np.concatenate([prefix_len + rng.integers(0, 3, hole), positions])
    num_pages = -(-(write_index + num_rows) // PAGE_SIZE)
    pages = [free_pages.pop() for _ in range(num_pages)]
    if contiguous:
        pages.sort()
    return SequenceSpan(
        first_row=first_row,
        positions=positions,
        pages=np.array(pages),
        prefix_start=prefix_start,
        prefix_len=prefix_len,
        write_index=write_index,
        tail_mask=mask,
        tail_positions=tail_positions,
    )


def slots_of(span, first, end):
    keys = np.arange(first, end)
    return torch.from_numpy(span.pages[keys // PAGE_SIZE] * PAGE_SIZE + keys % PAGE_SIZE)


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
        spans.append(random_span(rng, first_row, free, contiguous=contiguous))
    num_rows = sum(span.num_rows for span in spans)
    batch = Batch(
        tokens=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate([span.positions for span in spans])),
        slots=torch.cat([slots_of(span, span.write_index, span.num_keys) for span in spans]),
        spans=spans,
    )
    backend = SdpaAttention()
    windows = (None, 3, 1, 100)
    plan = backend.plan(batch, kv, windows, num_heads // num_kv_heads)
    queries = torch.from_numpy(rng.normal(size=(num_rows, num_heads, HEAD_DIM)))
    for layer, window in ((0, None), (1, None), (1, 3), (0, 1), (1, 100)):
        out = torch.zeros(num_rows, num_heads * HEAD_DIM, dtype=torch.float64)
        backend.attend(plan, queries, layer, window, SCALE, out)
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            slots = slots_of(span, 0, span.num_keys)
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
