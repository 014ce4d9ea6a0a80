"""Prompts beside running streams: how long a step may get, and that prompts end all the same."""

import math

import pytest

from testing.scheduling import chunks, decodes, make_scheduler, make_sequence, step, unlike
from verify_service.scheduler.prefill_budget import FEWEST_TOKENS, PrefillBudget
from verify_service.scheduler.step_plan import PrefillChunk

KEY_COST = 4e-5
PLAIN = 0.006


class Machine:
    """A card that takes so many seconds for a step's prompts: by brute force, one token after the
    other.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self.seconds_per_token = seconds_per_token

    def seconds(self, start: int, num_tokens: int) -> float:
        work = sum(1 + KEY_COST * key for key in range(start, start + num_tokens))
        return work * self.seconds_per_token


def chunk_of(start: int, num_tokens: int) -> PrefillChunk:
    return PrefillChunk(make_sequence("a", start + num_tokens), start, num_tokens)


def read_prompt(budget: PrefillBudget, machine: Machine, length: int) -> list[float]:
    """Reads a prompt beside decodes; seconds that each step's prompts took."""
    delays, done = [], 0
    while done < length:
        budget.observe(PLAIN, (), True)
        num_tokens = min(budget.tokens(done), length - done)
        delays.append(machine.seconds(done, num_tokens))
        budget.observe(PLAIN + delays[-1], (chunk_of(done, num_tokens),), True)
        done += num_tokens
    return delays


@pytest.mark.parametrize("delay", [0.02, 0.1])
def test_a_long_prompt_delays_streams_no_longer_than_allowed(delay: float) -> None:
    budget, machine = PrefillBudget(8192, delay, KEY_COST), Machine(22e-6)
    budget.observe(machine.seconds(0, 300), (chunk_of(0, 300),), False)
    delays = read_prompt(budget, machine, 100_000)
    assert max(delays) <= 1.05 * delay
    # And no shorter steps than it must: each but the last takes what is allowed or the whole chunk.
    assert min(delays[:-1]) >= 0.8 * min(delay, machine.seconds(0, 8192))


def test_a_slower_card_is_learnt_within_a_few_steps() -> None:
    budget = PrefillBudget(8192, 0.1, KEY_COST)
    budget.observe(0.05, (chunk_of(0, 2000),), False)
    delays = read_prompt(budget, Machine(75e-6), 60_000)
    assert max(delays[8:]) <= 0.115


def test_what_every_step_takes_is_not_blamed_on_prompts() -> None:
    """Small prompts beside slow steps: were the whole step counted, the chunk would shrink to the
    least.
    """
    budget, machine = PrefillBudget(4096, 0.01, 0.0), Machine(20e-6)
    budget.observe(machine.seconds(0, 100), (chunk_of(0, 100),), False)
    for _ in range(50):
        budget.observe(0.05, (), True)
        num_tokens = budget.tokens(0)
        budget.observe(0.05 + machine.seconds(0, num_tokens), (chunk_of(0, num_tokens),), True)
    assert budget.tokens(0) == pytest.approx(500, rel=0.05)


def test_no_bound_and_nothing_known_give_the_whole_chunk() -> None:
    free = PrefillBudget(512)
    free.observe(9.0, (chunk_of(0, 512),), True)
    assert free.tokens(0) == 512
    assert PrefillBudget(512, 0.001).tokens(0) == 512


def test_a_bound_that_cannot_be_met_lets_prompts_end() -> None:
    budget = PrefillBudget(512, 1e-6)
    budget.observe(1.0, (chunk_of(0, 512),), True)
    assert budget.tokens(10_000) == FEWEST_TOKENS
    assert PrefillBudget(16, math.inf).tokens(0) == 16


def test_the_scheduler_bounds_chunks_beside_decodes_alone() -> None:
    scheduler = make_scheduler(400, chunked_prefill_size=512, max_decode_delay=0.01)
    scheduler.add(make_sequence("a", unlike(1, 600)))
    plan = step(scheduler)
    assert chunks(plan) == [("a", 0, 512)]
    scheduler.prefill_budget.observe(0.0512, plan.prefill, False)  # 0.1 ms a token
    assert chunks(step(scheduler)) == [("a", 512, 88)]  # nobody decodes yet
    scheduler.add(make_sequence("b", unlike(2, 600)))
    plan = step(scheduler)
    assert decodes(plan) == ["a"]
    assert chunks(plan) == [("b", 0, 100)]


def test_a_chunk_bounds_all_rows_of_a_step_where_it_is_asked_to() -> None:
    scheduler = make_scheduler(2000, chunked_prefill_size=512, bounds_rows=True)
    for name in "abc":
        scheduler.add(make_sequence(name, unlike(ord(name), 40)))
    assert chunks(step(scheduler)) == [("a", 0, 40), ("b", 0, 40), ("c", 0, 40)]
    scheduler.add(make_sequence("d", unlike(1, 5000), 9))
    for start in (0, 508):  # three rows less, and up to the end of a page
        plan = step(scheduler)
        assert decodes(plan) == ["a", "b", "c"]
        assert chunks(plan) == [("d", start, 508)]
    plan = step(scheduler, nodes=7)
    assert chunks(plan) == [("d", 1016, 508)]
    # Trees as large as those of the step before.
    assert chunks(step(scheduler, nodes=7)) == [("d", 1524, 488)]


def test_streams_leave_half_of_a_chunk_to_prompts() -> None:
    budget = PrefillBudget(512, 0.001, bounds_rows=True)
    assert [budget.tokens(0, rows) for rows in (0, 12, 256, 4000)] == [512, 500, 256, 256]
    budget.observe(1.0, (chunk_of(0, 512),), True)
    assert budget.tokens(0, 4000) == FEWEST_TOKENS
