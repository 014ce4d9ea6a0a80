"""A tiny target, and the drafters for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters.heads import HeadDrafter
from draft_service.drafters.paged import PagedDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from foredraft.config.services import DraftConfig
from testing import tiny_tokenizers
from testing.checkpoints import make_checkpoint
from testing.draft_cases import KINDS
from testing.draft_heads import VOCAB, TinyHead, save_head


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("target"), seed=5)


@pytest.fixture(scope="module")
def make(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., HeadDrafter]:
    """Loads a head as the service does; `algorithm` may name another than the head's."""

    def load(head: TinyHead, algorithm: str = "", **flags: Any) -> HeadDrafter:
        folder = save_head(head, tmp_path_factory.mktemp("head"))
        return HeadDrafter.load(
            DraftConfig(
                model_path=str(target),
                speculative_algorithm=algorithm or head.algorithm,
                speculative_draft_model_path=str(folder),
                num_threads=1,
                device="cpu",
                **flags,
            )
        )

    return load


@pytest.fixture(scope="module")
def drafters(
    make: Callable[..., HeadDrafter], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, PagedDrafter]:
    made: dict[str, PagedDrafter] = {kind: make(KINDS[kind]) for kind in ("eagle", "eagle3", "mtp")}
    folder = tmp_path_factory.mktemp("map")
    torch.save(torch.arange(1, VOCAB, 2), folder / "map.pt")
    for kind, architecture, flags in (
        ("standalone", "LlamaForCausalLM", {}),
        ("windowed", "Gemma3ForCausalLM", {}),
        ("reduced", "LlamaForCausalLM", {"speculative_token_map": str(folder / "map.pt")}),
        ("padded", "LlamaForCausalLM", {}),
    ):
        size = VOCAB + 40 if kind == "padded" else VOCAB
        folder = make_checkpoint(
            tmp_path_factory.mktemp(kind), architecture, seed=8, vocab_size=size
        )
        if kind == "padded":
            tiny_tokenizers.save(tiny_tokenizers.byte_level(), folder)
        made[kind] = StandaloneDrafter.load(
            DraftConfig(
                speculative_algorithm="STANDALONE",
                speculative_draft_model_path=str(folder),
                num_threads=1,
                device="cpu",
                **flags,
            )
        )
    return made
