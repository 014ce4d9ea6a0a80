"""Requests with functions and a schema for the text: an answer is either calls or text."""

import json
from typing import Any

import anthropic
import grpc
import httpx
import openai
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from gateway.openai.call_parsers import CallDeltas
from gateway.openai.tools import Convention, Function
from tests.gateway.weather_tool import FUNCTION, PARAMETERS

TOOLS: Any = [{"type": "function", "function": FUNCTION}]
SCHEMA: dict[str, Any] = {"enum": ["yes", "no"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
USER: Any = [{"role": "user", "content": "Hi"}]
# What the first token begins, and so which of both comes.
FIRST = {"call": "<", "text": '"'}


@pytest.fixture(scope="module")
def bias(tool_url: str) -> dict[str, dict[str, float]]:
    """Returns the `logit_bias` that brings calls, and the one that brings text."""
    found = {}
    for kind, text in FIRST.items():
        asked = {"prompt": text, "add_special_tokens": False}
        (token,) = httpx.post(f"{tool_url}/tokenize", json=asked).json()["tokens"]
        found[kind] = {str(token): 100.0}
    return found


def is_call(name: str | None, arguments: str | None) -> bool:
    return name == "get_weather" and json.loads(arguments or "")["town"] in ("Bern", "Rome")


@pytest.mark.parametrize("kind", FIRST)
def test_chat_completions(
    caller: openai.OpenAI, bias: dict[str, dict[str, float]], kind: str
) -> None:
    asked: Any = {"model": "tiny", "messages": USER, "tools": TOOLS, "response_format": FORM}
    asked |= {"max_tokens": 120, "seed": 1, "logit_bias": bias[kind], "parallel_tool_calls": False}
    choice = caller.chat.completions.create(**asked).choices[0]
    texts, calls = "", ""
    for chunk in caller.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        texts += delta.content or ""
        for part in delta.tool_calls or ():
            assert part.function is not None
            calls += part.function.arguments or ""
    if kind == "text":
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert json.loads(choice.message.content or "") in SCHEMA["enum"]
        assert (texts, calls) == (choice.message.content, "")
        return
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert is_call(call.function.name, call.function.arguments)
    assert (texts, calls) == ("", call.function.arguments)


@pytest.mark.parametrize("kind", FIRST)
def test_responses(caller: openai.OpenAI, bias: dict[str, dict[str, float]], kind: str) -> None:
    form: Any = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    answer = caller.responses.create(
        model="tiny",
        input="Hi",
        tools=[{"type": "function", **FUNCTION, "strict": None}],
        parallel_tool_calls=False,
        text={"format": form},
        extra_body={"seed": 1, "logit_bias": bias[kind]},
    )
    (item,) = answer.output
    if item.type == "function_call":
        assert kind == "call"
        assert is_call(item.name, item.arguments)
    else:
        assert kind == "text"
        assert json.loads(answer.output_text) in SCHEMA["enum"]


@pytest.mark.parametrize("kind", FIRST)
def test_messages(tool_url: str, bias: dict[str, dict[str, float]], kind: str) -> None:
    tools: Any = [{"name": "get_weather", "input_schema": PARAMETERS}]
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    with anthropic.Anthropic(base_url=tool_url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(
            model="tiny",
            max_tokens=120,
            messages=USER,
            tools=tools,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            output_config=form,
            extra_body={"seed": 1, "logit_bias": bias[kind]},
        )
        (block,) = answer.content
        if block.type == "tool_use":
            assert kind == "call"
            assert is_call(block.name, json.dumps(block.input))
        else:
            assert kind == "text"
            assert block.type == "text"
            assert json.loads(block.text) in SCHEMA["enum"]


@pytest.mark.parametrize("kind", FIRST)
def test_grpc(tool_gateway: tuple[str, str], bias: dict[str, dict[str, float]], kind: str) -> None:
    function = inference_pb2.Function(name="get_weather", parameters=json.dumps(PARAMETERS))
    chat = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role="user", content="Hi")],
        functions=[function],
        parallel_calls=False,
    )
    sampling = inference_pb2.SamplingParams(
        seed=1,
        max_new_tokens=120,
        logit_bias={int(token): value for token, value in bias[kind].items()},
        grammar=inference_pb2.Grammar(json_schema=json.dumps(SCHEMA)),
    )
    request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling)
    with grpc.insecure_channel(tool_gateway[1]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        responses = list(stub.Generate(request, timeout=60))
    text = "".join(response.text for response in responses)
    calls = [call for response in responses for call in response.calls]
    if kind == "text":
        assert not calls
        assert json.loads(text) in SCHEMA["enum"]
    else:
        assert not text
        assert is_call(calls[0].name, "".join(call.arguments for call in calls))


def test_each_part_that_is_wrong_is_named(tool_url: str) -> None:
    wrong = {"not": {}}
    broken_tools = [{"type": "function", "function": {**FUNCTION, "parameters": {"properties": 5}}}]
    broken_form = {"type": "json_schema", "json_schema": {"name": "x", "schema": wrong}}
    flat = {"type": "json_schema", "name": "x", "schema": wrong}
    chat, responses = "/v1/chat/completions", "/v1/responses"
    asked: dict[str, Any] = {
        chat: {"messages": USER, "max_tokens": 2, "tools": TOOLS},
        responses: {"input": "x", "tools": [{"type": "function", **FUNCTION}]},
        "/v1/messages": {
            "messages": USER,
            "max_tokens": 2,
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
        },
    }
    for path, fields, param in (
        (chat, {"tools": broken_tools, "response_format": FORM}, "tools"),
        (chat, {"response_format": broken_form}, "response_format.json_schema.schema"),
        (chat, {"guided_json": wrong}, "guided_json"),
        (chat, {"guided_regex": "a"}, "guided_regex"),
        (responses, {"text": {"format": flat}}, "text.format.schema"),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": wrong}}},
            "output_config.format.schema",
        ),
    ):
        answer = httpx.post(tool_url + path, json={**asked[path], **fields})
        assert answer.status_code == 400, answer.text
        assert f"{param}: " in answer.json()["error"]["message"]
        assert ("'get_weather'" in answer.text) == (param == "tools")


@pytest.mark.parametrize(
    ("convention", "call"),
    [
        (Convention.HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        (Convention.MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]'),
        (
            Convention.QWEN3_CODER,
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_what_stands_in_the_text_is_no_call(convention: Convention, call: str, size: int) -> None:
    functions = [Function(name="f", parameters={"properties": {"a": {"type": "integer"}}})]

    def read(text: str) -> tuple[str, str]:
        deltas = CallDeltas(convention, functions, is_calls_or_text=True)
        content, arguments = "", ""
        for place in range(0, len(text), size):
            found = deltas.delta(text[place : place + size], place + size >= len(text))
            content += found.get("content", "")
            for part in found.get("tool_calls", ()):
                arguments += part["function"]["arguments"]
        return content, arguments

    for text in (
        f'{{"said": "{call}"}}',
        '{"said": [TOOL_CALLS] <tool_call>',
        "[TOOL_CALL",
        '"<"',
        "5",
    ):
        assert read(text) == (text, ""), text
    for space in ("", "\n "):
        assert read(space + call) == ("", '{"a": 1}')
