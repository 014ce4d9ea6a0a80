"""Chooses the verifier that has a prompt's beginning cached, unless it is much busier than others.

Opens no connection.
"""

import enum
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# Number of tokens in a block of a prefix; tokens behind the last whole block decide nothing.
BLOCK_TOKENS = 32
# At about 250 bytes each; enough for two million tokens of prompts.
MAX_BLOCKS = 65_536
# Most verifiers remembered for one block: a preamble that all requests share is soon everywhere.
MAX_HOLDERS = 4
# A verifier is much busier than the least busy one when it has this factor of its requests and so
# many more.
BUSY_FACTOR, BUSY_MARGIN = 1.5, 4


class Reason(enum.Enum):
    """Why a verifier was chosen."""

    PREFIX = "prefix"
    LOAD = "load"
    BUSY = "busy"  # another one has more of the prompt, and is much busier


@dataclass(frozen=True, slots=True)
class Route:
    """A chosen verifier, with the reason."""

    holder: int
    reason: Reason


class Router:
    """Remembers which verifiers have seen which prefixes, up to `max_blocks` blocks.

    Verifiers are numbers here. A verifier whose cache was lost gets a new number, and its old
    number is never chosen again.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        # Hash of a prefix of whole blocks -> its holders, newest last. Last used, last in order.
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._used: dict[int, int] = {}  # by verifier: when it was chosen last
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._holders)

    def choose(self, prompt: Sequence[int], busy: Mapping[int, int]) -> Route:
        """Chooses a verifier for a prompt and remembers that it has the prompt from now on.

        Args:
            prompt: Token ids.
            busy: Number of requests by usable verifier; not empty.
        """
        blocks = list(_prefixes(prompt))
        held = self._held(blocks, busy)
        most = min(busy.values()) * BUSY_FACTOR + BUSY_MARGIN
        holder = min(
            (life for life in busy if busy[life] <= most),
            key=lambda life: (-held.get(life, 0), busy[life], self._used.get(life, 0)),
        )
        found = held.get(holder, 0)
        if found < max(held.values(), default=0):
            reason = Reason.BUSY
        else:
            reason = Reason.PREFIX if found else Reason.LOAD
        self._note(blocks, holder)
        self._used = {life: self._used.get(life, 0) for life in busy}
        self._used[holder] = next(self._clock)
        return Route(holder, reason)

    def _held(self, blocks: Sequence[int], busy: Mapping[int, int]) -> dict[int, int]:
        """Returns by verifier the number of leading blocks that it has."""
        held: dict[int, int] = {}
        for depth, block in enumerate(blocks, 1):
            holders = self._holders.get(block)
            if holders is None:
                break
            for life in holders:
                if life in busy:
                    held[life] = depth
        return held

    def _note(self, blocks: Sequence[int], holder: int) -> None:
        # From the last on, so that the beginning of a prompt is never forgotten before what follows
        # it.
        for block in reversed(blocks):
            others = (life for life in self._holders.get(block, ()) if life != holder)
            self._holders[block] = (*others, holder)[-MAX_HOLDERS:]
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)


def _prefixes(prompt: Sequence[int]) -> Iterator[int]:
    """Yields a hash for every prefix of whole blocks."""
    value = 0
    for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        value = hash((value, *prompt[start : start + BLOCK_TOKENS]))
        yield value
