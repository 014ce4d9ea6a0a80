"""Turns the verifier's tokens of one continuation into text and finds stop strings in it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from foredraft.api.verify.v1 import verify_pb2
from foredraft.text.tokenizer import Tokenizer
from foredraft.types import FinishReason
from gateway.detokenizer import Detokenizer
from gateway.stops import StopMatcher


@dataclass(slots=True)
class OutputToken:
    """A token whose text is final.

    Attributes:
        text: Text of this token: empty while a character is incomplete, cut where a stop string
            begins.
        drafted: Whether a draft had proposed the token; None when not requested.
        logprob: Log-probability of the token; None when not requested.
    """

    id: int
    text: str
    drafted: bool | None = None
    logprob: verify_pb2.TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one verification.

    Attributes:
        num_tokens: Number of output tokens, without tokens after a stop.
        tree: The drafted tree and its accepted nodes; None where nothing was drafted.
    """

    num_tokens: int
    tree: verify_pb2.VerifiedTree | None


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a continuation, with its token counts.

    Attributes:
        reason: stop, length, or cancelled where the request was aborted.
        stop_text: The stop string that was found.
        stop_token: The stop or end token that was chosen.
        completion_tokens: Number of output tokens, with the token that completed the stop.
        account: The verifier's counts for the continuation.
        seed: Seed that was used.
        is_by_request: Whether a stop string or stop token of the request ended it, wherever the
            text was.
    """

    reason: FinishReason
    stop_text: str | None
    stop_token: int | None
    completion_tokens: int
    account: verify_pb2.Finish
    seed: int
    is_by_request: bool = False

    @property
    def accept_length(self) -> float:
        """Output tokens per verification step."""
        steps = self.account.verify_steps
        return self.completion_tokens / steps if steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        drafted = self.account.drafted_tokens
        return self.account.accepted_tokens / drafted if drafted else 0.0


@dataclass(slots=True)
class Chunk:
    """New text and tokens of one continuation.

    All chunks' texts, joined, are the text; so are all tokens' texts.

    The steps come no later than their tokens; they have trees only when provenance was asked for.
    Log-probabilities of the prompt, when asked for, are all in the first chunk.
    """

    index: int
    text: str = ""
    tokens: list[OutputToken] = field(default_factory=list)
    completion: Completion | None = None
    steps: list[Step] = field(default_factory=list)
    prompt_logprobs: list[verify_pb2.TokenLogprob] = field(default_factory=list)


class SequenceDecoder:
    """Turns a continuation's tokens into chunks.

    Args:
        tokenizer: The model's tokenizer.
        prompt: Token ids, for the spacing of the first token.
        stops: Stop strings.
        min_tokens: Number of tokens before which no stop string is searched for.
        keep_stop: Whether the stop string or token stays in the text.
        skip_special_tokens: Whether special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        min_tokens: int,
        keep_stop: bool,
        skip_special_tokens: bool,
    ) -> None:
        self.num_tokens = 0
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._matcher = StopMatcher(stops)
        self._has_stops = any(stops)
        self._min_tokens = min_tokens
        self._keep_stop = keep_stop
        self._pending: deque[OutputToken] = deque()  # tokens whose text is not all released
        self._unassigned = 0  # released characters that belong to pending tokens
        self._steps: list[Step] = []

    @property
    def stop_text(self) -> str | None:
        """The stop string that was found; tokens fed after that are ignored."""
        return self._matcher.matched

    def take_steps(self) -> list[Step]:
        """Returns the steps fed since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def feed(self, outputs: Iterable[verify_pb2.SequenceOutput]) -> tuple[str, list[OutputToken]]:
        """Takes the verifier's next outputs; returns the text and the tokens that became final."""
        pieces: list[str] = []
        new: list[OutputToken] = []
        for output in outputs:
            stop_index = -1
            if output.HasField("finish") and output.finish.HasField("stop_token"):
                stop_index = len(output.tokens) - 1
            drafted, logprobs = output.drafted, output.logprobs
            before = self.num_tokens
            for index, token in enumerate(output.tokens):
                if self._matcher.matched is not None:
                    break
                self.num_tokens += 1
                hidden = index == stop_index and not self._keep_stop
                text = "" if hidden else self._detokenizer.feed(token)
                new.append(
                    OutputToken(
                        token,
                        text,
                        drafted[index] if drafted else None,
                        logprobs[index] if logprobs else None,
                    )
                )
                pieces.append(self._search(text) if self._has_stops else text)
            if drafted and self.num_tokens > before:
                tree = output.tree if output.HasField("tree") else None
                self._steps.append(Step(self.num_tokens - before, tree))
        text = "".join(pieces)
        if not (self._has_stops or self._pending or self._detokenizer.holds):
            return text, new  # nothing is held back, now or from before
        self._pending.extend(new)
        return self._release(text)

    def flush(self) -> tuple[str, list[OutputToken]]:
        """Ends the continuation; returns the text and tokens that were held back."""
        released = ""
        if self._matcher.matched is None:
            tail = self._detokenizer.flush()
            if tail:  # then the last token is still pending
                self._pending[-1].text += tail
            released = self._search(tail)
            if self._matcher.matched is None:
                released += self._matcher.flush()
        text, tokens = self._release(released)
        for token in self._pending:
            token.text = token.text[: self._unassigned]
            self._unassigned -= len(token.text)
            tokens.append(token)
        self._pending.clear()
        return text, tokens

    def _search(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return text
        released = self._matcher.feed(text)
        if self._keep_stop and self._matcher.matched is not None:
            released += self._matcher.matched
        return released

    def _release(self, text: str) -> tuple[str, list[OutputToken]]:
        tokens: list[OutputToken] = []
        self._unassigned += len(text)
        pending = self._pending
        # After a match `flush` cuts the texts. The last token gets what the detokenizer still
        # holds.
        while (
            self._matcher.matched is None
            and pending
            and len(pending[0].text) <= self._unassigned
            and (len(pending) > 1 or not self._detokenizer.holds)
        ):
            self._unassigned -= len(pending[0].text)
            tokens.append(pending.popleft())
        return text, tokens
