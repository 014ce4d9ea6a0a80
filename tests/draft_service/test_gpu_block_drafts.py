"""Block drafters and P-EAGLE on a GPU: the chains of their float64 references, in float32."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from draft_service.models.block_draft import BlockDraft
from foredraft.kernel_launch import few_variants
from foredraft.kvcache.paged_kv import PagedKV
from testing import block_cases
from testing.block_cases import KINDS, check_batch_that_grows, check_peagle
from testing.block_drafts import BlockReference, tiny_peagle
from testing.draft_heads import TinyHead
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def load(
    head: TinyHead, target: Path, folder: Path, dtype: Literal["float32", "bfloat16"] = "float32"
) -> HeadDrafter:
    return block_cases.load(head, target, folder, device="cuda", dtype=dtype)


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


@pytest.mark.parametrize("kind", ["dflash", "dflash-sliding", "dspark"])
def test_keys_of_all_layers_at_once(kind: str, target: Path, tmp_path: Path) -> None:
    """In 16 bits, few rows: what the layers give one after another."""
    drafter = load(KINDS[kind][0], target, tmp_path, "bfloat16")
    draft = drafter._head
    assert isinstance(draft, BlockDraft)
    draft.prepare()
    assert draft._context_keys is not None
    size, device = draft.config.layer.hidden_size, torch.device("cuda")
    for rows in (1, 9, 70):
        features = torch.randn(rows, size, device=device).bfloat16()
        positions = torch.randint(30, (rows,), device=device)
        slots = torch.randperm(128, device=device)[:rows]
        found, expected = (
            PagedKV.for_model(draft.config.layer, 8, 16, torch.bfloat16, device) for _ in range(2)
        )
        with torch.inference_mode():
            draft.extend(features, positions, slots, found)
            with few_variants(cut_keys=False):
                draft.extend(features, positions, slots, expected)
        assert bool(expected.data.any())
        torch.testing.assert_close(found.data, expected.data, rtol=2e-2, atol=2e-2)
