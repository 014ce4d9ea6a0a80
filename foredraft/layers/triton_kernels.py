"""Triton kernels for the element-wise work of a decoder: norms with residual, angles, rotary
with KV write, gated products.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.parallel.exchange_kernels import begin_forward, finish, go_on, newest, sum_of_ranks


@triton.jit
def _normalized(x, weight, size, eps, dtype: tl.constexpr, FULL: tl.constexpr):
    """Computes x / rms(x) * weight; x is float32.

    Without FULL it is rounded to the activations' type before the product.
    """
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / size + eps)
    if FULL:
        return (x * scale * weight.to(tl.float32)).to(dtype)
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit
def _added(x, delta, post, size, post_eps, POST: tl.constexpr, FULL: tl.constexpr):
    """Adds delta, or its norm, to x; all of one type."""
    if POST:
        delta = _normalized(delta.to(tl.float32), post, size, post_eps, delta.dtype, FULL)
    return (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)


@triton.jit
def rounded(x):
    """Rows [n, size] as 8-bit floats, and the scale of each."""
    x = x.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def norm(
    x_ptr, delta_ptr, gathered_ptr, post_ptr, weight_ptr, out_ptr, copy_ptr, picked_ptr, rounded_ptr, scales_ptr,
    x_stride, delta_stride, part_stride, rank_stride, out_stride, copy_stride, size, eps, post_eps,
    BLOCK: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    POST: tl.constexpr, COPIES: tl.constexpr, PICKS: tl.constexpr, FULL: tl.constexpr, ROUNDS: tl.constexpr,
    EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises one row: x += delta, or the norm of delta; a copy of x; the norm of x. delta
    is a sum of PARTS. With PICKS the row of x is the one that picked_ptr names, and nothing is
    added.

    Args:
        gathered_ptr: All ranks' delta [RANKS, rows, size]; what stands for this rank is not read.
        RANKS: Number of ranks whose deltas are added up in float32 in their order, and rounded.
        ROUNDS: Columns that share a scale of the norm's 8-bit floats, a power of two; 1 where all
            do, 0 where they are not made.
        EARLY: Whether the next kernel may start before this one has waited.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    post = weight
    if POST:
        post = tl.load(post_ptr + columns, mask=is_column, other=0.0)
    if DEPENDENT:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = row
    if PICKS:
        source = tl.load(picked_ptr + row)
    x = tl.load(x_ptr + source * x_stride + columns, mask=is_column, other=0.0)
    if ADDS:
        delta_ptr += row * delta_stride + columns
        delta = tl.load(delta_ptr, mask=is_column, other=0.0)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_ptr + part * part_stride, mask=is_column, other=0.0)
        delta = delta.to(dtype)
        if RANKS > 1:
            own, at = delta.to(tl.float32), gathered_ptr + row * size + columns
            stride = tl.cast(rank_stride, tl.int64)
            total = own
            for rank in tl.static_range(RANKS):
                addend = own
                if rank != RANK:
                    addend = tl.load(at + rank * stride, mask=is_column, other=0.0).to(tl.float32)
                total = addend if rank == 0 else total + addend
            delta = total.to(dtype)
        x = _added(x, delta, post, size, post_eps, POST, FULL)
        tl.store(x_ptr + row * x_stride + columns, x, mask=is_column)
    if COPIES:
        tl.store(copy_ptr + row * copy_stride + columns, x, mask=is_column)
    result = _normalized(x.to(tl.float32), weight, size, eps, dtype, FULL)
    tl.store(out_ptr + row * out_stride + columns, result, mask=is_column)
    if ROUNDS:
        # Columns that are not there are zeros.
        PARTS_OF_ROW: tl.constexpr = 1 if ROUNDS == 1 else BLOCK // ROUNDS
        parts = tl.reshape(result, [PARTS_OF_ROW, BLOCK // PARTS_OF_ROW])
        numbers, scales = rounded(parts)
        numbers = tl.reshape(numbers, [BLOCK])
        tl.store(rounded_ptr + row * size + columns, numbers, mask=is_column)
        part = tl.arange(0, PARTS_OF_ROW)
        is_part = part * (BLOCK // PARTS_OF_ROW) < size
        tl.store(scales_ptr + part * tl.num_programs(0) + row, scales, mask=is_part)


@triton.jit(do_not_specialize=["num_rows"])
def norm_of_ranks(
    x_ptr, delta_ptr, post_ptr, weight_ptr, out_ptr, copy_ptr, places, flags, counts, times, told, patience,
    x_stride, delta_stride, part_stride, out_stride, copy_stride, num_rows, size, eps, post_eps,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, POST: tl.constexpr, COPIES: tl.constexpr,
    FULL: tl.constexpr, ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, TWO_SHOT: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises rows as `norm` does, where delta is the sum of the ranks' deltas, which are
    exchanged here.

    A program takes one row after the other, so that some are on their way while others are added
    up.
    """
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0)
    post = weight
    if POST:
        post = tl.load(post_ptr + columns, mask=is_column, other=0.0)
    if DEPENDENT:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = newest(counts)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        delta_at = delta_ptr + row * delta_stride + columns
        own = tl.load(delta_at, mask=is_column, other=0.0)
        for part in tl.static_range(1, PARTS):
            own += tl.load(delta_at + part * part_stride, mask=is_column, other=0.0)
        own = own.to(dtype)
        x_at = x_ptr + row * x_stride + columns
        x = tl.load(x_at, mask=is_column, other=0.0)
        if index >= tl.num_programs(0):
            go_on(counts, count)
        count += 1
        total = sum_of_ranks(
            own, row, size, count, places, flags, times, told, patience, ROOM, PROGRAMS, LAMPORT,
            TWO_SHOT, RANK, RANKS,
        )  # fmt: skip
        x = _added(x, total, post, size, post_eps, POST, FULL)
        tl.store(x_at, x, mask=is_column)
        if COPIES:
            tl.store(copy_ptr + row * copy_stride + columns, x, mask=is_column)
        result = _normalized(x.to(tl.float32), weight, size, eps, dtype, FULL)
        tl.store(out_ptr + row * out_stride + columns, result, mask=is_column)
    finish(counts, count)


