"""Draft steps that stay on the device: where their tokens are, and where their trees go."""

from dataclasses import dataclass

import torch

from draft_service.steps.records import ROW, DraftShape
from foredraft.trees.draft_tree import NO_PARENT


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Where another process puts what was committed, and where it finds trees. The last row of each is nobody's.

    Attributes:
        accepted: int32 [n + 1, 1 + R], how many tokens, then these; what is behind them may be anything.
        trees: int32 [n + 1, 2, N], tokens, then parents.
        first_place: Of the hidden states of row 0's tokens; those of row r begin r * R places further.
    """

    accepted: torch.Tensor
    trees: torch.Tensor
    first_place: int

    @classmethod
    def nowhere(cls, shape: DraftShape, device: torch.device) -> "HandedOn":
        """For steps that all come from the host."""
        accepted = torch.zeros(1, 1 + shape.num_rows, dtype=torch.int32, device=device)
        trees = torch.zeros(1, 2, shape.num_nodes, dtype=torch.int32, device=device)
        return cls(accepted, trees, 0)

    @property
    def spare_row(self) -> int:
        """The row that is nobody's."""
        return len(self.accepted) - 1


def hand_on_trees(records: torch.Tensor, results: torch.Tensor, trees: torch.Tensor) -> None:
    """Puts trees into the rows that the records name.

    Args:
        results: int32 [B, 2, N], see `StaticBeams.nodes`.
        trees: See HandedOn, changed.
    """
    tokens, parents = results[:, 0], results[:, 1]
    parents = parents.masked_fill(tokens < 0, NO_PARENT)
    trees.index_copy_(0, records[:, ROW].long(), torch.stack((tokens, parents), 1))
