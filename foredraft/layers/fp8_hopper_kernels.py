"""Products of 8-bit floats for few rows on Hopper cards, in Gluon.

The arithmetic is that of `fp8_kernels.multiply_fp8` without BLOCKS, number by number. Weights are
copied to shared memory many tiles ahead, and before the kernel ahead of this one has ended.
"""

# mypy: ignore-errors
import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

BLOCK_N, BLOCK_K = 64, 128  # outputs and inputs of a tile

# Layout of 128 numbers of 8 bits as the matrix units read them.
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


def tiles_of(rows: torch.Tensor, count: int) -> TensorDescriptor:
    """Describes 8-bit floats [n, inputs] as tiles of `count` rows."""
    return TensorDescriptor.from_tensor(rows, [count, BLOCK_K], _SHARED)


@gluon.jit
def _copy(
    desc, shared, ready, unit, stage, first, second, there,
    SPANS: gl.constexpr, HALVES: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of SPANS times BLOCK_K inputs, of rows from `first` on, and with two HALVES
    also of those from `second` on.
    """
    ROWS: gl.constexpr = desc.block_shape[0]
    mbarrier.expect(ready.index(stage), SPANS * HALVES * ROWS * BLOCK_K, pred=there)
    for span in gl.static_range(SPANS):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [first + half * second, (unit * SPANS + span) * BLOCK_K], ready.index(stage),
                shared.index((stage * SPANS + span) * HALVES + half), pred=there,
            )  # fmt: skip


@gluon.jit
def _finished(acc, own, scales, bias, HAS_BIAS: gl.constexpr):
    """Scales sums, and rounds them as the library does, before the bias."""
    acc = acc * scales[:, None] * own[None, :]
    acc = acc.to(gl.bfloat16).to(gl.float32)
    if HAS_BIAS:
        acc += bias[:, None]
    return acc


@gluon.jit(do_not_specialize=["rows"])
def multiply_fp8_early(
    x_desc, x_scales_ptr, w_desc, scales_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr, SPANS: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for 8-bit floats with a scale for each row of x and each output; a program
    has BLOCK_N outputs and all rows.

    With GATED, silu of the first half of W's outputs is multiplied by the second half.

    Args:
        x_desc, w_desc: See `tiles_of`.
        SPANS: Number of BLOCK_K inputs of an iteration.
        STAGES, X_STAGES: Number of iterations whose weights, and whose rows, are in shared memory.
    """
    FP8: gl.constexpr = w_desc.dtype
    HALVES: gl.constexpr = 2 if GATED else 1
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32]
    )
    w_shared = gl.allocate_shared_memory(
        FP8, [STAGES * SPANS * HALVES, BLOCK_N, BLOCK_K], w_desc.layout
    )
    x_shared = gl.allocate_shared_memory(FP8, [X_STAGES * SPANS, BLOCK_M, BLOCK_K], x_desc.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(w_ready.index(i), count=1)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_ready.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    first_n = gl.program_id(0) * BLOCK_N
    units = inputs // (BLOCK_K * SPANS)
    for i in gl.static_range(STAGES - 1):
        _copy(w_desc, w_shared, w_ready, i, i, first_n, outputs, i < units, SPANS, HALVES, BLOCK_K)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    for i in gl.static_range(X_STAGES - 1):
        _copy(x_desc, x_shared, x_ready, i, i, 0, 0, i < units, SPANS, 1, BLOCK_K)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    acc2 = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=ACC)
    for unit in range(units):
        stage, x_stage = unit % STAGES, unit % X_STAGES
        mbarrier.wait(x_ready.index(x_stage), (unit // X_STAGES) & 1)
        mbarrier.wait(w_ready.index(stage), (unit // STAGES) & 1)
        for span in gl.static_range(SPANS):
            tile = (stage * SPANS + span) * HALVES
            columns = x_shared.index(x_stage * SPANS + span).permute((1, 0))
            acc = warpgroup_mma(w_shared.index(tile), columns, acc, is_async=True)
            if GATED:
                acc2 = warpgroup_mma(w_shared.index(tile + 1), columns, acc2, is_async=True)
        if GATED:
            acc, acc2 = warpgroup_mma_wait(0, deps=(acc, acc2))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()  # every warp has read the tiles
        ahead = unit + STAGES - 1
        _copy(
            w_desc, w_shared, w_ready, ahead, ahead % STAGES, first_n, outputs, ahead < units,
            SPANS, HALVES, BLOCK_K,
        )  # fmt: skip
        ahead = unit + X_STAGES - 1
        _copy(
            x_desc,
            x_shared,
            x_ready,
            ahead,
            ahead % X_STAGES,
            0,
            0,
            ahead < units,
            SPANS,
            1,
            BLOCK_K,
        )
    n = first_n + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, ACC))
    m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, ACC))
    in_n, in_m = n < outputs, m < rows
    safe_n = gl.where(in_n, n, 0)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    own = gl.load(x_scales_ptr + m, mask=in_m, other=0.0)
    bias = gl.load(bias_ptr + safe_n).to(gl.float32) if HAS_BIAS else safe_n
    acc = _finished(acc, own, gl.load(scales_ptr + safe_n), bias, HAS_BIAS)
    if GATED:
        safe_n += outputs
        bias = gl.load(bias_ptr + safe_n).to(gl.float32) if HAS_BIAS else safe_n
        acc2 = _finished(acc2, own, gl.load(scales_ptr + safe_n), bias, HAS_BIAS)
        gate = acc.to(kind).to(gl.float32)
        acc = gate / (1.0 + gl.exp(-gate)) * acc2.to(kind).to(gl.float32)
    out = out_ptr + m.to(gl.int64)[None, :] * outputs + n[:, None]
    gl.store(out, acc.to(kind), mask=in_n[:, None] & in_m[None, :])
