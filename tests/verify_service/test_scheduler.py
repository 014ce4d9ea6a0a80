"""Rules of the scheduler, one by one; `test_scheduler_model.py` holds what must be true always."""

import time

import pytest

from foredraft.errors import InvalidRequest, Overloaded, PromptTooLong
from foredraft.kvcache.page_pool import PagePool
from foredraft.kvcache.prefix_tree import PrefixTree
from foredraft.types import FinishReason, SamplingParams
from verify_service.request import Sequence, Status
from verify_service.scheduler import Scheduler
from verify_service.step_plan import StepPlan

FOREVER = float("-inf")  # a `now` before every deadline


def make_scheduler(num_pages=64, page_size=4, **options) -> Scheduler:
    pool = PagePool(num_pages, page_size)
    options = {"max_running_requests": 8, "chunked_prefill_size": 16} | options
    return Scheduler(pool, PrefixTree(pool), **options)


def make_sequence(name, prompt, max_new_tokens=8, **fields) -> Sequence:
    prompt = list(range(100, 100 + prompt)) if isinstance(prompt, int) else list(prompt)
    request_id = number(name)
    return Sequence(request_id, prompt, SamplingParams(max_new_tokens=max_new_tokens), **fields)


def number(name) -> int:
    return int.from_bytes(name.encode(), "big")


def name(seq) -> str:
    return seq.request_id.to_bytes(16, "big").lstrip(b"\0").decode()


def unlike(start, length):
    """A prompt that shares no page with others of another `start`."""
    return [start * 10_000 + i for i in range(length)]


def run(scheduler, plan, tokens=1, next_token=7):
    """Commits a plan as the engine would: one token per finished chunk, `tokens` per decode."""
    for chunk in plan.prefill:
        appended = chunk.seq.append_tokens([next_token]) if chunk.is_last else None
        scheduler.on_committed(chunk.seq, chunk.num_tokens)
        if appended and appended.finish_reason:
            scheduler.finish(chunk.seq)
    for slot in plan.decode:
        appended = slot.seq.append_tokens([next_token] * min(tokens, slot.max_tree_nodes + 1))
        scheduler.on_committed(slot.seq, appended.num_kept)
        if appended.finish_reason:
            scheduler.finish(slot.seq)
    scheduler.check_integrity()


def step(scheduler, nodes=0, tokens=1, now=FOREVER) -> StepPlan:
    plan = scheduler.schedule(lambda seqs, _: [nodes] * len(seqs), now)
    run(scheduler, plan, tokens)
    return plan


def chunks(plan):
    return [(name(chunk.seq), chunk.start, chunk.num_tokens) for chunk in plan.prefill]


def decodes(plan):
    return [name(slot.seq) for slot in plan.decode]


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


def test_priority_comes_before_arrival():
    scheduler = make_scheduler(max_running_requests=1)
    scheduler.add(make_sequence("first", unlike(1, 4), max_new_tokens=1))
    scheduler.add(make_sequence("second", unlike(2, 4), max_new_tokens=1))
    scheduler.add(make_sequence("urgent", unlike(3, 4), max_new_tokens=1, priority=5))
    order = [name(step(scheduler).admitted[0]) for _ in range(3)]
    assert order == ["urgent", "first", "second"]


def test_a_finished_prefix_is_a_hit_that_leaves_one_token_to_compute():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 12, max_new_tokens=1))
    step(scheduler)
    again = make_sequence("b", 12)
    scheduler.add(again)
    assert chunks(step(scheduler)) == [("b", 8, 4)]
    assert again.num_cached == 8
    longer = make_sequence("c", 13)
    scheduler.add(longer)
    plan = step(scheduler)
    assert "c" in decodes(plan)
    assert longer.num_cached == 12


def test_live_sequences_that_begin_alike_compute_their_prefix_once():
    scheduler = make_scheduler(chunked_prefill_size=32)
    a, b = make_sequence("a", 41), make_sequence("b", 41)
    scheduler.add(a)
    scheduler.add(b)
    assert chunks(step(scheduler)) == [("a", 0, 32)]
    assert chunks(step(scheduler)) == [("a", 32, 9)]
    assert chunks(step(scheduler)) == [("b", 40, 1)]
    assert a.pages[:10] == b.pages[:10]
    assert b.num_cached == 40


