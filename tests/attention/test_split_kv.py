"""Split-KV work lists: programs of equal work read each key once, and attention over a list equals
attention by torch.

On a GPU or in Triton's interpreter.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from foredraft.attention.base import SequenceSpan
from foredraft.attention.paged_triton import TritonAttention
from foredraft.attention.split_kv import Balance, Lengths, build_work_lists, spare_items
from foredraft.kvcache.paged_kv import PagedKV
from testing.attention_spans import SCALE, batch_of, random_span, slots_of
from testing.triton_device import DEVICE, INTERPRETED, needs_triton, true_casts

pytestmark = [needs_triton, pytest.mark.gpu]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
SEQUENCE, BLOCK, BEGIN, END, FIRST_ROW, NUM_ROWS, PREFIX_LEN, PARTS, FIRST_PART = range(9)


def work_list(
    num_rows, prefix_start, prefix_len, max_rows, group, splits, *, window=None, masked=False
):
    """Builds a work list for sequences whose rows lie one after another; tiles of 16 x 32."""

    def ints(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    first_row = [max_rows * i for i in range(len(num_rows))]
    positions = [start + row for start in prefix_len for row in range(max_rows)]
    lengths = Lengths(
        ints(first_row),
        ints(num_rows),
        ints(prefix_start),
        # Looks at the second of two levels.
        torch.stack((ints(num_rows), ints(prefix_len))),
        torch.stack((ints(num_rows), ints(prefix_len))),
        torch.tensor([[0] * len(positions), positions], device=DEVICE),
    )
    levels = build_work_lists(
        lengths,
        max_rows=max_rows,
        group=group,
        kv_heads=2,
        splits=splits,
        tiles={"BLOCK_M": 16, "BLOCK_N": 32},
        window=window,
        is_masked=masked,
    )
    return levels[1]


def wanted(num_rows, prefix_start, prefix_len, group, window, masked):
    """(sequence, block): keys [begin, end) that its rows read."""
    found = {}
    for sequence, (rows, start, length) in enumerate(
        zip(num_rows, prefix_start, prefix_len, strict=True)
    ):
        for block in range(-(-rows * group // 16)):
            own = [folded // group for folded in range(16 * block, 16 * block + 16)]
            own = [row for row in own if row < rows]
            end = length + (rows if masked else own[-1] + 1)
            begin = start
            if window is not None:
                begin = max(begin, length + (0 if masked else own[0]) - window + 1)
                begin = min(begin, length) if masked else begin
            found[sequence, block] = begin, end
    return found


@pytest.mark.parametrize("seed", range(12))
def test_every_key_is_in_one_item(seed):
    rng = np.random.default_rng(seed)
    batch, max_rows, group = (
        int(rng.integers(2, 90)),
        int(rng.integers(1, 9)),
        int(rng.choice([2, 4, 7])),
    )
    splits = int(rng.choice([1, 1, 2, 8]))
    window = int(rng.integers(1, 400)) if seed % 3 == 0 else None
    masked = bool(seed % 2)
    num_rows = rng.integers(0, max_rows + 1, batch).tolist()
    prefix_len = (rng.lognormal(5, 1.5, batch).astype(int) + 1).tolist()
    prefix_start = [
        int(rng.integers(0, length)) if rng.random() < 0.3 else 0 for length in prefix_len
    ]
    made = work_list(
        num_rows, prefix_start, prefix_len, max_rows, group, splits, window=window, masked=masked
    )
    items, pairs = made.items.cpu().numpy(), made.pairs.cpu().numpy()
    want = wanted(num_rows, prefix_start, prefix_len, group, window, masked)
    used = items[items[:, PARTS] > 0]
    assert not items[len(used) :, PARTS].any(), "programs without work come last"
    assert not made.counters.any()
    read = {pair: [] for pair in want}
    for place, item in enumerate(used):
        sequence = item[SEQUENCE]
        read[sequence, item[BLOCK]].append((item[BEGIN], item[END]))
        assert item[FIRST_ROW] == sequence * max_rows
        assert item[NUM_ROWS] == num_rows[sequence]
        assert item[PREFIX_LEN] == prefix_len[sequence]
        assert 0 <= place - item[FIRST_PART] < item[PARTS]
    row_blocks = len(pairs) // batch
    for pair, (begin, end) in want.items():
        parts = read[pair]
        assert parts[0][0] == begin
        assert parts[-1][1] == end
        assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))
        assert all(a < b for a, b in parts)
        first = [pair[0], pair[1]]
        place = next(i for i, item in enumerate(used) if list(item[[SEQUENCE, BLOCK]]) == first)
        assert pairs[pair[0] * row_blocks + pair[1]].tolist() == [len(parts), place]
    several = used[:, PARTS] > 1
    assert several.sum() <= made.num_parts
    assert not several[int(several.sum()) :].any()
    # No shorter item would do.
    tiles = [-(-(end - begin) // 32) for begin, end in want.values()]
    limit = len(tiles) + spare_items(len(pairs), splits)
    floor = max(1, -(-sum(tiles) // max(1, len(tiles) * splits)))
    if splits == 1 and 2 * max(tiles, default=1) <= 3 * floor:
        floor = max(tiles, default=1)
    shortest = next(
        size
        for size in itertools.count(min(floor, max(tiles, default=1)))
        if sum(-(-count // size) for count in tiles) <= limit
    )
    longest = max((-(-(end - begin) // 32) for begin, end in used[:, [BEGIN, END]]), default=0)
    assert longest == max((-(-count // -(-count // shortest)) for count in tiles), default=0)


@pytest.mark.parametrize("splits", [1, 4])
def test_even_contexts_are_cut_as_before(splits):
    made = work_list([1] * 8, [0] * 8, [512 - 1] * 8, 1, 4, splits)
    items = made.items.cpu().numpy()
    assert (items[:, PARTS] > 0).sum() == 8 * splits
    used = items[: 8 * splits]
    assert set(used[:, PARTS].tolist()) == {splits}
    assert set((used[:, END] - used[:, BEGIN]).tolist()) == {512 // splits}


def test_one_long_context_is_cut_and_the_others_are_not():
    made = work_list([1] * 8, [0] * 8, [40] * 3 + [8191] + [40] * 4, 1, 4, 1)
    items = made.items.cpu().numpy()
    assert len(items) == 16
    used = items[items[:, PARTS] > 0]
    assert used[:8, SEQUENCE].tolist() == [3] * 8
    assert set((used[:8, END] - used[:8, BEGIN]).tolist()) == {1024}
    assert sorted(used[8:, SEQUENCE].tolist()) == [0, 1, 2, 4, 5, 6, 7]


def test_a_batch_of_padding_has_no_items():
    made = work_list([0] * 4, [0] * 4, [5] * 4, 2, 4, 1)
    assert not made.items[:, PARTS].any()
    assert not made.pairs[:, 0].any()


def spans_of(rng, kind, lengths, page_size, max_rows):
    """Trees, draft's scratch rows or rows one after another, behind as many keys as said, on pages
    in any order.
    """
    spans, first_row = [], 0
    num_pages = sum(-(-(length + 2 * max_rows + 8) // page_size) for length in lengths)
    free = list(rng.permutation(num_pages))
    for length in lengths:
        while True:
            span = random_span(
                rng, first_row, list(free), page_size, contiguous=False, max_rows=max_rows + 1
            )
            if (span.tail_mask is not None) == (kind == "trees"):
                break
        more = length - span.prefix_len
        pages = [free.pop() for _ in range(-(-(span.num_keys + more) // page_size))]
        tail = span.tail_positions
        spans.append(
            dataclasses.replace(
                span,
                positions=span.positions + more,
                pages=np.array(pages),
                prefix_start=int(rng.integers(0, length)) if rng.random() < 0.3 else 0,
                prefix_len=length,
                write_index=span.write_index + more,
                tail_positions=None if tail is None else tail + more,
            )
        )
        first_row += span.num_rows
    return spans, num_pages


@pytest.mark.parametrize(
    ("heads", "kept", "dtype", "window", "kind", "splits"),
    [
        ((4, 2), torch.float32, torch.float32, None, "trees", 1),
        ((7, 1), torch.float32, torch.float32, 150, "trees", 4),
        ((7, 1), torch.float32, torch.float32, None, "causal", 1),
        ((4, 2), torch.float16, torch.float16, 150, "causal", 4),
        ((4, 2), torch.float16, torch.float16, 150, "causal", 1),
        ((4, 1), torch.float8_e4m3fn, torch.float16, None, "trees", 4),
    ],
)
def test_attention_equals_torchs(monkeypatch, heads, kept, dtype, window, kind, splits):
    true_casts(monkeypatch)
    rng = np.random.default_rng(splits)
    num_heads, kv_heads = heads
    spans, num_pages = spans_of(rng, kind, [3, 70, 1, 40, 330, 17], 4, 6)
    kv = PagedKV(2, num_pages, 4, kv_heads, 16, kept, DEVICE)
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    check(kv, spans, num_heads, window, splits, dtype)


@pytest.mark.skipif(
    INTERPRETED, reason="the interpreter takes long, and runs programs one after another"
)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (4, 1), (32, 1), (4, 8)])
def test_attention_of_many_programs(rows, splits):
    rng = np.random.default_rng(rows)
    lengths = [9000, *rng.integers(1, 600, 40).tolist()]
    spans, num_pages = spans_of(rng, "trees" if rows > 1 else "causal", lengths, 16, rows)
    kv = PagedKV(2, num_pages, 16, 8, 128, torch.float16, DEVICE)
    kv.data.copy_(torch.randn(kv.data.shape))
    check(kv, spans, 32, None, splits, torch.float16)


def by_torch(span, queries, keys, values, window):
    """Attention of [n, heads, d] over [kv heads, keys, d], all float64."""
    index = torch.arange(span.num_keys, device=queries.device)
    positions = torch.tensor(span.positions, device=queries.device)[:, None]
    seen = (index >= span.prefix_start).expand(span.num_rows, -1).clone()
    places = index.clone()
    if span.tail_positions is not None:
        places[span.prefix_len :] = torch.tensor(span.tail_positions)
    if span.tail_mask is None:
        seen &= index - span.prefix_len <= torch.arange(span.num_rows, device=index.device)[:, None]
    else:
        seen[:, span.prefix_len :] = span.tail_mask.to(index.device)
    if window is not None:
        seen &= places > positions - window
    group = queries.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("rhd,hkd->hrk", queries, keys) * SCALE
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hrk,hkd->rhd", weights, values).flatten(1)


def check(kv, spans, num_heads, window, splits, dtype):
    """Compares two layers in turn, with a sequence of padding beside the spans, with float64."""
    padding = SequenceSpan(
        sum(span.num_rows for span in spans), np.array([1]), np.array([0]), 0, 1, 1
    )
    batch = batch_of([*spans, padding], kv.page_size)
    batch.positions = batch.positions.to(DEVICE)
    rng = np.random.default_rng(batch.num_rows)
    head_dim = kv.data.shape[-1]
    queries = torch.from_numpy(rng.normal(size=(batch.num_rows, num_heads, head_dim)))
    queries = queries.to(DEVICE, dtype)
    backend, group = TritonAttention(), num_heads // kv.num_kv_heads
    plan = backend.plan(batch, kv, (window,), group)
    num_rows = plan.num_rows.clone()
    num_rows[-1] = 0
    batch.plan = dataclasses.replace(
        plan, num_rows=num_rows, num_splits=splits, is_causal=None, balance=Balance(dtype)
    )
    plan = backend.plan(batch, kv, (window,), group)
    assert bool((plan.balance.work_lists[window][0].items[:, PARTS] > 1).any())
    for layer in (0, 1):
        out = torch.full((batch.num_rows, num_heads * head_dim), 7.0, dtype=dtype, device=DEVICE)
        backend.attend(plan, queries, layer, window, SCALE, out)
        assert bool((out[padding.first_row :] == 7.0).all())
        for span in spans:
            rows = slice(span.first_row, span.first_row + span.num_rows)
            slots = slots_of(span, kv.page_size, 0, span.num_keys)
            keys, values = (
                of[:, slots.to(DEVICE)].double() for of in (kv.keys(layer), kv.values(layer))
            )
            want = by_torch(span, queries[rows].double(), keys, values, window)
            got = out[rows].double()
            torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
