"""The n-gram store: SGLang's vectors, and the same trees and evictions as a slow reference on any
input.
"""

import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.ngram.trie import NgramDrafter, NgramRules
from foredraft.trees.draft_tree import EMPTY, DraftTree, paths
from testing.ngram_reference import ReferenceTrie, propose
from testing.ngram_trie import NgramTrie
from testing.rounds import rounds


def path_set(tree: DraftTree) -> set[tuple[int, ...]]:
    found = [tuple(path) for path in paths(tree)[1:]]
    assert len(set(found)) == len(found)
    return set(found)


def vectors_trie(match_type: str) -> NgramTrie:
    trie = NgramTrie(1000, 1, 6, 6, 1, 3, match_type)  # type: ignore[arg-type]
    for sequence in (
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 7, 8, 9],
        [1, 2, 3, 7, 8, 10],
        [5, 3, 4, 11, 12, 13],
    ):
        trie.insert(sequence)
    return trie


@pytest.mark.parametrize(
    ("match_type", "context", "want"),
    [
        ("BFS", [1, 2, 3], "4 7 4.11 4.5 7.8 4.5.6 7.8.10"),
        ("BFS", [9, 3], "7 4 7.8 4.5 4.11 4.5.6 4.11.12"),
        ("PROB", [1, 2, 3], "4 7 4.5 7.8 4.5.6 7.8.9 7.8.10"),
        ("PROB", [9, 3], "7 4 7.8 4.5 4.11 7.8.9 7.8.10"),
        ("BFS", [99], ""),
        ("PROB", [99], ""),
    ],
)
def test_sglang_vectors(match_type: str, context: list[int], want: str) -> None:
    tree = vectors_trie(match_type).match(context, 7)
    assert path_set(tree) == {tuple(map(int, path.split("."))) for path in want.split()}


rules_strategy = st.builds(
    lambda low, extra, branch, breadth, more, kind: NgramRules(
        low, low + extra, branch, breadth, breadth + more, kind
    ),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.sampled_from(["BFS", "PROB"]),
)


@settings(max_examples=rounds(100, 250))
@given(
    rules=rules_strategy,
    capacity=st.integers(2, 25) | st.just(10_000),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 12)),
        max_size=12,
    ),
)
def test_same_trees_and_evictions_as_the_reference(
    rules: NgramRules, capacity: int, steps: list[tuple[int, list[int], int]]
) -> None:
    drafter, trie = NgramDrafter(rules, capacity), ReferenceTrie(capacity, rules.branch_length)
    # Slots 0 and 1 share a scope, slot 2 has its own, slot 3 keeps to its own text.
    scopes = {0: ("a", 0), 1: ("a", 0), 2: ("b", 1), 3: (None, -1)}
    histories: dict[int, list[int]] = {slot: [] for slot in scopes}
    for slot, (scope, _) in scopes.items():
        drafter.begin(slot, scope)
    for slot, tokens, max_nodes in steps:
        number = scopes[slot][1]
        if number >= 0:
            trie.extend(number, histories[slot], tokens)
        drafter.extend(slot, tokens)
        histories[slot] += tokens
        assert drafter._trie.dump() == trie.dump()
        assert drafter.num_nodes == len(trie.nodes) <= capacity
        tree = drafter.propose(slot, max_nodes)
        want, longest = propose(
            rules,
            trie if number >= 0 else None,
            number,
            histories[slot],
            histories[slot],
            max_nodes,
        )
        assert path_set(tree) == want
        if max_nodes:
            assert drafter.match_length(slot) == longest


@settings(max_examples=100)
@given(
    rules=rules_strategy,
    sequences=st.lists(st.lists(st.integers(0, 4), max_size=15), max_size=6),
    context=st.lists(st.integers(0, 5), max_size=10),
    max_nodes=st.integers(1, 20),
)
def test_match_of_any_context(
    rules: NgramRules, sequences: list[list[int]], context: list[int], max_nodes: int
) -> None:
    trie = NgramTrie(
        5000,
        rules.min_window,
        rules.max_window,
        rules.branch_length,
        rules.min_breadth,
        rules.max_breadth,
        rules.match_type,
    )
    reference = ReferenceTrie(5000, rules.branch_length)
    for sequence in sequences:
        trie.insert(sequence)
        reference.extend(0, [], sequence)
    want, _ = propose(rules, reference, 0, None, context, max_nodes)
    assert path_set(trie.match(context, max_nodes)) == want


def test_growing_a_sequence_counts_each_window_once() -> None:
    whole, pieces = NgramDrafter(NgramRules()), NgramDrafter(NgramRules())
    rng = random.Random(0)
    tokens = [rng.randrange(20) for _ in range(500)]
    whole.begin(0, "s")
    pieces.begin(0, "s")
    whole.extend(0, tokens)
    while tokens:
        size = rng.randrange(8)
        pieces.extend(0, tokens[:size])
        tokens = tokens[size:]
    assert whole._trie.dump() == pieces._trie.dump()


