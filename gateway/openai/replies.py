"""Answers in OpenAI's shapes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Chunk, Completion, OutputToken, Step
from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.schemas import GenerationBody
from gateway.openai.tool_parser import DeltaWriter
from gateway.openai.tools import ToolUse
from gateway.serving import Serving


def model(serving: Serving) -> dict[str, Any]:
    """The model as /v1/models lists it."""
    info = serving.info
    return {
        "id": info.model,
        "object": "model",
        "created": 0,
        "owned_by": "foredraft",
        "max_model_len": info.context_length,
    }


def usage(
    ends: Sequence[Completion], num_choices: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    """Token counts over all choices; a prompt counts once, however many choices it has."""
    prompts = sum(end.account.prompt_tokens for end in ends) // num_choices
    completion = sum(end.completion_tokens for end in ends)
    cached = sum(end.account.cached_tokens for end in ends) // num_choices
    return {
        "prompt_tokens": prompts,
        "completion_tokens": completion,
        "total_tokens": prompts + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": num_reasoning_tokens,
            "accepted_prediction_tokens": sum(end.account.accepted_tokens for end in ends),
            "rejected_prediction_tokens": sum(
                end.account.drafted_tokens - end.account.accepted_tokens for end in ends
            ),
        },
    }


def usage_so_far(num_prompt_tokens: int, num_tokens: int) -> dict[str, int]:
    """Token counts in the middle of a stream."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def finish_reason(completion: Completion | None) -> str | None:
    """stop, length, or abort for a request that was ended by name (an extension)."""
    if completion is None:
        return None
    return "abort" if completion.reason is FinishReason.CANCELLED else completion.reason.value


def stop_reason(completion: Completion | None) -> str | int | None:
    """What stopped it (vLLM's extension): the stop string or token."""
    if completion is None:
        return None
    return completion.stop_text if completion.stop_text is not None else completion.stop_token


def speculation(completion: Completion) -> dict[str, Any]:
    """Figures of speculation (an extension)."""
    account = completion.account
    return {
        "verify_steps": account.verify_steps,
        "drafted_tokens": account.drafted_tokens,
        "accepted_tokens": account.accepted_tokens,
        "accept_length": completion.accept_length,
        "accept_rate": completion.accept_rate,
        "lossy": account.lossy,
    }


def finite(logprob: float) -> float:
    """JSON has no infinity; like OpenAI's, this says -9999 for a token that cannot be."""
    return logprob if logprob > -9999.0 else -9999.0


def provenance(tokens: Sequence[OutputToken]) -> list[dict[str, Any]]:
    """Which tokens a draft had proposed (an extension)."""
    return [{"id": t.id, "text": t.text, "drafted": bool(t.drafted)} for t in tokens]


