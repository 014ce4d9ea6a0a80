"""What a draft was asked for and what it answered: trees are checked, and handed out by request."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import EMPTY, DraftTree, sanitize
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.request import Sequence as RequestSequence

USUAL_TOKENS = 3  # of a sequence that a step commits
MOST_CONFIDENCE = 15  # acceptance is kept by confidence, and a draft must not make that grow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal that was checked."""

    tree: DraftTree
    confidence: int


NOTHING = Drafted(EMPTY, 0)


@dataclass(slots=True)
class Wanted:
    """A sequence that decodes in the coming step.

    Attributes:
        max_nodes: That its pages have room for, or that are asked for to find out.
        is_trial: The proposal will not be verified, so that no step need wait for it.
    """

    sequence: RequestSequence
    max_nodes: int
    is_trial: bool = False


@dataclass(slots=True)
class Member:
    """A sequence that goes on behind a step under way.

    Attributes:
        row: Its place in that step.
        num_nodes: Of the tree that it wants; 0 for none.
    """

    sequence: RequestSequence
    row: int
    num_nodes: int


@dataclass(slots=True)
class Asked:
    """A sequence that a tree was asked for.

    Attributes:
        position: Tokens that it had.
        num_nodes: That were asked for, which may be more than a step verifies.
    """

    want: Wanted
    position: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Tried:
    """A proposal that was asked for to find out how good it is.

    Attributes:
        position: Tokens that the sequence had.
    """

    sequence: RequestSequence
    position: int
    drafted: Drafted


@dataclass(frozen=True, slots=True)
class OwnTime:
    """What a draft says that an answer took it.

    Attributes:
        sequences: That trees were asked for.
        usual: Seconds, had it read no more than what steps commit; after a pause it reads more.
        whole: Seconds.
    """

    sequences: int
    usual: float
    whole: float


class Proposals:
    """Belongs to the engine's thread.

    Args:
        vocab_size: Of the target.
        on_tree: Called with every proposal that was not only tried: the sequence, the tokens that it had, and all nodes
            that were asked for.

    Attributes:
        trees: Of the newest round, by request; a sequence without one has no entry.
    """

    def __init__(
        self,
        vocab_size: int,
        metrics: SpeculationMetrics,
        on_tree: Callable[[RequestSequence, int, Drafted], None] | None = None,
    ) -> None:
        self._on_tree = on_tree
        self.trees: dict[int, Drafted] = {}
        self._vocab_size = vocab_size
        self._metrics = metrics
        self._asked: dict[int, dict[int, Asked]] = {}  # by step and slot
        self._num_tokens: dict[int, int] = {}  # that a step told, likewise by step
        self._due: set[int] = set()  # steps of the newest round whose answers will be verified
        self._trying: set[int] = set()  # steps that ask for something to find out how good it is
        self._tried: list[Tried] = []
        self._warned = False

    def reset(self) -> None:
        """Another draft is attached, or none: nothing more will come."""
        self._asked.clear()
        self._num_tokens.clear()
        self._due.clear()
        self._trying.clear()
        self.trees = {}

    def begin(self) -> None:
        """Another round: trees of the last one are verified by now."""
        self._due.clear()
        self.trees = {}

    def expect(
        self, request: draft_pb2.StepRequest, asked: Mapping[int, Asked], is_awaited: bool = True
    ) -> None:
        """Takes what a step that was sent asks for, by slot.

        Args:
            is_awaited: Whether the newest round verifies it.
        """
        if not asked:
            return
        step = request.step
        self._num_tokens[step] = sum(len(sequence.tokens) for sequence in request.sequences)
        self._asked[step] = dict(asked)
        trials = [one.want.is_trial for one in asked.values()]
        if any(trials):
            self._trying.add(step)
        if is_awaited and not all(trials):
            self._due.add(step)

    @property
    def are_due(self) -> bool:
        """Whether something will be verified that has not come."""
        return bool(self._due)

    @property
    def are_trying(self) -> bool:
        """Whether something that was asked for to find out has not come."""
        return bool(self._trying)

    @property
    def are_open(self) -> bool:
        """Whether anything that was asked for has not come."""
        return bool(self._asked)

    def read(self, response: draft_pb2.StepResponse) -> OwnTime | None:
        """Takes an answer.

        Returns:
            What it took; None where nothing had been asked for.
        """
        asked = self._asked.pop(response.step, {})
        own = None
        if asked:
            num_tokens = self._num_tokens.pop(response.step)
            part = min(1.0, USUAL_TOKENS * len(asked) / max(num_tokens, 1))
            extend, draft = response.extend_microseconds, response.draft_microseconds
            own = OwnTime(len(asked), (part * extend + draft) * 1e-6, (extend + draft) * 1e-6)
        is_due = response.step in self._due
        self._due.discard(response.step)
        self._trying.discard(response.step)
        for proposal in response.proposals:
            one = asked.pop(proposal.slot, None)
            if one is None:
                self._complain(1, f"a proposal for slot {proposal.slot}, which asked for none")
                continue
            tokens, parents = list(proposal.tokens), list(proposal.parents)
            tree, num_bad = sanitize(tokens, parents, self._vocab_size, one.num_nodes)
            if num_bad:
                self._complain(num_bad, f"{num_bad} unusable nodes for slot {proposal.slot}")
            confidence = min(proposal.confidence, MOST_CONFIDENCE)
            self._take(one, Drafted(tree, confidence), is_due)
        for one in asked.values():
            self._take(one, NOTHING, is_due)
        return own

    def _take(self, one: Asked, drafted: Drafted, is_due: bool) -> None:
        sequence = one.want.sequence
        if one.want.is_trial:
            self._tried.append(Tried(sequence, one.position, drafted))
            return
        if self._on_tree is not None:
            self._on_tree(sequence, one.position, drafted)
        if is_due and drafted.tree.tokens:
            first = drafted.tree.first(one.want.max_nodes)
            self.trees[sequence.request_id] = Drafted(first, drafted.confidence)

    def take_tried(self) -> list[Tried]:
        """What came of trials since the last call."""
        tried, self._tried = self._tried, []
        return tried

    def _complain(self, count: int, what: str) -> None:
        self._metrics.invalid_nodes.inc(count)
        if not self._warned:
            self._warned = True
            logger.warning("the draft sent %s; more are counted, not logged", what)
