"""Draft trees on the device in Triton: check and mask, walk, and moving the accepted path's KV."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def check(
    roots, tokens, parents, committed, out_tokens, out_parents, out_depths, out_positions, out_mask,
    num_rows, vocab, token_stride, parent_stride,
    BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """One sequence. Row 0 is the root, row i + 1 is node i; what the draft wrote is read once."""
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    is_proposed = (row > 0) & (row < num_rows)
    token = tl.load(tokens + sequence * token_stride + row - 1, mask=is_proposed, other=-1)
    parent = tl.load(parents + sequence * parent_stride + row - 1, mask=is_proposed, other=-2)
    root = tl.load(roots + sequence)
    fits = is_proposed & (token >= 0) & (token < vocab) & (parent >= -1) & (parent + 1 < row)
    parent = tl.where(fits, parent + 1, -2)
    token = tl.where(fits, token, tl.where(row == 0, root, 0))
    own = row[:, None] == row[None, :]
    reach = (own | (parent[:, None] == row[None, :])).to(tl.float16)
    for _ in range(ROUNDS):  # everything within 1, 2, 4 ... steps
        reach = (tl.dot(reach, reach) > 0).to(tl.float16)
    is_node = tl.max(tl.where(row[None, :] == 0, reach, 0.0), 1) > 0
    seen = ((reach > 0) & is_node[:, None]) | own
    depth = tl.where(is_node, tl.sum(seen.to(tl.int32), 1) - 1, 0)
    parent = tl.where(row == 0, -1, tl.where(is_node, parent, -2))
    is_row = row < num_rows
    at = sequence * num_rows + row
    tl.store(out_tokens + at, token, mask=is_row)
    tl.store(out_parents + at, parent, mask=is_row)
    tl.store(out_depths + at, depth, mask=is_row)
    first = tl.load(committed + sequence).to(tl.int64)
    tl.store(out_positions + at, first + depth, mask=is_row)
    tl.store(
        out_mask + at[:, None] * num_rows + row[None, :],
        seen.to(tl.uint8),
        mask=is_row[:, None] & is_row[None, :],
    )


@triton.jit
def walk(
    chosen, tokens, parents, path, length, emitted, num_rows,
    chosen_stride, token_stride, parent_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: from the root, to the first child with the chosen token for as long as there is one."""
    sequence = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    is_row = index < num_rows
    token = tl.load(tokens + sequence * token_stride + index, mask=is_row, other=-1)
    parent = tl.load(parents + sequence * parent_stride + index, mask=is_row, other=-2)
    rows = tl.full([BLOCK], -1, tl.int32)
    given = tl.full([BLOCK], -1, tl.int64)
    row = sequence.to(tl.int32) * 0
    count = row
    while row < BLOCK:
        choice = tl.load(chosen + sequence * chosen_stride + row)
        rows = tl.where(index == count, row, rows)
        given = tl.where(index == count, choice, given)
        count += 1
        is_child = (parent == row) & (token.to(tl.int64) == choice) & (index > row)
        row = tl.min(tl.where(is_child, index, BLOCK), 0)
    tl.store(path + sequence * num_rows + index, rows, mask=is_row)
    tl.store(emitted + sequence * num_rows + index, given, mask=is_row)
    tl.store(length + sequence, count)


@triton.jit
def commit(
    data, tables, committed, path, length, num_planes, plane_stride, table_stride, path_stride,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Some planes of one sequence. An element is moved by the same thread every time, in the order of the path.

    A path ascends, so a target is never a source of a later row.
    """
    sequence = tl.program_id(0).to(tl.int64)
    planes = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D)
    wanted = (planes < num_planes)[:, None] & (dims < HEAD_DIM)[None, :]
    elements = data + planes.to(tl.int64)[:, None] * plane_stride + dims[None, :]
    first = tl.load(committed + sequence)
    table = tables + sequence * table_stride
    for index in range(1, tl.load(length + sequence)):
        row = tl.load(path + sequence * path_stride + index)
        if row > index:
            source = first + row
            target = first + index
            source_slot = tl.load(table + source // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            target_slot = tl.load(table + target // PAGE_SIZE).to(tl.int64) * PAGE_SIZE
            source_slot += source % PAGE_SIZE
            target_slot += target % PAGE_SIZE
            moved = tl.load(elements + source_slot * HEAD_DIM, mask=wanted)
            tl.store(elements + target_slot * HEAD_DIM, moved, mask=wanted)
