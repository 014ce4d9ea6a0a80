"""Events from templates are byte for byte those of the encoder."""

import json
import random
from typing import Any

import pytest

from foredraft.text.tokenizer import Tokenizer
from gateway.decoding import Chunk, OutputToken
from gateway.event_streams import encode_event
from gateway.openai.plain_events import PlainEvents
from gateway.openai.replies import ChatReply, CompletionReply, Reply
from gateway.openai.schemas import ChatBody, CompletionBody
from testing import tiny_tokenizers

TOKENIZER = Tokenizer(tiny_tokenizers.byte_level())
BASE: dict[str, Any] = {"id": "a", "object": "b", "created": 1, "model": 'c "d"', "usage": None}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
# What ends a line for Python's str.splitlines, with which httpx finds the lines of a stream.
BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def replies(**fields: Any) -> list[Reply]:
    body = CompletionBody(model="m", prompt="x", **fields)
    chat = ChatBody(**{**CHAT, **fields})
    return [CompletionReply(TOKENIZER, body, [], [[]]), ChatReply(TOKENIZER, chat)]


def test_plain_events_are_what_the_encoder_gives() -> None:
    draw = random.Random(3)
    alphabet = ["a", " ", '"', "\\", "\x00", *BREAKS, "é", "🙂", "</script>", "text"]
    for reply in replies():
        events = PlainEvents(reply, BASE)
        for _ in range(300):
            text = "".join(draw.choices(alphabet, k=draw.randrange(1, 6)))
            tokens = [OutputToken(draw.randrange(9), text) for _ in range(draw.randrange(1, 4))]
            index = draw.randrange(3)
            chunk = Chunk(index, text, tokens)
            (choice,) = reply.deltas(index, 0, chunk, False)
            assert events.render(index, chunk) == encode_event({**BASE, "choices": [choice]})


def test_an_event_is_one_line_for_every_client() -> None:
    given = {"text": f"a{BREAKS}é", "choices": [{"key" + BREAKS: BREAKS}]}
    line, after = encode_event(given).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == given
    assert after == ""


@pytest.mark.parametrize(
    "fields", [{"return_provenance": True}, {"return_token_ids": True}, {"logprobs": 1}]
)
def test_what_holds_more_is_left_to_the_encoder(fields: dict[str, Any]) -> None:
    for reply in replies(**({} if "logprobs" in fields else fields)):
        if "logprobs" in fields:
            is_chat = isinstance(reply.body, ChatBody)
            reply.body.logprobs = True if is_chat else 0  # type: ignore[attr-defined]
        chunk = Chunk(0, "x", [OutputToken(1, "x")])
        assert PlainEvents(reply, BASE).render(0, chunk) is None
    for reply in replies():
        assert PlainEvents(reply, BASE).render(0, Chunk(0, "", [])) is None
