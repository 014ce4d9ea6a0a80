"""Matching, canonical pages, and eviction of the least recently used."""

import random
from array import array

import pytest

from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixTree, page_keys


@pytest.fixture
def pool():
    return PagePool(32, 2)


@pytest.fixture
def tree(pool):
    return PrefixTree(pool)


def check(tree, *tables):
    holders = tree.holders()
    for page in [page for table in tables for page in table]:
        holders[page] = holders.get(page, 0) + 1
    tree.pool.check_integrity(holders)
    tree.check_integrity()


def match(tree, tokens):
    """Pages of the longest known prefix."""
    keys = page_keys(tokens, tree.pool.page_size)
    return tree.pages(tree.deepen(tree.root, keys, len(keys)))


def insert(tree, tokens, pages):
    """Adds the full pages of `tokens`; gives the page table that the caller holds now."""
    canonical = list(pages)
    node = tree.root
    for i, key in enumerate(page_keys(tokens, tree.pool.page_size)):
        node, canonical[i] = tree.extend(node, key, pages[i])
    return canonical


def cache(tree, tokens):
    """Leaves behind the pages of a request with these tokens."""
    pages = insert(tree, tokens, tree.pool.allocate(len(tokens) // tree.pool.page_size))
    tree.pool.release(reversed(pages))
    return pages


def test_matches_whole_pages_of_the_longest_prefix(tree):
    pages = cache(tree, [1, 2, 3, 4, 5, 6])
    assert match(tree, [1, 2, 3, 4, 5, 6, 7]) == pages
    assert match(tree, [1, 2, 3, 4, 5]) == pages[:2]
    assert match(tree, [1, 2, 3, 9, 5, 6]) == pages[:1]
    assert match(tree, [2, 3, 4]) == []
    assert match(tree, []) == []
    check(tree)


def test_branches_share_their_stem(tree):
    first = cache(tree, [1, 2, 3, 4, 5, 6])
    second = cache(tree, [1, 2, 3, 4, 8, 9])
    assert second[:2] == match(tree, [1, 2, 3, 4]) != first[:2]  # nobody used the older pages
    assert match(tree, [1, 2, 3, 4, 5, 6])[2] == first[2]
    assert tree.num_cached == tree.pool.num_idle == 4
    check(tree)


def test_a_page_in_use_is_canonical_for_who_comes_later(pool, tree):
    tokens = [1, 2, 3, 4]
    first = insert(tree, tokens, pool.allocate(2))
    second = insert(tree, tokens, pool.allocate(2))
    assert first == second
    assert [pool.count(page) for page in first] == [3, 3]
    assert pool.num_free == 30
    check(tree, first, second)


def test_an_unused_page_gives_way_so_that_page_tables_stand(pool, tree):
    old = cache(tree, [1, 2, 3, 4])
    new = pool.allocate(2)
    assert insert(tree, [1, 2, 3, 4], new) == new != old
    assert match(tree, [1, 2, 3, 4]) == new
    assert pool.num_free == 30
    check(tree, new)


def test_evicts_the_least_recently_used_leaf_first(pool, tree):
    a = cache(tree, [1, 2, 3, 4])
    b = cache(tree, [5, 6, 7, 8])
    used = match(tree, [1, 2, 3, 4])
    pool.retain(used)
    pool.release(reversed(used))
    assert tree.evict(1) == 1
    assert match(tree, [5, 6, 7, 8]) == b[:1]
    assert tree.evict(2) == 2
    assert match(tree, [5, 6]) == []
    assert match(tree, [1, 2, 3, 4]) == a[:1]
    check(tree)


def test_never_evicts_what_is_in_use(pool, tree):
    pages = insert(tree, [1, 2, 3, 4], pool.allocate(2))
    cache(tree, [1, 2, 3, 4, 5, 6])
    assert tree.pool.num_idle == 1
    assert tree.evict(10) == 1
    assert match(tree, [1, 2, 3, 4, 5, 6]) == pages
    pool.release(reversed(pages))
    assert tree.clear() == 2
    assert tree.num_cached == 0
    assert pool.num_free == 32
    check(tree)


def test_a_cursor_survives_eviction_of_its_node(pool, tree):
    tokens = [1, 2, 3, 4, 5, 6]
    keys = page_keys(tokens, 2)
    pages = cache(tree, tokens)
    node = tree.deepen(tree.root, keys, 3)
    assert tree.pages(node) == pages
    assert tree.num_idle_on_path(node) == 3
    tree.evict(2)
    assert tree.pages(tree.deepen(node, keys, 3)) == pages[:1]
    tree.evict(1)
    root = tree.deepen(node, keys, 3)
    assert root.depth == 0
    (page,) = pool.allocate(1)
    tree.extend(root, keys[0], page)
    assert match(tree, tokens) == [page]
    check(tree, [page])


def test_page_keys_are_exact():
    assert page_keys([1, 2, 3, 4, 5], 2) == page_keys([1, 2], 2) + page_keys([3, 4], 2)
    assert page_keys([1, 2, 3, 4, 5], 2, 1) == page_keys([3, 4], 2)
    assert page_keys([1, 2], 2, 1) == []
    assert page_keys([2**31 - 1, 1], 2) != page_keys([2**31 - 2, 1], 2)


@pytest.mark.parametrize("seed", range(6))
def test_random_use_against_a_dictionary(seed):
    """The model: every cached prefix with its page, and when it was last in use."""
    rng = random.Random(seed)
    pool = PagePool(24, 2)
    tree = PrefixTree(pool)
    cached: dict[tuple[int, ...], int] = {}
    last_used: dict[tuple[int, ...], int] = {}
    live: list[tuple[list[int], list[int]]] = []
    clock = 0

    def prefixes(tokens):
        return [tuple(tokens[:end]) for end in range(2, len(tokens) + 1, 2)]

    for _ in range(1500):
        action = rng.random()
        tokens = [rng.randint(0, 1) for _ in range(2 * rng.randint(1, 5))]
        if action < 0.4 and pool.num_free >= 5:
            hit = match(tree, tokens)
            assert hit == [cached[prefix] for prefix in prefixes(tokens) if prefix in cached]
            pool.retain(hit)
            table = hit + pool.allocate(len(tokens) // 2 - len(hit))
            table = insert(tree, tokens, table)
            cached |= zip(prefixes(tokens), table, strict=True)
            live.append((tokens, table))
        elif action < 0.8 and live:
            tokens, table = live.pop(rng.randrange(len(live)))
            pool.release(reversed(table))
            used = {prefix for other, _ in live for prefix in prefixes(other)}
            for prefix in reversed(prefixes(tokens)):
                if prefix not in used:
                    clock += 1
                    last_used[prefix] = clock
        else:
            count = rng.randint(0, 6)
            used = {prefix for other, _ in live for prefix in prefixes(other)}
            idle = sorted(set(cached) - used, key=lambda prefix: last_used[prefix])
            assert tree.pool.num_idle == len(idle)
            assert tree.evict(count) == min(count, len(idle))
            for prefix in idle[:count]:
                del cached[prefix]
        assert tree.num_cached == len(cached)
        check(tree, *[table for _, table in live])


def test_keys_may_hold_the_token_after_the_page():
    tokens = [1, 2, 3, 4, 5, 6, 7]
    assert page_keys(tokens, 2, look_ahead=1) == [
        array("i", part).tobytes() for part in ([1, 2, 3], [3, 4, 5], [5, 6, 7])
    ]
    assert page_keys(tokens[:6], 2, look_ahead=1) == page_keys(tokens, 2, look_ahead=1)[:2]
    assert page_keys(tokens, 2, 2, look_ahead=1) == page_keys(tokens, 2, look_ahead=1)[2:]
    assert page_keys([], 2, look_ahead=1) == []
