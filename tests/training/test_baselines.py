"""The byte n-gram baseline against the recursion written out for one byte at a time."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from training.baselines import ByteNgram, xz_bits_per_byte


def direct_bits_per_byte(train: bytes, text: bytes, order: int) -> float:
    follow: dict[bytes, Counter[int]] = defaultdict(Counter)
    for size in range(order + 1):
        for i in range(size, len(train)):
            follow[train[i - size : i]][train[i]] += 1
    bits = 0.0
    for i, byte in enumerate(text):
        p = 1 / 256
        for size in range(min(i, order) + 1):
            counts = follow.get(text[i - size : i])
            if counts:
                total, different = counts.total(), len(counts)
                p = (counts[byte] + different * p) / (total + different)
        bits -= math.log2(p)
    return bits / len(text)


@pytest.mark.parametrize("order", [0, 2, 7])
def test_ngram_equals_the_recursion(order: int) -> None:
    generator = np.random.default_rng(order)
    train = bytes(generator.integers(0, 4, 600, dtype=np.uint8))
    text = bytes(generator.integers(0, 5, 100, dtype=np.uint8))
    got = ByteNgram(train, order).bits_per_byte(text)
    assert got == pytest.approx(direct_bits_per_byte(train, text, order), rel=1e-9)


def test_repetition_is_cheap_for_both() -> None:
    text = b"the same sentence again and again. " * 100
    assert xz_bits_per_byte(text) < 0.5
    assert ByteNgram(text, 6).bits_per_byte(text) < 0.2
