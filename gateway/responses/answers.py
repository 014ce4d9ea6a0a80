"""Renders a response as JSON, while it grows and at its end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Completion, OutputToken
from gateway.openai import replies
from gateway.openai.parts import Kind, Part
from gateway.responses.schemas import ResponsesBody

_PREFIXES = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}


@dataclass(slots=True)
class Answer:
    """Renders one response.

    Attributes:
        id: Id of the response.
        model: Name of the model.
        body: The request.
        seed: Seed of the answer.
        is_stored: Whether the response is stored for later requests.
        items: Output items that have ended.
    """

    id: str
    model: str
    body: ResponsesBody
    seed: int
    is_stored: bool
    items: list[dict[str, Any]] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    def started(self) -> dict[str, Any]:
        """Returns the response before there is any output."""
        return self._render("in_progress", [])

    def ended(self, end: Completion, num_reasoning_tokens: int) -> dict[str, Any]:
        """Returns the whole response."""
        is_whole = end.reason is FinishReason.STOP
        found = self._render("completed" if is_whole else "incomplete", self.items)
        if end.reason is FinishReason.CANCELLED:
            found["status"] = "cancelled"
        elif not is_whole:
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        account = end.account
        found["completed_at"] = int(time.time()) if is_whole else None
        found["usage"] = {
            "input_tokens": account.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": account.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": end.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": account.prompt_tokens + end.completion_tokens,
        }
        found["speculation"] = replies.speculation(end)
        return found

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """Returns the response that an error ended."""
        found = self._render("failed", self.items)
        found["error"] = {"code": code, "message": message}
        return found

    def _render(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        body = self.body
        text = {} if body.text is None else _given(body.text)
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None}
            | ({} if body.reasoning is None else _given(body.reasoning)),
            "store": self.is_stored,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} | text,
            "tool_choice": choice if isinstance(choice, str) else _given(choice) or "auto",
            "tools": [{"strict": None, **_given(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "seed": self.seed,
        }


def item_id(part: Part) -> str:
    """Returns the id of a part's item."""
    return f"{_PREFIXES[part.kind]}_{part.id}"


def opened(part: Part) -> dict[str, Any]:
    """Returns a part's item before it has content."""
    return _item(part, "in_progress", "", [])


def closed(part: Part, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a part's item at its end."""
    content = [content_of(part, part.text, logprobs(part.tokens, tokenizer))]
    return _item(part, "completed" if part.is_whole else "incomplete", part.text, content)


def content_of(part: Part, text: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the single content part of a message or of reasoning."""
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}


def logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Returns the log-probabilities of the tokens that have them."""
    return [replies.logprob_entry(token, tokenizer) for token in tokens if token.logprob]


def _item(part: Part, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    item = {"id": item_id(part), "status": status}
    if part.kind is Kind.CALL:
        call = {"call_id": f"call_{part.id[:24]}", "name": part.name, "arguments": text}
        return {"type": "function_call", **item, **call}
    if part.kind is Kind.REASONING:
        return {"type": "reasoning", **item, "summary": [], "content": content}
    return {"type": "message", **item, "role": "assistant", "content": content}


def _given(value: Any) -> dict[str, Any]:
    """Returns the fields that a client gave, under the client's names."""
    return {} if value is None else value.model_dump(exclude_unset=True, by_alias=True)
