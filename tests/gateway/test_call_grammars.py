"""Calls by model family: what grammars let models write, and what clients get of it from a real
verifier.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import jsonschema
import llguidance
import openai
import pytest

from foredraft.api.inference.v1 import inference_pb2, inference_pb2_grpc
from foredraft.cli.stack import LocalStack
from foredraft.errors import InvalidRequest
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import Grammar, GrammarKind
from gateway.openai.call_grammars import after_reasoning, call_grammar, in_final_channel
from gateway.openai.response_format import schema_grammar
from gateway.openai.tools import Convention, NamedChoice, Tool, tool_use
from testing import stack as stacks
from testing import tiny_tokenizers
from tests.gateway.conftest import TOOL_TEMPLATE
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import load_vocabulary

CODER, MISTRAL = Convention.QWEN3_CODER, Convention.MISTRAL
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string"},
        "e": {"type": "string", "enum": ["x", "y"]},
        "r": {"$ref": "#/$defs/flag"},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n{}</function>\n</tool_call>"
G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
S, E_Y = "<parameter=s>\na\n b::=\n</parameter>\n", "<parameter=e>\ny\n</parameter>\n"
R = "<parameter=r>\ntrue\n</parameter>\n"
M, N = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
CHANNEL_TOKENS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"]
NEW = "{{ tools }}[TOOL_CALLS][ARGS]"


class Language:
    """Tells which texts a grammar lets a model with special tokens write."""

    def __init__(self, folder: Path, template: str) -> None:
        backend = tiny_tokenizers.byte_level()
        backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", *CHANNEL_TOKENS])
        tiny_tokenizers.save(backend, folder, template)
        self.tokenizer = Tokenizer.from_dir(folder)
        eos = frozenset([self.tokenizer.encode("</s>", False)[0]])
        self.vocabulary = load_vocabulary(folder, self.tokenizer.vocab_size, eos)

    def has(self, grammar: Grammar, text: str) -> bool:
        source = to_llguidance(grammar.kind, grammar.text)
        matcher = llguidance.LLMatcher(self.vocabulary, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = self.tokenizer.encode(text, False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("convention", "template", "choice", "parallel", "good", "bad"),
    [
        (CODER, "x", "auto", None, ["hm", F.format(""), f"so: {F.format(S + E_Y + R)}\n{G} well"], [F.format("<parameter=z>\n1\n</parameter>\n"), G.replace("g", "h"), F.replace("1", "12").format("")]),  # noqa: E501
        (CODER, "x", "required", None, [F.format(S), f"{G}\n{F.format(R)}"], ["hm", f"so {G}", F.format("<parameter=e>\nz\n</parameter>\n"), F.format(R.replace("true", "1"))]),  # noqa: E501
        (CODER, "x", "required", False, [G], [f"{G}\n{G}"]),
        (MISTRAL, "x", "auto", None, ["hm", f"[TOOL_CALLS] [{M}, {N}]", f"so[TOOL_CALLS][{N}]"], [f"[TOOL_CALLS][{M.replace('f', 'h')}]", "[TOOL_CALLS]f[ARGS]{}", f"[TOOL_CALLS][{M.replace('1', '12')}]"]),  # noqa: E501
        (MISTRAL, "x", "required", False, [f"[TOOL_CALLS][{M}]"], ["hm", f"[TOOL_CALLS][{M}, {M}]"]),  # noqa: E501
        (MISTRAL, NEW, "auto", None, ["hm", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'], ["[TOOL_CALLS]h[ARGS]{}", f"[TOOL_CALLS][{M}]"]),  # noqa: E501
        (MISTRAL, NEW, "required", None, ['[TOOL_CALLS]f[ARGS]{"a": 1}'], ["hm", "[TOOL_CALLS]f[ARGS]{}"]),  # noqa: E501
    ],
)  # fmt: skip
def test_what_may_be_written(
    convention: Any, template: str, choice: Any, parallel: Any, good: Any, bad: Any, tmp_path: Path
) -> None:
    language = Language(tmp_path, template)
    use = tool_use([Tool.model_validate(tool) for tool in TOOLS], choice, parallel)
    assert use is not None
    grammar = call_grammar(use, convention, language.tokenizer)
    assert grammar is not None
    for text in good:
        assert language.has(grammar, text), text
    for text in bad:
        assert not language.has(grammar, text), text
    if choice == "required":
        for is_open, begin in ((True, ""), (False, "<think>")):
            text = after_reasoning(grammar.text, "<think>", "</think>", is_open)
            thoughtful = Grammar(grammar.kind, text)
            assert language.has(thoughtful, f"{begin}so {bad[0]}</think>\n\n{good[0]}")
            assert not language.has(thoughtful, f"{begin}so</think>{bad[0]}")
            assert language.has(thoughtful, good[0]) == (not is_open)


HERMES_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
JSON_ALONE: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("convention", "template", "call"),
    [
        (Convention.OWN, "x", HERMES_G),
        (Convention.HERMES, "x", HERMES_G),
        (CODER, "x", G),
        (MISTRAL, "x", f"[TOOL_CALLS] [{N}]"),
        (MISTRAL, NEW, "[TOOL_CALLS]g[ARGS]{}"),
    ],
)
def test_calls_or_json(convention: Any, template: str, call: str, tmp_path: Path) -> None:
    """With a schema an answer is either calls or JSON of the schema."""
    language = Language(tmp_path, template)
    free, forced = (
        tool_use([Tool.model_validate(tool) for tool in TOOLS], choice, None)
        for choice in ("auto", "required")
    )
    assert free is not None
    assert forced is not None
    schema = schema_grammar(JSON_ALONE)
    grammar = call_grammar(free, convention, language.tokenizer, schema)
    assert grammar is not None
    for text in (call, '{"name": "g"}', '{"name":"<tool_call>"}'):
        assert language.has(grammar, text), text
    wrong = (
        "hm",
        "",
        '{"name": 1}',
        f"so {call}",
        f'{call}\n{{"name": "g"}}',
        f'{{"name": "g"}}{call}',
    )
    for text in wrong:
        assert not language.has(grammar, text), text
    # A call that has to come leaves no text.
    assert call_grammar(forced, convention, language.tokenizer, schema) == call_grammar(
        forced, convention, language.tokenizer
    )
    for answer, kind, told in (
        (Grammar(GrammarKind.REGEX, "a"), convention, "give a JSON schema"),
        (Grammar(GrammarKind.JSON_SCHEMA, "5"), convention, "a schema is an object"),
        (schema, Convention.LLAMA, "tool_choice: required"),
    ):
        with pytest.raises(InvalidRequest, match=f"grammar: .*{told}"):
            call_grammar(free, kind, language.tokenizer, answer)


THOUGHT = "<|channel|>analysis<|message|>Is it {?\n<|end|><|start|>assistant"
TOLD = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"
CALL_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
CALL_G = " to=functions.g<|channel|>commentary json<|message|>{}"
ANSWER = '<|channel|>final<|message|>{"a": 1}'


def test_calls_in_channels(tmp_path: Path) -> None:
    """gpt-oss's published format: a message to the function, after its reasoning."""
    language = Language(tmp_path, "x")
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    free, forced = tool_use(tools, "auto", None), tool_use(tools, "required", None)
    named: Any = NamedChoice.model_validate({"type": "function", "function": {"name": "g"}})
    only_g = tool_use(tools, named, None)
    assert free is not None
    assert forced is not None
    assert only_g is not None
    assert call_grammar(free, Convention.HARMONY, language.tokenizer) is None
    grammar = call_grammar(forced, Convention.HARMONY, language.tokenizer)
    assert grammar is not None
    for text in (CALL_F, CALL_G, THOUGHT + CALL_F, THOUGHT + TOLD + CALL_G):
        assert language.has(grammar, text), text
    wrong = CALL_F.replace("1", "12"), CALL_F.replace("functions.f", "functions.h"), "hm"
    for text in (*wrong, THOUGHT, ANSWER, CALL_F + CALL_G, CALL_F.replace("<|message|>", "")):
        assert not language.has(grammar, text), text
    either = call_grammar(free, Convention.HARMONY, language.tokenizer, schema_grammar(SCHEMA))
    assert either is not None
    for text in (CALL_F, THOUGHT + CALL_G, ANSWER, THOUGHT + TOLD + ANSWER):
        assert language.has(either, text), text
    for text in (ANSWER.replace("1", "12"), "hm", THOUGHT, ANSWER + CALL_F, CALL_F + ANSWER):
        assert not language.has(either, text), text
    grammar = call_grammar(only_g, Convention.HARMONY, language.tokenizer)
    assert grammar is not None
    assert language.has(grammar, THOUGHT + CALL_G)
    assert not language.has(grammar, CALL_F)


