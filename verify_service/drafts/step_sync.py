"""Fills a step's message with what a draft must know and is asked: `StepSync`."""

from collections.abc import Sequence

from verify_service.drafts.draft_ahead import DraftAhead
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.known import KnownSequences
from verify_service.drafts.open_requests import OpenRequest
from verify_service.drafts.proposals import DraftRequest
from verify_service.drafts.settings import DraftSettings
from verify_service.drafts.sync import StepFacts, Sync, decide
from verify_service.drafts.sync_messages import SyncMessages
from verify_service.drafts.wire import DraftWire, tree_limits
from verify_service.scheduler.request import Sequence as RequestSequence


class StepSync:
    """Adds sequences to the messages of one attach, as `sync.decide` decides for each.

    Args:
        known: What the draft knows of sequences.
        messages: Writes the message of one sequence.
        wire: Sends the step's message.
        hidden: Hidden states for a draft that reads them, else None.
        ahead: Sizes of requests for two steps at once.
        settings: Settings of the draft.
    """

    def __init__(
        self,
        known: KnownSequences,
        messages: SyncMessages,
        wire: DraftWire,
        hidden: HiddenStates | None,
        ahead: DraftAhead,
        settings: DraftSettings,
    ) -> None:
        self._known, self._messages, self._wire, self._hidden = known, messages, wire, hidden
        self._ahead, self._settings = ahead, settings

    def fill(
        self,
        step: StepFacts,
        requests: Sequence[DraftRequest],
        extending: Sequence[RequestSequence],
    ) -> None:
        """Adds the step's sequences to the message; sends parts of it where the arena is full.

        Args:
            step: Facts that need no look at the sequences.
            requests: All sequences that decode.
            extending: Sequences whose prompts are computed.
        """
        known, wire, hidden = self._known, self._wire, self._hidden
        wanted = [one.sequence for one in requests if one.max_nodes]
        are_all_kept = hidden is None or all(
            hidden.run_of(one.sequence) is not None for one in requests
        )
        step = step._replace(
            are_requests_alone=all(map(known.stands_alone, wanted)), all_are_kept=are_all_kept
        )
        # A step that does not need the draft does not wait for it.
        waits = step.must_sync or any(one.max_nodes and not one.is_trial for one in requests)
        budget, num_read, is_full = self._settings.refill_tokens, 0, False
        work = [(one, False) for one in requests]
        work += [(DraftRequest(sequence, 0), True) for sequence in extending]
        for one, is_prompt in work:
            facts = known.facts(one.sequence, one.max_nodes > 0, is_prompt)
            if decide(step, facts, num_read, is_full) is not Sync.SYNC:
                continue
            if not waits and not wire.has_room(facts.lag):
                is_full = True
                continue
            num_tokens = self._add(one, budget)
            budget -= num_tokens
            num_read += num_tokens

    def _add(self, one: DraftRequest, budget: int) -> int:
        """Adds a sequence's new tokens and the request for its tree to the message.

        Returns the number of tokens.
        """
        sequence, (steps, topk) = one.sequence, self._settings.tree_shape
        # The budget is at least what a step commits, or the last sequences would never catch up.
        message, num_tokens = self._messages.message(sequence, max(budget, steps + 1))
        # A draft that reads hidden states proposes after the last one that it is given.
        may_ask = num_tokens > 0 or self._hidden is None
        is_asked = one.max_nodes > 0 and may_ask and self._known.has_caught_up(sequence)
        if not (num_tokens or is_asked or message.HasField("begin")):
            return 0
        num_nodes = 0
        if is_asked:
            own, num_nodes = sequence.speculation, self._ahead.num_nodes(one)
            # A tree deeper than the rest of the output would be wasted.
            steps = min(own.num_steps or steps, steps, one.max_nodes, sequence.num_output_left - 1)
            topk = min(own.topk or topk, topk)
            message.propose.CopyFrom(tree_limits(steps, topk, num_nodes))
        self._wire.add_rows(sequence, message)
        if is_asked:
            self._wire.ask(message.slot, OpenRequest(one, len(sequence.tokens), num_nodes))
        return num_tokens
