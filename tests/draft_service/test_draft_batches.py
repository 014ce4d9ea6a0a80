"""Attention of a draft step's batches: the kernels, with keys shared out among sequences, against
plain torch over the same plan.
"""

import pytest
import torch

from draft_service.steps import plan as plans
from draft_service.steps.batches import DraftBatches
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.plan import DraftPlan, PlanInputs
from draft_service.steps.records import STEP, DraftShape
from foredraft.attention.paged_triton import TritonAttention
from foredraft.kvcache.paged_kv import PagedKV
from testing.plan_attention import PlanAttention
from testing.triton_device import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
STARTS, COUNTS = [5, 700, 0, 33, 9], [2, 3, 1, 0, 1]


def batches_on(device: torch.device, shape: DraftShape, seed: int) -> tuple[DraftBatches, PagedKV]:
    """Batches of sequences; one is long and one is padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, page_size = len(STARTS), 8
    scratch = (shape.max_slots + 1) * shape.scratch_pages(page_size)
    kv = PagedKV(1, 200, page_size, KV_HEADS, HEAD_DIM, torch.float32, device, scratch)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    records = torch.zeros(batch, STEP.size + 2 * shape.num_rows, dtype=torch.int32)
    records[:, STEP["slot"]] = torch.arange(batch)
    records[:, STEP["start"]], records[:, STEP["num_rows"]] = (
        torch.tensor(STARTS),
        torch.tensor(COUNTS),
    )
    records[1, STEP["valid_from"]] = 40
    tables = torch.randint(200, (shape.max_slots + 1, shape.max_pages), generator=generator).int()
    num_keys = torch.zeros(shape.max_slots + 1, dtype=torch.int32, device=device)
    plan = DraftPlan.empty(shape, kv, batch)
    inputs = PlanInputs(tables.to(device), num_keys, HandedOn.nowhere(shape, device), 0)
    plans.fill(plan, shape, kv, records.to(device), inputs)
    return DraftBatches(plan, shape, kv), kv


@pytest.mark.parametrize(("topk", "window"), [(1, None), (3, None), (3, 50), (1, 50)])
def test_all_levels_see_what_they_are_to_see(topk, window):
    shape = DraftShape(
        num_steps=4,
        topk=topk,
        num_nodes=4,
        num_rows=3,
        max_slots=len(STARTS),
        max_pages=100,
        vocab=100,
        feature_size=0,
        is_windowed=window is not None,
    )
    generator = torch.Generator().manual_seed(topk)
    tokens = torch.zeros(len(STARTS), topk, dtype=torch.int64)
    masks = [None] * 3
    if topk > 1:
        full = torch.rand(len(STARTS) * topk, 3 * topk, generator=generator) < 0.5
        own = torch.eye(topk, dtype=torch.bool).repeat(len(STARTS), 1)
        masks = [torch.cat((full[:, : level * topk], own), 1) for level in range(3)]
    queries = torch.randn(len(STARTS) * max(3, topk), HEADS, HEAD_DIM, generator=generator)
    outs = []
    for device, attention in ((torch.device("cpu"), PlanAttention()), (DEVICE, TritonAttention())):
        batches, kv = batches_on(device, shape, seed=3)
        made = [batches.committed()]
        for level, mask in enumerate(masks):
            own_mask = None if mask is None else mask.to(device)
            made.append(batches.level(level, tokens.to(device), own_mask))
        for batch in made:
            plan = attention.plan(batch, kv, (window,), HEADS // KV_HEADS)
            out = torch.full((batch.num_rows, HEADS * HEAD_DIM), torch.nan, device=device)
            rows = queries[: batch.num_rows].to(device)
            attention.attend(plan, rows, 0, window, 0.3, out)
            outs.append(out.cpu())
    assert any(len(out.isnan().all(1).unique()) == 2 for out in outs), "padding is not written"
    for want, got in zip(outs[:4], outs[4:], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, equal_nan=True)
