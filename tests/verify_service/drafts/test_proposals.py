"""What a draft's answer is taken for, whatever it holds."""

from types import SimpleNamespace
from typing import Any

from foredraft.api.draft.v1 import draft_pb2
from verify_service.drafts.proposals import MOST_CONFIDENCE, Asked, Proposals, Wanted


def test_confidences_are_few_whatever_a_draft_says() -> None:
    metrics: Any = SimpleNamespace()
    proposals = Proposals(100, metrics)
    seen = set()
    for step, confidence in enumerate((0, 5, MOST_CONFIDENCE, 1000, 2**32 - 1), 1):
        sequence: Any = SimpleNamespace(request_id=7)
        asked = {3: Asked(Wanted(sequence, 4), 10, 4)}
        proposals.begin()
        proposals.expect(draft_pb2.StepRequest(step=step), asked)
        proposal = draft_pb2.Proposal(slot=3, tokens=[1], parents=[-1], confidence=confidence)
        proposals.read(draft_pb2.StepResponse(step=step, proposals=[proposal]))
        seen.add(proposals.trees[7].confidence)
    assert seen == {0, 5, MOST_CONFIDENCE}
