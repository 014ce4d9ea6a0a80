"""Writes the messages that update what a draft knows of sequences."""

from foredraft.api.draft.v1 import draft_pb2
from foredraft.rpc.sampling import fill_sampling
from verify_service.drafts.known import KnownSequences
from verify_service.scheduler.request import Sequence as RequestSequence


class SyncMessages:
    """Writes the sync messages of one attach.

    Args:
        known: What the draft knows of sequences.
        scope: "request", "key" or "server": requests that share text for drafting.
    """

    def __init__(self, known: KnownSequences, scope: str) -> None:
        self._known, self._scope = known, scope
        # By slot: the newest message without pages whose tokens were on the device. It is sent
        # again where nothing has changed.
        self._on_device: dict[int | None, draft_pb2.SequenceStep] = {}

    def message(self, sequence: RequestSequence, budget: int) -> tuple[draft_pb2.SequenceStep, int]:
        """Returns a message with all that the draft lacks of a running sequence, and its number of
        tokens.

        Args:
            sequence: The sequence.
            budget: Maximum number of tokens, for a draft that reads no hidden states.
        """
        start, end, first_page, valid_from = self._known.tell(sequence, budget)
        message = draft_pb2.SequenceStep(slot=sequence.slot, position=start)
        if valid_from is not None:
            message.begin.valid_from = valid_from
            message.begin.scope = self._scope_of(sequence)
            message.begin.traceparent = sequence.traceparent
            fill_sampling(message.begin.sampling, sequence.sampling)
        message.tokens.extend(sequence.tokens[start:end])
        if first_page < len(sequence.pages):
            _add_pages(message, sequence, first_page)
        return message, end - start

    def on_device(
        self, sequence: RequestSequence, row: int, propose: draft_pb2.TreeLimits | None
    ) -> draft_pb2.SequenceStep:
        """Returns a message whose tokens are on the device; the caller must not change it.

        Args:
            sequence: The sequence.
            row: Row of the sequence in the running step.
            propose: Limits of the requested tree, the same in all messages; None for no tree.
        """
        first_page = self._known.tell_pages(sequence)
        has_pages, slot = first_page < len(sequence.pages), sequence.slot
        message = None if has_pages else self._on_device.get(slot)
        if (
            message is not None
            and message.device_row == row
            and message.HasField("propose") == (propose is not None)
        ):
            return message
        message = draft_pb2.SequenceStep(slot=slot, device_row=row, propose=propose)
        if has_pages:
            _add_pages(message, sequence, first_page)
        else:
            self._on_device[slot] = message
        return message

    def _scope_of(self, sequence: RequestSequence) -> str:
        if self._scope == "request":
            return ""
        return "server" if self._scope == "server" else f"key:{sequence.key_label}"


def _add_pages(message: draft_pb2.SequenceStep, sequence: RequestSequence, first: int) -> None:
    """Adds the entries of the page table from `first` on."""
    message.first_page = first
    message.new_pages.extend(sequence.pages[first:])


def split_message(message: draft_pb2.SequenceStep, num_rows: int) -> draft_pb2.SequenceStep:
    """Splits the part with the first `num_rows` hidden states (at least 1) off a message.

    `message` keeps the rest: later tokens, and the request for a tree.
    """
    num_tokens = num_rows if message.position else num_rows + 1
    part = draft_pb2.SequenceStep()
    part.CopyFrom(message)
    part.ClearField("propose")
    del part.tokens[num_tokens:]
    for name in ("begin", "new_pages", "first_page"):
        message.ClearField(name)
    del message.tokens[:num_tokens]
    message.position += num_tokens
    return part
