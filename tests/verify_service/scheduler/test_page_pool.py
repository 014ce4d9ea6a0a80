"""Page numbers, counts and runs."""

import random

import pytest

from verify_service.scheduler.page_pool import PagePool


def num_runs(pages):
    return sum(b != a + 1 for a, b in zip([-2, *pages], pages, strict=False))


def test_growing_sequences_keep_to_runs_of_their_own():
    pool = PagePool(1024, 16)
    tables = [pool.allocate(3) for _ in range(8)]
    for _ in range(60):
        for pages in tables:
            pages += pool.allocate(1, pages[-1])
    assert [num_runs(pages) for pages in tables] == [1] * 8


def test_a_broken_run_goes_on_in_a_long_one():
    pool = PagePool(32, 16)
    first = pool.allocate(8)
    second = pool.allocate(16)
    pool.release(first[2:4])
    more = pool.allocate(4, near=first[1])
    assert more[:2] == first[2:4]
    assert num_runs(more) == 2
    pool.release(second)
    assert num_runs(pool.allocate(16)) == 1


def test_counts():
    pool = PagePool(4, 16)
    pages = pool.allocate(2)
    generations = [pool.generation(page) for page in pages]
    pool.retain(pages)
    pool.release(pages)
    assert [pool.count(page) for page in pages] == [1, 1]
    assert pool.num_free == 2
    pool.release(pages)
    assert pool.num_free == 4
    assert pool.allocate(2) == pages
    assert [pool.generation(page) for page in pages] == [g + 1 for g in generations]


def test_misuse_is_an_error():
    pool = PagePool(4, 16)
    with pytest.raises(RuntimeError, match="5 pages asked of 4"):
        pool.allocate(5)
    with pytest.raises(RuntimeError, match="retained"):
        pool.retain([0])
    with pytest.raises(RuntimeError, match="released"):
        pool.release([0])
    with pytest.raises(RuntimeError, match="watched"):
        pool.watch(0)
    with pytest.raises(RuntimeError, match="not watched"):
        pool.unwatch(0)
    with pytest.raises(ValueError, match="pages"):
        PagePool(0, 16)
    (page,) = pool.allocate(1)
    pool.watch(page)
    with pytest.raises(RuntimeError, match="while a cache watches"):
        pool.release([page])


def test_idle_pages_are_counted_and_reported_in_order_of_release():
    pool = PagePool(8, 16)
    idle = []
    pool.on_idle(idle.append)
    pages = pool.allocate(3)
    pool.retain(pages)
    for page in pages:
        pool.watch(page)
    assert pool.num_idle == 0
    pool.release(reversed(pages))
    assert idle == pages[::-1]
    assert pool.num_idle == 3
    pool.retain(pages[:1])
    assert pool.num_idle == 2
    pool.unwatch(pages[1])
    assert pool.num_idle == 1
    assert [pool.is_idle(page) for page in pages] == [False, False, True]


def test_check_integrity_names_the_page():
    pool = PagePool(4, 16)
    (page,) = pool.allocate(1)
    pool.check_integrity({page: 1})
    with pytest.raises(RuntimeError, match=f"page {page} has 1 references but 0 holders"):
        pool.check_integrity({})


@pytest.mark.parametrize("seed", range(5))
def test_random_use_against_plain_counts(seed):
    rng = random.Random(seed)
    pool = PagePool(rng.randint(1, 60), 16)
    held: list[int] = []  # one entry per reference
    for _ in range(2000):
        if rng.random() < 0.5:
            count = rng.randint(0, pool.num_free)
            near = rng.choice([None, rng.randrange(pool.num_pages)])
            pages = pool.allocate(min(count, 6), near)
            assert not set(pages) & set(held)
            assert len(set(pages)) == len(pages) == min(count, 6)
            held += pages
        elif held and rng.random() < 0.3:
            page = rng.choice(held)
            pool.retain([page])
            held.append(page)
        else:
            rng.shuffle(held)
            count = rng.randint(0, min(8, len(held)))
            pool.release(held[:count])
            del held[:count]
        pool.check_integrity({page: held.count(page) for page in held})
