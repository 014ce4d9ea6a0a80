"""Hidden states that are kept as steps gave them, against a twin that gives each step's to its
sequences at once.
"""

import math
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.types import SamplingParams
from verify_service.drafts import hidden_state_buffer, hidden_states
from verify_service.drafts.hidden_states import CommittedRows, HiddenStates
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.settings import DraftSettings
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status
from verify_service.scheduler.step_plan import PrefillChunk

PAGE, NUM_PAGES = 4, 400
SETTINGS = DraftSettings(128, (3, 1), "request", 100)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are put together after so few that a test sees it often."""
    monkeypatch.setattr(hidden_state_buffer, "MOST_ROWS", 97)
    monkeypatch.setattr(hidden_state_buffer, "MANY_ROWS", 6)
    monkeypatch.setattr(hidden_states, "LONG_PROMPT", 5)


class Twin:
    """A pool, its marks and what is kept of hidden states."""

    def __init__(self, pool: PagePool, most_kept: float = math.inf) -> None:
        self.marks = DraftMarks(pool)
        exchange: Any = SimpleNamespace(layers=(), writer=None, fusion=None)
        self.hidden = HiddenStates(exchange, self.marks, SETTINGS, most_kept)

    def state(self, sequence: Sequence) -> tuple[object, ...]:
        """All that a draft could be told of a sequence, and which of its pages it could use."""
        run = self.hidden.run_of(sequence)
        assert run is not None
        first = run.end - run.end % PAGE  # of what is always kept
        rows = run.rows(first).tolist() if run.end > first else []
        is_valid = [self.marks.is_valid(page) for page in sequence.pages]
        return run.start, run.end, run.resend_from, sorted(run.unsent_pages), rows, is_valid


def assert_same(eager: Twin, late: Twin, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        assert eager.state(sequence) == late.state(sequence)
        one, other = eager.hidden.run_of(sequence), late.hidden.run_of(sequence)
        assert one is not None
        assert other is not None
        first = max(one.first, other.first)  # only whole pieces are dropped, and these differ
        if one.end > first:
            assert torch.equal(one.rows(first), other.rows(first))


def rows_of(sequences: list[Sequence], starts: list[int]) -> torch.Tensor:
    return torch.tensor(
        [[s.request_id * 1000.0 + at, at] for s, at in zip(sequences, starts, strict=True)]
    ).view(len(starts), 2)


@pytest.mark.parametrize("seed", range(30))
def test_rows_runs_and_marks_are_those_of_rows_given_at_once(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(NUM_PAGES, PAGE)
    eager, late = Twin(pool), Twin(pool)
    both = (eager.hidden, late.hidden)
    running: list[Sequence] = []
    waiting: list[Sequence] = []
    num_joined = 0
    for _ in range(150):
        if len(running) < 4 and rng.random() < 0.1:
            sequence = (
                waiting.pop() if waiting else Sequence(num_joined, [1] * 20, SamplingParams())
            )
            num_joined += 1
            sequence.status = Status.RUNNING
            before = list(running)
            running.append(sequence)
            starts = [one.num_computed for one in before]
            for one in before:
                one.tokens.append(2)
                commit(one, 1, pool, rng)
            chunks, has_ended = [], False
            for _ in range(rng.randrange(1, 3)):  # in one step, or in two
                count = rng.randrange(1, 8)
                chunks.append(PrefillChunk(sequence, sequence.num_computed, count))
                commit(sequence, count, pool, rng)
                if has_ended := rng.random() < 0.1:  # as with its first token
                    break
            for i, chunk in enumerate(chunks):
                own = [] if i else before
                positions = [*range(chunk.start, chunk.start + chunk.num_tokens)]
                rows = rows_of(
                    own + [sequence] * len(positions), (starts if own else []) + positions
                )
                committed = [
                    CommittedRows(one, at, [j])
                    for j, (one, at) in enumerate(zip(own, starts, strict=False))
                ]
                where = range(len(own), len(rows))
                committed.append(CommittedRows(sequence, chunk.start, where))
                eager.hidden.keep(SimpleNamespace(hidden=rows), committed)  # type: ignore[arg-type]
                late.hidden.keep_step(own, starts if own else [], rows, [chunk])
            if has_ended:
                running.pop()
                sequence.status = Status.FINISHED
                for hidden in both:
                    hidden.drop(sequence)
        flying = list(running)
        if rng.random() < 0.1 and flying:
            gone = running.pop(rng.randrange(len(running)))
            gone.status = rng.choice([Status.FINISHED, Status.WAITING])
            if gone.status is Status.WAITING:  # which does not happen while a step is under way
                flying.remove(gone)
            for hidden in both:
                hidden.drop(gone)
            pool.release(gone.pages)
            gone.pages, gone.num_computed = [], 0
            gone.pages_changed(0)
            if gone.status is Status.WAITING:
                waiting.append(gone)
        if not flying:
            continue
        starts = [sequence.num_computed for sequence in flying]
        for sequence in running:
            sequence.tokens.append(2)
            commit(sequence, 1, pool, rng)
        gathered = rows_of(flying, starts)
        committed = [
            CommittedRows(sequence, start, [row])
            for row, (sequence, start) in enumerate(zip(flying, starts, strict=True))
            if sequence.status is Status.RUNNING
        ]
        eager.hidden.keep(SimpleNamespace(hidden=gathered), committed)  # type: ignore[arg-type]
        if rng.random() < 0.8:
            late.hidden.keep_step(flying, starts, gathered)
        else:
            late.hidden.keep(SimpleNamespace(hidden=gathered), committed)  # type: ignore[arg-type]
        if rng.random() < 0.05 and running:  # the draft is told of one
            sequence = rng.choice(running)
            for hidden in both:
                run = hidden.run_of(sequence)
                assert run is not None
                hidden.sent(run)
            sequence.take_pages_changed(0)
        if rng.random() < 0.05:
            assert_same(eager, late, running)
    assert_same(eager, late, running)


def commit(sequence: Sequence, count: int, pool: PagePool, rng: random.Random) -> None:
    """Commits as the scheduler does, and replaces some pages once they are full."""
    before, sequence.num_computed = sequence.num_computed, sequence.num_computed + count
    missing = pool.pages_for(sequence.num_computed) - len(sequence.pages)
    if missing > 0:
        sequence.pages += pool.allocate(missing)
    for i in range(before // PAGE, sequence.num_computed // PAGE):
        if rng.random() < 0.2:
            [page] = pool.allocate(1)
            pool.release([sequence.pages[i]])
            sequence.pages[i] = page
            sequence.pages_changed(i)


def test_what_is_kept_is_bounded() -> None:
    pool = PagePool(NUM_PAGES, PAGE)
    hidden = Twin(pool, most_kept=70 * 2 * 4).hidden
    sequence = Sequence(0, [1], SamplingParams())
    sequence.status = Status.RUNNING
    sequence.pages = pool.allocate(100)
    for start in range(300):
        sequence.num_computed = start + 1
        hidden.keep_step([sequence], [start], torch.zeros(1, 2))
        assert hidden.kept_bytes <= (70 + 97) * 2 * 4
    run = hidden.run_of(sequence)
    assert run is not None
    assert run.end == 300
    assert run.first > 100


def test_a_preempted_sequence_keeps_what_it_is_given_afterwards() -> None:
    """Also where all its pages were cached, so that no prompt is computed before."""
    pool = PagePool(NUM_PAGES, PAGE)
    hidden = Twin(pool).hidden
    sequence, other = (Sequence(number, [1], SamplingParams()) for number in range(2))
    for one in (sequence, other):
        one.status, one.pages = Status.RUNNING, pool.allocate(4)
    starts = [0, 0]
    for position in range(PAGE):
        starts = [position, position]
        hidden.keep_step([sequence, other], starts, rows_of([sequence, other], starts))
    sequence.status = Status.WAITING
    hidden.drop(sequence)
    sequence.status = Status.RUNNING
    starts = [PAGE, PAGE]
    hidden.keep_step([sequence, other], starts, rows_of([sequence, other], starts))
    run, whole = hidden.run_of(sequence), hidden.run_of(other)
    assert run is not None
    assert whole is not None
    assert (run.start, run.end) == (PAGE, PAGE + 1)
    assert (whole.start, whole.end) == (0, PAGE + 1)
    assert torch.equal(run.rows(PAGE), rows_of([sequence], [PAGE]))


def test_steps_whose_sequences_have_all_ended_are_forgotten() -> None:
    pool = PagePool(NUM_PAGES, PAGE)
    hidden = Twin(pool).hidden
    for number in range(10):
        pair = [Sequence(2 * number + i, [1], SamplingParams()) for i in range(2)]
        for one in pair:
            one.status, one.pages = Status.RUNNING, pool.allocate(5)
        for start in range(20):
            for one in pair:
                one.num_computed = start + 1
            hidden.keep_step(pair, [start, start], rows_of(pair, [start, start]))
            assert hidden._steps.num_rows <= 97
        assert not hidden._runs  # nobody's rows had to be put together
        if number == 9:
            run = hidden.run_of(pair[0])
            assert run is not None
            assert torch.equal(run.rows(0), rows_of([pair[0]] * 20, [*range(20)]))
        for one in pair:
            one.status = Status.FINISHED
            hidden.drop(one)
            pool.release(one.pages)


def test_nothing_stays_of_sequences_that_end() -> None:
    pool = PagePool(NUM_PAGES, PAGE)
    hidden = Twin(pool).hidden
    sequence = Sequence(0, [1], SamplingParams())
    sequence.status, sequence.pages = Status.RUNNING, pool.allocate(20)
    for start in range(33):
        hidden.keep_step([sequence], [start], torch.zeros(1, 2))
    run = hidden.run_of(sequence)
    assert run is not None
    hidden.keep_step([sequence], [33], torch.zeros(1, 2))
    before = size_of(hidden)
    for number in range(1, 1000):  # of one token each, so that no step follows
        ended = Sequence(number, [1], SamplingParams())
        ended.status = Status.FINISHED
        hidden.drop(ended)
    assert size_of(hidden) == before
    hidden.drop_all()
    assert not run.parts  # whoever has been told of it may still know it


def size_of(hidden: HiddenStates) -> int:
    return sum(map(sys.getsizeof, [*vars(hidden).values(), *vars(hidden._steps).values()]))
