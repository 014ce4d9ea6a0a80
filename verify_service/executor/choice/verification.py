"""Walks a draft tree along the tokens that the sampling rule chose.

Choosing them is `sampling`'s part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.trees.draft_tree import DraftTree, children


@dataclass(slots=True)
class Verified:
    """Holds the outcome of one step for one sequence.

    Attributes:
        path: The accepted rows from the root (row 0) down; row i + 1 is node i.
        tokens: The token emitted at each of these rows; all but the last are accepted draft tokens.
    """

    path: list[int]
    tokens: list[int]


def walk(tree: DraftTree, chosen: Sequence[int]) -> Verified:
    """Walks a tree from the root, as long as the chosen token is one of the row's children.

    Args:
        tree: The draft tree that was verified.
        chosen: For every row, the token that the rule chooses there.
    """
    if not tree.tokens:  # most sequences beside a prompt have no tree
        return Verified([0], [chosen[0]])
    row_children = children(tree)
    path, tokens, row = [0], [chosen[0]], row_children[0].get(chosen[0])
    while row is not None:
        path.append(row)
        tokens.append(chosen[row])
        row = row_children[row].get(chosen[row])
    return Verified(path, tokens)


def walk_batch(
    trees: Sequence[DraftTree], choose: Callable[[list[tuple[int, int]]], Sequence[int]]
) -> list[Verified]:
    """Walks several trees, and chooses only at the rows on their paths.

    This is faster where choosing is expensive, as sampling is on a CPU.

    Args:
        trees: One per sequence.
        choose: Returns the rule's tokens at (sequence, row) pairs; called once per depth, with at
            most one row per sequence.
    """
    all_children = [children(tree) for tree in trees]
    results = [Verified([], []) for _ in trees]
    wanted = [(sequence, 0) for sequence in range(len(trees))]
    while wanted:
        deeper = []
        for (sequence, row), token in zip(wanted, choose(wanted), strict=True):
            results[sequence].path.append(row)
            results[sequence].tokens.append(token)
            child = all_children[sequence][row].get(token)
            if child is not None:
                deeper.append((sequence, child))
        wanted = deeper
    return results


def walk_lossy(
    tree: DraftTree,
    chosen: Sequence[int],
    node_probs: Sequence[float],
    coins: Sequence[float],
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Verified:
    """Walks a tree like `walk`, with a second chance for children that the rule did not choose.

    First, with `threshold_single` < 1, the first child whose target probability reaches it is
    taken. Then, with `threshold_acc` < 1, a coin takes the child with the most mass, such that the
    children's total acceptance probability, the rule's included, is min(1, P / threshold_acc) for
    their mass P. At 1.0 a threshold does nothing.

    Args:
        tree: The draft tree that was verified.
        chosen: For every row the token that the rule gives there.
        node_probs: For every node the target's probability of it at its parent's row (temperature
            and filters applied; one-hot for greedy requests, which are therefore never lossy).
        coins: For every row a uniform number keyed by the position being chosen there
            (`noise.coins`).
        threshold_single: Value of `--speculative-accept-threshold-single`.
        threshold_acc: Value of `--speculative-accept-threshold-acc`.
    """
    row_children = children(tree)
    path, tokens, row = [0], [], 0
    while True:
        token = chosen[row]
        if token >= 0 and token not in row_children[row]:  # negative: no token can be chosen
            second = _second_chance(
                row_children[row], node_probs, coins[row], threshold_single, threshold_acc
            )
            token = token if second is None else second
        tokens.append(token)
        child = row_children[row].get(token)
        if child is None:
            return Verified(path, tokens)
        path.append(child)
        row = child


def _second_chance(
    row_children: dict[int, int],
    node_probs: Sequence[float],
    coin: float,
    threshold_single: float,
    threshold_acc: float,
) -> int | None:
    probs = {token: node_probs[row - 1] for token, row in row_children.items()}
    if threshold_single < 1.0:
        for token, prob in probs.items():
            if prob >= threshold_single:
                return token
    mass = min(1.0, sum(probs.values()))
    if threshold_acc < 1.0 and 0.0 < mass < 1.0:
        target = min(1.0, mass / max(threshold_acc, 1e-9))
        if coin < (target - mass) / (1.0 - mass):
            return max(probs, key=probs.__getitem__)
    return None
