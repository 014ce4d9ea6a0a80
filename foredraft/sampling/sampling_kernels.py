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
    """Computes k0 and k1 of the recipe, uint32; seed and position are int64."""
    key = _mix64(seed.to(tl.uint64) + _STREAM)
    key = _mix64(key + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def _log1p(r):
    """Computes log(1 + r) for r in [-0.5, 0.42], to about one ulp.

    With s = r / (2 + r) it is 2 atanh(s) = r - r s + 2 s^3 (1/3 + s^2/5 + ...). Its leading term is
    exact, so that rounding touches the small rest alone.
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
    """Computes the logarithm of positive normal float32 numbers, to about one ulp."""
    bits = x.to(tl.int32, bitcast=True)
    # The exponent is taken from x / sqrt(1/2), so that the rest lies in [sqrt(1/2), sqrt(2)).
    exponent = (bits - 0x3F3504F3) >> 23
    rest = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    power = exponent.to(tl.float32)
    # log(2) in two parts; the first times any exponent is exact.
    return power * 0.693145751953125 + (power * 1.4286068203094172e-06 + _log1p(rest))


@triton.jit
def uniform(k0, k1, tokens):
    """Computes w of the recipe; tokens are int32."""
    x = tokens.to(tl.uint32) ^ k0
    x ^= x >> 17
    x *= 0xED5AD4BB
    x ^= x >> 11
    x *= 0xAC4C1B51
    x ^= k1
    x ^= x >> 15
    x *= 0x31848BAB
    x ^= x >> 14
    return tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)


@triton.jit
def gumbel_of(w):
    is_small = w < 0.5
    near = -_log1p(-tl.where(is_small, w, 0.0))
    far = -_log(tl.where(is_small, 0.5, 1.0 - w))  # 1 - w is exact here
    return -_log(tl.where(is_small, near, far))


@triton.jit
def _scores(logits, base, temperature, noise, is_sampled):
    base = tl.where(base == float("-inf"), 0.0, base)
    return tl.where(is_sampled, tl.div_rn(logits - base, temperature) + noise, logits)


@triton.jit
def _tidy(x):
    """Replaces NaN and plus infinity, float32."""
    x = x.to(tl.float32)
    return tl.minimum(tl.where(x != x, float("-inf"), x), _LARGEST)


# Parts of few tokens lie together at places that are aligned or not by the number of rows.
@triton.jit(do_not_specialize=["part_logit", "part_noise", "part_token"])
def choose_parts(
    logits_ptr, temperatures, seeds, positions, part_logit, part_noise, part_token,
    vocab, row_stride,
    BLOCK: tl.constexpr, TILES: tl.constexpr, NUM_PARTS: tl.constexpr, NO_TOKEN: tl.constexpr,
):  # fmt: skip
    """Finds the best token of one part of one row, its logit and its noise.

    Gives NO_TOKEN, which is negative, where a logit is broken.

    g is worked out for the tiles alone in which some token can beat the best one so far: g > d
    needs w < exp(-d), since -log1p(-w) >= w.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    is_sampled = temperature > 0
    k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
    divisor = tl.where(is_sampled, temperature, 1.0)
    to_exponent = 1.4426950408889634 / divisor
    lanes = tl.arange(0, BLOCK)
    first = part * TILES * BLOCK
    logits_ptr += row * row_stride
    best_logit = tl.full([], float("-inf"), tl.float32)
    best_noise = tl.full([], 0.0, tl.float32)
    best_token = first
    broken = tl.zeros([BLOCK], tl.int32)
    ahead = tl.load(logits_ptr + first + lanes, mask=first + lanes < vocab, other=float("-inf"))
    for tile in range(TILES):
        tokens = first + tile * BLOCK + lanes
        x = ahead.to(tl.float32)
        broken |= ((x != x) | (x > _LARGEST)).to(tl.int32)
        x = _tidy(x)
        following = tokens + BLOCK
        is_there = (following < vocab) & (tile + 1 < TILES)
        ahead = tl.load(logits_ptr + following, mask=is_there, other=float("-inf"))
        if is_sampled:
            w = uniform(k0, k1, tokens)
            bound = tl.exp2((x - best_logit) * to_exponent - best_noise * 1.4426950408889634)
            # With a margin for the rounding of both sides. The bound is infinite before the first
            # token.
            can_win = w < bound * 1.001
            if tl.max(can_win.to(tl.int32), 0) > 0:
                noise = gumbel_of(w)
                base = tl.maximum(best_logit, tl.max(x, 0))
                scores = _scores(x, base, divisor, noise, is_sampled)
                top = tl.max(scores, 0)
                if top > _scores(best_logit, base, divisor, best_noise, is_sampled):
                    token = tl.min(tl.where(scores == top, tokens, 0x7FFFFFFF), 0)
                    is_it = tokens == token
                    best_token = token
                    best_logit = tl.max(tl.where(is_it, x, float("-inf")), 0)
                    best_noise = tl.max(tl.where(is_it, noise, float("-inf")), 0)
        else:
            top = tl.max(x, 0)
            if top > best_logit:
                best_logit = top
                best_token = tl.min(tl.where(x == top, tokens, 0x7FFFFFFF), 0)
    at = row * NUM_PARTS + part
    tl.store(part_logit + at, best_logit)
    tl.store(part_noise + at, best_noise)
    tl.store(part_token + at, tl.where(tl.max(broken, 0) > 0, NO_TOKEN, best_token))


@triton.jit(do_not_specialize=["part_logit", "part_noise", "part_token"])
def choose_best(
    temperatures, part_logit, part_noise, part_token, chosen,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Selects the best of a row's parts, all scored against the largest of their logits.

    Gives no token where one part has none.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK)
    is_part = parts < NUM_PARTS
    at = row * NUM_PARTS + parts
    temperature = tl.load(temperatures + row)
    is_sampled = temperature > 0
    logit = tl.load(part_logit + at, mask=is_part, other=float("-inf"))
    noise = tl.load(part_noise + at, mask=is_part, other=0.0)
    token = tl.load(part_token + at, mask=is_part, other=0x7FFFFFFF)
    base = tl.max(logit, 0)
    scores = _scores(logit, base, tl.where(is_sampled, temperature, 1.0), noise, is_sampled)
    top = tl.min(tl.where(scores == tl.max(scores, 0), token, 0x7FFFFFFF), 0)
    least = tl.min(token, 0)
    tl.store(chosen + row, tl.where(least < 0, least, top).to(tl.int64))


@triton.jit
def gumbel_rows(
    seeds, positions, tokens, out, num_tokens, token_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes g for rows of tokens."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = columns < num_tokens
    k0, k1 = row_key(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.load(tokens + row * token_stride + columns, mask=is_token, other=0).to(tl.int32)
    tl.store(out + row * num_tokens + columns, gumbel_of(uniform(k0, k1, ids)), mask=is_token)
