"""Keeps a number of sequences running, and fits the times of steps of fixed sizes over context
length.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from foredraft.types import FinishReason, SamplingParams
from testing.engine_steps import EngineSteps, Step
from verify_service.engine.engine import Engine
from verify_service.engine.live_requests import EngineRequest
from verify_service.executor.kernels.steps import pretended_path
from verify_service.outputs import Load, StepOutput

PROMPT = 256  # tokens
LONGEST = 7000  # tokens of an answer
SETTLE_STEPS = 6  # after a change of setting that no fit looks at


class Meter:
    """Keeps a number of sequences running."""

    def __init__(self, engine: Engine) -> None:
        self.log = EngineSteps(engine)
        self._engine = engine
        self._numbers: dict[int, int] = {}
        self._begun: set[int] = set()
        self._num_submitted = 0
        self._over = ""

    def resize(self, count: int) -> None:
        """Starts or cancels sequences, and waits until all have begun to decode."""
        while len(self._numbers) > count:
            tag = max(self._numbers)
            self._engine.cancel(self._numbers.pop(tag))
        while len(self._numbers) < count:
            self._submit()
        deadline = time.perf_counter() + 60
        while self._engine.load().running != count or not self._begun.issuperset(self._numbers):
            if time.perf_counter() > deadline:
                raise TimeoutError(f"not {count} but {self._engine.load()}")
            time.sleep(0.001)

    def during(self, seconds: float) -> list[Step]:
        """Returns the steps of the coming seconds that only decode."""
        first = len(self.log.steps)
        time.sleep(seconds)
        if self._over:
            raise RuntimeError(f"an answer ended: {self._over}")
        return self.since(first)

    def since(self, first: int) -> list[Step]:
        """Returns the later steps that only decode."""
        return [step for step in self.log.steps[first:] if step.kind != "prompt"]

    def _submit(self) -> None:
        self._num_submitted += 1
        tag = self._num_submitted
        sampling = SamplingParams(temperature=0.0, max_new_tokens=LONGEST, ignore_eos=True)
        prompt = [1000 + (7 * tag + i) % 10000 for i in range(PROMPT)]
        request = EngineRequest(tag, prompt, sampling, self._take)
        self._numbers[tag] = self._engine.submit(request)

    def _take(self, outputs: list[StepOutput], load: Load) -> None:
        self._begun.update(one.tag for one in outputs if one.tokens)
        for one in outputs:
            if one.finish and one.finish.reason is not FinishReason.CANCELLED:
                self._over = str(one.finish)


@dataclass(slots=True)
class Line:
    """Models seconds of a step as a line over the context of all its sequences."""

    base: float
    slope: float

    def seconds(self, context: float) -> float:
        """Returns the seconds of a step with this many committed tokens."""
        return self.base + self.slope * context


class Costs:
    """Fits the times of steps of one size, at the contexts that were measured."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], list[Step]] = {}
        self._lines: dict[tuple[int, int], Line] = {}

    def add(self, batch: int, rows: int, steps: Sequence[Step]) -> None:
        """Adds steps that all had these sizes, without those right after a change of setting."""
        seen = [step for step in steps[SETTLE_STEPS:] if (step.batch, step.rows) == (batch, rows)]
        self._seen.setdefault((batch, rows), []).extend(seen)
        self._lines.clear()

    def knows(self, batch: int, rows: int) -> bool:
        """Returns whether steps of this size were measured."""
        return bool(self._seen.get((batch, rows)))

    def line(self, batch: int, rows: int) -> Line:
        """Returns the line of least squares, of the nearest batch that was measured."""
        sizes = [size for size, steps in self._seen.items() if size[1] == rows and steps]
        if not sizes:
            raise ValueError(f"no steps of {rows} rows were measured")
        size = min(sizes, key=lambda one: abs(one[0] - batch))
        if size not in self._lines:
            steps = self._seen[size]
            contexts, seconds = (
                np.array([step.context for step in steps]),
                np.array([step.seconds for step in steps]),
            )
            slope, base = 0.0, float(seconds.mean())
            if np.ptp(contexts) > 0.1 * contexts.mean():
                slope, base = map(float, np.polyfit(contexts, seconds, 1))
            self._lines[size] = Line(base, slope)
        return self._lines[size]

    def rate(self, steps: Sequence[Step], rows: int, tokens: float) -> float:
        """Returns tokens per second with a fixed number of rows at the contexts of `steps`, and
        `tokens` for each sequence and step.
        """
        line = self.line(steps[0].batch, rows)
        total = sum(step.seconds for step in steps)
        work = sum(step.seconds * step.batch / line.seconds(step.context) for step in steps)
        return tokens * work / total

    def plain_seconds(self, step: Step) -> float:
        """Returns the seconds that plain decoding would take for a step's tokens."""
        return step.tokens * self.line(step.batch, 1).seconds(step.context) / step.batch

    def windows(
        self, steps: Sequence[Step], slower: Mapping[int, float], width: float = 1.0
    ) -> list[tuple[float, float]]:
        """Returns (start, ratio to plain decoding) of the windows that begin with each step.

        Args:
            slower: Plain steps' time during these steps divided by their usual time, by batch.
        """
        worth = [self.plain_seconds(step) * slower.get(step.batch, 1.0) for step in steps]
        found, last, total = [], 0, 0.0
        for first, step in enumerate(steps):
            start = step.end - step.seconds
            while last < len(steps) and steps[last].end - start <= width:
                total += worth[last]
                last += 1
            if last == len(steps):
                break
            if last > first:
                found.append((start, total / (steps[last - 1].end - start)))
                total -= worth[first]
        return found


def mean_tokens(rows: int, depth: int, acceptance: float) -> float:
    """Returns the mean tokens of a step of one sequence, where `acceptance` is the chance of
    every guess after a right one.

    Args:
        depth: Depth of the largest tree; a tree of few rows is a chain.
    """
    return sum(acceptance**i for i in range(len(pretended_path(rows, depth + 1))))


def rate_of(steps: Sequence[Step], tokens: Callable[[Step], float]) -> float:
    """Returns tokens per second."""
    return sum(map(tokens, steps)) / sum(step.seconds for step in steps)
