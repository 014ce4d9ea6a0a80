"""What every drafter is to the service: a `Drafter` loaded once, and a `Proposer` for each verifier that attached."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from foredraft.api.draft.v1 import draft_pb2

if TYPE_CHECKING:  # they need torch, which not every drafter does
    import torch

    from foredraft.transport.base import HiddenReader
    from foredraft.transport.device_exchange import DraftExchange


class Proposer(ABC):
    """Drafts for one attached verifier. Called from one thread at a time, in the order of the stream.

    Attributes:
        hidden: Reads the rows that `SequenceStep.hidden` names; set before the first step where the drafter's info asks
            for hidden states. Whoever set it closes it.
        exchange: For steps that stay on the GPU; set likewise where both ends can have them.
    """

    hidden: "HiddenReader | None" = None
    exchange: "DraftExchange | None" = None

    def prepare(self) -> None:  # noqa: B027
        """Called once, when these are set: does now what would make the first steps slow."""

    @abstractmethod
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Applies the news of an engine step and proposes trees to the sequences that ask for one.

        Raises:
            InvalidRequest: The step breaks the protocol. The proposer is closed next.
        """

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Whether the step is so short that the event loop may wait for it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Frees everything. Called once."""


class Drafter(ABC):
    """A way of drafting, ready for verifiers to attach.

    Attributes:
        max_sessions: Verifiers that may be attached at a time; None when their number does not matter.
        device: Where it runs; None for one without torch.
    """

    max_sessions: int | None = None
    device: "torch.device | None" = None

    @abstractmethod
    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """What the draft is and what it needs."""

    @abstractmethod
    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Makes what one verifier needs.

        Raises:
            AttachRefused: The draft cannot serve this verifier; names the field.
        """
