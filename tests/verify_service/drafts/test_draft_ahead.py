"""Trees that were asked for while the target computed: what is left of them, and that they are used
where text is copied.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.trees.draft_tree import DraftTree
from foredraft.types import SamplingParams, SpeculationParams
from testing.checkpoints import make_checkpoint
from testing.engines import Harness, Job, running_engine
from verify_service.drafts.draft_ahead import DraftAhead
from verify_service.drafts.proposals import Drafted, DraftRequest, Proposals
from verify_service.engine.tree_sizes import TreeSizes
from verify_service.metrics import DRAFTS_AHEAD
from verify_service.scheduler.request import Sequence
from verify_service.scheduler.step_plan import DecodeSlot

CHAIN = DraftTree((1, 2, 3, 4, 5, 6), (-1, 0, 1, 2, 3, 4))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    """Trees without equal siblings, over three tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, 12))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return set(found)


@given(tree=trees(), tokens=st.lists(st.integers(0, 2), max_size=5))
def test_what_is_left_is_what_continues_the_tokens(tree: DraftTree, tokens: list[int]) -> None:
    path, known = tree.follow(tokens), paths(tree)
    inside = max(n for n in range(len(tokens) + 1) if n == 0 or tuple(tokens[:n]) in known)
    done = tuple(tokens[:inside])
    assert tuple(tree.tokens[node] for node in path) == done
    assert [tree.parents[node] for node in path] == [-1, *path][:inside]
    rest = tree.below(path[-1] if path else -1)
    assert paths(rest) == {p[inside:] for p in known if len(p) > inside and p[:inside] == done}
    assert all(parent < node for node, parent in enumerate(rest.parents))
    ahead, one = DraftAhead(), sequence(*tokens)
    ahead.keep(one, 1, Drafted(tree, 0))
    ahead.take([DraftRequest(one, 4)])
    was_followed = inside == len(tokens) or (inside > 0 and not rest.tokens)
    assert ahead.num_nodes(DraftRequest(one, 4)) == (9 if was_followed else 4)


def sequence(*output: int, max_new: int = 50, **asked: int) -> Sequence:
    made = Sequence(1, [9], SamplingParams(max_new_tokens=max_new), SpeculationParams(**asked))
    made.append_tokens(list(output))
    return made


def test_more_is_asked_for_only_while_text_is_copied() -> None:
    ahead, copying = DraftAhead(), sequence()
    want = DraftRequest(copying, 4)
    assert ahead.num_nodes(want) == 4
    ahead.keep(copying, 1, Drafted(CHAIN.first(4), 2))
    copying.append_tokens([1, 2, 3, 4, 5])  # all of it, and a token of the target's own
    assert ahead.take([want]) is None
    assert ahead.num_nodes(want) == 9
    assert ahead.num_nodes(DraftRequest(copying, 4, is_trial=True)) == 4
    ahead.keep(copying, 6, Drafted(CHAIN, 3))
    copying.append_tokens([1, 2])
    taken = ahead.take([want])
    assert taken == {1: Drafted(DraftTree((3, 4, 5, 6), (-1, 0, 1, 2)), 3)}
    copying.append_tokens([7])
    assert ahead.take([want]) is None
    assert ahead.num_nodes(want) == 4


def test_nobody_goes_without_waiting_unless_all_do() -> None:
    ahead, one, other = (
        DraftAhead(),
        sequence(),
        Sequence(2, [9], SamplingParams(max_new_tokens=50)),
    )
    ahead.keep(one, 1, Drafted(CHAIN, 0))
    assert ahead.take([DraftRequest(one, 4), DraftRequest(other, 0)]) is not None
    assert ahead.take([DraftRequest(one, 4), DraftRequest(other, 4, is_trial=True)]) is not None
    assert ahead.take([DraftRequest(one, 4), DraftRequest(other, 4)]) is None
    assert ahead.take([DraftRequest(one, 0)]) is None


def test_too_little_is_left_as_it_is_unless_the_output_ends_there() -> None:
    ahead, one = DraftAhead(), sequence()
    ahead.keep(one, 1, Drafted(CHAIN, 0))
    one.append_tokens([1, 2, 3, 4])
    assert ahead.take([DraftRequest(one, 6)]) is None
    assert ahead.take([DraftRequest(one, 4)]) is not None
    ending = sequence(max_new=7)
    ahead.keep(ending, 1, Drafted(CHAIN, 0))
    ending.append_tokens([1, 2, 3, 4])
    assert ahead.take([DraftRequest(ending, 6)]) is not None


def test_nothing_is_kept_of_what_has_ended() -> None:
    ahead, ended = DraftAhead(), sequence(max_new=1)
    ahead.keep(ended, 1, Drafted(CHAIN, 0))
    ended.append_tokens([1])
    ahead.forget(1)
    ahead.keep(ended, 1, Drafted(CHAIN, 0))  # an answer that came after its end
    assert not ahead._kept


def test_bounds_of_a_request_hold() -> None:
    ahead, one = DraftAhead(), sequence(num_steps=2)
    ahead.keep(one, 1, Drafted(CHAIN.first(2), 0))
    one.append_tokens([1, 2, 3])
    ahead.take([DraftRequest(one, 6)])
    assert ahead.num_nodes(DraftRequest(one, 6)) == 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ahead") / "target")


@pytest.fixture(scope="module")
def ngram(target: Path) -> Iterator[Harness]:
    with running_engine(target, "NGRAM", draft_step_timeout=5.0) as harness:
        yield harness


def copying(count: int) -> list[Job]:
    """A random model that is made to say one token again and again."""
    sampling = SamplingParams(
        temperature=0.0, max_new_tokens=160, ignore_eos=True, logit_bias={5: 100.0}
    )
    return [Job([6, 7, 8 + i], sampling) for i in range(count)]


@pytest.mark.parametrize("count", [1, 3])
def test_steps_that_copy_wait_for_nothing(
    target: Path, ngram: Harness, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    widest = 0
    trees = TreeSizes.trees

    def watch(self: TreeSizes, slots: list[DecodeSlot], proposals: Proposals) -> list[DraftTree]:
        nonlocal widest
        for slot in slots:
            size = len(proposals.of(slot.seq).tree)
            assert size <= slot.max_tree_nodes
            widest = max(widest, size)
        return trees(self, slots, proposals)

    monkeypatch.setattr(TreeSizes, "trees", watch)
    with running_engine(target) as plain:
        expected = [result.tokens for result in plain.run(copying(count))]
    before = DRAFTS_AHEAD._value.get()
    assert [result.tokens for result in ngram.run(copying(count))] == expected
    assert DRAFTS_AHEAD._value.get() > before
    assert 0 < widest <= 11
    ngram.check_nothing_left()
    assert not ngram.engine._drafts.each[0]._ahead._kept


def test_a_kill_while_answers_are_under_way_changes_nothing(target: Path, ngram: Harness) -> None:
    with running_engine(target) as plain:
        expected = [result.tokens for result in plain.run(copying(3))]
    ngram.draft.pause()
    work = copying(3)
    assert [result.tokens for result in ngram.run(work)] == expected
    ngram.draft.kill()
    ngram.draft.start()
    ngram.wait_for_draft()
    assert [result.tokens for result in ngram.run(work)] == expected
    ngram.check_nothing_left()