def logprob_entry(token: OutputToken, tokenizer: Tokenizer) -> dict[str, Any]:
    """The log-probability of a token and of its alternatives, as chats say them."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    found = token.logprob
    assert found is not None
    others = zip(found.top_tokens, found.top_logprobs, strict=True)
    top = [entry(other, value) for other, value in others]
    return {**entry(token.id, found.logprob), "top_logprobs": top}


_PLAIN = AnswerFormat()


class Reply(ABC):
    """How one of the routes words its answers.

    Attributes:
        is_plain: Whether texts are given as they stand.
    """

    is_plain = True
    whole_object: str
    chunk_object: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def choice(self, index: int, prompt: int, chunk: Chunk, body: GenerationBody) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def deltas(
        self, index: int, prompt: int, chunk: Chunk, body: GenerationBody, is_first: bool
    ) -> list[dict[str, Any]]:
        """What a chunk adds to a choice."""

    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning in all choices so far."""
        return 0

    def _common(self, index: int, chunk: Chunk, body: GenerationBody) -> dict[str, Any]:
        end = chunk.completion
        common: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason(end),
            "stop_reason": stop_reason(end),
            "num_tokens": len(chunk.tokens),
        }
        if body.return_provenance:
            common["provenance"] = provenance(chunk.tokens)
            common["steps"] = [self._step(step) for step in chunk.steps]
        if body.return_token_ids:
            common["token_ids"] = [token.id for token in chunk.tokens]
        if end is not None:
            common["speculation"] = speculation(end)
            common["seed"] = end.seed
        return common

    def _step(self, step: Step) -> dict[str, Any]:
        """What was drafted in a verification, and which of it was accepted (an extension)."""
        tree = step.tree or verify_pb2.VerifiedTree()
        return {
            "tokens": step.num_tokens,
            "draft": tree.draft or None,
            "drafted": [
                {"id": token, "text": self._text(token), "parent": parent}
                for token, parent in zip(tree.tokens, tree.parents, strict=True)
            ],
            "accepted": list(tree.accepted),
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


class CompletionReply(Reply):
    """/v1/completions.

    Args:
        echoes: Text of each prompt to put before its choices; empty when not asked for.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer, echoes: Sequence[str]) -> None:
        super().__init__(tokenizer)
        self._echoes = echoes
        self._offsets: dict[int, int] = {}  # characters of each choice given so far

    def choice(self, index: int, prompt: int, chunk: Chunk, body: GenerationBody) -> dict[str, Any]:
        return self.deltas(index, prompt, chunk, body, True)[0]

    def deltas(
        self, index: int, prompt: int, chunk: Chunk, body: GenerationBody, is_first: bool
    ) -> list[dict[str, Any]]:
        echo = self._echoes[prompt] if self._echoes and is_first else ""
        return [
            {
                "text": echo + chunk.text,
                "logprobs": self._logprobs(chunk.tokens, index),
                **self._common(index, chunk, body),
            }
        ]

    def _logprobs(self, tokens: Sequence[OutputToken], index: int) -> dict[str, Any] | None:
        if not tokens or tokens[0].logprob is None:
            return None
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [self._key(token.id) for token in tokens],
            "token_logprobs": [finite(token.logprob.logprob) for token in tokens if token.logprob],
            "top_logprobs": [self._top(token.logprob) for token in tokens if token.logprob],
            "text_offset": offsets,
        }

    def _top(self, logprob: verify_pb2.TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, value in zip(logprob.top_tokens, logprob.top_logprobs, strict=True):
            # Ids without text, which padded vocabularies have, look alike: the likeliest stays.
            top.setdefault(self._key(token), finite(value))
        return top

    def _key(self, token: int) -> str:
        """A token's text; half a character as OpenAI writes it, so that no two of them look alike."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatReply(Reply):
    """/v1/chat/completions.

    Args:
        use: The tools that may be called, None without.
        form: How answers are read.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        use: ToolUse | None = None,
        form: AnswerFormat = _PLAIN,
    ) -> None:
        super().__init__(tokenizer)
        self.is_plain = form.is_plain
        self._use = use
        self._form = form
        self._parsers: dict[int, AnswerParser] = {}  # of each choice
        self._writers: dict[int, DeltaWriter] = {}

    def choice(self, index: int, prompt: int, chunk: Chunk, body: GenerationBody) -> dict[str, Any]:
        content = self._content(index, chunk)
        calls = [
            {k: v for k, v in c.items() if k != "index"} for c in content.get("tool_calls", ())
        ]
        message = {
            "role": "assistant",
            "content": content.get("content") if calls else content.get("content", ""),
            "refusal": None,
            **{name: content[name] for name in ("reasoning_content",) if name in content},
            **({"tool_calls": calls} if calls else {}),
        }
        return {
            "message": message,
            "logprobs": self._logprobs(chunk.tokens),
            **self._ended(index, chunk, body),
        }

    def deltas(
        self, index: int, prompt: int, chunk: Chunk, body: GenerationBody, is_first: bool
    ) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        delta |= self._content(index, chunk)
        logprobs = self._logprobs(chunk.tokens)
        return [{"delta": delta, "logprobs": logprobs, **self._ended(index, chunk, body)}]

    def _content(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What a chunk adds: reasoning, text, calls, any or none of them."""
        if self.is_plain:
            return {"content": chunk.text} if chunk.text else {}
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(self._form)
            self._writers[index] = DeltaWriter()
        return self._writers[index].render(self._parsers[index].read(chunk))

    def num_reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    def _ended(self, index: int, chunk: Chunk, body: GenerationBody) -> dict[str, Any]:
        common = self._common(index, chunk, body)
        calls = self._writers.get(index)
        if calls and calls.num_calls and common["finish_reason"] == "stop":
            assert self._use is not None
            common["finish_reason"] = "stop" if self._use.is_named else "tool_calls"
        return common

    def _logprobs(self, tokens: Sequence[OutputToken]) -> dict[str, Any] | None:
        if not tokens or tokens[0].logprob is None:
            return None
        return {
            "content": [logprob_entry(token, self._tokenizer) for token in tokens],
            "refusal": None,
        }
