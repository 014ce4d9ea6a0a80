"""Triton kernels for weights of 4 and 8 bits in int32 words, multiplied as 16-bit floats.

A unit is UNIT words of an output: bits BITS * j of word i are input j * UNIT + i of the unit. So
each plane j of a unit is a product of its own. The inputs are cut into PARTS; each part is summed
up in its order, then the parts in theirs.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl

from foredraft.layers import words_factors
from foredraft.layers.triton_kernels import silu_times

_BF16_STEP = tl.constexpr(words_factors.STEPS[torch.bfloat16])
_FP16_STEP = tl.constexpr(words_factors.STEPS[torch.float16])
_STEPS = tl.constexpr(int(words_factors.Form.STEPS))
_OFFSETS = tl.constexpr(int(words_factors.Form.OFFSETS))
_OFFSET_STEP = tl.constexpr(words_factors.OFFSET_STEP)


@triton.constexpr_function
def _is_high(plane, form):
    """Whether numbers are taken from bits 4 to 7 of a half-word, else from 0 to 3."""
    return form == words_factors.Form.LARGE_OFFSETS or plane % 2 == 1


@triton.constexpr_function
def _code(plane, is_half, form):
    """Two int32 $1, $2 hold a 4-bit number each; $0 = the weights as 16-bit floats, $3 and $5 are
    the second and the first factor, twice each.
    """
    kind = "f16x2" if is_half else "bf16x2"
    halves = "0x5410" if plane < 4 else "0x7632"
    is_high = _is_high(plane, form)
    shift = 4 * (plane % 4) - 4 * is_high
    move = "shl.b32 t, t, 4;" if shift < 0 else f"shr.b32 t, t, {shift};"
    mask = "0x00f000f0" if is_high else "0x000f000f"
    steps = f"fma.rn.{kind} $0, t, $5, $3;"
    if form == words_factors.Form.STEPS:
        # 2**k times the number: 2**11 and 2**15 in float16, 2**123 and 2**127 in bfloat16.
        if is_half:
            unit = "0x68006800" if is_high else "0x78007800"
        else:
            unit = "0x7d007d00" if is_high else "0x7f007f00"
        steps = f"""
        mov.b32 unit, {unit};
        mov.b32 none, 0x80008000;
        fma.rn.{kind} t, t, unit, $3;
        fma.rn.{kind} $0, t, $5, none;
        """
    return f"""{{
    .reg .b32 t, unit, none;
    prmt.b32 t, $1, $2, {halves};
    {move}
    and.b32 t, t, {mask};
    {steps}
    }}"""


@triton.jit
def _plane(
    words,
    factors,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    ASM: tl.constexpr,
    FORM: tl.constexpr,
):
    """(number - zero) * scale of numbers PLANE of each word, rounded once to TYPE."""
    first, first_low, second = factors
    if ASM:
        if not _is_high(PLANE, FORM):
            first = first_low
        if tl.float16 == TYPE:
            tile = tl.inline_asm_elementwise(
                _code(PLANE, True, FORM), "=r,r,r,r,r,r,r", [words, second, first],
                dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            tile = tl.inline_asm_elementwise(
                _code(PLANE, False, FORM), "=r,r,r,r,r,r,r", [words, second, first],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        # 2**23 + number, made of bits: conversions of integers are slow.
        numbers = ((words >> (BITS * PLANE)) & ((1 << BITS) - 1)) | 0x4B000000
        numbers = numbers.to(tl.float32, bitcast=True)
        if FORM != _STEPS:
            tile = ((numbers - 8388608.0) * first + second).to(TYPE)
        else:
            tile = ((numbers - second) * first).to(TYPE)
    return tile


@triton.jit
def _factors(ptr, ASM: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr, FORM: tl.constexpr):
    """Factors of outputs [..., n, 1], as `_plane` wants them, from pointers [..., n]: the first, the
    first of numbers in the lowest bits, the second.
    """
    both = tl.expand_dims(tl.load(ptr), -1)
    first_low = both
    if BITS == 8:
        first, second = both, 8388736.0  # 2**23 + 128
    elif ASM:
        first, second = (both & 0xFFFF) * 65537, ((both >> 16) & 0xFFFF) * 65537
        first_low = first
        if FORM == _OFFSETS:  # 16 times as large
            first_low = tl.inline_asm_elementwise(
                "{.reg .b32 c, none; mov.b32 c, 0x41804180; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, c, none;}",
                "=r,r", [first], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        first = both.to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        second = (both >> 16).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        if FORM != _STEPS:
            first = first * 2.0**-64 * 2.0 ** (64 - _OFFSET_STEP)
        else:
            step: tl.constexpr = _FP16_STEP if tl.float16 == TYPE else _BF16_STEP
            first, second = first * 2.0**-step, 8388608.0 - second * 2.0**step
    return first, first_low, second


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
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr, FORM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x W^T + bias for few rows: a program's warps have one part each, side by side.

    With GATED, silu of the first half of W's outputs is multiplied by the second half.

    Args:
        factors_ptr: [groups, outputs]: for weights of 4 bits, words of factors, see
            `words_factors`; for weights of 8 bits, scales in float32.
        words: Words of an output.
        GROUP: Inputs that share factors; 0 for all.
        FORM: See `words_factors`.
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
    all_outputs = outputs * 2 if GATED else outputs
    share = words // PARTS
    part = tl.arange(0, PARTS)[:, None]
    w = w_ptr + source.to(tl.int64)[None, :, None] * words + (part * share)[:, :, None] + k
    x = x_ptr + m.to(tl.int64)[None, :, None] * (words * PLANES)
    x = x + (part * (share * PLANES))[:, :, None] + k
    in_m = (m < rows)[None, :, None]
    factors = factors_ptr + source[None, :] + part * 0
    if GROUP > 0:
        factors += part * (share * PLANES // GROUP) * all_outputs
    acc = tl.zeros([PARTS, LINES, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GROUP == 0:
        own = _factors(factors, ASM, BITS, TYPE, FORM)
    for start in range(0, share, UNIT):
        tile = tl.load(w + start)
        for plane in tl.static_range(PLANES):
            if GROUP > 0 and plane * UNIT % GROUP == 0:
                group = start * PLANES // GROUP + plane * UNIT // GROUP
                own = _factors(factors + group * all_outputs, ASM, BITS, TYPE, FORM)
            columns = tl.load(x + start * PLANES + plane * UNIT, mask=in_m, other=0.0)
            weights = _plane(tile, own, plane, BITS, TYPE, ASM, FORM)
            acc = tl.dot(weights, tl.trans(columns, (0, 2, 1)), acc)
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
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr, FORM: tl.constexpr, PARTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Computes the same as `multiply_few` for more rows: a program sums up one part after the
    other, of BLOCK_M rows.

    With PARTED, program (i, j, k) sums up part k alone, into out[k] in float32, without bias and
    gates.
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
    all_outputs = outputs * 2 if GATED else outputs
    share = words // PARTS
    w = w_ptr + source.to(tl.int64)[:, None] * words + k
    x = x_ptr + m.to(tl.int64)[:, None] * (words * PLANES) + k
    in_m = (m < rows)[:, None]
    total = tl.zeros([LINES, BLOCK_M], tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GROUP == 0:
        own = _factors(factors_ptr + source, ASM, BITS, TYPE, FORM)
    first_part = tl.program_id(2)
    if PARTED:
        out_ptr += first_part.to(tl.int64) * rows * outputs
    for part in range(first_part, first_part + (1 if PARTED else PARTS)):
        acc = tl.zeros([LINES, BLOCK_M], tl.float32)
        for start in range(part * share, (part + 1) * share, UNIT):
            tile = tl.load(w + start)
            for plane in tl.static_range(PLANES):
                if GROUP > 0 and plane * UNIT % GROUP == 0:
                    group = start * PLANES // GROUP + plane * UNIT // GROUP
                    factors = factors_ptr + source + group * all_outputs
                    own = _factors(factors, ASM, BITS, TYPE, FORM)
                columns = tl.load(x + start * PLANES + plane * UNIT, mask=in_m, other=0.0)
                weights = _plane(tile, own, plane, BITS, TYPE, ASM, FORM)
                acc = tl.dot(weights, tl.trans(columns), acc)
        total += acc
    _store(
        total, bias_ptr, out_ptr, source, first_n, m, rows, outputs,
        HAS_BIAS, GATED, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit
def add_parts(
    parts_ptr, bias_ptr, out_ptr, outputs,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The sum of PARTS and the bias; program (i, j) has BLOCK outputs of row i."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_n = n < outputs
    at = parts_ptr + row.to(tl.int64) * outputs + n
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(at, mask=in_n, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(at + part * rows.to(tl.int64) * outputs, mask=in_n, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row.to(tl.int64) * outputs + n, total.to(out_ptr.dtype.element_ty), mask=in_n
    )


@triton.jit
def dequantize_words(
    w_ptr, factors_ptr, out_ptr, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The matrix as 16-bit floats [outputs, inputs]; program (i, j) has unit j of BLOCK_N outputs."""
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
        own = _factors(factors_ptr + group * outputs + safe_n, False, BITS, TYPE, FORM)
        tile = _plane(words, own, plane, BITS, TYPE, False, FORM)
        tl.store(out_ptr + rows * inputs + start + plane * UNIT + k[None, :], tile, mask=in_n)
