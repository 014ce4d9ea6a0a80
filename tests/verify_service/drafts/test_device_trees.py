"""Trees on the device, as the engine's side of a draft sees them: what is sent, what is copied, and
how the wait for them ends. The device is the CPU, and nobody is at the other end.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.api.draft.v1 import draft_pb2
from foredraft.errors import DraftError
from foredraft.trees.draft_tree import NO_PARENT
from foredraft.types import SamplingParams
from verify_service.drafts.drafts import Drafts
from verify_service.drafts.proposals import DeviceRequest, DeviceTrees, DraftRequest
from verify_service.drafts.remote_draft import RemoteDraft
from verify_service.drafts.settings import DraftSettings
from verify_service.executor.base import DeviceOutcome
from verify_service.metrics import SpeculationMetrics
from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.request import Sequence, Status

NODES = 3


class Client:
    """The connection to a draft model that reads tokens; notes what is sent."""

    step_timeout = 1.0
    info = draft_pb2.GetDraftInfoResponse(uses_pages=True, cost=draft_pb2.DRAFT_COST_PER_LEVEL)

    def __init__(self) -> None:
        self.epoch, self.late_epoch = 1, 0
        self.sent: list[tuple[draft_pb2.StepRequest, bool]] = []

    def send(self, request: draft_pb2.StepRequest, epoch: int, has_answer: bool = True) -> None:
        if not self.epoch:
            raise DraftError("no draft is attached")
        self.sent.append((request, has_answer))

    def receive(self) -> draft_pb2.StepResponse:
        return draft_pb2.StepResponse(step=self.sent[-1][0].step)

    def drop(self, reason: str) -> DraftError:
        self.epoch = 0
        return DraftError(reason)


class Followed:
    """A draft that stands where its only sequence stands, and the step under way."""

    def __init__(self) -> None:
        self.client: Any = Client()
        self.events: list[tuple[str, int]] = []
        self.exchange = SimpleNamespace(
            trees=torch.arange(4 * 2 * NODES, dtype=torch.int32).view(4, 2, NODES),
            rows=None,
            accepted=torch.zeros(4, 5, dtype=torch.int32),
            publish=self._publish,
            wait_trees=lambda step: self.events.append(("wait", step)),
            release=lambda step: self.events.append(("release", step)),
        )
        exchange = SimpleNamespace(layers=None, device=self.exchange)
        arena: Any = SimpleNamespace(exchange=lambda epoch: exchange)
        settings = DraftSettings(128, (NODES, 1), "request", 100)
        metrics = SpeculationMetrics("STANDALONE")
        draft = RemoteDraft("", self.client, arena, PagePool(16, 4), settings, metrics)
        self.drafts = Drafts([draft])
        self.drafts.refresh()
        self.sequence = Sequence(1, [5, 6, 7], SamplingParams())
        self.sequence.status, self.sequence.slot = Status.RUNNING, 0
        self.sequence.num_computed, self.sequence.pages = 2, [0]
        assert not self.drafts.can_follow([self.sequence])
        self.drafts.propose([DraftRequest(self.sequence, NODES)], [])
        assert self.drafts.can_follow([self.sequence])

    def _publish(self, step: int) -> None:
        assert self.exchange.accepted[0].tolist() == [1, 9, 0, 0, 0]
        self.events.append(("publish", step))

    def follow(self) -> DeviceTrees | None:
        output: Any = SimpleNamespace()
        accepted = torch.tensor([[1, 9, 0, 0, 0]], dtype=torch.int32)
        outcome = DeviceOutcome(1, accepted, torch.zeros(4, dtype=torch.int64), output)
        proposals = self.drafts.follow([DeviceRequest(self.sequence, 0, NODES)], outcome)
        return None if proposals is None else proposals.trees


@pytest.fixture
def one() -> Followed:
    return Followed()


def test_the_outcome_is_handed_over_before_the_step_is_published(one: Followed) -> None:
    assert one.follow() is not None
    request, has_answer = one.client.sent[-1]
    assert not has_answer
    assert (request.step, request.sequences[0].device_row) == (2, 0)
    assert request.sequences[0].propose.num_draft_tokens == NODES + 1
    assert not request.sequences[0].tokens
    assert one.events == [("publish", 2)]


def test_trees_are_waited_for_and_what_is_left_over_is_no_node(one: Followed) -> None:
    trees = torch.zeros(2, 2, NODES + 2, dtype=torch.int32)
    device = one.follow()
    assert device is not None
    device.fetch(trees)
    assert one.events[-1] == ("wait", 2)
    assert torch.equal(trees[:, :, :NODES], one.exchange.trees[:2])
    assert trees[:, 1, NODES:].eq(NO_PARENT).all()


def test_what_was_taken_from_the_device_need_not_be_told(one: Followed) -> None:
    device = one.follow()
    assert device is not None
    one.sequence.tokens.append(9)
    one.sequence.num_computed = 3
    assert not one.drafts.can_follow([one.sequence])  # before it is known
    device.followed(one.sequence, 2)
    assert one.drafts.can_follow([one.sequence])


def test_a_draft_that_is_late_is_dropped_and_the_wait_ended(one: Followed) -> None:
    device = one.follow()
    assert device is not None
    assert not device.is_late(0.9)
    assert device.is_late(1.1)
    device.abandon()
    assert one.events[-1] == ("release", 2)
    assert one.client.epoch == 0
    assert device.is_late(0.0)  # lost
    assert one.drafts.are_stale
    one.drafts.refresh()
    assert not one.drafts.can_follow([one.sequence])


def test_a_draft_that_is_gone_is_not_followed(one: Followed) -> None:
    one.client.epoch = 0
    assert one.follow() is None
    assert one.events == []
