"""The paths of trees in attention whose result for a row depends on that row's own keys alone, in
Triton.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.attention.exact_tile_kernels import load_pages, load_rows


@triton.jit
def has_branches(positions, first_row, num_rows, prefix_len):
    """Returns whether the rows are a tree with branches.

    The last row of a chain is as many positions behind the root as there are rows before it; the
    last row of a tree with branches is not.
    """
    last = tl.load(positions + first_row + num_rows - 1).to(tl.int32)
    return last - prefix_len != num_rows - 1


@triton.jit
def add_paths(
    q, k_ptr, v_ptr, leaf_ends, leaf_slots, first_row, prefix_len, table, start, end, row_leaf, begin_leaf, end_leaf,
    newest, oldest, best, total, acc, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    OWN: tl.constexpr, GRAIN: tl.constexpr, HAS_ROOM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one tile of positions from `start` on to each row of a tree, under the row's own path.

    The matrix units add GRAIN keys at a time, one group after the other, and a group of zeros
    changes nothing. So rows share the groups before the tree. Behind them stand OWN columns: for
    each of some leaves the groups of this tile that hold keys of its path, which the rows on this
    path share. Each key is in the same place of the same group as in plain decoding, and all groups
    of a row are in order.

    Args:
        table: Page table of the sequence.
        end: Position of the last row of the block.
        row_leaf: Place of each row's leaf; `begin_leaf` to `end_leaf` are all of them.
        newest: Position of each row.
    """
    stop = tl.minimum(start + TILE, end + 1)
    own_start = tl.maximum(start, prefix_len // GRAIN * GRAIN)
    # Columns of a row: a power of two of groups.
    width = tl.where(
        stop - own_start <= GRAIN, GRAIN, tl.where(stop - own_start <= 2 * GRAIN, 2 * GRAIN, TILE)
    )
    step = OWN // width
    keys = start + tl.arange(0, TILE)
    is_shared = keys < own_start
    pages = load_pages(table, keys, own_start, PAGE_SIZE)
    key_slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    column = tl.arange(0, OWN)
    first_tail = prefix_len // TILE * TILE
    ones = tl.full([TILE, 16], 1.0, q.dtype)
    own_ones = tl.full([OWN, 16], 1.0, q.dtype)
    for first in tl.range(begin_leaf, end_leaf, step, num_stages=1):
        leaf = first + column // width
        place = own_start + column % width
        at = (first_row + leaf).to(tl.int64)
        last = tl.load(leaf_ends + at, mask=leaf < end_leaf, other=-1)
        is_there = (place <= last) & (place < stop)
        slots = tl.load(
            leaf_slots + at * (TILES * TILE) + place - first_tail, mask=is_there, other=0
        ).to(tl.int64)
        k = load_rows(k_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
        if HAS_ROOM:  # else each is loaded when it is needed
            own_k = load_rows(k_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
            v = load_rows(v_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
            own_v = load_rows(v_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        is_now = (row_leaf >= first) & (row_leaf < first + step)
        seen = is_now[:, None] & is_shared[None, :] & (keys[None, :] >= oldest[:, None])
        own_seen = (
            (leaf[None, :] == row_leaf[:, None])
            & is_there[None, :]
            & (place[None, :] <= newest[:, None])
            & (place[None, :] >= oldest[:, None])
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        scores = tl.where(seen, scores, float("-inf"))
        if not HAS_ROOM:
            own_k = load_rows(k_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        own_scores = tl.dot(q, tl.trans(own_k.to(q.dtype)), input_precision=PRECISION)
        own_scores = tl.where(own_seen, own_scores, float("-inf"))
        highest = tl.maximum(tl.max(scores, 1), tl.max(own_scores, 1))
        new_best = tl.maximum(best, highest * scale)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(q.dtype)
        own_weights = tl.exp2(tl.fma(own_scores, scale, -base[:, None])).to(q.dtype)
        shrink = tl.exp2(best - base)
        sums = tl.dot(weights, ones, input_precision=PRECISION)
        sums = tl.max(tl.dot(own_weights, own_ones, sums, input_precision=PRECISION), 1)
        if not HAS_ROOM:
            v = load_rows(v_ptr, key_slots, is_shared, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights, v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
        if not HAS_ROOM:
            own_v = load_rows(v_ptr, slots, is_there, HEAD_DIM, BLOCK_D)
        acc = tl.dot(own_weights, own_v.to(q.dtype), acc, input_precision=PRECISION)
        total = tl.fma(total, shrink, sums)
        best = new_best
    return best, total, acc
