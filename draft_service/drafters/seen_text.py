"""Text of one verifier's sequences, and what followed such text before. Never imports torch."""

import bisect
from collections.abc import Iterable, Sequence

from draft_service.metrics import TRIE_NODES
from draft_service.ngram import trie
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.speculation import SpeculationConfig

# Match lengths at which the confidence of a proposal rises by one. A model's proposals have
# confidence 0, which means unknown.
CONFIDENT_LENGTHS = (1, 2, 3, 4, 6, 9)


def rules_of(config: SpeculationConfig, min_window: int) -> trie.NgramRules:
    """Returns the configured n-gram rules, for matches of at least `min_window` tokens."""
    longest, branch_length = config.ngram_window
    return trie.NgramRules(
        min_window=min_window,
        max_window=longest,
        branch_length=branch_length,
        min_breadth=config.speculative_ngram_min_bfs_breadth,
        max_breadth=config.speculative_ngram_max_bfs_breadth,
        match_type="PROB" if config.speculative_ngram_match_type == "PROB" else "BFS",
    )


class SeenText:
    """Holds the text of a verifier's sequences, and proposes what followed such text before.

    Args:
        rules: How a match becomes a tree.
        capacity: Maximum number of nodes of the trie.

    Attributes:
        num_tokens: Position after the newest known token of each sequence, by slot.
    """

    def __init__(self, rules: trie.NgramRules, capacity: int) -> None:
        self.num_tokens: dict[int, int] = {}
        self._drafter = trie.NgramDrafter(rules, capacity)
        self._num_nodes = 0  # last value added to the metric

    def release(self, slots: Iterable[int]) -> None:
        """Ends sequences; what they put into the trie stays."""
        for slot in slots:
            self._drafter.release(slot)
            self.num_tokens.pop(slot, None)

    def begin(self, sequence: draft_pb2.SequenceStep) -> None:
        """Starts a sequence, which is known from the message's position on."""
        slot = sequence.slot
        self.release((slot,))
        self._drafter.begin(slot, sequence.begin.scope or None)
        self.num_tokens[slot] = sequence.position

    def extend(self, slot: int, position: int, tokens: Sequence[int]) -> None:
        """Appends the committed tokens from a position on that are not known yet."""
        num_known = self.num_tokens[slot]
        # Committed tokens never change, so those that are sent again are skipped.
        news = tokens[num_known - position :]
        self._drafter.extend(slot, news)
        self.num_tokens[slot] = num_known + len(news)

    def propose(
        self,
        slot: int,
        nodes: int,
        limits: tuple[int, int] | None,
        response: draft_pb2.StepResponse,
    ) -> bool:
        """Adds what followed a sequence's newest text to a response; returns whether it found any.

        Args:
            slot: Slot of the sequence.
            nodes: Maximum number of nodes.
            limits: Maximum depth, and children of a node; None for those of the rules.
            response: Response that the tree is added to.
        """
        if limits is None:
            tree = self._drafter.propose(slot, nodes)
        else:
            # A larger tree leaves enough nodes after it is cut to the limits.
            tree = self._drafter.propose(slot, 4 * nodes).within(*limits).first(nodes)
        if not tree.tokens:
            return False
        confidence = bisect.bisect(CONFIDENT_LENGTHS, self._drafter.match_length(slot))
        response.proposals.add(
            slot=slot, tokens=tree.tokens, parents=tree.parents, confidence=confidence
        )
        return True

    def report_nodes(self) -> None:
        """Adds the trie's new nodes to the metric."""
        num_nodes = self._drafter.num_nodes
        TRIE_NODES.inc(num_nodes - self._num_nodes)
        self._num_nodes = num_nodes

    def close(self) -> None:
        """Subtracts the trie's nodes from the metric."""
        TRIE_NODES.dec(self._num_nodes)
