"""Tests sync messages, as the draft's own state of sequences reads them, whole and split."""

import pytest

from draft_service.drafters.paged_sequences import PagedSequences
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2
from foredraft.types import SamplingParams
from testing.drafts import attach_request
from verify_service.drafts.known import KnownSequences
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.sync_messages import SyncMessages, split_message
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status

PAGE, NUM_PAGES = 4, 32
SAMPLING = SamplingParams(temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, seed=2**64 - 3)


class Told:
    """Messages for a draft with KV that reads no hidden states, and what it makes of them."""

    def __init__(self, scope: str = "request") -> None:
        self._pool, self._scope = PagePool(NUM_PAGES, PAGE), scope
        self.attach()

    def attach(self) -> None:
        self.marks = DraftMarks(self._pool)
        self.known = KnownSequences(self.marks, 0, None, uses_pages=True)
        self.messages = SyncMessages(self.known, self._scope)
        self.draft = PagedSequences(attach_request(num_pages=NUM_PAGES), TreeLimits(3, 2, 7))

    def tell(self, one: Sequence, budget: int = 100) -> draft_pb2.SequenceStep:
        """The next message, once the draft has found nothing wrong with it."""
        message, count = self.messages.message(one, budget)
        assert count == len(message.tokens)
        request = draft_pb2.StepRequest(step=1, sequences=[message])
        self.draft.apply(draft_pb2.StepRequest.FromString(request.SerializeToString()))
        return message

    def marked(self, one: Sequence) -> list[bool]:
        return [self.marks.is_valid(page) for page in one.pages]


def sequence(num_tokens: int, first_page: int = 0, request_id: int = 5, slot: int = 2) -> Sequence:
    """Creates a sequence that decodes."""
    one = Sequence(request_id, list(range(10, 10 + num_tokens)), SAMPLING, key_label="alice")
    one.status, one.slot, one.num_computed = Status.RUNNING, slot, num_tokens - 1
    one.pages = list(range(first_page, first_page + -(-num_tokens // PAGE)))
    return one


def test_a_draft_knows_how_the_target_chooses() -> None:
    told, one = Told(), sequence(6)
    told.tell(one)
    known = told.draft._sequences[2]
    assert known.sampling == SAMPLING
    assert (known.num_tokens, known.pages) == (6, one.pages)


@pytest.mark.parametrize(
    ("scope", "expected"), [("request", ""), ("key", "key:alice"), ("server", "server")]
)
def test_whose_text_feeds_whose_drafts(scope: str, expected: str) -> None:
    assert Told(scope).tell(sequence(6)).begin.scope == expected


def test_only_whole_pages_are_marked() -> None:
    told, one = Told(), sequence(6)
    told.tell(one)
    assert told.marked(one) == [True, False]
    one.tokens += [50, 51]
    one.num_computed = 7
    message = told.tell(one)
    assert (message.position, list(message.tokens)) == (6, [50, 51])
    assert not message.HasField("begin")
    assert told.marked(one) == [True, True]


def test_a_budget_is_kept_to_and_the_rest_told_later() -> None:
    told, one = Told(), sequence(11)
    parts = [told.tell(one, 4) for _ in range(4)]
    assert [(part.position, len(part.tokens)) for part in parts] == [
        (0, 4),
        (4, 4),
        (8, 3),
        (11, 0),
    ]
    assert told.marked(one) == [True, True, False]
    assert told.known.has_caught_up(one)


def test_a_prompt_is_told_as_far_as_the_target_has_it() -> None:
    told, one = Told(), sequence(11)
    one.num_computed = 5
    assert len(told.tell(one).tokens) == 5
    one.num_computed = 10
    assert len(told.tell(one).tokens) == 6  # decoding now, the newest included


def test_what_was_released_begins_anew_even_in_its_old_slot() -> None:
    told, one = Told(), sequence(6)
    told.tell(one)
    told.known.released([1, 3])
    assert not told.tell(one).HasField("begin")
    told.known.released([2])
    message = told.tell(one)
    assert message.HasField("begin")
    # The first page still holds what it held.
    assert (message.position, len(message.tokens)) == (4, 2)


def test_another_draft_knows_nothing() -> None:
    told, one = Told(), sequence(6)
    told.tell(one)
    told.attach()
    message = told.tell(one)
    assert message.HasField("begin")
    assert (message.position, len(message.tokens)) == (0, 6)


def test_another_sequence_stands_on_the_pages_that_the_draft_has() -> None:
    told = Told()
    told.tell(sequence(10))
    twin = sequence(10, request_id=6, slot=3)
    message = told.tell(twin)
    assert (message.position, len(message.tokens)) == (8, 2)
    assert list(message.new_pages) == [0, 1, 2]


@pytest.mark.parametrize("is_known", [False, True])
def test_an_exchanged_page_is_read_again_unless_the_draft_has_it(is_known: bool) -> None:
    told, one = Told(), sequence(10)
    told.tell(one)
    one.pages[1] = 20
    one.pages_changed(1)
    if is_known:
        told.marks.mark(20)
    message = told.tell(one)
    assert (message.position, len(message.tokens)) == ((10, 0) if is_known else (4, 6))
    if not is_known:
        assert (message.first_page, list(message.new_pages)) == (1, [20, 2])
        assert told.draft._sequences[2].pages == one.pages
        assert told.marks.is_valid(20)


def message(position: int, num_tokens: int) -> draft_pb2.SequenceStep:
    made = draft_pb2.SequenceStep(
        slot=3, position=position, tokens=range(num_tokens), new_pages=[1, 2], first_page=4
    )
    made.begin.valid_from = 5
    made.propose.num_steps = 2
    return made


@pytest.mark.parametrize("position", [0, 7])
def test_a_message_is_split_by_rows(position: int) -> None:
    rest = message(position, 10)
    part = split_message(rest, 4)
    first = 4 if position else 5
    assert list(part.tokens) == list(range(first))
    assert list(rest.tokens) == list(range(first, 10))
    assert (part.position, rest.position) == (position, position + first)
    assert part.HasField("begin")
    assert not part.HasField("propose")
    assert rest.HasField("propose")
    assert not rest.HasField("begin")
    assert list(part.new_pages) == [1, 2]
    assert not rest.new_pages
    assert part.slot == rest.slot == 3
