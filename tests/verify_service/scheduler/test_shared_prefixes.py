"""Pages that sequences share, when they are computed once, and what is computed again."""

from testing.scheduling import (
    chunks,
    decodes,
    make_scheduler,
    make_sequence,
    scheduler_of,
    step,
    unlike,
)
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree
from verify_service.scheduler.request import Status


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
    scheduler = scheduler_of(pool, None, max_running_requests=2, chunked_prefill_size=32)
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
        seq.take_pages_changed(1)
    own = b.pages[0]
    for _ in range(4):
        step(scheduler)
    assert a.pages[0] == b.pages[0] != own
    assert b.pages_changed_for(1) == 0
    assert a.pages_changed_for(1) == 1


def test_usable_prefix_has_pages_recomputed_in_place():
    pool = PagePool(64, 4)
    scheduler = scheduler_of(
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


def test_a_page_may_be_shared_only_before_the_same_token():
    pool = PagePool(64, 4)
    scheduler = scheduler_of(
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
