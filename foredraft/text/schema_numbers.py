"""Makes the large numbers of a JSON schema such that llguidance keeps to them.

llguidance reads numbers as doubles and integers' bounds as 64 bits: a large constant would become
its neighbour, and a bound beyond its range would be refused or moved outwards.
"""

import math
from typing import Any

from foredraft.text.schema_walk import map_schemas

EXACT = 2**53  # integers up to here are doubles
FURTHEST = 2**63 - 1024  # the largest bound that is taken on both sides, a double


def kept_numbers(schema: Any) -> Any:
    """Returns a schema whose bounds beyond 2**53 are doubles within it, and at most FURTHEST.

    Such a bound moves inwards, so that what is valid by the result is valid by the schema.

    Raises:
        ValueError: A constant has an integer beyond 2**53.
    """
    return map_schemas(schema, _with_kept_numbers)


def _with_kept_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    for key in ("const", "enum"):
        if key in schema:
            _check_constants(key, schema[key])
    _narrow(schema, "minimum", 1)
    _narrow(schema, "maximum", -1)
    return schema


def _check_constants(key: str, value: Any) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            _check_constants(key, part)
    elif isinstance(value, int) and abs(value) > EXACT:
        raise ValueError(
            f"{key}: {value} is beyond 2**53, which no grammar keeps exact; use a string"
        )


def _narrow(schema: dict[str, Any], name: str, inwards: int) -> None:
    """Replaces a schema's bounds of one side, if one is large; `inwards` is 1 for a minimum."""
    exclusive = f"exclusive{name.capitalize()}"
    bounds = []
    for key, step in ((name, 0), (exclusive, inwards)):
        value = schema.get(key, 0)
        if _is_large(value):
            bounds.append(_inner_double(int(value) + step, inwards))
            del schema[key]
    if bounds:
        if name in schema:
            bounds.append(schema[name])  # a small one beside a large exclusive one
        schema[name] = max(bounds, key=lambda bound: bound * inwards)


def _is_large(value: Any) -> bool:
    return isinstance(value, int | float) and EXACT <= abs(value) < math.inf


def _inner_double(bound: int, inwards: int) -> int:
    """Returns the nearest integer double that is not outside a bound."""
    if bound * inwards <= -FURTHEST:
        return -FURTHEST * inwards
    near = float(bound)
    if int(near) * inwards < bound * inwards:
        near = math.nextafter(near, math.inf * inwards)
    return int(near)
