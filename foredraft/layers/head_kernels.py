"""How Triton kernels of projections rotate the heads that they compute, and write them to the cache."""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.layers.triton_kernels import kept, turned


@triton.jit
def outputs_of_pairs(program, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Returns the outputs of a program, its head and its pairs of numbers, whose rotation needs both:
    they lie half a head apart. Outputs are the first numbers of all pairs, then the second ones.
    """
    PAIRS: tl.constexpr = BLOCK_N // 2
    head = program * BLOCK_N // HEAD_DIM
    first = program % (HEAD_DIM // BLOCK_N) * PAIRS
    index = tl.arange(0, BLOCK_N)
    n = head * HEAD_DIM + index // PAIRS * (HEAD_DIM // 2) + first + index % PAIRS
    return n, head, first + tl.arange(0, PAIRS)


@triton.jit
def load_angles(cos_ptr, sin_ptr, slots_ptr, m, pair, in_m, HEAD_DIM: tl.constexpr):
    """Loads cosines and sines of rows' pairs, and the rows' slots."""
    angle = m[:, None] * HEAD_DIM + pair[None, :]
    cos = tl.load(cos_ptr + angle, mask=in_m[:, None], other=0.0).to(tl.float32)
    angle += HEAD_DIM // 2  # where sines have their own sign
    sin = tl.load(sin_ptr + angle, mask=in_m[:, None], other=0.0).to(tl.float32)
    return cos, sin, tl.load(slots_ptr + m, mask=in_m, other=0).to(tl.int64)


@triton.jit
def store_heads(
    acc, queries_ptr, keys_ptr, values_ptr, head, pair, m, in_m, cos, sin, slots, plane_stride,
    k_inverse, v_inverse,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Does what `rotate_and_store` does, for a tile [rows, 2 * pairs] of one head: the first
    numbers of some pairs, then the second ones.
    """
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = queries_ptr.dtype.element_ty
    kind: tl.constexpr = keys_ptr.dtype.element_ty
    both = tl.reshape(acc.to(dtype), [acc.shape[0], 2, acc.shape[1] // 2])
    first, second = tl.split(tl.permute(both, [0, 2, 1]))
    low, high = turned(first.to(tl.float32), second.to(tl.float32), cos, sin, dtype)
    is_value = head >= Q_HEADS + KV_HEADS
    at = queries_ptr + (m.to(tl.int64) * Q_HEADS + head)[:, None] * HEAD_DIM + pair[None, :]
    wanted = in_m[:, None] & (head < Q_HEADS)
    tl.store(at, low, mask=wanted)
    tl.store(at + half, high, mask=wanted)
    # All of a large cache's planes together take more than 32 bits.
    plane = ((head - Q_HEADS) % KV_HEADS).to(tl.int64) * plane_stride
    place = plane + slots[:, None] * HEAD_DIM + pair[None, :]
    wanted = in_m[:, None] & (head >= Q_HEADS) & ~is_value
    tl.store(keys_ptr + place, kept(low, k_inverse, kind, LIMIT), mask=wanted)
    tl.store(keys_ptr + place + half, kept(high, k_inverse, kind, LIMIT), mask=wanted)
    wanted = in_m[:, None] & is_value
    tl.store(values_ptr + place, kept(first, v_inverse, kind, LIMIT), mask=wanted)
    tl.store(values_ptr + place + half, kept(second, v_inverse, kind, LIMIT), mask=wanted)
