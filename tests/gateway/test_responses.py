"""/v1/responses by the official openai client; its own types say whether answers and events have
the right form.
"""

import inspect
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from gateway.responses.schemas import CountBody, ResponsesBody
from testing.stack import CONTEXT_LENGTH
from tests.gateway.newer_fields import INPUT_TOKENS_FIELDS, RESPONSES_FIELDS
from tests.gateway.request_fields import Field

FIXED: Any = {"model": "tiny", "max_output_tokens": 24, "temperature": 0.8}
SEED: Any = {"seed": 7}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a town.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"town": {"enum": ["Bern", "Rome"]}, "unit": {"enum": ["C", "F"]}},
        "required": ["town", "unit"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}
CALLING: Any = {
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 120,
}


@pytest.fixture(scope="module")
def caller(tool_url: str) -> Iterator[openai.OpenAI]:
    """Returns a client of a model whose template knows tools."""
    with openai.OpenAI(base_url=tool_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


class Answer(BaseModel):
    yes: bool


def create(client: openai.OpenAI, said: Any = "Hi é", **fields: Any) -> Response:
    found: Response = client.responses.create(input=said, extra_body=SEED, **{**FIXED, **fields})
    return Response.model_validate(found.to_dict())


def chat_text(client: openai.OpenAI, messages: Any) -> tuple[str | None, int]:
    """Returns text and number of prompt tokens of chat completions for a conversation."""
    found = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=24, temperature=0.8, seed=7
    )
    assert found.usage is not None
    return found.choices[0].message.content, found.usage.prompt_tokens


def told(client: openai.OpenAI, response: Response) -> tuple[str | None, int]:
    assert response.usage is not None
    return response.output_text, response.usage.input_tokens


def test_a_response_is_what_chat_completions_answer(client: openai.OpenAI) -> None:
    user = {"role": "user", "content": "Hi é"}
    answer = create(client)
    assert told(client, answer) == chat_text(client, [user])
    assert answer.object == "response"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    system = {"role": "system", "content": "Be brief."}
    instructed = create(client, instructions="Be brief.", metadata={"a": "b"})
    assert told(client, instructed) == chat_text(client, [system, user])
    assert instructed.metadata == {"a": "b"}
    # Items of every form of message say the same.
    parts = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Hi "}, {"type": "input_text", "text": "é"}],
        },
    ]
    assert told(client, create(client, parts)) == told(client, instructed)
    two = create(client, parts, instructions="First.")
    both = {"role": "system", "content": "First.\n\nBe brief."}
    assert told(client, two) == chat_text(client, [both, user])


@pytest.mark.parametrize(("tokens", "status"), [(5, "incomplete"), (None, "completed")])
def test_how_it_ends(client: openai.OpenAI, tokens: int | None, status: str) -> None:
    if tokens is None:
        # What the schema allows ends by itself.
        form = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}}
        answer = create(client, text={"format": form})
        assert answer.output_text == '"yes"'
        assert answer.incomplete_details is None
    else:
        found = client.responses.create(
            input="Hi", extra_body={"ignore_eos": True}, **{**FIXED, "max_output_tokens": tokens}
        )
        answer = Response.model_validate(found.to_dict())
        assert answer.usage is not None
        assert answer.usage.output_tokens == tokens
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[-1].status == "incomplete"  # type: ignore[union-attr]
    assert answer.status == status


