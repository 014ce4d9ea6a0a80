"""Trees that are asked for beside plain steps are judged by the tokens that come, and nothing else changes."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.hidden_drafts import HiddenDrafter, engine_with
from tests.support.hidden_work import FLAGS, WIDTH, jobs, texts
from verify_service.policy.acceptance import DraftHistory
from verify_service.policy.messages import Plan, Want
from verify_service.policy.policy import DraftPolicy


class Tries(DraftPolicy):
    """Drafts nothing but tries two sequences as often as it may, and keeps what it is told of that."""

    is_resting = True

    def __init__(self, nodes: int) -> None:
        super().__init__(None, nodes, nodes)
        self.outcomes: list[tuple[int, int]] = []
        self.counts: list[int] = []
        self._is_open = False

    def plan(self, wanted: Sequence[Want], other_rows: int = 0, is_ahead: bool = False) -> Plan:
        """See DraftPolicy."""
        tried = [] if self._is_open else [i for i, want in enumerate(wanted) if want.limit][-2:]
        self._is_open |= bool(tried)
        return Plan([0] * len(wanted), 1, tried)

    def record(self, history: DraftHistory, num_nodes: int, accepted: list[int], *_: int) -> None:
        """See DraftPolicy."""
        self.outcomes.append((num_nodes, len(accepted)))

    def ended_trial(self, num_outcomes: int) -> None:
        """See DraftPolicy."""
        self.counts.append(num_outcomes)
        self._is_open = False


@pytest.mark.parametrize("skill", [1.0, 0.0])
def test_tokens_judge_what_was_tried(target: Path, skill: float) -> None:
    work = jobs(12, num_new=100)
    drafter = HiddenDrafter(WIDTH, skill=skill, weight_bytes=1)
    drafter.texts = texts(target, work)
    with engine_with(drafter, target, **FLAGS) as harness:
        harness.wait_for_draft()
        sizes = harness.engine._sizes
        policy = sizes.policy = Tries(sizes._max_nodes)
        results = harness.run(work)
        harness.check_nothing_left()
    assert [result.tokens for result in results] == [
        text[len(job.prompt) :] for text, job in zip(drafter.texts, work, strict=True)
    ]
    assert len(policy.counts) > 2
    assert sum(policy.counts) == len(policy.outcomes) > 4
    levels = {accepted for _, accepted in policy.outcomes}
    assert levels == {0} if skill == 0 else min(levels) > 0 and max(levels) > 1
    assert drafter.check(target) > 100


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hidden") / "target")
