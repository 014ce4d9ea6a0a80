"""After its warm-up a draft launches no variant of a kernel that was not launched before, whatever
it has to read.
"""

import random
from collections.abc import Hashable
from typing import Any

import pytest
import torch

from draft_service.drafters.extending import GPU_CHUNK_ROWS, Run, forwards
from draft_service.drafters.module_chain import ModuleChainMethod
from draft_service.drafters.paged_sequences import PagedSequence
from foredraft.trees.draft_tree import EMPTY
from foredraft.types import SamplingParams
from testing.kernel_variants import META, as_on_gpu, recorded_launches
from testing.published_drafts import DRAFTS, make_proposer, some_extensions


class FixedTree:
    """Stands for beams, since no token can be chosen from logits on the meta device."""

    def __init__(self, batch: int, *_: Any) -> None:
        self._batch = batch

    def expand(self, logits: torch.Tensor, token_map: object) -> tuple[torch.Tensor, None]:
        return torch.zeros(self._batch, 1, dtype=torch.int64), None

    def finish(self) -> list[Any]:
        return [EMPTY] * self._batch


@pytest.mark.parametrize("name", DRAFTS)
def test_nothing_is_launched_that_was_not_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_service.drafters.beam_drafting.BeamTree", FixedTree)
    rng = random.Random(name)
    max_batch, max_context = rng.choice(((64, 100_000), (3, 700)))
    with recorded_launches() as met:
        sizes = {"max_batch": max_batch, "max_context": max_context}
        proposer = make_proposer(name, META, as_on_gpu, **sizes)
        with torch.inference_mode():
            proposer._method.warm_up()
            warmed: set[Hashable] = set(met)
            for _ in range(25):
                extensions = some_extensions(rng, max_batch, max_context)
                requests = proposer._method.extend(extensions, proposer.hidden)
                if isinstance(proposer._method, ModuleChainMethod):
                    proposer._method.draft(requests)
                assert met <= warmed, met - warmed
    # Each that the graphs have not launched takes Triton most of a second while the verifier waits
    # for the attach.
    assert 4 <= len(warmed) <= 10


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2049, 5000])
def test_forwards_are_few_and_alike(count: int) -> None:
    rng = random.Random(count)
    runs = []
    left = count
    while left:
        size = rng.randint(1, left)
        sequence = PagedSequence(0, SamplingParams(), 0, size, size)
        runs.append(Run(sequence, 0, [0] * size, True))
        left -= size
    parts = list(forwards(runs, GPU_CHUNK_ROWS))
    sizes = [sum(end - first for _, first, end in part) for part in parts]
    assert sum(sizes) == count
    assert len(sizes) == -(-count // GPU_CHUNK_ROWS)
    assert max(sizes) <= GPU_CHUNK_ROWS
    assert max(sizes) - min(sizes) < len(sizes)
    covered = [0] * len(runs)
    for index, first, end in (one for part in parts for one in part):
        assert covered[index] == first
        covered[index] = end
    assert covered == [len(run.tokens) for run in runs]
