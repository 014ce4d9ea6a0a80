"""The host's record of one sequence in a draft step of fixed shape.

A record has a header, then R tokens, and the indexes of their hidden states. Values that only the
device knows are -1, see `plan.fill`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from foredraft.record_layout import Layout
from foredraft.sampling.columns import SAMPLING

STEP = Layout(
    ("slot", np.int32),
    ("start", np.int32),  # committed keys before the tokens, or -1
    ("num_rows", np.int32),  # number of tokens, or -1: the verifier hands them on
    ("valid_from", np.int32),  # first key that the draft has
    ("sampling", SAMPLING),
    ("row", np.int32),  # row of the tokens that the verifier hands on
    ("step", np.int32),  # number of a step that may find its trees prepared; 0 for others
)


def record(num_rows: int) -> np.dtype[Any]:
    """Returns the type of a whole record, with `tokens` and `hidden_rows` [num_rows]."""
    return STEP.whole(tokens=num_rows, hidden_rows=num_rows)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a step.

    Attributes:
        num_steps, topk, num_nodes: Levels, children per node and nodes of the tree.
        num_rows: Maximum number of committed tokens of a sequence in a step, R.
        max_slots: Maximum number of sequences.
        max_pages: Maximum number of pages of a page table.
        vocab: Number of columns of the logits.
        feature_size: Width of the features that a head returns; 0 for a model that reads only
            tokens.
        is_windowed: Whether some layer sees only a window of positions.
        shift: Number that is added to a key index to get the token's position.
    """

    num_steps: int
    topk: int
    num_nodes: int
    num_rows: int
    max_slots: int
    max_pages: int
    vocab: int
    feature_size: int
    is_windowed: bool = False
    shift: int = 0

    @property
    def scratch_rows(self) -> int:
        """Number of drafted tokens of a sequence that need KV."""
        return max(1, (self.num_steps - 1) * self.topk)

    def scratch_pages(self, page_size: int) -> int:
        """Returns the number of pages that hold them."""
        return -(-self.scratch_rows // page_size)
