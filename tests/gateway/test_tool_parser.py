"""Calls found in streamed text: however it is cut into chunks, the same pieces come out."""

import json
import random
from typing import Any

import pytest

from foredraft.errors import InvalidRequest
from gateway.openai.call_parsers import CallDeltas
from gateway.openai.tools import (
    AllowedChoice,
    Convention,
    NamedChoice,
    Tool,
    convention_of,
    told,
    tool_use,
)

ONE = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"]{", "b": [1, {"c": null}]}}\n</tool_call>'
)
TWO = '<tool_call>\n{"name": "g_2", "arguments": {}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"x": "é"}}'
ARGUMENTS = '{"a": "}\\"]{", "b": [1, {"c": null}]}'
MISTRAL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
CODER = (
    "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\nx\ny\n</parameter>\n"
    "<parameter=c>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
CODED = '{"a": 12, "b": "x\\ny", "c": true}'
CASES: list[tuple[Convention, str, str, list[tuple[str, str]]]] = [
    (Convention.HERMES, "no call <tool_cal at all", "no call <tool_cal at all", []),
    (Convention.HERMES, "", "", []),
    (Convention.HERMES, ONE, "", [("f", ARGUMENTS)]),
    (Convention.OWN, f"Let me see.\n{ONE}\n{TWO}", "Let me see.\n", [("f", ARGUMENTS), ("g_2", "{}")]),  # noqa: E501
    (Convention.HERMES, f"{TWO} and then {TWO}\n", "and then ", [("g_2", "{}"), ("g_2", "{}")]),
    (Convention.HERMES, f"a <tool_call>nonsense</tool_call> b{TWO}", "a <tool_call>nonsense</tool_call> b", [("g_2", "{}")]),  # noqa: E501
    (Convention.HERMES, ONE[:-30], "", [("f", ONE[ONE.index('{"a"') : -30])]),
    (Convention.HERMES, '<tool_call>\n{"na', "", []),
    (Convention.HERMES, "a<tool_call>", "a", []),
    (Convention.HERMES, "a<tool_c", "a", []),
    (Convention.HERMES, "a <to", "a <to", []),
    (Convention.HERMES, 'a<tool_call>{"name": "some thing', "a", []),
    (Convention.HERMES, 'a<tool_call> {"name" : "f", "argum', "a", []),
    (Convention.HERMES, 'a<tool_call> {"name" : "f", "arguments": ', "a", []),
    (Convention.HERMES, "a<tool_call>is what models write", "a<tool_call>is what models write", []),
    (Convention.LLAMA, f"{LLAMA}; {LLAMA}", "", [("f", '{"x": "é"}'), ("f", '{"x": "é"}')]),
    (Convention.LLAMA, 'Hm: {"name" is not one', 'Hm: {"name" is not one', []),
    (Convention.MISTRAL, "no call [TOOL at all", "no call [TOOL at all", []),
    (Convention.MISTRAL, f'[TOOL_CALLS] [{MISTRAL}]', "", [("f", ARGUMENTS)]),
    (Convention.MISTRAL, f'So:[TOOL_CALLS][{MISTRAL}, {MISTRAL}]\nwell', "So:well", [("f", ARGUMENTS)] * 2),  # noqa: E501
    (Convention.MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": [{}]}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "", [("f", '{"a": [{}]}'), ("g", "{}")]),  # noqa: E501
    (Convention.MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),  # noqa: E501
    (Convention.MISTRAL, '[TOOL_CALLS] [{"na', "", []),
    (Convention.QWEN3_CODER, "no call <tool_cal at all", "no call <tool_cal at all", []),
    (Convention.QWEN3_CODER, f"So:\n{CODER}\n{CODER}", "So:\n", [("f", CODED), ("f", CODED)]),
    (Convention.QWEN3_CODER, "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),  # noqa: E501
    (Convention.QWEN3_CODER, "<tool_call>none</tool_call> b", "<tool_call>none</tool_call> b", []),
    (Convention.QWEN3_CODER, CODER[:-50], "", [("f", '{"a": 12, "b": "x\\ny"')]),
]  # fmt: skip


def joined(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """Joins deltas like a client."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"]
                assert call["type"] == "function"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return content, calls


@pytest.mark.parametrize(("convention", "text", "content", "calls"), CASES)
def test_any_cutting_gives_the_same(convention: Any, text: str, content: str, calls: Any) -> None:
    for seed in range(40):
        rng = random.Random(seed)
        found = CallDeltas(convention)
        places = sorted(rng.choices(range(len(text) + 1), k=seed))
        cuts = zip([0, *places], [*places, len(text)], strict=True)
        deltas = [found.delta(text[begin:end], False) for begin, end in cuts]
        deltas.append(found.delta("", True))
        assert joined(deltas) == (content, calls)
        assert found.num_calls == len(calls)


def test_text_is_not_held_back_longer_than_needed() -> None:
    found = CallDeltas(Convention.HERMES)
    assert found.delta("a < b", False) == {"content": "a < b"}
    assert found.delta(" <tool", False) == {"content": " "}
    assert found.delta("box", False) == {"content": "<toolbox"}
    assert found.delta(ONE[:40], False)["tool_calls"][0]["function"]["name"] == "f"
    assert found.delta('abc": 1', False)["tool_calls"][0]["function"]["arguments"] == 'abc": 1'


@pytest.mark.parametrize(
    ("template", "convention"),
    [
        ("{{ messages }}", Convention.OWN),
        ("{% if tools %}<tool_call>{% endif %}", Convention.HERMES),
        ('{{ tools }} {"name": name, "parameters": x} <|python_tag|>', Convention.LLAMA),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", None),
        ("{% if tools %}<tool_call><function=f>{% endif %}", None),
        ("{{ tools }}<tool_call><function=f><parameter=a>", Convention.QWEN3_CODER),
        ("{{ tools }}[TOOL_CALLS]", Convention.MISTRAL),
        ("{{ tools }}<|start|><|channel|>commentary to=functions.f<|call|>", Convention.HARMONY),
    ],
)
def test_conventions(template: str, convention: Convention | None) -> None:
    assert convention_of(template) is convention


def tool(name: str = "f", **more: Any) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, **more}})


def test_templates_that_know_no_tools_get_them_told() -> None:
    use = tool_use([tool(description="Adds.")], "auto", None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    plain, variables = told(messages, use, Convention.OWN)
    assert variables == {}
    assert plain[0]["content"].startswith("Be brief.\n\n")
    assert '{"name": "f", "description": "Adds."}' in plain[0]["content"]
    expected = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert plain[2]["content"] == expected
    assert plain[3] == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    parsed, variables = told(messages, use, Convention.HERMES)
    assert variables["tools"][0]["function"]["name"] == "f"
    assert parsed[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert parsed[0] == messages[0]


@pytest.mark.parametrize("arguments", ['{"a": 1', "[1]", "none", r'{"a": "\ud83d"}'])
def test_a_call_without_whole_arguments_can_be_sent_back(arguments: str) -> None:
    """A model that max_tokens stopped has written one, or half a character."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    (parsed,), _ = told(messages, None, Convention.HERMES)
    assert parsed["tool_calls"][0]["function"]["arguments"] == arguments
    (plain,), _ = told(messages, None, Convention.OWN)
    assert json.loads(plain["content"].split("\n")[1]) == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([], "required", "tool_choice"),
        ([tool("a b")], None, "tools.0.function.name"),
        ([tool(), tool()], None, "tools.1.function.name"),
        ([tool(parameters={"type": "array"})], None, "tools.0.function.parameters"),
        ([tool()], "sometimes", "tool_choice"),
        (
            [tool()],
            NamedChoice.model_validate({"type": "function", "function": {"name": "g"}}),
            "tool_choice",
        ),
        ([tool(f"f{i}") for i in range(129)], None, "tools"),
    ],
)
def test_wrong_tools(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        tool_use(tools, choice, None)
    assert raised.value.field == field


def allowed(mode: str, *names: str) -> AllowedChoice:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return AllowedChoice.model_validate(choice)


def test_the_grammar_says_what_was_asked_for() -> None:
    tools = [tool(), tool("g", parameters={"type": "object", "properties": {}})]
    one = NamedChoice.model_validate({"type": "function", "function": {"name": "g"}})
    for choice, parallel, names, required, single in [
        ("auto", None, ["f", "g"], False, False),
        ("required", False, ["f", "g"], True, True),
        (one, None, ["g"], True, True),
        (allowed("auto", "g"), None, ["g"], False, False),
        (allowed("required", "g", "f", "g"), False, ["g", "f"], True, True),
    ]:
        use = tool_use(tools, choice, parallel)
        assert use is not None
        assert use.tools == tools  # the model is told of all
        tags = json.loads(use.grammar(Convention.HERMES).text)
        assert [s["begin"].split('"')[3] for s in tags["structures"]] == names
        assert (tags["at_least_one"], tags["stop_after_first"]) == (required, single)
    assert tool_use(tools, "none", None) is None


def test_qwen3_coders_texts_stand_as_they_are() -> None:
    """A value that looks like a number is a text if the schema says so."""
    properties = {"a": {"type": "string"}, "c": {"type": "string"}}
    use = tool_use([tool(parameters={"type": "object", "properties": properties})], "auto", None)
    assert use is not None
    found = CallDeltas(Convention.QWEN3_CODER, use.callable).delta(CODER, True)
    arguments = json.loads(found["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"a": "12", "b": "x\ny", "c": "True"}


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("1.10", "1.10"),
        ("0.12345678901234567890123", "0.12345678901234567890123"),
        ("9e12", "9e12"),
        ('\n{"a": 1,\n "a": 2}\n', '{"a": 1,\n "a": 2}'),
        ("True", "true"),
        ("None", "null"),
        ("NaN", '"NaN"'),
        ("[-Infinity]", '"[-Infinity]"'),
        ("not JSON", '"not JSON"'),
    ],
)
def test_qwen3_coders_values_stay_as_they_were_written(value: str, argument: str) -> None:
    use = tool_use([tool(parameters={"type": "object", "properties": {}})], "auto", None)
    assert use is not None
    text = f"<tool_call>\n<function=f>\n<parameter=a>{value}</parameter>\n</function>\n</tool_call>"
    found = CallDeltas(Convention.QWEN3_CODER, use.callable).delta(text, True)
    assert found["tool_calls"][0]["function"]["arguments"] == f'{{"a": {argument}}}'


def test_mistrals_templates_get_the_ids_that_they_take() -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call, {**call, "id": "abcDEF123"}]},
        {"role": "tool", "content": "2", "tool_call_id": "call_0123456789"},
        {"role": "tool", "content": "3", "tool_call_id": "abcDEF123"},
    ]
    found, _ = told(messages, None, Convention.MISTRAL)
    first, second = (each["id"] for each in found[0]["tool_calls"])
    assert (found[1]["tool_call_id"], found[2]["tool_call_id"]) == (first, second)
    assert second == "abcDEF123"
    assert len(first) == 9
    assert first.isalnum()


def test_gpt_oss_templates_get_reasoning_by_their_name() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "a", "tool_calls": [call]},
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
    ]
    found, _ = told(messages, None, Convention.HARMONY)
    assert [each.get("thinking") for each in found] == ["a", None]
