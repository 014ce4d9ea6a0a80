"""Prepares JSON schemas for llguidance, so that every text that it allows is valid by them."""

from typing import Any

from foredraft.text.schema_numbers import kept_numbers
from foredraft.text.schema_patterns import kept_patterns
from foredraft.types import JSON_WHITESPACE


def grammar_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema for llguidance with numbers, patterns and whitespace that it keeps to.

    Raises:
        ValueError: The schema has a constant that no grammar keeps exact, or wrong options.
    """
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise ValueError("x-guidance in a schema is an object")
    # llguidance would not look at whitespace_flexible beside a pattern.
    bound = {} if "whitespace_flexible" in options else {"whitespace_pattern": JSON_WHITESPACE}
    return {**kept_patterns(kept_numbers(schema)), "x-guidance": {**bound, **options}}
