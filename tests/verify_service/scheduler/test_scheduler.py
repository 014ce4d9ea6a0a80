"""Rules of the scheduler, one by one; `test_scheduler_model.py` holds what must be true always."""

import time

import pytest

from foredraft.errors import InvalidRequest, Overloaded, PromptTooLong
from foredraft.types import FinishReason
from testing.scheduling import (
    FOREVER,
    chunks,
    decodes,
    make_scheduler,
    make_sequence,
    name,
    number,
    run,
    step,
    unlike,
)
from verify_service.scheduler.request import Status


def test_a_sequence_prefills_in_chunks_then_decodes_to_its_end():
    scheduler = make_scheduler()
    seq = make_sequence("a", 40, max_new_tokens=3)
    scheduler.add(seq)
    assert [chunks(step(scheduler)) for _ in range(3)] == [
        [("a", 0, 16)],
        [("a", 16, 16)],
        [("a", 32, 8)],
    ]
    assert seq.is_decoding
    assert seq.output == [7]
    assert decodes(step(scheduler)) == ["a"]
    assert decodes(step(scheduler)) == ["a"]
    assert seq.finish_reason is FinishReason.LENGTH
    assert seq.status is Status.FINISHED
    assert not scheduler.has_work
    assert scheduler.schedule(lambda seqs, _: [0] * len(seqs)).is_empty
    assert scheduler.pool.num_free + scheduler.pool.num_idle == scheduler.pool.num_pages


def test_a_long_prompt_delays_a_running_decode_by_one_chunk_at_most():
    scheduler = make_scheduler(num_pages=400)
    scheduler.add(make_sequence("decode", unlike(1, 4), max_new_tokens=50))
    step(scheduler)
    scheduler.add(make_sequence("long", unlike(2, 400)))
    for _ in range(25):
        plan = step(scheduler)
        assert decodes(plan) == ["decode"]
        assert sum(chunk.num_tokens for chunk in plan.prefill) == 16


def test_a_short_prompt_does_not_wait_behind_a_long_one():
    scheduler = make_scheduler(num_pages=400)
    scheduler.add(make_sequence("long", unlike(1, 400)))
    scheduler.add(make_sequence("middle", unlike(2, 100)))
    scheduler.add(make_sequence("short", unlike(3, 5)))
    assert chunks(step(scheduler)) == [("long", 0, 8), ("short", 0, 5)]
    assert chunks(step(scheduler)) == [("long", 8, 8), ("middle", 0, 8)]


def test_a_short_prompt_of_lower_priority_does():
    scheduler = make_scheduler(num_pages=400)
    scheduler.add(make_sequence("long", unlike(1, 400)))
    scheduler.add(make_sequence("middle", unlike(2, 100)))
    scheduler.add(make_sequence("short", unlike(3, 5), priority=-1))
    assert chunks(step(scheduler)) == [("long", 0, 8), ("middle", 0, 8)]


def test_priority_comes_before_arrival():
    scheduler = make_scheduler(max_running_requests=1)
    scheduler.add(make_sequence("first", unlike(1, 4), max_new_tokens=1))
    scheduler.add(make_sequence("second", unlike(2, 4), max_new_tokens=1))
    scheduler.add(make_sequence("urgent", unlike(3, 4), max_new_tokens=1, priority=5))
    order = [name(step(scheduler).admitted[0]) for _ in range(3)]
    assert order == ["urgent", "first", "second"]


def test_decode_pages_cover_root_and_tree():
    scheduler = make_scheduler()
    seq = make_sequence("a", 8, max_new_tokens=20)
    scheduler.add(seq)
    step(scheduler)
    plan = scheduler.schedule(lambda seqs, _: [9] * len(seqs))
    assert plan.decode[0].max_tree_nodes == 9
    assert len(seq.pages) * 4 >= seq.num_computed + 1 + 9
    run(scheduler, plan, tokens=10)
    assert seq.num_output == 11


def test_trees_shrink_before_anybody_is_preempted():
    scheduler = make_scheduler(num_pages=5, admission_headroom=0)
    scheduler.add(make_sequence("a", unlike(1, 7), max_new_tokens=6))
    scheduler.add(make_sequence("b", unlike(2, 7), max_new_tokens=6))
    step(scheduler, nodes=8)
    plan = scheduler.schedule(lambda seqs, _: [8] * len(seqs))
    assert [slot.max_tree_nodes for slot in plan.decode] == [4, 0]
    run(scheduler, plan)
    plan = scheduler.schedule(
        lambda seqs, _: [8] * len(seqs)
    )  # "b" takes the page that "a" held for its tree
    assert decodes(plan) == ["a"]
    assert plan.preempted == []


