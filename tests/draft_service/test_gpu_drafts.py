"""Drafts on a GPU: captured graphs give the trees of the CPU, in float32, on the bundled models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafters import create_drafter
from draft_service.drafters.paged import PagedDrafter
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.services import DraftConfig
from foredraft.models.config import ModelConfig
from foredraft.models.registry import BUNDLED_DRAFTS, resolve_model_path
from foredraft.transport.inline import InlineReader
from foredraft.transport.rows import RowFormat
from testing.draft_cases import SAMPLINGS, limits_of
from testing.drafts import attach_request
from testing.head_verifier import Verifier, text
from testing.triton_device import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]


def make(algorithm: str, device: str, **flags: Any) -> PagedDrafter:
    drafter = create_drafter(
        DraftConfig(
            model_path=str(resolve_model_path("foredraft-demo")),
            speculative_algorithm=algorithm,
            speculative_draft_model_path=str(resolve_model_path(BUNDLED_DRAFTS[algorithm])),
            device=device,
            dtype="float32",
            **flags,
        )
    )
    assert isinstance(drafter, PagedDrafter)
    return drafter


def trees(drafter: PagedDrafter, shape: tuple[int, int, int], ordering: str) -> list[Any]:
    """Returns the trees for a few sequences, from random hidden states that are the same every
    time.
    """
    target = ModelConfig.from_dir(Path(resolve_model_path("foredraft-demo")))
    info = drafter.info()
    proposer, _ = drafter.attach(
        attach_request(
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            target_fingerprint=target.fingerprint if info.HasField("hidden") else "",
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            num_pages=200,
            max_batch=8,
            limits=limits_of(shape),
            draft_sampling=ordering,
        )
    )
    width = 1
    if info.HasField("hidden"):
        row = RowFormat.of(info.hidden)
        width, proposer.hidden = row.width, InlineReader(row)
    proposer.prepare()
    verifier = Verifier(proposer, width)
    if not info.HasField("hidden"):
        verifier.shift = 0
        verifier.add_hidden = lambda *_: None  # type: ignore[method-assign]
    answers = []
    for step in range(12):
        messages = []
        for slot in range(1 + step % 6):
            count = (
                5 + 3 * slot if slot not in verifier.tokens else 1 + (slot + step) % (shape[0] + 1)
            )
            wanted = None if (slot + step) % 5 == 4 else shape
            words = text(100 * step + slot, count)
            messages.append(verifier.news(slot, words, wanted, SAMPLINGS[slot % 3]))
        answers.append(verifier.step(*messages))
    proposer.close()
    return answers


@pytest.mark.parametrize("ordering", ["topk", "coupled"])
@pytest.mark.parametrize("shape", [(3, 1, 4), (5, 4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", list(BUNDLED_DRAFTS))
def test_the_cpus_trees(algorithm: str, shape: tuple[int, int, int], ordering: str) -> None:
    expected = trees(make(algorithm, "cpu"), shape, ordering)
    for flags in ({}, {"disable_cuda_graph": True}, {"cuda_graph_max_bs": 2}):
        found = trees(make(algorithm, "cuda", **flags), shape, ordering)
        pairs = [
            (want[slot], got[slot])
            for want, got in zip(expected, found, strict=True)
            for slot in want
        ]
        assert [set(want) for want in expected] == [set(got) for got in found]
        # Where two candidates are within rounding of each other, either may come first.
        assert sum(want == got for want, got in pairs) >= len(pairs) - 1, flags


def test_attaching_again_and_again_leaves_nothing() -> None:
    drafter = make("EAGLE3", "cuda")
    left = []
    for _ in range(6):
        trees(drafter, (3, 1, 4), "topk")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        left.append(torch.cuda.mem_get_info()[0])
    assert len(set(left[2:])) == 1, left


def test_what_is_reported_of_memory() -> None:
    info = make("EAGLE3", "cuda").info()
    assert info.device_uuid == str(torch.cuda.get_device_properties(0).uuid)
    assert list(info.shared_weights) == ["embedding"]
    assert info.shared_weight_bytes > 0
    assert info.workspace_bytes > 0
    assert isinstance(info, draft_pb2.GetDraftInfoResponse)
