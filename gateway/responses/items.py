"""Converts input items to messages of chat completions."""

from collections.abc import Sequence
from typing import Any

from foredraft.errors import InvalidRequest
from gateway.responses.schemas import ContentPart, Item

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})


class Conversation:
    """Builds messages of chat completions from items.

    Calls and reasoning become parts of the assistant's message that they belong to.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()
        self._reasoning = ""

    def instruct(self, text: str) -> None:
        """Puts instructions before all messages.

        A system message that begins the conversation is joined to them.
        """
        first = self.messages[0] if self.messages else {"role": ""}
        if first["role"] in ("system", "developer"):
            self.messages[0] = {**first, "content": f"{text}\n\n{first['content']}"}
        else:
            self.messages.insert(0, {"role": "system", "content": text})

    def add(self, items: Sequence[Item], field: str) -> None:
        """Appends items.

        Args:
            field: The client's name of the list; errors name fields below it.

        Raises:
            InvalidRequest: An item is not accepted.
        """
        for i, item in enumerate(items):
            where = f"{field}.{i}"
            kind = item.type or "message"
            add = {
                "message": self._message,
                "function_call": self._call,
                "function_call_output": self._output,
                "reasoning": self._think,
            }.get(kind)
            if add is None:
                hint = (
                    "send the item itself"
                    if kind == "item_reference"
                    else "only messages, function calls, their outputs and reasoning are taken"
                )
                raise InvalidRequest(f"{where}.type", f"{kind[:40]!r}: {hint}")
            item.refuse_others(where)
            add(item, where)

    def _message(self, item: Item, where: str) -> None:
        if item.role not in _ROLES:
            raise InvalidRequest(
                f"{where}.role", "Input should be 'user', 'assistant', 'system' or 'developer'"
            )
        if item.content is None:
            raise InvalidRequest(f"{where}.content", "Field required")
        content = _text(item.content, f"{where}.content")
        if item.role == "assistant":
            message = self._assistant()
            if message["content"]:
                message = self._open_assistant()
            message["content"] = content
        else:
            self._end_turn()
            self.messages.append({"role": item.role, "content": content})

    def _call(self, item: Item, where: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidRequest(f"{where}.{name}", "Field required")
        assert item.call_id is not None
        self._calls.add(item.call_id)
        self._assistant().setdefault("tool_calls", []).append(
            {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
        )

    def _output(self, item: Item, where: str) -> None:
        if item.call_id is None:
            raise InvalidRequest(f"{where}.call_id", "Field required")
        if item.call_id not in self._calls:
            raise InvalidRequest(
                f"{where}.call_id", f"no function_call before it has the id {item.call_id[:80]!r}"
            )
        if item.output is None:
            raise InvalidRequest(f"{where}.output", "Field required")
        content = _text(item.output, f"{where}.output")
        self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})

    def _think(self, item: Item, where: str) -> None:
        """Keeps reasoning for the message that follows.

        The summary is used only where there is nothing else.
        """
        text = _text(item.content or [], f"{where}.content")
        self._reasoning = text or _text(item.summary or [], f"{where}.summary")

    def _assistant(self) -> dict[str, Any]:
        """Returns the assistant's message that an item belongs to."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] == "assistant" and not self._reasoning:
            return last
        return self._open_assistant()

    def _end_turn(self) -> None:
        """Gives reasoning that no answer followed a message of its own."""
        if self._reasoning:
            self._open_assistant()

    def _open_assistant(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        if self._reasoning:
            message["reasoning_content"], self._reasoning = self._reasoning, ""
        self.messages.append(message)
        return message


def _text(content: str | Sequence[ContentPart], where: str) -> str:
    """Joins the texts of parts."""
    if isinstance(content, str):
        return content
    return "".join(_words(part, f"{where}.{i}") for i, part in enumerate(content))


def _words(part: ContentPart, where: str) -> str:
    if part.type not in _TEXTS and part.type != "refusal":
        raise InvalidRequest(f"{where}.type", f"only text is taken, not {part.type[:40]!r}")
    part.refuse_others(where)
    name = "refusal" if part.type == "refusal" else "text"
    words = part.refusal if part.type == "refusal" else part.text
    if words is None:
        raise InvalidRequest(f"{where}.{name}", "Field required")
    return words
