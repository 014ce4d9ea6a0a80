"""The host's record of one sequence in a captured decode step.

A record has a header, then R tokens and R parents. It may refer to state on the device: the
sequence continues where the device has it (`committed` is -1), or its tree is one that a draft on
the same device has written (`tree`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from foredraft.record_layout import Layout
from foredraft.sampling.columns import SAMPLING

PageUpdate = tuple[int, int, Sequence[int]]  # part of a page table: slot, first entry, pages
# Read by steps that adjust logits; see `adjust`.
ADJUSTMENT = Layout(
    ("adjusted", np.int32),  # bits: adjustments that read the slot's tables
    ("first_end", np.int32),  # index of the first token that may be an end
    ("repetition", np.float32),
    ("frequency", np.float32),
    ("presence", np.float32),
)
STEP = Layout(
    ("slot", np.int32),
    ("committed", np.int32),  # keys before the root, or -1: where the step before left the slot
    ("num_rows", np.int32),
    ("tree", np.int32),  # row of the draft's trees, or -1: the tree is in the record
    ("sampling", SAMPLING),
    ("forced", np.int32),  # tokens to pretend that were accepted, for benchmarks; 0 for none
    ("mask", np.int32),  # 1 + the first of the sequence's masks, 0 for none
    ("adjustment", ADJUSTMENT),
    ("entry", np.int32),  # entry of the slot's page table to set before the step reads it
    ("new_page", np.int32),  # 1 + the entry's new page, 0 for no change
    # Read by steps that read shared keys only once; see `shared_keys`.
    ("shared_keys", np.int32),  # first keys of the sequence that its block reads; 0 for none
    ("member", np.int32),  # a sequence of a block; those of each block side by side
    ("block_first", np.int32),  # where a block's sequences begin
    ("block_size", np.int32),  # number of its sequences; 0 for no block
)


def record(max_rows: int) -> np.dtype[Any]:
    """Returns the type of a whole record, with `tokens` and `parents` [max_rows]."""
    return STEP.whole(tokens=max_rows, parents=max_rows)
