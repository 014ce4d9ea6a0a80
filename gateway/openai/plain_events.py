"""Renders stream events that differ only in their text, from templates.

Encoding each event anew would cost a tenth of a token's time.
"""

from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from gateway.decoding import Chunk
from gateway.event_streams import encode_event, one_line
from gateway.openai.replies import Reply

_MARK = "\x00text\x00"
# If one of these is requested, an event holds more than text and counts.
_DETAILS = ("logprobs", "return_provenance", "return_token_ids", "tools")


class PlainEvents:
    """Renders the events of one stream.

    Args:
        reply: Renders chunks that hold more.
        base: Fields that all events have in common.
    """

    def __init__(self, reply: Reply, base: Mapping[str, Any]) -> None:
        self._reply, self._base = reply, base
        options = reply.body.stream_options
        # 0 is a number of log-probabilities that can be asked for.
        asked = [getattr(reply.body, name, None) for name in _DETAILS]
        is_plain = reply.is_plain and all(value is None or value is False for value in asked)
        self._on = is_plain and not (options is not None and options.continuous_usage_stats)
        # Bytes before and after the text, by index of the choice and number of tokens.
        self._templates: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def render(self, index: int, chunk: Chunk) -> bytes | None:
        """Renders a chunk that is not a choice's first; None if it holds more than text."""
        if not self._on or chunk.completion is not None or not chunk.text:
            return None
        key = (index, len(chunk.tokens))
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._make(index, chunk)
        head, tail = template
        return head + one_line(encode_basestring(chunk.text)).encode() + tail

    def _make(self, index: int, chunk: Chunk) -> tuple[bytes, bytes]:
        marked = Chunk(chunk.index, _MARK, chunk.tokens)
        (choice,) = self._reply.deltas(index, 0, marked, False)
        event = encode_event({**self._base, "choices": [choice]})
        head, tail = event.split(encode_basestring(_MARK).encode())
        return head, tail
