"""Large numbers in JSON schemas: what a grammar allows is valid, or the schema is refused."""

import itertools
import json
from typing import Any

import jsonschema
import llguidance
import pytest

from foredraft.models.registry import resolve_model_path
from foredraft.text.schema_numbers import EXACT, FURTHEST, kept_numbers
from foredraft.types import GrammarKind
from verify_service.grammar.source import to_llguidance
from verify_service.grammar.vocabulary import LIMITS, load_vocabulary

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
EDGES = sorted(
    {
        sign * (base + off)
        for sign, base, off in itertools.product(
            (1, -1), (0, EXACT, 2**60, FURTHEST, 2**63, 2**64, 10**30), (-1, 0, 1, 2)
        )
    }
)


VOCABULARY = load_vocabulary(resolve_model_path("foredraft-demo"), 8192, frozenset({0}))


def is_allowed(schema: dict[str, Any], number: int) -> bool | None:
    """Returns whether the grammar of a schema allows a number; None where there is no grammar."""
    grammar = to_llguidance(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        return None
    tokens = VOCABULARY.tokenize_str(str(number))
    return bool(matcher.consume_tokens(tokens)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "inside"),
    [
        (INT64, (0, -5, 10**18, -(10**18), FURTHEST, -FURTHEST)),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, (0, 7, 10**18)),
        ({"type": "integer", "maximum": 10**30}, (-5, 10**18)),
        ({"type": "integer", "minimum": -(2**63)}, (-5, 0, 10**18)),
        ({"type": "integer", "exclusiveMinimum": EXACT, "maximum": 2**60}, (EXACT + 2, 10**17)),
        ({"type": "integer", "minimum": EXACT + 1, "maximum": 2**60 + 1}, (EXACT + 2, 2**60)),
        ({"type": "number", "minimum": 0, "maximum": 3.4028235e38}, (0, 10**18)),
        ({"type": "number", "minimum": -1e308, "maximum": 1e308}, (0, 10**18, -(10**18))),
        ({"exclusiveMinimum": 2**63, "type": "integer"}, ()),
        ({"minimum": -(2**63) - 1, "maximum": -(2**63), "type": "integer"}, ()),
    ],
)
def test_nothing_beyond_a_large_bound_is_allowed(
    schema: dict[str, Any], inside: tuple[int, ...]
) -> None:
    validator = jsonschema.Draft202012Validator(schema)
    for number in EDGES:
        if is_allowed(schema, number):
            assert validator.is_valid(number), number
    for number in inside:
        assert validator.is_valid(number)
        assert is_allowed(schema, number), number


@pytest.mark.parametrize("number", [EXACT + 1, -EXACT - 1, 1234567890123456789, 2**64])
def test_constants_that_would_change_are_refused(number: int) -> None:
    for schema in ({"const": number}, {"enum": ["a", number]}, {"const": {"a": [number]}}):
        nested = {"type": "object", "properties": {"const": schema}}
        with pytest.raises(ValueError, match=str(number)):
            kept_numbers(nested)
    assert is_allowed({"const": EXACT}, EXACT)


def test_what_is_no_bound_stays() -> None:
    schema = {
        "type": "object",
        "properties": {
            "minimum": {"type": "integer", "minimum": 3, "exclusiveMaximum": 2**54},
            "enum": {"type": "string"},
        },
        "default": {"const": 2**60},
    }
    kept = kept_numbers(schema)
    assert kept["properties"].pop("minimum") == {
        "type": "integer",
        "minimum": 3,
        "maximum": 2**54 - 1 - 1,
    }
    assert kept == {**schema, "properties": {"enum": {"type": "string"}}}
