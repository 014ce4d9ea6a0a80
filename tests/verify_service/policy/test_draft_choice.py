"""Which draft a sequence gets, in a model of steps: the one that gives more tokens a second, soon, and after a change too."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from verify_service.policy.choice import ChoiceHistory, DraftChoice
from verify_service.policy.step_time import GridTimes, RowTimes, StepTimes

ROWS = RowTimes([1, 2, 4, 8, 16, 32], [0.010, 0.0105, 0.0115, 0.0135, 0.0175, 0.0255])
GRID = GridTimes({(b, r): 0.004 + 2e-6 * b * r for b in (1, 8, 32) for r in (1, 4, 8, 12)})


@dataclass
class Draft:
    """Proposes `nodes` of which each is right with chance `acceptance`, given the one before it."""

    nodes: int
    acceptance: float
    own_seconds: float
    is_up: bool = True

    def propose(self, rng: random.Random) -> int:
        for i in range(self.nodes):
            if rng.random() >= self.acceptance:
                return i
        return self.nodes


@dataclass
class Model:
    """A batch of sequences that never end, one step after the other."""

    drafts: list[Draft]
    times: StepTimes
    batch: int = 1
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.choice = DraftChoice(len(self.drafts), self.times)
        self.histories = [self.begin() for _ in range(self.batch)]
        self.num_changes = 0
        self.tokens, self.seconds = 0, 0.0

    @property
    def up(self) -> list[bool]:
        return [draft.is_up for draft in self.drafts]

    def begin(self) -> ChoiceHistory:
        return self.choice.begin(self.up, self.batch)

    def step(self) -> list[int]:
        choice, batch = self.choice, self.batch
        before = [history.chosen for history in self.histories]
        chosen = [choice.choose(history, self.up, batch) for history in self.histories]
        self.num_changes += sum(a != b for a, b in zip(before, chosen, strict=True))
        rows, wait = batch, 0.0
        for number, draft in enumerate(self.drafts):
            asked = chosen.count(number)
            is_trial = draft.is_up and asked < batch and choice.may_try(number, batch - asked)
            for history, mine in zip(self.histories, chosen, strict=True):
                if draft.is_up and (mine == number or is_trial):
                    accepted = draft.propose(self.rng)
                    choice.record(history, number, draft.nodes, accepted)
                    if mine == number:
                        self.tokens += accepted
                        rows += draft.nodes
            if draft.is_up and (asked or is_trial):
                choice.answered(number, asked or batch, draft.own_seconds, draft.own_seconds)
            if draft.is_up and asked:
                choice.waited(number, asked, draft.own_seconds + 3e-4)
                wait = max(wait, draft.own_seconds + 3e-4)
        per_sequence = -(-rows // batch)
        seconds = self.times.seconds(batch, per_sequence if self.times.is_padded else rows) + wait
        self.tokens += batch
        self.seconds += seconds
        choice.stepped(seconds)
        return chosen

    def run(self, steps: int) -> list[int]:
        return [number for _ in range(steps) for number in self.step()]


def share(chosen: list[int], number: int) -> float:
    return chosen.count(number) / len(chosen)


GOOD, POOR = Draft(5, 0.8, 0.002), Draft(5, 0.2, 0.002)


def copy(draft: Draft) -> Draft:
    return Draft(draft.nodes, draft.acceptance, draft.own_seconds)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("times", [ROWS, GRID], ids=["cpu", "gpu"])
@pytest.mark.parametrize("better", [0, 1])
def test_the_better_draft_is_chosen_soon_and_kept(
    times: StepTimes, batch: int, better: int
) -> None:
    drafts = [copy(GOOD if number == better else POOR) for number in (0, 1)]
    model = Model(drafts, times, batch)
    model.run(60)
    assert share(model.run(300), better) > 0.95
    assert model.num_changes <= 3 * batch


def test_cheap_guesses_win_over_slightly_better_ones_that_are_waited_for() -> None:
    model = Model([Draft(5, 0.7, 0.012), Draft(5, 0.65, 0.0001)], ROWS)
    model.run(60)
    assert share(model.run(200), 1) > 0.95


def test_few_good_nodes_win_over_many_where_rows_cost() -> None:
    model = Model([Draft(24, 0.5, 0.0005), Draft(3, 0.5, 0.0005)], ROWS)
    model.run(80)
    assert share(model.run(200), 1) > 0.95


@pytest.mark.parametrize("times", [ROWS, GRID], ids=["cpu", "gpu"])
def test_a_change_is_noticed(times: StepTimes) -> None:
    model = Model([copy(GOOD), copy(POOR)], times)
    model.run(100)
    for first, second in ((0.2, 0.8), (0.8, 0.2)):
        model.drafts[0].acceptance, model.drafts[1].acceptance = first, second
        model.run(100)
        assert share(model.run(100), int(second > first)) > 0.9


def test_a_dead_draft_is_never_chosen_and_comes_back() -> None:
    model = Model([copy(GOOD), copy(POOR)], ROWS, batch=4)
    model.run(60)
    model.drafts[0].is_up = False
    assert set(model.run(200)) == {1}
    model.drafts[0].is_up = True
    model.run(40)
    assert share(model.run(100), 0) > 0.95


def test_without_any_draft_nothing_is_chosen_anew() -> None:
    model = Model([copy(GOOD), copy(POOR)], ROWS)
    model.run(60)
    for draft in model.drafts:
        draft.is_up = False
    assert set(model.run(50)) == {0}


def test_a_slow_draft_loses_its_sequences_and_gets_them_back() -> None:
    model = Model([copy(GOOD), Draft(5, 0.5, 0.0005)], ROWS, batch=2)
    model.run(60)
    model.drafts[0].own_seconds = 0.05
    model.run(60)
    assert share(model.run(200), 1) > 0.95
    model.drafts[0].own_seconds = 0.002
    model.run(600)  # trials of a draft that is slow are rare
    assert share(model.run(100), 0) > 0.9


def test_equal_drafts_are_not_changed_all_the_time() -> None:
    model = Model([copy(GOOD), copy(GOOD)], ROWS, batch=4)
    model.run(1000)
    assert model.num_changes < 80  # of 4,000 choices


def test_trials_take_a_small_part_of_the_time() -> None:
    tried = 0
    model = Model([copy(GOOD), Draft(5, 0.1, 0.004)], ROWS)
    may_try: Callable[[int, int], bool] = model.choice.may_try

    def counting(draft: int, sequences: int) -> bool:
        nonlocal tried
        is_tried = may_try(draft, sequences)
        tried += is_tried and draft == 1
        return is_tried

    model.choice.may_try = counting  # type: ignore[method-assign]
    model.run(1000)
    assert tried > 5
    assert tried * 0.004 < 0.02 * model.seconds


@pytest.mark.parametrize("times", [ROWS, GRID], ids=["cpu", "gpu"])
@pytest.mark.parametrize("acceptances", [(0.8, 0.3), (0.3, 0.8), (0.6, 0.6)])
def test_the_choice_costs_little_beside_always_the_better_one(
    times: StepTimes, acceptances: tuple[float, float]
) -> None:
    rates = []
    for numbers in ((0, 1), (0,), (1,)):
        model = Model([Draft(5, acceptances[number], 0.002) for number in numbers], times, batch=4)
        model.run(60)
        model.tokens, model.seconds = 0, 0.0
        model.run(1500)
        rates.append(model.tokens / model.seconds)
    assert rates[0] > 0.96 * max(rates[1:])


def test_a_new_sequence_begins_with_what_is_best_for_others() -> None:
    model = Model([copy(POOR), copy(GOOD)], ROWS, batch=4)
    model.run(100)
    assert model.begin().chosen == 1


def test_a_new_sequence_does_not_begin_with_what_nobody_has_tried() -> None:
    choice = DraftChoice(2, ROWS)
    choice.answered(0, 4, 0.002, 0.002)  # the other one seems to take no time
    assert choice.begin([True, True], 4).chosen == 0
    assert choice.begin([False, True], 4).chosen == 1
    others = choice.begin([True, True], 4)
    for _ in range(3):
        choice.record(others, 1, 5, 4)
    assert choice.begin([True, True], 4).chosen == 1


@pytest.mark.parametrize("times", [ROWS, GRID], ids=["cpu", "gpu"])
@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_best_of_three_is_chosen(times: StepTimes, best: int) -> None:
    drafts = [Draft(5, 0.8 if number == best else 0.3, 0.002) for number in range(3)]
    model = Model(drafts, times, batch=4)
    model.run(100)
    assert share(model.run(300), best) > 0.9
    model.drafts[best].is_up = False
    assert best not in model.run(100)
