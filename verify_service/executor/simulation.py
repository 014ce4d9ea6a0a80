"""Simulated acceptance, for benchmarks with random weights, whose drafts are never right.

The target's forward, the rule, the walk and the moves of KV are the real ones; only what the rule chose is replaced.
"""

import random
from collections.abc import Sequence

from foredraft.trees.draft_tree import DraftTree, children

FILLER = 100  # the token that every simulated step ends with; the next one where it is drafted


class SimulatedAcceptance:
    """Draws once per step how many tokens every sequence gets, so that their mean is `length`.

    Args:
        length: Tokens per verification, the target's own included; at least 1. A tree gives no more than its depth + 1.
        depth: Drafted tokens of a verification at most.

    Attributes:
        acceptance: While it is set, each sequence draws for itself, and every drafted token behind a right one is right so
            often; benchmarks change it while the engine runs.
    """

    def __init__(self, length: float, depth: int) -> None:
        if length < 1:
            raise ValueError(f"an accept length is at least 1, not {length}")
        self._length = length
        self._depth = depth
        self._random = random.Random(0)
        self.acceptance: float | None = None

    def draw(self, num_sequences: int) -> list[int]:
        """Tokens that each sequence of a step gets."""
        if self.acceptance is not None:
            return [1 + self._num_right(self.acceptance) for _ in range(num_sequences)]
        whole = int(self._length)
        return [whole + (self._random.random() < self._length - whole)] * num_sequences

    def forced(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """For every row of every tree the token to take, -1 where it does not matter: along the deepest path."""
        numbers = self.draw(len(trees))
        return [_forced(tree, number) for tree, number in zip(trees, numbers, strict=True)]

    def _num_right(self, acceptance: float) -> int:
        count = 0
        while count < self._depth and self._random.random() < acceptance:
            count += 1
        return count


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