def test_a_finished_prefix_is_evicted_from_its_end():
    scheduler = make_scheduler()
    seq = make_sequence("a", 13, max_new_tokens=1)
    scheduler.add(seq)
    step(scheduler)
    assert scheduler.prefix_tree.evict(1) == 1
    again = make_sequence("b", 13)
    scheduler.add(again)
    step(scheduler)
    assert again.num_cached == 8


def test_without_a_prefix_tree_nothing_is_shared():
    pool = PagePool(64, 4)
    scheduler = Scheduler(pool, None, max_running_requests=2, chunked_prefill_size=32)
    for label in "ab":
        seq = make_sequence(label, 13, max_new_tokens=3)
        scheduler.add(seq)
        while seq.status is not Status.FINISHED:
            step(scheduler)
        assert seq.num_cached == 0
        assert pool.num_free == 64


def test_the_same_text_after_another_prefix_is_another_page():
    scheduler = make_scheduler(chunked_prefill_size=8)
    alike = unlike(9, 8)
    for label, head in (("a", 1), ("b", 2)):
        scheduler.add(make_sequence(label, unlike(head, 4) + alike, max_new_tokens=1))
    assert chunks(step(scheduler)) == [("a", 0, 4), ("b", 0, 4)]
    assert chunks(step(scheduler)) == [("a", 4, 4), ("b", 4, 4)]


def test_a_page_filled_twice_ends_as_one():
    scheduler = make_scheduler()
    a, b = make_sequence("a", [1], 20), make_sequence("b", [1], 20)
    scheduler.add(a)
    scheduler.add(b)
    step(scheduler)
    for seq in (a, b):
        seq.pages_seen_by(1)
    own = b.pages[0]
    for _ in range(4):
        step(scheduler)
    assert a.pages[0] == b.pages[0] != own
    assert b.pages_changed_for(1) == 0
    assert a.pages_changed_for(1) == 1


def test_usable_prefix_has_pages_recomputed_in_place():
    pool = PagePool(64, 4)
    scheduler = Scheduler(
        pool,
        PrefixTree(pool),
        max_running_requests=8,
        chunked_prefill_size=16,
        usable_prefix=lambda seq, pages: 4,
    )
    first = make_sequence("a", 12)
    scheduler.add(first)
    step(scheduler)
    seq = make_sequence("b", 12)
    scheduler.add(seq)
    assert chunks(step(scheduler)) == [("b", 4, 8)]
    assert seq.pages[:2] == first.pages[:2]
    assert seq.num_cached == 4


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
    assert scheduler.num_preemptions == len(preempted)


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
    with pytest.raises(PromptTooLong, match="18; this server holds 17"):
        scheduler.add(make_sequence("a", 10, max_new_tokens=8))
    with pytest.raises(PromptTooLong):
        make_scheduler(context_length=16).add(make_sequence("a", 9, max_new_tokens=8))
    with pytest.raises(InvalidRequest, match="prompt"):
        scheduler.add(make_sequence("b", 0))
    with pytest.raises(InvalidRequest, match="in use"):
        scheduler.add(make_sequence("fits", 4))
    while scheduler.has_work:
        step(scheduler, nodes=5, tokens=2)


def test_a_full_queue_refuses():
    scheduler = make_scheduler(max_queue=2)
    scheduler.add(make_sequence("a", 4))
    scheduler.add(make_sequence("b", 4))
    with pytest.raises(Overloaded):
        scheduler.add(make_sequence("c", 4))


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
    waiting = scheduler._waiting[0]
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


def test_default_now_is_the_monotonic_clock():
    scheduler = make_scheduler()
    scheduler.add(make_sequence("a", 4, deadline=time.monotonic() - 1))
    assert scheduler.schedule(lambda seqs, _: [0] * len(seqs)).ended


def test_a_page_may_be_shared_only_before_the_same_token():
    pool = PagePool(64, 4)
    scheduler = Scheduler(
        pool, PrefixTree(pool), max_running_requests=8, chunked_prefill_size=64, look_ahead=1
    )
    prompts = {"a": [7, 7], "b": [7, 9], "c": [8, 7]}
    pages = {}
    for name, ending in prompts.items():
        seq = make_sequence(name, [1, 2, 3, 4, 5, 6, 7, 8, *ending])
        scheduler.add(seq)
        step(scheduler)
        pages[name] = list(seq.pages)
        assert seq.num_cached == {"a": 0, "b": 8, "c": 4}[name]
    assert pages["a"][:2] == pages["b"][:2]
    assert pages["a"][0] == pages["c"][0]
    assert pages["a"][1] != pages["c"][1]
