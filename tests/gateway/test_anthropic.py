"""/v1/messages by the official anthropic client; its own types say whether answers and events have
the right form.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.resources.messages import Messages
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from pydantic import BaseModel, TypeAdapter

from gateway.anthropic.schemas import CountBody, MessagesBody
from testing.stack import CONTEXT_LENGTH
from tests.gateway.listed_fields import check_listed
from tests.gateway.newer_fields import COUNT_FIELDS, MESSAGES_FIELDS
from tests.gateway.request_fields import Field

FIXED: Any = {"model": "tiny", "max_tokens": 24}
# The client's later versions have no temperature of their own.
SEED: Any = {"seed": 7, "temperature": 0.8}
HI: Any = [{"role": "user", "content": "Hi é"}]
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a town.",
    "input_schema": {
        "type": "object",
        "properties": {"town": {"enum": ["Bern", "Rome"]}, "unit": {"enum": ["C", "F"]}},
        "required": ["town", "unit"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}
CALLING: Any = {
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 120,
}


class Answer(BaseModel):
    yes: bool


@pytest.fixture(scope="module")
def claude(tool_url: str) -> Iterator[anthropic.Anthropic]:
    """Returns Anthropic's unchanged client of a model whose template knows tools."""
    with anthropic.Anthropic(base_url=tool_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def chats(tool_url: str) -> Iterator[openai.OpenAI]:
    """Returns a client of the same model's chat completions."""
    with openai.OpenAI(base_url=tool_url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def create(claude: anthropic.Anthropic, messages: Any = HI, **fields: Any) -> Message:
    found = claude.messages.create(messages=messages, extra_body=SEED, **{**FIXED, **fields})
    return Message.model_validate(found.to_dict())


def told(message: Message) -> tuple[str, int]:
    """Returns the text and the number of prompt tokens."""
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    return "".join(b.text for b in message.content if b.type == "text"), usage.input_tokens + cached


def chat_told(chats: openai.OpenAI, messages: Any, **fields: Any) -> tuple[str | None, int]:
    found = chats.chat.completions.create(
        model="tiny", messages=messages, max_tokens=24, temperature=0.8, seed=7, **fields
    )
    assert found.usage is not None
    return found.choices[0].message.content, found.usage.prompt_tokens


def test_a_message_is_what_chat_completions_answer(
    claude: anthropic.Anthropic, chats: openai.OpenAI
) -> None:
    answer = create(claude)
    assert told(answer) == chat_told(chats, HI)
    assert answer.stop_reason in ("end_turn", "max_tokens")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "é"}]}
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\né"}]
    assert told(create(claude, parts, system=system)) == chat_told(chats, chat)
    # One role's messages in a row are one.
    rows: Any = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "é"}]
    assert told(create(claude, rows, system="Be brief.")) == chat_told(chats, chat)


def test_an_answer_goes_on_where_it_was_begun(
    claude: anthropic.Anthropic, chats: openai.OpenAI
) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "The dog"}]
    extra = {"continue_final_message": True}
    assert told(create(claude, begun)) == chat_told(chats, begun, extra_body=extra)


def test_why_it_ends(claude: anthropic.Anthropic) -> None:
    forever = {"extra_body": {**SEED, "ignore_eos": True}}

    def ends(**fields: Any) -> tuple[str | None, str | None]:
        found = claude.messages.create(messages=HI, **{**FIXED, **forever, **fields})
        return found.stop_reason, found.stop_sequence

    assert ends(max_tokens=5) == ("max_tokens", None)
    text = create(claude).content[0].text  # type: ignore[union-attr]
    stop = text[3:5]
    assert ends(stop_sequences=["never", stop]) == ("stop_sequence", stop)
    # More than the context holds may be asked for.
    assert ends(max_tokens=5000) == ("model_context_window_exceeded", None)
    schema = {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}
    assert create(claude, output_config=schema).stop_reason == "end_turn"


def events_of(claude: anthropic.Anthropic, **fields: Any) -> list[Any]:
    stream = claude.messages.create(
        messages=HI, extra_body=SEED, stream=True, **{**FIXED, **fields}
    )
    return [EVENT.validate_python(event.to_dict()) for event in stream]


def without_names(message: Any) -> dict[str, Any]:
    found = message.to_dict()
    for name in ("id", "usage", "speculation", "stop_details"):
        found.pop(name, None)
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return dict(found)


