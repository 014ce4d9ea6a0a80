"""Interface between the engine and executors, which run steps of the target.

The engine selects the sequences of a step and uses their tokens; an executor computes the step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from foredraft.runner.model_runner import ForwardOutput
from foredraft.trees.draft_tree import DraftTree
from foredraft.types import NO_TOKEN
from verify_service.controller.tables import GridTable
from verify_service.executor.choice.sampler import Outcome, VerifyRows
from verify_service.outputs import TokenLogprob
from verify_service.scheduler.request import Sequence as RequestSequence
from verify_service.scheduler.step_plan import PrefillChunk


def no_wait() -> None:
    """Is the `settle` of a step that no other one runs before: there is nothing to wait for."""


def no_trees(is_over: Callable[[], bool]) -> None:
    """Is the `await_trees` of a step that verifies none."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Describes a step that starts from the sequences' state on the device.

    The previous step, which determines that state, is still running.

    Attributes:
        num_rows: Number of rows of each sequence, the root included; larger trees are cut.
        tree_rows: For each sequence, the row of its tree among those that `fetch` copies; None to
            verify none.
        fetch: Copies the trees into int32 [n, 2, N] on the device; None where none are verified.
        await_trees: Waits until its argument returns True, and ends the wait of `fetch` for a draft
            that is late. Call it before anything behind `fetch` that may wait for the device.
    """

    num_rows: int
    tree_rows: Sequence[int | None]
    fetch: Callable[[torch.Tensor], None] | None = None
    await_trees: Callable[[Callable[[], bool]], None] = no_trees


@dataclass(frozen=True, slots=True)
class Step:
    """Describes a step of the target.

    Attributes:
        batch: Sequences for which tokens are chosen: first those that verify a tree, then those
            whose last prompt chunk is in `chunks`.
        chunks: Prompt chunks, computed after the trees.
        capture: Layers whose input (the residual stream) is captured for a draft.
        ahead: Description of a step that starts before the previous one has ended; its trees in
            `batch` are empty.
        settle: Waits for the previous step, and ends its wait for a draft that is late. Call it
            before anything that waits for the device, since nobody could end that wait.
        all_hidden: Whether a draft reads states after the final norm, of rows without logits too.
    """

    batch: Sequence[VerifyRows]
    chunks: Sequence[PrefillChunk] = ()
    capture: Sequence[int] = ()
    ahead: Ahead | None = None
    settle: Callable[[], None] = no_wait
    all_hidden: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the results of a step of the target.

    Attributes:
        outcomes: One outcome for each row that chooses, in order.
        output: Hidden states and captured streams; valid until the next step.
        first_rows: Index in `output` of each sequence's first row, in the order of the step.
        num_logit_rows: Number of rows whose logits were computed.
        forward_seconds: Seconds of the target's part, as the host sees them. Where the sampler
            chooses, until the forward was computed, on a GPU until it was started; captured steps
            count the choice of tokens too.
        broken: Indexes of outcomes without a token, because logits were NaN or infinite.
        trees: The trees that were verified; an invalid tree is replaced by an empty one.
        prompt_logprobs: For each chunk, log-probabilities of the tokens after its rows, as far as
            requested.
    """

    outcomes: list[Outcome]
    output: ForwardOutput
    first_rows: Sequence[int]
    num_logit_rows: int
    forward_seconds: float
    broken: Sequence[int] = ()
    trees: Sequence[DraftTree] = ()
    prompt_logprobs: Sequence[list[TokenLogprob]] = ()


@dataclass(frozen=True, slots=True)
class DeviceOutcome:
    """Names the device memory that will hold the outcome of a started step.

    Attributes:
        num_sequences: Number of sequences of the step, without padding.
        accepted: int32 [num_sequences, 1 + P]: number of emitted tokens, then the tokens.
        index: int64 [n * P], n >= num_sequences: for each of these tokens, the row of `output` that
            chose it.
        output: Hidden states of the step.
    """

    num_sequences: int
    accepted: torch.Tensor
    index: torch.Tensor
    output: ForwardOutput


class PendingStep(ABC):
    """Stands for a step that was submitted.

    `choose` must be called before another step is submitted, and before `finish`.

    Attributes:
        num_rows: Number of rows of each sequence; 0 for a step that is not overlapped.
        outcome: Outcome for a draft on the same device; only for overlapped steps.
    """

    num_rows: int
    outcome: DeviceOutcome

    @property
    def is_ready(self) -> bool:
        """Whether `choose` would not wait."""
        return True

    @abstractmethod
    def choose(self) -> None:
        """Starts the choice of tokens, where the choice depends on the previous step's outcome.

        The previous outcome must have been committed.
        """

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""

    @abstractmethod
    def finish(self) -> StepResult:
        """Waits for the outcome."""


class FinishedStep(PendingStep):
    """Stands for a step that was complete when it was submitted."""

    num_rows, is_done = 0, True

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def choose(self) -> None:
        """See PendingStep."""

    def finish(self) -> StepResult:
        """See PendingStep."""
        return self._result


class Executor(ABC):
    """Runs the target, on one device or several. All calls come from the engine's thread."""

    @abstractmethod
    def submit(self, step: Step) -> PendingStep:
        """Starts a step. A step that `can_overlap` refuses is complete when this returns."""

    def can_overlap(self, step: Step) -> bool:
        """Returns whether another step may be submitted, with `ahead`, before this one ends."""
        return False

    @abstractmethod
    def forget(self, sequence: RequestSequence) -> None:
        """Drops the state of a sequence that has ended."""

    @abstractmethod
    def close(self) -> None:
        """Ends processes and memory of the executor; called once, after the last step."""

    def prepare(self) -> bool:
        """Does a part of the work that may wait until nothing runs; returns whether there was
        any.
        """
        return False

    def measure(self) -> GridTable | None:
        """Measures the seconds of a step of each shape; None where steps have no fixed shapes."""
        return None


def broken_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Returns the indexes of the sampler's outcomes without a token."""
    return [i for i, one in enumerate(outcomes) if one.verified.tokens[-1] == NO_TOKEN]
