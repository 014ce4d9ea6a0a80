"""Which pages hold complete KV of one attached draft. What that KV is, the draft alone knows."""

from array import array
from collections.abc import Sequence

from foredraft.kvcache.page_pool import PagePool

_NEVER = -1


class DraftMarks:
    """A mark per page: under which epoch of the draft, and before which token, it was filled.

    The state of an EAGLE-family draft at position p depends on the token at p + 1, so the last
    position of a page ties the page to the token after it; other drafts (STANDALONE) do not care.
    A mark ends with its page: it says nothing about the page once that is allocated anew.

    Attributes:
        depends_on_next_token: Whether the attached draft is of the first kind; set at attach.
    """

    def __init__(self, pool: PagePool, depends_on_next_token: bool = True) -> None:
        self.depends_on_next_token = depends_on_next_token
        self._pool = pool
        self._epochs = array("q", [_NEVER]) * pool.num_pages
        self._next_tokens = array("q", [_NEVER]) * pool.num_pages
        self._generations = array("q", [_NEVER]) * pool.num_pages

    def mark(self, page: int, epoch: int, next_token: int) -> None:
        """Notes that the draft of `epoch` (>= 0) has KV for the whole page, computed before
        `next_token`."""
        self._epochs[page] = epoch
        self._next_tokens[page] = next_token
        self._generations[page] = self._pool.generation(page)

    def clear(self, page: int) -> None:
        """Takes the mark away."""
        self._epochs[page] = _NEVER

    def is_valid(self, page: int, epoch: int, next_token: int | None) -> bool:
        """True when the draft of `epoch` can use the page before `next_token` (None: unknown)."""
        return (
            self._epochs[page] == epoch
            and self._generations[page] == self._pool.generation(page)
            and (not self.depends_on_next_token or self._next_tokens[page] == next_token)
        )

    def valid_prefix(self, pages: Sequence[int], tokens: Sequence[int], epoch: int) -> int:
        """How many leading tokens the draft of `epoch` has on `pages`; whole pages.

        Args:
            pages: A page table, or its beginning.
            tokens: The sequence's tokens; those of `pages` and the one after them, if known.
            epoch: The draft's epoch.
        """
        page_size = self._pool.page_size
        for i, page in enumerate(pages):
            end = (i + 1) * page_size
            next_token = tokens[end] if end < len(tokens) else None
            if end > len(tokens) or not self.is_valid(page, epoch, next_token):
                return i * page_size
        return len(pages) * page_size
