"""Sequences that come, grow, wait, and leave, as a draft sees them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from testing.draft_cases import SAMPLINGS
from testing.head_verifier import Verifier, text

Shape = tuple[int, int, int]


def life(
    verifier: Verifier,
    seed: int,
    num_rounds: int,
    first_counts: Sequence[int],
    later_counts: Sequence[int],
    wish: Callable[[random.Random], Shape],
) -> list[Any]:
    """Runs steps of up to six sequences and returns their answers.

    Args:
        seed: Seed of texts and choices.
        first_counts: Numbers of tokens that a sequence may begin with.
        later_counts: Numbers of tokens that it may grow by.
        wish: Returns steps, topk and tokens of a tree to ask for.
    """
    rng = random.Random(seed)
    answers = []
    live: set[int] = set()
    for step in range(num_rounds):
        released = tuple(slot for slot in live if rng.random() < 0.1)
        live -= set(released)
        for slot in released:
            verifier.release(slot)
        messages = []
        for slot in rng.sample(range(6), rng.randrange(1, 7)):
            count = rng.choice(later_counts if slot in live else first_counts)
            if len(verifier.tokens.get(slot, ())) + count > 150:
                continue
            live.add(slot)
            shape = wish(rng)
            wanted = shape if rng.random() < 0.8 else None
            words = text(1000 * seed + 10 * step + slot, count)
            messages.append(verifier.news(slot, words, wanted, SAMPLINGS[slot % 3]))
            if messages[-1].HasField("begin") and rng.random() < 0.3:
                messages[-1].begin.valid_from = 1
        answers.append(verifier.step(*messages, released=released))
    return answers
