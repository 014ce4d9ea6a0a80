"""Triton kernels that stream a weight matrix once: for a single row by multiply-adds, for some rows
by the matrix units.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.layers.head_kernels import load_angles, outputs_of_pairs, store_heads
from foredraft.layers.triton_kernels import silu_times


@triton.jit
def multiply_row(
    x_ptr, w_ptr, bias_ptr, out_ptr, outputs, inputs,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes out = W x + bias.

    Each thread keeps its part of the sums in registers from the first column to the last.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    w = w_ptr + n.to(tl.int64)[:, None] * inputs + k[None, :]
    # Weights depend on nothing: their first tile is under way before the kernel before this one has
    # ended.
    tile = tl.load(w, mask=in_n[:, None] & (k < inputs)[None, :], other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(x_ptr + k, mask=k < inputs, other=0.0).to(tl.float32)[None, :]
    acc = tile.to(tl.float32) * x
    for start in range(BLOCK_K, inputs, BLOCK_K):
        if EVEN:
            x = tl.load(x_ptr + start + k).to(tl.float32)[None, :]
            wanted = in_n[:, None]
        else:
            x = tl.load(x_ptr + start + k, mask=start + k < inputs, other=0.0)
            x = x.to(tl.float32)[None, :]
            wanted = in_n[:, None] & (start + k < inputs)[None, :]
        acc += tl.load(w + start, mask=wanted, other=0.0).to(tl.float32) * x
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=in_n)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, outputs, inputs, share,
    cos_ptr, sin_ptr, keys_ptr, values_ptr, slots_ptr, plane_stride, k_inverse, v_inverse,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes out = x W^T + bias.

    With GATED, silu of the first half of W's rows' results is multiplied by the results of the
    second half.

    W is the left operand, since it has many rows and x few. With PARTS, program (i, j) sums over
    only `share` columns, into out[j]. With HEAD_DIM, outputs are heads: queries and keys are rotated,
    `out` takes the queries, and the cache keys and values, as in `rotate_and_store`.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HEAD_DIM:
        n, head, pair = outputs_of_pairs(tl.program_id(0), BLOCK_N, HEAD_DIM)
    m = tl.arange(0, BLOCK_M)
    part = tl.program_id(1)
    k = part * share + tl.arange(0, BLOCK_K)
    in_n = n < outputs
    in_m = (m < rows)[:, None]
    # Sums of rows beyond the last are not stored.
    w = w_ptr + tl.where(in_n, n, 0).to(tl.int64)[:, None] * inputs + k[None, :]
    second = w + outputs.to(tl.int64) * inputs
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HEAD_DIM:
        # Needed late, but loaded while the first weights are under way.
        cos, sin, slots = load_angles(cos_ptr, sin_ptr, slots_ptr, m, pair, m < rows, HEAD_DIM)
    for start in range(0, share, BLOCK_K):
        in_k = (start + tl.arange(0, BLOCK_K) < share)[None, :]
        if EVEN:
            tile = tl.load(w + start)
            columns = tl.load(x + start, mask=in_m, other=0.0)
        else:
            tile = tl.load(w + start, mask=in_k, other=0.0)
            columns = tl.load(x + start, mask=in_m & in_k, other=0.0)
        columns = tl.trans(columns)
        acc = tl.dot(tile, columns, acc)
        if GATED:
            if EVEN:
                tile = tl.load(second + start)
            else:
                tile = tl.load(second + start, mask=in_k, other=0.0)
            acc2 = tl.dot(tile, columns, acc2)
    kind = out_ptr.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            acc2 += tl.load(bias_ptr + outputs + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        acc = silu_times(acc, acc2, kind)
    if PARTS:
        out_ptr += part.to(tl.int64) * rows * outputs
    if HEAD_DIM:
        store_heads(
            tl.trans(acc), out_ptr, keys_ptr, values_ptr, head, pair, m, m < rows, cos, sin, slots,
            plane_stride, k_inverse, v_inverse, Q_HEADS, KV_HEADS, HEAD_DIM, LIMIT,
        )  # fmt: skip
    else:
        out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(out, tl.trans(acc).to(kind), mask=in_m & in_n[None, :])
