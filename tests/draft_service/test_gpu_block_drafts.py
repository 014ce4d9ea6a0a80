"""Block drafters and P-EAGLE on a GPU: the chains of their float64 references, in float32."""

from pathlib import Path

import pytest

from draft_service.drafters.heads import HeadDrafter
from foredraft.config.services import DraftConfig
from testing.block_cases import KINDS, check_batch_that_grows, check_peagle
from testing.block_drafts import BlockReference, tiny_peagle
from testing.draft_heads import TinyHead, save_head
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def load(head: TinyHead, target: Path, folder: Path) -> HeadDrafter:
    return HeadDrafter.load(
        DraftConfig(
            model_path=str(target),
            speculative_algorithm=head.algorithm,
            speculative_draft_model_path=str(save_head(head, folder)),
            device="cuda",
            dtype="float32",
        )
    )


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_a_batch_that_grows(
    kind: str, is_captured: bool, target: Path, tmp_path: Path
) -> None:
    head, options = KINDS[kind]
    reference = BlockReference(head, target, **options)
    check_batch_that_grows(load(head, target, tmp_path), reference, target, is_captured)


@pytest.mark.parametrize("is_captured", [False, True])
def test_peagle(is_captured: bool, target: Path, tmp_path: Path) -> None:
    head = tiny_peagle(3)
    check_peagle(load(head, target, tmp_path), head, target, is_captured)
