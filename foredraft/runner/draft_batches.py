"""The batches of a draft step of fixed shape, made on the device of what the host uploaded: records of the sequences.

A record is a row of int32: `HEADER` numbers, R tokens, and the places of their hidden states. What the host does not know of
a sequence it gives as -1, see `draft_hand_on.resolve`; the position is always found there.
"""

from dataclasses import dataclass

import torch

from foredraft.attention.base import Batch
from foredraft.attention.paged_triton import TritonPlan, splits_for
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.speculation.sampling import SamplingRows

# Columns of the header.
(
    SLOT,
    START,
    NUM_ROWS,
    VALID_FROM,
    POSITION,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    TOP_K,
    SEED_LOW,
    SEED_HIGH,
    ROW,
) = range(12)
HEADER = 12
SAMPLING = slice(TEMPERATURE, SEED_HIGH + 1)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a step.

    Attributes:
        num_steps, topk, num_nodes: Of the tree.
        num_rows: Committed tokens of a sequence at most, R.
        max_slots: Sequences that may be known at a time.
        max_pages: Of a page table.
        vocab: Columns of the logits.
        feature_size: Of the features that a head hands on; 0 for a model that reads tokens alone.
        is_windowed: Whether a layer sees a window of positions.
        shift: How far a token's position lies behind its key index.
    """

    num_steps: int
    topk: int
    num_nodes: int
    num_rows: int
    max_slots: int
    max_pages: int
    vocab: int
    feature_size: int
    is_windowed: bool = False
    shift: int = 0

    @property
    def scratch_rows(self) -> int:
        """Drafted tokens of a sequence that need KV."""
        return max(1, (self.num_steps - 1) * self.topk)

    def scratch_pages(self, page_size: int) -> int:
        """Pages that hold them."""
        return -(-self.scratch_rows // page_size)


def committed_batch(
    shape: DraftShape,
    kv: PagedKV,
    tables_of_slots: torch.Tensor,
    records: torch.Tensor,
    dump_slot: int,
) -> Batch:
    """The batch of committed tokens: B sequences of up to R rows, of which the last ones' logits are wanted.

    Args:
        tables_of_slots: int32 [slots + 1, max_pages].
        records: int32 [B, at least HEADER + R].
        dump_slot: Of the cache, for what padding rows write.
    """
    batch, rows, device = len(records), shape.num_rows, records.device
    slot, start, num_rows, valid_from = records[:, :4].t().contiguous()
    tables = tables_of_slots.index_select(0, slot)
    index = torch.arange(rows, device=device)
    keys = start[:, None].long() + index
    # Rows that are none may lie beyond the table; they write where nobody reads.
    pages = tables.gather(1, (keys // kv.page_size).clamp_max_(shape.max_pages - 1))
    slots = pages.long() * kv.page_size + keys % kv.page_size
    slots = torch.where(index < num_rows[:, None], slots, dump_slot)
    first_row = torch.arange(0, batch * rows, rows, dtype=torch.int32, device=device)
    positions = keys.flatten()
    plan = TritonPlan(
        kv=kv,
        page_tables=tables,
        first_row=first_row,
        num_rows=num_rows,
        prefix_start=torch.minimum(valid_from, start),
        prefix_len=start,
        write_index=start,
        positions=positions,
        tail_mask=None,
        is_causal=None,
        tail_positions=None,
        max_rows=rows,
        num_splits=splits_for(batch, rows, kv, shape.max_pages * kv.page_size),
    )
    last = first_row.long() + (num_rows.long() - 1).clamp_min_(0)
    tokens = records[:, HEADER : HEADER + rows].flatten().long()
    return Batch(tokens, positions, slots.flatten(), (), last, plan=plan)


class Levels:
    """Batches of drafted tokens: a level's beams attend to the committed keys and to their own ancestors.

    A drafted token's KV goes behind the sequence's committed keys: into what is left of their last page, which is the
    sequence's own, and then into scratch pages of its slot. Padding has a slot of its own.

    Args:
        tables: int32 [slots + 1, max_pages].
        records: int32 [B, at least HEADER].
    """

    def __init__(
        self, shape: DraftShape, kv: PagedKV, tables: torch.Tensor, records: torch.Tensor
    ) -> None:
        self._kv, self._shape = kv, shape
        batch, device = len(records), records.device
        slot, start, num_rows, valid_from = records[:, :4].t().contiguous()
        self._num_keys = start + num_rows
        # Padding has no rows; every other sequence has all its beams.
        self._num_rows = torch.where(num_rows > 0, shape.topk, 0).to(torch.int32)
        self._valid_from = torch.minimum(valid_from, self._num_keys)
        self._first_row = torch.arange(
            0, batch * shape.topk, shape.topk, dtype=torch.int32, device=device
        )
        per_slot = shape.scratch_pages(kv.page_size)
        used = (self._num_keys + kv.page_size - 1) // kv.page_size
        columns = torch.arange(shape.max_pages + per_slot, dtype=torch.int32, device=device)
        committed = tables.index_select(0, slot)
        committed = torch.nn.functional.pad(committed, (0, per_slot))
        over = (columns - used[:, None]).clamp_max_(per_slot - 1)
        scratch = kv.num_pages + slot[:, None] * per_slot + over
        self._tables = torch.where(over < 0, committed, scratch).to(torch.int32)
        self._num_splits = splits_for(batch, shape.topk, kv, shape.max_pages * kv.page_size)
        # Of all levels at once, which takes fewer kernels.
        count, topk = shape.num_steps - 1, shape.topk
        level = torch.arange(count, dtype=torch.int32, device=device)
        self._first = self._num_keys + level[:, None] * topk
        place = (self._num_keys + level[:, None]).long()
        # Kernels read rows one after another, which views of a chain or of a single sequence need not be.
        places = place[:, :, None].expand(-1, -1, topk)
        self._positions = places.reshape(count, batch * topk).contiguous()
        row = torch.arange(count * topk, dtype=torch.int32, device=device)
        keys = self._num_keys[:, None].long() + row
        pages = self._tables.gather(1, keys // kv.page_size)
        slots = pages.long() * kv.page_size + keys % kv.page_size
        slots = slots.view(batch, count, topk).transpose(0, 1)
        self._slots = slots.reshape(count, batch * topk).contiguous()
        self._tail_positions = None
        if shape.is_windowed and topk > 1:
            self._tail_positions = self._num_keys[:, None] + row // topk

    def batch(self, level: int, tokens: torch.Tensor, mask: torch.Tensor | None) -> Batch:
        """The batch of one level.

        Args:
            tokens: int64 [B, K].
            mask: bool [B * K, (level + 1) * K], the beams' ancestors; None for a chain.
        """
        first, positions = self._first[level], self._positions[level]
        tail_positions = self._tail_positions
        if tail_positions is not None and mask is not None:
            tail_positions = tail_positions[:, : mask.shape[1]]
        plan = TritonPlan(
            kv=self._kv,
            page_tables=self._tables,
            first_row=self._first_row,
            num_rows=self._num_rows,
            prefix_start=self._valid_from,
            prefix_len=first if mask is None else self._num_keys,
            write_index=first,
            positions=positions,
            tail_mask=mask,
            is_causal=None,
            tail_positions=tail_positions,
            max_rows=self._shape.topk,
            num_splits=self._num_splits,
        )
        return Batch(tokens.flatten(), positions, self._slots[level], (), plan=plan)


def sampling_rows(records: torch.Tensor, any_sampled: bool, any_ranked: bool) -> SamplingRows:
    """The sequences' sampling parameters; see `SamplingRows` for the two promises."""
    temperature, top_p, min_p = (
        records[:, TEMPERATURE : MIN_P + 1].t().contiguous().view(torch.float32)
    )
    low, high = records[:, SEED_LOW].long(), records[:, SEED_HIGH].long()
    return SamplingRows(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=records[:, TOP_K].long(),
        seed=(high << 32) | (low & 0xFFFFFFFF),
        position=records[:, POSITION].long(),
        any_sampled=any_sampled,
        any_ranked=any_ranked,
    )