@pytest.mark.parametrize("fields", [{}, CALLING, {"stop_sequences": ["a", "e"]}], ids=str)
def test_streams_say_the_same(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    whole = create(claude, **fields)
    events = events_of(claude, **fields)
    assert events[0].type == "message_start"
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    indices = [event.index for event in events[1:-2]]
    assert indices == sorted(indices)
    for index in set(indices):
        kinds = [event.type for event in events[1:-2] if event.index == index]
        assert (kinds[0], kinds[-1]) == ("content_block_start", "content_block_stop")
        assert set(kinds[1:-1]) <= {"content_block_delta"}
    with claude.messages.stream(messages=HI, extra_body=SEED, **{**FIXED, **fields}) as stream:
        final = stream.get_final_message()
    assert without_names(final) == without_names(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_structured_output(claude: anthropic.Anthropic) -> None:
    asked: Any = {"messages": HI, "output_format": Answer, **FIXED, "max_tokens": 80}
    assert isinstance(claude.messages.parse(**asked).parsed_output, Answer)


def test_calls_and_their_results(claude: anthropic.Anthropic, chats: openai.OpenAI) -> None:
    answer = create(claude, **CALLING)
    (call,) = answer.content
    assert call.type == "tool_use"
    assert call.name == "get_weather"
    assert set(call.input) == {"town", "unit"}
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12"}
    # The client's own objects may be sent back.
    said: Any = [
        *HI,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    function = {"name": call.name, "arguments": json.dumps(call.input)}
    chat: Any = [
        *HI,
        {
            "role": "assistant",
            "tool_calls": [{"id": call.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "12"},
        {"role": "user", "content": "So?"},
    ]
    assert told(create(claude, said)) == chat_told(chats, chat)
    failed = [{**result, "is_error": True, "content": [{"type": "text", "text": "12"}]}]
    said[-1] = {"role": "user", "content": failed}
    chat[-2:] = [{**chat[-2], "content": "Error: 12"}]
    assert told(create(claude, said)) == chat_told(chats, chat)


def test_a_call_that_is_cut_has_what_came(claude: anthropic.Anthropic) -> None:
    answer = create(claude, **{**CALLING, "max_tokens": 30})
    assert answer.stop_reason == "max_tokens"
    for block in answer.content:
        if block.type == "tool_use":
            assert set(block.input) <= {"town", "unit"}


def test_tools_may_be_named(claude: anthropic.Anthropic) -> None:
    clock = {"name": "get_time", "input_schema": {"type": "object"}}
    choice = {"type": "tool", "name": "get_weather"}
    answer = create(claude, **{**CALLING, "tools": [clock, WEATHER], "tool_choice": choice})
    assert [block.name for block in answer.content] == ["get_weather"]  # type: ignore[union-attr]
    assert answer.stop_reason == "tool_use"


def test_tokens_are_counted(claude: anthropic.Anthropic) -> None:
    for fields in ({}, {"system": "Be brief."}, {"tools": [WEATHER]}):
        counted = claude.messages.count_tokens(messages=HI, model="tiny", **fields)  # type: ignore[arg-type]
        assert counted.input_tokens == told(create(claude, **fields))[1]


def test_errors_are_anthropics(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    def error_of(answer: httpx.Response) -> ErrorResponse:
        return ErrorResponse.model_validate(answer.json())

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        create(claude, model="other")
    with pytest.raises(anthropic.BadRequestError, match="messages: it has"):
        create(claude, [{"role": "user", "content": "word " * CONTEXT_LENGTH}])
    with pytest.raises(anthropic.BadRequestError, match="temperature: must be in"):
        claude.messages.create(messages=HI, **FIXED, extra_body={"temperature": -1})
    missing = http.post("/v1/messages", json={"messages": HI})
    assert missing.status_code == 400
    assert error_of(missing).error.message == "max_tokens: Field required"
    nowhere = http.post("/v1/messages/nothing", json={})
    assert (nowhere.status_code, error_of(nowhere).error.type) == (404, "not_found_error")
    # Before the first token of a stream, too.
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        claude.messages.create(messages=HI, stream=True, **FIXED, extra_body={"top_k": -5})


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


TEXT = {"type": "text", "text": "x"}
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
USED = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [USE]}]
RESULT = {"type": "tool_result", "tool_use_id": "t"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: it has no messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: Input should be"),
        (user({"type": "text", "source": {}}), "messages.0.content.0.source: is not a field"),
        (user({"type": "document"}), "messages.0.content.0.type: only text and tool_result"),
        (
            user({"type": "image", "source": {"type": "url", "url": "x"}}),
            "messages.0.content.0.type: only text and tool_result are taken there, not 'image'",
        ),
        (user(), "messages.0.content: has no blocks"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools.0.type: only the client's own tools are taken, not 'function'",
        ),
        ({"tools": [{"function": {"name": "f"}}]}, "tools.0.function: is not a field"),
        ({"tools": [{"description": "f"}]}, "tools.0.name: Field required"),
        (user({"type": "text"}), "messages.0.content.0.text: Field required"),
        (user(USE), "messages.0.content.0.type: only text and tool_result"),
        (user({"type": "tool_result", "tool_use_id": "t"}), "messages.0.content.0.tool_use_id: no"),
        ({"messages": USED}, "messages: the last tool_use needs a tool_result"),
        (
            {"messages": [*USED, {"role": "user", "content": [RESULT, RESULT]}]},
            "messages.2.content.1.tool_use_id: 't' has a result already",
        ),
        (
            {"messages": [USED[0], {"role": "assistant", "content": [USE, USE]}]},
            "messages.1.content.1.id: 't' is another tool_use's",
        ),
        (
            {"messages": [*USED, {"role": "assistant", "content": "x"}]},
            "messages.2: the tool_use before it needs a tool_result first",
        ),
        ({"system": [{"type": "image"}]}, "system.0.type: only text"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0.type: only the"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name: must be 1 to 64"),
        (
            {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
            "tools.0.input_schema: must be the schema of an object",
        ),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "tools.0.defer_lo"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
        ({"stop_sequences": [""]}, "stop_sequences: a stop string has"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "output_config.format.schema: Invalid type",
        ),
        ({"stop": "x"}, "stop: is not a field"),
        (
            {"guided_json": {}},
            (
                "guided_json: is not a field of this request, or not one that can be honoured; give"
                " output_config"
            ),
        ),
        ({"max_tokens": -1}, "max_tokens: must be in"),
        (user({**USE, "input": []}), "messages.0.content.0.input: Input should be an object"),
        (user({**USE, "input": "{}"}), "messages.0.content.0.input: Input should be an object"),
        (user({**TEXT, "text": 5}), "messages.0.content.0.text: Input should be a valid string"),
        (user(5), "messages.0.content: Input should be a valid string or an object"),
    ],
)
def test_what_cannot_be_honoured_is_told(
    http: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    answer = http.post("/v1/messages", json={"messages": HI, "max_tokens": 2, **fields})
    assert answer.status_code == 400, answer.text
    error = ErrorResponse.model_validate(answer.json()).error
    assert error.type == "invalid_request_error"
    assert error.message.startswith(message)


@pytest.mark.parametrize("field", MESSAGES_FIELDS, ids=lambda field: field.name)
def test_fields_are_what_the_docs_say(http: httpx.Client, field: Field) -> None:
    plain = {"messages": HI, "max_tokens": 4, "temperature": 0}
    answer = http.post("/v1/messages", json={**plain, field.name: field.example})
    if field.fate == "refused":
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(field.name)
        return
    assert answer.status_code == 200, answer.text
    if field.fate == "ignored":
        again = http.post("/v1/messages", json=plain).json()
        assert answer.json()["content"] == again["content"]


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_thinking_20251015"},
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {"type": "clear_tool_uses_20250919", "keep": "all"},
        {"type": "clear_thinking_20251015", "keep": "all", "trigger": 1},
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_edits_that_would_clear_something_are_refused(
    http: httpx.Client, path: str, edit: dict[str, Any]
) -> None:
    body = {"messages": HI, "context_management": {"edits": [edit]}}
    answer = http.post(path, json=body | ({"max_tokens": 4} if path == "/v1/messages" else {}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("context_management.edits.0")


def test_the_client_runs_tools(claude: anthropic.Anthropic) -> None:
    towns: list[str] = []

    @anthropic.beta_tool(input_schema=WEATHER["input_schema"])
    def get_weather(town: str, unit: str) -> str:
        """The weather of a town."""
        towns.append(town)
        return "warm"

    # Its first request asks the server to keep the conversation.
    runner = claude.beta.messages.tool_runner(
        messages=HI, max_iterations=2, extra_body=SEED,
        **{**FIXED, **CALLING, "tools": [get_weather]},
    )  # fmt: skip
    answers = list(runner)
    assert [answer.stop_reason for answer in answers] == ["tool_use", "tool_use"]
    assert towns == [answer.content[0].input["town"] for answer in answers]


def test_every_field_is_in_the_docs() -> None:
    for body, fields, method in (
        (MessagesBody, MESSAGES_FIELDS, Messages.create),
        (CountBody, COUNT_FIELDS, Messages.count_tokens),
    ):
        # The client makes another field of its own output_format.
        check_listed(body, fields, method, left_out="output_format")
