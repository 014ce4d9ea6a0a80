"""Pool, prefix tree, draft marks and scheduler together, under random traffic, against a model of
what lies in every KV slot: each key that a sequence attends to must have been written for exactly
its own tokens before it."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foredraft.types import FinishReason
from testing.rounds import rounds
from testing.scheduled_engine import Engine, Request
from verify_service.scheduler.page_pool import PagePool


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        seed=st.integers(0, 2**32),
        page_size=st.integers(1, 4),
        num_pages=st.integers(4, 24),
        max_running_requests=st.integers(1, 5),
        chunked_prefill_size=st.integers(1, 12),
        bounds_rows=st.booleans(),
        admission_headroom=st.sampled_from([0, 2, 64]),
        look_ahead=st.integers(0, 1),
        max_nodes=st.integers(0, 9),
    )
    def start(self, seed, page_size, num_pages, max_nodes, **options):
        pool = PagePool(num_pages, page_size)
        self.engine = Engine(seed, pool, max_nodes, max_queue=12, **options)

    @rule(
        requests=st.lists(
            st.builds(
                Request,
                text=st.integers(0, 1),
                length=st.integers(1, 24),
                ending=st.integers(1, 2),
                max_new_tokens=st.integers(1, 24),
                priority=st.sampled_from([0, 0, 0, 1, -1]),
                patience=st.sampled_from([None, None, None, None, 9]),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def add(self, requests):
        for request in requests:
            self.engine.add(request)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.engine.now += 1
            self.engine.step()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(choice=st.integers(0, 1000))
    def cancel(self, choice):
        live = self.engine.live
        seq = live[choice % len(live)]
        assert self.engine.scheduler.cancel(seq.request_id)
        plan = self.engine.step()
        assert seq in plan.ended
        assert seq.finish_reason is FinishReason.CANCELLED
        assert seq.pages == []
        assert seq.slot is None

    @rule()
    def restart_draft(self):
        self.engine.restart_draft()

    @rule()
    def flush_cache(self):
        self.engine.tree.clear()
        assert self.engine.scheduler.pool.num_idle == 0

    @invariant()
    def is_sound(self):
        self.engine.scheduler.check_integrity()
        for seq in self.engine.scheduler.running:
            self.engine.check_keys(seq, seq.num_computed)
        late = [seq.deadline for seq in self.engine.live]
        assert all(deadline is None or deadline > self.engine.now - 1 for deadline in late)

    def teardown(self):
        self.engine.drain()


SchedulerMachine.TestCase.settings = settings(
    max_examples=rounds(100, 300),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_scheduler_under_random_traffic = SchedulerMachine.TestCase


@pytest.mark.parametrize("scarce", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_scheduler_under_heavy_load(seed, scarce):
    """Longer and denser than what hypothesis draws; `scarce` has prefills in want of pages too."""
    rng = random.Random(seed)
    pool = PagePool(rng.randint(8, 24 if scarce else 40), rng.randint(1, 4))
    engine = Engine(
        seed,
        pool,
        max_nodes=rng.choice([0, 3, 8]),
        max_running_requests=rng.randint(2, 8),
        chunked_prefill_size=rng.randint(1, 6 if scarce else 24),
        bounds_rows=rng.random() < 0.5,
        admission_headroom=0 if scarce else rng.choice([0, 4, 64]),
        max_queue=rng.randint(2, 20),
    )
    for _ in range(200):
        while rng.random() < 0.4:
            engine.add(
                Request(
                    text=rng.randint(0, 1),
                    length=rng.choice([1, 2, 3, 8, 20]) if scarce else rng.randint(1, 24),
                    ending=rng.randint(1, 2),
                    max_new_tokens=rng.choice([1, 24]) if scarce else rng.randint(1, 24),
                    priority=rng.choice([0, 0, 0, 1, -1]),
                    patience=rng.choice([None, None, None, 30]),
                )
            )
        if rng.random() < 0.03 and engine.live:
            engine.scheduler.cancel(rng.choice(engine.live).request_id)
        if rng.random() < 0.03:
            engine.restart_draft()
        engine.now += 1
        engine.step()
        engine.scheduler.check_integrity()
    engine.drain()
