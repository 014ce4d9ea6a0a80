"""Triton kernel of drafting ahead: one launch decides whether a step waits for its forwards."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from draft_service.steps.hand_on import HandedOn
from draft_service.steps.outcomes import ALTERNATIVES, Outcomes
from draft_service.steps.plan import DraftPlan
from draft_service.steps.records import STEP
from foredraft.kernel_launch import power_of_two


def select(records: torch.Tensor, plan: DraftPlan, handed_on: HandedOn, outcomes: Outcomes) -> None:
    """See `outcomes.select`."""
    batch, length, width = len(records), outcomes.length, outcomes.num_outcomes
    _select[(1,)](
        records, plan.tokens, plan.start, plan.num_rows,
        outcomes.num_keys, outcomes.verified, outcomes.ends, outcomes.chains, outcomes.is_hit.view(torch.uint8),
        outcomes.found, outcomes.report, handed_on.trees, handed_on.drafted,
        batch, records.shape[1], len(outcomes.num_keys) - 1, len(plan.tokens) // batch,
        **STEP.constants("slot", "row", "step"), LENGTH=length, PAD_LENGTH=power_of_two(length),
        NODES=handed_on.trees.shape[2], OUTCOMES=width, PAD_OUTCOMES=power_of_two(width), ALTERNATIVES=ALTERNATIVES,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _select(
    records, tokens, starts, nums_rows, nums_keys, verified, ends, chains, is_hits, founds, report, trees,
    drafted, batch, width, padding_slot, rows,
    SLOT: tl.constexpr, ROW: tl.constexpr, STEP: tl.constexpr, LENGTH: tl.constexpr, PAD_LENGTH: tl.constexpr,
    NODES: tl.constexpr, OUTCOMES: tl.constexpr, PAD_OUTCOMES: tl.constexpr, ALTERNATIVES: tl.constexpr,
):  # fmt: skip
    """Looks for the outcomes of all sequences; grid (1,), so that one program knows when all trees
    are written.
    """
    at, outcome = tl.arange(0, PAD_LENGTH), tl.arange(0, PAD_OUTCOMES)
    is_token, is_outcome = at < LENGTH, outcome < OUTCOMES
    accepted = outcome // ALTERNATIVES
    step = tl.load(records + STEP)  # padding comes last
    num_sequences, num_prepared, num_hits = 0, 0, 0
    for sequence in range(batch):
        record = records + sequence * width
        slot, row = tl.load(record + SLOT), tl.load(record + ROW)
        start, count = tl.load(starts + sequence), tl.load(nums_rows + sequence)
        is_sequence = slot != padding_slot
        is_prepared = (tl.load(nums_keys + slot) == start) & (tl.load(record + STEP) > 0)
        own = tokens + sequence * rows
        token = tl.load(own + at, is_token & (at < rows), other=-1).to(tl.int32)
        guess = tl.load(verified + slot * LENGTH + at, is_token, other=-2)
        num_same = tl.min(tl.where(is_token & (token != guess), at, LENGTH), 0)
        last = tl.load(own + accepted, is_outcome & (accepted < rows), other=-1).to(tl.int32)
        end = tl.load(ends + slot * OUTCOMES + outcome, is_outcome, other=-2)
        is_found = is_outcome & (count == accepted + 1) & (accepted <= num_same) & (last == end)
        best = tl.min(tl.where(is_found & is_prepared, outcome, OUTCOMES), 0)
        is_hit = best < OUTCOMES
        chain = chains + (slot * OUTCOMES + tl.minimum(best, OUTCOMES - 1)) * LENGTH
        found = tl.load(chain + at, is_token, other=0)
        tl.store(is_hits + sequence, is_hit.to(tl.uint8))
        tl.store(founds + sequence * LENGTH + at, found, is_token)
        tree = trees + row * 2 * NODES + at
        tl.store(tree, found, is_token & is_hit)
        tl.store(tree + NODES, at - 1, is_token & is_hit)
        num_sequences += is_sequence.to(tl.int32)
        num_prepared += is_prepared.to(tl.int32)
        num_hits += is_hit.to(tl.int32)
    is_ready = (step > 0) & (num_prepared == num_sequences)
    is_over = is_ready & (num_hits == num_sequences)
    tl.store(report, tl.load(report) + is_over.to(tl.int32))
    tl.store(report + 1, tl.load(report + 1) + (is_ready & (num_hits < num_sequences)).to(tl.int32))
    tl.store(report + 2, tl.where(is_over, step, -step))
    tl.debug_barrier()  # all threads have written their parts of the trees
    tl.atomic_xchg(drafted, step, mask=is_over, sem="release", scope="sys")
