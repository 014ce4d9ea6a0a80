"""Requests trees for two steps at once from a draft that costs next to nothing.

While a sequence repeats earlier text, the draft is asked for a larger tree than a step verifies.
The part of it that follows the tokens committed since is the next step's tree, so that the next
step need not wait for an answer.
"""

from collections.abc import Sequence

from verify_service.drafts.proposals import Drafted, DraftRequest
from verify_service.scheduler.request import Sequence as RequestSequence

LEAST_PART = 2  # at least one in this many of the nodes that a step may verify must be left


class DraftAhead:
    """Keeps proposals for the next step. Belongs to the engine's thread."""

    def __init__(self) -> None:
        # By request: number of tokens that the sequence had, and the proposal made then.
        self._kept: dict[int, tuple[int, Drafted]] = {}
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
            self._kept[sequence.request_id] = position, drafted

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
        if request not in self._kept:
            return None
        position, drafted = self._kept[request]
        tree, tokens = drafted.tree, sequence.tokens[position:]
        path = tree.follow(tokens)
        last = path[-1] if path else -1
        is_within = len(path) == len(tokens)
        if is_within or (path and last not in tree.parents):  # the text goes on to or past a leaf
            self._followed.add(request)
        else:
            self._followed.discard(request)
        if not is_within:
            return None
        rest = tree.below(last)
        if LEAST_PART * len(rest) < min(one.max_nodes, sequence.num_output_left - 1):
            return None
        return Drafted(rest.first(one.max_nodes), drafted.confidence)
