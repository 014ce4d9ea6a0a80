"""Cuts an answer into a sequence of parts: reasoning, texts and calls.

APIs whose answers are lists use it.
"""

import enum
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from foredraft.types import FinishReason
from gateway.decoding import Chunk, Completion, OutputToken
from gateway.openai.answer_parser import AnswerParser
from gateway.openai.pieces import Piece, is_json


class Kind(enum.Enum):
    """The kind of a part."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


class Stage(enum.Enum):
    """A change of a part, as it is streamed."""

    OPENED = enum.auto()
    GREW = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class Part:
    """A part of an answer, as far as it has come.

    Attributes:
        index: Position in the answer.
        id: Unique id, which results of a call refer to.
        name: Name of a call's function.
        tokens: Tokens of the text; empty unless requested.
        is_whole: Whether the part ended by itself, and was not cut with the answer.
    """

    index: int
    kind: Kind
    name: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: list[OutputToken] = field(default_factory=list)
    is_whole: bool = True
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text or reasoning, or the arguments of a call."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        """Appends text."""
        self._texts.append(text)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a part, as it is streamed.

    Attributes:
        text: Text that the part grew by.
        tokens: Tokens that the part grew by; empty unless requested.
    """

    stage: Stage
    part: Part
    text: str = ""
    tokens: tuple[OutputToken, ...] = ()


class PartReader:
    """Cuts one continuation into parts.

    An answer with other parts has no part that is only white space.

    Args:
        parser: Parser that cuts the text into pieces.
        with_tokens: Whether parts keep the tokens of texts, for their log-probabilities.
    """

    def __init__(self, parser: AnswerParser, with_tokens: bool = False) -> None:
        self.parts: list[Part] = []
        self._parser = parser
        self._with_tokens = with_tokens
        self._open: Part | None = None
        self._space = ""  # white space that may turn out to begin a text
        self._tokens: list[OutputToken] = []  # tokens whose text is held back

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens so far."""
        return self._parser.num_reasoning_tokens

    def read(self, chunk: Chunk) -> Iterator[Change]:
        """Yields the changes that a chunk makes."""
        if self._with_tokens:
            # One by one, so that each token's part is known.
            for token in chunk.tokens:
                self._tokens.append(token)
                yield from self._take(self._parser.feed_token(token.text))
            if chunk.completion is not None:
                yield from self._take(self._parser.flush())
        else:
            yield from self._take(self._parser.read(chunk))
        if chunk.completion is None:
            return
        if not self.parts:
            yield self._begin(Kind.TEXT)
            if self._space:
                yield self._grow(self._space)
        yield from self._end(is_whole=self._is_whole(chunk.completion))

    def _take(self, pieces: list[Piece]) -> Iterator[Change]:
        for piece in pieces:
            if piece.name is not None:
                yield from self._end()
                self._tokens.clear()
                yield self._begin(Kind.CALL, piece.name)
            elif piece.arguments:
                self._tokens.clear()
                yield self._grow(piece.arguments)
            elif piece.reasoning:
                self._tokens.clear()
                if self._open is None or self._open.kind is not Kind.REASONING:
                    yield from self._end()
                    yield self._begin(Kind.REASONING)
                yield self._grow(piece.reasoning)
            else:
                yield from self._take_text(piece.text)

    def _take_text(self, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind is not Kind.TEXT:
            self._space += text
            if not self._parser.is_plain and not self._space.strip():
                return
            text, self._space = self._space, ""
            yield from self._end()
            yield self._begin(Kind.TEXT)
        yield self._grow(text)

    def _is_whole(self, end: Completion) -> bool:
        """Returns whether the last part was not cut.

        A call may be whole before its end mark has come.
        """
        if self._open is None:
            return True
        has_stopped = end.reason is FinishReason.STOP
        if self._open.kind is not Kind.CALL or (has_stopped and not end.is_by_request):
            return has_stopped
        return is_json(self._open.text)

    def _begin(self, kind: Kind, name: str = "") -> Change:
        self._open = Part(len(self.parts), kind, name)
        self.parts.append(self._open)
        return Change(Stage.OPENED, self._open)

    def _grow(self, text: str) -> Change:
        assert self._open is not None
        self._open.add(text)
        tokens = tuple(self._tokens) if self._open.kind is Kind.TEXT else ()
        self._open.tokens.extend(tokens)
        self._tokens.clear()
        return Change(Stage.GREW, self._open, text, tokens)

    def _end(self, is_whole: bool = True) -> Iterator[Change]:
        part, self._open = self._open, None
        self._space = ""
        if part is not None:
            part.is_whole = is_whole
            yield Change(Stage.CLOSED, part)
