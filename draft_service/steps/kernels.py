"""Triton kernels of a draft step: one launch each instead of tens of small ones by torch."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from draft_service.steps.plan import BlockRows, DraftPlan, PlanInputs
from draft_service.steps.records import STEP, DraftShape
from foredraft.kernel_launch import power_of_two
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling.columns import FLOATS
from foredraft.trees.draft_tree import NO_PARENT


def fill(
    plan: DraftPlan, shape: DraftShape, kv: PagedKV, records: torch.Tensor, inputs: PlanInputs
) -> None:
    """See `plan.fill`."""
    levels, handed_on = shape.num_steps - 1, inputs.handed_on
    _fill[(len(records),)](
        records, inputs.tables, inputs.num_keys, handed_on.accepted,
        plan.tokens, plan.hidden_rows, plan.positions, plan.slots, plan.last,
        plan.start, plan.num_rows, plan.prefix_start, plan.tables,
        plan.num_keys, plan.num_beams, plan.valid_from,
        plan.level_first, plan.level_positions, plan.level_slots, plan.tail_positions,
        plan.floats, plan.top_k, plan.seed, plan.position,
        plan.floats.stride(0), len(records), records.shape[1], handed_on.first_hidden_row, inputs.dump_slot, kv.num_pages,
        shape.max_pages, shape.shift,
        **STEP.constants("slot", "start", "num_rows", "valid_from", "row", "top_k", "seed"),
        FIRST_FLOAT=STEP[FLOATS[0]], NUM_FLOATS=len(FLOATS), HEADER=STEP.size, PAGE_SIZE=kv.page_size,
        PER_SLOT=shape.scratch_pages(kv.page_size), ROWS=shape.num_rows,
        PAD_ROWS=power_of_two(shape.num_rows), TOPK=shape.topk, LEVELS=levels,
        PAD_BEAMS=power_of_two(max(1, levels * shape.topk)), BLOCK=256, num_warps=4,
    )  # fmt: skip


def begin_block(plan: DraftPlan, rows: BlockRows, mask_token: int, has_newest: bool) -> None:
    """See `plan.begin_block`."""
    batch, num_rows = len(plan.last), len(rows.tokens) // len(plan.last)
    _begin_block[(batch,)](
        plan.tokens, plan.last, plan.level_positions, plan.level_slots, plan.num_beams,
        rows.tokens, rows.positions, rows.slots, rows.num_rows, batch, mask_token,
        HAS_NEWEST=has_newest, ROWS=num_rows, PAD_ROWS=power_of_two(num_rows), num_warps=1,
    )  # fmt: skip


def hand_on_trees(records: torch.Tensor, results: torch.Tensor, trees: torch.Tensor) -> None:
    """See `hand_on.hand_on_trees`."""
    nodes = results.shape[2]
    _hand_on_trees[(len(records),)](
        records, results, trees, records.shape[1], **STEP.constants("row"), NODES=nodes,
        PAD_NODES=power_of_two(nodes), NO_PARENT=NO_PARENT, num_warps=1,
    )  # fmt: skip


def apply_updates(updates: torch.Tensor, tables: torch.Tensor) -> None:
    """See `uploads.apply_updates`."""
    block = 128
    _apply_updates[(triton.cdiv(updates.shape[1], block),)](
        updates, tables, updates.shape[1], tables.shape[1], BLOCK=block, num_warps=4
    )


@triton.jit
def _fill(
    records, all_tables, all_num_keys, accepted,
    tokens, hidden_rows, positions, slots, last, starts, nums_rows, prefix_starts, tables,
    nums_keys, nums_beams, valid_froms, level_first, level_positions, level_slots, tail_positions,
    floats, top_ks, seeds, out_positions,
    float_stride, batch, width, first_hidden_row, dump_slot, num_pages, max_pages, shift,
    SLOT: tl.constexpr, START: tl.constexpr, NUM_ROWS: tl.constexpr, VALID_FROM: tl.constexpr,
    FIRST_FLOAT: tl.constexpr, NUM_FLOATS: tl.constexpr, TOP_K: tl.constexpr,
    SEED: tl.constexpr, ROW: tl.constexpr, HEADER: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PER_SLOT: tl.constexpr, ROWS: tl.constexpr, PAD_ROWS: tl.constexpr,
    TOPK: tl.constexpr, LEVELS: tl.constexpr, PAD_BEAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills in the plan of one sequence; grid (B,). records int32 [B, width], accepted int32
    [n, 1 + ROWS].
    """
    sequence = tl.program_id(0)
    record = records + sequence * width
    slot, row = tl.load(record + SLOT), tl.load(record + ROW)
    start, count = tl.load(record + START), tl.load(record + NUM_ROWS)
    valid_from = tl.load(record + VALID_FROM)
    start = tl.where(start < 0, tl.load(all_num_keys + slot), start)
    is_handed_on = count < 0
    source = accepted + row * (1 + ROWS)
    length = tl.minimum(tl.maximum(tl.load(source), 0), ROWS)
    count = tl.where(is_handed_on, length, count)
    count = tl.minimum(count, tl.maximum(max_pages * PAGE_SIZE - start, 0))
    num_keys = start + count
    tl.debug_barrier()  # every thread has read what is there before one writes
    tl.store(all_num_keys + slot, num_keys)
    # Committed tokens.
    pages = all_tables + slot.to(tl.int64) * max_pages
    index = tl.arange(0, PAD_ROWS)
    in_record = index < ROWS
    is_row = index < count
    token = tl.load(record + HEADER + index, in_record, other=0)
    token = tl.where(is_handed_on, tl.load(source + 1 + index, is_row, other=0), token)
    hidden_row = tl.load(record + HEADER + ROWS + index, in_record, other=0)
    hidden_row = tl.where(is_handed_on, first_hidden_row + row * ROWS + index, hidden_row)
    key = start + index
    page = tl.load(pages + key // PAGE_SIZE, is_row, other=0)
    kept = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    out = sequence * ROWS + index
    tl.store(tokens + out, token.to(tl.int64), in_record)
    tl.store(hidden_rows + out, hidden_row.to(tl.int64), in_record)
    tl.store(positions + out, key.to(tl.int64), in_record)
    tl.store(slots + out, tl.where(is_row, kept, dump_slot), in_record)
    tl.store(last + sequence, (sequence * ROWS + tl.maximum(count - 1, 0)).to(tl.int64))
    tl.store(starts + sequence, start)
    tl.store(nums_rows + sequence, count)
    tl.store(prefix_starts + sequence, tl.minimum(valid_from, start))
    # Drafted tokens: behind the committed ones, then in scratch.
    used = tl.cdiv(num_keys, PAGE_SIZE)
    scratch = num_pages + slot * PER_SLOT
    entries = max_pages + PER_SLOT
    for first in range(0, entries, BLOCK):
        column = first + tl.arange(0, BLOCK)
        committed = tl.load(pages + column, column < tl.minimum(used, max_pages), other=0)
        over = tl.minimum(column - used, PER_SLOT - 1)
        committed = tl.where(over < 0, committed, scratch + over)
        tl.store(tables + sequence.to(tl.int64) * entries + column, committed, column < entries)
    beam = tl.arange(0, PAD_BEAMS)
    is_beam = beam < LEVELS * TOPK
    level, child = beam // TOPK, beam % TOPK
    key = num_keys + beam
    entry = key // PAGE_SIZE
    own = tl.load(pages + entry, is_beam & (entry < used), other=0)
    page = tl.where(entry < used, own, scratch + tl.minimum(entry - used, PER_SLOT - 1))
    kept = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
    out = (level * batch + sequence) * TOPK + child
    tl.store(level_slots + out, kept, is_beam)
    tl.store(level_positions + out, (num_keys + level).to(tl.int64), is_beam)
    tl.store(tail_positions + sequence * LEVELS * TOPK + beam, num_keys + level, is_beam)
    tl.store(level_first + level * batch + sequence, key, is_beam & (child == 0))
    tl.store(nums_keys + sequence, num_keys)
    tl.store(nums_beams + sequence, tl.where(count > 0, TOPK, 0))
    tl.store(valid_froms + sequence, tl.minimum(valid_from, num_keys))
    # How the target will choose.
    real: tl.constexpr = tl.float32
    for column in tl.static_range(NUM_FLOATS):
        value = tl.load(record + FIRST_FLOAT + column).to(real, bitcast=True)
        tl.store(floats + column * float_stride + sequence, value)
    tl.store(top_ks + sequence, tl.load(record + TOP_K).to(tl.int64))
    low, high = tl.load(record + SEED), tl.load(record + SEED + 1)
    seed = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    tl.store(seeds + sequence, seed)
    tl.store(out_positions + sequence, (num_keys + shift).to(tl.int64))


@triton.jit
def _begin_block(
    tokens, last, level_positions, level_slots, nums_beams,
    out_tokens, out_positions, out_slots, nums_rows, batch, mask_token,
    HAS_NEWEST: tl.constexpr, ROWS: tl.constexpr, PAD_ROWS: tl.constexpr,
):  # fmt: skip
    """Fills in the rows of one sequence's block; grid (B,)."""
    sequence = tl.program_id(0)
    row = tl.arange(0, PAD_ROWS)
    is_row = row < ROWS
    token = tl.full((PAD_ROWS,), 0, tl.int64) + mask_token
    if HAS_NEWEST:
        token = tl.where(row == 0, tl.load(tokens + tl.load(last + sequence)), token)
    at, out = row * batch + sequence, sequence * ROWS + row
    tl.store(out_tokens + out, token, is_row)
    tl.store(out_positions + out, tl.load(level_positions + at, is_row, other=0), is_row)
    tl.store(out_slots + out, tl.load(level_slots + at, is_row, other=0), is_row)
    tl.store(nums_rows + sequence, tl.load(nums_beams + sequence) * ROWS)


@triton.jit
def _hand_on_trees(
    records, results, trees, width,
    ROW: tl.constexpr, NODES: tl.constexpr, PAD_NODES: tl.constexpr, NO_PARENT: tl.constexpr,
):  # fmt: skip
    """Copies one tree; grid (B,). results int32 [B, 2, NODES]; trees int32 [n, 2, NODES],
    changed.
    """
    sequence = tl.program_id(0)
    row = tl.load(records + sequence * width + ROW)
    node = tl.arange(0, PAD_NODES)
    is_node = node < NODES
    source = results + sequence * 2 * NODES + node
    token = tl.load(source, is_node, other=0)
    parent = tl.load(source + NODES, is_node, other=0)
    target = trees + row * 2 * NODES + node
    tl.store(target, token, is_node)
    tl.store(target + NODES, tl.where(token < 0, NO_PARENT, parent), is_node)


@triton.jit
def _apply_updates(updates, tables, count, max_pages, BLOCK: tl.constexpr):
    """Writes page updates into tables. updates int32 [3, count]: slots, entries, pages."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_update = index < count
    slot = tl.load(updates + index, is_update, other=0).to(tl.int64)
    entry = tl.load(updates + count + index, is_update, other=0)
    page = tl.load(updates + 2 * count + index, is_update, other=0)
    tl.store(tables + slot * max_pages + entry, page, is_update)
