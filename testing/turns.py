"""Engines that take turns step by step, so that whatever slows the machine for a while slows all of
them.
"""

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from verify_service.engine.engine import Engine

POLL_SECONDS = 0.002  # interval at which a waiting engine checks whether others have work


class Turns:
    """Lets engines run one step at a time; none runs two in a row while another has work.

    Attributes:
        seconds: Time of each engine's steps, handing out their tokens included.
        cpu_seconds: CPU time of all threads of this process meanwhile.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = list(engines)
        self._changed = threading.Condition()
        self._is_busy = False
        self._last = -1
        self.clear()

    def clear(self) -> None:
        """Resets the counts."""
        self.seconds = [0.0] * len(self._engines)
        self.cpu_seconds = [0.0] * len(self._engines)

    def __enter__(self) -> "Turns":
        for number, engine in enumerate(self._engines):
            steps = engine._steps
            setattr(steps, "run", self._in_turn(number, steps.run))  # noqa: B010 (mypy)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self._engines:
            delattr(engine._steps, "run")

    def _in_turn(self, number: int, step: Callable[[], None]) -> Callable[[], None]:
        engine = self._engines[number]
        others = [one for one in self._engines if one is not engine]

        def run() -> None:
            with self._changed:
                while self._is_busy or (
                    self._last == number and not all(one.is_idle for one in others)
                ):
                    self._changed.wait(POLL_SECONDS)
                self._is_busy = True
            started, started_cpu = time.perf_counter(), time.process_time()
            try:
                step()
                # Else this work is done after the step or in it, with a draft or without.
                engine._emit()
            finally:
                self.cpu_seconds[number] += time.process_time() - started_cpu
                self.seconds[number] += time.perf_counter() - started
                with self._changed:
                    self._is_busy, self._last = False, number
                    self._changed.notify_all()

        return run


def median_within(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and its interval at a confidence of 95 %: the k-th values from both
    ends.
    """
    ordered = sorted(values)
    away = 0.98 * math.sqrt(len(ordered))
    low = max(math.floor((len(ordered) - 1) / 2 - away), 0)
    return statistics.median(ordered), ordered[low], ordered[-1 - low]
