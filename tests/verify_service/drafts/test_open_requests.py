"""Tests how a draft's answers are read, whatever they hold."""

from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.api.draft.v1 import draft_pb2
from foredraft.telemetry.metrics import value
from foredraft.trees.draft_tree import EMPTY, DraftTree
from foredraft.types import SamplingParams
from verify_service.drafts.open_requests import (
    MOST_CONFIDENCE,
    USUAL_TOKENS,
    OpenRequest,
    OpenRequests,
)
from verify_service.drafts.proposals import Drafted, DraftRequest
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.request import Sequence


def test_confidences_are_few_whatever_a_draft_says() -> None:
    metrics: Any = SimpleNamespace()
    requests = OpenRequests(100, metrics)
    seen = set()
    for step, confidence in enumerate((0, 5, MOST_CONFIDENCE, 1000, 2**32 - 1), 1):
        sequence: Any = SimpleNamespace(request_id=7)
        asked = {3: OpenRequest(DraftRequest(sequence, 4), 10, 4)}
        requests.begin_round()
        requests.expect(draft_pb2.StepRequest(step=step), asked)
        proposal = draft_pb2.Proposal(slot=3, tokens=[1], parents=[-1], confidence=confidence)
        requests.read(draft_pb2.StepResponse(step=step, proposals=[proposal]))
        seen.add(requests.trees[7].confidence)
    assert seen == {0, 5, MOST_CONFIDENCE}


class Round:
    """Requests for two sequences, in slots 0 and 1."""

    def __init__(self) -> None:
        self.metrics = SpeculationMetrics("TOLD")
        self.told: list[tuple[int, int, Drafted]] = []
        self.open = OpenRequests(100, self.metrics, self._on_tree)
        self.sequences = [Sequence(number, [5, 6], SamplingParams()) for number in (7, 8)]

    def _on_tree(self, sequence: Sequence, position: int, drafted: Drafted) -> None:
        self.told.append((sequence.request_id, position, drafted))

    def asked(
        self, max_nodes: int, num_nodes: int, is_trial: bool = False
    ) -> dict[int, OpenRequest]:
        wants = [DraftRequest(sequence, max_nodes, is_trial) for sequence in self.sequences]
        return {slot: OpenRequest(want, 2, num_nodes) for slot, want in enumerate(wants)}

    def expect(self, step: int, asked: dict[int, OpenRequest], num_tokens: int = 2) -> None:
        request = draft_pb2.StepRequest(step=step)
        request.sequences.add(slot=0, tokens=[1] * num_tokens)
        self.open.begin_round()
        self.open.expect(request, asked)

    def answer(self, step: int, *chains: tuple[int, list[int]], seconds: float = 0.0) -> Any:
        response = draft_pb2.StepResponse(step=step)
        for slot, tokens in chains:
            parents = list(range(-1, len(tokens) - 1))
            response.proposals.add(slot=slot, tokens=tokens, parents=parents, confidence=3)
        response.extend_microseconds = response.draft_microseconds = int(seconds * 1e6)
        return self.open.read(response)


@pytest.fixture
def one() -> Round:
    return Round()


def chain(*tokens: int) -> Drafted:
    return Drafted(DraftTree(tokens, tuple(range(-1, len(tokens) - 1))), 3)


def test_a_tree_is_cut_to_what_a_step_verifies_and_kept_whole(one: Round) -> None:
    one.expect(1, one.asked(max_nodes=2, num_nodes=5))
    assert one.open.are_due
    one.answer(1, (0, [11, 12, 13, 14, 15]), (1, [21]))
    assert not one.open.are_due
    assert not one.open.are_open
    assert one.open.trees == {7: chain(11, 12), 8: chain(21)}
    assert one.told == [(7, 2, chain(11, 12, 13, 14, 15)), (8, 2, chain(21))]


def test_who_gets_no_proposal_is_told_so(one: Round) -> None:
    one.expect(1, one.asked(2, 2))
    one.answer(1, (1, [21]))
    assert one.open.trees == {8: chain(21)}
    assert sorted(one.told, key=lambda told: told[0]) == [
        (7, 2, Drafted(EMPTY, 0)),
        (8, 2, chain(21)),
    ]


def test_a_trial_is_not_verified(one: Round) -> None:
    one.expect(1, one.asked(2, 2, is_trial=True))
    assert one.open.are_trying
    assert not one.open.are_due
    one.answer(1, (0, [11]))
    assert one.open.trees == {}
    assert one.told == []
    tried = one.open.take_trials()
    assert [(found.sequence.request_id, found.position) for found in tried] == [(7, 2), (8, 2)]
    assert [found.drafted for found in tried] == [chain(11), Drafted(EMPTY, 0)]
    assert one.open.take_trials() == []
    assert not one.open.are_trying


def test_what_comes_of_an_earlier_round_is_kept_and_not_verified(one: Round) -> None:
    one.expect(1, one.asked(2, 2))
    one.expect(2, one.asked(2, 2))
    one.answer(1, (0, [11]), (1, [21]))
    assert one.open.trees == {}
    assert [told[0] for told in one.told] == [7, 8]
    assert one.open.are_due
    one.answer(2, (0, [12]), (1, [22]))
    assert one.open.trees == {7: chain(12), 8: chain(22)}


def test_what_cannot_be_used_is_counted(one: Round) -> None:
    def bad() -> float:
        return value("foredraft_draft_invalid_nodes_total", algorithm="TOLD")

    before = bad()
    one.expect(1, one.asked(2, 2))
    # A node outside the vocabulary, one more than were asked for, and a slot that asked for none.
    one.answer(1, (0, [11, 100]), (1, [21, 22, 23]), (5, [31]))
    assert bad() == before + 3
    assert one.open.trees == {7: chain(11), 8: chain(21, 22)}


def test_an_answer_after_a_pause_says_what_it_takes_usually(one: Round) -> None:
    one.expect(1, one.asked(2, 2), num_tokens=2 * USUAL_TOKENS)
    own = one.answer(1, seconds=0.5)
    assert (own.usual, own.whole) == (1.0, 1.0)
    one.expect(2, one.asked(2, 2), num_tokens=8 * USUAL_TOKENS)
    own = one.answer(2, seconds=0.5)
    assert (own.usual, own.whole) == (pytest.approx(0.5 + 0.125), 1.0)
    assert one.answer(3, seconds=0.5) is None  # nothing was asked for


def test_another_draft_owes_nothing(one: Round) -> None:
    one.expect(1, one.asked(2, 2))
    one.open.reset()
    assert not one.open.are_open
    assert not one.open.are_due
    assert one.answer(1) is None
