"""Attention whose result for a row depends on that row's own keys alone, in Triton.

Keys are read in the order of their positions, in tiles of TILE that begin at multiples of TILE,
inside segments that begin at fixed positions: of SMALL keys up to position NEAR, then of LARGE.
Within a segment a softmax is carried from tile to tile; segments are merged from the first to the
last. Every program that computes a part of this, beside whatever other rows, does the same
operations on the same numbers:

- a tile's sums over keys are made by the matrix units alone, whose order does not depend on the
  size of a block;
- additions that could be fused with a multiplication say whether they are;
- a tile or a segment that a row sees no key of changes nothing.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def segment_of(key, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(key < NEAR, key // SMALL, NEAR // SMALL + (key - NEAR) // LARGE)


@triton.jit
def start_of(segment, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return tl.where(
        segment < NEAR // SMALL, segment * SMALL, NEAR + (segment - NEAR // SMALL) * LARGE
    )


@triton.jit
def is_start(key, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr):
    return key % tl.where(key < NEAR, SMALL, LARGE) == 0


@triton.jit
def shared_before(
    shared_keys, num_slots, NEAR: tl.constexpr, SMALL: tl.constexpr, LARGE: tl.constexpr
):
    """Returns how many of a sequence's first keys were computed with those of others.

    They are at most those of `num_slots` segments: there is room for no more sums.
    """
    return tl.minimum(tl.load(shared_keys), start_of(num_slots, NEAR, SMALL, LARGE))


@triton.jit
def has_branches(positions, first_row, num_rows, prefix_len):
    """Returns whether the rows are a tree with branches.

    The last row of a chain is as many positions behind the root as there are rows before it; the
    last row of a tree with branches is not.
    """
    last = tl.load(positions + first_row + num_rows - 1).to(tl.int32)
    return last - prefix_len != num_rows - 1


@triton.jit
def add_tile(q, k, v, seen, best, total, acc, scale, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one tile of keys to the earlier ones of their segment; `scale` includes log2(e)."""
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    scores = tl.where(seen, scores, float("-inf"))
    return add_scores(scores, q, v, best, total, acc, scale, TILE, PRECISION)


@triton.jit
def add_scores(scores, q, v, best, total, acc, scale, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Does what `add_tile` does with a tile's products of queries and keys, which are -inf for keys
    that a row does not see.
    """
    new_best = tl.maximum(best, tl.max(scores, 1) * scale)
    # The maximum of a row without keys is minus infinity, which must not be subtracted from
    # itself.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(q.dtype)
    shrink = tl.exp2(best - base)
    # The matrix units add up, since the order of `tl.sum` follows the layout. All columns are
    # equal.
    ones = tl.full([TILE, 16], 1.0, q.dtype)
    sums = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)
    acc = tl.dot(weights, v.to(q.dtype), acc * shrink[:, None], input_precision=PRECISION)
    return new_best, tl.fma(total, shrink, sums), acc


@triton.jit
def merge(best, total, acc, new_best, new_total, new_acc):
    """Adds the next segment to the earlier ones."""
    top = tl.maximum(best, new_best)
    base = tl.where(top == float("-inf"), 0.0, top)
    old, new = tl.exp2(best - base), tl.exp2(new_best - base)
    total = tl.fma(total, old, new_total * new)
    return top, total, tl.fma(acc, old[:, None], new_acc * new[:, None])


@triton.jit
def load_sums(
    part_best, part_total, part_acc, part, is_there, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Loads what a segment has left for some lines: best, total and sum; nothing elsewhere."""
    dims = tl.arange(0, BLOCK_D)
    best = tl.load(part_best + part, mask=is_there, other=float("-inf"))
    total = tl.load(part_total + part, mask=is_there, other=0.0)
    at = part_acc + part[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.load(at, mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return best, total, acc


@triton.jit
def merge_parts(
    part_best, part_total, part_acc, part, num_parts, is_line,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Merges what `num_parts` segments have left, from the one at `part` on.

    Args:
        AT_ONCE: Number of segments that are loaded before the first of them is merged: a load takes
            longer than a merge.
    """
    best, total, acc = empty(BLOCK_M, BLOCK_D)
    for index in tl.range(0, num_parts, AT_ONCE):
        loaded = ()
        for ahead in tl.static_range(AT_ONCE):
            is_part = is_line & (index + ahead < num_parts)
            place = part + index + ahead
            sums = load_sums(part_best, part_total, part_acc, place, is_part, HEAD_DIM, BLOCK_D)
            loaded += (sums,)
        for ahead in tl.static_range(AT_ONCE):
            new_best, new_total, new_acc = loaded[ahead]
            best, total, acc = merge(best, total, acc, new_best, new_total, new_acc)
    return best, total, acc


@triton.jit
def load_query(q_ptr, offsets, wanted, EIGHT_BIT: tl.constexpr):
    q = tl.load(q_ptr + offsets, mask=wanted, other=0.0)
    if EIGHT_BIT and q_ptr.dtype.element_ty == tl.bfloat16:
        # float16 holds every 8-bit float, and one instruction converts two of them; bfloat16 takes
        # five instructions.
        q = tl.clamp(q.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return q


@triton.jit
def empty(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return best, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
