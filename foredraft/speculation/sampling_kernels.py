"""The sampling rule in Triton: `noise`'s recipe in float32, and one pass over rows of logits."""

# mypy: ignore-errors

import triton
import triton.language as tl

_STREAM = tl.constexpr(0x9E3779B97F4A7C15)  # noise.GUMBEL_STREAM
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _mix64(z):
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def row_key(seed, position):
    """k0 and k1 of the recipe, uint32; seed and position are int64."""
    key = _mix64(seed.to(tl.uint64) + _STREAM)
    key = _mix64(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _log1p(r):
    """log(1 + r) for r in [-0.5, 0.42], to about one ulp.

    With s = r / (2 + r) it is 2 atanh(s) = r - r s + 2 s^3 (1/3 + s^2/5 + ...). Its leading term is exact, so that
    rounding touches the small rest alone.
    """
    s = tl.div_rn(r, 2.0 + r)
    q = s * s
    series = 1.0 / 17
    series = series * q + 1.0 / 15
    series = series * q + 1.0 / 13
    series = series * q + 1.0 / 11
    series = series * q + 1.0 / 9
    series = series * q + 1.0 / 7
    series = series * q + 1.0 / 5
    series = series * q + 1.0 / 3
    return r + (2.0 * s * q * series - r * s)


@triton.jit
def _log(x):
    """Logarithm of positive normal float32 numbers, to about one ulp."""
    bits = x.to(tl.int32, bitcast=True)
    # The exponent is that of x / sqrt(1/2), so that what remains lies in [sqrt(1/2), sqrt(2)).
    exponent = (bits - 0x3F3504F3) >> 23
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    power = exponent.to(tl.float32)
    # log(2) in two parts, of which the first times any exponent is exact.
    return power * 0.693145751953125 + (power * 1.4286068203094172e-06 + _log1p(rest))


@triton.jit
def gumbel(k0, k1, tokens):
    """g of the recipe, float32; tokens are int32."""
    x = tokens.to(tl.uint32) ^ k0
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= k1
    x ^= x >> 15
    x *= 0x31848BAB
    x ^= x >> 14
    w = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    is_small = w < 0.5
    near = -_log1p(-tl.where(is_small, w, 0.0))
    far = -_log(tl.where(is_small, 0.5, 1.0 - w))  # 1 - w is exact here
    return -_log(tl.where(is_small, near, far))


@triton.jit
def _scores(logits, base, temperature, noise, is_sampled):
    base = tl.where(base == float("-inf"), 0.0, base)
    return tl.where(is_sampled, tl.div_rn(logits - base, temperature) + noise, logits)


@triton.jit
def choose_parts(
    logits_ptr, temperatures, seeds, positions, part_max, part_logit, part_noise, part_token,
    vocab, row_stride,
    BLOCK: tl.constexpr, TILES: tl.constexpr, NUM_PARTS: tl.constexpr,
):  # fmt: skip
    """The best token of one part of one row, its logit and its noise, and the part's largest logit.

    Scores are relative to the largest logit seen so far, so that they keep their digits near the top.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_sampled = temperature > 0
    k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
    divisor = tl.where(is_sampled, temperature, 1.0)
    lanes = tl.arange(0, BLOCK)
    base = float("-inf")
    best_logit = tl.full([BLOCK], float("-inf"), tl.float32)
    best_noise = tl.zeros([BLOCK], tl.float32)
    best_token = part * TILES * BLOCK + lanes
    for tile in range(TILES):
        tokens = (part * TILES + tile) * BLOCK + lanes
        x = tl.load(
            logits_ptr + row * row_stride + tokens, mask=tokens < vocab, other=float("-inf")
        ).to(tl.float32)
        x = tl.minimum(tl.where(x != x, float("-inf"), x), _LARGEST)
        noise = tl.zeros([BLOCK], tl.float32)
        if is_sampled:
            base = tl.maximum(base, tl.max(x, 0))
            noise = gumbel(k0, k1, tokens)
        is_better = _scores(x, base, divisor, noise, is_sampled) > _scores(
            best_logit, base, divisor, best_noise, is_sampled
        )
        best_logit = tl.where(is_better, x, best_logit)
        best_noise = tl.where(is_better, noise, best_noise)
        best_token = tl.where(is_better, tokens, best_token)
    scores = _scores(best_logit, base, divisor, best_noise, is_sampled)
    is_top = scores == tl.max(scores, 0)
    token = tl.min(tl.where(is_top, best_token, 0x7FFFFFFF), 0)
    is_it = best_token == token
    at = row * NUM_PARTS + part
    tl.store(part_max + at, base)
    tl.store(part_logit + at, tl.max(tl.where(is_it, best_logit, float("-inf")), 0))
    tl.store(part_noise + at, tl.max(tl.where(is_it, best_noise, float("-inf")), 0))
    tl.store(part_token + at, token)


@triton.jit
def choose_best(
    temperatures, part_max, part_logit, part_noise, part_token, chosen,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of a row's parts, all scored against the row's largest logit."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    is_part = parts < NUM_PARTS
    at = row * NUM_PARTS + parts
    temperature = tl.load(temperatures + row)
    is_sampled = temperature > 0
    logit = tl.load(part_logit + at, mask=is_part, other=float("-inf"))
    noise = tl.load(part_noise + at, mask=is_part, other=0.0)
    token = tl.load(part_token + at, mask=is_part, other=0x7FFFFFFF)
    base = tl.max(tl.load(part_max + at, mask=is_part, other=float("-inf")), 0)
    scores = _scores(logit, base, tl.where(is_sampled, temperature, 1.0), noise, is_sampled)
    top = tl.min(tl.where(scores == tl.max(scores, 0), token, 0x7FFFFFFF), 0)
    tl.store(chosen + row, top.to(tl.int64))


@triton.jit
def gumbel_rows(
    seeds, positions, tokens, out, num_tokens, token_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """g for rows of tokens."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.load(tokens + row * token_stride + columns, mask=is_token, other=0).to(tl.int32)
    tl.store(out + row * num_tokens + columns, gumbel(k0, k1, ids), mask=is_token)
