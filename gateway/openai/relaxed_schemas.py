"""JSON schemas of functions that are not strict: what no grammar can say is left open."""

import re
from typing import Any

from foredraft.text.schema_numbers import kept_numbers
from foredraft.text.schema_walk import map_schemas

# What a pattern may have that a grammar's regex has not: look-around, word boundaries, and
# references to a group.
_UNSAYABLE = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
_ESCAPED_BACKSLASH = re.compile(r"\\\\")


def relaxed(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema that a grammar can keep to, and allows at least what the given one does.

    Keywords such as `uniqueItems`, formats that are not known, patterns that a grammar's regex
    cannot match and constants that it cannot keep exact count for nothing in it; `oneOf` is
    `anyOf`. The schema's own x-guidance may say otherwise.
    """
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        return schema  # the grammar says what is wrong with it
    found: dict[str, Any] = map_schemas(schema, _without_unsayable)
    return found | {"x-guidance": {"lenient": True, "coerce_one_of": True, **options}}


def _without_unsayable(schema: dict[str, Any]) -> dict[str, Any]:
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _UNSAYABLE.search(_ESCAPED_BACKSLASH.sub("", pattern)):
        del schema["pattern"]
    constants = {key: schema[key] for key in ("const", "enum") if key in schema}
    try:
        kept_numbers(constants)
    except ValueError:
        return {key: value for key, value in schema.items() if key not in constants}
    return schema
