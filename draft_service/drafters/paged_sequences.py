"""State of each sequence in a draft that keeps KV on the verifier's page numbers.

Holds no KV and imports no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from draft_service.drafters.slots import check_position, check_slots, check_tokens
from draft_service.drafters.tree_limits import TreeLimits
from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import InvalidRequest
from foredraft.rpc.sampling import read_sampling
from foredraft.types import SamplingParams


@dataclass(slots=True)
class PagedSequence:
    """State of one live sequence.

    Attributes:
        slot: Number of the sequence.
        sampling: Parameters that the target samples with.
        valid_from: First key that rows attend to.
        num_tokens: Number of leading tokens that are known.
        num_keys: Number of keys on the pages, void keys before `valid_from` included: one for each
            token, or one fewer for heads.
        num_ahead: Maximum number of tokens that steps on the device have added since.
        last_token: Newest known token; None before the first step's tokens.
        pages: Page table.
    """

    slot: int
    sampling: SamplingParams
    valid_from: int
    num_tokens: int
    num_keys: int
    num_ahead: int = 0
    last_token: int | None = None
    pages: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Extension:
    """Committed tokens of one sequence whose KV is to be computed, and the tree wanted after them.

    Attributes:
        sequence: Sequence that the tokens belong to.
        start: Key index of the first token.
        tokens: The committed tokens.
        hidden: The target's hidden states of the positions before the tokens; None for drafts that
            read none.
        limits: Limits of the tree, each at least 1; None where no tree is wanted.
    """

    sequence: PagedSequence
    start: int
    tokens: list[int]
    hidden: draft_pb2.HiddenRows | None
    limits: TreeLimits | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A sequence of a step whose committed tokens only the device knows.

    Attributes:
        sequence: The sequence.
        start: Key index of the first token; -1 where only the device knows it.
        row: Row of the exchange that holds the tokens and takes the tree.
        is_wanted: Whether a tree is wanted.
    """

    sequence: PagedSequence
    start: int
    row: int
    is_wanted: bool