def test_a_schema_in_the_final_channel(tmp_path: Path) -> None:
    language = Language(tmp_path, "x")
    grammar = in_final_channel(SCHEMA, language.tokenizer)
    formatted = ANSWER.replace("final", "final <|constrain|>json")
    for text in (ANSWER, formatted, THOUGHT + ANSWER, THOUGHT + TOLD + ANSWER):
        assert language.has(grammar, text), text
    for text in ('{"a": 1}', THOUGHT, ANSWER.replace("1", "12"), ANSWER + "\n", CALL_F):
        assert not language.has(grammar, text), text
    assert language.has(in_final_channel(True, language.tokenizer), ANSWER)
    with pytest.raises(InvalidRequest, match="grammar: x-guidance"):
        in_final_channel({"x-guidance": 5}, language.tokenizer)


@pytest.mark.parametrize("convention", [CODER, MISTRAL])
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": [1], "required": 5},
        {"properties": {"a": 1, "b": {"type": "string", "enum": 5}, "c": True}},
        {"properties": {"a": {"type": "object", "x-guidance": 5}}, "x-guidance": 5},
    ],
)
def test_strange_schemas_are_refused_or_taken(
    convention: Any, parameters: dict[str, Any], tmp_path: Path
) -> None:
    """The verifier says what is wrong with a schema; nothing here may fail over one."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    use = tool_use([Tool.model_validate(tool)], "auto", None)
    assert use is not None
    tokenizer = Language(tmp_path, "x").tokenizer
    if "x-guidance" in parameters:
        with pytest.raises(InvalidRequest, match="x-guidance"):
            call_grammar(use, convention, tokenizer)
    else:
        assert call_grammar(use, convention, tokenizer) is not None


@pytest.fixture(scope="module", params=["hermes", "llama3", "mistral", "qwen3_coder"])
def family(
    request: pytest.FixtureRequest, stack: LocalStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    """Returns a client of a gateway whose flag names the convention of calls."""
    template = tmp_path_factory.mktemp("family") / "tools.jinja"
    template.write_text(TOOL_TEMPLATE)
    verifier = next(service.health for service in stack.services if service.name == "verify")
    flags = {"chat_template": template, "tool_call_parser": request.param}
    with stacks.running_gateway(verifier, **flags) as (url, _):
        with httpx.Client(base_url=url, timeout=60) as web:
            stacks.eventually(lambda: web.get("/health").status_code == 200)
        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
            yield client


def test_every_familys_calls_arrive(family: openai.OpenAI) -> None:
    schema = {**SCHEMA, "properties": {k: SCHEMA["properties"][k] for k in "aer"}}
    schema |= {"required": ["a", "e"], "x-guidance": {"whitespace_flexible": False}}
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 7,
    }
    choice = family.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "f"
    jsonschema.validate(json.loads(call.function.arguments), schema)
    name, arguments = "", ""
    for chunk in family.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        assert not delta.content
        for part in delta.tool_calls or ():
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert (name, arguments) == ("f", call.function.arguments)


def test_calls_told_apart_by_special_tokens_are_refused_over_grpc(stack: LocalStack) -> None:
    verifier = next(service.health for service in stack.services if service.name == "verify")
    chat = inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role="user", content="Hi")],
        functions=[inference_pb2.Function(name="f")],
    )
    with (
        stacks.running_gateway(verifier, tool_call_parser="mistral") as (url, address),
        grpc.insecure_channel(address) as channel,
    ):
        stacks.eventually(lambda: httpx.get(url + "/health", timeout=60).status_code == 200)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=r"chat\.functions: .*ask /v1/chat/completions"):
            list(stub.Generate(inference_pb2.GenerateRequest(chat=chat)))
