"""The records of a draft step of fixed shape: what the host tells the device of each sequence.

A record is a row of int32: `HEADER` numbers, R tokens, and the places of their hidden states. What the host does not know of
a sequence it gives as -1, see `draft_plan.fill`.
"""

from dataclasses import dataclass

# Columns of the header.
(
    SLOT,
    START,
    NUM_ROWS,
    VALID_FROM,
    TEMPERATURE,
    TOP_P,
    MIN_P,
    TOP_K,
    SEED_LOW,
    SEED_HIGH,
    ROW,
) = range(11)
HEADER = 12  # whole 16 bytes
SAMPLING = slice(TEMPERATURE, SEED_HIGH + 1)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a step.

    Attributes:
        num_steps, topk, num_nodes: Of the tree.
        num_rows: Committed tokens of a sequence at most, R.
        max_slots: Sequences that may be known at a time.
        max_pages: Of a page table.
        vocab: Columns of the logits.
        feature_size: Of the features that a head hands on; 0 for a model that reads tokens alone.
        is_windowed: Whether a layer sees a window of positions.
        shift: How far a token's position lies behind its key index.
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
        """Drafted tokens of a sequence that need KV."""
        return max(1, (self.num_steps - 1) * self.topk)

    def scratch_pages(self, page_size: int) -> int:
        """Pages that hold them."""
        return -(-self.scratch_rows // page_size)
