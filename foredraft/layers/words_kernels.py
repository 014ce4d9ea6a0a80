"""Triton kernels for weights of 4 and 8 bits in int32 words, multiplied as 16-bit floats.

A unit is UNIT words of an output: bits BITS * j of word i are input j * UNIT + i of the unit. So
each plane j of a unit is a product of its own. The inputs are cut into PARTS; each part is summed
up in its order, then the parts in theirs.

Units of 16 outputs lie together, int32 [tiles, units, 16, UNIT], so that they are copied in one
piece; so do their factors, [tiles, groups, 16]. Eight words of a unit at a time lie as many places
later as the output's number says, in a ring, so that rows have no bank conflicts in shared memory.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from foredraft.layers.triton_kernels import silu_times


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
def _factors(ptr, ASM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr):
    """Zero points and scales of outputs [..., n, 1], as `_plane` wants them, from pointers [..., n]."""
    both = tl.expand_dims(tl.load(ptr), -1)
    if BITS == 8:
        zeros, scales = 8388736.0, both  # 2**23 + 128
    elif ASM:
        zeros, scales = ((both >> 16) & 0xFFFF) * 65537, (both & 0xFFFF) * 65537
    else:
        base = 1024.0 if tl.float16 == TYPE else 128.0
        zeros = (both >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        zeros = 8388608.0 - base - zeros
        scales = both.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return zeros, scales


@triton.jit
def _word_offsets(outputs, word, UNIT: tl.constexpr):
    """Offsets of the words of some outputs, less 16 times the number of words of all their tiles."""
    place = (word // 8 + outputs) % (UNIT // 8)
    return word // UNIT * (16 * UNIT) + outputs % 16 * UNIT + place * 8 + word % 8


@triton.jit
def _store(
    acc, bias_ptr, out_ptr, source, first_n, m, rows, outputs,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Stores sums [lines, BLOCK_M]; with GATED the first half of the lines are gates."""
    kind = out_ptr.dtype.element_ty
    if HAS_BIAS:
        acc += tl.load(bias_ptr + source).to(tl.float32)[:, None]
    if GATED:
        halves = tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_M]), (1, 2, 0))
        gate, up = tl.split(halves)
        acc = silu_times(gate, up, kind)
    n = first_n + tl.arange(0, BLOCK_N)
    out = out_ptr + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(out, tl.trans(acc).to(kind), mask=(m < rows)[:, None] & (n < outputs)[None, :])


