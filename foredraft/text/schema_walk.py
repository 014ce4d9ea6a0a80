"""Visits the schemas within a JSON schema."""

from collections.abc import Callable
from typing import Any

_SCHEMAS_BY_NAME = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)
_NOT_SCHEMAS = frozenset(("const", "enum", "default", "examples", "required", "x-guidance"))


def map_schemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Returns a copy of a schema in which `change` has replaced each schema, the inner ones first.

    Values that are no schemas, such as constants, stay as they are. `change` may modify the
    dictionary that it is given.
    """
    if isinstance(schema, list):
        return [map_schemas(part, change) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            result[key] = {name: map_schemas(part, change) for name, part in value.items()}
        else:
            result[key] = value if key in _NOT_SCHEMAS else map_schemas(value, change)
    return change(result)
