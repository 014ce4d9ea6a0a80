r"""Makes the patterns of a JSON schema such that llguidance keeps to them.

Where a class of characters has all control characters and not the quote or the backslash, such as
`[^"]`, llguidance takes their escapes for any escape and lets `\"` and `\\` through. No class has
NUL here, and so none has all of them.
"""

import re
from typing import Any

from foredraft.text.schema_walk import map_schemas

_ESCAPE = re.compile(
    r"\\(?:[pP](?:\{[^}]*\}|.)|x[0-9A-Fa-f]{2}|[xuU]\{[^}]*\}|u.{4}|U.{8}|.)", re.DOTALL
)
_MAY_HAVE_NUL = re.compile(r"\[\^|\[:|\\[pPWDxuU]|\x00")


def kept_patterns(schema: Any) -> Any:
    """Returns a schema whose patterns match no NUL, and otherwise what they matched."""
    return map_schemas(schema, _without_nul_in_patterns)


def _without_nul_in_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = without_nul(pattern)
    if isinstance(by_pattern := schema.get("patternProperties"), dict):
        schema["patternProperties"] = {without_nul(name): by_pattern[name] for name in by_pattern}
    return schema


def without_nul(pattern: str) -> str:
    """Returns a regex whose classes and escapes leave NUL out."""
    parts = []
    at = 0
    while at < len(pattern):
        end = at + 1
        if pattern[at] == "[":
            end = _class_end(pattern, at)
        elif escape := _ESCAPE.match(pattern, at):
            end = escape.end()
        part = pattern[at:end]
        parts.append(rf"[{part}&&[^\x00]]" if _MAY_HAVE_NUL.search(part) else part)
        at = end
    return "".join(parts)


def _class_end(pattern: str, start: int) -> int:
    """Returns where the class that starts at a bracket ends; the bracket's end if it does not."""
    at, depth = start, 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern.startswith("^", at + 1)
            at += pattern.startswith("]", at + 1)  # the first one is a character
        elif pattern[at] == "]":
            depth -= 1
            if depth == 0:
                return at + 1
        at += 1
    return start + 1
