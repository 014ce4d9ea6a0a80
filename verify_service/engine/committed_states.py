"""Hands the hidden states of a step's committed rows to the drafts that read them."""

from verify_service.drafts.drafts import Drafts
from verify_service.drafts.hidden_states import committed_rows
from verify_service.engine.overlap import StepInFlight
from verify_service.executor.base import StepResult
from verify_service.scheduler.request import Status
from verify_service.scheduler.step_plan import StepPlan


class CommittedStates:
    """Keeps the target's hidden states for drafts; does nothing where none reads them.

    Args:
        drafts: The drafts.
    """

    def __init__(self, drafts: Drafts) -> None:
        self._drafts = drafts

    def keep(self, plan: StepPlan, result: StepResult, starts: list[int]) -> None:
        """Keeps the rows of a step that was not overlapped.

        Args:
            plan: The step's plan.
            result: Result of the step.
            starts: Position of each decoding sequence's root.
        """
        drafts = self._drafts
        if drafts.capture is None:
            return
        decoding, chunks = [slot.seq for slot in plan.decode], plan.prefill
        count = len(decoding)
        paths = [outcome.verified.path for outcome in result.outcomes[:count]]
        # Index of the first prompt, or of the last decoding sequence if there are no prompts.
        row = count if chunks else count - 1
        if result.first_rows[row] == row and all(len(path) == 1 for path in paths):
            # Each decoding sequence has one row.
            count += sum(chunk.num_tokens for chunk in chunks)
            drafts.keep_step(decoding, starts, drafts.gather(result.output, count), chunks)
        else:
            committed = committed_rows(decoding, chunks, result.first_rows, starts, paths)
            drafts.keep(result.output, committed)

    def keep_overlapped(
        self, running: StepInFlight, result: StepResult, starts: list[int], paths: list[list[int]]
    ) -> None:
        """Keeps the rows of an overlapped step.

        A draft that follows on the device has them already; it is only told where they went.
        """
        drafts = self._drafts
        if running.followed_by is not None:
            for sequence, start in zip(running.sequences, starts, strict=True):
                if sequence.status is Status.RUNNING:
                    running.followed_by.followed(sequence, start)
            if running.gathered is None:
                return
        if drafts.capture is None:
            return
        if running.started.num_rows == 1:  # for example, while drafting is suspended
            gathered = running.gathered or drafts.gather(result.output, len(starts))
            drafts.keep_step(running.sequences, starts, gathered)
        else:
            committed = committed_rows(running.sequences, (), result.first_rows, starts, paths)
            drafts.keep(result.output, committed, running.gathered)
