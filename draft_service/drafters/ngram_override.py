"""Replaces a model's proposals by n-gram matches where a sequence repeats text seen before.

Never imports torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.paged_sequences import Extension
from draft_service.drafters.seen_text import SeenText, rules_of
from draft_service.metrics import NGRAM_OVERRIDES
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
    """Proposes what followed a sequence's newest text before, in a model's place."""

    def __init__(self, settings: OverrideSettings) -> None:
        self._text = SeenText(settings.rules, settings.capacity)

    def read(self, request: draft_pb2.StepRequest) -> None:
        """Reads the committed tokens of a step that has been validated."""
        self._text.release(request.released_slots)
        for sequence in request.sequences:
            if sequence.HasField("begin"):
                self._text.begin(sequence)
            self._text.extend(sequence.slot, sequence.position, sequence.tokens)
        self._text.report_nodes()

    def propose(self, extensions: Sequence[Extension], response: draft_pb2.StepResponse) -> None:
        """Proposes trees for the sequences whose newest text was seen before.

        Clears the limits of their extensions, so that the model drafts nothing for them.
        """
        for extension in extensions:
            if extension.limits is None:
                continue
            steps, topk, nodes = extension.limits
            if self._text.propose(extension.sequence.slot, nodes, (steps, topk), response):
                extension.limits = None
                NGRAM_OVERRIDES.inc()

    def close(self) -> None:
        """Subtracts the trie's nodes from the metric."""
        self._text.close()
