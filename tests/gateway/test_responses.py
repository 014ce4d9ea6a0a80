"""/v1/responses by the official openai client; its own types say whether answers and events have
the right form.
"""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from gateway.responses.items import Conversation
from gateway.responses.schemas import Item
from tests.gateway.responses import FIXED, WEATHER, chat_text, create, events_of, told

CALLING: Any = {
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 120,
}


class Answer(BaseModel):
    yes: bool


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


def test_reasoning_stays_in_the_turn_that_it_belongs_to() -> None:
    """An answer that was cut within its reasoning is a turn of its own."""
    talk = Conversation()
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    talk.add([Item.model_validate(item) for item in items], "input")
    assert talk.messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "cut"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
