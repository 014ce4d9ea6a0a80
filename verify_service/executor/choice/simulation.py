"""Simulated acceptance, for benchmarks with random weights, whose drafts are never right.

The target's forward, the rule, the walk and the moves of KV are the real ones; only what the rule
chose is replaced.
"""

import random
from collections.abc import Sequence

from foredraft.trees.draft_tree import DraftTree, children
from verify_service.executor.kernels.steps import pretended_path

FILLER = 100  # the token that every simulated step ends with; the next one where it is drafted


class SimulatedAcceptance:
    """Draws the number of tokens that each sequence gets in a step, with mean `length`.

    Args:
        length: Tokens per verification, the target's own included; at least 1. A tree gives no more
            than its depth + 1.
        depth: Drafted tokens of a verification at most.

    Attributes:
        acceptance: While it is set, every drafted token behind a right one is right so often;
            benchmarks change it while the engine runs.
    """

    def __init__(self, length: float, depth: int) -> None:
        if length < 1:
            raise ValueError(f"an accept length is at least 1, not {length}")
        self._length = length
        self._depth = depth
        self._random = random.Random(0)
        self.acceptance: float | None = None

    def draw(self, num_sequences: int) -> list[int]:
        """Draws a number of tokens for each sequence of a step."""
        if self.acceptance is not None:
            return [1 + self._num_right(self.acceptance) for _ in range(num_sequences)]
        whole = int(self._length)
        part = self._length - whole
        return [whole + (self._random.random() < part) for _ in range(num_sequences)]

    def forced(self, trees: Sequence[DraftTree]) -> list[list[int]]:
        """Returns the token to choose at every row of every tree, along the deepest path. -1 marks
        rows off that path.
        """
        numbers = self.draw(len(trees))
        return [_forced(tree, number) for tree, number in zip(trees, numbers, strict=True)]

    def outcome(self, tree: DraftTree, tokens: Sequence[int]) -> tuple[int, list[int]]:
        """Draws the outcome of a tree that is not verified.

        Verified trees have the same distribution. Returns the number of nodes and the accepted
        nodes, which lie where a captured step pretends them.
        """
        [num_tokens] = self.draw(1)
        return len(tree), [row - 1 for row in pretended_path(1 + len(tree), num_tokens)[1:]]

    def _num_right(self, acceptance: float) -> int:
        count = 0
        while count < self._depth and self._random.random() < acceptance:
            count += 1
        return count


def _forced(tree: DraftTree, num_tokens: int) -> list[int]:
    below = children(tree)
    depth = [0] * (len(tree) + 1)  # number of levels below each row
    deepest = [0] * (len(tree) + 1)  # child on the way to the deepest node
    for row in range(len(tree), 0, -1):
        parent = tree.parents[row - 1] + 1
        if depth[row] + 1 >= depth[parent]:  # the first of equal depths
            depth[parent], deepest[parent] = depth[row] + 1, row
    forced = [-1] * (len(tree) + 1)
    row = 0
    for _ in range(num_tokens - 1):
        child = deepest[row]
        if child == 0:
            break
        forced[row] = tree.tokens[child - 1]
        row = below[row][forced[row]]  # the walk takes the first of equal siblings
    forced[row] = next(
        token for token in range(FILLER, FILLER + len(tree) + 1) if token not in below[row]
    )
    return forced
