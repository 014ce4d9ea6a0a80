"""A radix tree from token prefixes to the pages that hold their KV; its digits are whole pages."""

import heapq
from array import array
from collections.abc import Sequence

from verify_service.scheduler.page_pool import PagePool


def page_keys(
    tokens: Sequence[int], page_size: int, first_page: int = 0, look_ahead: int = 0
) -> list[bytes]:
    """Returns the tree's keys of the full pages of `tokens` from `first_page` on.

    Bytes, because they keep their hash: a page's tokens are hashed once however often it is looked
    up, and equality stays exact.

    Args:
        look_ahead: Tokens after a page that its contents depend on.
    """
    num_pages = (len(tokens) - look_ahead) // page_size
    if first_page >= num_pages:
        return []
    packed = array("i", tokens[first_page * page_size : num_pages * page_size + look_ahead])
    data = packed.tobytes()
    stride = packed.itemsize * page_size
    width = stride + packed.itemsize * look_ahead
    return [data[i * stride : i * stride + width] for i in range(num_pages - first_page)]


class PrefixNode:
    """A page of a prefix, or the root. A sequence that extends the tree uses it as a cursor."""

    __slots__ = ("children", "depth", "key", "last_used", "page", "parent")

    def __init__(self, parent: "PrefixNode | None", key: bytes, page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page  # -1: the root, or evicted
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, PrefixNode] = {}
        self.last_used = 0


class PrefixTree:
    """Holds one reference to each page it knows; the pages of live sequences are among them.

    A holder of a node's page also holds the pages of all its ancestors and releases them after it
    (deepest first), so idle pages are always whole subtrees and all of them can be evicted.

    Attributes:
        root: The node where all prefixes begin.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.num_cached = 0
        self.root = PrefixNode(None, b"", -1)
        self._nodes: list[PrefixNode | None] = [None] * pool.num_pages  # node of each page
        self._clock = 0
        self._leaves: list[tuple[int, int]] = []  # heap of (last_used, page) with stale entries
        pool.on_idle(self._touch)

    def deepen(self, node: PrefixNode, keys: Sequence[bytes], limit: int) -> PrefixNode:
        """Returns the deepest known node for keys[:limit], from `node` (which stands for a
        prefix of them).

        A node that was evicted since is left for its nearest living ancestor.
        """
        while node.parent is not None and node.page < 0:
            node = node.parent
        for depth in range(node.depth, limit):
            child = node.children.get(keys[depth])
            if child is None:
                break
            node = child
        return node

    def pages(self, node: PrefixNode, depth: int = 0) -> list[int]:
        """Returns the pages from the root to `node`, without the first `depth`."""
        pages = []
        while node.parent is not None and node.depth > depth:
            pages.append(node.page)
            node = node.parent
        pages.reverse()
        return pages

    def num_idle_on_path(self, node: PrefixNode) -> int:
        """Returns the number of idle pages from the root to `node`; retaining the path would
        end that.
        """
        first = node
        while node.parent is not None and self.pool.is_idle(node.page):
            node = node.parent
        return first.depth - node.depth

    def extend(self, node: PrefixNode, key: bytes, page: int) -> tuple[PrefixNode, int]:
        """Adds a page below `node`. The caller holds `page` and the pages down to `node`.

        Where the prefix is known already, one of the two pages goes: the tree's, when nobody uses
        it, so that the caller's page table stands; else the caller's, whose reference is moved.

        Returns:
            The node, and the page that the caller holds now.
        """
        child = node.children.get(key)
        if child is None:
            child = PrefixNode(node, key, page)
            node.children[key] = child
            self.num_cached += 1
        elif child.page == page:
            return child, page
        elif self.pool.is_idle(child.page):
            self._forget(child.page)
            self.pool.release([child.page])
            child.page = page
        else:
            self.pool.retain([child.page])
            self.pool.release([page])
            return child, child.page
        self._nodes[page] = child
        self.pool.retain([page])
        self.pool.watch(page)
        return child, page

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` idle pages, the least recently used first; returns how many."""
        freed: list[int] = []
        while len(freed) < num_pages and self._leaves:
            last_used, page = heapq.heappop(self._leaves)
            node = self._nodes[page]
            if node is None or not self._is_evictable(node) or node.last_used != last_used:
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            node.page = -1
            self._forget(page)
            self.num_cached -= 1
            freed.append(page)
            if parent is not self.root and self._is_evictable(parent):
                heapq.heappush(self._leaves, (parent.last_used, parent.page))
        self.pool.release(freed)
        return len(freed)

    def clear(self) -> int:
        """Frees every idle page; returns how many."""
        return self.evict(self.num_cached)

    def holders(self) -> dict[int, int]:
        """Returns the references that the tree holds by page, for `PagePool.check_integrity`."""
        return {node.page: 1 for node in self._nodes if node is not None}

    def check_integrity(self) -> None:
        """Raises RuntimeError when the tree contradicts itself or the pool."""
        num_reached = 0
        stack = [self.root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                num_reached += 1
                if (
                    child.parent is not node
                    or child.key != key
                    or self._nodes[child.page] is not child
                ):
                    raise RuntimeError(f"the prefix node of page {child.page} is misplaced")
                if node.parent is not None and (
                    self.pool.is_idle(node.page) and not self.pool.is_idle(child.page)
                ):
                    raise RuntimeError(f"page {child.page} is in use below the idle {node.page}")
                stack.append(child)
        num_known = sum(node is not None for node in self._nodes)
        if not num_reached == num_known == self.num_cached:
            raise RuntimeError(
                f"{num_reached} nodes reached, {num_known} known, {self.num_cached} counted"
            )
        queued = set(self._leaves)
        for page, leaf in enumerate(self._nodes):
            if (
                leaf is not None
                and self._is_evictable(leaf)
                and (leaf.last_used, page) not in queued
            ):
                raise RuntimeError(f"page {page} can never be evicted")

    def _is_evictable(self, node: PrefixNode) -> bool:
        return not node.children and self.pool.is_idle(node.page)

    def _forget(self, page: int) -> None:
        self._nodes[page] = None
        self.pool.unwatch(page)

    def _touch(self, page: int) -> None:
        """Notes a page that only the tree holds any more; called by the pool."""
        node = self._nodes[page]
        assert node is not None
        self._clock += 1
        node.last_used = self._clock
        if not node.children:
            heapq.heappush(self._leaves, (node.last_used, page))
            if len(self._leaves) > 64 + 2 * self.num_cached:
                self._leaves = [
                    (node.last_used, node.page)
                    for node in self._nodes
                    if node is not None and self._is_evictable(node)
                ]
                heapq.heapify(self._leaves)
