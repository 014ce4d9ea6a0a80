"""Triton kernels for products of 8-bit floats, and for rounding rows to them."""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.layers.head_kernels import load_angles, outputs_of_pairs, store_heads
from foredraft.layers.triton_kernels import rounded, silu_times


@triton.jit
def _finished(acc, scale, own, bias_ptr, n, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scales sums, and rounds them as the library does, before the bias."""
    if not BLOCKS:
        acc = acc * scale[None, :] * own[:, None]
    acc = acc.to(tl.bfloat16).to(tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n).to(tl.float32)[None, :]
    return acc


@triton.jit
def _scales(own, scales, block, rows, in_m):
    """Scales of x's rows and of W's outputs in a block of inputs."""
    return tl.load(own + block * rows, mask=in_m, other=0.0), tl.load(scales + block)


@triton.jit(do_not_specialize=["rows"])
def multiply_fp8(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    cos_ptr, sin_ptr, keys_ptr, values_ptr, slots_ptr, plane_stride, k_inverse, v_inverse,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, LIMIT: tl.constexpr,
    BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for 8-bit floats, in one pass over the inputs.

    Without BLOCKS: a scale for each row of x and each output. With BLOCKS, each sum over 128 inputs
    is scaled and added: scales of x are [inputs / 128, rows], of W [outputs / 128, inputs / 128].
    With GATED, silu of the first half of W's outputs is multiplied by the second half. With
    HEAD_DIM, outputs are heads: queries and keys are rotated, `out` takes the queries, and the
    cache keys and values, as in `rotate_and_store`.

    Args:
        UNROLL: Number of blocks of an iteration, 1 or 4; with 4, scales have the time of four blocks
            to arrive. Only with BLOCKS, without GATED.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if HEAD_DIM:
        n, head, pair = outputs_of_pairs(tl.program_id(0), BLOCK_N, HEAD_DIM)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    in_m = m < rows
    safe_n = tl.where(in_n, n, 0)
    line = w_ptr + safe_n.to(tl.int64) * inputs
    second = outputs.to(tl.int64) * inputs
    w = line[:, None] + k[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    block_scales = scales_ptr + (tl.program_id(0) * BLOCK_N // 128) * (inputs // 128)
    block_scales2 = block_scales + outputs // 128 * (inputs // 128)
    own_scales = x_scales_ptr + m
    # What is needed after the last weights is loaded before the first ones: it comes from memory.
    last_scale, last_scale2, last_own = 1.0, 1.0, 1.0
    if not BLOCKS:
        last_scale = tl.load(scales_ptr + safe_n)
        if GATED:
            last_scale2 = tl.load(scales_ptr + safe_n + outputs)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if not BLOCKS:
        last_own = tl.load(own_scales, mask=in_m, other=0.0)
    if HEAD_DIM:
        cos, sin, slots = load_angles(cos_ptr, sin_ptr, slots_ptr, m, pair, in_m, HEAD_DIM)
    if UNROLL == 1 and BLOCKS:
        own = tl.load(own_scales, mask=in_m, other=0.0)
        scale = tl.load(block_scales)
        scale2 = scale
        if GATED:
            scale2 = tl.load(block_scales2)
    elif BLOCKS:
        own0, scale0 = _scales(own_scales, block_scales, 0, rows, in_m)
        own1, scale1 = _scales(own_scales, block_scales, 1, rows, in_m)
        own2, scale2 = _scales(own_scales, block_scales, 2, rows, in_m)
        own3, scale3 = _scales(own_scales, block_scales, 3, rows, in_m)
    for start in range(0, inputs, BLOCK_K * UNROLL):
        tile = tl.load(w + start)
        columns = tl.trans(tl.load(x + start, mask=in_m[:, None], other=0.0))
        if GATED:
            tile2 = tl.load(w + second + start)
        if UNROLL > 1:
            # Scales of the next four blocks; the last ones read their own again.
            both0, both1, both2, both3 = own0 * scale0, own1 * scale1, own2 * scale2, own3 * scale3
            ahead = tl.minimum(start + 512, inputs - 512) // 128
            own0, scale0 = _scales(own_scales, block_scales, ahead, rows, in_m)
            own1, scale1 = _scales(own_scales, block_scales, ahead + 1, rows, in_m)
            own2, scale2 = _scales(own_scales, block_scales, ahead + 2, rows, in_m)
            own3, scale3 = _scales(own_scales, block_scales, ahead + 3, rows, in_m)
            acc += tl.dot(tile, columns) * both0[None, :]
            tile = tl.load(w + start + 128)
            columns = tl.trans(tl.load(x + start + 128, mask=in_m[:, None], other=0.0))
            acc += tl.dot(tile, columns) * both1[None, :]
            tile = tl.load(w + start + 256)
            columns = tl.trans(tl.load(x + start + 256, mask=in_m[:, None], other=0.0))
            acc += tl.dot(tile, columns) * both2[None, :]
            tile = tl.load(w + start + 384)
            columns = tl.trans(tl.load(x + start + 384, mask=in_m[:, None], other=0.0))
            acc += tl.dot(tile, columns) * both3[None, :]
        elif BLOCKS:
            both = own * scale
            both2 = own * scale2
            # Scales of the next block; the last one reads its own again.
            ahead = tl.minimum(start + 128, inputs - 128) // 128
            own = tl.load(own_scales + ahead * rows, mask=in_m, other=0.0)
            scale = tl.load(block_scales + ahead)
            if GATED:
                scale2 = tl.load(block_scales2 + ahead)
            acc += tl.dot(tile, columns) * both[None, :]
            if GATED:
                acc2 += tl.dot(tile2, columns) * both2[None, :]
        else:
            acc = tl.dot(tile, columns, acc)
            if GATED:
                acc2 = tl.dot(tile2, columns, acc2)
    acc = tl.trans(acc)
    acc2 = tl.trans(acc2)
    kind = out_ptr.dtype.element_ty
    acc = _finished(acc, last_scale, last_own, bias_ptr, safe_n, BLOCKS, HAS_BIAS)
    if GATED:
        acc2 = _finished(acc2, last_scale2, last_own, bias_ptr, safe_n + outputs, BLOCKS, HAS_BIAS)
        acc = silu_times(acc, acc2, kind)
    if HEAD_DIM:
        store_heads(
            acc, out_ptr, keys_ptr, values_ptr, head, pair, m, in_m, cos, sin, slots, plane_stride,
            k_inverse, v_inverse, Q_HEADS, KV_HEADS, HEAD_DIM, LIMIT,
        )  # fmt: skip
    else:
        out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
        tl.store(out, acc.to(kind), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def quantize_rows(
    x_ptr, out_ptr, scales_ptr, size, inputs, rows,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows of x as 8-bit floats, a scale for `size` columns of a row; program (i, j) has PARTS
    such parts of row i, from part PARTS * j on, and the scale of part p is at [p, i].
    """
    row = tl.program_id(0)
    parts = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    k = tl.arange(0, BLOCK)
    if DEPENDENT:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_part = parts < inputs // size
    columns = row.to(tl.int64) * inputs + (parts * size)[:, None] + k[None, :]
    mask = is_part[:, None] & (k < size)[None, :]
    numbers, scale = rounded(tl.load(x_ptr + columns, mask=mask, other=0.0))
    tl.store(out_ptr + columns, numbers, mask=mask)
    tl.store(scales_ptr + parts * rows + row, scale, mask=is_part)
