"""Functions whose schemas have what no grammar can say: taken unless they are strict."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft.cli.stack import LocalStack
from gateway.openai.call_grammars import call_grammar
from gateway.openai.relaxed_schemas import relaxed
from gateway.openai.tools import Convention, Tool, tool_use
from testing import stack as stacks
from tests.gateway.test_call_grammars import Language

KEPT: dict[str, Any] = {"n": {"type": "integer", "minimum": 0, "maximum": 9}}
UNSAYABLE: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": True},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    {"not": {"type": "null"}},
    {"type": "string", "format": "iri"},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"type": "string", "pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+@[a-z]+\.com$"},
    {"type": "string", "pattern": r"\bword\b"},
    {"type": "array", "items": {"$ref": "#/$defs/late"}},
    {"type": "integer", "enum": [9007199254740993, 1234567890123456789]},
]  # fmt: skip


def tool(value: dict[str, Any], **fields: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {**KEPT, "v": value},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"late": {"type": "string", "pattern": "a(?=b)b"}},
    }
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


def ask(url: str, value: dict[str, Any], **fields: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool(value, **fields)],
        "max_tokens": 2,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("value", UNSAYABLE, ids=json.dumps)
def test_a_function_that_is_not_strict_is_taken(tool_url: str, value: dict[str, Any]) -> None:
    answer = ask(tool_url, value)
    assert answer.status_code == 200, answer.text
    refused = ask(tool_url, value, strict=True)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("tools")
    assert refused.json()["error"]["message"].startswith("tools: the function 'f': ")


@pytest.mark.parametrize("convention", ["hermes", "qwen3_coder", "mistral"])
def test_a_strict_function_of_several_is_named(
    stack: LocalStack, tool_url: str, convention: str
) -> None:
    verifier = next(service.health for service in stack.services if service.name == "verify")
    tools = [tool({"not": {}} if name == "g" else {}, strict=True, name=name) for name in "fgh"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 2}
    with stacks.running_gateway(verifier, tool_call_parser=convention) as (url, _):
        stacks.eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
        for choice in ("auto", "required"):
            fields = {**body, "tool_choice": choice}
            refused = httpx.post(f"{url}/v1/chat/completions", json=fields, timeout=60)
            assert refused.status_code == 400, refused.text
            message = refused.json()["error"]["message"]
            assert message.startswith("tools: the function 'g': "), message


@pytest.mark.parametrize("value", [{"type": "any"}, {"$ref": "#/$defs/none"}])
def test_what_is_no_schema_is_refused_all_the_same(tool_url: str, value: dict[str, Any]) -> None:
    assert ask(tool_url, value).status_code == 400


@pytest.mark.parametrize(
    ("convention", "call"),
    [
        (Convention.HERMES, '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'),
        (Convention.LLAMA, '{{"name": "f", "parameters": {}}}'),
        (Convention.MISTRAL, '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]'),
        (Convention.HARMONY, "<|channel|>commentary to=functions.f json<|message|>{}"),
    ],
)
@pytest.mark.parametrize("value", UNSAYABLE, ids=json.dumps)
def test_what_can_be_kept_to_is_kept_to(
    convention: Convention, call: str, value: dict[str, Any], tmp_path: Path
) -> None:
    language = Language(tmp_path, "x")
    use = tool_use([Tool.model_validate(tool(value))], "required", None)
    assert use is not None
    grammar = call_grammar(use, convention, language.tokenizer)
    assert grammar is not None
    assert language.has(grammar, call.format('{"n": 1}'))
    for wrong in ("{}", '{"n": 12}', '{"n": 1, "w": 1}'):
        assert not language.has(grammar, call.format(wrong))


def test_qwen3_coders_parameters_are_taken_too(tmp_path: Path) -> None:
    language = Language(tmp_path, "x")
    use = tool_use([Tool.model_validate(tool(UNSAYABLE[1]))], "required", None)
    assert use is not None
    grammar = call_grammar(use, Convention.QWEN3_CODER, language.tokenizer)
    assert grammar is not None
    call = "<tool_call>\n<function=f>\n<parameter=n>\n{}\n</parameter>\n<parameter=v>\n{}\n"
    call += "</parameter>\n</function>\n</tool_call>"
    assert language.has(grammar, call.format(1, '["a", "a"]'))
    assert not language.has(grammar, call.format(12, '["a"]'))
    assert not language.has(grammar, call.format(1, "[1]"))


@pytest.mark.parametrize(
    "pattern", [r"a\\b", r"[\^x](?:y)(?P<n>z)(?i)q", r"\d{2}\.\w", r"\\\\1", "(?<name>a)"]
)
def test_a_pattern_that_a_grammar_can_match_stays(pattern: str) -> None:
    assert relaxed({"items": [{"pattern": pattern}]})["items"] == [{"pattern": pattern}]


@pytest.mark.parametrize("pattern", [r"(a)\1", r"\bx", r"x\\\B", "(?<=a)b", "(?<!a)b", "(?=a)"])
def test_a_pattern_that_it_cannot_match_counts_for_nothing(pattern: str) -> None:
    re.compile(pattern)
    assert relaxed({"items": [{"pattern": pattern}]})["items"] == [{}]


def test_a_schemas_own_options_come_first() -> None:
    given = {"x-guidance": {"lenient": False, "whitespace_flexible": False}}
    assert relaxed(given)["x-guidance"] == {
        "lenient": False, "whitespace_flexible": False, "coerce_one_of": True,
    }  # fmt: skip
