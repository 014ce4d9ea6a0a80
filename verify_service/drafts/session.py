"""The state of one attach of a draft, and its sync in each step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from foredraft.transport.device_exchange import DeviceExchange
from verify_service.drafts.arena import Arena, Exchange
from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.client import DraftClient
from verify_service.drafts.draft_ahead import DraftAhead
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.open_requests import OpenRequest
from verify_service.drafts.page_marks import DraftMarks
from verify_service.drafts.proposals import DraftRequest
from verify_service.drafts.sync import StepFacts, Sync, decide
from verify_service.drafts.sync_messages import SyncMessages
from verify_service.drafts.wire import DraftWire, tree_limits
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence as RequestSequence

# Maximum bytes of hidden states kept for a draft that is not asked, and share of a GPU's memory.
MOST_KEPT, KEPT_SHARE = 128 << 20, 0.01


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of a draft from the configuration.

    Attributes:
        vocab_size: Number of the target's tokens.
        tree_shape: (steps, topk) of the largest tree.
        scope: "request", "key" or "server": requests that share text for drafting.
        refill_tokens: Maximum number of tokens per step that a draft with KV catches up on.
        number: Number of the draft, where there are several.
    """

    vocab_size: int
    tree_shape: tuple[int, int]
    scope: str
    refill_tokens: int
    number: int = 0


