"""Trees that a draft which costs next to nothing makes while the target's forward runs.

While a sequence copies text it is asked for more than a step verifies. What is left of such a tree below the tokens that were
committed since is the next step's tree, so that this step need not wait for the answer to its own question.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.proposals import Drafted, Wanted
from verify_service.scheduler.request import Sequence as RequestSequence

LEAST_PART = 2  # of the nodes that a step may verify, at least one in so many must be left


@dataclass(frozen=True, slots=True)
class _Kept:
    """A proposal to a sequence that had `position` tokens."""

    position: int
    drafted: Drafted


class AskAhead:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._followed: set[int] = set()  # requests whose newest tree the text followed to its end

    def clear(self) -> None:
        """Another draft is attached, or none."""
        self._kept.clear()
        self._followed.clear()

    def forget(self, request: int) -> None:
        """The request has ended."""
        self._kept.pop(request, None)
        self._followed.discard(request)

    def num_nodes(self, want: Wanted) -> int:
        """How many nodes to ask for: two steps' and the token between them where one step's will do no longer."""
        asked = want.sequence.speculation
        has_bounds = asked.num_steps is not None or asked.topk is not None
        if want.is_trial or has_bounds or want.sequence.request_id not in self._followed:
            return want.max_nodes
        return 2 * want.max_nodes + 1

    def keep(self, sequence: RequestSequence, position: int, drafted: Drafted) -> None:
        """Takes a proposal to a sequence that had `position` tokens."""
        if sequence.finish_reason is None:
            self._kept[sequence.request_id] = _Kept(position, drafted)

    def take(self, wanted: Sequence[Wanted]) -> dict[int, Drafted] | None:
        """What is left of kept proposals, if that is enough for all; whoever wants one then need not wait."""
        found: dict[int, Drafted] = {}
        is_enough = True
        for want in wanted:
            if want.max_nodes == 0 or want.is_trial:
                continue
            rest = self._rest(want)
            if rest is None:
                is_enough = False
            else:
                found[want.sequence.request_id] = rest
        return found if found and is_enough else None

    def _rest(self, want: Wanted) -> Drafted | None:
        sequence = want.sequence
        request = sequence.request_id
        kept = self._kept.get(request)
        if kept is None:
            return None
        rest, was_followed = below(kept.drafted.tree, sequence.tokens[kept.position :])
        if was_followed:
            self._followed.add(request)
        else:
            self._followed.discard(request)
        most = min(want.max_nodes, sequence.num_output_left - 1)
        if rest is None or LEAST_PART * len(rest) < most:
            return None
        return Drafted(rest.first(want.max_nodes), kept.drafted.confidence)


def below(tree: DraftTree, tokens: Sequence[int]) -> tuple[DraftTree | None, bool]:
    """What of a tree follows `tokens`, which follow its root.

    Returns:
        The tree below the last of them, None where they leave the tree; and whether they stay in it to its end, at least.
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
