"""Responses that are kept: continued, read again and deleted, through the official client."""

from typing import Any

import httpx
import openai
import pytest

from tests.gateway.responses import chat_text, create, events_of, told


def test_conversations_are_continued_by_id(client: openai.OpenAI) -> None:
    one = create(client, "a")
    two = create(client, "b", previous_response_id=one.id, instructions="Be brief.")
    three = create(client, "c", previous_response_id=two.id)
    # Instructions are not carried over.
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": one.output_text},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": two.output_text},
        {"role": "user", "content": "c"},
    ]
    assert told(client, three) == chat_text(client, chat)
    # What was continued may be deleted; the conversation is still whole.
    client.responses.delete(one.id)
    assert told(client, create(client, "c", previous_response_id=two.id)) == told(client, three)


def test_responses_are_kept_until_they_are_deleted(client: openai.OpenAI) -> None:
    answer = create(client)
    assert answer.to_dict()["store"] is True
    assert client.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    client.responses.delete(answer.id)
    unstored = create(client, store=False)
    assert unstored.to_dict()["store"] is False
    for name in (answer.id, unstored.id, "resp_never", "ü"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError):
            client.responses.delete(name)
        with pytest.raises(openai.NotFoundError) as lost:
            create(client, previous_response_id=name)
        assert lost.value.code == "previous_response_not_found"
        assert lost.value.param == "previous_response_id"


def test_a_stream_is_kept_before_its_last_event(client: openai.OpenAI) -> None:
    final = events_of(client)[-1].response
    assert client.responses.retrieve(final.id).to_dict() == final.to_dict()


def test_a_kept_response_is_not_replayed(http: httpx.Client) -> None:
    answer = http.get("/v1/responses/resp_x", params={"stream": "true"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


def test_input_items_come_in_pages(client: openai.OpenAI, http: httpx.Client) -> None:
    first = create(client, "one", max_output_tokens=4)
    said: Any = [{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]
    second = create(client, said, max_output_tokens=4, previous_response_id=first.id)
    of = client.responses.input_items
    items = of.list(second.id, order="asc", limit=100).data
    answered = [item.to_dict() for item in first.output]
    assert [item.to_dict() for item in items][1:-2] == answered
    texts = [item.content[0].text for item in items if item.type == "message"]
    assert texts == ["one", first.output_text, "two", "three"]
    assert [item.role for item in items if item.type == "message"] == [
        "user", "assistant", "user", "user",
    ]  # fmt: skip
    # One item at a time, the newest first, as the client's own pager asks for them.
    paged = list(of.list(second.id, limit=1))
    assert [item.id for item in paged] == [item.id for item in items][::-1]
    assert len({item.id for item in items}) == len(items)
    assert [item.content[0].text for item in of.list(first.id)] == ["one"]
    for limit, order, after in ((0, "asc", None), (101, "asc", None), (1, "asc", "x")):
        with pytest.raises(openai.BadRequestError) as refused:
            of.list(first.id, limit=limit, order=order, after=after or openai.omit)
        assert refused.value.param in ("limit", "after")
    for query in ({"limit": "many"}, {"order": "oldest"}):
        answer = http.get(f"/v1/responses/{first.id}/input_items", params=query)
        assert answer.status_code == 400
        assert [answer.json()["error"]["param"]] == list(query)
    with pytest.raises(openai.NotFoundError):
        of.list("resp_none")