class Session:
    """Holds the state of one attach of a draft. Another attach has another session.

    Args:
        epoch: Number of the attach; 0 while there is none.
        client: Connection to the draft.
        arena: Memory for hidden states.
        pool: The verifier's pages.
        settings: Settings of the draft.
        metrics: Metrics of the draft.

    Attributes:
        epoch: Number of the attach.
        capabilities: Capabilities of the draft.
        device: Buffers of steps that stay on the GPU; None where there are no such steps.
        hidden: Hidden states for a draft that reads them, else None.
        messages: The draft's knowledge of each sequence, and the messages that update it.
        wire: Requests to the draft, and its answers.
        ahead: Trees that a draft without cost makes while the target runs.
        released: Released slots that the draft does not know of yet.
    """

    def __init__(
        self,
        epoch: int,
        client: DraftClient,
        arena: Arena,
        pool: PagePool,
        settings: DraftSettings,
        metrics: SpeculationMetrics,
    ) -> None:
        info = client.info if epoch else None
        exchange = arena.exchange(epoch) if epoch else None
        marks = DraftMarks(pool)
        self.epoch = epoch
        self.capabilities = DraftCapabilities() if info is None else DraftCapabilities.of(info)
        self.device = exchange.device if exchange is not None else None
        self.hidden = _hidden_states(exchange, marks, pool.page_size, settings)
        self.messages = SyncMessages(
            marks,
            pool.page_size,
            settings.scope,
            self.hidden,
            self.capabilities.uses_pages,
            settings.number,
        )
        self.ahead = DraftAhead()
        self.released: set[int] = set()
        on_tree = self.ahead.keep if self.capabilities.is_free else None
        self.wire = DraftWire(client, epoch, settings.vocab_size, metrics, self.hidden, on_tree)
        self._settings = settings

    @property
    def must_sync(self) -> bool:
        """Whether the draft must be synced now, since its hidden states take much memory."""
        if self.hidden is None or self.device is not None:
            return False
        return self.hidden.kept_bytes > MOST_KEPT

    def facts(
        self,
        requests: Sequence[DraftRequest],
        extending: Sequence[RequestSequence],
        is_suspended: bool,
    ) -> StepFacts:
        """Returns the facts about a step that need no look at its sequences."""
        return StepFacts(
            is_suspended=is_suspended,
            must_sync=self.must_sync,
            is_free=self.capabilities.is_free,
            follows=self.device is not None,
            has_prompts=bool(extending),
            has_requests=any(one.max_nodes for one in requests),
        )

    def begin_request(self, is_awaited: bool = True) -> None:
        """Begins an empty message, which releases slots.

        Args:
            is_awaited: Whether the step waits for its trees.
        """
        self.wire.begin(self.released, is_awaited)
        if self.released:
            self.messages.released(self.released)
            self.released.clear()

    def sync(
        self,
        step: StepFacts,
        requests: Sequence[DraftRequest],
        extending: Sequence[RequestSequence],
    ) -> None:
        """Adds the step's sequences to the message; sends parts of it where the arena is full.

        Args:
            step: Result of `facts` for the step.
            requests: All sequences that decode.
            extending: Sequences whose prompts are computed.
        """
        messages, wire, hidden = self.messages, self.wire, self.hidden
        wanted = [one.sequence for one in requests if one.max_nodes]
        are_all_kept = hidden is None or all(
            hidden.run(one.sequence) is not None for one in requests
        )
        step = step._replace(
            are_requests_alone=all(map(messages.stands_alone, wanted)), all_are_kept=are_all_kept
        )
        # A step that does not need the draft does not wait for it.
        waits = step.must_sync or any(one.max_nodes and not one.is_trial for one in requests)
        budget, num_read, is_full = self._settings.refill_tokens, 0, False
        work = [(one, False) for one in requests]
        work += [(DraftRequest(sequence, 0), True) for sequence in extending]
        for one, is_prompt in work:
            facts = messages.facts(one.sequence, one.max_nodes > 0, is_prompt)
            if decide(step, facts, num_read, is_full) is not Sync.SYNC:
                continue
            if not waits and not wire.has_room(facts.lag):
                is_full = True
                continue
            num_tokens = self._tell(one, budget)
            budget -= num_tokens
            num_read += num_tokens

    def _tell(self, one: DraftRequest, budget: int) -> int:
        """Adds a sequence's new tokens and the request for its tree to the message.

        Returns the number of tokens.
        """
        sequence, (steps, topk) = one.sequence, self._settings.tree_shape
        # The budget is at least what a step commits, or the last sequences would never catch up.
        message, num_tokens = self.messages.message(sequence, max(budget, steps + 1))
        # A draft that reads hidden states proposes after the last one that it is given.
        may_ask = num_tokens > 0 or self.hidden is None
        is_asked = one.max_nodes > 0 and may_ask and self.messages.has_caught_up(sequence)
        if not (num_tokens or is_asked or message.HasField("begin")):
            return 0
        num_nodes = 0
        if is_asked:
            own, num_nodes = sequence.speculation, self.ahead.num_nodes(one)
            # A tree deeper than the rest of the output would be wasted.
            steps = min(own.num_steps or steps, steps, one.max_nodes, sequence.num_output_left - 1)
            topk = min(own.topk or topk, topk)
            message.propose.CopyFrom(tree_limits(steps, topk, num_nodes))
        self.wire.add_rows(sequence, message)
        if is_asked:
            self.wire.ask(message.slot, OpenRequest(one, len(sequence.tokens), num_nodes))
        return num_tokens


def _hidden_states(
    exchange: Exchange | None, marks: DraftMarks, page_size: int, settings: DraftSettings
) -> HiddenStates | None:
    """Creates the hidden states of a draft that reads them; None for other drafts."""
    if exchange is None or exchange.layers is None:
        return None
    number, refill_tokens = settings.number, settings.refill_tokens
    most_kept = _most_kept(exchange.device)
    return HiddenStates(exchange, marks, page_size, refill_tokens, number, most_kept)


def _most_kept(device: DeviceExchange | None) -> float:
    """Returns the maximum bytes of hidden states to keep.

    A draft on the GPU would take too long to read more for a trial.
    """
    if device is None:
        return math.inf
    if not device.trees.is_cuda:
        return MOST_KEPT
    memory = torch.cuda.get_device_properties(device.trees.device).total_memory
    return max(MOST_KEPT, int(KEPT_SHARE * memory))
