"""Renders messages in the shape of Anthropic's API, whole and as events."""

import math
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from foredraft.types import FinishReason
from gateway import envelopes
from gateway.decoding import Chunk, Completion
from gateway.event_streams import encode_event
from gateway.openai import replies
from gateway.openai.parts import Change, Kind, Part, PartReader, Stage

_DELTAS = {
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class Answer:
    """Renders one message.

    Attributes:
        model: Name of the model.
        reader: Cuts the text into parts.
        num_prompt_tokens: Number of prompt tokens.
        max_tokens: Most tokens of the answer; an answer that was cut with fewer ran out of context.
        seed: Seed of the answer.
    """

    model: str
    reader: PartReader
    num_prompt_tokens: int
    max_tokens: int
    seed: int
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def whole(self, chunk: Chunk) -> dict[str, Any]:
        """Returns the whole message."""
        for _ in self.reader.read(chunk):
            pass
        end = chunk.completion
        assert end is not None
        content = [_block(part, part.text) for part in self.reader.parts]
        found = self._message(content, self._usage(end))
        return {**found, **self._stop(end), "speculation": replies.speculation(end)}

    def started(self) -> bytes:
        """Returns the event that begins the message."""
        usage = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=self._message([], usage))

    def read(self, chunk: Chunk) -> Iterator[bytes]:
        """Yields the events of a chunk."""
        for change in self.reader.read(chunk):
            yield self._changed(change)
        end = chunk.completion
        if end is not None:
            yield _event("message_delta", delta=self._stop(end), usage=self._usage(end))
            yield _event("message_stop")

    def failed(self, error: Exception) -> bytes:
        """Returns the event for an error that ends the message."""
        return b"event: error\n" + encode_event(envelopes.anthropic(error))

    def _changed(self, change: Change) -> bytes:
        part, index = change.part, change.part.index
        if change.stage is Stage.OPENED:
            return _event("content_block_start", index=index, content_block=_block(part, ""))
        if change.stage is Stage.CLOSED:
            return _event("content_block_stop", index=index)
        kind, name = _DELTAS[part.kind]
        delta = {"type": kind, name: change.text}
        return _event("content_block_delta", index=index, delta=delta)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "seed": self.seed,
        }

    def _stop(self, end: Completion) -> dict[str, Any]:
        """Returns why the message ended."""
        if end.stop_text is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": end.stop_text}
        if end.reason is FinishReason.STOP:
            has_calls = any(part.kind is Kind.CALL for part in self.reader.parts)
            reason = "tool_use" if has_calls else "end_turn"
        elif end.reason is FinishReason.LENGTH and end.completion_tokens < self.max_tokens:
            reason = "model_context_window_exceeded"
        else:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, end: Completion) -> dict[str, Any]:
        """Returns token counts; tokens found in the prefix cache count apart."""
        cached = end.account.cached_tokens
        return {
            "input_tokens": end.account.prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reader.num_reasoning_tokens},
        }


def _block(part: Part, text: str) -> dict[str, Any]:
    if part.kind is Kind.CALL:
        name = f"toolu_{part.id[:24]}"
        return {"type": "tool_use", "id": name, "name": part.name, "input": _object(text)}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _object(text: str) -> dict[str, Any]:
    """Parses a call's arguments; of a call that was cut, as far as they came."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return _finite(found) if isinstance(found, dict) else {}


def _finite(value: Any) -> Any:
    """Replaces what JSON has no word for in a parsed value, in place: numbers that are too large by
    the largest one, and NaN by None.
    """
    if isinstance(value, float):
        largest = sys.float_info.max
        return None if math.isnan(value) else min(max(value, -largest), largest)
    if isinstance(value, dict | list):
        for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            value[key] = _finite(part)
    return value


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + encode_event({"type": kind, **fields})
