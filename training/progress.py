"""What a training command shows: lines, and one progress bar that works in a terminal and in a log file."""

import sys
import time
from types import TracebackType
from typing import Any, Self

INTERVAL = 15.0  # seconds


def say(text: str) -> None:
    """Prints one line to standard error, at once."""
    print(text, file=sys.stderr, flush=True)


class Progress:
    """A progress bar on a terminal; a line every `INTERVAL` seconds where there is none.

    Args:
        total: Number of steps.
        start: Steps already done by an earlier run.
        label: What is being done.
    """

    def __init__(self, total: int, start: int, label: str) -> None:
        self.total, self.done, self.label = total, start, label
        self._bar: Any = None
        self._last = time.monotonic()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=start, desc=label, dynamic_ncols=True)

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

    def advance(self, steps: int, text: str) -> None:
        """Moves the bar and shows `text` behind it."""
        self.done += steps
        if self._bar is not None:
            self._bar.set_postfix_str(text)
            self._bar.update(steps)
        elif time.monotonic() - self._last >= INTERVAL or self.done >= self.total:
            self._last = time.monotonic()
            say(f"{self.label} {self.done}/{self.total} {text}")
