"""Prepares JSON schemas for llguidance, so that every text that it allows is valid by them."""

from typing import Any

from foredraft.text.schema_numbers import kept_numbers
from foredraft.text.schema_patterns import kept_patterns
from foredraft.text.schema_walk import map_schemas
from foredraft.types import JSON_WHITESPACE

# The formats of JSON Schema. By its standard others, such as OpenAPI's `password`, say nothing.
_FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4",
    "ipv6", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "time",
    "uri", "uri-reference", "uri-template", "uuid",
))  # fmt: skip


def grammar_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema for llguidance with numbers, patterns and whitespace that it keeps to, and
    without formats that say nothing.

    Raises:
        ValueError: The schema has a constant that no grammar keeps exact, or wrong options.
    """
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise ValueError("x-guidance in a schema is an object")
    # llguidance would not look at whitespace_flexible beside a pattern.
    bound = {} if "whitespace_flexible" in options else {"whitespace_pattern": JSON_WHITESPACE}
    kept = map_schemas(kept_patterns(kept_numbers(schema)), _without_annotation)
    return {**kept, "x-guidance": {**bound, **options}}


def _without_annotation(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
        del schema["format"]
    return schema
