"""Pages of a response's input items, for GET /v1/responses/{id}/input_items."""

import json
from typing import Any, Literal

from foredraft.errors import InvalidRequest
from gateway.responses.store import Turn, conversation

MAX_ITEMS = 100
_INNER = {"assistant": "output_text"}  # what texts of a message are parts of, by its role


def input_items(turn: Turn) -> list[dict[str, Any]]:
    """Returns a response's input items, oldest first: the earlier turns, then its own input."""
    earlier = [item for items in conversation(turn.before) for item in items]
    own = json.loads(turn.items)[: turn.num_inputs]
    return [_identified(item, i) for i, item in enumerate((*earlier, *own))]


def page(
    items: list[dict[str, Any]], limit: int, order: Literal["asc", "desc"], after: str | None
) -> dict[str, Any]:
    """Returns a page of the items.

    Args:
        items: All items, oldest first.
        limit: Most items of the page.
        order: `asc` for the oldest first, `desc` for the newest.
        after: Id of the last item of the previous page.

    Raises:
        InvalidRequest: The limit is out of range, or no item has the id.
    """
    if not 1 <= limit <= MAX_ITEMS:
        raise InvalidRequest("limit", f"must be in [1, {MAX_ITEMS}], not {limit}")
    found = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in found]
        if after not in ids:
            raise InvalidRequest("after", f"there is no item {after[:80]!r} in this response")
        found = found[ids.index(after) + 1 :]
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def _identified(item: dict[str, Any], index: int) -> dict[str, Any]:
    """Completes an item with an id and a type; a message's text becomes a list of parts."""
    found = {"type": "message", **item, "id": item.get("id") or f"item_{index}"}
    if isinstance(item.get("content"), str):
        part = _INNER.get(item.get("role", ""), "input_text")
        extra: dict[str, Any] = {"annotations": []} if part == "output_text" else {}
        found["content"] = [{"type": part, "text": item["content"], **extra}]
    return found
