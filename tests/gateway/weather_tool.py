"""A function of two possible calls, so that short answers of a tiny model can be whole calls."""

from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["Bern", "Rome"]}},
    "required": ["town"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FUNCTION: dict[str, Any] = {"name": "get_weather", "parameters": PARAMETERS}
