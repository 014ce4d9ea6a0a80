"""Attention that gives a position of a text the same bits, whatever else is in the step: against
float64, and bit by bit.
"""

import numpy as np
import pytest
import torch

from foredraft.attention import exact_triton
from foredraft.attention.choice import exact_attention_for
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import SCALE, SequenceSpan, batch_of, brute_force, slots_of
from testing.exact_rows import ExactText, Part, parts_with_other_bits, random_tree
from testing.triton_device import DEVICE, needs_gpu, needs_triton
from tests.attention.segment_sharing import sharing_from

pytestmark = [needs_triton, pytest.mark.gpu]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
sharing = sharing_from(540)


@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"),
    [(torch.float32, (4, 2), 16), (torch.float16, (6, 2), 16), (torch.float16, (7, 1), 32)],
)
def test_equals_brute_force(dtype, heads, head_dim, window):
    rng = np.random.default_rng(head_dim)
    kv = PagedKV(2, 400, 8, heads[1], head_dim, dtype, DEVICE)
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    free = list(rng.permutation(400))
    spans = []
    for prefix_len, num_rows, is_tree in [(509, 9, True), (530, 5, False), (62, 4, True), (30, 40, False), (0, 1, False)]:  # fmt: skip  # noqa: E501
        mask = tail_positions = None
        positions = np.arange(prefix_len, prefix_len + num_rows)
        if is_tree:
            mask = ancestor_mask([int(rng.integers(-1, node)) for node in range(num_rows - 1)])
            positions = tail_positions = prefix_len + mask.sum(1).numpy() - 1
        pages = np.array([free.pop() for _ in range(-(-(prefix_len + num_rows) // 8))])
        first_row = sum(span.num_rows for span in spans)
        spans.append(
            SequenceSpan(
                first_row, positions, pages, 0, prefix_len, prefix_len, mask, tail_positions
            )
        )
    batch = batch_of(spans, 8)
    batch.positions = batch.positions.to(DEVICE)
    queries = torch.from_numpy(rng.normal(size=(batch.num_rows, heads[0], head_dim)))
    queries = queries.to(DEVICE, dtype)
    backend = ExactAttention()
    plan = backend.plan(batch, kv, (window,), heads[0] // heads[1])
    out = torch.full((batch.num_rows, heads[0] * head_dim), torch.nan, dtype=dtype, device=DEVICE)
    backend.attend(plan, queries, 1, window, SCALE, out)
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, 8, 0, span.num_keys)
        keys, values = (x.cpu().double()[:, slots] for x in (kv.keys(1), kv.values(1)))
        want = brute_force(span, queries[rows].cpu().double(), keys, values, window)
        got = out[rows].cpu().double()
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def companies(rng):
    """Steps in which parts of a text of 1,100 positions are computed."""
    positions = [0, 1, 63, 64, 65, 400, 511, 512, 513, 1023, 1024, 1099]
    yield from ([Part(position)] for position in positions)
    yield [Part(position) for position in (5, 64, 700, 1090, 511, 512, 1024, 333)]
    for start, rows in [(0, 3), (60, 8), (510, 5), (1020, 16), (440, 32), (100, 200), (3, 700)]:
        yield [Part(start, rows)]
    yield [Part(7), Part(60, 8), Part(510, 4), Part(0, 130), Part(900, 64)]
    # Paths that cross a tile's and a segment's end, and one that is longer than a tile.
    for start, depth, nodes in [(10, 3, 7), (62, 5, 11), (508, 6, 15), (512, 4, 11), (1022, 7, 63), (440, 90, 120)]:  # fmt: skip  # noqa: E501
        yield [random_tree(rng, start, depth, nodes)]
    trees = [random_tree(rng, start, 6, 15) for start in (500, 0, 1020)]
    yield [trees[0], Part(64, 4), trees[1], Part(33), trees[2], Part(600, 100)]


KINDS = [
    ((32, 8), 128, torch.bfloat16, torch.bfloat16),
    ((8, 4), 64, torch.float16, torch.float16),
    ((8, 4), 256, torch.bfloat16, torch.bfloat16),
    ((28, 4), 128, torch.float16, torch.float16),
    ((32, 8), 128, torch.bfloat16, torch.float8_e4m3fn),
    ((4, 4), 80, torch.bfloat16, torch.bfloat16),
]


@needs_gpu
@pytest.mark.usefixtures("sharing")
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("heads", "head_dim", "dtype", "kv_dtype"), KINDS)
def test_a_row_has_the_same_bits_in_any_company(heads, head_dim, dtype, kv_dtype, window):
    text = ExactText(1100, heads, head_dim, dtype, kv_dtype, DEVICE)
    backend = exact_attention_for(DEVICE)
    wanted = text.rows(backend, [Part(0, text.num_positions)], window)
    for parts in companies(np.random.default_rng(1)):
        found = text.rows(backend, parts, window)
        assert parts_with_other_bits(found, wanted) == [], parts


@needs_gpu
def test_a_change_of_the_segments_is_found(monkeypatch):
    text = ExactText(1100, (32, 8), 128, torch.bfloat16, torch.bfloat16, DEVICE)
    wanted = text.rows(ExactAttention(), [Part(0, text.num_positions)])
    monkeypatch.setattr(exact_triton, "NEAR", 512)
    found = text.rows(ExactAttention(), [Part(1099)])
    assert parts_with_other_bits(found, wanted) == [1099]


@needs_gpu
def test_a_tree_whose_last_tile_is_shared_is_found():
    text = ExactText(1100, (32, 8), 128, torch.float16, torch.float16, DEVICE)
    tree = random_tree(np.random.default_rng(3), 440, 90, 120)
    # This backend reads a tree's keys where they lie, so that those of other paths stand between a
    # row's own.
    wanted = text.rows(TritonAttention(), [Part(440, 91)])
    assert parts_with_other_bits(text.rows(TritonAttention(), [tree]), wanted)
