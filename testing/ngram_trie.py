"""The n-gram trie without the drafters and sequences around it."""

from collections.abc import Sequence

from draft_service.ngram._ngram import Context, Trie
from draft_service.ngram.trie import MatchType, NgramRules
from foredraft.trees.draft_tree import EMPTY, DraftTree


class NgramTrie:
    """A trie with one scope, as `NgramDrafter` shares between sequences.

    Args:
        capacity: Maximum number of nodes; memory grows with use, by about 50 bytes a node.
        min_window, max_window, branch_length, min_breadth, max_breadth, match_type: See
            `NgramRules`.
    """

    def __init__(
        self,
        capacity: int,
        min_window: int = 1,
        max_window: int = 12,
        branch_length: int = 18,
        min_breadth: int = 1,
        max_breadth: int = 10,
        match_type: MatchType = "BFS",
    ) -> None:
        self.rules = NgramRules(
            min_window, max_window, branch_length, min_breadth, max_breadth, match_type
        )
        self._trie = Trie(capacity, branch_length)

    def insert(self, tokens: Sequence[int]) -> None:
        """Adds every window of a whole sequence.

        Raises:
            TypeError, ValueError: If a token is not an integer in [0, 2^31); nothing is inserted.
        """
        Context(self._trie, 0).extend(tokens)

    def match(self, context: Sequence[int], max_nodes: int) -> DraftTree:
        """Returns continuations of the longest suffixes of `context`, at most `max_nodes`;
        empty where nothing matches.
        """
        rules = self.rules
        if max_nodes <= 0:
            return EMPTY
        tokens, parents, _ = self._trie.match(
            0,
            context[-rules.max_window :],
            max_nodes,
            rules.min_window,
            rules.max_window,
            rules.min_breadth,
            rules.max_breadth,
            rules.match_type == "PROB",
        )
        return DraftTree(tokens, parents)

    @property
    def num_nodes(self) -> int:
        """Number of nodes in use."""
        return self._trie.num_nodes

    @property
    def num_bytes(self) -> int:
        """Number of bytes allocated."""
        return self._trie.num_bytes

    def dump(self) -> list[tuple[int, int, int]]:
        """Returns (depth, token, frequency) of every node, depth first, most recent children
        first; depth 0 is the root.
        """
        return self._trie.dump()
