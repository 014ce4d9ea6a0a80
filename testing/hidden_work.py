"""Jobs for engines whose draft reads hidden states (`hidden_drafts`), and their texts."""

import random
from pathlib import Path

from foredraft.types import SamplingParams
from testing.checkpoints import SMALL, VOCAB_SIZE
from testing.engines import Harness, Job, running_engine
from testing.hidden_drafts import HiddenDrafter

WIDTH = SMALL["hidden_size"]
FLAGS = {"page_size": 8, "chunked_prefill_size": 20, "max_running_requests": 8}


def jobs(count: int, num_new: int = 24, temperature: float = 0.0, seed: int = 3) -> list[Job]:
    """Returns prompts of many lengths, some with common prefixes that end at a page's border or
    inside a page.
    """
    rng = random.Random(seed)
    families = [[rng.randrange(2, VOCAB_SIZE) for _ in range(80)] for _ in range(3)]
    made = []
    for i in range(count):
        prefix = rng.choice(families)[: rng.choice([0, 8, 16, 31, 32, 40, 64, 77])]
        own = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        sampling = SamplingParams(
            temperature=temperature, max_new_tokens=num_new, ignore_eos=True, seed=i
        )
        made.append(Job(prefix + own, sampling))
    return made


def texts(target: Path, work: list[Job]) -> list[list[int]]:
    """Returns prompts and outputs, by plain decoding."""
    with running_engine(target, **FLAGS) as harness:
        results = harness.run(work)
    return [job.prompt + result.tokens for job, result in zip(work, results, strict=True)]


def run(harness: Harness, drafter: HiddenDrafter, work: list[Job]) -> float:
    """Runs jobs whose texts the drafter knows, and checks the output; returns the share of
    drafted tokens that was accepted.
    """
    harness.wait_for_draft()
    results = harness.run(work)
    expected = drafter.texts
    for job, result in zip(work, results, strict=True):
        assert job.prompt + result.tokens in expected
    steps = sum(result.finish.verify_steps for result in results)
    return sum(len(result.tokens) for result in results) / steps
