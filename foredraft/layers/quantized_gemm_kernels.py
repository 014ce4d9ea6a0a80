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
        tile = ((numbers.to(tl.float32, bitcast=True) - zeros) * scales).to(TYPE)
    return tile


@triton.jit
def _factors(ptr, size, ASM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr):
    """Zero points and scales of outputs [n, 1], as `_plane` wants them.

    Args:
        ptr: Pointers [n] to the scales; of 4 bits `size` numbers before the zero points.
    """
    if BITS == 8:
        zeros = 8388736.0  # 2**23 + 128
        scales = tl.load(ptr)[:, None]
    else:
        scale, zero = tl.load(ptr), tl.load(ptr + size)
        if ASM:
            zeros = (zero.to(tl.int32) & 0xFFFF) * 65537
            scales = (scale.to(tl.int32) & 0xFFFF) * 65537
        else:
            base = 1024.0 if tl.float16 == TYPE else 128.0
            zeros = 8388608.0 - base - zero.to(TYPE, bitcast=True).to(tl.float32)
            scales = scale.to(TYPE, bitcast=True).to(tl.float32)
        zeros, scales = zeros[:, None], scales[:, None]
    return zeros, scales


@triton.jit
def _gated(gate, up, kind: tl.constexpr):
    """silu(gate) * up, rounded where separate operations would round."""
    gate = gate.to(kind).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def multiply_words(
    x_ptr, w_ptr, factors_ptr, bias_ptr, out_ptr, rows, outputs, words, share,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for numbers of BITS bits in int32.

    A unit is UNIT words of an output: bits BITS * j of word i are input j * UNIT + i of the unit.
    So each plane j of a unit is a product of its own, and the inputs are summed up in their order.
    With GATED, silu of the first half of W's outputs is multiplied by the second half. With PARTS,
    program (i, j) sums over only `share` words of an output, into out[j].

    Args:
        factors_ptr: Of 4 bits int16 [2, groups, outputs]: scales and -(base + zero point), as
            16-bit floats; of 8 bits float32 scales [groups, outputs].
        words: Words of an output.
        GROUP: Inputs that share factors; 0 for all.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, UNIT)
    in_n = n < outputs
    in_m = (m < rows)[:, None]
    safe_n = tl.where(in_n, n, 0)
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    all_outputs = outputs * 2 if GATED else outputs
    factors = factors_ptr + safe_n
    size = words * PLANES // GROUP * all_outputs if GROUP > 0 else all_outputs
    first = tl.program_id(1) * share
    line = w_ptr + safe_n.to(tl.int64) * words + first
    second = outputs.to(tl.int64) * words
    w = line[:, None] + k[None, :]
    x = x_ptr + m.to(tl.int64)[:, None] * (words * PLANES) + first * PLANES + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc2 = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GROUP == 0:
        zeros, scales = _factors(factors, size, ASM, BITS, TYPE)
        if GATED:
            zeros2, scales2 = _factors(factors + outputs, size, ASM, BITS, TYPE)
    for start in range(0, share, UNIT):
        tile = tl.load(w)
        if GATED:
            tile2 = tl.load(w + second)
        for plane in tl.static_range(PLANES):
            if GROUP > 0 and plane * UNIT % GROUP == 0:
                group = (first + start) * PLANES // GROUP + plane * UNIT // GROUP
                group = factors + group * all_outputs
                zeros, scales = _factors(group, size, ASM, BITS, TYPE)
                if GATED:
                    zeros2, scales2 = _factors(group + outputs, size, ASM, BITS, TYPE)
            columns = tl.trans(tl.load(x + plane * UNIT, mask=in_m, other=0.0))
            acc = tl.dot(_plane(tile, zeros, scales, plane, BITS, TYPE, ASM), columns, acc)
            if GATED:
                acc2 = tl.dot(_plane(tile2, zeros2, scales2, plane, BITS, TYPE, ASM), columns, acc2)
        w += UNIT
        x += PLANES * UNIT
    kind = out_ptr.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            acc2 += tl.load(bias_ptr + outputs + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        acc = _gated(acc, acc2, kind)
    if PARTS:
        out_ptr += tl.program_id(1).to(tl.int64) * rows * outputs
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, tl.trans(acc).to(kind), mask=in_m & in_n[None, :])


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
        size = inputs // GROUP * outputs
        zeros, scales = _factors(factors_ptr + group * outputs + safe_n, size, False, BITS, TYPE)
        tile = _plane(words, zeros, scales, plane, BITS, TYPE, False)
        tl.store(out_ptr + rows * inputs + start + plane * UNIT + k[None, :], tile, mask=in_n)


@triton.jit
def _finished(acc, own, scales_ptr, bias_ptr, n, BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Scales sums, and rounds them as the library does, before the bias."""
    if not BLOCKS:
        acc = acc * tl.load(scales_ptr + n)[None, :] * own
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
    BLOCKS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for 8-bit floats, in one pass over the inputs.

    Without BLOCKS: a scale for each row of x and each output. With BLOCKS, each sum over 128 inputs
    is scaled and added: scales of x are [inputs / 128, rows], of W [outputs / 128, inputs / 128].
    With GATED, silu of the first half of W's outputs is multiplied by the second half.

    Args:
        UNROLL: Number of blocks of an iteration, 1 or 4; with 4, scales have the time of four blocks
            to arrive. Only with BLOCKS, without GATED.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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
    own = 1.0
    if not BLOCKS:
        own = tl.load(x_scales_ptr + m, mask=in_m, other=0.0)[:, None]
    acc = _finished(acc, own, scales_ptr, bias_ptr, safe_n, BLOCKS, HAS_BIAS)
    if GATED:
        acc2 = _finished(acc2, own, scales_ptr, bias_ptr, safe_n + outputs, BLOCKS, HAS_BIAS)
        acc = _gated(acc, acc2, kind)
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, acc.to(kind), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def quantize_rows(
    x_ptr, out_ptr, scales_ptr, size, inputs, rows,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows of x as 8-bit floats, a scale for `size` columns of a row; program (i, j) has PARTS
    such parts of row i, from part PARTS * j on, and the scale of part p is at [p, i].
    """
    row = tl.program_id(0)
    parts = tl.program_id(1) * PARTS + tl.arange(0, PARTS)
    k = tl.arange(0, BLOCK)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    is_part = parts < inputs // size
    columns = row.to(tl.int64) * inputs + (parts * size)[:, None] + k[None, :]
    mask = is_part[:, None] & (k < size)[None, :]
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
    tl.store(out_ptr + columns, (x / scale[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + parts * rows + row, scale, mask=is_part)
