"""Results of a model's steps, compared with plain decoding and trees of fixed sizes at the same
contexts.
"""

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

from testing.step_model import StepModel, expected_tokens, fixed_seconds, sizes


class TraceStep(NamedTuple):
    """Results of a step: its end and length in seconds, its sequences, rows of each, tokens and
    context of all.
    """

    end: float
    seconds: float
    batch: int
    rows: int
    tokens: int
    context: int


@dataclass(slots=True)
class Trace:
    """The steps of a run."""

    model: StepModel
    steps: list[TraceStep] = field(default_factory=list)

    def rate(self, start: float, end: float) -> float:
        """Returns tokens per second of the steps within [start, end]."""
        inside = self._within(start, end)
        return sum(step.tokens for step in inside) / sum(step.seconds for step in inside)

    def fixed_rate(self, start: float, end: float, nodes: int, acceptance: float) -> float:
        """Returns the same with trees of always the same size, at the contexts of these steps."""
        inside, tokens = self._within(start, end), expected_tokens(self.model, nodes, acceptance)
        work = sum(
            step.seconds * step.batch / fixed_seconds(self.model, step.batch, nodes, step.context)
            for step in inside
        )
        return tokens * work / sum(step.seconds for step in inside)

    def of_plain(self, start: float, end: float) -> float:
        """Returns the rate over plain decoding's."""
        return self.rate(start, end) / self.fixed_rate(start, end, 0, 0.0)

    def of_best(self, start: float, end: float, acceptance: float) -> float:
        """Returns the rate over that of the best size, none included, for the batch of the last
        step within.
        """
        batch = self._within(start, end)[-1].batch
        rates = [self.fixed_rate(start, end, n, acceptance) for n in sizes(self.model, batch)]
        return self.rate(start, end) / max(rates)

    def windows(self, width: float = 1.0) -> list[tuple[float, float]]:
        """Returns (start, ratio to plain decoding) of the window that begins with each step.

        The ratio is the plain time of its tokens at the same batches over its own time.
        """
        worth = [
            step.tokens * fixed_seconds(self.model, step.batch, 0, step.context) / step.batch
            for step in self.steps
        ]
        found, last, total = [], 0, 0.0
        for first, step in enumerate(self.steps):
            start = step.end - step.seconds
            while last < len(self.steps) and self.steps[last].end - start <= width:
                total += worth[last]
                last += 1
            if last == len(self.steps):
                break
            if last > first:
                found.append((start, total / (self.steps[last - 1].end - start)))
                total -= worth[first]
        return found

    def _within(self, start: float, end: float) -> list[TraceStep]:
        first, last = (
            bisect.bisect(self.steps, time, key=lambda step: step.end) for time in (start, end)
        )
        return self.steps[first:last]
