"""Output of training commands: lines, and progress bars that suit terminals and log files."""

import sys
import time
from types import TracebackType
from typing import Any, Self

FIRST_SECONDS, INTERVAL = (
    2.0,
    15.0,
)  # until the first line of a log file tells how long it will take, and between lines


def say(text: str) -> None:
    """Prints one line to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """A progress bar on a terminal; a line every `INTERVAL` seconds where there is none.

    Both say what time is left.

    Args:
        total: Number of steps.
        start: Steps already done by an earlier run.
        label: Name of the work shown.
    """

    def __init__(self, total: int, start: int, label: str) -> None:
        self.total, self.done, self.label = total, start, label
        self._bar: Any = None
        self._first, self._start, self._started = True, start, time.monotonic()
        self._next = self._started + FIRST_SECONDS
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, desc=label, dynamic_ncols=True)
        else:
            say(f"{label} {start}/{total}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int, text: str = "") -> None:
        """Moves the bar and shows `text` behind it."""
        self.done += steps
        if self._first:  # what is compiled and loaded with it happens once
            self._first, self._start, self._started = False, self.done, time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            self._bar.update(steps)
        elif self.done >= self.total or (self.done > self._start and self._is_due()):
            self._next = time.monotonic() + INTERVAL
            say(f"{self.label} {self.done}/{self.total}, {self._left()} left {text}".rstrip())

    def _is_due(self) -> bool:
        return time.monotonic() >= self._next

    def _left(self) -> str:
        """Returns the time until the end at the pace so far, as minutes:seconds."""
        pace = (time.monotonic() - self._started) / max(1, self.done - self._start)
        minutes, seconds = divmod(round(pace * (self.total - self.done)), 60)
        return f"{minutes}:{seconds:02d}"
