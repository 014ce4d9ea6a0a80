"""Renders a prompt's log-probabilities like OpenAI's `echo` and vLLM's `prompt_logprobs`."""

from collections.abc import Iterator, Sequence
from typing import Any

from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from gateway.decoding import OutputToken
from gateway.detokenizer import Detokenizer

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


def echoed(
    prompt: Sequence[int],
    start: int,
    found: Sequence[verify_pb2.TokenLogprob],
    tokenizer: Tokenizer,
) -> Iterator[OutputToken]:
    """Yields the prompt's tokens from `start` on, with texts and log-probabilities.

    The first of them has no log-probability.
    """
    texts = Detokenizer(tokenizer, prompt[:start], skip_special_tokens=True)
    # An aborted request has fewer.
    for token, logprob in zip(prompt[start:], (None, *found), strict=False):
        yield OutputToken(token, texts.feed(token), logprob=logprob)


def by_token(
    prompt: Sequence[int],
    found: Sequence[verify_pb2.TokenLogprob],
    count: int,
    tokenizer: Tokenizer,
) -> PromptLogprobs:
    """Returns for each prompt token its own entry and the likeliest `count` tokens' entries, by id.

    The shape is vLLM's; the first token has null.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    entries: PromptLogprobs = [None]
    for token, own in zip(prompt[1:], found, strict=False):
        top = zip(own.top_tokens[:count], own.top_logprobs[:count], strict=True)
        likeliest = {str(other): entry(other, value, i) for i, (other, value) in enumerate(top, 1)}
        entries.append({str(token): entry(token, own.logprob, own.rank)} | likeliest)
    return entries


def finite(logprob: float) -> float:
    """Replaces infinite log-probabilities by -9999, like OpenAI: JSON has no infinity."""
    return logprob if logprob > -9999.0 else -9999.0
