"""Draft steps that stay on the device: memory of their tokens and trees."""

from dataclasses import dataclass

import torch

from draft_service.steps.records import STEP, DraftShape
from foredraft.trees.draft_tree import NO_PARENT


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Device memory that another process writes committed tokens to and reads trees from.

    The last row of each array belongs to no sequence.

    Attributes:
        accepted: int32 [n + 1, 1 + R], number of tokens, then the tokens; the rest is undefined.
        trees: int32 [n + 1, 2, N], tokens, then parents.
        first_hidden_row: Index of the hidden state of row 0's first token; row r's first one lies
            r * R further.
        drafted: int32 [1], number of the newest step whose trees are there.
    """

    accepted: torch.Tensor
    trees: torch.Tensor
    first_hidden_row: int
    drafted: torch.Tensor

    @classmethod
    def nowhere(cls, shape: DraftShape, device: torch.device) -> "HandedOn":
        """Creates the object for steps that all come from the host."""
        accepted = torch.zeros(1, 1 + shape.num_rows, dtype=torch.int32, device=device)
        trees = torch.zeros(1, 2, shape.num_nodes, dtype=torch.int32, device=device)
        return cls(accepted, trees, 0, torch.zeros(1, dtype=torch.int32, device=device))

    @property
    def spare_row(self) -> int:
        """Index of the row that belongs to no sequence."""
        return len(self.accepted) - 1


def hand_on_trees(records: torch.Tensor, results: torch.Tensor, trees: torch.Tensor) -> None:
    """Copies trees into the rows that the records name.

    Args:
        results: int32 [B, 2, N], see `StaticBeams.nodes`.
        trees: See HandedOn, changed.
    """
    tokens, parents = results[:, 0], results[:, 1]
    parents = parents.masked_fill(tokens < 0, NO_PARENT)
    trees.index_copy_(0, records[:, STEP["row"]].long(), torch.stack((tokens, parents), 1))
