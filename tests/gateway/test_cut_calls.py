"""Calls that a stop string or a stop token of the request cuts: no answer says that they are
whole.
"""

import json
from typing import Any

import grpc
import httpx
import openai
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.weather_tool import FUNCTION, PARAMETERS

ASKED: Any = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "seed": 1,
}
WHOLE = '{"town":"Bern"}'
STOP, CUT = "ern", '{"town":"B'


@pytest.fixture(scope="module", params=["string", "token"])
def stop(request: pytest.FixtureRequest, tool_url: str) -> dict[str, Any]:
    """Returns the fields that end the text within a call's arguments."""
    if request.param == "string":
        return {"stop": [STOP]}
    with httpx.Client(base_url=tool_url, timeout=60) as http:
        vocab_size = http.get("/get_model_info").json()["vocab_size"]
        found: list[str] = []
        for start in range(0, vocab_size, 200):
            ids = [[token] for token in range(start, min(start + 200, vocab_size))]
            found += http.post("/detokenize", json={"tokens": ids}).json()["text"]
    return {"extra_body": {"stop_token_ids": [i for i, t in enumerate(found) if "B" in t]}}


@pytest.mark.parametrize("stream", [False, True])
def test_chats(caller: openai.OpenAI, stop: dict[str, Any], stream: bool) -> None:
    def ask(**more: Any) -> tuple[str, str | None]:
        if not stream:
            choice = caller.chat.completions.create(**ASKED, **more).choices[0]
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            return call.function.arguments, choice.finish_reason
        choices = [
            c.choices[0] for c in caller.chat.completions.create(**ASKED, **more, stream=True)
        ]
        parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
        arguments = "".join((part.function and part.function.arguments) or "" for part in parts)
        return arguments, choices[-1].finish_reason

    assert ask() == (WHOLE, "tool_calls")
    arguments, reason = ask(**stop)
    assert reason == "stop"
    assert arguments in (CUT, CUT[:-1])
    assert ask(stop=["<nothing>"]) == (WHOLE, "tool_calls")


def test_responses(caller: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "input": "Hi", "parallel_tool_calls": False}
    asked |= {"tools": [{"type": "function", **FUNCTION, "strict": None}]}
    asked |= {"tool_choice": "required"}
    whole = caller.responses.create(**asked, extra_body={"seed": 1}).output[-1]
    assert whole.type == "function_call"
    assert (whole.arguments, whole.status) == (WHOLE, "completed")
    cut = caller.responses.create(**asked, extra_body={"seed": 1, "stop": [STOP]}).output[-1]
    assert cut.type == "function_call"
    assert (cut.arguments, cut.status) == (CUT, "incomplete")


def test_grpc(tool_gateway: tuple[str, str]) -> None:
    chat = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role="user", content="Hi")],
        functions=[inference_pb2.Function(name="get_weather", parameters=json.dumps(PARAMETERS))],
        function_use=inference_pb2.FUNCTION_USE_REQUIRED,
        parallel_calls=False,
    )
    with grpc.insecure_channel(tool_gateway[1]) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for strings, arguments, reason in (
            ([], WHOLE, inference_pb2.FINISH_REASON_CALLS),
            ([STOP], CUT, inference_pb2.FINISH_REASON_STOP),
        ):
            sampling = inference_pb2.SamplingParams(seed=1, max_new_tokens=120, stop=strings)
            request = inference_pb2.GenerateRequest(chat=chat, sampling=sampling)
            responses = list(stub.Generate(request, timeout=60))
            calls = [call.arguments for response in responses for call in response.calls]
            assert "".join(calls) == arguments
            assert responses[-1].completion.finish_reason == reason
