"""Fields of /v1/responses: what becomes of each, and how wrong ones are refused."""

from typing import Any

import httpx
import openai
import pytest
from openai.resources.responses import Responses
from openai.resources.responses.input_tokens import InputTokens

from gateway.responses.schemas import CountBody, ResponsesBody
from testing.stack import CONTEXT_LENGTH
from tests.gateway.listed_fields import check_listed
from tests.gateway.newer_fields import INPUT_TOKENS_FIELDS, RESPONSES_FIELDS
from tests.gateway.request_fields import Field

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
            {"input": [USER, CALL, {"type": "function_call_output", "call_id": "d", "output": "1"}]},
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


def test_what_fails_before_the_first_token_has_a_status(client: openai.OpenAI) -> None:
    long = "word " * CONTEXT_LENGTH
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="tiny", input=long, stream=True)
    assert refused.value.param == "input"
    assert refused.value.code == "context_length_exceeded"


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
    for body, fields, method in (
        (ResponsesBody, RESPONSES_FIELDS, Responses.create),
        (CountBody, INPUT_TOKENS_FIELDS, InputTokens.count),
    ):
        # No model here has a choice of personalities: as any unknown field it is refused.
        check_listed(body, fields, method, left_out="personality")
