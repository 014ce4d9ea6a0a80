"""Structured output by the official openai client from the stack that `foredraft serve` starts,
drafting on and off.
"""

import concurrent.futures
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import openai
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from testing import stack as stacks

TARGET = Path(__file__).parents[2] / "models" / "foredraft-demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "who": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["who", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "who", "strict": True, "schema": SCHEMA},
}
ASKED: Any = [{"role": "user", "content": "Who lives in the house? Tell name and age."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {
                "town": {"type": "string", "minLength": 1, "maxLength": 10},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["town", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FIXED: Any = {"model": "demo", "max_tokens": 160, "temperature": 1.0}


@pytest.fixture(scope="module")
def stack() -> Iterator[LocalStack]:
    flags = {"served_model_name": "demo", "max_total_tokens": 16384, "page_size": 32}
    with stacks.running_stack(TARGET, skip_draft_self_test=True, **flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: LocalStack) -> Iterator[openai.OpenAI]:
    url = stack.urls["http"] + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.mark.slow
def test_a_hundred_of_a_hundred_are_valid_and_equal_without_drafts(client: openai.OpenAI) -> None:
    def ask(seed: int, enabled: bool) -> Any:
        extra = {"speculation": {"enabled": enabled}}
        return client.chat.completions.create(
            messages=ASKED, response_format=FORMAT, seed=seed, extra_body=extra, **FIXED
        )

    with concurrent.futures.ThreadPoolExecutor(32) as threads:
        drafted = list(threads.map(ask, range(100), [True] * 100))
        plain = list(threads.map(ask, range(100), [False] * 100))
    for one, other in zip(drafted, plain, strict=True):
        choice = one.choices[0]
        assert choice.finish_reason == "stop", choice.message.content
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.message.content == other.choices[0].message.content
    accepted = [answer.usage.completion_tokens_details for answer in drafted]
    assert sum(details.accepted_prediction_tokens for details in accepted) > 0
    assert len({answer.choices[0].message.content for answer in drafted}) > 20


def test_calls_or_a_schema_are_equal_without_drafts(client: openai.OpenAI) -> None:
    asked: Any = {**FIXED, "messages": ASKED, "tools": [WEATHER], "response_format": FORMAT}
    asked |= {"parallel_tool_calls": False}

    def ask(seed: int, enabled: bool) -> Any:
        extra = {"speculation": {"enabled": enabled}}
        # This small model prefers calls: every second answer is made to begin with a brace.
        bias = {"91": 100} if seed % 2 else {}
        answer = client.chat.completions.create(
            seed=seed, logit_bias=bias, extra_body=extra, **asked
        )
        message = answer.choices[0].message
        calls: Any = message.tool_calls or []
        return message.content, [(call.function.name, call.function.arguments) for call in calls]

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        drafted = list(threads.map(ask, range(24), [True] * 24))
        plain = list(threads.map(ask, range(24), [False] * 24))
    assert drafted == plain
    for content, calls in drafted:
        assert bool(content) != bool(calls)
        if content:
            jsonschema.validate(json.loads(content), SCHEMA)
        for _, arguments in calls:
            parameters = WEATHER["function"]["parameters"]
            jsonschema.validate(json.loads(arguments), parameters)
    assert {bool(calls) for _, calls in drafted} == {True, False}


def test_any_json_object(client: openai.OpenAI) -> None:
    # The end is asked for, since this small model knows none; what is left of the object is the
    # grammar's.
    answer = client.chat.completions.create(
        messages=ASKED,
        response_format={"type": "json_object"},
        logit_bias={"92": 5},
        seed=1,
        n=4,
        **FIXED,
    )
    assert all((choice.message.content or "").startswith("{") for choice in answer.choices)
    done = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert done
    assert all(isinstance(json.loads(choice.message.content or ""), dict) for choice in done)


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_whole_and_streamed(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    asked = {
        **FIXED,
        "messages": ASKED,
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "seed": 5,
        "max_tokens": 300,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    calls = whole.message.tool_calls
    assert calls
    assert whole.message.content is None
    assert whole.finish_reason in ("stop" if choice is NAMED else "tool_calls", "length")
    found: list[tuple[str, str]] = []
    ids, finish = set(), None
    for chunk in client.chat.completions.create(stream=True, **asked):
        delta = chunk.choices[0].delta
        assert not delta.content
        for part in delta.tool_calls or ():
            assert part.function is not None
            if part.index == len(found):
                assert part.function.name
                ids.add(part.id)
                found.append((part.function.name, ""))
            name, arguments = found[part.index]
            found[part.index] = (name, arguments + (part.function.arguments or ""))
        finish = chunk.choices[0].finish_reason or finish
    assert found == [(call.function.name, call.function.arguments) for call in calls]  # type: ignore[union-attr]
    assert finish == whole.finish_reason
    assert len(ids) == len(found)
    if choice is NAMED or not parallel:
        assert len(found) == 1
        assert whole.finish_reason != "length"
    if whole.finish_reason == "length":
        found.pop()  # cut short
    for name, arguments in found:
        schema = WEATHER if name == "get_weather" else None
        expected = schema["function"]["parameters"] if schema else {"maxProperties": 0}
        jsonschema.validate(json.loads(arguments), expected)


def test_auto_leaves_text_alone_and_none_does_not_call(client: openai.OpenAI) -> None:
    asked: Any = {**FIXED, "messages": ASKED, "tools": [WEATHER], "seed": 3, "max_tokens": 24}
    auto = client.chat.completions.create(tool_choice="auto", **asked).choices[0]
    assert auto.message.content
    assert auto.message.tool_calls is None
    none = client.chat.completions.create(tool_choice="none", **asked).choices[0]
    assert none.message.tool_calls is None
    # A conversation goes on behind a call and its result.
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    turns: Any = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Sunny"},
    ]
    answer = client.chat.completions.create(**{**asked, "messages": turns})
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_native_and_grpc_give_the_same(stack: LocalStack) -> None:
    regex = r"(Lily|Tom) has [1-9] (cats|dogs)\."
    ebnf = 'root ::= ("a" | "b"){2} [0-9]'
    for kind, text, pattern in (("regex", regex, regex), ("ebnf", ebnf, "[ab]{2}[0-9]")):
        sampling = {"temperature": 1.0, "sampling_seed": 9, "max_new_tokens": 40, kind: text}
        body = {"text": "Story: ", "sampling_params": sampling}
        native = httpx.post(stack.urls["http"] + "/generate", json=body, timeout=60).json()
        assert re.fullmatch(pattern, native["text"])
        assert native["meta_info"]["finish_reason"]["type"] == "stop"
        request = inference_pb2.GenerateRequest(
            text="Story: ",
            sampling=inference_pb2.SamplingParams(
                temperature=1.0,
                seed=9,
                max_new_tokens=40,
                grammar=inference_pb2.Grammar(**{kind: text}),
            ),
        )
        with grpc.insecure_channel(stack.urls["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            pieces = list(stub.Generate(request, timeout=60))
        assert "".join(piece.text for piece in pieces) == native["text"]
        assert pieces[-1].completion.finish_reason == inference_pb2.FINISH_REASON_STOP


def test_functions_over_grpc_are_the_same(stack: LocalStack, client: openai.OpenAI) -> None:
    asked = {**FIXED, "messages": ASKED, "tools": [WEATHER], "tool_choice": "required", "seed": 5}
    whole = client.chat.completions.create(parallel_tool_calls=False, **asked).choices[0]
    assert whole.message.tool_calls
    function = WEATHER["function"]
    chat = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(**ASKED[0])],
        functions=[
            inference_pb2.Function(
                name=function["name"],
                description=function["description"],
                parameters=json.dumps(function["parameters"]),
            )
        ],
        function_use=inference_pb2.FUNCTION_USE_REQUIRED,
        parallel_calls=False,
    )
    sampling = inference_pb2.SamplingParams(temperature=1.0, seed=5, max_new_tokens=160)
    request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling)
    with grpc.insecure_channel(stack.urls["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        pieces = list(stub.Generate(request, timeout=60))
        chat.functions[0].name = "a b"
        with pytest.raises(grpc.RpcError, match=r"chat\.functions\.0\.name"):
            next(stub.Generate(request.__class__(chat=chat), timeout=60))
    calls = [call for piece in pieces for call in piece.calls]
    assert calls[0].name == "get_weather"
    assert calls[0].id
    arguments = "".join(call.arguments for call in calls)
    assert arguments == whole.message.tool_calls[0].function.arguments  # type: ignore[union-attr]
    assert "".join(piece.text for piece in pieces) == ""
    assert pieces[-1].completion.finish_reason == inference_pb2.FINISH_REASON_CALLS


_PATTERN, _CHOICES = r"(Lily|Tom) has [1-9] (cats|dogs)\.", ["a.b", "c|d", "Tom"]
_GRAMMAR = 'root ::= ("a" | "b"){2} [0-9]'


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("guided_json", SCHEMA, "json"),
        ("guided_json", json.dumps(SCHEMA), "json"),
        ("guided_regex", _PATTERN, "regex"),
        ("guided_choice", _CHOICES, "choice"),
        ("guided_grammar", _GRAMMAR, "grammar"),
        ("regex", _PATTERN, "regex"),
        ("ebnf", _GRAMMAR, "grammar"),
    ],
)
def test_other_names_of_structured_outputs(
    client: openai.OpenAI, name: str, value: Any, kind: str
) -> None:
    def ask(**extra: Any) -> list[str]:
        chat = client.chat.completions.create(
            messages=ASKED, seed=4, n=3, extra_body=extra, **FIXED
        )
        completion = client.completions.create(
            prompt="Story: ", seed=4, n=3, extra_body=extra, **FIXED
        )
        choices = [*chat.choices, *completion.choices]
        assert all(choice.finish_reason == "stop" for choice in choices)
        texts = [choice.message.content or "" for choice in chat.choices]
        return texts + [choice.text for choice in completion.choices]

    null = dict.fromkeys({"guided_json", "guided_choice", "regex", "structured_outputs"} - {name})
    texts = ask(**{name: value, **null})
    assert texts == ask(structured_outputs={kind: value})
    for text in texts:
        if kind == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
        elif kind == "choice":
            assert text in _CHOICES
        else:
            assert re.fullmatch(_PATTERN if kind == "regex" else "[ab]{2}[0-9]", text)


def test_a_wrong_grammar_names_its_field(stack: LocalStack) -> None:
    sampling = inference_pb2.SamplingParams(grammar=inference_pb2.Grammar(regex="a("))
    request = inference_pb2.GenerateRequest(text="x", sampling=sampling)
    with grpc.insecure_channel(stack.urls["grpc"]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=r"sampling\.grammar") as raised:
            next(stub.Generate(request, timeout=60))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


_LETTERS = {"type": "string", "pattern": "^[ab]{60}c$"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "x", "regex": "[ab]{60}c", "max_tokens": 99}, "regex"),
        (
            "/v1/chat/completions",
            {
                "messages": ASKED,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": _LETTERS},
                },
            },
            "response_format.json_schema.schema",
        ),
        (
            "/generate",
            {"text": "x", "sampling_params": {"regex": "[ab]{60}c", "max_new_tokens": 99}},
            "sampling_params.regex",
        ),
        (
            "/v1/responses",
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "n", "schema": _LETTERS}},
            },
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {
                "messages": ASKED,
                "max_tokens": 99,
                "output_config": {"format": {"type": "json_schema", "schema": _LETTERS}},
            },
            "output_config.format.schema",
        ),
    ],
)
def test_an_error_within_a_stream_names_the_clients_field(
    stack: LocalStack, path: str, body: dict[str, Any], field: str
) -> None:
    """The text may not have the letter that the grammar ends with, which shows after 60 others."""
    of = body["sampling_params"] if path == "/generate" else body
    of |= {"bad_words": ["c"], "temperature": 0}
    with httpx.Client(base_url=stack.urls["http"], timeout=120) as http:
        whole = http.post(path, json=body)
        streamed = http.post(path, json={**body, "stream": True})
    assert whole.status_code == 400
    assert f"{field}: the grammar does not allow" in whole.text
    assert streamed.status_code == 200
    events = [line for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 1
    assert f"{field}: the grammar does not allow" in events[-1]
