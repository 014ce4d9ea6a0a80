"""Triton kernels for draft trees on the device: check and masks, the walk, the commit of accepted
KV.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.trees import draft_tree

_NO_PARENT = tl.constexpr(draft_tree.NO_PARENT)


@triton.jit
def walk(
    chosen_ptr, tokens_ptr, parents_ptr, path_ptr, length_ptr, emitted_ptr,
    chosen_stride, tokens_stride, parents_stride, rows,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Walks one tree from its root along the chosen tokens."""
    tree = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    parents = tl.load(parents_ptr + tree * parents_stride + offsets, mask=inside, other=_NO_PARENT)
    tokens = tl.load(tokens_ptr + tree * tokens_stride + offsets, mask=inside, other=-1)
    chosen = tl.load(chosen_ptr + tree * chosen_stride + offsets, mask=inside, other=-1)
    path = tl.where(offsets == 0, 0, -1)
    row = 0
    token = tl.sum(tl.where(offsets == 0, chosen, 0), 0)
    emitted = tl.where(offsets == 0, token, -1)
    length = 1
    running = 1
    while running != 0:
        is_child = inside & (parents == row) & (tokens.to(tl.int64) == token) & (offsets > row)
        child = tl.min(tl.where(is_child, offsets, ROWS), 0)
        if child < ROWS:
            row = child
            token = tl.sum(tl.where(offsets == row, chosen, 0), 0)
            path = tl.where(offsets == length, row, path)
            emitted = tl.where(offsets == length, token, emitted)
            length += 1
        else:
            running = 0
    tl.store(path_ptr + tree * rows + offsets, path, mask=inside)
    tl.store(emitted_ptr + tree * rows + offsets, emitted, mask=inside)
    tl.store(length_ptr + tree, length)


@triton.jit
def commit(
    kv_ptr, tables_ptr, committed_ptr, path_ptr, length_ptr,
    layer_stride, head_stride, table_stride, rows, num_heads,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Moves the KV of accepted rows of one tree in one layer.

    A row moves to where no later one is read from.
    """
    tree, layer = tl.program_id(0), tl.program_id(1)
    heads = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (dims < HEAD_DIM)[None, :]
    base = kv_ptr + layer.to(tl.int64) * layer_stride
    base = base + heads.to(tl.int64)[:, None] * head_stride + dims[None, :]
    table = tables_ptr + tree * table_stride
    committed = tl.load(committed_ptr + tree)
    for index in range(1, tl.load(length_ptr + tree)):
        row = tl.load(path_ptr + tree * rows + index)
        if row != index:
            source, target = committed + row, committed + index
            from_slot = tl.load(table + source // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            to_slot = tl.load(table + target // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            values = tl.load(base + (from_slot + source % PAGE_SIZE) * HEAD_DIM, mask=mask)
            tl.store(base + (to_slot + target % PAGE_SIZE) * HEAD_DIM, values, mask=mask)


@triton.jit
def prepare(
    tokens_ptr, parents_ptr, committed_ptr, num_rows_ptr, tables_ptr,
    known_ptr, positions_ptr, slots_ptr, mask_ptr,
    tokens_stride, parents_stride, header_stride, table_stride, rows, vocab, no_slot,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Computes valid tokens, positions, slots and ancestor masks of one tree's rows."""
    tree = tl.program_id(0)
    offsets = tl.arange(0, ROWS)
    inside = offsets < rows
    parents = tl.load(parents_ptr + tree * parents_stride + offsets, mask=inside, other=_NO_PARENT)
    tokens = tl.load(tokens_ptr + tree * tokens_stride + offsets, mask=inside, other=0)
    committed = tl.load(committed_ptr + tree * header_stride)
    num_rows = tl.load(num_rows_ptr + tree * header_stride)
    is_own = offsets[:, None] == offsets[None, :]
    is_parent = (parents[:, None] == offsets[None, :]) & (offsets[None, :] < offsets[:, None])
    reach = (is_own | is_parent).to(tl.float16)
    for _ in range(ROUNDS):  # doubling: after k rounds everything within 2^k steps is known
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    is_node = tl.sum(tl.where(offsets[None, :] == 0, reach, 0.0), 1) > 0
    seen = ((reach > 0) & is_node[:, None]) | is_own
    depth = tl.where(is_node, tl.sum(seen.to(tl.int32), 1) - 1, 0)
    out = tree * rows + offsets
    keys = committed + offsets
    pages = tl.load(tables_ptr + tree * table_stride + keys // PAGE_SIZE, mask=inside, other=0)
    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    slots = tl.where(offsets < num_rows, slots, no_slot)
    tl.store(slots_ptr + out, slots, mask=inside)
    tl.store(
        known_ptr + out, tl.minimum(tl.maximum(tokens, 0), vocab - 1).to(tl.int64), mask=inside
    )
    tl.store(positions_ptr + out, (committed + depth).to(tl.int64), mask=inside)
    tl.store(
        mask_ptr + out[:, None] * rows + offsets[None, :],
        seen.to(tl.uint8),
        mask=inside[:, None] & inside[None, :],
    )
