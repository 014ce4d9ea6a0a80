"""A draft that the verifier does not understand is left alone, by whichever end finds it out."""

from pathlib import Path

import pytest

from foredraft.api.draft.v1 import draft_pb2
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine
from testing.hidden_drafts import HiddenDrafter, engine_with
from testing.stack import eventually
from verify_service.attach import links as draft_links


def test_a_draft_of_another_protocol_is_not_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path / "target")
    monkeypatch.setattr(draft_links, "DRAFT_PROTOCOL", draft_links.DRAFT_PROTOCOL + 1)
    with running_engine(tmp_path / "target", "NGRAM", wait=False) as harness:
        eventually(lambda: "both must be of one release" in caplog.text)
        job = Job([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        (result,) = harness.run([job])
        assert len(result.tokens) == 4
        assert not harness.engine.load().draft_available


class Stranger(HiddenDrafter):
    """Offers to have its hidden states projected, of a type that nobody knows."""

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        said = super().info()
        said.hidden.dtype = 99  # type: ignore[assignment]
        said.fusion.CopyFrom(draft_pb2.Fusion(width=4, epsilon=1e-5))
        return said


def test_hidden_states_of_an_unknown_type_cost_the_draft_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(tmp_path / "target")
    drafter = Stranger(48)
    with engine_with(drafter, tmp_path / "target", draft_projection="verifier") as harness:
        eventually(lambda: "99 is not a known element type" in caplog.text)
        job = Job([5, 6, 7], SamplingParams(max_new_tokens=4, ignore_eos=True))
        (result,) = harness.run([job])
        assert len(result.tokens) == 4
    assert drafter.num_attaches == 0
