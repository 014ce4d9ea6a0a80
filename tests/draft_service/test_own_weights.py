"""A draft with the target's own weights is accepted completely, whatever happens to its pages: the
test of everything that lies between an engine's commits and a draft's KV.
"""

import random
from collections.abc import Iterator

import pytest

from foredraft.types import SamplingParams
from testing.checkpoints import VOCAB_SIZE, make_checkpoint
from testing.engines import Harness, Job, running_engine

# So few pages that sequences preempt each other, and chunks shorter than most prompts.
PRESSURE = {
    "page_size": 8,
    "max_total_tokens": 8 * 32,
    "chunked_prefill_size": 20,
    "max_running_requests": 8,
}


def prompts(count: int) -> list[list[int]]:
    """With prefixes in common."""
    rng = random.Random(5)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    return [
        rng.choice(families)[: rng.randrange(41)] + [rng.randrange(2, VOCAB_SIZE) for _ in range(5)]
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    path = make_checkpoint(tmp_path_factory.mktemp("own") / "model")
    flags = {
        "speculative_draft_model_path": str(path),
        "speculative_num_steps": 3,
        "speculative_draft_sampling": "coupled",
        **PRESSURE,
    }
    with running_engine(path, "STANDALONE", **flags) as running:
        running.engine.draft_everything()  # which pays for no draft that is as large as its target
        yield running


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_a_draft_with_the_targets_weights_is_always_right(
    harness: Harness, temperature: float
) -> None:
    sampling = [
        SamplingParams(temperature=temperature, max_new_tokens=72, ignore_eos=True, seed=seed)
        for seed in range(24)
    ]
    jobs = [Job(p, s) for p, s in zip(prompts(24), sampling, strict=True)]
    results = harness.run(jobs)
    harness.check_nothing_left()
    assert sum(result.finish.preemptions for result in results) > 0
    drafted = sum(result.finish.drafted_tokens for result in results)
    assert drafted > sum(len(result.tokens) for result in results) / 2
    # Rounding may decide between two tokens once.
    assert sum(result.finish.accepted_tokens for result in results) >= drafted - 3
