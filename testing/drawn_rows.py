"""Rows of sequences that hypothesis draws, and what a batch says of its rows."""

import numpy as np
from hypothesis import strategies as st

from foredraft.attention.base import Batch
from foredraft.runner.batch import SequenceRows
from foredraft.trees.draft_tree import DraftTree

PAGES_EACH = 4  # of four slots, for each sequence


def drawn_rows(data: st.DataObject) -> list[SequenceRows]:
    """Draws one to four sequences, on pages from 1 on: trees, and chunks with logits of all rows,
    of the last one or of none.
    """
    found: list[SequenceRows] = []
    for number in range(data.draw(st.integers(1, 4))):
        start, num_rows = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 9))
        pages = [1 + PAGES_EACH * number + page for page in range(PAGES_EACH)]
        tokens = data.draw(st.lists(st.integers(0, 99), min_size=num_rows, max_size=num_rows))
        if data.draw(st.booleans()):
            parents = [data.draw(st.integers(-1, node - 1)) for node in range(num_rows - 1)]
            tree = DraftTree(tuple(tokens[1:]), tuple(parents))
            found.append(SequenceRows.tree(pages, start, tokens[0], tree))
        else:
            logits = data.draw(st.sampled_from(("all", "last", "none")))
            found.append(SequenceRows.chunk(pages, start, tokens, logits))
    return found


def seen(batch: Batch) -> dict[int, tuple[object, ...]]:
    """Returns what the batch says of each row, by its index: token, position, where its keys go,
    and which keys it sees at which positions.
    """
    found = {}
    for span in batch.spans:
        for row in range(span.num_rows):
            at = span.first_row + row
            keys = list(range(span.prefix_start, span.prefix_len))
            positions = keys.copy()
            tail = range(span.prefix_len, span.num_keys)
            mask = np.tri(span.num_rows, dtype=bool)[row]
            if span.tail_mask is not None:
                mask = span.tail_mask.numpy()[row]
            own = tail if span.tail_positions is None else span.tail_positions.tolist()
            keys += [key for key, is_seen in zip(tail, mask, strict=True) if is_seen]
            positions += [p for p, is_seen in zip(own, mask, strict=True) if is_seen]
            values = batch.tokens[at], batch.positions[at], batch.slots[at], span.positions[row]
            pages = tuple(span.pages.tolist())
            found[at] = (*map(int, values), pages, tuple(keys), tuple(positions))
    return found
