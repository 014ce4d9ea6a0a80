"""Converts functions and calls of the public gRPC to and from the OpenAI routes' form."""

import itertools
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

from foredraft.api.inference.v1 import inference_pb2
from foredraft.errors import InvalidRequest
from foredraft.types import FinishReason
from gateway.bodies import MAX_OBJECTS
from gateway.decoding import Chunk
from gateway.jobs import Job
from gateway.openai.call_parsers import CallDeltas
from gateway.openai.tools import (
    MAX_TOOLS,
    Convention,
    Function,
    NamedChoice,
    NamedFunction,
    Tool,
    ToolUse,
    tool_use,
)

_CHOICES = {
    inference_pb2.FUNCTION_USE_NONE: "none",
    inference_pb2.FUNCTION_USE_REQUIRED: "required",
}


def function_use(chat: inference_pb2.ChatMessages) -> ToolUse | None:
    """Returns the requested use of functions; None where no function may be called.

    Raises:
        InvalidRequest: A field is wrong.
    """
    if len(chat.functions) > MAX_TOOLS:
        raise InvalidRequest(
            "chat.functions", f"at most {MAX_TOOLS} functions, not {len(chat.functions)}"
        )
    choice: str | NamedChoice = _CHOICES.get(chat.function_use, "auto")
    if chat.function_name:
        named = NamedFunction(name=chat.function_name)
        choice = NamedChoice(type="function", function=named)
    parallel = chat.parallel_calls if chat.HasField("parallel_calls") else None
    try:
        return tool_use([_tool(function) for function in chat.functions], choice, parallel)
    except InvalidRequest as error:
        field = error.field.replace("tools.", "chat.functions.").replace(".function.", ".")
        raise InvalidRequest(field, error.message) from None


def _tool(given: inference_pb2.Function) -> Tool:
    try:
        parameters: Any = from_json(given.parameters or "null", allow_inf_nan=False)
        function = Function(
            name=given.name, description=given.description or None, parameters=parameters
        )
    except (ValueError, ValidationError):
        raise InvalidRequest("tools", f"the parameters of {given.name!r} are no schema") from None
    return Tool(type="function", function=function)


def messages(chat: inference_pb2.ChatMessages) -> list[dict[str, Any]]:
    """Converts messages to the form that chat templates expect.

    Raises:
        InvalidRequest: There are no messages, or too many: an empty one takes only two bytes on the
            wire.
    """
    if not chat.messages:
        raise InvalidRequest("messages", "it has no messages")
    parts = len(chat.messages) + sum(
        len(each.calls) for each in itertools.islice(chat.messages, MAX_OBJECTS)
    )
    if parts > MAX_OBJECTS:
        raise InvalidRequest("messages", f"at most {MAX_OBJECTS} messages and calls are taken")
    return [_message(each) for each in chat.messages]


def _message(given: inference_pb2.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": given.role, "content": given.content}
    if given.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in given.calls
        ]
    if given.call_id:
        found["tool_call_id"] = given.call_id
    return found


class CallFinder:
    """Moves function calls out of the texts of a request's continuations.

    Args:
        has_grammar: Whether the text that may come in place of calls follows a grammar.
    """

    def __init__(self, use: ToolUse, convention: Convention, job: Job, has_grammar: bool) -> None:
        self._use = use
        self._deltas: Sequence[CallDeltas] = [
            CallDeltas(convention, use.callable, has_grammar and not use.is_required)
            for _ in range(job.num_choices)
        ]

    def rewrite(self, response: inference_pb2.GenerateResponse, chunk: Chunk) -> None:
        """Moves calls from a response's text to its `calls` field."""
        deltas = self._deltas[chunk.index]
        found = deltas.delta(chunk.text, chunk.completion is not None)
        response.text = found.get("content", "")
        for call in found.get("tool_calls", ()):
            response.calls.add(
                index=call["index"],
                id=call.get("id", ""),
                name=call["function"].get("name", ""),
                arguments=call["function"]["arguments"],
            )
        end = chunk.completion
        if end is None or end.reason is not FinishReason.STOP or self._use.is_named:
            return
        if deltas.has_whole_calls(end):
            response.completion.finish_reason = inference_pb2.FINISH_REASON_CALLS
