"""A few trees that are asked for beside plain steps, which do not wait for them: the tokens that come judge them."""

from collections.abc import Callable, Mapping, Sequence

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import Tried, Wanted
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.request import Status

Outcome = tuple[RequestSequence, int, list[int], int]
"""A sequence, the nodes of its tree, those that were right, and the proposal's confidence."""


def known_outcome(tree: DraftTree, tokens: Sequence[int]) -> tuple[int, list[int]]:
    """What tokens say of a tree that was not verified, or in part: they follow its root.

    Returns:
        How many leading nodes they judge, and the nodes that were right.
    """
    children = {
        (parent, token): node
        for node, (token, parent) in reversed(
            list(enumerate(zip(tree.tokens, tree.parents, strict=True)))
        )
    }
    at = -1
    right: list[int] = []
    for token in tokens:
        node = children.get((at, token))
        if node is None:
            return len(tree), right
        right.append(node)
        at = node
    num_known = next((i for i, parent in enumerate(tree.parents) if parent == at), len(tree))
    return num_known, right


class Trial:
    """One at a time. Belongs to the engine's thread.

    Attributes:
        judge: `known_outcome`; benchmarks that simulate acceptance put in what they draw.
    """

    def __init__(self) -> None:
        self.judge: Callable[[DraftTree, Sequence[int]], tuple[int, list[int]]] = known_outcome
        self._is_open = False
        self._asked: set[int] = set()  # requests
        self._tried: list[Tried] = []
        self._has_answer = False

    def begin(
        self,
        drafting: Drafting,
        sequences: Sequence[RequestSequence],
        nodes: Mapping[int, int],
    ) -> None:
        """Asks for trees of so many nodes, by place among the sequences that decode."""
        self._is_open, self._has_answer = True, False
        self._asked = {sequences[i].request_id for i in nodes}
        self._tried = []
        drafting.ask(
            [Wanted(one, nodes.get(i, 0), is_trial=True) for i, one in enumerate(sequences)], ()
        )

    def outcomes(self, drafting: Drafting) -> list[Outcome] | None:
        """What came of it, once; None before that. Sequences that ended meanwhile are left out."""
        if not self._is_open:
            return None
        if not self._has_answer:
            if not drafting.has_tried():
                return None
            self._tried += drafting.take_tried()
            self._has_answer = True
        found = []
        for tried in self._tried:
            tree, sequence = tried.drafted.tree, tried.sequence
            num_known, right = self.judge(tree, sequence.tokens[tried.position :])
            if num_known == len(tree):
                found.append((sequence, len(tree), right, tried.drafted.confidence))
            elif sequence.status is Status.RUNNING:
                return None  # all at a time: those that are wrong are known first
        self._is_open = False
        return found

    def take(self, drafting: Drafting) -> list[Tried]:
        """What came of other trials; that of this one is kept."""
        others: list[Tried] = []
        for tried in drafting.take_tried():
            is_own = self._is_open and tried.sequence.request_id in self._asked
            (self._tried if is_own else others).append(tried)
        return others
