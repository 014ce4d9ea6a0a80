"""Renders answers of /generate in SGLang's shape."""

import math
import time
from collections.abc import Callable
from itertools import starmap
from typing import Any

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Chunk
from gateway.event_streams import encode_event
from gateway.jobs import Job
from gateway.native.schemas import GenerateBody
from gateway.openai.prompt_logprobs import finite
from gateway.openai.replies import provenance

# Largest share of a stream's time that encoding its events may take.
ENCODING_SHARE = 1 / 50


class Pace:
    """Limits how often a stream sends its whole answer so far: longer answers less often.

    Otherwise the work would grow with the square of the length.

    Args:
        clock: Returns monotonic seconds.
        spent: Returns the CPU seconds of this thread.
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
        """Whether the next event may be sent; if not, a later event includes its text."""
        return self._clock() >= self._due

    def encode(self, answer: dict[str, Any]) -> bytes:
        """Encodes an answer as an event, and sets when the next is due."""
        before = self._spent()
        event = encode_event(answer)
        self._due = self._clock() + (self._spent() - before) / ENCODING_SHARE
        return event


class Answer:
    """The answer of one continuation so far.

    SGLang streams the whole answer with every event; a chunk adds only its own part.
    """

    def __init__(self, job: Job, body: GenerateBody, tokenizer: Tokenizer) -> None:
        self._job = job
        self._body = body
        self._tokenizer = tokenizer
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: list[list[Any]] = []
        self._top_logprobs: list[list[list[Any]]] = []
        self._provenance: list[dict[str, Any]] = []
        self._of_prompt: dict[str, list[Any]] = {}

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Adds a chunk; returns the answer so far, to be sent before the next chunk is added."""
        if self._job.sampling.prompt_logprobs is not None and not self._of_prompt:
            self._of_prompt = self._input_logprobs(chunk)
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
            meta |= self._of_prompt
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

    def _input_logprobs(self, chunk: Chunk) -> dict[str, list[Any]]:
        """Returns log-probabilities of the prompt's tokens from the requested one on, which has
        none.
        """
        first, *others = self._job.prompt[self._job.sampling.prompt_logprobs_from :]
        found = chunk.prompt_logprobs
        own = zip(others, (each.logprob for each in found), strict=False)  # aborted: fewer
        return {
            "input_token_logprobs": [
                [None, *self._entry(first, 0.0)[1:]],
                *starmap(self._entry, own),
            ],
            "input_top_logprobs": [
                None,
                *(list(map(self._entry, each.top_tokens, each.top_logprobs)) for each in found),
            ],
        }

    def _entry(self, token: int, logprob: float) -> list[Any]:
        text = None
        if self._body.return_text_in_logprobs:
            text = self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        return [finite(logprob), token, text]
