"""Segments of keys on Hopper cards: bit by bit against the Triton kernel of the same arithmetic,
and compiled for the card where there is none.
"""

import importlib.util

import numpy as np
import pytest
import torch

from foredraft.attention import hopper_segments
from foredraft.attention.base import Batch
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.hopper_prompts import has_kernel
from foredraft.attention.hopper_segments import HopperSegments
from foredraft.attention.segments import LARGE, NEAR, SMALL, TILE, PartialSums
from foredraft.attention.triton_plan import plan_of_spans
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import SequenceSpan, batch_of
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import DEVICE, INTERPRETED, needs_triton

CUDA, PAGE_SIZE = torch.device("cuda"), 16
needs_hopper = pytest.mark.skipif(not has_kernel(CUDA), reason="needs a Hopper card")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
)


def spans_of(sizes, rng):
    """Spans on pages in any order: (keys before them, rows, whether they are a tree) each."""
    counts = [-(-(before + rows) // PAGE_SIZE) for before, rows, _ in sizes]
    free = list(rng.permutation(sum(counts)))
    spans, first_row = [], 0
    for (before, rows, is_tree), count in zip(sizes, counts, strict=True):
        pages = np.array([free.pop() for _ in range(count)])
        mask, positions = None, np.arange(before, before + rows)
        if is_tree:
            mask = ancestor_mask([int(rng.integers(-1, node)) for node in range(rows - 1)])
            positions = before + mask.sum(1).numpy() - 1
        tail = positions if is_tree else None
        spans.append(SequenceSpan(first_row, positions, pages, 0, before, before, mask, tail))
        first_row += rows
    return spans, sum(counts)


def segments_of(end):
    """Cuts keys at multiples of SMALL up to NEAR, then of LARGE."""
    cuts = [key for key in range(end) if key % (SMALL if key < NEAR else LARGE) == 0]
    return list(zip(cuts, [*cuts[1:], end], strict=True))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0, 600])
@pytest.mark.parametrize("is_branched", [False, True])
def test_lists_each_segment_once_and_large_ones_first(is_branched, limit):
    from foredraft.attention.segment_list_kernels import FIELDS, list_segments

    rows = [1, 1, 8, 0, 5, 1, 7, 3]
    before = [0, 63, 1020, 77, 5000, 599, 130, 2 * NEAR + LARGE - 3]
    branched = [is_branched and index in (2, 6) for index in range(len(rows))]
    first = [sum(rows[:index]) for index in range(len(rows))]
    positions = [
        start + (0 if tree and row else row)
        for start, count, tree in zip(before, rows, branched, strict=True)
        for row in range(count)
    ]
    wanted = []
    for index, (start, count, tree) in enumerate(zip(before, rows, branched, strict=True)):
        if count == 0 or start + count <= limit:
            continue
        end = start // TILE * TILE if tree else start + count
        for segment, (begin, stop) in enumerate(segments_of(end)):
            tiles = -(-(stop - begin) // TILE)
            wanted.append((index, segment, begin, end, tiles, first[index], count, start))
    numbers = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (first, rows, before)]
    records = torch.full((100, FIELDS), -1, dtype=torch.int32, device=DEVICE)
    num_records = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    list_segments[(3,)](
        records, num_records, *numbers, torch.tensor(positions, device=DEVICE), len(rows), limit,
        BLOCK=8, BRANCHED=is_branched, FIELDS=FIELDS, TILE=TILE, NEAR=NEAR, SMALL=SMALL,
        LARGE=LARGE,
    )  # fmt: skip
    found = [tuple(record) for record in records.tolist()]
    count = int(num_records)
    assert sorted(found[:count]) == sorted(wanted)
    assert all(record == (-1,) * FIELDS for record in found[count:])
    is_large = [begin >= NEAR for _, _, begin, *_ in found[:count]]
    assert is_large == sorted(is_large, reverse=True)


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({}, True),
        ({"rows": 16}, True),
        ({"rows": 17}, False),  # too many lines
        ({"group": 4, "rows": 32}, True),
        ({"batch": 66}, False),  # enough programs without
        ({"batch": 66, "rows": 8}, False),
        ({"batch": 66, "rows": 8, "is_tree": True}, True),  # whose keys Triton reads several times
        ({"batch": 66, "rows": 4, "is_tree": True}, False),
        ({"dtype": torch.float16}, False),
        ({"head_dim": 256}, False),
        ({"page_size": 32}, False),
    ],
)
def test_takes_steps_that_it_can(monkeypatch, settings, is_taken):
    monkeypatch.setattr(hopper_segments, "compute_units", lambda device: 132)
    rows, page_size = settings.get("rows", 1), settings.get("page_size", PAGE_SIZE)
    dtype, head_dim = settings.get("dtype", torch.bfloat16), settings.get("head_dim", 128)
    kv = PagedKV(1, 600, page_size, 2, head_dim, dtype, "cpu")
    sizes = [(900, rows, settings.get("is_tree", False))] * settings.get("batch", 4)
    spans, _ = spans_of(sizes, np.random.default_rng(0))
    group = settings.get("group", 8)
    plan = plan_of_spans(batch_of(spans, page_size), kv, group)
    assert hopper_segments.takes(plan, group) == is_taken


