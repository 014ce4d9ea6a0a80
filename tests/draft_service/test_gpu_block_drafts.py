"""Block drafters on a GPU: the chains of their float64 references, in float32."""

from pathlib import Path

import pytest

from draft_service.drafters.heads import HeadDrafter
from foredraft.config.services import DraftConfig
from testing.block_cases import KINDS, check_batch_that_grows
from testing.block_drafts import BlockReference
from testing.draft_heads import save_head
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_a_batch_that_grows(
    kind: str, is_captured: bool, target: Path, tmp_path: Path
) -> None:
    head, options = KINDS[kind]
    drafter = HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm=head.algorithm,
            speculative_draft_model_path=str(save_head(head, tmp_path)),
            device="cuda",
            dtype="float32",
        )
    )
    reference = BlockReference(head, target, **options)
    check_batch_that_grows(drafter, reference, target, is_captured)