def test_preemption_takes_the_youngest_of_the_lowest_priority():
    scheduler = make_scheduler(num_pages=6, admission_headroom=0)
    sequences = {
        "old": make_sequence("old", unlike(1, 7), max_new_tokens=12),
        "low": make_sequence("low", unlike(2, 7), max_new_tokens=12, priority=-1),
        "young": make_sequence("young", unlike(3, 7), max_new_tokens=12),
    }
    for seq in sequences.values():
        scheduler.add(seq)
    preempted = []
    for _ in range(60):
        preempted += [name(seq) for seq in step(scheduler).preempted]
        if not scheduler.has_work:
            break
    assert preempted[:2] == ["low", "young"]
    assert all(seq.output == [7] * 12 for seq in sequences.values())
    assert sum(seq.num_preemptions for seq in sequences.values()) == len(preempted)


def test_a_preempted_sequence_resumes_from_its_cached_pages():
    scheduler = make_scheduler(num_pages=7, admission_headroom=0)
    old = make_sequence("old", unlike(1, 7), max_new_tokens=17)
    young = make_sequence("young", unlike(2, 7), max_new_tokens=9)
    scheduler.add(old)
    scheduler.add(young)
    while not young.num_preemptions:
        plan = step(scheduler)
    output = young.output
    assert young.slot is None
    assert young.pages == []
    assert plan.released_slots == [1]
    while young.status is not Status.FINISHED:
        plan = step(scheduler)
        if young in plan.admitted:
            assert young.output[: len(output)] == output
    assert old.output == [7] * 17
    assert young.output == [7] * 9
    assert young.num_cached == 0


def test_admission_keeps_the_headroom():
    scheduler = make_scheduler(num_pages=8, admission_headroom=8)
    for i in range(3):
        scheduler.add(make_sequence(str(i), unlike(i + 1, 8), max_new_tokens=12))
    preempted = []
    plan = step(scheduler)
    assert [name(seq) for seq in plan.admitted] == ["0", "1"]
    while scheduler.has_work:
        preempted += step(scheduler).preempted
    assert len(preempted) <= 1


def test_what_never_fits_is_refused():
    scheduler = make_scheduler(num_pages=4)  # 16 keys, so 17 tokens
    scheduler.add(make_sequence("fits", 9, max_new_tokens=8))
    with pytest.raises(PromptTooLong, match="18; this model's maximum context length is 17 tokens"):
        scheduler.add(make_sequence("a", 10, max_new_tokens=8))
    with pytest.raises(PromptTooLong):
        make_scheduler(context_length=16).add(make_sequence("a", 9, max_new_tokens=8))
    with pytest.raises(PromptTooLong):
        scheduler.add(make_sequence("c", 17, max_new_tokens=1))
    with pytest.raises(InvalidRequest, match="prompt"):
        scheduler.add(make_sequence("b", 0))
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(make_sequence("fits", 4))
    while scheduler.has_work:
        step(scheduler, nodes=5, tokens=2)


def test_a_full_queue_refuses():
    scheduler = make_scheduler(max_queue=2, max_running_requests=3)
    for burst in (5, 3):  # at first there are free slots, too
        for index in range(burst):
            scheduler.add(make_sequence(f"{burst} {index}", 4))
        with pytest.raises(Overloaded):
            scheduler.add(make_sequence("more", 4))
        while scheduler.num_waiting:
            step(scheduler)


@pytest.mark.parametrize("running", [True, False])
def test_cancel_and_deadline_free_pages_and_slot_in_the_next_schedule(running):
    scheduler = make_scheduler()
    scheduler.add(make_sequence("cancelled", 4))
    scheduler.add(make_sequence("late", 4, deadline=10.0))
    if running:
        step(scheduler, now=9.0)
    assert scheduler.cancel(number("cancelled"))
    assert not scheduler.cancel(number("unknown"))
    assert scheduler.cancel(number("cancelled"))
    plan = step(scheduler, now=10.0)
    assert {name(seq): seq.finish_reason for seq in plan.ended} == {
        "cancelled": FinishReason.CANCELLED,
        "late": FinishReason.DEADLINE,
    }
    assert sorted(plan.released_slots) == ([0, 1] if running else [])
    assert plan.is_empty
    assert not scheduler.has_work
    assert scheduler.pool.num_free + scheduler.pool.num_idle == scheduler.pool.num_pages


