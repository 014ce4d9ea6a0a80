"""Builds trees for drafters that compute the logits of all depths in one forward."""

from collections.abc import Callable, Sequence

import torch

from draft_service.drafters.beam_drafting import TreeRequest, empty_trees, grouped
from draft_service.drafters.paged_sequences import PagedSequence
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.runner.batch import SequenceRows
from foredraft.trees.draft_tree import EMPTY, DraftTree
from foredraft.trees.tree_building import Ordering

# Called with (indices, depth, tokens, beams): the indices of n requests, a depth from 0 on, the
# newest tokens int64 [n, W] of W paths, and for each path the index of the path that it continues
# (int64 [n, W]; None at depth 0, where W is 1). Returns the logits that follow, [n, W, columns].
NextLogits = Callable[[list[int], int, torch.Tensor, torch.Tensor | None], torch.Tensor]


def draft_trees(
    requests: Sequence[TreeRequest],
    next_logits: NextLogits,
    ordering: Ordering,
    token_map: torch.Tensor | None,
    device: torch.device,
) -> list[DraftTree]:
    """Builds a tree within its limits for each request; a topk of 1 gives chains.

    Args:
        requests: Trees wanted.
        next_logits: Called depth by depth for requests with the same steps and topk, in the same
            order of indices; the tokens before the first depth are the newest committed ones.
        ordering: Order in which children of a node are chosen.
        token_map: int64, target token id of each column of the logits; None where the columns are
            the target's.
        device: Device of the logits.
    """
    trees: list[DraftTree] = [EMPTY] * len(requests)
    for (num_steps, topk), indices in grouped(requests).items():
        sequences = [requests[i].sequence for i in indices]
        nodes = [requests[i].limits.nodes for i in indices]
        tree = empty_trees(sequences, TreeLimits(num_steps, topk, max(nodes)), ordering, device)
        newest = [sequence.last_token or 0 for sequence in sequences]
        previous = torch.tensor(newest, dtype=torch.int64, device=device)[:, None]
        beams: torch.Tensor | None = None
        for depth in range(num_steps):
            logits = next_logits(indices, depth, previous, beams)
            previous, beams = tree.expand(logits.float(), token_map)
        for index, grown in zip(indices, tree.finish(nodes), strict=True):
            trees[index] = grown
    return trees


def rows_behind(
    sequence: PagedSequence,
    tokens: Sequence[int],
    scratch: Sequence[int],
    page_size: int,
    is_causal: bool,
) -> SequenceRows:
    """Returns rows that follow a sequence's keys, and write their own keys to scratch pages.

    Args:
        sequence: Sequence that the rows follow.
        tokens: Input tokens of the rows.
        scratch: Page numbers with room for as many keys as there are rows.
        page_size: Tokens per page.
        is_causal: Whether a row sees no later row; else every row sees all of them.
    """
    num_keys, num_rows = sequence.num_keys, len(tokens)
    num_pages = -(-num_keys // page_size)
    gap = num_pages * page_size - num_keys
    mask = torch.zeros(num_rows, gap + num_rows, dtype=torch.bool)
    mask[:, gap:] = True
    if is_causal:
        mask[:, gap:].tril_()
    positions = range(num_keys, num_keys + num_rows)
    return SequenceRows(
        tokens=tokens,
        positions=positions,
        pages=[*sequence.pages[:num_pages], *scratch],
        prefix_len=num_keys,
        write_index=num_keys + gap,
        prefix_start=sequence.valid_from,
        tail_mask=mask,
        # The keys in between are masked off; any position will do for them.
        tail_positions=[num_keys] * gap + list(positions),
        logits="all",
    )
