"""Triton kernels for quantised weights: products that read a matrix once, and what they need around
them.
"""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.constexpr_function
def _code(plane, is_half):
    """Two int32 $1, $2 hold a 4-bit number each; $0 = (number - zero) * scale of both as 16-bit
    floats.

    $3 is -(base + zero point) and $5 the scale, twice each. `base` is a power of two whose last
    bits the number fills: 128 in bfloat16, 1024 in float16.
    """
    kind, base, one = "bf16x2", "0x43004300", "0x3f803f80"
    if is_half:
        kind, base, one = "f16x2", "0x64006400", "0x3c003c00"
    halves = "0x5410"
    if plane >= 4:
        halves = "0x7632"
    shift = 4 * (plane % 4)
    return f"""{{
    .reg .b32 t, one, none;
    prmt.b32 t, $1, $2, {halves};
    shr.b32 t, t, {shift};
    lop3.b32 t, t, 0x000f000f, {base}, 0xea;
    mov.b32 one, {one};
    mov.b32 none, 0x80008000;
    fma.rn.{kind} t, t, one, $3;
    fma.rn.{kind} $0, t, $5, none;
    }}"""


@triton.jit
def _plane(
    words,
    zeros,
    scales,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ASM: tl.constexpr,
):
    """(number - zero) * scale of numbers PLANE of each word, rounded once to TYPE."""
    if ASM:
        if tl.float16 == TYPE:
            tile = tl.inline_asm_elementwise(
                _code(PLANE, True), "=r,r,r,r,r,r,r", [words, zeros, scales],
                dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            tile = tl.inline_asm_elementwise(
                _code(PLANE, False), "=r,r,r,r,r,r,r", [words, zeros, scales],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        # 2**23 + number, made of bits: conversions of integers are slow.
        numbers = ((words >> (BITS * PLANE)) & ((1 << BITS) - 1)) | 0x4B000000
        values = numbers.to(tl.float32, bitcast=True) - 8388608.0
        tile = ((values - zeros) * scales).to(TYPE)
    return tile


@triton.jit
def _factors(ptr, at, ASM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr):
    """Zero points and scales of outputs [n, 1], as `_plane` wants them."""
    f = tl.load(ptr + at)
    if BITS == 8:
        zeros = 128.0
        scales = f.to(tl.float32, bitcast=True)[:, None]
    elif ASM:
        zeros = ((f & 0xFFFF) | (f << 16))[:, None]
        scales = (((f >> 16) & 0xFFFF) | (f & -65536))[:, None]
    else:
        base = 1024.0 if tl.float16 == TYPE else 128.0
        zeros = -base - f.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)[:, None]
        scales = (f >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)[:, None]
    return zeros, scales


@triton.jit(do_not_specialize=["rows"])
def multiply_words(
    x_ptr, w_ptr, factors_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias, in one pass over the inputs, for numbers of BITS bits in int32.

    A unit is UNIT words of an output: bits BITS * j of word i are input j * UNIT + i of the unit.
    So each plane j of a unit is a product of its own, and the inputs are summed up in their order.

    Args:
        factors_ptr: int32 [groups, outputs]: of 4 bits a scale and -(base + zero point), 16 bits
            each; of 8 bits a float32 scale.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, UNIT)
    in_n = n < outputs
    in_m = (m < rows)[:, None]
    safe_n = tl.where(in_n, n, 0)
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    w = w_ptr + safe_n.to(tl.int64)[:, None] * (inputs // PLANES) + k[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for start in range(0, inputs, PLANES * UNIT):
        words = tl.load(w + start // PLANES)
        zeros, scales = _factors(factors_ptr, (start // GROUP) * outputs + safe_n, ASM, BITS, TYPE)
        for plane in tl.static_range(PLANES):
            if plane > 0 and plane * UNIT % GROUP == 0:
                group = start // GROUP + plane * UNIT // GROUP
                zeros, scales = _factors(factors_ptr, group * outputs + safe_n, ASM, BITS, TYPE)
            tile = _plane(words, zeros, scales, plane, BITS, TYPE, ASM)
            columns = tl.load(x + start + plane * UNIT, mask=in_m, other=0.0)
            acc = tl.dot(tile, tl.trans(columns), acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, tl.trans(acc).to(TYPE), mask=in_m & in_n[None, :])


@triton.jit
def dequantize_words(
    w_ptr, factors_ptr, out_ptr, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The matrix of `multiply_words` as 16-bit floats [outputs, inputs]; program (i, j) has unit j
    of BLOCK_N outputs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, UNIT)
    in_n = (n < outputs)[:, None]
    safe_n = tl.where(n < outputs, n, 0)
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    start = tl.program_id(1) * PLANES * UNIT
    rows = safe_n.to(tl.int64)[:, None]
    words = tl.load(w_ptr + rows * (inputs // PLANES) + start // PLANES + k[None, :])
    for plane in tl.static_range(PLANES):
        group = start // GROUP + plane * UNIT // GROUP
        zeros, scales = _factors(factors_ptr, group * outputs + safe_n, False, BITS, TYPE)
        tile = _plane(words, zeros, scales, plane, BITS, TYPE, False)
        tl.store(out_ptr + rows * inputs + start + plane * UNIT + k[None, :], tile, mask=in_n)


@triton.jit
def _block_scales(w_scales, x_scales, block, blocks, rows, in_m):
    block = tl.minimum(block, blocks - 1)
    return tl.load(w_scales + block), tl.load(x_scales + block * rows, mask=in_m, other=0.0)


@triton.jit
def _moved_up(scale, own):
    """Scales of the next block as a call's results: plain copies of variables in a loop are what
    Triton's compiler may lose.
    """
    return scale, own


@triton.jit(do_not_specialize=["rows"])
def multiply_fp8(
    x_ptr, x_scales_ptr, w_ptr, scales_ptr, bias_ptr, out_ptr, rows, outputs, inputs,
    BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, LEFT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for 8-bit floats, in one pass over the inputs.

    Without BLOCKS: a scale for each row of x and each output. With BLOCKS, each sum over 128 inputs
    is scaled and added: scales of x are [inputs / 128, rows], of W [outputs / 128, inputs / 128].
    LEFT: x is the left operand.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    in_n = n < outputs
    in_m = m < rows
    safe_n = tl.where(in_n, n, 0)
    w = w_ptr + safe_n.to(tl.int64)[:, None] * inputs + k[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * inputs + k[None, :]
    if LEFT:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    blocks = inputs // 128
    block_scales = scales_ptr + (tl.program_id(0) * BLOCK_N // 128) * blocks
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if BLOCKS:
        scale0, own0 = _block_scales(block_scales, x_scales_ptr + m, 0, blocks, rows, in_m)
        scale1, own1 = _block_scales(block_scales, x_scales_ptr + m, 1, blocks, rows, in_m)
        scale2, own2 = _block_scales(block_scales, x_scales_ptr + m, 2, blocks, rows, in_m)
        scale3, own3 = _block_scales(block_scales, x_scales_ptr + m, 3, blocks, rows, in_m)
    for start in range(0, inputs, BLOCK_K):
        tile = tl.load(w + start)
        columns = tl.load(x + start, mask=in_m[:, None], other=0.0)
        if BLOCKS:
            # Scales are loaded four blocks ahead.
            both = own0 * scale0
            scale0, own0 = _moved_up(scale1, own1)
            scale1, own1 = _moved_up(scale2, own2)
            scale2, own2 = _moved_up(scale3, own3)
            ahead = start // 128 + 4
            scale3, own3 = _block_scales(block_scales, x_scales_ptr + m, ahead, blocks, rows, in_m)
            if LEFT:
                acc += tl.dot(columns, tl.trans(tile)) * both[:, None]
            else:
                acc += tl.dot(tile, tl.trans(columns)) * both[None, :]
        elif LEFT:
            acc = tl.dot(columns, tl.trans(tile), acc)
        else:
            acc = tl.dot(tile, tl.trans(columns), acc)
    if not LEFT:
        acc = tl.trans(acc)
    if not BLOCKS:
        own = tl.load(x_scales_ptr + m, mask=in_m, other=0.0)
        acc = acc * tl.load(scales_ptr + safe_n)[None, :] * own[:, None]
    # Rounded as the library rounds, before the bias.
    acc = acc.to(tl.bfloat16)
    if HAS_BIAS:
        acc = (
            acc.to(tl.float32) + tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        )
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def quantize_rows(
    x_ptr, out_ptr, scales_ptr, size, inputs, rows, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Rows of x as 8-bit floats with a scale; program (i, j) has columns size * j on of row i, and
    scale [j, i].
    """
    row, part = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first = row.to(tl.int64) * inputs + part * size
    x = tl.load(x_ptr + first + k, mask=k < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    tl.store(out_ptr + first + k, (x / scale).to(tl.float8e4nv), mask=k < size)
    tl.store(scales_ptr + part * rows + row, scale)
