"""Matches a draft's answers to the trees that were requested, and checks them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foredraft.api.draft.v1 import draft_pb2
from foredraft.trees.draft_tree import sanitize
from verify_service.drafts.proposals import NOTHING, Drafted, DraftRequest, Trial
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.request import Sequence as RequestSequence

USUAL_TOKENS = 3  # typical number of tokens that a step commits to a sequence
MOST_CONFIDENCE = 15  # larger values are cut, since the verifier keeps acceptance by confidence

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenRequest:
    """A request that was sent to the draft.

    Attributes:
        request: The engine's request.
        position: Number of tokens that the sequence had.
        num_nodes: Number of nodes that were requested, which may be more than a step verifies.
    """

    request: DraftRequest
    position: int
    num_nodes: int


@dataclass(slots=True)
class _OpenStep:
    """A step that was sent with requests, and not answered yet.

    Attributes:
        asked: The requests, by slot.
        num_tokens: Number of tokens that it sent.
        is_due: Whether the newest round verifies its trees.
        is_trial: Whether any of the requests is a trial.
    """

    asked: dict[int, OpenRequest]
    num_tokens: int
    is_due: bool
    is_trial: bool


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Time that a draft reports for an answer.

    Attributes:
        usual: Seconds for a typical step; after a pause a draft reads more tokens than that.
        whole: Seconds that the answer took.
    """

    usual: float
    whole: float


class OpenRequests:
    """Matches answers to requests. Belongs to the engine's thread.

    A round is a step that the host begins. Trees that come after it are no longer verified.

    Args:
        vocab_size: Number of the target's tokens.
        metrics: Metrics of the draft.
        on_tree: Called with every proposal that is no trial: the sequence, the number of tokens
            that it had, and the proposal with all requested nodes.

    Attributes:
        trees: Trees of the newest round, by request id; a sequence without a tree has no entry.
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
        self._steps: dict[int, _OpenStep] = {}  # by number
        self._trials: list[Trial] = []
        self._warned = False

    def reset(self) -> None:
        """Drops all requests, since the draft is lost and will not answer."""
        self._steps.clear()
        self.trees = {}

    def begin_round(self) -> None:
        """Begins a round and drops the trees of the last one, which have been verified."""
        for step in self._steps.values():
            step.is_due = False
        self.trees = {}

    def use(self, trees: dict[int, Drafted]) -> None:
        """Verifies trees that earlier answers brought, in place of this round's.

        Args:
            trees: Trees by request id.
        """
        self.trees = trees

    def expect(
        self,
        request: draft_pb2.StepRequest,
        asked: Mapping[int, OpenRequest],
        is_awaited: bool = True,
    ) -> None:
        """Records the requests of a step that was sent.

        Args:
            request: The step's message.
            asked: The requests, by slot.
            is_awaited: Whether the newest round verifies the trees.
        """
        if not asked:
            return
        num_tokens = sum(len(sequence.tokens) for sequence in request.sequences)
        trials = [one.request.is_trial for one in asked.values()]
        is_due = is_awaited and not all(trials)
        self._steps[request.step] = _OpenStep(dict(asked), num_tokens, is_due, any(trials))

    @property
    def are_due(self) -> bool:
        """Whether an answer that will be verified is missing."""
        return any(step.is_due for step in self._steps.values())

    @property
    def are_trying(self) -> bool:
        """Whether an answer to a trial is missing."""
        return any(step.is_trial for step in self._steps.values())

    @property
    def are_open(self) -> bool:
        """Whether any answer is missing."""
        return bool(self._steps)

    def read(self, response: draft_pb2.StepResponse) -> OwnTime | None:
        """Reads an answer.

        Returns:
            The draft's time for it; None for a step without requests.
        """
        step = self._steps.pop(response.step, None) or _OpenStep({}, 0, False, False)
        own, asked = None, step.asked
        if asked:
            part = min(1.0, USUAL_TOKENS * len(asked) / max(step.num_tokens, 1))
            extend, draft = response.extend_microseconds, response.draft_microseconds
            own = OwnTime((part * extend + draft) * 1e-6, (extend + draft) * 1e-6)
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
            self._take(one, Drafted(tree, confidence), step.is_due)
        for one in asked.values():
            self._take(one, NOTHING, step.is_due)
        return own

    def _take(self, one: OpenRequest, drafted: Drafted, is_due: bool) -> None:
        sequence = one.request.sequence
        if one.request.is_trial:
            self._trials.append(Trial(sequence, one.position, drafted))
            return
        if self._on_tree is not None:
            self._on_tree(sequence, one.position, drafted)
        if is_due and drafted.tree.tokens:
            first = drafted.tree.first(one.request.max_nodes)
            self.trees[sequence.request_id] = Drafted(first, drafted.confidence)

    def take_trials(self) -> list[Trial]:
        """Returns the trials that have been answered since the last call."""
        tried, self._trials = self._trials, []
        return tried

    def _complain(self, count: int, what: str) -> None:
        self._metrics.invalid_nodes.inc(count)
        if not self._warned:
            self._warned = True
            logger.warning("the draft sent %s; more are counted, not logged", what)
