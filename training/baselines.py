"""Baselines for language models: xz, and an interpolated byte n-gram model."""

import lzma
import math

import numpy as np

MAX_ORDER = 7  # a context and its next byte fill 64 bits


def xz_bits_per_byte(text: bytes) -> float:
    """Returns the size of the text compressed by `xz -9e`, in bits per byte."""
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


class ByteNgram:
    """A byte model of orders 0 to `order`, interpolated after Witten and Bell.

    p_k(c | h) = (n(h c) + d(h) p_{k-1}(c | h')) / (n(h) + d(h)), where d(h) is the number of
    different bytes that followed h and h' is h without its oldest byte; p_{-1} is uniform. Counts
    lie in sorted arrays, so training sorts and scoring bisects.

    Args:
        text: Training text.
        order: Number of context bytes, at most MAX_ORDER; the text has more.
    """

    def __init__(self, text: bytes, order: int = 6) -> None:
        self.order = order
        self._grams: list[tuple[np.ndarray, np.ndarray]] = []
        self._contexts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        data = np.frombuffer(text, dtype=np.uint8)
        for size in range(order + 1):
            grams, counts = np.unique(_keys(data, size + 1), return_counts=True)
            contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
            totals = np.add.reduceat(counts, first)
            followers = np.diff(np.append(first, len(grams)))
            self._grams.append((grams, counts))
            self._contexts.append((contexts, totals, followers))

    def bits_per_byte(self, text: bytes) -> float:
        """Returns the mean cost of a text's bytes; the first `order` have shorter contexts."""
        data = np.frombuffer(text, dtype=np.uint8)
        probability = np.full(len(data), 1 / 256)
        for size in range(min(self.order, len(data) - 1) + 1):
            keys = _keys(data, size + 1)
            hits = _lookup(self._grams[size][0], self._grams[size][1], keys)
            contexts, totals, followers = self._contexts[size]
            history = keys >> np.uint64(8)
            total = _lookup(contexts, totals, history)
            different = _lookup(contexts, followers, history)
            lower = probability[size:]
            known = total > 0
            mixed = (hits + different * lower) / np.where(known, total + different, 1)
            probability[size:] = np.where(known, mixed, lower)
        return float(-np.log2(probability).mean())


def _keys(data: np.ndarray, size: int) -> np.ndarray:
    keys = np.zeros(len(data) - size + 1, dtype=np.uint64)
    for offset in range(size):
        keys = (keys << np.uint64(8)) | data[offset : len(data) - size + 1 + offset]
    return keys


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def nats_to_bits_per_byte(nats: float, num_bytes: int) -> float:
    """Converts a text's total cost in nats to bits per byte."""
    return nats / math.log(2) / num_bytes
