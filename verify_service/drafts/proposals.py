"""The requests to drafts for a step, and their proposals."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from foredraft.trees.draft_tree import EMPTY, DraftTree
from verify_service.scheduler.request import Sequence as RequestSequence


@dataclass(slots=True)
class DraftRequest:
    """Requests a tree for a sequence that decodes in the coming step.

    Attributes:
        sequence: The sequence.
        max_nodes: Number of nodes that its pages have room for, or that are requested for a trial;
            0 where no tree is requested.
        is_trial: Whether the proposal is only judged and not verified, so that no step waits for
            it.
    """

    sequence: RequestSequence
    max_nodes: int
    is_trial: bool = False


@dataclass(slots=True)
class DeviceRequest:
    """Requests a tree for a sequence that continues behind the running step.

    Attributes:
        sequence: The sequence.
        row: Row of the sequence in the running step.
        num_nodes: Number of nodes of the requested tree; 0 for none.
    """

    sequence: RequestSequence
    row: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposed tree that has been checked, with the draft's confidence."""

    tree: DraftTree
    confidence: int


NOTHING = Drafted(EMPTY, 0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A proposal that is only judged, not verified.

    Attributes:
        sequence: Sequence that it continues.
        position: Number of tokens that the sequence had.
        drafted: The proposal.
    """

    sequence: RequestSequence
    position: int
    drafted: Drafted


class DeviceTrees(Protocol):
    """Trees that one draft writes to the device, behind the running step."""

    def fetch(self, trees: torch.Tensor) -> None:
        """Lets the current stream wait for the trees, and copies them into int32 [n, 2, N]."""

    def followed(self, sequence: RequestSequence, start: int) -> None:
        """Records that a sequence's tokens from key `start` on are committed on the host.

        The draft has already taken them on the device.
        """

    def is_late(self, waiting: float) -> bool:
        """Returns whether a target that has waited for `waiting` seconds should stop waiting."""

    def abandon(self) -> None:
        """Ends the target's wait and drops the draft, which may still write to the device."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Holds the drafts' trees for one step, in host memory or on the device.

    Attributes:
        trees: Trees in host memory by request id; a sequence without a proposal has no entry.
        waits: Seconds that the step waited for each draft that it asked, by the draft's number.
        device: Trees on the device instead, for a step that the host does not wait for.
        draft: Number of the draft that writes the trees on the device.
        depth: Number of levels of the deepest tree on the device.
    """

    trees: Mapping[int, Drafted] = field(default_factory=dict)
    waits: Mapping[int, float] = field(default_factory=dict)
    device: DeviceTrees | None = None
    draft: int = 0
    depth: int = 0

    def of(self, sequence: RequestSequence) -> Drafted:
        """Returns a sequence's tree in host memory; an empty one where it has none."""
        return self.trees.get(sequence.request_id, NOTHING)


NO_PROPOSALS = Proposals()
