"""Steps of a draft on a CPU that do not change threads: those that take little time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from draft_service.drafters import paged_proposer
from draft_service.drafters.base import Proposer
from draft_service.drafters.standalone import StandaloneDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.cpu.threads import FEW_ROWS, use_threads
from testing.checkpoints import make_checkpoint
from testing.standalone_reference import Sequences, attach, prompt


@pytest.fixture
def proposer(tmp_path: Path) -> Iterator[Proposer]:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", seed=3)
    drafter = StandaloneDrafter.load(
        DraftConfig(
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path=str(path),
            device="cpu",
            num_threads=1,
        )
    )
    made, _ = drafter.attach(attach(2, 1, 3))
    made.prepare()
    yield made
    made.close()
    use_threads(1)


def step(number: int, sequence: draft_pb2.SequenceStep) -> draft_pb2.StepRequest:
    return draft_pb2.StepRequest(step=number, sequences=[sequence])


def test_a_step_is_brief_where_few_tokens_took_little_time(
    proposer: Proposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences, limits = Sequences(), {"num_steps": 2, "topk": 1, "num_draft_tokens": 3}
    first = step(1, sequences.begin(0, prompt(0, 5), **limits))
    assert not proposer.is_brief(first)  # nothing is known yet
    assert len(proposer.step(first).proposals[0].tokens) == 2
    monkeypatch.setattr(paged_proposer, "BRIEF_SECONDS", 1e9)
    assert proposer.is_brief(step(2, draft_pb2.SequenceStep(tokens=[1] * FEW_ROWS)))
    assert not proposer.is_brief(step(2, draft_pb2.SequenceStep(tokens=[1] * (FEW_ROWS + 1))))
    monkeypatch.setattr(paged_proposer, "BRIEF_SECONDS", 1e-9)
    assert not proposer.is_brief(step(2, draft_pb2.SequenceStep(tokens=[1])))
