"""What a draft is told of a sequence is split where its hidden states do not fit in one message."""

import pytest

from foredraft.api.draft.v1 import draft_pb2
from verify_service.drafts.news import split_news


def news(position: int, num_tokens: int) -> draft_pb2.SequenceStep:
    made = draft_pb2.SequenceStep(
        slot=3, position=position, tokens=range(num_tokens), new_pages=[1, 2], first_page=4
    )
    made.begin.valid_from = 5
    made.propose.num_steps = 2
    return made


@pytest.mark.parametrize("position", [0, 7])
def test_news_are_split_by_rows(position: int) -> None:
    rest = news(position, 10)
    part = split_news(rest, 4)
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
