"""Answers of /generate in SGLang's shape."""

import time
from dataclasses import dataclass, field
from typing import Any

from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Chunk, OutputToken
from gateway.generation import Job
from gateway.native.schemas import GenerateBody
from gateway.openai.replies import finite, provenance


@dataclass(slots=True)
class Answer:
    """One continuation so far."""

    job: Job
    body: GenerateBody
    tokenizer: Tokenizer
    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Takes a chunk; returns the answer so far, as SGLang streams it."""
        self.tokens.extend(chunk.tokens)
        self.text += chunk.text
        return self._dict(chunk)

    def _dict(self, chunk: Chunk) -> dict[str, Any]:
        tokens = self.tokens
        meta: dict[str, Any] = {
            "id": self.job.name,
            "finish_reason": None,
            "prompt_tokens": len(self.job.prompt),
            "completion_tokens": len(tokens),
        }
        if self.body.return_logprob:
            known = [(t.id, t.logprob) for t in tokens if t.logprob is not None]
            meta["output_token_logprobs"] = [self._entry(id, own.logprob) for id, own in known]
            meta["output_top_logprobs"] = [
                list(map(self._entry, own.top_tokens, own.top_logprobs)) for _, own in known
            ]
        if self.body.return_provenance:
            meta["provenance"] = provenance(tokens)
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
                "e2e_latency": time.monotonic() - self.job.arrived,
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
        return {"text": self.text, "output_ids": [t.id for t in tokens], "meta_info": meta}

    def _entry(self, token: int, logprob: float) -> list[Any]:
        text = None
        if self.body.return_text_in_logprobs:
            text = self.tokenizer.token_bytes(token).decode("utf-8", "replace")
        return [finite(logprob), token, text]
