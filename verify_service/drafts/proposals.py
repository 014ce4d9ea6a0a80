"""The requests to drafts for a step, and their proposals.

The host waits for `Proposals` before it begins a step, and cuts them. A step that begins behind
another verifies `DeviceProposals`, which the host never reads before the step's result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
class Proposals:
    """The drafts' trees for one step, in host memory.

    Attributes:
        trees: Trees by request id; a sequence without a proposal has no entry.
        waits: Seconds that the step waited for each draft that it asked, by the draft's number.
    """

    trees: Mapping[int, Drafted]
    waits: Mapping[int, float]

    def of(self, sequence: RequestSequence) -> Drafted:
        """Returns a sequence's tree; an empty one where it has none."""
        return self.trees.get(sequence.request_id, NOTHING)


NO_PROPOSALS = Proposals({}, {})


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
class DeviceProposals:
    """The trees of one draft for all sequences of a step, on the device.

    Attributes:
        trees: The trees.
        draft: Number of the draft.
        depth: Number of levels of the deepest tree.
    """

    trees: DeviceTrees
    draft: int
    depth: int
