"""Triton kernels for the keys and values of committed tokens, which depend on no layer before: those
of all layers in two launches.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_layers(
    x_ptr, w_ptr, offsets, out_ptr, rows, outputs, inputs,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes out[layer] = x W[layer]^T.

    Grid (parts of the outputs, layers). A layer's weights begin `offsets[layer]` numbers behind
    w_ptr, a multiple of 8. W is the left operand, since it has many rows and x few.
    """
    layer = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    in_n, in_m = n < outputs, (m < rows)[:, None]
    w_ptr += tl.multiple_of(tl.load(offsets + layer), 8)
    w = w_ptr + tl.where(in_n, n, 0).to(tl.int64)[:, None] * inputs + k[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, inputs, BLOCK_K):
        if EVEN:
            tile = tl.load(w + start)
            columns = tl.load(x + start, mask=in_m, other=0.0)
        else:
            in_k = (start + k < inputs)[None, :]
            tile = tl.load(w + start, mask=in_k, other=0.0)
            columns = tl.load(x + start, mask=in_m & in_k, other=0.0)
        acc = tl.dot(tile, tl.trans(columns), acc)
    out_ptr += layer.to(tl.int64) * rows * outputs
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, tl.trans(acc).to(out_ptr.dtype.element_ty), mask=in_m & in_n[None, :])


@triton.jit(do_not_specialize=["rows"])
def store_layers(
    heads_ptr, cos_ptr, sin_ptr, norm_ptr, norm_offsets, kv_ptr, slots,
    rows, layer_stride, plane_stride, eps,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    NORMS: tl.constexpr, FULL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates the keys of one row in one layer, and writes them and the values to
    their slot of the cache.

    Grid (rows, layers). heads [layers, rows, 2 * KV_HEADS, HEAD_DIM]: a row's keys, then its
    values. A layer's norm begins `norm_offsets[layer]` numbers behind norm_ptr, a multiple of 8.
    """
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    half: tl.constexpr = HEAD_DIM // 2
    head, columns = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    is_column = (columns < half)[None, :]
    wanted = (head < 2 * KV_HEADS)[:, None] & is_column
    is_key = (head < KV_HEADS)[:, None]
    dtype: tl.constexpr = heads_ptr.dtype.element_ty
    if NORMS:
        norm_ptr += tl.multiple_of(tl.load(norm_offsets + layer), 8)
        low = tl.load(norm_ptr + columns[None, :], is_column, other=0.0).to(tl.float32)
        high = tl.load(norm_ptr + half + columns[None, :], is_column, other=0.0).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = heads_ptr + ((layer * rows + row) * 2 * KV_HEADS + head[:, None]) * HEAD_DIM
    at += columns[None, :]
    first = tl.load(at, mask=wanted, other=0.0)
    second = tl.load(at + half, mask=wanted, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt_rn((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + eps)
        x, y = x * scale[:, None], y * scale[:, None]
        if not FULL:
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        x, y = (x * low).to(dtype).to(tl.float32), (y * high).to(dtype).to(tl.float32)
    angle = row * HEAD_DIM + columns
    cos = tl.load(cos_ptr + angle, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + half + angle, mask=columns < half, other=0.0).to(tl.float32)[None, :]
    kept: tl.constexpr = kv_ptr.dtype.element_ty
    first = tl.where(is_key, (x * cos - y * sin).to(dtype), first)
    second = tl.where(is_key, (y * cos + x * sin).to(dtype), second)
    slot = tl.load(slots + row).to(tl.int64) * HEAD_DIM
    plane = layer * layer_stride + head.to(tl.int64)[:, None] * plane_stride
    out = kv_ptr + plane + slot + columns[None, :]
    tl.store(out, first.to(kept), mask=wanted)
    tl.store(out + half, second.to(kept), mask=wanted)
