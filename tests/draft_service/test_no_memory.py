"""Memory that runs out while a draft captures its steps."""

import pytest
import torch

from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.drafters.standalone import StandaloneDrafter
from foredraft.config.services import DraftConfig
from foredraft.errors import AttachRefused
from testing.broken_captures import broken_off_capture
from testing.checkpoints import make_checkpoint
from testing.standalone_reference import attach


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> StandaloneDrafter:
    path = make_checkpoint(tmp_path_factory.mktemp("draft"), "LlamaForCausalLM")
    config = DraftConfig(
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(path),
        device="cpu",
        num_threads=1,
    )
    return StandaloneDrafter.load(config)


def prepare(drafter: StandaloneDrafter, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaches and prepares; making the steps fails with this error."""

    def fail(self: PagedProposer) -> None:
        raise error

    proposer, _ = drafter.attach(attach(2, 1, 3))
    monkeypatch.setattr(type(proposer), "_make_fixed_steps", fail)
    try:
        proposer.prepare()
    finally:
        proposer.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), broken_off_capture()]
)
def test_an_attach_without_memory_is_refused(
    drafter: StandaloneDrafter, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AttachRefused, match="lower --cuda-graph-max-bs"):
        prepare(drafter, error, monkeypatch)


def test_other_errors_stay_as_they_are(
    drafter: StandaloneDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="illegal"):
        prepare(drafter, RuntimeError("CUDA error: an illegal memory access"), monkeypatch)