def events_of(client: openai.OpenAI, **fields: Any) -> list[Any]:
    stream = client.responses.create(
        input="Hi é", extra_body=SEED, stream=True, **{**FIXED, **fields}
    )
    events = [EVENT.validate_python(event.to_dict()) for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def without_names(response: Response) -> dict[str, Any]:
    """Returns a response without fields that differ each time."""
    found = response.to_dict()
    for name in ("id", "created_at", "completed_at", "usage", "speculation"):
        found.pop(name)
    for item in found["output"]:  # type: ignore[attr-defined]
        item.pop("id")
        item.pop("call_id", None)
    return found


@pytest.mark.parametrize("fields", [{}, CALLING, {"top_logprobs": 2}], ids=str)
def test_streams_say_the_same(caller: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = create(caller, **fields)
    events = events_of(caller, **fields)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type in ("response.completed", "response.incomplete")
    final = events[-1].response
    assert without_names(final) == without_names(whole)
    assert final.id == events[0].response.id
    # Every item's deltas are its text, between its opening and its end.
    for index, item in enumerate(final.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        assert {event.item_id for event in own[1:-1]} == {item.id}
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(event.delta for event in own if event.type.endswith(".delta")) == text
        if "top_logprobs" in fields:
            found = [
                entry for event in own if event.type.endswith(".delta") for entry in event.logprobs
            ]
            assert [entry.token for entry in found] == [
                entry.token for entry in item.content[0].logprobs
            ]
            assert all(len(entry.top_logprobs) == 2 for entry in item.content[0].logprobs)
            assert (
                bytes(b for e in item.content[0].logprobs for b in e.bytes).decode(
                    "utf-8", "replace"
                )
                == item.content[0].text
            )


def test_the_clients_own_reader_of_streams(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="Is it?", text_format=Answer, max_output_tokens=60, temperature=0
    ) as stream:
        parsed = stream.get_final_response().output_parsed
    assert isinstance(parsed, Answer)
    assert (
        client.responses.parse(
            model="tiny", input="Is it?", text_format=Answer, max_output_tokens=60, temperature=0
        ).output_parsed
        == parsed
    )


def test_calls_and_their_results(caller: openai.OpenAI) -> None:
    client = caller
    answer = create(client, "Weather?", **CALLING)
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"town", "unit"}
    assert answer.status == "completed"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12"}
    # The conversation goes on by hand or by the id of the answer, with the same prompt.
    said: Any = [{"role": "user", "content": "Weather?"}, *answer.output, result]
    by_hand = create(client, said, tools=[WEATHER], tool_choice="none")
    by_id = create(client, [result], previous_response_id=answer.id)
    chat: Any = [
        said[0],
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "12"},
    ]
    assert told(client, by_hand) == told(client, by_id) == chat_text(client, chat)


def test_tools_may_be_named(caller: openai.OpenAI) -> None:
    clock = {"type": "function", "name": "get_time", "parameters": None, "strict": None}
    for choice in (
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ):
        answer = create(caller, **{**CALLING, "tools": [clock, WEATHER], "tool_choice": choice})
        assert [item.name for item in answer.output] == ["get_weather"]  # type: ignore[union-attr]
        assert answer.to_dict()["tool_choice"] == choice


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


def test_what_fails_before_the_first_token_has_a_status(client: openai.OpenAI) -> None:
    long = "word " * CONTEXT_LENGTH
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input=long, stream=True)
    assert refused.value.param == "input"
    assert refused.value.code == "context_length_exceeded"


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "it has no messages"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "'assistant'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "required"),
        ({"input": [{**USER, "colour": 1}]}, "input.0.colour", "not a field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "only text is taken, not 'input_image'",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "the item itself"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "only messages, function calls"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name", "required"),
        (
            {"input": [USER, CALL, {"type": "function_call_output", "call_id": "d", "output": "1"}]},  # noqa: E501
            "input.2.call_id",
            "no function_call before it",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "only functions are taken"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "letters"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type", "only functions"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "give"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "no"}}}},
            "text.format.schema",
            "Invalid type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be in"),
        ({"max_output_tokens": 10_000}, "max_output_tokens", "context length"),
        ({"temperature": -1}, "temperature", "must be in"),
        ({"top_logprobs": 21}, "top_logprobs", "must be in"),
        ({"background": True}, "background", "stream it"),
        ({"conversation": "x"}, "conversation", "previous_response_id"),
        ({"prompt": {"id": "x"}}, "prompt", "instructions"),
        ({"truncation": "auto"}, "truncation", "shorter"),
        ({"include": ["file_search_call.results"]}, "include", "file_search"),
        ({"max_tool_calls": 3}, "max_tool_calls", "parallel_tool_calls"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16"),
        ({"stream_options": {}}, "stream_options", "stream: true"),
        ({"messages": []}, "messages", "not a field"),
        ({"max_tokens": 5}, "max_tokens", "not a field"),
        ({"guided_json": {}}, "guided_json", "give text: {"),
        ({"guided_regex": "a"}, "guided_regex", "/v1/chat/completions"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_told(
    http: httpx.Client, fields: dict[str, Any], param: str, message: str
) -> None:
    answer = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize("field", RESPONSES_FIELDS, ids=lambda field: field.name)
def test_fields_are_what_the_docs_say(http: httpx.Client, field: Field) -> None:
    plain = {"input": "Hi", "max_output_tokens": 4, "temperature": 0, "store": False}
    answer = http.post("/v1/responses", json={**plain, field.name: field.example})
    if field.fate == "refused":
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith(field.name)
        return
    assert answer.status_code == 200, answer.text
    if field.fate == "ignored":
        texts = [
            found.json()["output"][0]["content"][0]["text"]
            for found in (answer, http.post("/v1/responses", json=plain))
        ]
        assert texts[0] == texts[1]


def test_every_field_is_in_the_docs() -> None:
    own = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for body, fields, method in (
        (ResponsesBody, RESPONSES_FIELDS, Responses.create),
        (CountBody, INPUT_TOKENS_FIELDS, InputTokens.count),
    ):
        names = [field.name for field in fields]
        assert len(names) == len(set(names))
        assert set(body.model_fields) == set(names)
        # No model here has a choice of personalities: as any unknown field it is refused.
        theirs = set(inspect.signature(method).parameters) - own - {"personality"}
        assert theirs <= set(names)


def test_tokens_are_counted(caller: openai.OpenAI) -> None:
    count = caller.responses.input_tokens.count
    first = create(caller)
    for fields in (
        {},
        {"instructions": "Be brief."},
        {"tools": [WEATHER], "tool_choice": "none"},
        {"tools": [WEATHER]},
        {"previous_response_id": first.id},
    ):
        counted = count(model="tiny", input="Hi é", **fields)  # type: ignore[arg-type]
        assert counted.object == "response.input_tokens"
        assert counted.input_tokens == told(caller, create(caller, **fields))[1]
    with pytest.raises(openai.NotFoundError) as unknown:
        count(model="tiny", input="x", previous_response_id="resp_none")
    assert unknown.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as refused:
        count(model="tiny", input="x", extra_body={"max_output_tokens": 4})
    assert refused.value.param == "max_output_tokens"


def test_a_kept_response_is_not_replayed(http: httpx.Client) -> None:
    answer = http.get("/v1/responses/resp_x", params={"stream": "true"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
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
    with pytest.raises(openai.NotFoundError):
        of.list("resp_none")
