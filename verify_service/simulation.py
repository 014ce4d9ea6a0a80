"""Simulated acceptance, for benchmarks with random weights, whose drafts are never right.

The target's forward, the rule, the walk and the moves of KV are the real ones; only what the rule chose is replaced.
"""

import random
from collections.abc import Sequence

from foredraft.speculation.draft_tree import DraftTree, children

FILLER = 100  # the token that every simulated step ends with; the next one where it is drafted


class SimulatedAcceptance:
    """Draws once per step how many tokens every sequence gets, so that their mean is `length`.

    Args:
        length: Tokens per verification, the target's own included; at least 1. A tree gives no more than its depth + 1.
    """

    def __init__(self, length: float) -> None:
        if length < 1:
            raise ValueError(f"an accept length is at least 1, not {length}")
        self._length = length
        self._random = random.Random(0)

    def draw(self) -> int:
        """Tokens that every sequence of a step gets."""
        whole = int(self._length)
        return whole + (self._random.random() < self._length - whole)

    def forced(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """For every row of every tree the token to take, -1 where it does not matter: along the deepest path."""
        num_tokens = self.draw()
        return [_forced(tree, num_tokens) for tree in trees]


def _forced(tree: DraftTree, num_tokens: int) -> list[int]:
    below = children(tree)
    depth = [0] * (len(tree) + 1)  # of the deepest node under each row
    deepest = [0] * (len(tree) + 1)  # the child on the way there
    for row in range(len(tree), 0, -1):
        parent = tree.parents[row - 1] + 1
        if depth[row] + 1 >= depth[parent]:  # of equals the first
            depth[parent], deepest[parent] = depth[row] + 1, row
    forced = [-1] * (len(tree) + 1)
    row = 0
    for _ in range(num_tokens - 1):
        child = deepest[row]
        if child == 0:
            break
        forced[row] = tree.tokens[child - 1]
        row = below[row][forced[row]]  # of equal siblings the walk takes the first
    forced[row] = next(
        token for token in range(FILLER, FILLER + len(tree) + 1) if token not in below[row]
    )
    return forced
