"""Heads that n-grams go over, and prompts that repeat themselves or each other."""

import random

from foredraft.types import SamplingParams
from testing.block_drafts import tiny_block, tiny_peagle
from testing.draft_heads import TinyHead, tiny_head
from testing.engines import Job

HEADS: dict[str, TinyHead] = {
    "eagle3": tiny_head("EAGLE3", 3),
    "dspark": tiny_block("DSPARK", 4, markov="rnn"),
    "peagle": tiny_peagle(3),
}


def repeated_jobs(number: int) -> list[Job]:
    """Returns jobs whose prompts say the same twice, greedy and seeded in turn."""
    rng = random.Random(0)
    twice = [rng.randrange(2, 126) for _ in range(20)] * 2
    return [
        Job(
            twice + [rng.randrange(2, 126) for _ in range(3 + 5 * i)],
            SamplingParams(temperature=0.7 * (i % 2), max_new_tokens=60, ignore_eos=True, seed=i),
        )
        for i in range(number)
    ]


def jobs_with_prefix(number: int, num_common: int, num_new: int) -> list[Job]:
    """Returns jobs whose prompts have their beginning in common, greedy and seeded in turn."""
    rng = random.Random(0)
    common = [rng.randrange(2, 126) for _ in range(num_common)]
    return [
        Job(
            common + [rng.randrange(2, 126) for _ in range(3 + 5 * i)],
            SamplingParams(
                temperature=0.8 * (i % 2), max_new_tokens=num_new, ignore_eos=True, seed=i
            ),
        )
        for i in range(number)
    ]
