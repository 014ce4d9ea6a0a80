"""Numbers and reference counts of KV pages. The tensors behind them live in `paged_kv`."""

import heapq
from collections.abc import Callable, Iterable, Mapping


class PagePool:
    """Hands out page numbers 0 .. num_pages - 1 and counts their holders.

    A page without a holder is free. A *watched* page is one that a cache holds beside the
    sequences; when the cache's reference is its last one the page is *idle*: still filled, and
    available by eviction.

    Free pages are kept as maximal runs, because the CPU attention reads consecutive pages as a
    view. One page costs O(1) to allocate or release, beside a heap of runs.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs pages and tokens in them, not {num_pages}, {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_free = num_pages
        self.num_idle = 0
        self._counts = [0] * num_pages
        self._generations = [0] * num_pages
        self._watched = bytearray(num_pages)
        self._on_idle: Callable[[int], None] | None = None
        self._run_length = {0: num_pages}  # first page -> length
        self._run_start = {num_pages - 1: 0}  # last page -> first page
        self._by_length = [(-num_pages, 0)]  # heap with stale entries

    def pages_for(self, num_keys: int) -> int:
        """Returns the number of pages that hold `num_keys` tokens."""
        return -(-num_keys // self.page_size)

    def count(self, page: int) -> int:
        """Returns the number of holders of a page; 0 for a free one."""
        return self._counts[page]

    def generation(self, page: int) -> int:
        """Returns how often the page was allocated; notes about an earlier allocation are void."""
        return self._generations[page]

    def allocate(self, num_pages: int, near: int | None = None) -> list[int]:
        """Takes free pages, each with one reference for the caller.

        Args:
            num_pages: At most `num_free`.
            near: The caller's last page: the pages after it are taken while they are free.

        Returns:
            Page numbers in few runs of ascending numbers.
        """
        if num_pages > self.num_free:
            raise RuntimeError(f"{num_pages} pages asked of {self.num_free} free ones")
        pages: list[int] = []
        if near is not None and near + 1 in self._run_length:
            self._take(near + 1, 0, num_pages, pages)
        while len(pages) < num_pages:
            start = self._longest_run()
            wanted = num_pages - len(pages)
            half = self._run_length[start] // 2
            # Whoever holds the page before the run may want to grow into it: leave it half.
            offset = half if half >= wanted and start > 0 and not self.is_idle(start - 1) else 0
            self._take(start, offset, wanted, pages)
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Adds a reference to each page; none of them may be free."""
        counts = self._counts
        for page in pages:
            count = counts[page]
            if count == 0:
                raise RuntimeError(f"page {page} is free and cannot be retained")
            if count == 1 and self._watched[page]:
                self.num_idle -= 1
            counts[page] = count + 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a reference from each page, in order; pages without one become free."""
        counts = self._counts
        freed: list[int] = []
        for page in pages:
            count = counts[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} is free and cannot be released")
            counts[page] = count
            if count == 0:
                if self._watched[page]:
                    raise RuntimeError(f"page {page} was released while a cache watches it")
                freed.append(page)
            elif count == 1 and self._watched[page]:
                self.num_idle += 1
                if self._on_idle is not None:
                    self._on_idle(page)
        if freed:
            self._free(freed)

    def on_idle(self, listener: Callable[[int], None]) -> None:
        """Registers the callback of the cache, called for each watched page that becomes idle."""
        self._on_idle = listener

    def watch(self, page: int) -> None:
        """Marks a held page as one that the cache holds too; the cache has its own reference."""
        if self._watched[page] or self._counts[page] < 1:
            raise RuntimeError(f"page {page} is watched already or free")
        self._watched[page] = 1
        self.num_idle += self._counts[page] == 1

    def unwatch(self, page: int) -> None:
        """Ends `watch`; the cache releases its reference afterwards."""
        if not self._watched[page]:
            raise RuntimeError(f"page {page} is not watched")
        self._watched[page] = 0
        self.num_idle -= self._counts[page] == 1

    def is_idle(self, page: int) -> bool:
        """Returns whether only the cache holds the page."""
        return self._counts[page] == 1 and self._watched[page] == 1

    def check_integrity(self, holders: Mapping[int, int] | None = None) -> None:
        """Raises RuntimeError when the counts contradict each other, or `holders` (page ->
        count).
        """
        free: set[int] = set()
        for start, length in self._run_length.items():
            run = range(start, start + length)
            if (
                length < 1
                or self._run_start.get(run[-1]) != start
                or run[-1] + 1 in self._run_length
            ):
                raise RuntimeError(f"the free run of {length} pages at {start} is broken")
            free.update(run)
        if len(self._run_start) != len(self._run_length) or len(free) != self.num_free:
            raise RuntimeError(f"free runs hold {len(free)} pages, num_free is {self.num_free}")
        for page, count in enumerate(self._counts):
            if (count == 0) != (page in free):
                raise RuntimeError(f"page {page} has {count} references; free: {page in free}")
            if holders is not None and holders.get(page, 0) != count:
                raise RuntimeError(
                    f"page {page} has {count} references but {holders.get(page, 0)} holders"
                )
        idle = sum(self.is_idle(page) for page in range(self.num_pages))
        if idle != self.num_idle:
            raise RuntimeError(f"{idle} pages are idle, num_idle is {self.num_idle}")

    def _longest_run(self) -> int:
        while True:
            length, start = self._by_length[0]
            if self._run_length.get(start) == -length:
                return start
            heapq.heappop(self._by_length)

    def _take(self, start: int, offset: int, wanted: int, pages: list[int]) -> None:
        """Appends up to `wanted` pages from `offset` on of the free run at `start`."""
        length = self._run_length.pop(start)
        del self._run_start[start + length - 1]
        first = start + offset
        end = min(first + wanted, start + length)
        if offset:
            self._add_run(start, offset)
        if end < start + length:
            self._add_run(end, start + length - end)
        for page in range(first, end):
            self._counts[page] = 1
            self._generations[page] += 1
            pages.append(page)
        self.num_free -= end - first

    def _free(self, freed: list[int]) -> None:
        self.num_free += len(freed)
        freed.sort()
        start = previous = freed[0]
        for page in freed[1:]:
            if page != previous + 1:
                self._join_run(start, previous)
                start = page
            previous = page
        self._join_run(start, previous)

    def _join_run(self, first: int, last: int) -> None:
        """Adds the free pages first .. last and merges them with the runs beside them."""
        if first - 1 in self._run_start:
            first = self._run_start.pop(first - 1)
            del self._run_length[first]
        if last + 1 in self._run_length:
            after = last + 1
            last += self._run_length.pop(after)
            del self._run_start[last]
        self._add_run(first, last - first + 1)

    def _add_run(self, start: int, length: int) -> None:
        self._run_length[start] = length
        self._run_start[start + length - 1] = start
        heapq.heappush(self._by_length, (-length, start))
        if len(self._by_length) > 64 + 4 * len(self._run_length):
            self._by_length = [(-length, start) for start, length in self._run_length.items()]
            heapq.heapify(self._by_length)
