"""How attention cuts keys under strict exactness, and what computes the parts.

Tiles have 64 keys. Segments have 128 keys up to key 1,024, and 512 from there on;
`exact_tile_kernels` says how they are added up.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from foredraft.attention.triton_plan import TritonPlan

# Number of keys of a tile, position NEAR, and number of keys of a segment before and after NEAR.
# Short contexts are cut finely, since the time of one segment is the time of a layer there; the
# many sums of a long context would take time themselves. Each of these numbers changes texts.
TILE, NEAR, SMALL, LARGE = 64, 1024, 128, 512


def segment_of(key: int) -> int:
    """Returns the index of the segment that a key is in."""
    return key // SMALL if key < NEAR else NEAR // SMALL + (key - NEAR) // LARGE


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Holds what segments leave for `fold`, for each line: a row under one query head.

    Attributes:
        acc: float32 [lines * num_slots, head_dim], sums of values.
        best, total: float32 [lines * num_slots], largest score and sum of weights.
        num_slots: Number of segments that there is room for.
    """

    acc: torch.Tensor
    best: torch.Tensor
    total: torch.Tensor
    num_slots: int


class SegmentKernel(ABC):
    """Computes the sums of segments in place of `exact_kernels.attend`, with the same bits."""

    @abstractmethod
    def plan(self, plan: TritonPlan, group_size: int, limit: int) -> Any:
        """Prepares a step whose segments are distributed to programs; None if it is not for this
        kernel.

        Args:
            limit: Number of keys up to which a sequence is left to `exact_kernels.attend`.
        """

    @abstractmethod
    def attend(
        self,
        listed: Any,
        plan: TritonPlan,
        queries: torch.Tensor,
        layer: int,
        scale: float,
        sums: PartialSums,
    ) -> None:
        """Computes the sums of all segments; of trees with branches the whole tiles before the tree.

        Args:
            listed: What `plan` has returned.
            scale: Factor of the scores, with log2(e).
            sums: Written.
        """
