"""The engine's interface to a draft: `DraftProxy`."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from verify_service.drafts.capabilities import DraftCapabilities
from verify_service.drafts.hidden_states import HiddenStates
from verify_service.drafts.proposals import (
    DeviceRequest,
    DeviceTrees,
    Drafted,
    DraftRequest,
    Trial,
)
from verify_service.executor.base import DeviceOutcome
from verify_service.scheduler.request import Sequence as RequestSequence


class DraftProxy(Protocol):
    """The engine's side of one draft. Belongs to the engine's thread.

    A proxy cannot change a token; a draft that is lost gives empty trees.
    """

    @property
    def name(self) -> str:
        """Algorithm of the draft where there are several drafts, else empty."""

    @property
    def capabilities(self) -> DraftCapabilities:
        """Capabilities of the draft of the current attach."""

    @property
    def epoch(self) -> int:
        """Number of the current attach; 0 for none."""

    @property
    def is_stale(self) -> bool:
        """Whether a draft has been attached or lost since `refresh`."""

    @property
    def depth(self) -> int:
        """Number of levels of the deepest tree."""

    @property
    def usual_seconds(self) -> float:
        """Seconds that an answer usually takes; 0 while unknown."""

    def refresh(self) -> None:
        """Notices an attached or lost draft; called before each step that the host begins."""

    def suspend(self, is_suspended: bool, keeps_states: bool = True) -> None:
        """Suspends drafting, but for trials, or resumes it.

        Args:
            is_suspended: Whether drafting is suspended from now on.
            keeps_states: Whether hidden states are kept for the draft meanwhile. Without them it
                reads sequences only from the positions at which they are kept again.
        """

    def close(self) -> None:
        """Ends the connection."""

    # Sequences.

    def lag(self, sequence: RequestSequence) -> int:
        """Returns the number of tokens that the draft must read before it can propose."""

    def release(self, slots: Sequence[int]) -> None:
        """Records that sequences have released slots."""

    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that has ended."""

    def preempted(self, sequence: RequestSequence) -> None:
        """Records that a sequence has lost its pages."""

    def usable_prefix(self, sequence: RequestSequence, pages: list[int]) -> int:
        """Returns how many tokens of a cached prefix need not be computed again for the draft."""

    # Hidden states.

    @property
    def states(self) -> HiddenStates | None:
        """Hidden states kept for the draft; None where it reads none, or none are kept at
        present.
        """

    @property
    def must_sync(self) -> bool:
        """Whether the draft must be synced now, since its hidden states take much memory."""

    # Steps that the host begins.

    def ask(self, requests: Sequence[DraftRequest], extending: Sequence[RequestSequence]) -> None:
        """Sends the committed tokens, and requests trees.

        Args:
            requests: All sequences that decode now.
            extending: Other running sequences, with tokens that the draft may not have read.
        """

    def collect(self) -> Mapping[int, Drafted]:
        """Waits for the proposals that will be verified; returns them by request id."""

    def take_trials(self) -> list[Trial] | None:
        """Returns, without waiting, the trials that have been answered since the last call; None
        while an answer may still come.
        """

    # Steps that follow one another on the device.

    def can_follow(self, sequences: Sequence[RequestSequence]) -> bool:
        """Returns whether the draft can take the sequences' next tokens from the device."""

    def follow(
        self, requests: Sequence[DeviceRequest], outcome: DeviceOutcome
    ) -> DeviceTrees | None:
        """Lets the draft continue on the device, behind the target's running step.

        Args:
            requests: Sequences of the next step.
            outcome: Outcome of the running step, on the device.

        Returns:
            The trees for the next step; None if the draft is lost.
        """
