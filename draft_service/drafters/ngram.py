"""Drafts by n-grams for attached verifiers, without torch.

`draft_service.ngram.trie` has the tries.
"""

import time

from draft_service.drafters.base import Drafter, Proposer
from draft_service.drafters.seen_text import SeenText, rules_of
from draft_service.drafters.slots import check_position, check_slots, check_tokens
from draft_service.drafters.tree_limits import TreeLimits
from foredraft import __version__
from foredraft.api.draft.v1 import draft_pb2
from foredraft.api.tensor.v1 import tensor_pb2
from foredraft.config.speculation import SpeculationConfig
from foredraft.errors import AttachRefused

_BRIEF_TOKENS = 256  # inserting this many takes well under a millisecond


class NgramDrafter(Drafter):
    """Makes a trie for each verifier; verifiers share no text."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._rules = rules_of(config, config.speculative_ngram_min_match_window_size)
        self._capacity = config.speculative_ngram_capacity
        self._limits = TreeLimits.of(config.tree_limits)

    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Describes the drafter, which takes any vocabulary and keeps no KV."""
        return draft_pb2.GetDraftInfoResponse(
            algorithm="NGRAM",
            transports=[tensor_pb2.TRANSPORT_INLINE],
            limits=self._limits.message,
            proposes=draft_pb2.PROPOSAL_SHAPE_TREES,
            cost=draft_pb2.DRAFT_COST_FREE,
            version=__version__,
        )

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Creates a proposer with an empty trie."""
        if not request.max_batch:
            raise AttachRefused("max_batch", "must be at least 1")
        text = SeenText(self._rules, self._capacity)
        return NgramProposer(text, request, self._limits), draft_pb2.AttachResponse()


class NgramProposer(Proposer):
    """Drafts by n-grams for one verifier."""

    def __init__(
        self,
        text: SeenText,
        attach: draft_pb2.AttachRequest,
        limits: TreeLimits,
    ) -> None:
        self._text = text
        self._max_batch = attach.max_batch
        self._vocab_size = attach.vocab_size
        self._max_context = attach.max_context
        self._num_steps, self._topk, self._max_nodes = limits

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Returns whether the step is short: decoding is, prompts are not."""
        return sum(len(sequence.tokens) for sequence in request.sequences) <= _BRIEF_TOKENS

    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Inserts the committed tokens, and looks up what followed such text before."""
        started = time.perf_counter_ns()
        text = self._text
        text.release(request.released_slots)
        check_slots(request, text.num_tokens, self._max_batch)
        for sequence in request.sequences:
            slot, is_new = sequence.slot, sequence.HasField("begin")
            check_position(sequence, 0 if is_new else text.num_tokens[slot])
            tokens = check_tokens(sequence, self._vocab_size, self._max_context)
            if is_new:
                text.begin(sequence)
            text.extend(slot, sequence.position, tokens)
        extended = time.perf_counter_ns()
        response = draft_pb2.StepResponse()
        for sequence in request.sequences:
            if sequence.HasField("propose"):
                self._propose(sequence, response)
        text.report_nodes()
        response.extend_microseconds = (extended - started) // 1000
        response.draft_microseconds = (time.perf_counter_ns() - extended) // 1000
        return response

    def close(self) -> None:
        """See Proposer."""
        self._text.close()

    def _propose(self, sequence: draft_pb2.SequenceStep, response: draft_pb2.StepResponse) -> None:
        asked = sequence.propose
        max_nodes = self._max_nodes
        if asked.num_draft_tokens:
            # A verifier may ask for the trees of two steps and the token between them, to use the
            # second tree in the next step.
            max_nodes = min(asked.num_draft_tokens - 1, 2 * max_nodes + 1)
        steps, topk = asked.num_steps or self._num_steps, asked.topk or self._topk
        is_narrow = steps < min(self._num_steps, max_nodes) or topk < self._topk
        limits = (steps, topk) if is_narrow else None
        self._text.propose(sequence.slot, max_nodes, limits, response)
