"""What a draft that reads hidden states is told of a sequence, and from where on it reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.types import SamplingParams
from verify_service.drafts.hidden_states import CommittedRows, HiddenStates
from verify_service.drafts.known import KnownSequences, News
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.settings import DraftSettings
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status

PAGE, PROMPT = 4, 6


class Told:
    """One sequence of six prompt tokens, its hidden states, and what the draft knows."""

    def __init__(self) -> None:
        self.pool = PagePool(20, PAGE)
        self.marks = DraftMarks(self.pool)
        exchange: Any = SimpleNamespace(layers=(), writer=None, fusion=None)
        settings = DraftSettings(128, (3, 1), "request", 100)
        self.hidden = HiddenStates(exchange, self.marks, settings)
        self.known = KnownSequences(self.marks, 0, self.hidden, uses_pages=True)
        self.one = Sequence(5, list(range(10, 10 + PROMPT)), SamplingParams())
        self.one.status, self.one.slot = Status.RUNNING, 2
        self.commit(PROMPT)

    def commit(self, count: int) -> None:
        """Computes `count` tokens, whose last one chooses another."""
        one, start = self.one, self.one.num_computed
        one.num_computed += count
        one.tokens += [7] * (one.num_computed + 1 - len(one.tokens))
        missing = self.pool.pages_for(len(one.tokens)) - len(one.pages)
        one.pages += self.pool.allocate(max(missing, 0))
        output: Any = SimpleNamespace(hidden=torch.zeros(count, 2))
        self.hidden.keep(output, [CommittedRows(one, start, range(count))])

    def tell(self) -> News:
        """Tells all that is new; the rows are sent with it."""
        news = self.known.tell(self.one, 0)
        if (run := self.hidden.run_of(self.one)) is not None:
            self.hidden.sent(run)
        return news


@pytest.fixture
def told() -> Told:
    return Told()


def test_tokens_reach_one_further_than_states(told: Told) -> None:
    assert told.known.lag(told.one) == PROMPT
    assert not told.known.can_follow(told.one)
    assert told.tell() == News(0, PROMPT + 1, 0, valid_from=0)
    assert told.known.can_follow(told.one)
    assert told.tell() == News(PROMPT + 1, PROMPT + 1, 2, None)
    told.commit(3)
    assert told.tell() == News(PROMPT + 1, PROMPT + 4, 2, None)
    assert told.known.has_caught_up(told.one)


def test_a_sequence_begins_anew_in_the_slot_that_was_released(told: Told) -> None:
    told.tell()
    told.known.released([1, 3])
    told.commit(1)
    assert told.tell().valid_from is None
    told.known.released([2])
    assert not told.known.can_follow(told.one)
    told.commit(1)
    assert told.tell() == News(0, PROMPT + 3, 0, valid_from=0)


def test_a_sequence_that_lost_its_pages_begins_anew(told: Told) -> None:
    told.tell()
    told.one.num_preemptions = 1
    told.hidden.drop(told.one)
    assert not told.known.can_follow(told.one)
    assert told.known.tell(told.one, 0).valid_from is None  # there is nothing to tell yet
    told.one.pages, told.one.num_computed = told.pool.allocate(2), 0
    told.one.pages_changed(0)
    told.commit(PROMPT + 1)
    assert not told.known.stands_alone(told.one)
    assert told.tell() == News(0, PROMPT + 2, 0, valid_from=0)
    assert told.known.stands_alone(told.one)


def test_a_draft_reads_on_where_states_are_kept_again(told: Told) -> None:
    told.tell()
    told.commit(2)
    told.hidden.drop_all()
    told.commit(3)
    # It lacks the states of positions 6 and 7, and has token 8.
    assert told.known.lag(told.one) == 3
    assert told.tell() == News(PROMPT + 3, PROMPT + 6, 0, valid_from=PROMPT + 2)


def test_a_page_that_was_exchanged_is_sent_again(told: Told) -> None:
    told.tell()
    [page] = told.pool.allocate(1)
    told.one.pages[1] = page
    told.one.pages_changed(1)
    told.commit(2)  # fills that page
    news = told.tell()
    assert (news.start, news.end, news.first_page) == (PAGE + 1, PROMPT + 3, 1)
    assert told.marks.is_valid(page)
    assert told.known.tell_pages(told.one) == len(told.one.pages)
    told.one.pages_changed(0)
    assert told.known.tell_pages(told.one) == 0