def test_own_text_comes_before_others_at_equal_match_length() -> None:
    drafter = NgramDrafter(NgramRules(max_breadth=1))
    drafter.begin(0, "s")
    drafter.extend(0, [1, 2, 3, 50, 1, 2, 3])
    drafter.begin(1, "s")
    drafter.extend(1, [1, 2, 3, 60, 1, 2, 3, 60])
    assert drafter.propose(0, 1).tokens == (50,)
    drafter.begin(2, "s")
    drafter.extend(2, [9, 2, 3])
    assert drafter.propose(2, 1).tokens == (60,)


def test_a_copy_runs_as_far_as_there_is_room() -> None:
    drafter = NgramDrafter(NgramRules())
    drafter.begin(0, None)
    drafter.extend(0, [*range(100, 200), *range(100, 112)])
    tree = drafter.propose(0, 40)
    assert tree.tokens == tuple(range(112, 152))
    assert tree.parents == tuple(range(-1, 39))
    assert drafter.match_length(0) == 12


def test_scopes_never_mix() -> None:
    drafter = NgramDrafter(NgramRules())
    for slot, scope in ((0, "a"), (1, "b"), (2, None)):
        drafter.begin(slot, scope)
    drafter.extend(0, [1, 2, 3, 4, 5])
    drafter.extend(1, [1, 2, 3])
    drafter.extend(2, [1, 2, 3])
    assert drafter.propose(1, 8) == EMPTY
    assert drafter.propose(2, 8) == EMPTY
    drafter.release(0)
    drafter.begin(0, "a")
    drafter.extend(0, [2, 3])
    assert drafter.propose(0, 8).tokens == (4, 5)


def test_slots_are_released_and_names_of_dead_scopes_forgotten() -> None:
    drafter = NgramDrafter(NgramRules(branch_length=4), capacity=50)
    for slot in range(3000):
        drafter.begin(slot, f"key {slot}")
        drafter.extend(slot, [slot, 1, 2])
        drafter.release(slot)
    drafter.release(7)
    assert not drafter._contexts
    assert drafter.num_nodes <= 50
    assert len(drafter._scope_ids) <= 1024
    with pytest.raises(KeyError):
        drafter.extend(1, [1])
    drafter.begin(1, "x")
    with pytest.raises(ValueError, match="in use"):
        drafter.begin(1, "x")


@pytest.mark.parametrize("bad", [[-1], [2**31], [2**64], [-(2**70)], [1, 2, -5]])
def test_ids_out_of_range_are_refused_as_a_whole(bad: list[int]) -> None:
    drafter = NgramDrafter(NgramRules())
    drafter.begin(0, "s")
    with pytest.raises(ValueError, match="token ids"):
        drafter.extend(0, bad)
    with pytest.raises(ValueError, match="token ids"):
        NgramTrie(10).match(bad, 3)
    assert drafter.num_nodes == 0


@pytest.mark.parametrize("bad", [[True], [1.0], ["1"], [None], 5, None])
def test_other_types_are_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="token ids"):
        NgramTrie(10).insert(bad)  # type: ignore[arg-type]


def test_nothing_in_nothing_out() -> None:
    trie = NgramTrie(10)
    trie.insert([])
    assert (
        trie.match([], 5)
        == trie.match([1], 5)
        == trie.match([1], 0)
        == trie.match([1], -3)
        == EMPTY
    )
    trie.insert([1, 2])
    assert trie.match([1], 10**9) == DraftTree((2,), (-1,))
    assert trie.match((1,), 5) == DraftTree((2,), (-1,))


def test_bad_settings_are_refused() -> None:
    for wrong in (
        {"min_window": 0},
        {"min_window": 5, "max_window": 4},
        {"max_window": 65},
        {"branch_length": 1},
        {"min_breadth": 0},
        {"min_breadth": 3, "max_breadth": 2},
        {"match_type": "DFS"},
    ):
        with pytest.raises(ValueError, match=r"window|branch|breadth|match_type"):
            NgramRules(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity"):
        NgramTrie(1)


def test_memory_follows_use_and_stays_bounded() -> None:
    trie = NgramTrie(10_000_000)
    assert trie.num_bytes < 100_000
    rng = random.Random(1)
    small = NgramTrie(20_000)
    for _ in range(20):
        sequence = [rng.randrange(262_144) for _ in range(1000)]
        trie.insert(sequence)
        small.insert(sequence)
    assert trie.num_nodes > 300_000
    assert trie.num_bytes / trie.num_nodes < 100
    assert small.num_nodes == 20_000
    assert small.num_bytes / 20_000 < 60


def test_the_module_needs_no_torch() -> None:
    code = (
        "import sys, draft_service.ngram.trie; sys.exit('torch' in sys.modules or 'numpy' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
