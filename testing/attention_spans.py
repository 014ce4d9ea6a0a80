"""Random spans of every kind, and a loop that computes attention over them as reference for
backends.
"""

import numpy as np
import torch

from foredraft.attention.base import Batch, SequenceSpan

SCALE = 0.31


def brute_force(span, queries, keys, values, window):
    """Computes attention row by row, key by key. keys, values: [num_kv_heads, num_keys,
    head_dim]; queries: [n, heads, head_dim].
    """
    out = torch.zeros_like(queries)
    group = queries.shape[1] // keys.shape[0]
    for row in range(span.num_rows):
        seen = []
        for key in range(span.num_keys):
            tail = key - span.prefix_len
            position = key
            if tail < 0:
                visible = key >= span.prefix_start
            elif span.tail_mask is None:
                visible = tail <= row
            else:
                visible = bool(span.tail_mask[row, tail])
            if tail >= 0 and span.tail_positions is not None:
                position = int(span.tail_positions[tail])
            if window is not None and position <= int(span.positions[row]) - window:
                visible = False
            if visible:
                seen.append(key)
        own = queries[row].view(keys.shape[0], group, -1)
        weights = torch.softmax(own @ keys[:, seen].transpose(1, 2) * SCALE, 2)
        out[row] = (weights @ values[:, seen]).flatten(0, 1)
    return out.flatten(1)


def random_span(rng, first_row, free_pages, page_size, *, contiguous, max_rows=9, max_prefix=20):
    """Returns a causal chunk, a tree, or a draft's scratch rows behind a hole."""
    kind = rng.choice(["chunk", "row", "tree", "scratch"])
    prefix_len = int(rng.integers(0, max_prefix))
    prefix_start = int(rng.integers(0, prefix_len + 1)) if rng.random() < 0.3 else 0
    num_rows = 1 if kind == "row" else int(rng.integers(1, max_rows))
    write_index, mask, tail_positions = prefix_len, None, None
    positions = np.arange(prefix_len, prefix_len + num_rows)
    if kind in ("tree", "scratch"):
        hole = int(rng.integers(0, 7)) if kind == "scratch" else 0
        write_index = prefix_len + hole
        mask = torch.zeros(num_rows, hole + num_rows, dtype=torch.bool)
        depth = np.zeros(num_rows, dtype=np.int64)
        for row in range(num_rows):
            parent = int(rng.integers(-1, row)) if row else -1
            if parent >= 0:
                mask[row] = mask[parent]
                depth[row] = depth[parent] + 1
            mask[row, hole + row] = True
            if hole:
                mask[row, int(rng.integers(0, hole))] = True
        positions = prefix_len + depth
        tail_positions = np.concatenate([prefix_len + rng.integers(0, 3, hole), positions])
    num_pages = -(-(write_index + num_rows) // page_size)
    pages = [free_pages.pop() for _ in range(num_pages)]
    if contiguous:
        pages.sort()
    return SequenceSpan(
        first_row=first_row,
        positions=positions,
        pages=np.array(pages),
        prefix_start=prefix_start,
        prefix_len=prefix_len,
        write_index=write_index,
        tail_mask=mask,
        tail_positions=tail_positions,
    )


def slots_of(span, page_size, first, end):
    keys = np.arange(first, end)
    return torch.from_numpy(span.pages[keys // page_size] * page_size + keys % page_size)


def batch_of(spans, page_size):
    """Returns the batch whose rows write to the ends of their spans."""
    num_rows = sum(span.num_rows for span in spans)
    slots = [slots_of(span, page_size, span.write_index, span.num_keys) for span in spans]
    return Batch(
        tokens=torch.zeros(num_rows, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate([span.positions for span in spans])),
        slots=torch.cat(slots),
        spans=spans,
    )