def test_a_cancelled_name_can_be_used_again_at_once():
    scheduler = make_scheduler()
    first = make_sequence("a", 4, max_new_tokens=1)
    scheduler.add(first)
    scheduler.cancel(number("a"))
    scheduler.finish(first, FinishReason.ERROR)
    second = make_sequence("a", 4)
    scheduler.add(second)
    plan = step(scheduler)
    assert plan.ended == []
    assert plan.admitted == [second]


def test_slots_are_reused_lowest_first():
    scheduler = make_scheduler(max_running_requests=2)
    first, second, third = (make_sequence(name, 4, max_new_tokens=2) for name in "abc")
    for seq in (first, second, third):
        scheduler.add(seq)
    step(scheduler)
    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    scheduler.cancel(number("a"))
    plan = scheduler.schedule(lambda seqs, _: [0] * len(seqs), FOREVER)
    assert plan.released_slots == [0]
    assert plan.admitted == [third]
    assert third.slot == 0


def test_commits_beyond_the_tokens_are_refused():
    scheduler = make_scheduler()
    seq = make_sequence("a", 4)
    scheduler.add(seq)
    scheduler.schedule(lambda seqs, _: [0] * len(seqs))
    with pytest.raises(ValueError, match="4 of 4 uncomputed"):
        scheduler.on_committed(seq, 4)


def test_a_long_wait_in_the_queue_hashes_nothing_anew():
    scheduler = make_scheduler(num_pages=40_000, max_running_requests=1)
    scheduler.add(make_sequence("a", unlike(1, 4), max_new_tokens=100))
    scheduler.add(make_sequence("b", unlike(2, 100_000)))
    for _ in range(3):
        step_keys = scheduler.schedule(lambda seqs, _: [0] * len(seqs))
        run_without_check(scheduler, step_keys)
    waiting = scheduler._queue.waiting[0]
    keys = waiting.page_keys
    run_without_check(scheduler, scheduler.schedule(lambda seqs, _: [0] * len(seqs)))
    assert waiting.page_keys is keys


def run_without_check(scheduler, plan):
    for chunk in plan.prefill:
        if chunk.is_last:
            chunk.seq.append_tokens([7])
        scheduler.on_committed(chunk.seq, chunk.num_tokens)
    for slot in plan.decode:
        slot.seq.append_tokens([7])
        scheduler.on_committed(slot.seq, 1)


def test_a_preempted_sequence_gives_back_its_grammars_memory():
    released = []

    class Grammar:
        is_current = True

        def advance(self, tokens):
            return len(tokens), False

        def release(self):
            released.append(1)

    scheduler = make_scheduler(num_pages=7, admission_headroom=0)
    scheduler.add(make_sequence("old", unlike(1, 7), max_new_tokens=17))
    young = make_sequence("young", unlike(2, 7), max_new_tokens=9)
    young.grammar = Grammar()
    scheduler.add(young)
    while not young.num_preemptions:
        assert not released
        step(scheduler)
    assert released == [1]


def test_the_last_token_gets_no_room_for_a_tree():
    scheduler = make_scheduler()
    seq = make_sequence("a", 7, max_new_tokens=2)
    scheduler.add(seq)
    step(scheduler)
    plan = scheduler.schedule(lambda seqs, _: [9] * len(seqs), FOREVER)
    assert [slot.max_tree_nodes for slot in plan.decode] == [0]
    assert len(seq.pages) == 2


def flying(scheduler, num_nodes=0):
    """Whoever decodes, as if a step were under way."""
    going = list(scheduler.running)
    for seq in going:
        seq.num_in_flight = num_nodes + 1
    return going


def test_a_step_is_planned_ahead_only_while_nobody_joins_or_leaves():
    scheduler = make_scheduler(max_running_requests=2)
    for label in "ab":
        scheduler.add(make_sequence(label, unlike(ord(label), 4)))
    step(scheduler)
    going = flying(scheduler)
    assert scheduler.schedule_ahead(going, 0) is None
    assert scheduler.schedule_ahead([], 0) == "ends"
    scheduler.add(make_sequence("c", unlike(3, 4)))
    assert scheduler.schedule_ahead(going, 0) is None  # there is no slot for it
    scheduler.cancel(number("a"))
    assert scheduler.schedule_ahead(going, 0) == "leaves"
    assert scheduler.schedule(lambda seqs, _: [0] * len(seqs), FOREVER).admitted


def test_no_step_is_planned_ahead_past_a_deadline():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 4, deadline=time.monotonic() + 3600))
    step(scheduler)
    going = flying(scheduler)
    assert scheduler.schedule_ahead(going, 0) is None
    scheduler.add(make_sequence("b", 4, deadline=time.monotonic()))
    assert scheduler.schedule_ahead(going, 0) == "leaves"


