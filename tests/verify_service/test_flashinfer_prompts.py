"""Prompts that flashinfer computes beside other sequences: with a stand-in for it that follows its
documented interface, and on a GPU with flashinfer itself.
"""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from foredraft.attention.prompts import PROMPT_ROWS, PromptPlan
from foredraft.attention.sdpa import SdpaAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import ancestor_mask
from testing.attention_spans import SCALE, SequenceSpan, batch_of, brute_force, slots_of
from verify_service.flashinfer_prompts import FlashInferAttention, why_not

PAGE_SIZE = 8


class Wrapper:
    """flashinfer's `BatchPrefillWithPagedKVCacheWrapper` for pages [n, heads, page, dim]."""

    def __init__(self, workspace, layout, backend):
        assert (layout, backend) == ("HND", "fa2")

    def plan(self, rows, pages, indices, last, heads, kv_heads, dim, page_size, **options):
        assert options["causal"]
        assert {x.dtype for x in (rows, pages, indices, last)} == {torch.int32}
        assert indices.max() < 400
        self.asked = rows, pages, indices, last, heads, kv_heads, dim, page_size
        self.scale = options["sm_scale"]

    def run(self, queries, stored, q_scale, out):
        rows, pages, indices, last, heads, kv_heads, dim, page_size = self.asked
        assert queries.shape == out.shape == (rows[-1], heads, dim)
        for i, length in enumerate(last.tolist()):
            own = indices[pages[i] : pages[i + 1]].long()
            num_keys = (len(own) - 1) * page_size + length
            keys, values = (x[own].transpose(0, 1).flatten(1, 2)[:, :num_keys] for x in stored)
            assert keys.shape == (kv_heads, num_keys, dim)
            part = slice(int(rows[i]), int(rows[i + 1]))
            seen = torch.ones(part.stop - part.start, num_keys, dtype=torch.bool)
            seen = seen.tril(num_keys - (part.stop - part.start))
            folded = queries[part].transpose(0, 1)
            wide = (x.repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
            found = torch.nn.functional.scaled_dot_product_attention(
                folded, *wide, attn_mask=seen, scale=q_scale * self.scale
            )
            out[part] = found.transpose(0, 1)


@pytest.fixture
def stand_in(monkeypatch):
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))


def step(rng, kinds):
    """Spans, one after the other: a row that decodes, a tree, a short or a long prompt."""
    free, spans, first_row = list(rng.permutation(400)), [], 0
    for kind in kinds:
        before = int(rng.integers(0, 60))
        rows = {"row": 1, "tree": 6, "short": 20}.get(kind, PROMPT_ROWS + int(rng.integers(0, 40)))
        mask = tail_positions = None
        positions = np.arange(before, before + rows)
        if kind == "tree":
            mask = ancestor_mask([-1, -1, 0, 1, 3])
            positions = tail_positions = before + mask.sum(1).numpy() - 1
        pages = np.array([free.pop() for _ in range(-(-(before + rows) // PAGE_SIZE))])
        spans.append(
            SequenceSpan(first_row, positions, pages, 0, before, before, mask, tail_positions)
        )
        first_row += rows
    return spans


def check(
    backend,
    spans,
    device="cpu",
    dtype=torch.float32,
    heads=(4, 2),
    dim=16,
    tolerance=2e-5,
    cut=None,
):
    rng = np.random.default_rng(3)
    kv = PagedKV(2, 400, PAGE_SIZE, heads[1], dim, dtype, device)
    kv.data.copy_(torch.from_numpy(rng.normal(size=tuple(kv.data.shape))))
    batch = batch_of(spans, PAGE_SIZE)
    batch.positions = batch.positions.to(device)
    # Queries lie in rows with their keys and values.
    both = torch.from_numpy(rng.normal(size=(batch.num_rows, heads[0] + 2 * heads[1], dim)))
    queries = both.to(device, dtype)[:, : heads[0]]
    parts = [batch] if cut is None else batch.halves(cut)
    plans = [backend.plan(part, kv, (None,), heads[0] // heads[1]) for part in parts]
    out = torch.full((batch.num_rows, heads[0] * dim), torch.nan, dtype=dtype, device=device)
    first = 0
    for part, plan in zip(parts, plans, strict=True):
        own = slice(first, first + part.num_rows)
        backend.attend(plan, queries[own], 1, None, SCALE, out[own])
        first += part.num_rows
    for span in spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        slots = slots_of(span, PAGE_SIZE, 0, span.num_keys)
        keys, values = (x.cpu().double()[:, slots] for x in (kv.keys(1), kv.values(1)))
        want = brute_force(span, queries[rows].cpu().double(), keys, values, None)
        torch.testing.assert_close(out[rows].cpu().double(), want, rtol=tolerance, atol=tolerance)
    return plans[0]


STEPS = [
    ("prompt",),
    ("row", "tree", "row", "prompt"),
    ("row", "short", "prompt", "prompt", "short"),
    ("tree", "short"),
    ("prompt", "tree"),
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("kinds", STEPS)
def test_equals_brute_force(kinds):
    backend = FlashInferAttention()
    backend.others = SdpaAttention()  # what computes the rest on this machine
    plan = check(backend, step(np.random.default_rng(len(kinds)), kinds))
    assert isinstance(plan, PromptPlan) == ("prompt" in kinds and kinds[-1] != "tree")


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("cut", [100, 300])
def test_halves_are_planned_before_one_is_computed(cut):
    backend = FlashInferAttention()
    backend.others = SdpaAttention()
    for kinds in (("prompt", "prompt", "prompt"), ("row", "tree", "prompt", "prompt", "prompt")):
        check(backend, step(np.random.default_rng(cut), kinds), cut=cut)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")
@pytest.mark.parametrize("cut", [None, 140])
@pytest.mark.parametrize("kinds", STEPS)
def test_flashinfer_equals_brute_force(kinds, cut):
    if why := why_not(torch.bfloat16, torch.bfloat16, 128, is_windowed=False):
        pytest.skip(why)
    spans = step(np.random.default_rng(len(kinds)), kinds)
    if cut is not None and cut >= sum(span.num_rows for span in spans):
        pytest.skip("has fewer rows")
    check(FlashInferAttention(), spans, "cuda", torch.bfloat16, (8, 2), 128, 3e-2, cut)


def test_says_what_is_missing(monkeypatch):
    assert "bfloat16 or float16" in why_not(torch.float32, torch.float32, 128, False)
    assert "bfloat16 or float16" in why_not(torch.bfloat16, torch.float8_e4m3fn, 128, False)
    assert "sliding windows" in why_not(torch.bfloat16, torch.bfloat16, 128, True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in why_not(torch.bfloat16, torch.bfloat16, 128, False)
