import triton
import triton.language as tl
from foredraft.layers.triton_kernels import silu_times
from foredraft.layers.fp8_kernels import _finished


@triton.jit
def _dot(acc, w, x, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(x, tl.trans(w), acc)
    else:
        acc = tl.dot(w, tl.trans(x), acc)
    return acc


@triton.jit(do_not_specialize=["rows"])
def trial(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, out_ptr, rows, outputs, inputs,
    GATED: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    in_m = m < rows
    safe_n = tl.where(in_n, n, 0)
    w = w_ptr + safe_n.to(tl.int64)[:, None] * inputs + k[None, :]
    second = outputs.to(tl.int64) * inputs
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    if SWAP:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc2 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    end = inputs - AHEAD * BLOCK_K
    if AHEAD >= 1:
        first = tl.load(w + end)
        if GATED:
            first2 = tl.load(w + second + end)
    if AHEAD >= 2:
        other = tl.load(w + end + BLOCK_K)
        if GATED:
            other2 = tl.load(w + second + end + BLOCK_K)
    if DEPENDENT:
        if DEPENDENT == 2:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if DEPENDENT == 1:
            tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, end, BLOCK_K):
        tile = tl.load(w + start)
        columns = tl.load(x + start, mask=in_m[:, None], other=0.0)
        acc = _dot(acc, tile, columns, SWAP)
        if GATED:
            acc2 = _dot(acc2, tl.load(w + second + start), columns, SWAP)
    if AHEAD >= 1:
        columns = tl.load(x + end, mask=in_m[:, None], other=0.0)
        acc = _dot(acc, first, columns, SWAP)
        if GATED:
            acc2 = _dot(acc2, first2, columns, SWAP)
    if AHEAD >= 2:
        columns = tl.load(x + end + BLOCK_K, mask=in_m[:, None], other=0.0)
        acc = _dot(acc, other, columns, SWAP)
        if GATED:
            acc2 = _dot(acc2, other2, columns, SWAP)
    if DEPENDENT == 3:
        tl.extra.cuda.gdc_launch_dependents()
    if not SWAP:
        acc = tl.trans(acc)
        acc2 = tl.trans(acc2)
    kind = out_ptr.dtype.element_ty
    own = tl.load(x_scales_ptr + m, mask=in_m, other=0.0)[:, None]
    acc = _finished(acc, own, scales_ptr, out_ptr, safe_n, False, False)
    if GATED:
        acc2 = _finished(acc2, own, scales_ptr, out_ptr, safe_n + outputs, False, False)
        acc = silu_times(acc, acc2, kind)
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, acc.to(kind), mask=in_m[:, None] & in_n[None, :])
