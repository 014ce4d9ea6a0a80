"""Plain steps that may be started ahead, on the CPU: they run when they are started, and are known when they are asked for.

For the engine's account of what it does not know yet; a GPU's graphs do the same out of sight.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from foredraft.trees.draft_tree import EMPTY
from testing.toy_target import ToyStep
from verify_service.executor.sampler import VerifyRows
from verify_service.executor.target_step import AheadRows, StartedStep, TargetStep


class EagerAhead(TargetStep):
    """Starts steps without trees ahead; others run as ever."""

    num_ahead = 0

    def can_start(self, batch: Sequence[VerifyRows]) -> bool:
        return not any(rows.tree.tokens for rows in batch)

    def start(self, batch: Sequence[VerifyRows], capture: Sequence[int]) -> StartedStep:
        return self._start(
            [(r.sequence, r.sequence.num_computed, list(r.sequence.tokens)) for r in batch], capture
        )

    def start_ahead(
        self,
        batch: Sequence[AheadRows],
        capture: Sequence[int],
        num_rows: int,
        fetch: Callable[[torch.Tensor], None] | None,
    ) -> StartedStep:
        assert fetch is None
        EagerAhead.num_ahead += 1
        return self._start([(r.sequence, *self._standing[r.sequence.slot]) for r in batch], capture)

    def _start(self, work: list, capture: Sequence[int]) -> StartedStep:
        batch = [
            VerifyRows(
                SimpleNamespace(
                    request_id=sequence.request_id,
                    sampling=sequence.sampling,
                    grammar=None,
                    slot=sequence.slot,
                    pages=sequence.pages,
                    num_computed=num_computed,
                    tokens=tokens,
                ),
                EMPTY,
            )
            for sequence, num_computed, tokens in work
        ]
        result = self.run(batch, [], capture)
        self._standing = {
            sequence.slot: (num_computed + 1, [*tokens, outcome.verified.tokens[0]])
            for (sequence, num_computed, tokens), outcome in zip(work, result.outcomes, strict=True)
        }
        return ToyStep(1, [EMPTY] * len(work), [], lambda: result, output=result.output)