def test_no_step_is_planned_ahead_of_a_join():
    scheduler = make_scheduler(max_running_requests=2)
    scheduler.add(make_sequence("a", unlike(1, 4)))
    step(scheduler)
    going = flying(scheduler)
    long = make_sequence("long", unlike(2, 40))
    scheduler.add(long)
    assert scheduler.schedule_ahead(going, 0) == "joins"
    going[0].num_in_flight = 0
    step(scheduler)
    # A place that becomes free is one to join.
    scheduler.add(make_sequence("waits", unlike(3, 4)))
    step(scheduler)
    flying(scheduler)
    assert scheduler.schedule_ahead(going, 0) is None
    scheduler.finish(long)
    assert scheduler.schedule_ahead(going, 0) == "joins"


def test_no_step_is_planned_ahead_while_a_prompt_is_computed():
    scheduler = make_scheduler(max_running_requests=2)
    scheduler.add(make_sequence("a", unlike(1, 4)))
    step(scheduler)
    going = list(scheduler.running)
    long = make_sequence("long", unlike(2, 40))
    scheduler.add(long)
    step(scheduler)
    flying(scheduler)
    long.num_in_flight = 0
    assert scheduler.schedule_ahead(going, 0) == "prompt"


def test_a_step_ahead_gets_pages_for_all_that_may_be_written():
    scheduler = make_scheduler(num_pages=4, admission_headroom=0)  # of 4 keys
    seq = make_sequence("a", 7, max_new_tokens=9)
    scheduler.add(seq)
    step(scheduler)
    # 8 tokens, at most 3 more by the step under way, and the nodes.
    assert scheduler.schedule_ahead(flying(scheduler, 2), 1) is None
    assert len(seq.pages) == 3
    assert scheduler.schedule_ahead(flying(scheduler, 2), 2) is None
    assert len(seq.pages) == 4
    assert scheduler.schedule_ahead(flying(scheduler, 5), 3) == "pages"
    assert len(seq.pages) == 4


def test_default_now_is_the_monotonic_clock():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 4, deadline=time.monotonic() - 1))
    assert scheduler.schedule(lambda seqs, _: [0] * len(seqs)).ended


def test_prompts_behind_a_running_step_leave_their_last_token():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", unlike(1, 4), max_new_tokens=50))
    step(scheduler)
    scheduler.add(make_sequence("b", unlike(2, 9), max_new_tokens=50))
    scheduler.add(make_sequence("c", unlike(3, 1), max_new_tokens=50))
    plan = scheduler.schedule_prompts()
    assert [name(seq) for seq in plan.admitted] == ["b", "c"]
    assert chunks(plan) == [("b", 0, 8)]
    scheduler.on_committed(plan.prefill[0].seq, 8)
    assert not scheduler.schedule_prompts().prefill
    plan = scheduler.schedule(lambda seqs, _: [0] * len(seqs), FOREVER, with_prompts=False)
    assert decodes(plan) == ["a", "b", "c"]
    run(scheduler, plan)


def test_prompts_behind_a_running_step_preempt_nobody():
    scheduler = make_scheduler(num_pages=6, admission_headroom=0)
    scheduler.add(make_sequence("a", unlike(1, 15), max_new_tokens=9))
    step(scheduler)
    scheduler.add(make_sequence("b", unlike(2, 8), max_new_tokens=2, priority=1))
    before = scheduler.num_available_pages
    plan = scheduler.schedule_prompts()
    assert chunks(plan) == [("b", 0, 7)]
    scheduler.on_committed(plan.prefill[0].seq, 7)
    scheduler.add(make_sequence("c", unlike(3, 12), max_new_tokens=2, priority=2))
    assert not scheduler.schedule_prompts().prefill
    assert [name(seq) for seq in scheduler.running] == ["b", "a"]
    assert scheduler.num_available_pages == before - 2


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "scored"])
def test_some_prompts_wait_for_a_step_of_the_host(reason):
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", unlike(1, 4), max_new_tokens=50))
    step(scheduler)
    deadline = 1.0 if reason == "deadline" else None
    seq = make_sequence("b", unlike(2, 9), max_new_tokens=50, deadline=deadline)
    seq.score_from = 0 if reason == "scored" else None
    scheduler.add(seq)
    if reason == "cancelled":
        scheduler.cancel(number("a"))
    assert not scheduler.schedule_prompts().prefill
    assert name(seq) in [name(one) for one in scheduler.running] or seq.status is Status.WAITING
