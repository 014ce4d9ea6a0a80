"""Grammars of the calls that are not JSON between two marks: Mistral's and Qwen3 Coder's, in llguidance's Lark."""

import json
from typing import Any

from foredraft.errors import InvalidRequest
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import Grammar, GrammarKind
from gateway.openai.tools import Convention, Function, ToolUse

ARGS = "[ARGS]"
TOOL_CALLS, CALL_ID = "[TOOL_CALLS]", "[CALL_ID]"
_TEXT = "TAG_TEXT: /(.|\\n)*/"
# White space of a model that likes it could go on for ever.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
_DEFINITIONS = ("$defs", "definitions")
# What grammars of calls begin with; reasoning may be put before it.
START = "start: answer\n"


def call_grammar(use: ToolUse, convention: Convention, tokenizer: Tokenizer) -> Grammar | None:
    """What the verifier holds an answer to in which functions may be called; None where it cannot.

    Raises:
        InvalidRequest: A call has to come, and cannot be made to.
    """
    if convention is Convention.HARMONY:
        if use.is_required:
            raise InvalidRequest(
                "tool_choice",
                "calls cannot be forced with this model's channels; auto can be asked",
            )
        return None
    if convention is Convention.MISTRAL:
        rules = _mistral(use, tokenizer)
    elif convention is Convention.QWEN3_CODER:
        rules = _qwen3_coder(use)
    else:
        return use.grammar(convention)
    # A schema's text must not make this look like another kind of grammar.
    text = START + "\n".join([*rules, _TEXT]).replace("::=", ":\\u003a=")
    return Grammar(GrammarKind.EBNF, text)


def after_reasoning(text: str, begin: str, end: str, is_open: bool) -> str:
    """A grammar of this module with reasoning before it."""
    whole = "thought SPACE?" if is_open else f"({_literal(begin)} thought SPACE?)?"
    return text.replace(
        START,
        f"start: {whole} answer\n"
        f"thought[lazy]: TAG_TEXT {_literal(end)}\n"
        "SPACE: /[ \\n\\r\\t]{1,8}/\n",
        1,
    )


def _mistral(use: ToolUse, tokenizer: Tokenizer) -> list[str]:
    """A list of JSON after a token; newer models name the function between two tokens instead."""
    begin, args = _token(tokenizer, TOOL_CALLS), _token(tokenizer, ARGS)
    template = tokenizer.template_for(True)
    source = "" if template is None else template.source
    is_new = ARGS in source
    name_end = args
    if CALL_ID in source:
        name_end = f"({_token(tokenizer, CALL_ID)} /[a-zA-Z0-9]{{9}}/)? {args}"
    calls = []
    for i, function in enumerate(use.callable):
        schema = _json(_parameters(function))
        if is_new:
            calls.append(f"call_{i}: {begin} {_literal(function.name)} {name_end} {schema}")
        else:
            head = f'{{"name": {json.dumps(function.name)}, "arguments": '
            calls.append(f'call_{i}: {_literal(head)} {schema} "}}"')
    names = " | ".join(f"call_{i}" for i in range(len(calls)))
    more = "" if use.is_single else ("call*" if is_new else '(", " call)*')
    several = f"call {more}" if is_new else f'{begin} " "? "[" call {more} "]"'
    answer = several if use.is_required else f"TAG_TEXT ({several})?"
    return [f"answer: {answer}", f"call: {names}", *calls]


def _qwen3_coder(use: ToolUse) -> list[str]:
    """Tags for the call and for each of its parameters, in the schema's order; texts stand as they are."""
    rules: list[str] = []
    for i, function in enumerate(use.callable):
        schema = _parameters(function)
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
    if use.is_required:
        one = f'"<tool_call>" ({calls})'
        answer = "tag" if use.is_single else 'tag ("\\n" tag)*'
        return [f"answer: {answer}", f"tag: {one}", *rules]
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
    # What it refers to is defined at the top.
    inner |= {name: schema[name] for name in _DEFINITIONS if name in schema}
    return [f"{rule}: {begin} {_json(inner)} {end}"]


def is_text(schema: Any) -> bool:
    """Whether a parameter's value is a text, which Qwen3 Coder writes without quotes."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "additionalProperties": False}


def _json(schema: dict[str, Any]) -> str:
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise InvalidRequest("tools", "x-guidance in the parameters of a function is an object")
    bound = {} if "whitespace_flexible" in options else {"whitespace_pattern": _WHITESPACE}
    return f"%json {json.dumps({**schema, 'x-guidance': {**bound, **options}})}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _token(tokenizer: Tokenizer, text: str) -> str:
    """A mark, which is a special token with most models."""
    token = tokenizer.token_id(text)
    return _literal(text) if token is None else f"<[{token}]>"


def properties_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schemas of a function's parameters, by name."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
