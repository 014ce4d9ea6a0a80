"""A draft in this process that holds back some answers until a gate opens."""

import threading
from collections.abc import Callable

from draft_service.drafters.base import Proposer
from foredraft.api.draft.v1 import draft_pb2
from testing.hidden_drafts import HiddenDrafter


class LateDrafter(HiddenDrafter):
    """Answers held steps when the gate opens, and all others at once.

    Args:
        width: See HiddenDrafter.
        held: Whether a step is.
    """

    def __init__(
        self, width: int, held: Callable[[draft_pb2.StepRequest], bool], algorithm: str = "EAGLE"
    ) -> None:
        super().__init__(width, skill=1.0, weight_bytes=1, algorithm=algorithm)
        self.gate = threading.Event()
        self.num_held = 0
        self._is_held = held

    def attach(self, request: draft_pb2.AttachRequest) -> tuple[Proposer, draft_pb2.AttachResponse]:
        proposer, response = super().attach(request)
        step = proposer.step

        def late(request: draft_pb2.StepRequest) -> draft_pb2.StepResponse:
            if self._is_held(request):
                self.num_held += 1
                assert self.gate.wait(300)
            return step(request)

        proposer.step = late  # type: ignore[method-assign]
        return proposer, response


def asks(request: draft_pb2.StepRequest) -> bool:
    """Returns whether a step requests a tree."""
    return any(sequence.HasField("propose") for sequence in request.sequences)
