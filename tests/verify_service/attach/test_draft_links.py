"""A draft of another release is left alone, by whichever end finds it out."""

from pathlib import Path

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.engines import Job, running_engine
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
