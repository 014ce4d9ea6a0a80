"""A tiny target, and the drafters for it."""

from pathlib import Path

import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from draft_service.drafters.paged import PagedDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from foredraft.config.services import DraftConfig
from testing.checkpoints import make_checkpoint
from testing.draft_cases import KINDS
from testing.draft_heads import save_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PagedDrafter]:
    made: dict[str, PagedDrafter] = {}
    for kind in ("eagle", "eagle3", "mtp"):
        folder = save_head(KINDS[kind], tmp_path_factory.mktemp(kind))
        made[kind] = HeadDrafter.load(
            DraftConfig(
                model_path=str(target),
                speculative_algorithm=KINDS[kind].algorithm,
                speculative_draft_model_path=str(folder),
                num_threads=1,
                device="cpu",
            )
        )
    for kind, architecture in (
        ("standalone", "LlamaForCausalLM"),
        ("windowed", "Gemma3ForCausalLM"),
    ):
        folder = make_checkpoint(tmp_path_factory.mktemp(kind), architecture, seed=8)
        made[kind] = StandaloneDrafter.load(
            DraftConfig(
                speculative_algorithm="STANDALONE",
                speculative_draft_model_path=str(folder),
                num_threads=1,
                device="cpu",
            )
        )
    return made
