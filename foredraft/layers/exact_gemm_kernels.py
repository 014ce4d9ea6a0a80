"""Triton kernels for products that add up all columns in one pass, in their order; see
`exact_gemm`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_tiles(
    x_ptr, w_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, SUMMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes one tile of out = x W^T + bias.

    Tiles of GROUP blocks of rows are neighbours, so that they find weights in the cache. Columns
    are summed up in SUMMED parts, then the parts.
    """
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    first_block = program // (GROUP * column_blocks) * GROUP
    size = tl.minimum(row_blocks - first_block, GROUP)
    rest = program % (GROUP * column_blocks)
    m = (first_block + rest % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = rest // size * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Sums of rows beyond the last are not stored.
    x = x_ptr + tl.where(m < rows, m, 0).to(tl.int64)[:, None] * inputs + k[None, :]
    w = w_ptr + tl.where(n < outputs, n, 0).to(tl.int64)[None, :] * inputs + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    share = inputs // SUMMED
    for part in range(SUMMED):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * share, (part + 1) * share, BLOCK_K):
            if EVEN:
                left, right = tl.load(x + start), tl.load(w + start)
            else:
                in_k = start + k < inputs
                left = tl.load(x + start, mask=in_k[None, :], other=0.0)
                right = tl.load(w + start, mask=in_k[:, None], other=0.0)
            acc = tl.dot(left, right, acc)
        total = acc if SUMMED == 1 else total + acc
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    wanted = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def multiply_blocks(
    x_blocks, w_blocks, bias_ptr, out_ptr, rows, outputs, share,
    HAS_BIAS: tl.constexpr, PARTS: tl.constexpr, SUMMED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes the same as `multiply_tiles` from tensor descriptors.

    Hopper's copy engine reads them, with zeros beyond their ends. With PARTS, program (i, j) adds
    up only `share` columns, into out[j]. Otherwise a program adds up SUMMED times `share` columns,
    and then the sums.
    """
    program = tl.program_id(0)
    row_blocks, column_blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    first_block = program // (GROUP * column_blocks) * GROUP
    size = tl.minimum(row_blocks - first_block, GROUP)
    rest = program % (GROUP * column_blocks)
    first_m, first_n = (first_block + rest % size) * BLOCK_M, rest // size * BLOCK_N
    first_k = tl.program_id(1) * share
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for part in range(SUMMED):
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(part * share, (part + 1) * share, BLOCK_K):
            left = x_blocks.load([first_m, first_k + start])
            right = w_blocks.load([first_n, first_k + start])
            acc = tl.dot(left, right.T, acc)
        total = acc if SUMMED == 1 else total + acc
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if PARTS:
        out_ptr += tl.program_id(1).to(tl.int64) * rows * outputs
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    wanted = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=wanted)