@triton.jit(do_not_specialize=["num_rows"])
def rows_of_ranks(
    table, tokens, out_ptr, places, flags, counts, times, told, patience, first, count, num_rows, size,
    BLOCK: tl.constexpr, ROOM: tl.constexpr, PROGRAMS: tl.constexpr, LAMPORT: tl.constexpr, TWO_SHOT: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Looks up rows of a table whose rows ranks share; this one has `count`, from `first` on.

    It is a forward's first exchange, and tells the host the times of those before.
    """
    columns = tl.arange(0, BLOCK)
    is_column = columns < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    number = newest(counts)
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        index = tl.load(tokens + row) - first
        is_own = is_column & (index >= 0) & (index < count)
        own = tl.load(table + index * size + columns, mask=is_own, other=0.0)
        if row == 0:  # while the row comes, and long before the kernel ends
            begin_forward(times, told)
        if row >= tl.num_programs(0):
            go_on(counts, number)
        number += 1
        total = sum_of_ranks(
            own, row, size, number, places, flags, times, told, patience, ROOM, PROGRAMS, LAMPORT,
            TWO_SHOT, RANK, RANKS,
        )  # fmt: skip
        out_at = out_ptr + tl.cast(row, tl.int64) * size + columns
        tl.store(out_at, total, mask=is_column)
    finish(counts, number)


@triton.jit
def angles(
    positions, frequencies, cos_ptr, sin_ptr, half, factor, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes cosines and signed sines of one row; both halves of a head have the same angles."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < half
    frequency = tl.load(frequencies + columns, mask=is_column, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    angle = tl.load(positions + row).to(tl.float32) * frequency
    cos, sin = tl.cos(angle) * factor, tl.sin(angle) * factor
    first = row * 2 * half + columns
    tl.store(cos_ptr + first, cos, mask=is_column)
    tl.store(cos_ptr + first + half, cos, mask=is_column)
    tl.store(sin_ptr + first, -sin, mask=is_column)
    tl.store(sin_ptr + first + half, sin, mask=is_column)


@triton.jit
def turned(x, y, cos, sin, dtype: tl.constexpr):
    """Rotates pairs (x, y) of float32; the same fused operations in every kernel."""
    return tl.fma(x, cos, -(y * sin)).to(dtype), tl.fma(y, cos, x * sin).to(dtype)


@triton.jit
def kept(x, inverse, dtype: tl.constexpr, LIMIT: tl.constexpr):
    """Converts keys or values to the cache's type: with LIMIT, the maximum of an 8-bit one, as
    x * inverse within it.
    """
    if LIMIT > 0:
        x = tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT)
    return x.to(dtype)


@triton.jit
def rotate_and_store(
    heads_ptr, queries_ptr, cos_ptr, sin_ptr, q_weight, k_weight, keys_ptr, values_ptr, slots,
    row_stride, query_stride, part_stride, plane_stride, eps, k_inverse, v_inverse,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, NORMS: tl.constexpr, FULL: tl.constexpr, LIMIT: tl.constexpr, PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Handles some heads of one row, each the sum of PARTS: normalises and rotates queries, and
    writes keys and values to their slot of the cache.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, BLOCK_D)
    is_column = (columns < half)[None, :]
    is_query, is_value = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    wanted = (heads < Q_HEADS + 2 * KV_HEADS)[:, None] & is_column
    dtype: tl.constexpr = queries_ptr.dtype.element_ty
    at = heads_ptr + row * row_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    first = tl.load(at, mask=wanted, other=0.0)
    second = tl.load(at + half, mask=wanted, other=0.0)
    for part in tl.static_range(1, PARTS):
        first += tl.load(at + part * part_stride, mask=wanted, other=0.0)
        second += tl.load(at + half + part * part_stride, mask=wanted, other=0.0)
    first, second = first.to(dtype), second.to(dtype)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt_rn((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)
        x, y = x * scale[:, None], y * scale[:, None]
        if not FULL:
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        query = is_query[:, None] & is_column
        key = (~is_query)[:, None] & is_column
        # One of the two is 0 where the head is not of its kind.
        q_at, k_at = q_weight + columns[None, :], k_weight + columns[None, :]
        low = tl.load(q_at, mask=query, other=0.0) + tl.load(k_at, mask=key, other=0.0)
        high = tl.load(q_at + half, mask=query, other=0.0)
        high += tl.load(k_at + half, mask=key, other=0.0)
        x, y = x * low.to(tl.float32), y * high.to(tl.float32)
        x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
    angle = row * HEAD_DIM + columns
    cos = tl.load(cos_ptr + angle, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + half + angle, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    low, high = turned(x, y, cos, sin, dtype)
    at = queries_ptr + row * query_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(at, low, mask=wanted & is_query[:, None])
    tl.store(at + half, high, mask=wanted & is_query[:, None])
    slot = tl.load(slots + row).to(tl.int64) * HEAD_DIM
    plane = (heads - Q_HEADS).to(tl.int64)[:, None] * plane_stride
    key_at = keys_ptr + plane + slot + columns[None, :]
    is_key = wanted & (~is_query & ~is_value)[:, None]
    kind: tl.constexpr = keys_ptr.dtype.element_ty
    tl.store(key_at, kept(low, k_inverse, kind, LIMIT), mask=is_key)
    tl.store(key_at + half, kept(high, k_inverse, kind, LIMIT), mask=is_key)
    # All of a large cache's planes together take more than 32 bits.
    plane = (heads - Q_HEADS - KV_HEADS).to(tl.int64)[:, None] * plane_stride
    value_at = values_ptr + plane + slot + columns[None, :]
    is_value = wanted & is_value[:, None]
    tl.store(value_at, kept(first, v_inverse, kind, LIMIT), mask=is_value)
    tl.store(value_at + half, kept(second, v_inverse, kind, LIMIT), mask=is_value)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """Applies SiLU, GELU or its tanh form, in float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u))


@triton.jit
def silu_times(gate, up, kind: tl.constexpr):
    """silu(gate) * up, rounded to `kind` where separate operations would round."""
    return activated(gate.to(kind).to(tl.float32), "silu") * up.to(kind).to(tl.float32)


@triton.jit
def gate(
    both_ptr, out_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Computes a part of one row of activation(first half) * second half."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = both_ptr + row * 2 * size + columns
    x = tl.load(at, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=is_column, other=0.0).to(tl.float32)
    result = activated(x, KIND) * up
    tl.store(out_ptr + row * size + columns, result.to(out_ptr.dtype.element_ty), mask=is_column)