class PagedSequences:
    """Holds all live sequences of one verifier.

    Args:
        attach: The verifier's sizes.
        limits: Limits of trees.
        shift: Distance from a token's key index to its position: 1 for heads, whose key p belongs
            to the hidden state of position p and the token after it.

    Attributes:
        on_pages: Called with (slot, first entry, pages) for every change of a page table.
    """

    on_pages: Callable[[int, int, list[int]], None] | None = None

    def __init__(self, attach: draft_pb2.AttachRequest, limits: TreeLimits, shift: int = 0) -> None:
        self._attach = attach
        # Local copies, since every sequence of every step reads them.
        self._page_size = attach.page_size
        self._vocab_size, self._max_context = attach.vocab_size, attach.max_context
        self._limits = limits
        self._shift = shift
        self._sequences: dict[int, PagedSequence] = {}
        # The newest step, if it stays on the device and brings no pages, and the continuations read
        # from it, once the same step has come again.
        self._newest: draft_pb2.StepRequest | None = None
        self._again: list[Continuation] | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    def apply(self, request: draft_pb2.StepRequest) -> list[Extension]:
        """Applies a step's message and returns the extensions to compute.

        The message's order counts: a sequence may use pages that an earlier one fills.

        Raises:
            InvalidRequest: The step breaks the protocol.
        """
        self._newest = None
        for slot in request.released_slots:
            self._sequences.pop(slot, None)
        # Looking at each message of a large batch twice would take longer than reading the step.
        messages = list(request.sequences)
        slots = {message.slot for message in messages}
        if len(slots) < len(messages) or not slots <= self._sequences.keys():
            check_slots(request, self._sequences, self._attach.max_batch)
        extensions = [self._apply_one(message) for message in messages]
        return [extension for extension in extensions if extension.tokens]

    def proceed(self, request: draft_pb2.StepRequest) -> list[Continuation]:
        """Applies the message of a step that stays on the device.

        Returns:
            The sequences to continue; the same list object where the step repeats the last one, as
            most steps do.

        Raises:
            InvalidRequest: The step breaks the protocol.
        """
        if self._newest is not None:
            self._newest.step = request.step
        is_repeated = self._newest == request
        if is_repeated and self._again is not None:
            for one in self._again:
                one.sequence.num_ahead += self._limits.steps + 1
            return self._again
        self._newest = self._again = None
        for slot in request.released_slots:
            self._sequences.pop(slot, None)
        check_slots(request, self._sequences, self._attach.max_batch)
        continuations = [self._proceed_one(message) for message in request.sequences]
        if len({one.row for one in continuations}) < len(continuations):
            raise InvalidRequest("device_row", "two sequences have the same")
        if not request.released_slots and not any(one.new_pages for one in request.sequences):
            self._newest = draft_pb2.StepRequest()
            self._newest.CopyFrom(request)
            self._again = continuations if is_repeated else None  # the first has start indexes
        return continuations

    def _proceed_one(self, message: draft_pb2.SequenceStep) -> Continuation:
        slot, row = message.slot, message.device_row
        if not message.HasField("device_row") or row >= self._attach.max_batch:
            raise InvalidRequest("device_row", f"slot {slot}: all of a step have one or none")
        if message.HasField("begin") or message.tokens or message.HasField("hidden"):
            raise InvalidRequest("device_row", f"slot {slot}: it comes without begin and tokens")
        sequence = self._sequences[slot]
        if sequence.num_tokens < self._shift:
            raise InvalidRequest("device_row", f"slot {slot}: its first token is not known")
        if new_pages := message.new_pages:
            self._replace_pages(sequence, message.first_page, list(new_pages))
        start = -1 if sequence.num_ahead else sequence.num_keys
        sequence.num_ahead += self._limits.steps + 1
        sequence.last_token = None
        return Continuation(sequence, start, row, message.HasField("propose"))

    def _apply_one(self, message: draft_pb2.SequenceStep) -> Extension:
        slot, start = message.slot, message.position
        if message.HasField("device_row"):
            raise InvalidRequest("device_row", f"slot {slot}: all of a step have one or none")
        if message.HasField("begin"):
            self._sequences[slot] = PagedSequence(
                slot,
                _sampling_params(message.begin.sampling),
                message.begin.valid_from,
                start,
                max(start - self._shift, 0),
            )
        sequence = self._sequences[slot]
        tokens = list(message.tokens)
        if start > sequence.num_tokens + sequence.num_ahead:
            check_position(message, sequence.num_tokens + sequence.num_ahead)
        if start + len(tokens) > self._max_context or max(tokens, default=0) >= self._vocab_size:
            check_tokens(message, self._vocab_size, self._max_context)
        if new_pages := message.new_pages:
            self._replace_pages(sequence, message.first_page, list(new_pages))
        has_propose = message.HasField("propose")
        if has_propose and not tokens:
            if self._shift:
                raise InvalidRequest(
                    "tokens", f"slot {slot}: a head proposes after a token with its state"
                )
            # The tree follows a known token, whose row is computed again for its logits.
            if start != sequence.num_tokens or sequence.last_token is None:
                raise InvalidRequest("tokens", f"slot {slot}: none to propose after")
            start, tokens = start - 1, [sequence.last_token]
        if tokens or start != sequence.num_tokens:
            sequence.last_token = tokens[-1] if tokens else None
        sequence.num_tokens, sequence.num_ahead = start + len(tokens), 0
        first_key = start - self._shift
        if first_key < 0:  # token 0 has no key, since no hidden state comes before it
            first_key, tokens = 0, tokens[1:]
        sequence.num_keys = first_key + len(tokens)
        # Keys that are computed again are valid, wherever they begin.
        if first_key < sequence.valid_from:
            sequence.valid_from = first_key
        if tokens and sequence.num_keys > len(sequence.pages) * self._page_size:
            raise InvalidRequest(
                "new_pages",
                f"slot {slot}: {len(sequence.pages)} pages do not hold {sequence.num_keys} keys",
            )
        limits = self._tree_limits(message.propose, sequence) if has_propose else None
        hidden = message.hidden if message.HasField("hidden") else None
        return Extension(sequence, first_key, tokens, hidden, limits)

    def _replace_pages(
        self, sequence: PagedSequence, first_page: int, new_pages: list[int]
    ) -> None:
        if max(new_pages) >= self._attach.num_pages:
            raise InvalidRequest(
                "new_pages",
                f"slot {sequence.slot}: page {max(new_pages)} is not below"
                f" {self._attach.num_pages}",
            )
        if first_page > len(sequence.pages):
            raise InvalidRequest(
                "first_page",
                f"slot {sequence.slot}: {first_page} leaves a gap after "
                f"{len(sequence.pages)} pages",
            )
        sequence.pages[first_page:] = new_pages
        if self.on_pages is not None:
            self.on_pages(sequence.slot, first_page, new_pages)

    def _tree_limits(
        self, wanted: draft_pb2.TreeLimits, sequence: PagedSequence
    ) -> TreeLimits | None:
        steps, topk, nodes = map(min, self._limits, self._limits.asked(wanted))
        # No path can be longer than the number of nodes, or than the context's room.
        steps = min(steps, nodes, self._max_context - sequence.num_tokens)
        return TreeLimits(steps, topk, nodes) if steps > 0 else None


def _sampling_params(message: draft_pb2.Sampling) -> SamplingParams:
    params = read_sampling(message)
    params.validate(vocab_size=0)
    return params
