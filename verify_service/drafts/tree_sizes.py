"""Between engine and policy: who may be drafted for, what of a proposal is verified, what came of it."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.drafting import Drafting
from verify_service.drafts.proposals import NOTHING, Drafted, Tried
from verify_service.drafts.trial import Trial, known_outcome
from verify_service.executor.sampler import VerifyRows
from verify_service.metrics import AnyMetrics
from verify_service.policy.acceptance import DraftHistory
from verify_service.policy.messages import NO_WAIT, Observed, Offer, Plan, Wait, Want
from verify_service.policy.policy import DraftPolicy
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import DecodeSlot


class TreeSizes:
    """Asks the policy once per step.

    Args:
        drafting: The draft's side, or None for plain decoding.
        max_nodes: Of a tree.
        probes: Numbers of requests that are the engine's own, for which everything is drafted.
        serves: Whether this is the draft of a sequence, where there are several.

    Attributes:
        policy: How much to draft.
        trial: What is tried beside steps.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        drafting: Drafting | None,
        max_nodes: int,
        probes: AbstractSet[int],
        serves: Callable[[RequestSequence], bool] = lambda sequence: True,
    ) -> None:
        self.policy = policy
        self._drafting = drafting
        self._max_nodes = max_nodes
        self._probes = probes
        self._serves = serves
        self._cut: dict[int, DraftTree] = {}  # proposals that were verified in part
        self.trial = Trial()
        self._trying = policy  # that wants to know what comes of it

    def plan(
        self, sequences: Sequence[RequestSequence], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        """Tree nodes that sequences should verify in the coming step, in which all of them decode.

        Args:
            other_rows: Of prompts, in the same step.
            is_ahead: The step is to be started behind one under way.
        """
        drafting = self._drafting
        if drafting is None or not drafting.available:
            return Plan([0] * len(sequences), 1)
        self._end_trial(drafting)
        if self.policy.rests_on and not self._probes:
            drafting.is_resting, drafting.is_deaf = True, self.policy.is_deaf
            return Plan([0] * len(sequences), 1)
        wanted = [
            Want(
                self._history(drafting, one),
                self.limit(one) if self._serves(one) else 0,
                one.request_id in self._probes,
                drafting.behind(one),
                one.num_output_left,
                len(one.tokens),
            )
            for one in sequences
        ]
        if drafting.is_cheap:
            return self.policy.ask(wanted)
        plan = self.policy.plan(wanted, other_rows, is_ahead)
        drafting.is_resting, drafting.is_deaf = self.policy.is_resting, False
        if plan.tried:
            self._trying = self.policy
            self.trial.begin(drafting, sequences, {i: wanted[i].limit for i in plan.tried})
        return plan

    def trees(self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted]) -> list[DraftTree]:
        """What of the proposals is worth verifying; a draft that costs something was asked for no more than that."""
        drafting = self._drafting
        proposals = [drafted.get(slot.seq.request_id, NOTHING) for slot in slots]
        trees = [proposal.tree for proposal in proposals]
        if drafting is None or not drafting.is_cheap or not any(s.max_tree_nodes for s in slots):
            return trees
        offers = [
            Offer(
                drafting.history(slot.seq),
                len(proposal.tree),
                proposal.confidence,
                slot.seq.request_id in self._probes,
            )
            if self._serves(slot.seq)
            else Offer(drafting.history(slot.seq), 0, asked=False)
            for slot, proposal in zip(slots, proposals, strict=True)
        ]
        nodes = self.policy.trim(offers).nodes
        for slot, tree, num_nodes in zip(slots, trees, nodes, strict=True):
            is_whole = num_nodes == len(tree) or slot.seq.grammar is not None
            if not is_whole and self._serves(slot.seq):
                self._cut[slot.seq.request_id] = tree
        return [tree.first(num_nodes) for tree, num_nodes in zip(trees, nodes, strict=True)]

    def wait(
        self, slots: Sequence[DecodeSlot], drafted: dict[int, Drafted], seconds: float
    ) -> Wait:
        """What a step waited for that took `seconds` to begin."""
        drafting = self._drafting
        asked = [
            slot.max_tree_nodes for slot in slots if slot.max_tree_nodes and self._serves(slot.seq)
        ]
        none = NO_WAIT._replace(lead=seconds)
        if drafting is None or not asked:
            return none
        if drafting.is_cheap:
            return Wait(1, len(asked), seconds, lead=seconds)
        levels = min(max(asked), drafting.depth)
        return Wait(levels, len(asked), seconds, lead=seconds) if drafted else none

    def draft_everything(self) -> None:
        """From now on the whole tree is drafted in each step, whether it pays or not: for benchmarks."""
        self.policy = DraftPolicy(None, self._max_nodes, self.depth)

    def draft_of(self, sequence: RequestSequence) -> str:
        """Name of the draft that drafted for a sequence last, where there are several."""
        return ""

    def publish(self, metrics: AnyMetrics) -> None:
        """Says whether the draft is attached."""
        metrics.of("").available.set(self._drafting is not None and self._drafting.available)

    @property
    def depth(self) -> int:
        """Levels of a tree that is drafted on the device."""
        return self._drafting.depth if self._drafting is not None else 0

    @property
    def records_all(self) -> bool:
        """Whether `record` wants outcomes of steps without a tree too."""
        return bool(self._cut)

    def record(self, rows: VerifyRows, accepted: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the outcome of one verification: which nodes were right, and all tokens that it gave."""
        drafting = self._drafting
        if drafting is None or not (rows.tree.tokens or self._cut):  # as in most plain steps
            return
        num_nodes, brought = len(rows.tree), len(accepted)
        cut = self._cut.pop(rows.sequence.request_id, None)
        if cut is not None:
            num_nodes, accepted = known_outcome(cut, tokens)
        if not num_nodes:
            return
        history = drafting.history(rows.sequence)
        self.policy.record(history, num_nodes, accepted, rows.confidence, brought)

    def forget(self, sequence: RequestSequence) -> None:
        """The sequence has ended."""
        self._cut.pop(sequence.request_id, None)

    def observe(
        self,
        batch: int,
        num_rows: int,
        seconds: float,
        tokens: int,
        wait: Wait,
    ) -> None:
        """Takes a step that only decoded; `num_rows` of all sequences, see `Observed` for the rest."""
        if self.policy.passes(seconds + wait.lead, tokens):
            return
        rows = num_rows // batch if self.policy.is_padded else num_rows
        self.policy.observe(Observed(batch, rows, seconds, tokens, wait))

    def interrupted(self, batch: int, seconds: float, tokens: int, wait: Wait) -> None:
        """Takes a step with prompts, in which `batch` sequences decoded and committed `tokens`."""
        self.policy.interrupted(batch, tokens, seconds, wait)

    def take_tried(self) -> list[Tried]:
        """What came of trials that others have begun; see `Drafting.take_tried`."""
        return [] if self._drafting is None else self.trial.take(self._drafting)

    def _end_trial(self, drafting: Drafting) -> None:
        """Records what has come of a trial, once all of it is known."""
        outcomes = self.trial.outcomes(drafting)
        if outcomes is None:
            return
        for sequence, num_nodes, accepted, confidence in outcomes:
            history = self._history(drafting, sequence)
            self._trying.record(history, num_nodes, accepted, confidence)
        self._trying.ended_trial(len(outcomes))

    def _history(self, drafting: Drafting, sequence: RequestSequence) -> DraftHistory:
        history = drafting.history(sequence)
        # Guesses at what is sampled are right less often.
        history.group = int(sequence.sampling.temperature > 0)
        return history

    def limit(self, sequence: RequestSequence) -> int:
        """Nodes that a tree of a sequence may have."""
        asked = sequence.speculation
        if asked.enabled is False or sequence.num_output_left <= 1:
            return 0
        if asked.num_draft_tokens is None:
            return self._max_nodes
        return min(self._max_nodes, asked.num_draft_tokens - 1)
