"""Prompts on Hopper cards: bit by bit against the Triton kernel of the same arithmetic, and
compiled for the card where there is none.
"""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foredraft.attention import hopper_prompts
from foredraft.attention.exact_triton import ExactAttention
from foredraft.attention.hopper_prompts import BLOCK_M, HopperAttention, blocks_of, has_kernel
from foredraft.attention.prompts import PromptPlan
from foredraft.kvcache.paged_kv import PagedKV
from testing.attention_spans import SequenceSpan, batch_of
from testing.triton_compiled import SHARED, Recorder
from testing.triton_device import INTERPRETED

CUDA = torch.device("cuda")
needs_hopper = pytest.mark.skipif(not has_kernel(CUDA), reason="needs a Hopper card")
needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler"
)


def spans_of(sizes, page_size, rng):
    """Spans of causal rows: (keys before them, rows) each, on pages in any order."""
    counts = [-(-(before + rows) // page_size) for before, rows in sizes]
    free = list(rng.permutation(sum(counts)))
    spans, first_row = [], 0
    for (before, rows), count in zip(sizes, counts, strict=True):
        pages = np.array([free.pop() for _ in range(count)])
        positions = np.arange(before, before + rows)
        spans.append(SequenceSpan(first_row, positions, pages, 0, before, before))
        first_row += rows
    return spans, sum(counts)


@pytest.mark.parametrize("group", [1, 4, 7])
def test_each_line_is_in_one_block_and_the_longest_are_first(group):
    spans, _ = spans_of([(0, 300), (1000, 1), (77, 129)], 16, np.random.default_rng(0))
    sequence, block = blocks_of(spans, group)
    lines = [
        (one, line)
        for one, index in zip(sequence, block, strict=True)
        for line in range(index * BLOCK_M, min((index + 1) * BLOCK_M, spans[one].num_rows * group))
    ]
    assert len(lines) == len(set(lines)) == sum(span.num_rows for span in spans) * group
    ends = [
        spans[one].prefix_len + min(spans[one].num_rows, -(-(index + 1) * BLOCK_M // group))
        for one, index in zip(sequence, block, strict=True)
    ]
    assert ends == sorted(ends, reverse=True)


@pytest.mark.parametrize(
    ("sizes", "settings", "is_taken"),
    [
        ([(0, 1), (0, 2000)], {}, True),
        ([(0, 2000), (50, 5)], {}, True),
        ([(0, 130)], {}, False),  # too few programs
        ([(0, 100)] * 20, {}, False),
        ([(0, 2000)], {"windows": (None, 100)}, False),
        ([(0, 2000)], {"dtype": torch.float32}, False),
        ([(0, 2000)], {"head_dim": 256}, False),
        ([(0, 2000)], {"page_size": 32}, False),
        ([(0, 2000)], {"dtype": torch.float16}, False),
        ([(0, 2000)], {"group": 7}, False),
    ],
)
def test_takes_prompts_that_it_can(monkeypatch, sizes, settings, is_taken):
    monkeypatch.setattr(hopper_prompts, "compute_units", lambda device: 132)
    page_size = settings.get("page_size", 16)
    spans, num_pages = spans_of(sizes, page_size, np.random.default_rng(0))
    dtype = settings.get("dtype", torch.bfloat16)
    kv = PagedKV(1, num_pages, page_size, 2, settings.get("head_dim", 64), dtype, "cpu")
    planned = []
    others = SimpleNamespace(plan=lambda batch, *rest: planned.append(len(batch.spans)))
    backend = HopperAttention(others)  # type: ignore[arg-type]
    windows = settings.get("windows", (None,))
    plan = backend.plan(batch_of(spans, page_size), kv, windows, settings.get("group", 4))
    assert isinstance(plan, PromptPlan) == is_taken
    assert sum(planned) == len(spans)
    if is_taken:
        alone = max(rows for _, rows in sizes)
        least = backend.prompt_rows(4, kv)
        assert least is not None
        assert least <= alone
        for rows in (least - 1, least):
            spans, _ = spans_of([(0, rows)], page_size, np.random.default_rng(0))
            plan = backend.plan(batch_of(spans, page_size), kv, (None,), 4)
            assert isinstance(plan, PromptPlan) == (rows == least)


STEPS = {
    "one": [(0, 1100)],
    "behind other rows": [(700, 1), (3, 40), (0, 128), (77, 1000), (1500, 129)],
    "after many keys": [(3000, 1313)],
    "whole tiles": [(64, 960), (0, 512)],
}


@needs_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((32, 8), 64), ((16, 4), 128)])
def test_has_the_bits_of_the_triton_kernel(heads, head_dim, step):
    rng = np.random.default_rng(len(step))
    dtype, page_size = torch.bfloat16, 16
    spans, num_pages = spans_of(STEPS[step], page_size, rng)
    kv = PagedKV(2, num_pages, page_size, heads[1], head_dim, dtype, CUDA)
    kv.data.normal_()
    kv.data[:, : heads[1], ::97] *= 6
    kv.data[:, heads[1] :, ::53] *= 30
    for span in spans:  # numbers behind the last key must not matter
        end = span.num_keys % page_size
        if end:
            first = int(span.pages[-1]) * page_size
            kv.data[:, :, first + end : first + page_size] = torch.nan
    batch = batch_of(spans, page_size)
    batch.positions = batch.positions.to(CUDA)
    # Queries lie in rows with their keys and values.
    rows = torch.randn(batch.num_rows, heads[0] + 2 * heads[1], head_dim, device=CUDA, dtype=dtype)
    found = []
    for backend in (ExactAttention(), HopperAttention(ExactAttention())):
        plan = backend.plan(batch, kv, (None,), heads[0] // heads[1])
        shape = batch.num_rows, heads[0] * head_dim
        out = torch.full(shape, torch.nan, dtype=dtype, device=CUDA)
        backend.attend(plan, rows[:, : heads[0]], 1, None, head_dim**-0.5, out)
        found.append(out)
    assert isinstance(plan, PromptPlan)
    assert torch.equal(found[0].view(torch.int16), found[1].view(torch.int16))


@needs_compiler
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_for_the_card_and_fits(monkeypatch, head_dim):
    from foredraft.attention import hopper_prompt_kernels

    recorder = Recorder(hopper_prompt_kernels.attend_prompts)
    monkeypatch.setattr(hopper_prompt_kernels, "attend_prompts", recorder)
    dtype, page_size = torch.bfloat16, 16
    spans, num_pages = spans_of([(30, 1100)], page_size, np.random.default_rng(0))
    kv = PagedKV(1, num_pages, page_size, 8, head_dim, dtype, "cpu")
    backend = HopperAttention(ExactAttention())
    batch = batch_of(spans, page_size)
    plan = backend.plan(batch, kv, (None,), 4)
    out = torch.empty(batch.num_rows, 32 * head_dim, dtype=dtype)
    backend.attend(plan, torch.zeros(batch.num_rows, 32, head_dim, dtype=dtype), 0, None, 0.1, out)
    (used,) = recorder.shared_memory(90)
    assert used <= SHARED[90]
