"""A draft that was asked for chains and answers with branches, over steps of fixed shape; in
Triton's interpreter.
"""

from pathlib import Path
from typing import Any

import pytest

from foredraft.api.draft.v1 import draft_pb2
from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.engines import Job, running_engine
from testing.triton_device import INTERPRETED, needs_triton
from verify_service.drafts.open_requests import OpenRequests

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")]
PROMPT = [5, 6, 7, 98, 99] * 2
SIZES = {"page_size": 8, "max_total_tokens": 512, "max_running_requests": 3}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("threshold", [1.0, 0.5])
def test_branches_that_nobody_asked_for_change_no_token(
    threshold: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second branch has the right tokens, so that a target that took it would commit its KV."""
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    with running_engine(path, **SIZES) as harness:
        want = harness.run([Job(PROMPT, GREEDY)])[0].tokens
    from testing.eager_graphs import use_eager_graphs  # needs Triton

    read, num_answers = OpenRequests.read, 0

    def branched(self: OpenRequests, response: draft_pb2.StepResponse) -> Any:
        nonlocal num_answers
        step = self._steps.get(response.step)
        del response.proposals[:]
        for slot, one in (step.asked if step is not None else {}).items():
            right = [*PROMPT, *want, 0, 0][one.position :][:2]
            tokens, num_answers = [(right[0] + 1) % VOCAB_SIZE, *right], num_answers + 1
            response.proposals.add(slot=slot, tokens=tokens, parents=[-1, -1, 1])
        return read(self, response)

    monkeypatch.setattr(OpenRequests, "read", branched)
    use_eager_graphs(monkeypatch)
    flags = {
        **SIZES,
        "speculative_num_draft_tokens": 4,
        "speculative_ngram_max_bfs_breadth": 1,
        "speculative_accept_threshold_single": threshold,
    }
    with running_engine(path, "NGRAM", **flags) as harness:
        harness.engine.draft_everything()
        assert harness.run([Job(PROMPT, GREEDY)], timeout=300)[0].tokens == want
    assert num_answers > 5
