"""Translates clients' grammars (JSON schema, regex, EBNF, structural tags) to llguidance's own
form.

Runs only in compiling processes, since hostile input may make it slow.
"""

import json
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from foredraft.text.schemas import grammar_schema
from foredraft.types import GrammarKind

TEXT = r"/(.|\n)*/"
# Without no_forcing, where only one text can follow, only the tokenizer's own way to cut it would
# be allowed.
OUTER = '%llguidance {"no_forcing": true}\nstart: @inner'


def to_llguidance(kind: GrammarKind, text: str) -> str:
    """Returns the grammar in llguidance's form.

    Raises:
        ValueError: The text is not what its kind says.
    """
    inner: dict[str, Any]
    if kind is GrammarKind.JSON_SCHEMA:
        inner = {"json_schema": _schema(json.loads(text))}
    elif kind is GrammarKind.REGEX:
        inner = {"lark_grammar": f"start: /{llguidance.regex_to_lark(text, '')}/"}
    elif kind is GrammarKind.EBNF:
        inner = {"lark_grammar": any_to_lark(text)}
    else:
        inner = {"lark_grammar": _structural_tag(json.loads(text))}
    grammars = [{"name": "main", "lark_grammar": OUTER}, {"name": "inner", **inner}]
    return json.dumps({"grammars": grammars})


def _schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("a schema is an object")
    return grammar_schema(schema)


def _structural_tag(given: Any) -> str:
    """Translates SGLang's structural tags: text in which a trigger is followed by one of the
    structures that begin with it.

    Beside `structures` and `triggers` there are `at_least_one` (nothing but structures, a line
    each), `answer` (with `at_least_one`: a schema of JSON that may stand in place of them all),
    `stop_after_first` (the text ends with the first structure), and `reasoning` (what comes before,
    from `begin` to `end`; with `is_open` its begin is in the prompt; else, with `at_least_one`, it
    may be left out).
    """
    if not isinstance(given, dict) or not isinstance(given.get("structures"), list):
        raise ValueError("structural tags have a list of structures")
    structures, triggers = given["structures"], given.get("triggers")
    if not (structures or "answer" in given):
        raise ValueError("structures: give at least one")
    if triggers is None and given.get("at_least_one"):
        triggers = []
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise ValueError("triggers: give a list of texts")
    at_least_one, is_single = given.get("at_least_one", False), given.get("stop_after_first", False)
    rules = [f"TAG_TEXT: {TEXT}"]
    for i, structure in enumerate(structures):
        begin, end = structure.get("begin"), structure.get("end", "")
        if not (isinstance(begin, str) and isinstance(end, str)):
            raise ValueError(f"structures.{i}: begin and end are texts")
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None and not at_least_one:
            raise ValueError(f"structures.{i}: begin starts with none of the triggers")
        try:
            schema = _schema(structure.get("schema", {}))
        except ValueError as error:
            raise ValueError(f"structures.{i}: {error}") from None
        body = f"%json {json.dumps(schema)} {_literal(end)}"
        if at_least_one:
            rules.append(f"tag_{i}: {_literal(begin)} {body}")
        else:
            assert trigger is not None
            rules.append(f"trigger_{i}[lazy]: TAG_TEXT {_literal(trigger)}")
            rules.append(f"tag_{i}: trigger_{i} {_literal(begin[len(trigger) :])} {body}")
    tags = " | ".join(f"tag_{i}" for i in range(len(structures)))
    if tags:
        rules.append(f"tag: {tags}")
    if at_least_one:
        start = "tag" if is_single else r'tag ("\n" tag)*'
    else:
        start = "tag | TAG_TEXT" if is_single else "tag* TAG_TEXT"
    if "answer" in given:
        if not at_least_one:
            raise ValueError("answer: needs at_least_one")
        rules.append(f"text: %json {json.dumps(_schema(given['answer']))}")
        start = f"{start} | text" if tags else "text"
    if (reasoning := given.get("reasoning")) is not None:
        rules += _reasoning(reasoning)
        if not (at_least_one or reasoning.get("is_open")):
            # Text that may begin in any way cannot be told apart from it.
            raise ValueError("reasoning: needs is_open or at_least_one")
        start = f"reasoning ({start})"
    return "\n".join([f"start: {start}", *rules])


def _reasoning(given: Any) -> list[str]:
    """Returns the rules for reasoning that may or must precede an answer."""
    if not isinstance(given, dict) or not all(
        isinstance(given.get(name), str) and given[name] for name in ("begin", "end")
    ):
        raise ValueError("reasoning has a begin and an end")
    thought = r"thought /[ \n\r\t]{0,8}/"
    whole = thought if given.get("is_open") else f"({_literal(given['begin'])} {thought})?"
    return [f"thought[lazy]: TAG_TEXT {_literal(given['end'])}", f"reasoning: {whole}"]


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