STEPS = {
    "one": [(8000, 1, False)],
    "no whole tile": [(0, 1, False), (3, 8, True), (62, 2, False), (63, 1, False)],
    "ends of segments": [
        (NEAR - 1, 1, False),
        (NEAR, 1, False),
        (SMALL - 4, 4, False),
        (NEAR + LARGE - 2, 5, False),
    ],
    "chains": [(1500, 8, False), (77, 3, False), (2047, 16, False)],
    "trees": [(1500, 32, True), (700, 9, True), (2040, 17, True), (300, 1, False)],
    "many trees": [(3000 + 7 * index, 32, True) for index in range(6)] + [(90, 20, True)] * 6,
    "more items than programs": [(5000 + index, 2, False) for index in range(12)],
}


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((32, 8), 128), ((32, 8), 64), ((16, 8), 128), ((28, 4), 128), ((8, 1), 128), ((5, 5), 64)],
)
def test_has_the_bits_of_the_triton_kernel(heads, head_dim, step):
    rng = np.random.default_rng(len(step))
    group = heads[0] // heads[1]
    most = 128 // group
    sizes = [(before, min(rows, most), is_tree) for before, rows, is_tree in STEPS[step]]
    spans, num_pages = spans_of(sizes, rng)
    kv = PagedKV(2, num_pages, PAGE_SIZE, heads[1], head_dim, torch.bfloat16, CUDA)
    kv.data.normal_()
    kv.data[:, : heads[1], ::97] *= 6
    kv.data[:, heads[1] :, ::53] *= 30
    for span in spans:  # numbers behind the last key must not matter
        end = span.num_keys % PAGE_SIZE
        if end:
            first = int(span.pages[-1]) * PAGE_SIZE
            kv.data[:, :, first + end : first + PAGE_SIZE] = torch.nan
    batch = batch_of(spans, PAGE_SIZE)
    batch.positions = batch.positions.to(CUDA)
    # Queries lie in rows with their keys and values.
    rows = torch.randn(
        batch.num_rows, heads[0] + 2 * heads[1], head_dim, device=CUDA, dtype=kv.data.dtype
    )
    found = []
    for backend in (ExactAttention(), ExactAttention(HopperSegments())):
        plan = plan_of_spans(batch, kv, group)
        # As in a graph: room for the longest context, and sequences that are not there.
        plan.page_tables = torch.nn.functional.pad(plan.page_tables, (0, 200, 0, 1))
        for name in ("first_row", "num_rows", "prefix_start", "prefix_len", "write_index"):
            setattr(plan, name, torch.nn.functional.pad(getattr(plan, name), (0, 1)))
        if plan.tail_mask is not None:
            assert plan.tail_positions is not None
            plan.tail_positions = torch.nn.functional.pad(plan.tail_positions, (0, 0, 0, 1))
        planned = Batch(batch.tokens, batch.positions, batch.slots, spans, plan=plan)
        plan = backend.plan(planned, kv, (None,), group)
        shape = batch.num_rows, heads[0] * head_dim
        out = torch.full(shape, torch.nan, dtype=kv.data.dtype, device=CUDA)
        backend.attend(plan, rows[:, : heads[0]], 1, None, head_dim**-0.5, out)
        found.append(out)
    assert plan.segments is not None
    assert not found[0].isnan().any()
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("rows", "programs_per_unit"), [(1, 2), (16, 2), (32, 1)])
def test_compiles_for_the_card_and_fits(monkeypatch, head_dim, rows, programs_per_unit):
    from foredraft.attention import hopper_segment_kernels

    recorder = Recorder(hopper_segment_kernels.attend_segments)
    monkeypatch.setattr(hopper_segment_kernels, "attend_segments", recorder)
    able = {"launch_pdl": True, "DEPENDENT": True}
    monkeypatch.setattr(hopper_segments, "overlapped", lambda device: able)
    kv = PagedKV(1, 100, PAGE_SIZE, 8, head_dim, torch.bfloat16, "cpu")
    span = SequenceSpan(0, np.arange(900, 900 + rows), np.arange(60), 0, 900, 900)
    plan = plan_of_spans(batch_of([span], PAGE_SIZE), kv, 4)
    queries = torch.zeros(rows, 32, head_dim, dtype=torch.bfloat16)
    listed = hopper_segments.Listed(
        torch.zeros(30, 8, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    )
    lines = torch.zeros(rows * 32 * 10)
    sums = PartialSums(lines[:, None].expand(-1, head_dim), lines, lines, 10)
    HopperSegments().attend(listed, plan, queries, 0, 0.1, sums)
    (used,) = recorder.shared_memory(90)
    assert programs_per_unit * (used + 1024) <= SHARED[90] + 1024
