"""Which pages hold complete KV of one attached draft. What that KV is, the draft alone knows."""

from array import array
from collections.abc import Sequence

from verify_service.scheduler.page_pool import PagePool

_NEVER = -1


class DraftMarks:
    """A mark per page: under which epoch of the draft it was filled.

    A mark ends with its page: it says nothing about the page once that is allocated anew.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._epochs = array("q", [_NEVER]) * pool.num_pages
        self._generations = array("q", [_NEVER]) * pool.num_pages

    def mark(self, page: int, epoch: int) -> None:
        """Notes that the draft of `epoch` (>= 0) has KV for the whole page."""
        self._epochs[page] = epoch
        self._generations[page] = self._pool.generation(page)

    def clear(self, page: int) -> None:
        """Takes the mark away."""
        self._epochs[page] = _NEVER

    def is_valid(self, page: int, epoch: int) -> bool:
        """True when the draft of `epoch` can use the page."""
        return self._epochs[page] == epoch and self._generations[page] == self._pool.generation(
            page
        )

    def valid_prefix(self, pages: Sequence[int], epoch: int) -> int:
        """How many leading entries of a page table the draft of `epoch` has."""
        for i, page in enumerate(pages):
            if not self.is_valid(page, epoch):
                return i
        return len(pages)
