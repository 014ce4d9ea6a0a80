"""Page tables of sequences: how they grow, shrink, and share pages through the prefix tree."""

from collections.abc import Callable, Iterable

from verify_service.scheduler.page_pool import PagePool
from verify_service.scheduler.prefix_tree import PrefixNode, PrefixTree, page_keys
from verify_service.scheduler.request import Sequence

UsablePrefix = Callable[[Sequence, list[int]], int]


class PageTables:
    """Makes every change of `Sequence.pages`, `num_computed`, `num_cached` and `node`.

    A running sequence stands on a node of the prefix tree: the first `node.depth` pages of its
    table are that node's path, the others are its own.

    Args:
        pool: Page numbers and their holders.
        prefix_tree: Prefix tree over the same pool; None caches and shares nothing.
        usable_prefix: Returns, for a sequence and its pages from the prefix tree, how many of their
            tokens need not be computed again. The others are, onto the same pages: so a draft gets
            back state that it lost.
        look_ahead: Tokens after a page (0 or 1) that must agree too for it to be shared: the last
            entry of an EAGLE-family draft's page depends on the token after it.
        longest_shared: Maximum number of tokens of prompts that share pages, because keys of longer
            ones depend on their length; None without a limit.

    Attributes:
        pool: The argument of this name.
        prefix_tree: The argument of this name, or a tree that stays empty.
    """

    def __init__(
        self,
        pool: PagePool,
        prefix_tree: PrefixTree | None,
        usable_prefix: UsablePrefix | None = None,
        look_ahead: int = 0,
        longest_shared: int | None = None,
    ) -> None:
        self.pool = pool
        self.prefix_tree = prefix_tree or PrefixTree(pool)
        self._share = prefix_tree is not None
        self._usable_prefix = usable_prefix
        self._look_ahead = look_ahead
        self._longest_shared = longest_shared
        # Evicting some more at once leaves runs of free pages instead of single ones.
        self._eviction_batch = min(pool.num_pages // 32, 64)

    @property
    def page_size(self) -> int:
        """Number of tokens of a page."""
        return self.pool.page_size

    def find_prefix(self, seq: Sequence) -> PrefixNode:
        """Returns the deepest known node that leaves at least one token to compute."""
        if not self._shares(seq):
            return self.prefix_tree.root
        self._hash_pages(seq)
        last = len(seq.tokens) - 1
        limit = (last if seq.score_from is None else seq.score_from) // self.pool.page_size
        node = seq.node or self.prefix_tree.root
        seq.node = self.prefix_tree.deepen(node, seq.page_keys, limit)
        return seq.node

    def take_prefix(self, seq: Sequence, node: PrefixNode) -> None:
        """Appends the pages down to `node` to a table whose pages are all full."""
        num_full = seq.num_computed // self.pool.page_size
        known = self.prefix_tree.pages(node, num_full)
        self.pool.retain(known)
        self.truncate(seq, num_full)
        seq.pages += known
        seq.node = node
        usable = node.depth * self.pool.page_size
        if self._usable_prefix is not None and known:
            usable = min(usable, self._usable_prefix(seq, seq.pages))
        if seq.num_preemptions == 0:
            seq.num_cached += max(0, usable - seq.num_computed)
        seq.num_computed = max(seq.num_computed, usable)

    def skip_known(self, seq: Sequence) -> None:
        """Takes over pages that another sequence has filled since this one was admitted."""
        node = seq.node
        if node is not None and node.depth * self.pool.page_size == seq.num_computed:
            deeper = self.find_prefix(seq)
            if deeper is not node:
                self.take_prefix(seq, deeper)

    def next_page(self, seq: Sequence) -> tuple[int, bytes] | None:
        """Returns the identity of the full page that the sequence fills next; None if it is not
        shared.
        """
        node = seq.node
        if node is None or node.depth * self.pool.page_size != seq.num_computed:
            return None
        if node.depth >= len(seq.page_keys):
            return None
        return id(node), seq.page_keys[node.depth]

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Counts `num_tokens` more tokens as computed, and shares the pages that they filled."""
        seq.num_computed += num_tokens
        node = seq.node
        num_full = seq.num_computed // self.pool.page_size
        if node is None or node.depth >= num_full or not self._shares(seq):
            return
        self._hash_pages(seq)
        while node.depth < num_full:
            i = node.depth
            node, page = self.prefix_tree.extend(node, seq.page_keys[i], seq.pages[i])
            if page != seq.pages[i]:
                seq.pages[i] = page
                seq.pages_changed(i)
        seq.node = node

    def grow(self, seq: Sequence, num_keys: int) -> int:
        """Lengthens the table towards `num_keys`, as far as free and idle pages allow.

        Returns:
            Keys that the table covers.
        """
        missing = self.pool.pages_for(num_keys) - len(seq.pages)
        if missing > 0:
            lacking = missing - self.pool.num_free
            if lacking > 0:
                self.prefix_tree.evict(max(lacking, self._eviction_batch))
            near = seq.pages[-1] if seq.pages else None
            seq.pages += self.pool.allocate(min(missing, self.pool.num_free), near)
        return len(seq.pages) * self.pool.page_size

    def grow_all(self, wanted: Iterable[tuple[Sequence, int]]) -> bool:
        """Lengthens tables to the given numbers of keys.

        Changes none and returns False where pages are short for all.
        """
        missing, growing = 0, []
        for seq, num_keys in wanted:
            num_missing = self.pool.pages_for(num_keys) - len(seq.pages)
            if num_missing > 0:
                missing += num_missing
                growing.append((seq, num_keys))
        if missing > self.pool.num_free + self.pool.num_idle:
            return False
        for seq, num_keys in growing:
            self.grow(seq, num_keys)
        return True

    def truncate(self, seq: Sequence, num_pages: int) -> None:
        """Releases all but the first `num_pages`."""
        if len(seq.pages) > num_pages:
            surplus = seq.pages[num_pages:]
            del seq.pages[num_pages:]
            seq.pages_changed(num_pages)
            # The prefix tree wants pages back deepest first.
            self.pool.release(reversed(surplus))

    def _shares(self, seq: Sequence) -> bool:
        longest = self._longest_shared
        return self._share and (longest is None or seq.num_prompt <= longest)

    def _hash_pages(self, seq: Sequence) -> None:
        size, ahead = self.pool.page_size, self._look_ahead
        if len(seq.page_keys) < (len(seq.tokens) - ahead) // size:
            seq.page_keys += page_keys(seq.tokens, size, len(seq.page_keys), ahead)
