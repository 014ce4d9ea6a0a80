"""Seeds of the position-keyed noise, as plain Python integers (torch-free).

What is made of them lives in `noise`.
"""

import secrets

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix64(value: int) -> int:
    """Applies the SplitMix64 finalizer (Steele, Lea, Flood 2014), a bijection of 64 bits."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def derive_seed(seed: int, choice: int) -> int:
    """Derives the 64-bit seed of choice `choice` of a request with several choices."""
    return mix64(mix64(seed + _GOLDEN) + (choice + 1) * _GOLDEN)


def random_seed() -> int:
    """Returns a fresh seed for a request that brings none; below 2^53, which JavaScript keeps."""
    return secrets.randbits(53)


def to_int64(seed: int) -> int:
    """Returns the same 64 bits as a signed integer, for int64 tensors."""
    seed &= _MASK
    return seed - 2**64 if seed >= 2**63 else seed
