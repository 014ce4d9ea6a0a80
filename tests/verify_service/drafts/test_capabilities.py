"""Tests the capabilities that drafts report, and how a verifier reads them."""

from pathlib import Path

import pytest

from draft_service.drafters import create_drafter
from draft_service.drafters.base import Drafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.algorithms import ALGORITHMS
from foredraft.config.services import DraftConfig
from foredraft.models.speculation import resolve
from testing.block_drafts import tiny_block, tiny_peagle
from testing.checkpoints import make_checkpoint
from testing.draft_heads import save_head, tiny_head
from verify_service.drafts.capabilities import (
    DraftCapabilities,
    layers_to_capture,
    read_final_states,
)

Info = draft_pb2.GetDraftInfoResponse
FREE, PER_LEVEL = draft_pb2.DRAFT_COST_FREE, draft_pb2.DRAFT_COST_PER_LEVEL
PER_PROPOSAL = draft_pb2.DRAFT_COST_PER_PROPOSAL
TREES, CHAINS = draft_pb2.PROPOSAL_SHAPE_TREES, draft_pb2.PROPOSAL_SHAPE_CHAINS
BLOCKS = draft_pb2.PROPOSAL_SHAPE_BLOCKS

HEADS = {
    "EAGLE": lambda: tiny_head("EAGLE", 1),
    "EAGLE3": lambda: tiny_head("EAGLE3", 1),
    "DFLASH": lambda: tiny_block("DFLASH", 1),
    "DSPARK": lambda: tiny_block("DSPARK", 1),
    "PEAGLE": lambda: tiny_peagle(1),
}
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 5,
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("capabilities") / "target", seed=5)


def drafter(algorithm: str, target: Path, folder: Path, **flags: int) -> Drafter:
    path = ""
    if algorithm == "STANDALONE":
        path = str(make_checkpoint(folder / "draft"))
    elif algorithm in HEADS:
        path = str(save_head(HEADS[algorithm](), folder))
    config = DraftConfig(
        model_path=str(target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=path,
        num_threads=1,
        device="cpu",
        **flags,  # type: ignore[arg-type]
    )
    return create_drafter(resolve(config, on_cpu=True))


@pytest.mark.parametrize(
    ("algorithm", "flags", "proposes", "cost"),
    [
        ("NGRAM", {}, TREES, FREE),
        ("STANDALONE", TREE, TREES, PER_LEVEL),
        ("STANDALONE", {"speculative_num_steps": 3}, CHAINS, PER_LEVEL),
        ("EAGLE", TREE, TREES, PER_LEVEL),
        ("EAGLE3", {"speculative_num_steps": 3}, CHAINS, PER_LEVEL),
        ("DFLASH", {}, BLOCKS, PER_PROPOSAL),
        ("DSPARK", {}, BLOCKS, PER_PROPOSAL),
        ("PEAGLE", {}, BLOCKS, PER_PROPOSAL),
    ],
)
def test_drafts_say_what_they_propose_at_what_cost(
    algorithm: str,
    flags: dict[str, int],
    proposes: draft_pb2.ProposalShape,
    cost: draft_pb2.DraftCost,
    target: Path,
    tmp_path: Path,
) -> None:
    info = drafter(algorithm, target, tmp_path, **flags).info()
    assert (info.proposes, info.cost) == (proposes, cost)
    found, expected = DraftCapabilities.of(info), DraftCapabilities.expected(ALGORITHMS[algorithm])
    assert found.is_free == expected.is_free == (algorithm == "NGRAM")
    assert found.uses_pages == expected.uses_pages
    assert (found.layers is None) == (expected.layers is None)


def test_of_a_draft_that_does_not_say_weights_tell_the_cost() -> None:
    """As of one from before it could say so."""
    assert DraftCapabilities.of(Info(weight_bytes=0)).is_free
    assert not DraftCapabilities.of(Info(weight_bytes=1)).is_free
    assert not DraftCapabilities.of(Info(cost=PER_LEVEL)).is_free
    assert DraftCapabilities.of(Info(weight_bytes=1, cost=FREE)).is_free


def test_layers_are_told_apart_from_none() -> None:
    hidden = draft_pb2.HiddenNeeds(layers=[1, 2])
    assert DraftCapabilities.of(Info(hidden=hidden)).layers == (1, 2)
    assert DraftCapabilities.of(Info(hidden=draft_pb2.HiddenNeeds())).layers == ()
    assert DraftCapabilities.of(Info()).layers is None


@pytest.mark.parametrize(
    ("read", "captured", "final"),
    [
        ([], None, False),
        ([None, None], None, False),
        ([None, ()], (), True),
        ([(), (2, 0, 2)], (2, 0, 2), True),
        ([(1, 3), None, (1, 3)], (1, 3), False),
        ([(1, 3), (0, 1), ()], (0, 1, 3), True),
    ],
)
def test_steps_capture_what_any_draft_reads(
    read: list[tuple[int, ...] | None], captured: tuple[int, ...] | None, final: bool
) -> None:
    drafts = [DraftCapabilities(layers) for layers in read]
    assert layers_to_capture(drafts) == captured
    assert read_final_states(drafts) == final
