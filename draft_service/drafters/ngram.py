"""Drafting by n-grams for attached verifiers. The tries are in `draft_service.ngram.trie`; never imports torch."""

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

# Lengths of a match at which the confidence of a proposal rises by one; 0 is a model's, of which nothing is known.
CONFIDENT_LENGTHS = (1, 2, 3, 4, 6, 9)
_BRIEF_TOKENS = 256  # so many are inserted in well under a millisecond


class NgramDrafter(Drafter):
    """Makes a trie for each verifier; what one has seen is no other's."""

    def __init__(self, config: SpeculationConfig) -> None:
        longest, branch_length = config.ngram_window
        self._rules = trie.NgramRules(
            min_window=config.speculative_ngram_min_match_window_size,
            max_window=longest,
            branch_length=branch_length,
            min_breadth=config.speculative_ngram_min_bfs_breadth,
            max_breadth=config.speculative_ngram_max_bfs_breadth,
            match_type="PROB" if config.speculative_ngram_match_type == "PROB" else "BFS",
        )
        self._capacity = config.speculative_ngram_capacity
        self._limits = config.tree_limits

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Any vocabulary will do, and no KV is kept."""
        steps, topk, tokens = self._limits
        return draft_pb2.GetDraftInfoResponse(
            algorithm="NGRAM",
            transports=[tensor_pb2.TRANSPORT_INLINE],
            limits=draft_pb2.TreeLimits(num_steps=steps, topk=topk, num_draft_tokens=tokens),
            version=__version__,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Makes an empty trie."""
        if not request.max_batch:
            raise AttachRefused("max_batch", "must be at least 1")
        proposer = NgramProposer(
            trie.NgramDrafter(self._rules, self._capacity), request, self._limits
        )
        return proposer, draft_pb2.AttachResponse()


class NgramProposer(Proposer):
    """Drafts for one verifier."""

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
        self._num_nodes = 0  # as last reported

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Steps of decoding are; prompts are not."""
        return sum(len(sequence.tokens) for sequence in request.sequences) <= _BRIEF_TOKENS

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Inserts what was committed and looks up what followed such text before."""
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
        """Takes the trie's nodes out of the figures."""
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
        # Committed tokens never change: those that are sent again are known already.
        news = tokens[num_known - sequence.position :]
        self._drafter.extend(slot, news)
        self._num_tokens[slot] = num_known + len(news)

    def _propose(self, sequence: draft_pb2.SequenceStep, response: draft_pb2.StepResponse) -> None:
        asked = sequence.propose
        max_nodes = self._max_nodes
        if asked.num_draft_tokens:
            # A verifier may ask for two steps' trees and the token between, to use the rest in the next step.
            max_nodes = min(asked.num_draft_tokens - 1, 2 * max_nodes + 1)
        steps, topk = asked.num_steps or self._num_steps, asked.topk or self._topk
        is_narrow = steps < min(self._num_steps, max_nodes) or topk < self._topk
        # Of a few more nodes enough are left to choose from.
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
