"""Where the heads that a layer's projection computes go."""

from typing import Any, NamedTuple

import torch


class Heads(NamedTuple):
    """Describes the outputs of a projection to queries, keys and values, which are rotated and
    stored; see `fused.rotate_and_store`.

    Attributes:
        num_heads: Number of query heads.
        angles: Cosines and signed sines [rows, 1, head_dim].
        keys, values: [num_kv_heads, slots, head_dim], one layer of the cache.
        slots: int64 [rows], KV slots.
        scales: Divisors of keys and values in a cache of 8-bit floats.
    """

    num_heads: int
    angles: tuple[torch.Tensor, torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def none(cls, x: torch.Tensor) -> "Heads":
        """Returns what kernels take where outputs are no heads; they do not read `x`, of two
        dimensions.
        """
        return cls(0, (x, x), x, x, x)

    @property
    def queries_shape(self) -> tuple[int, ...]:
        """[rows, num_heads, head_dim] of the queries."""
        return self.slots.shape[0], self.num_heads, self.keys.shape[2]

    @property
    def kernel_arguments(self) -> tuple[Any, ...]:
        """The arguments in the kernels' order."""
        (cos, sin), keys = self.angles, self.keys
        inverses = 1 / self.scales[0], 1 / self.scales[1]
        return cos, sin, keys, self.values, self.slots, keys.stride(0), inverses[0], inverses[1]


def constants_of_heads(heads: Heads) -> dict[str, Any]:
    """Returns a kernel's constants."""
    keys, are_there = heads.keys, heads.num_heads > 0
    return {
        "Q_HEADS": heads.num_heads,
        "KV_HEADS": keys.shape[0] if are_there else 0,
        "HEAD_DIM": keys.shape[2] if are_there else 0,
        "LIMIT": torch.finfo(keys.dtype).max if are_there and keys.element_size() == 1 else 0.0,
    }
