"""Overlapped plain steps on the CPU: they run when they are started, and their outcome is known
when it is asked for.

For the engine's account of what it does not know yet; a GPU's graphs do the same out of sight.
"""

from collections.abc import Sequence
from types import SimpleNamespace

from foredraft.trees.draft_tree import EMPTY
from testing.toy_target import ToyStep
from verify_service.executor.base import PendingStep, Step
from verify_service.executor.choice.sampler import VerifyRows
from verify_service.executor.eager import EagerExecutor


class EagerAhead(EagerExecutor):
    """Starts steps without trees ahead; runs other steps as usual."""

    num_ahead = 0

    def can_overlap(self, step: Step) -> bool:
        return not step.chunks and not any(rows.tree.tokens for rows in step.batch)

    def submit(self, step: Step) -> PendingStep:
        if step.ahead is not None:
            assert step.ahead.fetch is None
            EagerAhead.num_ahead += 1
            work = [(r.sequence, *self._standing[r.sequence.slot]) for r in step.batch]
            return self._start(work, step.capture)
        if not self.can_overlap(step):
            return super().submit(step)
        return self._start(
            [(r.sequence, r.sequence.num_computed, list(r.sequence.tokens)) for r in step.batch],
            step.capture,
        )

    def _start(self, work: list, capture: Sequence[int]) -> PendingStep:
        batch = [
            VerifyRows(
                SimpleNamespace(
                    request_id=sequence.request_id,
                    sampling=sequence.sampling,
                    grammar=None,
                    is_masked=False,
                    slot=sequence.slot,
                    pages=sequence.pages,
                    num_computed=num_computed,
                    tokens=tokens,
                ),
                EMPTY,
            )
            for sequence, num_computed, tokens in work
        ]
        result = super().submit(Step(batch, (), capture)).finish()
        self._standing = {
            sequence.slot: (num_computed + 1, [*tokens, outcome.verified.tokens[0]])
            for (sequence, num_computed, tokens), outcome in zip(work, result.outcomes, strict=True)
        }
        return ToyStep(1, [EMPTY] * len(work), [], lambda: result, output=result.output)
