"""Grammars in llguidance's Lark for Mistral's and Qwen3 Coder's calls and gpt-oss's channels.

Their answers are not JSON between two marks.
"""

import json
from typing import Any

from foredraft.errors import InvalidRequest
from foredraft.text.schemas import grammar_schema
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import Grammar, GrammarKind
from gateway.openai.harmony import MESSAGE
from gateway.openai.tools import Convention, ToolUse

ARGS = "[ARGS]"
TOOL_CALLS, CALL_ID = "[TOOL_CALLS]", "[CALL_ID]"
CHANNEL = "<|channel|>"
_TEXT = "TAG_TEXT: /(.|\\n)*/"
_DEFINITIONS = ("$defs", "definitions")
# First line of the grammars of calls; reasoning may be inserted before it.
START = "start: answer\n"


def call_grammar(
    use: ToolUse, convention: Convention, tokenizer: Tokenizer, answer: Grammar | None = None
) -> Grammar | None:
    """Returns the grammar of answers in which functions may be called.

    It is None where gpt-oss may write anything.

    Args:
        answer: JSON schema of the text that may come in place of calls; None leaves that text open.
            Where a call is required there is no such text.

    Raises:
        InvalidRequest: The answer's grammar is no JSON schema, or a schema is wrong.
    """
    if answer is not None and answer.kind is not GrammarKind.JSON_SCHEMA:
        raise InvalidRequest(
            "grammar",
            "does not go with functions that may be called: give a JSON schema, or no functions",
        )
    schema = None
    if answer is not None and not use.is_required:
        if convention is Convention.LLAMA:
            # llguidance's lexer does not go back from what began as the mark of a call.
            raise InvalidRequest(
                "grammar",
                "does not go with this model's calls, which are JSON too: give no functions, or"
                " tool_choice: required",
            )
        schema = _schema(json.loads(answer.text))
    text = [] if schema is None else [f"text: {_json(schema, 'grammar')}"]
    if convention is Convention.HARMONY:
        if not (use.is_required or text):
            return None
        return _grammar([*_harmony_calls(use, tokenizer, bool(text)), *text])
    if convention is Convention.MISTRAL:
        return _grammar([*_mistral(use, tokenizer, bool(text)), *text])
    if convention is Convention.QWEN3_CODER:
        return _grammar([*_qwen3_coder(use, bool(text)), *text])
    return use.grammar(convention, schema)


def in_final_channel(schema: Any, tokenizer: Tokenizer) -> Grammar:
    """Returns the grammar of gpt-oss's answers whose final message is JSON of a schema.

    Messages in other channels may come first.

    Raises:
        InvalidRequest: The schema is no object, or its x-guidance is none.
    """
    text = f"text: {_json(_schema(schema), 'grammar')}"
    final = f"answer: (thought next)* {_final(tokenizer)}"
    return _grammar([final, text, *_harmony_messages(tokenizer)])


def _schema(given: Any) -> dict[str, Any]:
    """Returns the schema of an answer's text as an object."""
    if given is True:
        return {}
    if not isinstance(given, dict):
        raise InvalidRequest("grammar", "a schema is an object")
    return given


def _grammar(rules: list[str]) -> Grammar:
    # A schema's text must not make this look like another kind of grammar.
    text = START + "\n".join([*rules, _TEXT]).replace("::=", ":\\u003a=")
    return Grammar(GrammarKind.EBNF, text)


def _harmony_calls(use: ToolUse, tokenizer: Tokenizer, has_text: bool) -> list[str]:
    """Returns rules for the message that ends an answer: one to a function, or a final one of JSON.

    The recipient may stand before or after the channel.
    """
    channel = f'{_token(tokenizer, CHANNEL)} "commentary"'
    calls = []
    for i, function in enumerate(use.callable):
        to = _literal(f" to=functions.{function.name}")
        head = f"({channel} {to} | {to} {channel}) format? {_token(tokenizer, MESSAGE)}"
        calls.append(f"call_{i}: {head} {_json(function.schema_of_calls())}")
    names = " | ".join(f"call_{i}" for i in range(len(calls)))
    last = f"{names} | {_final(tokenizer)}" if has_text else names
    return [f"answer: (thought next)* ({last})", *calls, *_harmony_messages(tokenizer)]


def _final(tokenizer: Tokenizer) -> str:
    """Returns a final message whose text is JSON."""
    return f'{_token(tokenizer, CHANNEL)} "final" format? {_token(tokenizer, MESSAGE)} text'


def _harmony_messages(tokenizer: Tokenizer) -> list[str]:
    """Returns rules for messages before the last one, and for the mark of a JSON message."""
    channel, message = _token(tokenizer, CHANNEL), _token(tokenizer, MESSAGE)
    end, start = _token(tokenizer, "<|end|>"), _token(tokenizer, "<|start|>")
    return [
        f'thought: {channel} ("analysis" | "commentary") {message} TAG_TEXT {end}',
        f'next: {start} "assistant"',
        f'format: " "? {_token(tokenizer, "<|constrain|>")}? "json"',
    ]


