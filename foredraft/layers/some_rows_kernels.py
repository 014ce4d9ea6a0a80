"""Products for compute capability 9.0 in Gluon: one warp copies tiles ahead of two groups of warps that multiply them."""

# mypy: ignore-errors
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _wait_for_the_kernel_before():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _let_the_next_kernel_start():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _copy_tiles(
    x, w, x_tiles, w_parts, full, empty, inputs, row_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """The copying warp: fills stage after stage, for all tiles of the program."""
    if DEPENDENT:
        _wait_for_the_kernel_before()
    num_bytes: gl.constexpr = (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2
    step = 0
    for tile in range(gl.program_id(0), num_tiles, programs):
        m, n = tile % row_tiles * BLOCK_M, tile // row_tiles * BLOCK_N
        for k in range(0, inputs, BLOCK_K):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, num_bytes)
            tma.async_copy_global_to_shared(x, [m, k], ready, x_tiles.index(stage))
            for eight in gl.static_range(BLOCK_N // 8):
                part = w_parts.index(stage * (BLOCK_N // 8) + eight)
                tma.async_copy_global_to_shared(w, [0, n + 8 * eight, k], ready, part)
            step += 1


@gluon.jit
def _multiply_tiles(
    out, rows, outputs, inputs, x_tiles, w_tiles, full, empty, row_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """The multiplying warps: sums of a tile, then what its outputs are."""
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_M, 16]
    )
    stored: gl.constexpr = gl.BlockedLayout(
        [8, 1], [BLOCK_N // 8, 256 // BLOCK_N], [1, WARPS], [0, 1]
    )
    kind: gl.constexpr = out.dtype.element_ty
    step = 0
    for tile in range(gl.program_id(0), num_tiles, programs):
        acc = gl.zeros((2 * BLOCK_N, BLOCK_M), gl.float32, layout=sums)
        for k in range(0, inputs, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            w = w_tiles.index(stage)
            acc = warpgroup_mma(w, x_tiles.index(stage).permute((1, 0)), acc, is_async=True)
            # This one goes on while the next stage is waited for; the one before is done.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        # Both of an output are in one thread.
        gate, up = acc.reshape((BLOCK_N // 8, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)).split()
        # Rounded where separate operations would round.
        gate = gate.to(kind).to(gl.float32)
        result = gate / (1.0 + gl.exp(-gate)) * up.to(kind).to(gl.float32)
        result = gl.convert_layout(result.to(kind).reshape((BLOCK_N, BLOCK_M)), stored)
        n = tile // row_tiles * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, stored))
        m = tile % row_tiles * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, stored))
        is_output = (n < outputs)[:, None] & (m < rows)[None, :]
        gl.store(out + m.to(gl.int64)[None, :] * outputs + n[:, None], result, mask=is_output)


@gluon.jit(do_not_specialize=["rows", "row_tiles", "num_tiles", "programs"])
def gated(
    x, w, out, rows, outputs, inputs, row_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out = silu(x gate^T) * x up^T; each program takes every programs-th tile.

    w is [2, outputs, inputs], gate and up. In a tile eight rows of gate are followed by the eight of up for the same outputs, since
    the matrix units give sums of rows that are 8 apart to one thread. As the left operand w is read by one program only where
    BLOCK_M covers all rows.
    """
    dtype: gl.constexpr = x.dtype
    w_parts = gl.allocate_shared_memory(dtype, [STAGES * BLOCK_N // 8, 2, 8, BLOCK_K], w.layout)
    w_tiles = w_parts._reinterpret(dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], x.layout)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if DEPENDENT:
        _wait_for_the_kernel_before()
        _let_the_next_kernel_start()
    gl.warp_specialize(
        [
            (_multiply_tiles, (
                out, rows, outputs, inputs, x_tiles, w_tiles, full, empty, row_tiles, num_tiles, programs,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps,
            )),
            (_copy_tiles, (
                x, w, x_tiles, w_parts, full, empty, inputs, row_tiles, num_tiles, programs,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DEPENDENT,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip


@gluon.jit
def _copy_shares(
    x, w, x_tiles, w_tiles, full, empty, share, row_tiles, column_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """As `_copy_tiles`, of shares of the columns."""
    num_bytes: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2
    if DEPENDENT:
        _wait_for_the_kernel_before()
    step = 0
    for tile in range(gl.program_id(0), num_tiles, programs):
        m, rest = tile % row_tiles * BLOCK_M, tile // row_tiles
        n, first = rest % column_tiles * BLOCK_N, rest // column_tiles * share
        for k in range(first, first + share, BLOCK_K):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, num_bytes)
            tma.async_copy_global_to_shared(x, [m, k], ready, x_tiles.index(stage))
            tma.async_copy_global_to_shared(w, [n, k], ready, w_tiles.index(stage))
            step += 1


@gluon.jit
def _multiply_shares(
    out, rows, outputs, share, x_tiles, w_tiles, full, empty, row_tiles, column_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """As `_multiply_tiles`, with sums as they are."""
    sums: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for tile in range(gl.program_id(0), num_tiles, programs):
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout=sums)
        for k in range(0, share, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            w = w_tiles.index(stage).permute((1, 0))
            acc = warpgroup_mma(x_tiles.index(stage), w, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            gl.thread_barrier()
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        rest = tile // row_tiles
        m = tile % row_tiles * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, sums))
        n = rest % column_tiles * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, sums))
        line = (rest // column_tiles).to(gl.int64) * rows + m
        is_output = (m < rows)[:, None] & (n < outputs)[None, :]
        gl.store(out + line[:, None] * outputs + n[None, :], acc, mask=is_output)


@gluon.jit(do_not_specialize=["rows", "row_tiles", "column_tiles", "num_tiles", "programs"])
def multiply_in_parts(
    x, w, out, rows, outputs, share, row_tiles, column_tiles, num_tiles, programs,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    DEPENDENT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[j] = x W^T over columns j * share on alone, float32 [parts, rows, outputs]."""
    dtype: gl.constexpr = x.dtype
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gl.thread_barrier()
    if DEPENDENT:
        _wait_for_the_kernel_before()
        _let_the_next_kernel_start()
    gl.warp_specialize(
        [
            (_multiply_shares, (
                out, rows, outputs, share, x_tiles, w_tiles, full, empty, row_tiles, column_tiles, num_tiles,
                programs, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, num_warps,
            )),
            (_copy_shares, (
                x, w, x_tiles, w_tiles, full, empty, share, row_tiles, column_tiles, num_tiles, programs,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DEPENDENT,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
