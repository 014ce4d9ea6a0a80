"""What a step drafts is decided whole before anything is done about it."""

from collections.abc import Sequence
from typing import Any

import pytest

from foredraft.types import SamplingParams, SpeculationParams
from verify_service.controller.controller import Controller
from verify_service.controller.messages import Candidate, DraftKind, Plan
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DraftRequest, Trial
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.scheduler.request import Sequence as RequestSequence


class Draft:
    """Records what it is told."""

    def __init__(self, name: str = "", is_free: bool = False) -> None:
        self.name = name
        self.capabilities = DraftCapabilities(is_free=is_free)
        self.epoch = 1
        self.told: list[Any] = []

    def lag(self, sequence: RequestSequence) -> int:
        return 4

    def suspend(self, is_suspended: bool, keeps_states: bool = True) -> None:
        self.told.append((is_suspended, keeps_states))

    def ask(self, requests: Sequence[DraftRequest], extending: Sequence[Any]) -> None:
        assert not extending
        self.told.append([one.max_nodes for one in requests if one.is_trial])

    def take_trials(self) -> list[Trial] | None:
        return None


class Policy(Controller):
    """Plans what a test says."""

    stays_suspended = False

    def __init__(self, num_drafts: int = 1) -> None:
        super().__init__(None, [DraftKind(6, 3)] * num_drafts)
        self.tried: dict[int, list[int]] = {}
        self.choices: Sequence[int] = ()
        self.seen: list[Candidate] = []

    def plan(
        self, candidates: Sequence[Candidate], other_rows: int = 0, is_ahead: bool = False
    ) -> Plan:
        self.seen = list(candidates)
        for one, chosen in zip(candidates, self.choices, strict=False):
            one.history.chosen = chosen
        return Plan([one.limits[0] for one in candidates], 7, self.tried)


def sequence(number: int, asked: SpeculationParams | None = None, left: int = 50) -> Any:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=left)
    return RequestSequence(number, [1, 2], sampling, asked or SpeculationParams())


def sizes_of(policy: Policy, *drafts: Draft, probes: Any = frozenset()) -> TreeSizes:
    return TreeSizes(policy, Drafts(drafts), probes)  # type: ignore[arg-type]


def test_a_decision_leaves_drafts_alone_until_it_is_carried_out() -> None:
    draft, policy = Draft(), Policy()
    policy.tried = {0: [1]}
    sizes = sizes_of(policy, draft)
    sequences = [sequence(0), sequence(1), sequence(2)]
    decision = sizes._decider.decide(sizes._decision, sequences, 0, False)
    assert decision.plan.nodes == [6, 6, 6]
    assert [one.max_nodes for one in decision.trials[0]] == [0, 6, 0]
    assert draft.told == []
    assert sizes.plan(sequences).nodes == [6, 6, 6]
    assert draft.told == [(False, True), [0, 6, 0]]


def test_what_requests_allow_bounds_trees_and_trials() -> None:
    policy = Policy()
    policy.tried = {0: [0, 1, 2, 3]}
    draft = Draft()
    off, few = SpeculationParams(enabled=False), SpeculationParams(num_draft_tokens=3)
    sequences = [sequence(0), sequence(1, off), sequence(2, few), sequence(3, left=1)]
    assert sizes_of(policy, draft).plan(sequences).nodes == [6, 0, 2, 0]
    assert draft.told[-1] == [6, 0, 2, 0]


def test_what_drafts_must_read_first_is_told_for_steps_that_wait() -> None:
    sizes = sizes_of(policy := Policy(), Draft())
    policy.unread = lambda candidates, nodes: [len(nodes)]  # type: ignore[method-assign]
    sizes.plan([sequence(0), sequence(1)])
    assert sizes._decision.unread == [2]


@pytest.mark.parametrize("is_free", [False, True])
def test_drafts_that_rest_are_told_so_once(is_free: bool) -> None:
    draft, policy = Draft(is_free=is_free), Policy()
    policy.stays_suspended, policy.keeps_states = True, False
    probes: set[int] = set()
    sizes, sequences = sizes_of(policy, draft, probes=probes), [sequence(5)]
    assert sizes.plan(sequences) == Plan([0], 1)
    assert draft.told == [(True, False)]
    assert not sizes.is_silent
    for _ in range(3):
        assert sizes.plan(sequences) == Plan([0], 1)
        assert sizes.is_silent is not is_free
    policy.stays_suspended = False
    assert sizes.plan([]) == Plan([], 1)  # says nothing of whether drafts rest
    policy.stays_suspended = True
    assert sizes.plan(sequences) == Plan([0], 1)
    assert sizes.is_silent is not is_free
    assert len(draft.told) == 1
    probes.add(5)  # the engine's own request is drafted for, whether it pays or not
    assert sizes.plan(sequences).nodes == [6]
    assert policy.seen[0].forced
    assert draft.told[1:] == [(False, True)]
    probes.clear()
    sizes.plan(sequences)
    assert draft.told[2:] == [(True, False)]


def test_without_a_draft_nothing_is_planned() -> None:
    draft, policy = Draft(), Policy()
    draft.epoch = 0
    assert sizes_of(policy, draft).plan([sequence(0)]) == Plan([0], 1)
    assert sizes_of(policy).plan([sequence(0)]) == Plan([0], 1)
    assert (policy.seen, draft.told) == ([], [])


def test_each_sequence_goes_to_the_draft_that_was_chosen() -> None:
    drafts, policy = [Draft("A"), Draft("B"), Draft("C")], Policy(3)
    drafts[2].epoch = 0
    policy.choices = (1, 0)
    sizes, sequences = sizes_of(policy, *drafts), [sequence(0), sequence(1)]
    sizes.plan(sequences)
    assert [one.limits for one in policy.seen] == [[6, 6, 0]] * 2
    assert sizes._drafts.assigned == {0: 1, 1: 0}
