"""Hidden states of one sequence that are kept for its draft."""

from collections import deque
from dataclasses import dataclass, field

import torch

MERGE_STEPS = 32  # after which the rows that a sequence was given one by one are put together


@dataclass(slots=True)
class Run:
    """Hidden states of consecutive positions of one sequence.

    Attributes:
        start: First position that was captured; what lies before, pages may have.
        first: First position that is still kept.
        end: Position after the last.
        parts: Their rows, in pieces: the first position of each, and its rows.
        resend_from: The draft's slots from here on have to be filled again: they are on another page now.
        unsent_pages: Pages marked as complete on the strength of rows that the draft has not been sent.
        num_appended: Pieces since some were made one.
    """

    start: int
    first: int
    end: int
    parts: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    resend_from: int | None = None
    unsent_pages: list[int] = field(default_factory=list)
    num_appended: int = 0

    def append(self, rows: torch.Tensor, count: int) -> None:
        """Takes the rows after the last, `count` of them."""
        self.parts.append((self.end, rows))
        self.end += count
        self.num_appended += 1

    def merge(self) -> None:
        """Makes one piece of the newest small ones, which are quicker to find and to copy then."""
        self.num_appended = 0
        small = []
        while self.parts and len(self.parts[-1][1]) < MERGE_STEPS:
            small.append(self.parts.pop())
        small.reverse()
        if len(small) > 1:
            small = [(small[0][0], torch.cat([rows for _, rows in small]))]
        self.parts.extend(small)

    def skip(self, count: int) -> None:
        """Counts rows after the last that are not kept, nor those before them."""
        self.parts.clear()
        self.end += count
        self.first = self.end

    def rows(self, first: int) -> torch.Tensor:
        """Rows of positions [first, end), at least one."""
        assert self.first <= first < self.end
        start, last = self.parts[-1]
        if first >= start:  # nearly always: what the last step committed
            return last[first - start :] if first > start else last
        taken = []
        for start, rows in reversed(self.parts):
            taken.append(rows[max(first - start, 0) :])
            if start <= first:
                break
        return torch.cat(taken[::-1])

    def drop_before(self, position: int) -> None:
        """Forgets rows before a position, as far as whole parts go."""
        parts = self.parts
        while parts and (parts[1][0] if len(parts) > 1 else self.end) <= position:
            parts.popleft()
        self.first = parts[0][0] if parts else self.end