@triton.jit(do_not_specialize=["rows"])
def multiply_few(
    x_ptr, w_ptr, factors_ptr, bias_ptr, out_ptr, rows, outputs, words,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for few rows: a program's warps have one part each, side by side.

    With GATED, silu of the first half of W's outputs is multiplied by the second half.

    Args:
        factors_ptr: Of 4 bits int32: the scale, and above it -(base + zero point), as 16-bit
            floats; of 8 bits float32 scales.
        words: Words of an output.
        GROUP: Inputs that share factors; 0 for all.
    """
    LINES: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    line = tl.arange(0, LINES)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, UNIT)[None, None, :]
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + line % BLOCK_N
    source = tl.where(n < outputs, n, 0) + line // BLOCK_N * outputs
    share = words // PARTS
    part = tl.arange(0, PARTS)[:, None]
    w = w_ptr + (source // 16).to(tl.int64)[None, :, None] * (16 * words)
    w += _word_offsets(source[None, :, None], (part * share)[:, :, None] + k, UNIT)
    x = x_ptr + m.to(tl.int64)[None, :, None] * (words * PLANES)
    x = x + (part * (share * PLANES))[:, :, None] + k
    in_m = (m < rows)[None, :, None]
    factors = factors_ptr + (source % 16)[None, :] + part * 0
    if GROUP > 0:
        groups = words * PLANES // GROUP
        factors += (source // 16)[None, :] * (groups * 16) + part * (groups // PARTS * 16)
    else:
        factors += (source // 16)[None, :] * 16
    acc = tl.zeros([PARTS, LINES, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if GROUP == 0:
        zeros, scales = _factors(factors, ASM, BITS, TYPE)
    for start in range(0, share, UNIT):
        tile = tl.load(w + start * 16)
        for plane in tl.static_range(PLANES):
            if GROUP > 0 and plane * UNIT % GROUP == 0:
                group = start * PLANES // GROUP + plane * UNIT // GROUP
                zeros, scales = _factors(factors + group * 16, ASM, BITS, TYPE)
            columns = tl.load(x + start * PLANES + plane * UNIT, mask=in_m, other=0.0)
            weights = _plane(tile, zeros, scales, plane, BITS, TYPE, ASM)
            acc = tl.dot(weights, tl.trans(columns, (0, 2, 1)), acc)
    if DEPENDENT:  # before, its programs would take room beside some of these, not all
        tl.extra.cuda.gdc_launch_dependents()
    if PARTS == 1:
        total = tl.reshape(acc, [LINES, BLOCK_M])
    elif PARTS == 2:
        first, second = tl.split(tl.permute(acc, (1, 2, 0)))
        total = first + second
    else:
        pairs = tl.permute(tl.reshape(acc, [2, 2, LINES, BLOCK_M]), (2, 3, 0, 1))
        evens, odds = tl.split(pairs)
        first, third = tl.split(evens)
        second, fourth = tl.split(odds)
        total = first + second + third + fourth
    _store(
        total, bias_ptr, out_ptr, source, first_n, m, rows, outputs,
        HAS_BIAS, GATED, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def multiply_some(
    x_ptr, w_ptr, factors_ptr, bias_ptr, out_ptr, rows, outputs, words,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes the same as `multiply_few` for more rows: a program sums up one part after the
    other, of BLOCK_M rows.
    """
    LINES: tl.constexpr = BLOCK_N * 2 if GATED else BLOCK_N
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    line = tl.arange(0, LINES)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, UNIT)[None, :]
    first_n = tl.program_id(1) * BLOCK_N
    n = first_n + line % BLOCK_N
    source = tl.where(n < outputs, n, 0) + line // BLOCK_N * outputs
    share = words // PARTS
    w = w_ptr + (source // 16).to(tl.int64)[:, None] * (16 * words)
    w += _word_offsets(source[:, None], k, UNIT)
    groups = 1
    if GROUP > 0:
        groups = words * PLANES // GROUP
    factors = factors_ptr + source // 16 * (groups * 16) + source % 16
    x = x_ptr + m.to(tl.int64)[:, None] * (words * PLANES) + k
    in_m = (m < rows)[:, None]
    total = tl.zeros([LINES, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
    if GROUP == 0:
        zeros, scales = _factors(factors, ASM, BITS, TYPE)
    for part in range(PARTS):
        acc = tl.zeros([LINES, BLOCK_M], tl.float32)
        for start in range(part * share, (part + 1) * share, UNIT):
            tile = tl.load(w + start * 16)
            for plane in tl.static_range(PLANES):
                if GROUP > 0 and plane * UNIT % GROUP == 0:
                    group = start * PLANES // GROUP + plane * UNIT // GROUP
                    zeros, scales = _factors(factors + group * 16, ASM, BITS, TYPE)
                columns = tl.load(x + start * PLANES + plane * UNIT, mask=in_m, other=0.0)
                weights = _plane(tile, zeros, scales, plane, BITS, TYPE, ASM)
                acc = tl.dot(weights, tl.trans(columns), acc)
        total += acc
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    _store(
        total, bias_ptr, out_ptr, source, first_n, m, rows, outputs,
        HAS_BIAS, GATED, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit
def dequantize_words(
    w_ptr, factors_ptr, out_ptr, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The matrix as 16-bit floats [outputs, inputs]; program (i, j) has unit j of BLOCK_N outputs."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, UNIT)
    in_n = (n < outputs)[:, None]
    safe_n = tl.where(n < outputs, n, 0)
    PLANES: tl.constexpr = 32 // BITS
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    first_word = tl.program_id(1) * UNIT
    tiles = (safe_n // 16).to(tl.int64)
    words = w_ptr + tiles[:, None] * (inputs // PLANES * 16)
    words = tl.load(words + _word_offsets(safe_n[:, None], first_word + k[None, :], UNIT))
    out = out_ptr + safe_n.to(tl.int64)[:, None] * inputs + first_word * PLANES + k[None, :]
    factors = factors_ptr + tiles * (inputs // GROUP * 16) + safe_n % 16
    for plane in tl.static_range(PLANES):
        group = first_word * PLANES // GROUP + plane * UNIT // GROUP
        zeros, scales = _factors(factors + group * 16, False, BITS, TYPE)
        tile = _plane(words, zeros, scales, plane, BITS, TYPE, False)
        tl.store(out + plane * UNIT, tile, mask=in_n)