def after_reasoning(text: str, begin: str, end: str, is_open: bool) -> str:
    """Returns a grammar of this module with reasoning inserted before the answer."""
    whole = "thought SPACE?" if is_open else f"({_literal(begin)} thought SPACE?)?"
    return text.replace(
        START,
        f"start: {whole} answer\n"
        f"thought[lazy]: TAG_TEXT {_literal(end)}\n"
        "SPACE: /[ \\n\\r\\t]{1,8}/\n",
        1,
    )


def _mistral(use: ToolUse, tokenizer: Tokenizer, has_text: bool) -> list[str]:
    """Returns rules for Mistral's calls: a list of JSON after a token.

    Newer models write the function's name between two tokens instead.
    """
    begin, args = _token(tokenizer, TOOL_CALLS), _token(tokenizer, ARGS)
    template = tokenizer.template_for(True)
    source = "" if template is None else template.source
    is_new = ARGS in source
    name_end = args
    if CALL_ID in source:
        name_end = f"({_token(tokenizer, CALL_ID)} /[a-zA-Z0-9]{{9}}/)? {args}"
    calls = []
    for i, function in enumerate(use.callable):
        schema = _json(function.schema_of_calls())
        if is_new:
            calls.append(f"call_{i}: {begin} {_literal(function.name)} {name_end} {schema}")
        else:
            head = f'{{"name": {json.dumps(function.name)}, "arguments": '
            calls.append(f'call_{i}: {_literal(head)} {schema} "}}"')
    names = " | ".join(f"call_{i}" for i in range(len(calls)))
    more = "" if use.is_single else ("call*" if is_new else '(", " call)*')
    several = f"call {more}" if is_new else f'{begin} " "? "[" call {more} "]"'
    if has_text:
        answer = f"{several} | text"
    else:
        answer = several if use.is_required else f"TAG_TEXT ({several})?"
    return [f"answer: {answer}", f"call: {names}", *calls]


def _qwen3_coder(use: ToolUse, has_text: bool) -> list[str]:
    """Returns rules for Qwen3 Coder's calls: tags for the call and for each parameter.

    Parameters come in the schema's order, and texts stand unquoted.
    """
    rules: list[str] = []
    for i, function in enumerate(use.callable):
        schema = function.schema_of_calls()
        required = schema.get("required")
        names = []
        for j, (key, value) in enumerate(properties_of(schema).items()):
            rule = f"parameter_{i}_{j}"
            rules += _parameter(rule, key, value, schema)
            names.append(rule if isinstance(required, list) and key in required else f"{rule}?")
        head = f"\n<function={function.name}>\n"
        tail = '"</function>\\n</tool_call>"'
        rules.append(f"call_{i}: {_literal(head)} {' '.join(names)} {tail}")
    calls = " | ".join(f"call_{i}" for i in range(len(use.callable)))
    if use.is_required or has_text:
        one = f'"<tool_call>" ({calls})'
        answer = "tag" if use.is_single else 'tag ("\\n" tag)*'
        return [f"answer: {answer}{' | text' if has_text else ''}", f"tag: {one}", *rules]
    answer = "tag | TAG_TEXT" if use.is_single else "tag* TAG_TEXT"
    begin = 'trigger[lazy]: TAG_TEXT "<tool_call>"'
    return [f"answer: {answer}", f"tag: trigger ({calls})", begin, *rules]


def _parameter(rule: str, key: str, value: Any, schema: dict[str, Any]) -> list[str]:
    begin = _literal(f"<parameter={key}>\n")
    end = '"\\n</parameter>\\n"'
    if is_text(value):
        choices = value.get("enum")
        if isinstance(choices, list) and choices:
            options = " | ".join(_literal(str(choice)) for choice in choices)
            return [f"{rule}: {begin} ({options}) {end}"]
        return [f"{rule}: {begin} {rule}_text", f"{rule}_text[lazy]: TAG_TEXT {end}"]
    inner = {**value} if isinstance(value, dict) else {}
    # References point to definitions at the schema's top, whose options hold below it.
    inner |= {name: schema[name] for name in _DEFINITIONS if name in schema}
    if "x-guidance" in schema:
        inner.setdefault("x-guidance", schema["x-guidance"])
    return [f"{rule}: {begin} {_json(inner)} {end}"]


def is_text(schema: Any) -> bool:
    """Returns whether a parameter's value is a text, which Qwen3 Coder writes without quotes."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _json(schema: dict[str, Any], field: str = "tools") -> str:
    try:
        return f"%json {json.dumps(grammar_schema(schema))}"
    except ValueError as error:
        raise InvalidRequest(field, str(error)) from None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token(tokenizer: Tokenizer, text: str) -> str:
    """Returns the grammar's form of a mark, which is a special token in most models."""
    token = tokenizer.token_id(text)
    return _literal(text) if token is None else f"<[{token}]>"


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schemas of a function's parameters by name."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
