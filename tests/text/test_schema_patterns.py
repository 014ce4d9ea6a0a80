"""Patterns in JSON schemas: a grammar allows the strings that match, and no others."""

import json
import re

import jsonschema
import llguidance
import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.text.schema_patterns import without_nul
from foredraft.types import GrammarKind
from gateway.openai.relaxed_schemas import relaxed
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

VOCABULARY = load_vocabulary(resolve_model_path("foredraft-demo"), 8192, frozenset({0}))
STRINGS = [
    *map(chr, range(1, 128)),
    "é",
    "\u2028",
    "😀",
    "",
    'a"b',
    "a\\b",
    "\\\\",
    '"a"',
    "]",
    "]]",
]

# Python's re reads all of these as Rust's regex does, but for $.
PATTERNS = [
    r'^[^"]+$',
    r'^[^"\\]*$',
    r"^[^\\]+$",
    r"^[^a]$",
    r"^[^a-z]+$",
    r"^[^\n\"]*$",
    r"^[\x00-\x1f]+$",
    r"^[\x00-!#-\[\]-~]+$",
    r"^[^]\"]+$",
    r"^[]\"]+$",
    r"^\\[^\"]*$",
    r"^([^\"]|\x00)+$",
    r"^(?:[^\"\\]|\\.)*$",
    r"^[^\W\d]+$",
    r"^[\w\D]$",
    r"^\W$",
    r'"[^"]*"',
    r"^[a-f]{1,3}$",
]


def is_allowed(schema: dict[str, object], text: str) -> bool:
    """Returns whether the grammar of a schema allows a JSON text."""
    grammar = to_llguidance(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    tokens = VOCABULARY.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_string_is_allowed_where_the_pattern_matches_it(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    # ECMAScript's \\w is ASCII's, and its $ is the end alone.
    reference = re.compile(pattern.replace("$", r"\Z"), re.ASCII)
    for string in STRINGS:
        if string != "\x7f":  # may be written plain or escaped
            assert is_allowed(schema, json.dumps(string, ensure_ascii=False)) == (
                reference.search(string) is not None
            ), string
    assert not is_allowed(schema, json.dumps("\x00"))


def test_names_of_properties_too() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": '^[^"]$'}},
        "patternProperties": {'^[^"a]$': {"type": "integer"}},
        "additionalProperties": False,
    }
    for value in ({"pattern": "b"}, {"pattern": '"'}, {"b": 1}, {'"': 1}, {"a": 1}, {"\n": 1}):
        valid = jsonschema.Draft202012Validator(schema).is_valid(value)
        assert is_allowed(schema, json.dumps(value, ensure_ascii=False)) == valid, value


@pytest.mark.parametrize(
    "pattern", ["a[b-d]{2}[e]?", r"(?P<n[0]>x)\d+\s", r"[\]a]\[", "[", "[^", "a\\"]
)
def test_patterns_without_such_classes_stay(pattern: str) -> None:
    assert without_nul(pattern) == pattern


def test_constants_that_look_like_schemas_stay() -> None:
    schema = {"enum": [{"pattern": "[^a]"}, {"pattern": r"(?=a)"}]}
    for value in schema["enum"]:
        assert is_allowed(schema, json.dumps(value))
        assert is_allowed(relaxed(schema), json.dumps(value))


def test_a_class_may_have_any_form() -> None:
    for inner in (
        r"[^\"]",
        r"\p{Cc}",
        r"\P{P}",
        r"\pC",
        r"[[:cntrl:]]",
        r"[[^a]&&[^\"]]",
        r"[\u{0}-!]",
    ):
        quote = is_allowed({"type": "string", "pattern": f"^{inner}$"}, r'"\""')
        assert not quote, inner
