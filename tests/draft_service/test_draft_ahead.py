"""Drafting ahead: chains that were prepared for an outcome are those that would be drafted after
it, and the verifier has them before the step computes anything.
"""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from draft_service.drafters import graph_drafting
from draft_service.drafters.ahead_policy import AheadPolicy
from draft_service.drafters.graph_drafting import GraphSettings
from draft_service.drafters.paged import PagedDrafter
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.metrics import AHEAD_STEPS
from draft_service.steps.ahead_step import AheadStep
from draft_service.steps.graphs import DraftGraphs
from draft_service.steps.outcomes import ALTERNATIVES
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import AttachRefused
from foredraft.transport.device_exchange import StepSizes
from testing.device_drafts import Driver, LocalExchange, Turn, schedule
from testing.draft_cases import SAMPLINGS, limits_of
from testing.draft_heads import VOCAB
from testing.drafts import attach_request
from testing.plan_attention import PlanAttention
from testing.rounds import rounds

PAGE, MAX_BATCH, LENGTH = 4, 8, 3
CHAIN = (LENGTH, 1, LENGTH + 1)


@contextmanager
def proposing(
    drafter: PagedDrafter,
    shape: tuple[int, int, int],
    ahead: bool,
    ordering: str = "coupled",
    limit: int = MAX_BATCH,
) -> Iterator[tuple[PagedProposer, LocalExchange]]:
    """Attaches a verifier whose steps stay on the device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "attention", PlanAttention())
        patch.setattr(drafter, "graphs", GraphSettings(limit, False, ahead))
        yield from _attached(drafter, shape, ordering)


def _attached(
    drafter: PagedDrafter, shape: tuple[int, int, int], ordering: str
) -> Iterator[tuple[PagedProposer, LocalExchange]]:
    request = attach_request(
        num_pages=320,
        page_size=PAGE,
        limits=limits_of(shape),
        draft_sampling=ordering,
        max_batch=MAX_BATCH,
        tokenizer_fingerprint=drafter.info().tokenizer_fingerprint,
    )
    proposer, _ = drafter.attach(request)
    proposer.exchange = exchange = LocalExchange(
        StepSizes(MAX_BATCH, shape[0] + 1, shape[2] - 1), 0, torch.float32
    )
    proposer.prepare()
    try:
        yield proposer, exchange
    finally:
        proposer.close()


class Watched:
    """Notes what the verifier has been told when a step's first forward begins."""

    def __init__(self, proposer: PagedProposer, exchange: LocalExchange) -> None:
        fixed = proposer._fixed_steps
        assert fixed is not None
        step = fixed.graphs.step
        assert isinstance(step, AheadStep)
        self.drafted: dict[int, int] = {}  # by step: newest one whose trees are there
        self.trees: dict[int, list[Any]] = {}
        self.num_forwards: Counter[int] = Counter()  # by step
        forward = step._forward

        def noting(*arguments: Any) -> Any:
            self.num_forwards.update(exchange.waits[-1:])
            if exchange.waits and exchange.waits[-1] not in self.drafted:
                self.drafted[exchange.waits[-1]] = int(exchange.drafted)
                self.trees[exchange.waits[-1]] = exchange.trees.tolist()
            return forward(*arguments)

        step._forward = noting


def driver_of(end: tuple[PagedProposer, LocalExchange], sampling: dict[str, Any]) -> Driver:
    proposer, exchange = end
    limits = proposer._limits.message
    return Driver(proposer.step, exchange, 0, PAGE, limits, [sampling])


def counted() -> tuple[float, float]:
    hits, misses = (AHEAD_STEPS.labels(name)._value.get() for name in ("hit", "miss"))
    return hits, misses


