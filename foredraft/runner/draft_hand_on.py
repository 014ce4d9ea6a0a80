"""Draft steps that stay on the device: records whose tokens the host does not know, and trees that it never sees."""

from dataclasses import dataclass

import torch

from foredraft.runner.draft_batches import HEADER, NUM_ROWS, POSITION, ROW, SLOT, START, DraftShape
from foredraft.speculation.static_beams import NO_NODE


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


def resolve(
    shape: DraftShape,
    records: torch.Tensor,
    num_keys: torch.Tensor,
    handed_on: HandedOn,
    max_keys: int,
) -> None:
    """Fills in what the host did not know: the start where it is -1; where the number of rows is -1, that, the tokens and
    the places of their hidden states. In all records: the position after them.

    Args:
        records: int32 [B, HEADER + 2 * R], changed.
        num_keys: int32 [slots + 1], of each slot, changed to what there will be after the records' tokens.
        max_keys: Of a sequence; tokens beyond are left out.
    """
    rows = shape.num_rows
    slot, row, start = records[:, SLOT], records[:, ROW], records[:, START]
    is_handed_on = records[:, NUM_ROWS] < 0
    accepted = handed_on.accepted.index_select(0, row)
    start = torch.where(start < 0, num_keys.index_select(0, slot), start)
    count = torch.where(is_handed_on, accepted[:, 0].clamp(0, rows), records[:, NUM_ROWS])
    count = torch.minimum(count, (max_keys - start).clamp_min_(0))
    index = torch.arange(rows, dtype=torch.int32, device=records.device)
    tokens, places = records[:, HEADER : HEADER + rows], records[:, HEADER + rows :]
    taken = torch.where(index < count[:, None], accepted[:, 1:], 0)
    tokens.copy_(torch.where(is_handed_on[:, None], taken, tokens))
    own = handed_on.first_place + row[:, None] * rows + index
    places.copy_(torch.where(is_handed_on[:, None], own, places))
    records[:, START].copy_(start)
    records[:, NUM_ROWS].copy_(count)
    records[:, POSITION].copy_(start + count + shape.shift)
    num_keys.index_copy_(0, slot.long(), start + count)


def hand_on_trees(records: torch.Tensor, results: torch.Tensor, trees: torch.Tensor) -> None:
    """Puts trees into the rows that the records name.

    Args:
        results: int32 [B, 2, N], see `StaticBeams.nodes`.
        trees: See HandedOn, changed.
    """
    tokens, parents = results[:, 0], results[:, 1]
    parents = parents.masked_fill(tokens < 0, NO_NODE)
    trees.index_copy_(0, records[:, ROW].long(), torch.stack((tokens, parents), 1))
