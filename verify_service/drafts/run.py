"""Hidden states of one sequence, kept for its draft."""

from collections import deque
from dataclasses import dataclass, field

import torch

MERGE_STEPS = 32  # number of appended pieces after which small ones are merged


@dataclass(slots=True)
class Run:
    """Hidden states of consecutive positions of one sequence.

    Attributes:
        start: First position that was captured; earlier ones may be on pages.
        first: First position that is still kept.
        end: Position after the last one.
        parts: Rows in pieces: the first position of each piece, and its rows.
        resend_from: First of the draft's slots that must be filled again, since they are on another
            page; None for none.
        unsent_pages: Pages marked as complete whose rows have not been sent to the draft yet.
        num_appended: Number of pieces appended since the last merge.
    """

    start: int
    first: int
    end: int
    parts: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    resend_from: int | None = None
    unsent_pages: list[int] = field(default_factory=list)
    num_appended: int = 0

    def append(self, rows: torch.Tensor, count: int) -> None:
        """Appends `count` rows."""
        self.parts.append((self.end, rows))
        self.end += count
        self.num_appended += 1

    def merge(self) -> None:
        """Merges the newest small pieces, which makes rows faster to find and to copy."""
        self.num_appended = 0
        small = []
        while self.parts and len(self.parts[-1][1]) < MERGE_STEPS:
            small.append(self.parts.pop())
        small.reverse()
        if len(small) > 1:
            small = [(small[0][0], torch.cat([rows for _, rows in small]))]
        self.parts.extend(small)

    def skip(self, count: int) -> None:
        """Moves the end by `count` rows that are not kept, and drops all earlier rows."""
        self.parts.clear()
        self.end += count
        self.first = self.end

    def rows(self, first: int) -> torch.Tensor:
        """Returns the rows of positions [first, end), which must be at least one."""
        assert self.first <= first < self.end
        start, last = self.parts[-1]
        if first >= start:  # the usual case: rows of the last step
            return last[first - start :] if first > start else last
        taken = []
        for start, rows in reversed(self.parts):
            taken.append(rows[max(first - start, 0) :])
            if start <= first:
                break
        return torch.cat(taken[::-1])

    def drop_before(self, position: int) -> None:
        """Drops the pieces that end before a position."""
        parts = self.parts
        while parts and (parts[1][0] if len(parts) > 1 else self.end) <= position:
            parts.popleft()
        self.first = parts[0][0] if parts else self.end
