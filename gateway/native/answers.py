"""Answers of /generate in SGLang's shape."""

import math
import time
from collections.abc import Callable
from typing import Any

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Chunk
from gateway.generation import Job
from gateway.http import encode_event
from gateway.native.schemas import GenerateBody
from gateway.openai.replies import finite, provenance

# Of the time of a stream, the part that may go into encoding its events.
ENCODING_SHARE = 1 / 50


class Pace:
    """How often an answer is sent that is whole each time: a longer one less often, or the work would grow as its square.

    Args:
        clock: Seconds that only grow.
        spent: Seconds that this thread has worked.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._spent = spent
        self._due = -math.inf

    @property
    def is_due(self) -> bool:
        """Whether the next event may be sent; its text may also wait for the one after it."""
        return self._clock() >= self._due

    def encode(self, answer: dict[str, Any]) -> bytes:
        """An answer as an event."""
        before = self._spent()
        event = encode_event(answer)
        self._due = self._clock() + (self._spent() - before) / ENCODING_SHARE
        return event


class Answer:
    """One continuation so far. SGLang streams all of it with every chunk; a chunk adds its own part alone."""

    def __init__(self, job: Job, body: GenerateBody, tokenizer: Tokenizer) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._top_logprobs: list[list[list[Any]]] = []
        self._provenance: list[dict[str, Any]] = []

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Takes a chunk; returns the answer so far, which is to be sent before the next is taken."""
        self._text += chunk.text
        for token in chunk.tokens:
            self._ids.append(token.id)
            own = token.logprob
            if own is not None:
                self._logprobs.append(self._entry(token.id, own.logprob))
                self._top_logprobs.append(list(map(self._entry, own.top_tokens, own.top_logprobs)))
        if self._body.return_provenance:
            self._provenance += provenance(chunk.tokens)
        return {"text": self._text, "output_ids": self._ids, "meta_info": self._meta(chunk)}

    def _meta(self, chunk: Chunk) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._job.name,
            "finish_reason": None,
            "prompt_tokens": len(self._job.prompt),
            "completion_tokens": len(self._ids),
        }
        if self._body.return_logprob:
            meta["output_token_logprobs"] = self._logprobs
            meta["output_top_logprobs"] = self._top_logprobs
        if self._body.return_provenance:
            meta["provenance"] = self._provenance
        end = chunk.completion
        if end is not None:
            account = end.account
            if end.reason is FinishReason.STOP:
                matched = end.stop_text if end.stop_text is not None else end.stop_token
                meta["finish_reason"] = {"type": "stop", "matched": matched}
            elif end.reason is FinishReason.LENGTH:
                meta["finish_reason"] = {"type": "length", "length": end.completion_tokens}
            else:
                meta["finish_reason"] = {"type": "abort", "message": "aborted"}
            meta |= {
                "completion_tokens": end.completion_tokens,
                "cached_tokens": account.cached_tokens,
                "num_retractions": account.preemptions,
                "seed": end.seed,
                "queue_time": account.queue_seconds,
                "e2e_latency": time.monotonic() - self._job.arrived,
                "drafted": account.drafted_tokens,
                "accepted": account.accepted_tokens,
                "accept_length": end.accept_length,
                "accept_rate": end.accept_rate,
                "lossy": account.lossy,
            }
            if account.verify_steps:
                meta |= {
                    "spec_accept_rate": end.accept_rate,
                    "spec_accept_length": end.accept_length,
                    "spec_num_correct_drafts": account.accepted_tokens,
                    "spec_num_proposed_drafts": account.drafted_tokens,
                    "spec_verify_ct": account.verify_steps,
                    "spec_correct_drafts_histogram": list(account.accepted_histogram),
                }
        return meta

    def _entry(self, token: int, logprob: float) -> list[Any]:
        text = None
        if self._body.return_text_in_logprobs:
            text = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return [finite(logprob), token, text]
