"""The plan of a draft step: the inputs of its batches.

The device fills it in once per step, from the records that the host uploaded. The batch of
committed tokens and the batch of each level read it.
"""

from dataclasses import dataclass, fields

import torch

from draft_service.steps.hand_on import HandedOn
from draft_service.steps.records import STEP, DraftShape
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling.columns import FLOATS


@dataclass(slots=True)
class DraftPlan:
    """Holds tensors of B sequences with up to R committed tokens and L levels of K beams below
    the first; all contiguous.

    A drafted token's KV goes behind the sequence's committed keys: into what is left of their last
    page, which is the sequence's own, and then into scratch pages of its slot. Padding has a slot
    of its own.

    Attributes:
        tokens, hidden_rows, positions, slots: int64 [B * R], of committed tokens: the rows of
            hidden states are in the source, the slots in the cache. Rows beyond a sequence's
            tokens write to a slot that nobody reads.
        last: int64 [B], row of each sequence's newest token.
        start: int32 [B], key index of each sequence's first committed token of the step.
        num_rows: int32 [B], number of its committed tokens.
        prefix_start: int32 [B], first key that they attend to.
        tables: int32 [B, pages and scratch pages], of committed and drafted keys.
        num_keys: int32 [B], committed keys, the step's own included.
        num_beams: int32 [B], K, or 0 for padding.
        valid_from: int32 [B], first key that drafted tokens attend to.
        level_first: int32 [L, B], key index of each level's first beam.
        level_positions, level_slots: int64 [L, B * K].
        tail_positions: int32 [B, L * K], of drafted keys.
        floats: float32 [F, B or a little more], the sampling parameters named in `FLOATS`; each
            begins at whole 16 bytes.
        top_k, seed, position: int64 [B]; the position is the first drafted token's.
    """

    tokens: torch.Tensor
    hidden_rows: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor
    start: torch.Tensor
    num_rows: torch.Tensor
    prefix_start: torch.Tensor
    tables: torch.Tensor
    num_keys: torch.Tensor
    num_beams: torch.Tensor
    valid_from: torch.Tensor
    level_first: torch.Tensor
    level_positions: torch.Tensor
    level_slots: torch.Tensor
    tail_positions: torch.Tensor
    floats: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    @classmethod
    def empty(cls, shape: DraftShape, kv: PagedKV, batch: int) -> "DraftPlan":
        """Creates the plan for batches of one size."""
        levels, beams, rows = shape.num_steps - 1, batch * shape.topk, batch * shape.num_rows
        entries = shape.max_pages + shape.scratch_pages(kv.page_size)

        def make(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=kv.data.device)

        long, word, real = torch.int64, torch.int32, torch.float32
        return cls(
            tokens=make(long, rows),
            hidden_rows=make(long, rows),
            positions=make(long, rows),
            slots=make(long, rows),
            last=make(long, batch),
            start=make(word, batch),
            num_rows=make(word, batch),
            prefix_start=make(word, batch),
            tables=make(word, batch, entries),
            num_keys=make(word, batch),
            num_beams=make(word, batch),
            valid_from=make(word, batch),
            level_first=make(word, levels, batch),
            level_positions=make(long, levels, beams),
            level_slots=make(long, levels, beams),
            tail_positions=make(word, batch, levels * shape.topk),
            floats=make(real, len(FLOATS), -(-batch // 4) * 4),
            top_k=make(long, batch),
            seed=make(long, batch),
            position=make(long, batch),
        )


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Holds N rows behind each of B sequences; all contiguous.

    Attributes:
        tokens, positions, slots: int64 [B * N], tokens, positions and slots in the cache.
        num_rows: int32 [B], N, or 0 for padding.
        first_row: int32 [B], index of each sequence's first row; never changed.
        whole_mask, causal_mask: bool [B * N, N], the rows of its block that each sees; never
            changed.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    num_rows: torch.Tensor
    first_row: torch.Tensor
    whole_mask: torch.Tensor
    causal_mask: torch.Tensor

    @classmethod
    def empty(cls, batch: int, num_rows: int, device: torch.device) -> "BlockRows":
        """Creates the rows of batches of one size."""
        count = batch * num_rows

        def make() -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int64, device=device)

        whole = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device)
        return cls(
            tokens=make(),
            positions=make(),
            slots=make(),
            num_rows=torch.zeros(batch, dtype=torch.int32, device=device),
            first_row=torch.arange(0, count, num_rows, dtype=torch.int32, device=device),
            whole_mask=whole.repeat(batch, 1),
            causal_mask=whole.tril().repeat(batch, 1),
        )


