"""Trials beside steps: when they end, and what is reported of them."""

from types import SimpleNamespace
from typing import Any

import pytest

from foredraft.trees.draft_tree import DraftTree
from verify_service.drafts.proposals import Drafted, DraftRequest, Trial
from verify_service.engine.judging import known_outcome
from verify_service.engine.trials import RunningTrials
from verify_service.scheduler.request import Status

CHAIN = Drafted(DraftTree((5, 6), (-1, 0)), confidence=3)


class Draft:
    """Answers trials with what a test puts into `answer`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: list[Trial] | None = None

    def ask(self, requests: Any, extending: Any) -> None:
        self.asked.append((list(requests), list(extending)))

    def take_trials(self) -> list[Trial] | None:
        return self.answer


def sequence(*tokens: int, status: Status = Status.RUNNING) -> Any:
    return SimpleNamespace(tokens=[1, 2, *tokens], status=status)


@pytest.fixture
def draft() -> Draft:
    return Draft()


@pytest.fixture
def trials(draft: Draft) -> RunningTrials:
    return RunningTrials([draft], known_outcome)  # type: ignore[list-item]


def test_a_trial_asks_and_waits_for_its_trees(draft: Draft, trials: RunningTrials) -> None:
    requests = [DraftRequest(sequence(), 2, is_trial=True)]
    assert not trials.are_running
    trials.start(0, requests)
    assert draft.asked == [(requests, [])]
    assert trials.are_running
    assert trials.is_running(0)
    assert not trials.is_running(1)
    assert trials.take_ended() == {}


def test_all_outcomes_come_at_once_and_the_wrong_ones_not_earlier(
    draft: Draft, trials: RunningTrials
) -> None:
    trials.start(0, [])
    wrong, right = sequence(9), sequence(5)
    draft.answer = [Trial(wrong, 2, CHAIN), Trial(right, 2, CHAIN)]
    assert trials.take_ended() == {}  # the second node's outcome is open
    draft.answer = None  # taken once
    right.tokens.append(6)
    assert trials.take_ended() == {0: [(wrong, CHAIN, []), (right, CHAIN, [0, 1])]}
    assert not trials.are_running
    assert trials.take_ended() == {}


def test_sequences_that_ended_before_leave_nothing_behind(
    draft: Draft, trials: RunningTrials
) -> None:
    trials.start(0, [])
    draft.answer = [Trial(sequence(5, status=Status.FINISHED), 2, CHAIN)]
    assert trials.take_ended() == {0: []}
