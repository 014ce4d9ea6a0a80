"""Requests trees for two steps at once from a draft that costs next to nothing.

While a sequence repeats earlier text, the draft is asked for a larger tree than a step verifies.
The part of it that follows the tokens committed since is the next step's tree, so that the next
step need not wait for an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.proposals import Drafted, DraftRequest
from verify_service.scheduler.request import Sequence as RequestSequence

LEAST_PART = 2  # at least one in this many of the nodes that a step may verify must be left


@dataclass(frozen=True, slots=True)
class _Kept:
    """A proposal that was made when its sequence had `position` tokens."""

    position: int
    drafted: Drafted


class DraftAhead:
    """Keeps proposals for the next step. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._followed: set[int] = set()  # requests whose text followed the newest tree to its end

    def forget(self, request: int) -> None:
        """Drops the proposal of a request that has ended."""
        self._kept.pop(request, None)
        self._followed.discard(request)

    def num_nodes(self, one: DraftRequest) -> int:
        """Returns the number of nodes to request.

        It is the maximum of one step; or of two steps, and the token between them, where the text
        followed the newest tree to its end.
        """
        asked = one.sequence.speculation
        has_bounds = asked.num_steps is not None or asked.topk is not None
        if one.is_trial or has_bounds or one.sequence.request_id not in self._followed:
            return one.max_nodes
        return 2 * one.max_nodes + 1

    def keep(self, sequence: RequestSequence, position: int, drafted: Drafted) -> None:
        """Stores a proposal that was made when the sequence had `position` tokens."""
        if sequence.finish_reason is None:
            self._kept[sequence.request_id] = _Kept(position, drafted)

    def take(self, requests: Sequence[DraftRequest]) -> dict[int, Drafted] | None:
        """Returns the trees left of stored proposals, by request id.

        Returns None unless enough is left for all requests, so that the step must wait for answers.
        """
        found: dict[int, Drafted] = {}
        is_enough = True
        for one in requests:
            if one.max_nodes == 0 or one.is_trial:
                continue
            rest = self._rest(one)
            if rest is None:
                is_enough = False
            else:
                found[one.sequence.request_id] = rest
        return found if found and is_enough else None

    def _rest(self, one: DraftRequest) -> Drafted | None:
        sequence = one.sequence
        request = sequence.request_id
        kept = self._kept.get(request)
        if kept is None:
            return None
        rest, was_followed = below(kept.drafted.tree, sequence.tokens[kept.position :])
        if was_followed:
            self._followed.add(request)
        else:
            self._followed.discard(request)
        most = min(one.max_nodes, sequence.num_output_left - 1)
        if rest is None or LEAST_PART * len(rest) < most:
            return None
        return Drafted(rest.first(one.max_nodes), kept.drafted.confidence)


def below(tree: DraftTree, tokens: Sequence[int]) -> tuple[DraftTree | None, bool]:
    """Cuts a tree to the part below a path.

    Args:
        tree: The tree.
        tokens: Tokens of the path, from the root on.

    Returns:
        The tree below the last token, None where the path leaves the tree; and whether the path
        follows the tree at least to a leaf.
    """
    at = -1
    for token in tokens:
        children = [node for node, parent in enumerate(tree.parents) if parent == at]
        found = next((node for node in children if tree.tokens[node] == token), None)
        if found is None:
            return None, not children and at >= 0
        at = found
    index = {at: -1}
    kept: list[int] = []
    parents: list[int] = []
    for node in range(at + 1, len(tree)):
        parent = index.get(tree.parents[node])
        if parent is not None:
            index[node] = len(kept)
            kept.append(tree.tokens[node])
            parents.append(parent)
    return DraftTree(tuple(kept), tuple(parents)), True
