"""Drafting from text that was seen before (torch-free). The data structures are in C (`_ngram.h`).

Two sources are matched by the longest suffix of a sequence. A trie holds every window of
`branch_length` tokens that the sequences of a scope have seen; one pool of nodes serves all scopes,
bounded by `capacity`, and the least recently used leaf goes first. Each live sequence also has an
index of its own text (hash chains as in LZ77, about 30 bytes a token), which needs no trie, has no
bound on how far a copy may run, and goes when the sequence goes. At each match length, longest
first, the own text is asked before the trie, so that a request's own context decides among equally
good matches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draft_service.ngram._ngram import Context, Trie
from foredraft.trees.draft_tree import EMPTY, DraftTree

MatchType = Literal["BFS", "PROB"]

MAX_DEPTH = 64
MAX_BREADTH = 256


@dataclass(frozen=True, slots=True)
class NgramRules:
    """Configures how a match becomes a tree.

    Attributes:
        min_window: Shortest suffix that counts as a match.
        max_window: Longest suffix that is looked for.
        branch_length: Tokens per inserted window, so that a match of d tokens continues for
            branch_length - d in the trie.
        min_breadth: Children taken per node where the match is longest or the tree deepest.
        max_breadth: Children taken per node where the match is shortest.
        match_type: BFS takes the most recent children, breadth first; PROB the most frequent (of
            the 4,096 most recent), best path first.
    """

    min_window: int = 1
    max_window: int = 12
    branch_length: int = 18
    min_breadth: int = 1
    max_breadth: int = 10
    match_type: MatchType = "BFS"

    def __post_init__(self) -> None:
        if not 1 <= self.min_window <= self.max_window <= MAX_DEPTH:
            raise ValueError(f"need 1 <= min_window <= max_window <= {MAX_DEPTH}")
        if not 2 <= self.branch_length <= MAX_DEPTH:
            raise ValueError(f"branch_length must be in [2, {MAX_DEPTH}]")
        if not 1 <= self.min_breadth <= self.max_breadth <= MAX_BREADTH:
            raise ValueError(f"need 1 <= min_breadth <= max_breadth <= {MAX_BREADTH}")
        if self.match_type not in ("BFS", "PROB"):
            raise ValueError("match_type must be BFS or PROB")


class NgramDrafter:
    """Proposes what followed the newest tokens when they were seen before.

    Sequences are named by slot numbers.

    Args:
        rules: How a match becomes a tree.
        capacity: Most nodes of the trie, over all scopes.
    """

    def __init__(self, rules: NgramRules, capacity: int = 10_000_000) -> None:
        self.rules = rules
        self._trie = Trie(capacity, rules.branch_length)
        self._contexts: dict[int, Context] = {}
        self._match_lengths: dict[int, int] = {}
        self._scope_ids: dict[str, int] = {}
        self._scope_of: dict[int, str] = {}
        self._next_scope_id = 0
        self._sweep_at = 1024

    def begin(self, slot: int, scope: str | None) -> None:
        """Starts a sequence.

        Args:
            slot: A number that is not in use.
            scope: Sequences of the same scope draft from each other's text; None keeps the sequence
                to its own.
        """
        if slot in self._contexts:
            raise ValueError(f"slot {slot} is in use")
        if scope is None:
            self._contexts[slot] = Context(None, 0)
        else:
            self._contexts[slot] = Context(self._trie, self._scope_id(scope))
            self._scope_of[slot] = scope
        self._match_lengths[slot] = 0

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Appends committed tokens (prompt or output); each is inserted and counted once.

        Raises:
            KeyError: If the slot is not in use.
            TypeError, ValueError: If a token is not an integer in [0, 2^31); nothing is appended.
        """
        self._contexts[slot].extend(tokens)

    def propose(self, slot: int, max_nodes: int) -> DraftTree:
        """Returns a tree of at most `max_nodes` continuations; empty where nothing matches."""
        rules = self.rules
        context = self._contexts[slot]
        if max_nodes <= 0:
            return EMPTY
        tokens, parents, self._match_lengths[slot] = context.propose(
            max_nodes,
            rules.min_window,
            rules.max_window,
            rules.branch_length,
            rules.min_breadth,
            rules.max_breadth,
            rules.match_type == "PROB",
        )
        return DraftTree(tokens, parents)

    def match_length(self, slot: int) -> int:
        """Returns the length of the last proposal's match, 0 for none; a longer match is more
        likely to be right.
        """
        return self._match_lengths[slot]

    def release(self, slot: int) -> None:
        """Ends a sequence; what it put into the trie stays.

        Does nothing for a slot that is not in use.
        """
        self._contexts.pop(slot, None)
        self._match_lengths.pop(slot, None)
        self._scope_of.pop(slot, None)

    @property
    def num_nodes(self) -> int:
        """Number of the trie's nodes in use."""
        return self._trie.num_nodes

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated by the trie and the live sequences."""
        return self._trie.num_bytes + sum(c.num_bytes for c in self._contexts.values())

    def _scope_id(self, scope: str) -> int:
        known = self._scope_ids.get(scope)
        if known is not None:
            return known
        if len(self._scope_ids) >= self._sweep_at:
            live = set(self._scope_of.values())
            self._scope_ids = {
                name: number
                for name, number in self._scope_ids.items()
                if name in live or self._trie.has_scope(number)
            }
            self._sweep_at = max(1024, 2 * len(self._scope_ids))
        self._scope_ids[scope] = self._next_scope_id
        self._next_scope_id += 1
        return self._scope_ids[scope]
