"""Renders the events of a streamed response."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from foredraft.errors import Overloaded
from foredraft.text.tokenizer import Tokenizer
from gateway import errors
from gateway.decoding import Chunk, OutputToken
from gateway.event_streams import encode_event
from gateway.openai.parts import Change, Kind, Part, PartReader, Stage
from gateway.responses import answers
from gateway.responses.answers import Answer


class Events:
    """Renders one response's events, and adds its items to the answer.

    Args:
        answer: Answer that collects the items.
        reader: Cuts the text into parts.
    """

    def __init__(self, answer: Answer, reader: PartReader, tokenizer: Tokenizer) -> None:
        self._answer = answer
        self._reader = reader
        self._tokenizer = tokenizer
        self._numbers = itertools.count()

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._reader.num_reasoning_tokens

    def started(self) -> list[bytes]:
        """Returns the events that begin the response."""
        response = self._answer.started()
        return [
            self._event(f"response.{stage}", response=response)
            for stage in ("created", "in_progress")
        ]

    def read(self, chunk: Chunk) -> Iterator[bytes]:
        """Yields the events of a chunk."""
        for change in self._reader.read(chunk):
            if change.part.kind is Kind.CALL:
                yield from self._call(change)
            else:
                yield from self._text(change)

    def ended(self, response: dict[str, Any]) -> bytes:
        """Returns the event that ends the response, by its status."""
        status = response["status"]
        # There is no event for one that was aborted by its name.
        kind = status if status in ("completed", "failed") else "incomplete"
        return self._event(f"response.{kind}", response=response)

    def failed(self, error: Exception) -> bytes:
        """Returns the event of a response that an error ended."""
        found = errors.envelope(error)["error"]
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        return self.ended(self._answer.failed(code, found["message"]))

    def _call(self, change: Change) -> Iterator[bytes]:
        part, where = change.part, _place(change.part)
        if change.stage is Stage.OPENED:
            yield self._item("added", part, answers.opened(part))
        elif change.stage is Stage.GREW:
            yield self._event("response.function_call_arguments.delta", **where, delta=change.text)
        else:
            arguments = {"name": part.name, "arguments": part.text}
            yield self._event("response.function_call_arguments.done", **where, **arguments)
            yield self._closed(part)

    def _text(self, change: Change) -> Iterator[bytes]:
        part, where = change.part, {**_place(change.part), "content_index": 0}
        is_text = part.kind is Kind.TEXT
        kind = f"response.{'output' if is_text else 'reasoning'}_text"

        def found(tokens: Sequence[OutputToken]) -> dict[str, Any]:
            return {"logprobs": answers.logprobs(tokens, self._tokenizer)} if is_text else {}

        if change.stage is Stage.OPENED:
            yield self._item("added", part, answers.opened(part))
            empty = answers.content_of(part, "", [])
            yield self._event("response.content_part.added", **where, part=empty)
        elif change.stage is Stage.GREW:
            yield self._event(f"{kind}.delta", **where, delta=change.text, **found(change.tokens))
        else:
            yield self._event(f"{kind}.done", **where, text=part.text, **found(part.tokens))
            content = answers.content_of(part, part.text, found(part.tokens).get("logprobs", []))
            yield self._event("response.content_part.done", **where, part=content)
            yield self._closed(part)

    def _closed(self, part: Part) -> bytes:
        item = answers.closed(part, self._tokenizer)
        self._answer.items.append(item)
        return self._item("done", part, item)

    def _item(self, stage: str, part: Part, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{stage}", output_index=part.index, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n".encode() + encode_event(event)


def _place(part: Part) -> dict[str, Any]:
    return {"item_id": answers.item_id(part), "output_index": part.index}
