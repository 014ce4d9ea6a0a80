"""Replaces a model's proposals by n-gram matches where a sequence repeats text seen before.

Never imports torch.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.ngram import CONFIDENT_LENGTHS, rules_of
from draft_service.drafters.paged_sequences import Extension
from draft_service.metrics import NGRAM_OVERRIDES, TRIE_NODES
from draft_service.ngram import trie
from foredraft.api.draft.v1 import draft_pb2
from foredraft.config.speculation import SpeculationConfig


@dataclass(frozen=True, slots=True)
class OverrideSettings:
    """Settings of n-grams that replace a model's proposals.

    Attributes:
        rules: How a match becomes a tree; `min_window` is the shortest match that replaces a
            proposal.
        capacity: Maximum number of nodes of the trie.
    """

    rules: trie.NgramRules
    capacity: int

    @classmethod
    def from_config(cls, config: SpeculationConfig) -> "OverrideSettings | None":
        """Returns the configured settings; None where the model alone proposes."""
        if not config.speculative_ngram_override:
            return None
        shortest = config.speculative_ngram_override_min_match
        return cls(rules_of(config, shortest), config.speculative_ngram_capacity)


class NgramOverride:
    """Holds the text of one verifier's sequences, and proposes what followed such text before."""

    def __init__(self, settings: OverrideSettings) -> None:
        self._text = trie.NgramDrafter(settings.rules, settings.capacity)
        self._num_tokens: dict[int, int] = {}  # by slot: position after the newest known token
        self._num_nodes = 0  # last value added to the metric

    def read(self, request: draft_pb2.StepRequest) -> None:
        """Reads the committed tokens of a step that has been validated.

        A sequence with cached pages is known from its first uncached token on.
        """
        for slot in request.released_slots:
            self._release(slot)
        for sequence in request.sequences:
            slot = sequence.slot
            if sequence.HasField("begin"):
                self._release(slot)
                self._text.begin(slot, sequence.begin.scope or None)
                self._num_tokens[slot] = sequence.position
            # Committed tokens never change, so those that are sent again are skipped.
            news = sequence.tokens[self._num_tokens[slot] - sequence.position :]
            self._text.extend(slot, news)
            self._num_tokens[slot] += len(news)
        num_nodes = self._text.num_nodes
        TRIE_NODES.inc(num_nodes - self._num_nodes)
        self._num_nodes = num_nodes

    def propose(self, extensions: Sequence[Extension], response: draft_pb2.StepResponse) -> None:
        """Proposes trees for the sequences whose newest text was seen before.

        Clears the limits of their extensions, so that the model drafts nothing for them.
        """
        for extension in extensions:
            if extension.limits is None:
                continue
            steps, topk, nodes = extension.limits
            slot = extension.sequence.slot
            # A larger tree leaves enough nodes after it is cut to the limits.
            tree = self._text.propose(slot, 4 * nodes).within(steps, topk).first(nodes)
            if not tree.tokens:
                continue
            extension.limits = None
            NGRAM_OVERRIDES.inc()
            response.proposals.add(
                slot=slot,
                tokens=tree.tokens,
                parents=tree.parents,
                confidence=bisect.bisect(CONFIDENT_LENGTHS, self._text.match_length(slot)),
            )

    def close(self) -> None:
        """Subtracts the trie's nodes from the metric."""
        TRIE_NODES.dec(self._num_nodes)

    def _release(self, slot: int) -> None:
        self._text.release(slot)
        self._num_tokens.pop(slot, None)
