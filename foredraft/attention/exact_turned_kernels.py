"""The arithmetic of `exact_tile_kernels` with keys as rows and lines as columns, for blocks of few
lines.

The matrix units of a Hopper card take at least 64 rows, which a tile of keys has, and read both
operands where they were loaded to. Each sum is over the same numbers in the same order.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.attention.exact_tile_kernels import is_start, load_pages, load_rows


@triton.jit
def _empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return best, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_D, BLOCK_M], tl.float32)


@triton.jit
def _merge(best, total, acc, new_best, new_total, new_acc):
    top = tl.maximum(best, new_best)
    base = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(best - base), tl.exp2(new_best - base)
    total = tl.fma(total, old, new_total * new)
    return top, total, tl.fma(acc, old[None, :], new_acc * new[None, :])


@triton.jit
def add_turned_tiles(
    q, k_ptr, v_ptr, table, begin, end, newest, oldest, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    """Adds the tiles from `begin` to `end`.

    Returns:
        Best, total and sum of the newest segment, and of all segments before.
    """
    best, total, acc = _empty(BLOCK_M, BLOCK_D)
    all_best, all_total, all_acc = _empty(BLOCK_M, BLOCK_D)
    turned = tl.trans(q)
    ones = tl.full([16, TILE], 1.0, q.dtype)
    pages = load_pages(table, begin + tl.arange(0, TILE), end, PAGE_SIZE)
    for start in tl.range(begin, end, TILE):
        if is_start(start, NEAR, SMALL, LARGE):
            all_best, all_total, all_acc = _merge(all_best, all_total, all_acc, best, total, acc)
            best, total, acc = _empty(BLOCK_M, BLOCK_D)
        keys = start + tl.arange(0, TILE)
        seen = (keys[:, None] <= newest[None, :]) & (keys[:, None] >= oldest[None, :])
        slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
        pages = load_pages(table, keys + TILE, end, PAGE_SIZE)
        k = load_rows(k_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
        v = load_rows(v_ptr, slots, keys < end, HEAD_DIM, BLOCK_D)
        scores = tl.dot(k, turned, input_precision=PRECISION)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 0) * scale)
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(tl.fma(scores, scale, -base[None, :])).to(q.dtype)
        shrink = tl.exp2(best - base)
        sums = tl.max(tl.dot(ones, weights, input_precision=PRECISION), 0)
        acc = tl.dot(tl.trans(v), weights, acc * shrink[None, :], input_precision=PRECISION)
        total = tl.fma(total, shrink, sums)
        best = new_best
    return best, total, tl.trans(acc), all_best, all_total, tl.trans(all_acc)
