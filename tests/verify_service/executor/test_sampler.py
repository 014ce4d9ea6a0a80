"""Choosing for a large batch part by part."""

import pytest
import torch

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import SamplingParams, SpeculationParams
from verify_service.executor.choice import sampler as module
from verify_service.executor.choice.sampler import Outcome, Sampler, Thresholds, VerifyRows
from verify_service.executor.choice.simulation import SimulatedAcceptance
from verify_service.scheduler.request import Sequence

VOCAB = 160  # more than the simulated tokens
TREES = (
    DraftTree((3, 5, 9, 7), (-1, -1, 0, 1)),
    DraftTree(),
    DraftTree((1, 2, 3), (-1, 0, 1)),
    DraftTree((8,), (-1,)),
    DraftTree((4, 6, 2, 1, 0), (-1, 0, -1, 2, 3)),
)
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, seed=5, top_p=0.9),
    SamplingParams(temperature=0.7, seed=6, repetition_penalty=1.3, logprobs=1),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=7, top_k=4),
)


def outcomes(simulated: SimulatedAcceptance | None) -> list[Outcome]:
    sampler = Sampler(VOCAB, torch.device("cpu"), frozenset({1}), Thresholds(), simulated)
    batch = [
        VerifyRows(Sequence(i, [2, 3, 4 + i], sampling, SpeculationParams(), frozenset({1})), tree)
        for i, (sampling, tree) in enumerate(zip(SAMPLINGS, TREES, strict=True))
    ]
    num_rows = sum(1 + len(tree) for tree in TREES)
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(2))
    # Trees that are accepted in part.
    row = 0
    for tree in TREES:
        logits[row, list(tree.tokens[:1])] += 20
        row += 1 + len(tree)
    return sampler.choose(batch, logits.to(torch.bfloat16))


@pytest.mark.parametrize("at_once", [1, 6, 9])
@pytest.mark.parametrize("is_simulated", [False, True], ids=["real", "simulated"])
def test_parts_of_a_batch_give_what_the_whole_gives(monkeypatch, at_once, is_simulated):
    def simulated() -> SimulatedAcceptance | None:
        return SimulatedAcceptance(2.5, 3) if is_simulated else None

    whole = outcomes(simulated())
    assert any(outcome.verified.path[1:] for outcome in whole)
    monkeypatch.setattr(module, "CHOSEN_AT_ONCE", at_once)
    assert outcomes(simulated()) == whole


def test_nothing_is_chosen_for_nobody():
    sampler = Sampler(VOCAB, torch.device("cpu"), frozenset(), Thresholds())
    assert sampler.choose([], torch.empty(0, VOCAB)) == []
