"""Step messages to a draft and its answers: put together, numbered, cut where the arena is full, and kept in step."""

import functools
from collections.abc import Callable, Iterable

from foredraft.api.draft.v1 import draft_pb2
from verify_service.drafts.client import DraftClient
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.news import split_news
from verify_service.drafts.proposals import Asked, Drafted, Proposals
from verify_service.metrics import DRAFT_SECONDS, SpeculationMetrics
from verify_service.scheduler.request import Sequence as RequestSequence

MOST_UNREAD = 64  # answers; where nobody is asked for, nothing is in them
LOOK_SECONDS = 5e-4  # for an answer that should have come long ago


class DraftWire:
    """Belongs to the engine's thread. All that sends or receives raises DraftError when the draft is lost.

    Args:
        vocab_size: Of the target.
        hidden: Hidden states for a draft that reads them.
        on_tree: See `Proposals`.

    Attributes:
        epoch: Number of the attach that messages are for; 0 for none.
        step: Number of the newest message.
        proposals: What was asked for and what came.
        usual_seconds: What such an answer usually takes the draft, as far as is known.
    """

    def __init__(
        self,
        client: DraftClient,
        vocab_size: int,
        metrics: SpeculationMetrics,
        hidden: HiddenStates,
        on_tree: Callable[[RequestSequence, int, Drafted], None],
    ) -> None:
        self._client = client
        self._hidden = hidden
        self._num_unread = 0
        self._request = draft_pb2.StepRequest()
        self._asking: dict[int, Asked] = {}  # by slot, in the request that is being put together
        self._is_awaited = True
        self.epoch = 0
        self.step = 0
        self.proposals = Proposals(vocab_size, metrics, on_tree)
        self.usual_seconds = 0.0

    def attach(self, epoch: int) -> None:
        """Another draft is attached, or with epoch 0 none."""
        self.epoch, self.step, self._num_unread = epoch, 0, 0
        self.proposals.reset()

    def begin(self, released: Iterable[int], is_awaited: bool = True) -> None:
        """A request that asks for nothing yet, but tells which slots were released.

        Args:
            is_awaited: Whether `collect` is to wait for what is asked.
        """
        self._request = draft_pb2.StepRequest(released_slots=released)
        self._asking = {}
        self._is_awaited = is_awaited

    def add(self, news: Iterable[draft_pb2.SequenceStep]) -> None:
        """Puts the news of sequences into the request, without hidden states."""
        self._request.sequences.extend(news)

    def add_rows(self, sequence: RequestSequence, news: draft_pb2.SequenceStep) -> None:
        """The same with hidden states where the draft reads them; sends what the arena has room for.

        Raises:
            ArenaError: A row does not fit.
        """
        writer, run = self._hidden.writer, self._hidden.run(sequence)
        if writer is None or run is None:
            self.add((news,))
            return
        first = max(news.position - 1, 0)
        rows = run.rows(first)
        while run.end - first > writer.num_free:
            if self._num_unread:
                self._receive()
                continue
            if num_rows := writer.num_free:
                part = split_news(news, num_rows)
                part.hidden.CopyFrom(writer.write(rows[:num_rows]))
                rows, first = rows[num_rows:], first + num_rows
                self._request.sequences.append(part)
            self.send()
        news.hidden.CopyFrom(writer.write(rows))
        self._request.sequences.append(news)
        self._hidden.sent(run)

    def ask(self, slot: int, asked: Asked) -> None:
        """Notes that the news that were added last ask for a tree."""
        self._asking[slot] = asked

    @property
    def has_news(self) -> bool:
        """Whether the request says something."""
        return bool(self._request.sequences or self._request.released_slots)

    def send(self, is_on_device: bool = False) -> None:
        """Sends the request and begins an empty one.

        Args:
            is_on_device: It has no answer: its trees are written to the device.
        """
        self.step += 1
        self._request.step = self.step
        if self._hidden.writer is not None and not is_on_device:
            self._hidden.writer.sent(self.step)
        self._client.send(self._request, self.epoch, has_answer=not is_on_device)
        self._num_unread += not is_on_device
        self.proposals.expect(self._request, self._asking, self._is_awaited)
        self._request, self._asking = draft_pb2.StepRequest(), {}
        while self._num_unread > MOST_UNREAD and self._client.has_answer(LOOK_SECONDS):
            self._receive()

    def drain(self) -> None:
        """Waits for all that was asked for in steps before."""
        while self.proposals.are_open and self._num_unread:
            self._receive()

    def try_drain(self) -> bool:
        """Reads what has come of what was asked for to find out; whether nothing of it is left to come. Waits for nothing."""
        while self.proposals.are_trying and self._num_unread:
            if not self._client.has_answer():
                return False
            self._receive()
        return True

    def has_room(self, num_rows: int) -> bool:
        """Whether hidden states of so many rows can be sent without waiting, as far as that will ever be; reads what has come."""
        writer = self._hidden.writer
        if writer is None:
            return True
        while writer.num_free < min(num_rows, writer.capacity) and self._num_unread:
            if not self._client.has_answer(LOOK_SECONDS):
                return False
            self._receive()
        return True

    def collect(self) -> dict[int, Drafted]:
        """Waits for proposals that will be verified.

        Where nothing was asked for, nothing is in the answer; it is read before the next one that matters.
        """
        while self.proposals.are_due and self._num_unread:
            self._receive()
        return self.proposals.trees

    def _receive(self) -> None:
        """Reads the oldest answer that is due."""
        response = self._client.receive()
        self._num_unread -= 1
        if self._hidden.writer is not None:
            self._hidden.writer.answered(response.step)
        if own := self.proposals.read(response):
            DRAFT_SECONDS.observe(own.whole)
            self.usual_seconds = own.usual


@functools.lru_cache(maxsize=64)
def wish(num_steps: int, topk: int, num_nodes: int) -> draft_pb2.TreeLimits:
    """What asks for a tree; not to be changed, since there are few and each is asked for all the time."""
    return draft_pb2.TreeLimits(num_steps=num_steps, topk=topk, num_draft_tokens=num_nodes + 1)
