"""Reads one streamed answer of an OpenAI-compatible server.

Knows the extensions of Foredraft, vLLM, SGLang and llama.cpp.
"""

import json
from typing import Any

from foredraft.bench.records import Record, Speculation, apportion


class StreamError(Exception):
    """Raised for an error event, or for a stream that is not one of events.

    Args:
        kind: Kind of the error, for counting.
        detail: The server's message.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class AnswerReader:
    """Fills a record from the bytes of a response, read by read."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._rest = b""
        self._lengths: list[int] = []  # characters of each arrival
        self._texts: list[str] = []
        self._counted = 0  # tokens that the server attributed to arrivals
        self._num_texts = 0  # events with text
        self._usage_seen = 0  # completion tokens by the last usage
        self._length_seen = 0  # characters of a text that every event repeats
        self._is_exact = True
        self._done = False

    def feed(self, now: float, data: bytes) -> None:
        """Reads the bytes of one read at `now`. Tokens that came together count as one arrival.

        Raises:
            StreamError: The stream has an error event, or is not a stream of events.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        tokens, length, has_output = 0, 0, False
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self._done = True
                continue
            try:
                event = json.loads(payload)
                more_tokens, more_length = self._event(event)
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                shown = payload[:200].decode("utf-8", "replace")
                raise StreamError("malformed stream", f"{error}: {shown}") from None
            tokens += more_tokens or 0
            length += more_length
            self._num_texts += more_length > 0
            if more_tokens or more_length:
                has_output = True
                self._is_exact &= more_tokens is not None
        if has_output:
            self._record.arrivals.append((now, tokens))
            self._lengths.append(length)
            self._counted += tokens

    def finish(self) -> None:
        """Ends the response.

        Raises:
            StreamError: It ended too early.
        """
        record = self._record
        self.settle()
        if not record.finish_reason and not self._done:
            raise StreamError("broken stream", "it ended without a finish_reason or [DONE]")

    def settle(self) -> None:
        """Completes the token counts; also for an answer that was cut off."""
        record = self._record
        record.text = "".join(self._texts)
        record.exact = self._is_exact and self._counted > 0
        record.is_counted = record.exact or bool(record.output_tokens)
        if not record.output_tokens:
            # Most servers send an event for each token.
            record.output_tokens = self._counted if record.exact else self._num_texts
        if not record.exact:
            counts = apportion(record.output_tokens, self._lengths)
            times = [time for time, _ in record.arrivals]
            record.arrivals = list(zip(times, counts, strict=True))

    def _event(self, event: dict[str, Any]) -> tuple[int | None, int]:
        """Returns (tokens, characters) of an event; tokens is None where the event has no count."""
        if event.get("error") is not None:
            error = event["error"]
            detail = error.get("message") if isinstance(error, dict) else error
            raise StreamError("error event", str(detail))
        if "meta_info" in event:
            return self._native_event(event)
        record, length = self._record, 0
        tokens: int | None = None
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            text += delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text:
                self._texts.append(text)
                length += len(text)
            count = choice.get("num_tokens")
            if count is None and choice.get("token_ids") is not None:
                count = len(choice["token_ids"])
            if count is not None:
                tokens = (tokens or 0) + int(count)
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            if choice.get("speculation"):
                record.speculation = _foredraft(choice["speculation"])
            if choice.get("meta_info"):
                record.speculation = _sglang(choice["meta_info"]) or record.speculation
        usage = event.get("usage")
        if usage:
            now = int(usage.get("completion_tokens") or 0)
            # A closing usage comes without choices, or without text; others count continuously.
            if tokens is None and event.get("choices") and (length or self._usage_seen):
                tokens = now - self._usage_seen
            self._usage_seen = record.output_tokens = now
            record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            details = usage.get("prompt_tokens_details") or {}
            record.cached_tokens = int(details.get("cached_tokens") or 0)
        if event.get("timings"):
            record.speculation = _llama_cpp(event["timings"]) or record.speculation
        return tokens, length

    def _native_event(self, event: dict[str, Any]) -> tuple[int, int]:
        """Reads an event of SGLang's /generate, which holds the whole answer so far."""
        record, told = self._record, event["meta_info"]
        text, now = event["text"], int(told["completion_tokens"])
        tokens, length = now - self._usage_seen, len(text) - self._length_seen
        self._texts.append(text[self._length_seen :])
        self._usage_seen = record.output_tokens = now
        self._length_seen = len(text)
        record.prompt_tokens = int(told.get("prompt_tokens") or 0)
        record.cached_tokens = int(told.get("cached_tokens") or 0)
        if told.get("finish_reason"):
            record.finish_reason = told["finish_reason"]["type"]
            record.speculation = _sglang(told)
        return tokens, length


def _foredraft(told: dict[str, Any]) -> Speculation | None:
    steps, accepted = int(told["verify_steps"]), int(told["accepted_tokens"])
    if not steps:
        return None
    return Speculation(
        steps, round(float(told["accept_length"]) * steps), int(told["drafted_tokens"]), accepted
    )


def _sglang(told: dict[str, Any]) -> Speculation | None:
    steps = int(told.get("spec_verify_ct") or 0)
    if not steps:
        return None
    drafted, accepted = told.get("spec_num_proposed_drafts"), told.get("spec_num_correct_drafts")
    return Speculation(steps, int(told["completion_tokens"]), drafted, accepted)


def _llama_cpp(told: dict[str, Any]) -> Speculation | None:
    if not told.get("draft_n"):
        return None
    emitted, accepted = int(told["predicted_n"]), int(told.get("draft_n_accepted") or 0)
    return Speculation(max(1, emitted - accepted), emitted, int(told["draft_n"]), accepted)