@pytest.mark.parametrize("num_sequences", [1, 2])
@pytest.mark.parametrize("kind", ["standalone", "windowed", "reduced", "padded"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_hits_and_misses(
    sampling: dict[str, Any], kind: str, num_sequences: int, drafters: dict[str, PagedDrafter]
) -> None:
    """The oracle ranks what follows a text, by value; a target takes one of the first few."""
    drafter, rng = drafters[kind], random.Random(num_sequences)
    before = counted()
    with (
        proposing(drafter, CHAIN, ahead=True) as ahead,
        proposing(drafter, CHAIN, ahead=False) as plain,
        proposing(drafter, (1, 4, 5), ahead=False) as oracle,
    ):
        made, expected, ranking = (driver_of(end, sampling) for end in (ahead, plain, oracle))
        watched = Watched(*ahead)
        begun = [(slot, [5 + slot, 6, 7], True) for slot in range(num_sequences)]
        trees = made.take(Turn(begun, [], False), False)
        assert trees == expected.take(Turn(begun, [], False), False)
        ranking.take(Turn(begun, [], False), False)
        num_hits = num_prepared = 0
        for step in range(rounds(20, 30)):
            news, is_hit = [], True
            for slot, (chain, _) in trees.items():
                # A target that verified less than the chain may take its next token as the last.
                count = rng.randrange(LENGTH + 1)
                choices = following(ranking, slot, chain[:count])
                place = min(rng.choice([0, 1, 2, 3, 3]), len(choices) - 1)
                news.append((slot, [*chain[:count], choices[place]], True))
                is_hit = is_hit and place < ALTERNATIVES
            turn = Turn(news, [], True)
            trees = made.take(turn, True)
            assert trees == expected.take(turn, False)
            ranking.take(turn, False)
            if step:  # the step before stayed on the device too
                num_prepared += 1
                num_hits += is_hit
                told = watched.drafted[made.num_steps]
                assert told == made.num_steps - (not is_hit)
                # What was committed, all but the first drafted token, and S + 1 ahead.
                drafted = 0 if is_hit else LENGTH - 1
                assert watched.num_forwards[made.num_steps] == 1 + drafted + LENGTH + 1
            if step and is_hit:
                rows = [row for row in watched.trees[made.num_steps] if row[1] == [-1, 0, 1]]
                assert all([list(tokens), [-1, 0, 1]] in rows for tokens, _ in trees.values())
    assert 3 < num_hits < num_prepared - 3
    hits, misses = counted()
    assert hits - before[0] == num_hits
    assert misses - before[1] == num_prepared - num_hits


def following(oracle: Driver, slot: int, accepted: Sequence[int]) -> list[int]:
    """Returns the draft's best tokens after a slot's text and some accepted ones, best first."""
    spare = 7  # a slot that nobody uses
    turn = Turn([(spare, [*oracle.tokens[slot], *accepted], True)], [], False)
    turn.released += [spare] if spare in oracle.tokens else []
    [(tokens, _)] = oracle.take(turn, False).values()
    return list(tokens)


@pytest.mark.parametrize("ordering", ["coupled", "topk"])
def test_any_schedule_gives_the_trees_of_steps_by_value(
    ordering: str, drafters: dict[str, PagedDrafter]
) -> None:
    for seed in range(3):
        turns = schedule(seed, 30, LENGTH, VOCAB, 70, max_batch=3)
        found = []
        for ahead in (False, True):
            with proposing(drafters["standalone"], CHAIN, ahead, ordering) as (proposer, exchange):
                sizes = limits_of(CHAIN)
                made = Driver(proposer.step, exchange, 0, PAGE, sizes, SAMPLINGS)
                found.append(made.run(turns, lambda turn: True))
        assert found[0] == found[1]


@pytest.mark.parametrize("shape", [(3, 2, 6), (9, 1, 10)])
def test_trees_and_long_chains_are_refused(
    shape: tuple[int, int, int], drafters: dict[str, PagedDrafter]
) -> None:
    with (
        pytest.raises(AttachRefused, match="trees must be chains of at most 8 tokens"),
        proposing(drafters["standalone"], shape, ahead=True),
    ):
        pass


def test_large_batches_do_not_draft_ahead(drafters: dict[str, PagedDrafter]) -> None:
    with proposing(drafters["standalone"], CHAIN, ahead=True) as (proposer, exchange):
        made = Driver(proposer.step, exchange, 0, PAGE, limits_of(CHAIN), SAMPLINGS)
        watched = Watched(proposer, exchange)
        made.take(Turn([(slot, [5, 6, 7], True) for slot in range(3)], [], False), False)
        for _ in range(4):
            made.take(Turn([(slot, [5], True) for slot in range(3)], [], True), True)
        assert [step - told for step, told in watched.drafted.items()] == [2, 1, 1, 1]
        fixed = proposer._fixed_steps
        assert fixed is not None
        assert isinstance(fixed.graphs.step, AheadStep)
        assert fixed.graphs.step.outcomes.report.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("num_others", "is_wanted", "is_early"), [(0, True, True), (2, True, False), (0, False, False)]
)
def test_only_a_whole_step_that_wants_trees_has_them_early(
    num_others: int, is_wanted: bool, is_early: bool, drafters: dict[str, PagedDrafter]
) -> None:
    """A step of more sequences than a graph holds has two parts."""
    with proposing(drafters["standalone"], CHAIN, ahead=True, limit=2) as (proposer, exchange):
        made = Driver(proposer.step, exchange, 0, PAGE, limits_of(CHAIN), [{}])
        watched = Watched(proposer, exchange)
        made.take(Turn([(slot, [5, 6 + slot], True) for slot in range(4)], [], False), False)
        trees = made.take(Turn([(slot, [5], True) for slot in range(2)], [], True), True)
        # What the draft holds likeliest, of the two sequences that were prepared for.
        news = [(slot, [tokens[0]], is_wanted) for slot, (tokens, _) in trees.items()]
        news += [(2 + other, [5], True) for other in range(num_others)]
        made.take(Turn(news, [], True), True)
        assert watched.drafted[made.num_steps] == made.num_steps - (not is_early)


def test_the_policy_decides(
    drafters: dict[str, PagedDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last step that drafted ahead has prepared is used; the next step has nothing."""
    asked = []

    def is_ahead(policy: AheadPolicy, step: int, batch: int) -> bool:
        asked.append((step, batch))
        return step % 3 > 0

    monkeypatch.setattr(AheadPolicy, "is_ahead", is_ahead)
    with proposing(drafters["standalone"], CHAIN, ahead=True) as (proposer, exchange):
        made = Driver(proposer.step, exchange, 0, PAGE, limits_of(CHAIN), SAMPLINGS)
        watched = Watched(proposer, exchange)
        trees = made.take(Turn([(slot, [5, 6, 7], True) for slot in range(2)], [], False), False)
        for _ in range(9):
            # What the draft holds likeliest.
            news = [(slot, [tokens[0]], True) for slot, (tokens, _) in trees.items()]
            trees = made.take(Turn(news, [], True), True)
    assert asked == [(step, 2) for step in range(2, 11)]
    early = [step for step, told in watched.drafted.items() if told == step]
    assert early == [step for step in range(3, 11) if (step - 1) % 3]


def test_a_report_that_comes_late_changes_no_tree(
    drafters: dict[str, PagedDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_drafting, "MOST_REPORT_SECONDS", 0.0)
    with (
        proposing(drafters["standalone"], CHAIN, ahead=True) as ahead,
        proposing(drafters["standalone"], CHAIN, ahead=False) as plain,
    ):
        made, expected = driver_of(ahead, {}), driver_of(plain, {})
        watched = Watched(*ahead)
        monkeypatch.setattr(DraftGraphs, "outcome_report", [0, 0, 0])
        turn = Turn([(0, [5, 6, 7], True)], [], False)
        for _ in range(6):
            trees = made.take(turn, turn.on_device)
            assert trees == expected.take(turn, False)
            turn = Turn([(0, [trees[0][0][0]], True)], [], True)
        for number in range(3, 7):
            assert watched.drafted[number] == number, "the verifier knows"
            assert watched.num_forwards[number] == 1 + LENGTH - 1 + LENGTH + 1


def test_a_graph_that_prepares_is_captured_before_a_step(
    drafters: dict[str, PagedDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    with proposing(drafters["standalone"], CHAIN, ahead=True) as (proposer, _):
        assert proposer._fixed_steps is not None
        graphs = proposer._fixed_steps.graphs
        monkeypatch.setattr(graphs._graphs, "is_ready", lambda key: key[0] == "draft")
        assert not graphs.is_ready(2, False, False)
        assert graphs.is_ready(3, False, False)


def test_nothing_committed_is_no_hit(drafters: dict[str, PagedDrafter]) -> None:
    with proposing(drafters["standalone"], CHAIN, ahead=True) as (proposer, exchange):
        made = Driver(proposer.step, exchange, 0, PAGE, limits_of(CHAIN), SAMPLINGS)
        watched = Watched(proposer, exchange)
        made.take(Turn([(0, [5, 6, 7], True)], [], False), False)
        made.take(Turn([(0, [5], True)], [], True), True)
        made.num_steps += 1
        exchange.put(0, [], None)
        exchange.send(made.num_steps, True)
        request = draft_pb2.StepRequest(step=made.num_steps)
        request.sequences.add(slot=0, device_row=0).propose.CopyFrom(made.limits)
        proposer.step(request)
        assert watched.drafted[made.num_steps] == made.num_steps - 1
