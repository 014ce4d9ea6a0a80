"""Marks the pages that hold complete KV of one attached draft."""

from array import array
from collections.abc import Sequence

from verify_service.scheduler.page_pool import PagePool

_NEVER = -1


class DraftMarks:
    """Holds a mark for each page that the draft of one attach has filled.

    A mark ends when its page is allocated again.

    Attributes:
        page_size: Number of tokens of a page.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        self._generations = array("q", [_NEVER]) * pool.num_pages

    def mark(self, page: int) -> None:
        """Marks a page whose whole KV the draft has."""
        self._generations[page] = self._pool.generation(page)

    def clear(self, page: int) -> None:
        """Removes a page's mark."""
        self._generations[page] = _NEVER

    def is_valid(self, page: int) -> bool:
        """Returns whether the draft can use a page."""
        return self._generations[page] == self._pool.generation(page)

    def valid_prefix(self, pages: Sequence[int]) -> int:
        """Returns how many leading pages of a page table the draft can use."""
        for i, page in enumerate(pages):
            if not self.is_valid(page):
                return i
        return len(pages)

    def valid_from(self, pages: Sequence[int], end: int) -> int:
        """Returns the first position of the consecutive pages that the draft can use before entry
        `end` of a page table.
        """
        while end and self.is_valid(pages[end - 1]):
            end -= 1
        return end * self.page_size