def begin_block(plan: DraftPlan, rows: BlockRows, mask_token: int, has_newest: bool) -> None:
    """Fills in the rows of a block from a plan with as many levels of one beam.

    Args:
        has_newest: Whether the first row has the newest token, not the mask token.
    """
    num_rows = len(rows.tokens) // len(plan.last)
    rows.tokens.fill_(mask_token)
    if has_newest:
        rows.tokens[::num_rows] = plan.tokens.index_select(0, plan.last)
    rows.positions.copy_(plan.level_positions.t().flatten())
    rows.slots.copy_(plan.level_slots.t().flatten())
    rows.num_rows.copy_(plan.num_beams * num_rows)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Holds what a plan is filled in from, beside the records.

    Attributes:
        tables: int32 [slots + 1, max_pages], page tables.
        num_keys: int32 [slots + 1], number of keys of each slot after its last step; filling in a
            plan updates them.
        handed_on: Tokens that another process committed.
        dump_slot: KV slot that absent rows write to.
    """

    tables: torch.Tensor
    num_keys: torch.Tensor
    handed_on: HandedOn
    dump_slot: int


def fill(
    plan: DraftPlan, shape: DraftShape, kv: PagedKV, records: torch.Tensor, inputs: PlanInputs
) -> None:
    """Fills in a plan.

    Where a record's start is -1, the device knows it; where its number of rows is -1, that, the
    tokens and the rows of their hidden states are found in what was handed on. Tokens beyond the
    page table are left out.

    Args:
        records: int32 [B, STEP.size + 2 * R].
    """
    made = _rows(shape, kv, records, inputs)
    made |= _levels(shape, kv, records, inputs, made["num_keys"], made["num_rows"])
    first = STEP[FLOATS[0]]
    words = records[:, first : first + len(FLOATS)].t().contiguous().view(torch.float32)
    made["floats"] = torch.nn.functional.pad(words, (0, -len(records) % 4))
    made["top_k"] = records[:, STEP["top_k"]]
    low, high = (records[:, STEP["seed"] + half].long() for half in range(2))
    made["seed"] = (high << 32) | (low & 0xFFFFFFFF)
    made["position"] = made["num_keys"] + shape.shift
    for field in fields(plan):
        target: torch.Tensor = getattr(plan, field.name)
        target.copy_(made[field.name].reshape(target.shape))
    inputs.num_keys.index_copy_(0, records[:, STEP["slot"]].long(), plan.num_keys)


def _rows(
    shape: DraftShape, kv: PagedKV, records: torch.Tensor, inputs: PlanInputs
) -> dict[str, torch.Tensor]:
    """Computes the plan's tensors for committed tokens."""
    rows, size = shape.num_rows, kv.page_size
    slot, row, start = (records[:, STEP[name]] for name in ("slot", "row", "start"))
    is_handed_on = records[:, STEP["num_rows"]] < 0
    accepted = inputs.handed_on.accepted.index_select(0, row)
    start = torch.where(start < 0, inputs.num_keys.index_select(0, slot), start)
    count = torch.where(is_handed_on, accepted[:, 0].clamp(0, rows), records[:, STEP["num_rows"]])
    count = torch.minimum(count, (shape.max_pages * size - start).clamp_min(0))
    index = torch.arange(rows, dtype=torch.int32, device=records.device)
    is_row = index < count[:, None]
    own = inputs.handed_on.first_hidden_row + row[:, None] * rows + index
    keys = start[:, None] + index
    pages = inputs.tables.index_select(0, slot)
    pages = pages.gather(1, (keys // size).clamp_max(shape.max_pages - 1).long())
    slots = pages.long() * size + keys % size
    first = torch.arange(0, len(records) * rows, rows, device=records.device)
    handed, tokens = is_handed_on[:, None], records[:, STEP.size : STEP.size + rows]
    return {
        "tokens": torch.where(handed, torch.where(is_row, accepted[:, 1:], 0), tokens),
        "hidden_rows": torch.where(handed, own, records[:, STEP.size + rows :]),
        "positions": keys,
        "slots": torch.where(is_row, slots, inputs.dump_slot),
        "last": first + (count.long() - 1).clamp_min(0),
        "start": start,
        "num_rows": count,
        "prefix_start": torch.minimum(records[:, STEP["valid_from"]], start),
        "num_keys": start + count,
    }


def _levels(
    shape: DraftShape,
    kv: PagedKV,
    records: torch.Tensor,
    inputs: PlanInputs,
    num_keys: torch.Tensor,
    num_rows: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Computes the plan's tensors for drafted tokens."""
    size, topk, levels = kv.page_size, shape.topk, shape.num_steps - 1
    device, slot = records.device, records[:, STEP["slot"]]
    per_slot = shape.scratch_pages(size)
    used = (num_keys + size - 1) // size
    columns = torch.arange(shape.max_pages + per_slot, dtype=torch.int32, device=device)
    committed = torch.nn.functional.pad(inputs.tables.index_select(0, slot), (0, per_slot))
    over = (columns - used[:, None]).clamp_max(per_slot - 1)
    scratch = kv.num_pages + slot[:, None] * per_slot + over
    tables = torch.where(over < 0, committed, scratch)
    row = torch.arange(levels * topk, dtype=torch.int32, device=device)
    keys = num_keys[:, None] + row
    slots = tables.gather(1, (keys // size).long()).long() * size + keys % size
    positions = num_keys[:, None] + row // topk
    by_level = (len(records), levels, topk)
    level = torch.arange(levels, dtype=torch.int32, device=device)
    return {
        "tables": tables,
        "num_beams": torch.where(num_rows > 0, topk, 0),
        "valid_from": torch.minimum(records[:, STEP["valid_from"]], num_keys),
        "level_first": num_keys + level[:, None] * topk,
        "level_positions": positions.view(by_level).transpose(0, 1),
        "level_slots": slots.view(by_level).transpose(0, 1),
        "tail_positions": positions,
    }
