"""Converts Anthropic's messages to messages of chat completions."""

from collections.abc import Sequence
from typing import Any

from foredraft.errors import InvalidRequest
from gateway.anthropic.schemas import Block, InnerBlock, InputMessage

# Types of the blocks that are taken, by role.
_TYPES = {
    "assistant": ("text", "thinking", "tool_use"),
    "user": ("text", "tool_result"),
    "system": ("text",),
}


class Conversation:
    """Builds messages of chat completions.

    Results of tools are messages of their own there, and consecutive messages of one role become
    one.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._calls: set[str] = set()
        self._open: set[str] = set()  # calls of the last message without a result

    def instruct(self, system: str | Sequence[InnerBlock]) -> None:
        """Begins with the system prompt."""
        self._say("system", _texts(system, "system"))

    def add(self, messages: Sequence[InputMessage]) -> None:
        """Appends messages.

        Raises:
            InvalidRequest: A message is not accepted.
        """
        for i, message in enumerate(messages):
            where = f"messages.{i}"
            if message.role != "user" and self._open:
                raise InvalidRequest(where, "the tool_use before it needs a tool_result first")
            content = message.content
            if isinstance(content, str):
                self._say(message.role, content)
                continue
            if not content and message.role == "user":
                raise InvalidRequest(f"{where}.content", "has no blocks")
            for j, block in enumerate(content):
                self._block(message.role, block, f"{where}.content.{j}")
        if self._open:
            raise InvalidRequest("messages", "the last tool_use needs a tool_result")

    def _block(self, role: str, block: Block, where: str) -> None:
        if block.type not in _TYPES[role]:
            *others, last = _TYPES[role]
            known = f"{', '.join(others)} and {last}" if others else last
            raise InvalidRequest(
                f"{where}.type", f"only {known} are taken there, not {block.type[:40]!r}"
            )
        block.refuse_others(where)
        if block.type == "text":
            if block.text is None:
                raise InvalidRequest(f"{where}.text", "Field required")
            self._say(role, block.text)
        elif block.type == "tool_use":
            self._call(block, where)
        elif block.type == "tool_result":
            self._result(block, where)
        else:
            self._turn(role)["reasoning_content"] = block.thinking or ""

    def _say(self, role: str, text: str) -> None:
        turn = self._turn(role)
        turn["content"] += ("\n" if turn["content"] and text else "") + text

    def _call(self, block: Block, where: str) -> None:
        for name in ("id", "name", "input"):
            if getattr(block, name) is None:
                raise InvalidRequest(f"{where}.{name}", "Field required")
        assert block.id is not None
        if block.id in self._calls:
            raise InvalidRequest(f"{where}.id", f"{block.id[:80]!r} is another tool_use's")
        self._calls.add(block.id)
        self._open.add(block.id)
        function = {"name": block.name, "arguments": block.input}
        self._turn("assistant").setdefault("tool_calls", []).append(
            {"id": block.id, "type": "function", "function": function}
        )

    def _result(self, block: Block, where: str) -> None:
        name = block.tool_use_id
        if name is None:
            raise InvalidRequest(f"{where}.tool_use_id", "Field required")
        if name not in self._calls:
            raise InvalidRequest(
                f"{where}.tool_use_id", f"no tool_use before it has the id {name[:80]!r}"
            )
        if name not in self._open:
            raise InvalidRequest(f"{where}.tool_use_id", f"{name[:80]!r} has a result already")
        self._open.remove(name)
        content = _texts(block.content or "", f"{where}.content")
        if block.is_error:
            content = f"Error: {content}"
        self.messages.append({"role": "tool", "tool_call_id": name, "content": content})

    def _turn(self, role: str) -> dict[str, Any]:
        """Returns the last message if it has the role, else a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def _texts(content: str | Sequence[InnerBlock], where: str) -> str:
    """Joins blocks of text, a line each."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        if block.type != "text":
            raise InvalidRequest(
                f"{where}.{i}.type", f"only text is taken, not {block.type[:40]!r}"
            )
        block.refuse_others(f"{where}.{i}")
        if block.text is None:
            raise InvalidRequest(f"{where}.{i}.text", "Field required")
        texts.append(block.text)
    return "\n".join(texts)
