"""Sends step messages to a draft and reads its answers.

Messages are numbered, and split where the arena is full.
"""

import functools
from collections.abc import Callable, Iterable

from foredraft.api.draft.v1 import draft_pb2
from verify_service.connection.client import DraftClient
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.open_requests import OpenRequest, OpenRequests
from verify_service.drafts.proposals import Drafted
from verify_service.drafts.sync_messages import split_message
from verify_service.metrics import DRAFT_SECONDS, SpeculationMetrics
from verify_service.scheduler.request import Sequence as RequestSequence

MOST_UNREAD = 64  # maximum number of unread answers; answers without requests are empty
LOOK_SECONDS = 5e-4  # wait for an answer that should have come already


class DraftWire:
    """Exchanges the messages of one attach. Belongs to the engine's thread.

    Methods that send or receive raise DraftError if the draft is lost.

    Args:
        client: Connection to the draft.
        epoch: Number of the attach that messages are for; 0 for none.
        vocab_size: Number of the target's tokens.
        metrics: Metrics of the draft.
        hidden: Hidden states for a draft that reads them, else None.
        on_tree: See `OpenRequests`.

    Attributes:
        step: Number of the newest message.
        requests: Requests that were sent, and their answers.
        usual_seconds: Seconds that the draft usually takes for an answer; 0 while unknown.
    """

    def __init__(
        self,
        client: DraftClient,
        epoch: int,
        vocab_size: int,
        metrics: SpeculationMetrics,
        hidden: HiddenStates | None,
        on_tree: Callable[[RequestSequence, int, Drafted], None] | None,
    ) -> None:
        self._client = client
        self._epoch = epoch
        self._hidden = hidden
        self._writer = hidden.writer if hidden is not None else None
        self._num_unread = 0
        self._request = draft_pb2.StepRequest()
        self._asking: dict[int, OpenRequest] = {}  # by slot, in the request that is not sent yet
        self._is_awaited = True
        self.step = 0
        self.requests = OpenRequests(vocab_size, metrics, on_tree)
        self.usual_seconds = 0.0

    def begin(self, released: Iterable[int], is_awaited: bool = True) -> None:
        """Begins an empty message.

        Args:
            released: Slots to release.
            is_awaited: Whether `collect` waits for the requested trees.
        """
        self._request = draft_pb2.StepRequest(released_slots=released)
        self._asking = {}
        self._is_awaited = is_awaited

    def add(self, messages: Iterable[draft_pb2.SequenceStep]) -> None:
        """Adds sequences to the message, without hidden states."""
        self._request.sequences.extend(messages)

    def add_rows(self, sequence: RequestSequence, message: draft_pb2.SequenceStep) -> None:
        """Adds a sequence to the message, with its hidden states where the draft reads them.

        Sends parts of the message where the arena is full.

        Raises:
            ArenaError: A row does not fit.
        """
        hidden, writer = self._hidden, self._writer
        run = hidden.run_of(sequence) if hidden is not None else None
        if hidden is None or writer is None or run is None:
            self.add((message,))
            return
        first = max(message.position - 1, 0)
        rows = run.rows(first)
        while run.end - first > writer.num_free:
            if self._num_unread:
                self._receive()
                continue
            if num_rows := writer.num_free:
                part = split_message(message, num_rows)
                part.hidden.CopyFrom(writer.write(rows[:num_rows]))
                rows, first = rows[num_rows:], first + num_rows
                self._request.sequences.append(part)
            self.send()
        message.hidden.CopyFrom(writer.write(rows))
        self._request.sequences.append(message)
        hidden.sent(run)

    def ask(self, slot: int, asked: OpenRequest) -> None:
        """Records that the sequence added last requests a tree."""
        self._asking[slot] = asked

    @property
    def has_content(self) -> bool:
        """Whether the message is not empty."""
        return bool(self._request.sequences or self._request.released_slots)

    def send(self, is_on_device: bool = False) -> None:
        """Sends the message and begins an empty one.

        Args:
            is_on_device: Whether the draft writes its trees to the device, so that the message has
                no answer.
        """
        self.step += 1
        self._request.step = self.step
        if self._writer is not None and not is_on_device:
            self._writer.sent(self.step)
        self._client.send(self._request, self._epoch, has_answer=not is_on_device)
        self._num_unread += not is_on_device
        self.requests.expect(self._request, self._asking, self._is_awaited)
        self._request, self._asking = draft_pb2.StepRequest(), {}
        while self._num_unread > MOST_UNREAD and self._client.has_answer(LOOK_SECONDS):
            self._receive()

    def drain(self) -> None:
        """Waits for the answers to all earlier requests."""
        while self.requests.are_open and self._num_unread:
            self._receive()

    def try_drain(self) -> bool:
        """Reads the trial answers that have arrived, without waiting.

        Returns whether no trial is left unanswered.
        """
        while self.requests.are_trying and self._num_unread:
            if not self._client.has_answer():
                return False
            self._receive()
        return True

    def has_room(self, num_rows: int) -> bool:
        """Returns whether hidden states of `num_rows` rows can be sent without waiting.

        More rows than the arena holds need only an empty arena. Reads answers that have arrived.
        """
        writer = self._writer
        if writer is None:
            return True
        while writer.num_free < min(num_rows, writer.capacity) and self._num_unread:
            if not self._client.has_answer(LOOK_SECONDS):
                return False
            self._receive()
        return True

    def collect(self) -> dict[int, Drafted]:
        """Waits for the proposals that will be verified; returns them by request id.

        Empty answers, to steps without requests, are read later.
        """
        while self.requests.are_due and self._num_unread:
            self._receive()
        return self.requests.trees

    def _receive(self) -> None:
        """Waits for the oldest unread answer and reads it."""
        response = self._client.receive()
        self._num_unread -= 1
        if self._writer is not None:
            self._writer.answered(response.step)
        if own := self.requests.read(response):
            DRAFT_SECONDS.observe(own.whole)
            self.usual_seconds = own.usual


@functools.lru_cache(maxsize=64)
def tree_limits(num_steps: int, topk: int, num_nodes: int) -> draft_pb2.TreeLimits:
    """Returns the message that requests a tree of `num_nodes` nodes beside its root.

    It is cached, so the caller must not change it.
    """
    return draft_pb2.TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_nodes + 1)
