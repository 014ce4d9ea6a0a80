"""Judges by time whether steps should draft ahead."""

import time
from collections.abc import Callable
from statistics import median

# What preparing costs and how often it helps differ too much to be reckoned: by the models, their
# cards, the batch and the text. Texts differ from turn to turn; so there are several.
TURN_STEPS = 32
NUM_TURNS = 4  # of each kind
KEPT_STEPS = 4096  # until contexts and texts may be others


class _Choice:
    """Chooses for one batch size: turns with and without drafting ahead, then what was faster."""

    def __init__(self) -> None:
        self.is_ahead = True
        self._turns: list[float] = []  # seconds of each turn; every second one is without
        self._seconds, self._steps_left = 0.0, TURN_STEPS

    def add(self, seconds: float) -> None:
        """Takes the time that a step took with `is_ahead` as it is."""
        self._seconds += seconds
        self._steps_left -= 1
        if self._steps_left:
            return
        if len(self._turns) == 2 * NUM_TURNS:  # the choice was kept long enough
            self._turns.clear()
            self.is_ahead = True
        else:
            self._turns.append(self._seconds)
            self.is_ahead = not self.is_ahead
        self._seconds, self._steps_left = 0.0, TURN_STEPS
        if len(self._turns) == 2 * NUM_TURNS:
            # Each turn is a sum: steps that hit and steps that miss differ, and a median of steps
            # would see only one of the two.
            self.is_ahead = median(self._turns[::2]) < median(self._turns[1::2])
            self._steps_left = KEPT_STEPS


class AheadPolicy:
    """Chooses which steps draft ahead, for each batch size by the time from step to step.

    Args:
        clock: Returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._choices: dict[int, _Choice] = {}
        self._expected, self._last = (0, 0), 0.0  # next step and its batch; the last one's time

    def is_ahead(self, step: int, batch: int) -> bool:
        """Returns whether a step should draft ahead.

        Called once for each step that can. A step's time counts only if the next step has the same
        batch size and follows at once.
        """
        now, choice = self._clock(), self._choices.setdefault(batch, _Choice())
        if self._expected == (step, batch):
            choice.add(now - self._last)
        self._expected, self._last = (step + 1, batch), now
        return choice.is_ahead
