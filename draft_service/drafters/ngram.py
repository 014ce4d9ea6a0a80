"""Drafts by n-grams for attached verifiers, without torch.

`draft_service.ngram.trie` has the tries.
"""

import bisect
import time

from draft_service.drafters.base import Drafter, Proposer
from draft_service.drafters.slots import check_position, check_slots, check_tokens
from draft_service.metrics import TRIE_NODES
from draft_service.ngram import trie
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import AttachRefused

# Match lengths at which the confidence of a proposal rises by one. A model's proposals have
# confidence 0, which means unknown.
CONFIDENT_LENGTHS = (1, 2, 3, 4, 6, 9)
_BRIEF_TOKENS = 256  # inserting this many takes well under a millisecond


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


class NgramDrafter(Drafter):
    """Makes a trie for each verifier; verifiers share no text."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._rules = rules_of(config, config.speculative_ngram_min_match_window_size)
        self._capacity = config.speculative_ngram_capacity
        self._limits = config.tree_limits

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Describes the drafter, which takes any vocabulary and keeps no KV."""
        steps, topk, tokens = self._limits
        return draft_pb2.GetDraftInfoResponse(
            algorithm="NGRAM",
            transports=[tensor_pb2.TRANSPORT_INLINE],
            limits=draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens),
            proposes=draft_pb2.PROPOSAL_SHAPE_TREES,
            cost=draft_pb2.DRAFT_COST_FREE,
            version=__version__,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Creates a proposer with an empty trie."""
        if not request.max_batch:
            raise AttachRefused("max_batch", "must be at least 1")
        proposer = NgramProposer(
            trie.NgramDrafter(self._rules, self._capacity), request, self._limits
        )
        return proposer, draft_pb2.AttachResponse()


class NgramProposer(Proposer):
    """Drafts by n-grams for one verifier."""

    def __init__(
        self,
        drafter: trie.NgramDrafter,
        attach: draft_pb2.AttachRequest,
        limits: tuple[int, int, int],
    ) -> None:
        self._drafter = drafter
        self._max_batch = attach.max_batch
        self._vocab_size = attach.vocab_size
        self._max_context = attach.max_context
        self._num_steps, self._topk, num_tokens = limits
        self._max_nodes = num_tokens - 1
        self._num_tokens: dict[int, int] = {}  # by slot
        self._num_nodes = 0  # last value added to the metric

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Returns whether the step is short: decoding is, prompts are not."""
        return sum(len(sequence.tokens) for sequence in request.sequences) <= _BRIEF_TOKENS

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Inserts the committed tokens, and looks up what followed such text before."""
        started = time.perf_counter_ns()
        for slot in request.released_slots:
            self._release(slot)
        check_slots(request, self._num_tokens, self._max_batch)
        for sequence in request.sequences:
            self._extend(sequence)
        extended = time.perf_counter_ns()
        response = draft_pb2.StepResponse()
        for sequence in request.sequences:
            if sequence.HasField("propose"):
                self._propose(sequence, response)
        self._report_nodes()
        response.extend_microseconds = (extended - started) // 1000
        response.draft_microseconds = (time.perf_counter_ns() - extended) // 1000
        return response

    def close(self) -> None:
        """Subtracts the trie's nodes from the metric."""
        TRIE_NODES.dec(self._num_nodes)

    def _extend(self, sequence: draft_pb2.SequenceStep) -> None:
        slot = sequence.slot
        if sequence.HasField("begin"):
            self._release(slot)
            self._drafter.begin(slot, sequence.begin.scope or None)
            self._num_tokens[slot] = 0
        num_known = self._num_tokens[slot]
        check_position(sequence, num_known)
        tokens = check_tokens(sequence, self._vocab_size, self._max_context)
        # Committed tokens never change, so those that are sent again are skipped.
        news = tokens[num_known - sequence.position :]
        self._drafter.extend(slot, news)
        self._num_tokens[slot] = num_known + len(news)

    def _propose(self, sequence: draft_pb2.SequenceStep, response: draft_pb2.StepResponse) -> None:
        asked = sequence.propose
        max_nodes = self._max_nodes
        if asked.num_draft_tokens:
            # A verifier may ask for the trees of two steps and the token between them, to use the
            # second tree in the next step.
            max_nodes = min(asked.num_draft_tokens - 1, 2 * max_nodes + 1)
        steps, topk = asked.num_steps or self._num_steps, asked.topk or self._topk
        is_narrow = steps < min(self._num_steps, max_nodes) or topk < self._topk
        # A larger tree leaves enough nodes after it is cut to the limits.
        tree = self._drafter.propose(sequence.slot, 4 * max_nodes if is_narrow else max_nodes)
        if is_narrow:
            tree = tree.within(steps, topk).first(max_nodes)
        if tree.tokens:
            length = self._drafter.match_length(sequence.slot)
            response.proposals.add(
                slot=sequence.slot,
                tokens=tree.tokens,
                parents=tree.parents,
                confidence=bisect.bisect(CONFIDENT_LENGTHS, length),
            )

    def _release(self, slot: int) -> None:
        self._drafter.release(slot)
        self._num_tokens.pop(slot, None)

    def _report_nodes(self) -> None:
        num_nodes = self._drafter.num_nodes
        TRIE_NODES.inc(num_nodes - self._num_nodes)
        self._num_nodes = num_nodes
