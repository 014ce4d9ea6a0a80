"""Base classes of drafters: a `Drafter` is loaded once, and makes a `Proposer` for each verifier
that attaches.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from foredraft.api.draft.v1 import draft_pb2

if TYPE_CHECKING:  # these modules import torch, which some drafters do without
    import torch

    from foredraft.transport.base import HiddenReader
    from foredraft.transport.device_exchange import DraftExchange


class Proposer(ABC):
    """Drafts for one attached verifier.

    Called from one thread at a time, in the order of the stream.

    Attributes:
        hidden: Reads the rows that `SequenceStep.hidden` names. The service sets it before the
            first step, where the drafter's info asks for hidden states, and closes it.
        exchange: Buffers for steps that stay on the GPU; set likewise where both ends support them.
    """

    hidden: "HiddenReader | None" = None
    exchange: "DraftExchange | None" = None

    def prepare(self) -> None:  # noqa: B027
        """Does the work that would slow down the first steps; called once, after `hidden` and
        `exchange` are set.
        """

    @abstractmethod
    def step(self, request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
        """Takes in what an engine step committed, and proposes trees for sequences that want one.

        Raises:
            InvalidRequest: The step breaks the protocol. The proposer is closed next.
        """

    def is_brief(self, request: draft_pb2.StepRequest) -> bool:
        """Returns whether the step is so short that the event loop may wait for it."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Frees all resources. Called once."""


class Drafter(ABC):
    """A loaded draft algorithm that verifiers can attach to.

    Attributes:
        max_sessions: Maximum number of verifiers that may be attached at a time; None for any
            number.
        device: Device that the drafter runs on; None for a drafter without torch.
    """

    max_sessions: int | None = None
    device: "torch.device | None" = None

    @abstractmethod
    def info(self) -> draft_pb2.GetDraftInfoResponse:
        """Describes the draft and its needs."""

    def fusion_parts(self) -> Iterator[draft_pb2.GetFusionResponse]:
        """Yields the weights of the fusion that `info` offers, in parts; nothing without one."""
        return iter(())

    @abstractmethod
    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        """Creates the proposer of one verifier, and the answer to its request.

        Raises:
            AttachRefused: The draft cannot serve this verifier; names the field.
        """
