"""Gumbel noise as a function of (seed, position, token): no generator state, the same on every
device and in every batch.

The integers, for reimplementation (all arithmetic unsigned and wrapping, shifts logical)::

    mix64(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    key        = mix64(mix64(seed + STREAM) + position * 0x9E3779B97F4A7C15)       # uint64, once per row
    k0, k1     = key & 0xFFFFFFFF, key >> 32
    x          = token ^ k0                                                         # uint32, once per token
    x ^= x >> 17;  x *= 0xED5AD4BB;  x ^= x >> 11;  x *= 0xAC4C1B51;  x ^= k1
    x ^= x >> 15;  x *= 0x31848BAB;  x ^= x >> 14                                   # h32
    w          = min((float32(h32) + 0.5) * 2^-32, 1 - 2^-24)                       # float32, round to nearest
    g          = -log(-log1p(-w))                                                   # float64 here, rounded to float32

STREAM is `GUMBEL_STREAM` for g and `COIN_STREAM` for the coins of lossy acceptance. mix64 is
SplitMix64's finalizer (Steele, Lea, Flood 2014), the token's mixer is Wellons' triple32 with the
row's key at its head and in its middle. For a fixed row it is a bijection, so two tokens never
share h32. A float32 kernel may differ in g by 2 ulp of max(1, |g|).
"""  # noqa: E501

import torch

GUMBEL_STREAM = 0x9E3779B97F4A7C15
COIN_STREAM = 0xD1B54A32D192ED03

_TOP_W = 1.0 - 2.0**-24


def _signed(value: int, bits: int) -> int:
    value &= 2**bits - 1
    return value - 2**bits if value >= 2 ** (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX_B = _signed(0x94D049BB133111EB, 64)
_TRIPLE_A = _signed(0xED5AD4BB, 32)
_TRIPLE_B = _signed(0xAC4C1B51, 32)
_TRIPLE_C = _signed(0x31848BAB, 32)


def _xorshift_(x: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    # torch shifts signed integers arithmetically; the mask makes the shift logical.
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (bits - shift)) - 1))


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = _xorshift_(z.clone(), 30, 64).mul_(_MIX_A)
    return _xorshift_(_xorshift_(z, 27, 64).mul_(_MIX_B), 31, 64)


def row_keys(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int = GUMBEL_STREAM
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the two 32-bit words that key a row's noise.

    Args:
        seeds: int64 [R], the 64 bits of each seed.
        positions: int64 [R], the index of the token being chosen.
        stream: Number of the noise stream; streams are independent.

    Returns:
        int32 [R], int32 [R]: k0 and k1 of the module's recipe.
    """
    key = _mix64(_mix64(seeds + _signed(stream, 64)) + positions * _GOLDEN)
    # In int32's range, so that the cast is exact.
    low = ((key & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
    return low.to(torch.int32), (key >> 32).to(torch.int32)


def hash_tokens(k0: torch.Tensor, k1: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Computes h32 of the module's recipe, as the int32 with the same bits.

    The arguments are int32 and broadcast.
    """
    x = torch.bitwise_xor(tokens, k0)
    _xorshift_(x, 17, 32).mul_(_TRIPLE_A)
    _xorshift_(x, 11, 32).mul_(_TRIPLE_B).bitwise_xor_(k1)
    _xorshift_(x, 15, 32).mul_(_TRIPLE_C)
    return _xorshift_(x, 14, 32)


def _uniform(h32: torch.Tensor) -> torch.Tensor:
    unsigned = (h32.to(torch.int64) & 0xFFFFFFFF).to(torch.float32)
    return ((unsigned + 0.5) * 2.0**-32).clamp_max_(_TOP_W)


def gumbel_of_hash(h32: torch.Tensor) -> torch.Tensor:
    """Computes g of the module's recipe, float32. It decreases as h32, read as unsigned, grows."""
    w = _uniform(h32).to(torch.float64)
    return w.neg_().log1p_().neg_().log_().neg_().to(torch.float32)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Computes standard Gumbel noise.

    Args:
        seeds: int64 [R].
        positions: int64 [R].
        tokens: int64 [C] or [R, C], token ids of the target's vocabulary.

    Returns:
        float32 [R, C].
    """
    k0, k1 = row_keys(seeds, positions)
    return gumbel_of_hash(hash_tokens(k0[:, None], k1[:, None], tokens.to(torch.int32)))


def coins(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Computes a uniform number in (0, 1) per row, float32 [R], independent of the Gumbel noise."""
    k0, k1 = row_keys(seeds, positions, COIN_STREAM)
    return _uniform(hash_tokens(k0, k1, torch.zeros_like(k0)))
