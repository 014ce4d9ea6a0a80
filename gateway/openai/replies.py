"""Renders answers in OpenAI's shapes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.decoding import Chunk, Completion, OutputToken, Step
from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.prompt_logprobs import PromptLogprobs, by_token, echoed, finite
from gateway.openai.schemas import CompletionBody, GenerationBody
from gateway.openai.tool_parser import DeltaWriter
from gateway.openai.tools import ToolUse
from gateway.serving import Serving


def model(serving: Serving) -> dict[str, Any]:
    """Returns the model's entry of /v1/models."""
    info = serving.info
    return {
        "id": info.model,
        "object": "model",
        "created": serving.started,
        "owned_by": "foredraft",
        "max_model_len": info.context_length,
    }


def usage(
    ends: Sequence[Completion], num_choices: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    """Returns token counts over all choices; a prompt counts once, however many choices it has."""
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
    """Returns token counts in the middle of a stream."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }


def finish_reason(completion: Completion | None) -> str | None:
    """Returns stop, length, or abort for a request that was aborted by name (an extension)."""
    if completion is None:
        return None
    return "abort" if completion.reason is FinishReason.CANCELLED else completion.reason.value


def stop_reason(completion: Completion | None, body: GenerationBody) -> str | int | None:
    """Returns the stop string or the token of `stop_token_ids` that ended the text.

    It is None for the model's own end token. vLLM's extension.
    """
    if completion is None or completion.stop_text is not None:
        return None if completion is None else completion.stop_text
    return completion.stop_token if completion.stop_token in (body.stop_token_ids or ()) else None


def speculation(completion: Completion) -> dict[str, Any]:
    """Returns counts of drafted and accepted tokens (an extension)."""
    account = completion.account
    return {
        "verify_steps": account.verify_steps,
        "drafted_tokens": account.drafted_tokens,
        "accepted_tokens": account.accepted_tokens,
        "accept_length": completion.accept_length,
        "accept_rate": completion.accept_rate,
        "lossy": account.lossy,
    }


def provenance(tokens: Sequence[OutputToken]) -> list[dict[str, Any]]:
    """Lists tokens with a mark whether a draft had proposed each (an extension)."""
    return [{"id": t.id, "text": t.text, "drafted": bool(t.drafted)} for t in tokens]


def logprob_entry(token: OutputToken, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the log-probabilities of a token and its alternatives, in chat completions' shape."""

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
    """Renders the answer to one request.

    Args:
        tokenizer: The model's tokenizer.
        body: The request.

    Attributes:
        body: The argument of this name.
        is_plain: Whether texts are given without parsing.
        prompt_logprobs: Log-probabilities of the prompt, given beside whole choices; None without.
    """

    is_plain = True
    prompt_logprobs: PromptLogprobs | None = None
    whole_object: str
    chunk_object: str

    def __init__(self, tokenizer: Tokenizer, body: GenerationBody) -> None:
        self._tokenizer, self.body = tokenizer, body

    @abstractmethod
    def choice(self, index: int, prompt: int, chunk: Chunk) -> dict[str, Any]:
        """Renders a whole choice.

        Args:
            index: Index of the choice in the answer.
            prompt: Index of its prompt.
            chunk: All of the choice.
        """

    @abstractmethod
    def deltas(self, index: int, prompt: int, chunk: Chunk, is_first: bool) -> list[dict[str, Any]]:
        """Renders what a chunk adds to a choice; see `choice`."""

    def num_reasoning_tokens(self) -> int:
        """Returns the number of reasoning tokens in all choices so far."""
        return 0

    def _common(self, index: int, chunk: Chunk) -> dict[str, Any]:
        end, body = chunk.completion, self.body
        common: dict[str, Any] = {
            "index": index,
            "finish_reason": finish_reason(end),
            "stop_reason": stop_reason(end, body),
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
        """Returns the drafted tree of a verification and its accepted nodes (an extension)."""
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
    """Renders answers of /v1/completions.

    Args:
        echoes: Text of each prompt to put before its choices; empty unless requested.
        prompts: Tokens of each prompt.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"
    body: CompletionBody

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        echoes: Sequence[str],
        prompts: Sequence[Sequence[int]],
    ) -> None:
        super().__init__(tokenizer, body)
        self._echoes = echoes
        self._prompts = prompts
        self._offsets: dict[int, int] = {}  # characters of each choice given so far

    def choice(self, index: int, prompt: int, chunk: Chunk) -> dict[str, Any]:
        (choice,) = self.deltas(index, prompt, chunk, True)
        if (count := self.body.prompt_logprobs) is not None:
            ids, found = self._prompts[prompt], chunk.prompt_logprobs
            choice["prompt_logprobs"] = by_token(ids, found, count, self._tokenizer)
        return choice

    def deltas(self, index: int, prompt: int, chunk: Chunk, is_first: bool) -> list[dict[str, Any]]:
        echo, tokens = "", chunk.tokens
        if self._echoes and is_first:
            echo = self._echoes[prompt]
            if self.body.logprobs is not None:
                found = chunk.prompt_logprobs
                said = list(echoed(self._prompts[prompt], 0, found, self._tokenizer))
                tokens = [*said, *tokens]
                # A prompt's text may begin with more: special tokens, or what was cut off.
                shown = sum(len(token.text) for token in said)
                self._offsets[index] = max(0, len(echo) - shown)
        return [
            {
                "text": echo + chunk.text,
                "logprobs": self._logprobs(tokens, index),
                **self._common(index, chunk),
            }
        ]

    def _logprobs(self, tokens: Sequence[OutputToken], index: int) -> dict[str, Any] | None:
        """Renders log-probabilities; the first token of an echoed prompt has none."""
        count = self.body.logprobs
        if not tokens or count is None:
            return None
        found = [token.logprob for token in tokens]
        offsets, offset = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        self._offsets[index] = offset
        return {
            "tokens": [self._key(token.id) for token in tokens],
            "token_logprobs": [None if own is None else finite(own.logprob) for own in found],
            "top_logprobs": [None if own is None else self._top(own, count) for own in found],
            "text_offset": offsets,
        }

    def _top(self, logprob: verify_pb2.TokenLogprob, count: int) -> dict[str, float]:
        top: dict[str, float] = {}
        best = zip(logprob.top_tokens[:count], logprob.top_logprobs[:count], strict=True)
        for token, value in best:
            # Ids without text, which padded vocabularies have, look alike: the likeliest stays.
            top.setdefault(self._key(token), finite(value))
        return top

    def _key(self, token: int) -> str:
        """Returns a token's text; half a character as bytes like OpenAI's, so that keys differ."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class ChatReply(Reply):
    """Renders answers of /v1/chat/completions.

    Args:
        use: Tools that may be called, None without.
        form: Settings for parsing answers.
        prompt: Token ids of the conversation.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: GenerationBody,
        use: ToolUse | None = None,
        form: AnswerFormat = _PLAIN,
        prompt: Sequence[int] = (),
    ) -> None:
        super().__init__(tokenizer, body)
        self._prompt = prompt
        self.is_plain = form.is_plain
        self._use = use
        self._form = form
        self._parsers: dict[int, AnswerParser] = {}  # of each choice
        self._writers: dict[int, DeltaWriter] = {}

    def choice(self, index: int, prompt: int, chunk: Chunk) -> dict[str, Any]:
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
        if (count := self.body.prompt_logprobs) is not None:
            found = chunk.prompt_logprobs
            self.prompt_logprobs = by_token(self._prompt, found, count, self._tokenizer)
        return {
            "message": message,
            "logprobs": self._logprobs(chunk.tokens),
            **self._ended(index, chunk),
        }

    def deltas(self, index: int, prompt: int, chunk: Chunk, is_first: bool) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if is_first:
            # By itself, as OpenAI has it: its clients join a choice's first event in another way.
            common = self._common(index, Chunk(chunk.index))
            role = {"role": "assistant", "content": ""}
            found.append({"delta": role, "logprobs": None, **common})
        delta, logprobs = self._content(index, chunk), self._logprobs(chunk.tokens)
        found.append({"delta": delta, "logprobs": logprobs, **self._ended(index, chunk)})
        return found

    def _content(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """Returns what a chunk adds: reasoning, text, calls, any or none of them."""
        if self.is_plain:
            return {"content": chunk.text} if chunk.text else {}
        if index not in self._parsers:
            self._parsers[index] = AnswerParser(self._form)
            self._writers[index] = DeltaWriter()
        return self._writers[index].render(self._parsers[index].read(chunk))

    def num_reasoning_tokens(self) -> int:
        return sum(parser.num_reasoning_tokens for parser in self._parsers.values())

    def _ended(self, index: int, chunk: Chunk) -> dict[str, Any]:
        common = self._common(index, chunk)
        end, calls = chunk.completion, self._writers.get(index)
        if end and calls and common["finish_reason"] == "stop" and calls.has_whole_calls(end):
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
