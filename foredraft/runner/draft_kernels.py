"""Triton kernels of draft steps that stay on the device; they do what `draft_hand_on` does, in one launch each."""

# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from foredraft.runner.draft_batches import HEADER, NUM_ROWS, POSITION, ROW, SLOT, START, DraftShape
from foredraft.runner.draft_hand_on import HandedOn
from foredraft.speculation.static_beams import NO_NODE


def resolve(
    shape: DraftShape,
    records: torch.Tensor,
    num_keys: torch.Tensor,
    handed_on: HandedOn,
    max_keys: int,
) -> None:
    """See `draft_hand_on.resolve`."""
    _resolve[(len(records),)](
        records, num_keys, handed_on.accepted, records.shape[1], handed_on.first_place, max_keys,
        shape.shift, SLOT=SLOT, START=START, NUM_ROWS=NUM_ROWS, POSITION=POSITION, ROW=ROW,
        HEADER=HEADER, ROWS=shape.num_rows, PAD_ROWS=triton.next_power_of_2(shape.num_rows),
        num_warps=1,
    )  # fmt: skip


def hand_on_trees(records: torch.Tensor, results: torch.Tensor, trees: torch.Tensor) -> None:
    """See `draft_hand_on.hand_on_trees`."""
    nodes = results.shape[2]
    _hand_on_trees[(len(records),)](
        records, results, trees, records.shape[1], ROW=ROW, NODES=nodes,
        PAD_NODES=triton.next_power_of_2(nodes), NO_NODE=NO_NODE, num_warps=1,
    )  # fmt: skip


@triton.jit
def _resolve(
    records, num_keys, accepted, width, first_place, max_keys, shift,
    SLOT: tl.constexpr, START: tl.constexpr, NUM_ROWS: tl.constexpr, POSITION: tl.constexpr,
    ROW: tl.constexpr, HEADER: tl.constexpr, ROWS: tl.constexpr, PAD_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (B,). records int32 [B, width], changed; accepted int32 [n, 1 + ROWS]."""
    record = records + tl.program_id(0) * width
    slot, row = tl.load(record + SLOT), tl.load(record + ROW)
    start, count = tl.load(record + START), tl.load(record + NUM_ROWS)
    known = tl.load(num_keys + slot)
    start = tl.where(start < 0, known, start)
    is_handed_on = count < 0
    source = accepted + row * (1 + ROWS)
    length = tl.minimum(tl.maximum(tl.load(source), 0), ROWS)
    count = tl.where(is_handed_on, length, count)
    count = tl.minimum(count, tl.maximum(max_keys - start, 0))
    index = tl.arange(0, PAD_ROWS)
    is_row = index < ROWS
    tokens = tl.load(source + 1 + index, index < count, other=0)
    tl.store(record + HEADER + index, tokens, is_row & is_handed_on)
    place = first_place + row * ROWS + index
    tl.store(record + HEADER + ROWS + index, place, is_row & is_handed_on)
    tl.store(record + START, start)
    tl.store(record + NUM_ROWS, count)
    tl.store(record + POSITION, start + count + shift)
    tl.store(num_keys + slot, start + count)


@triton.jit
def _hand_on_trees(
    records, results, trees, width,
    ROW: tl.constexpr, NODES: tl.constexpr, PAD_NODES: tl.constexpr, NO_NODE: tl.constexpr,
):  # fmt: skip
    """Grid (B,). results int32 [B, 2, NODES]; trees int32 [n, 2, NODES], changed."""
    sequence = tl.program_id(0)
    row = tl.load(records + sequence * width + ROW)
    node = tl.arange(0, PAD_NODES)
    is_node = node < NODES
    source = results + sequence * 2 * NODES + node
    token = tl.load(source, is_node, other=0)
    parent = tl.load(source + NODES, is_node, other=0)
    target = trees + row * 2 * NODES + node
    tl.store(target, token, is_node)
    tl.store(target + NODES, tl.where(token < 0, NO_NODE, parent), is_node)
