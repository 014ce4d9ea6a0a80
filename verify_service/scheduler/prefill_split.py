"""Whose prompt tokens a step computes, where there are more than a chunk."""

from verify_service.scheduler.page_tables import PageTables
from verify_service.scheduler.request import Sequence


def split_chunk(
    prefilling: list[Sequence], chunk_size: int, tables: PageTables
) -> list[tuple[Sequence, int]]:
    """Shares the chunk: at least half of it to the best-ranked, the rest to the shortest.

    So a short prompt does not wait behind a long one, the long one is slowed to half at most,
    and nobody starves: who stays long enough becomes the best-ranked. What the others leave is
    the best-ranked's too. Sequences about to fill the same page wait for the first of them.

    Args:
        prefilling: Best rank first.
        chunk_size: Tokens of a step.
        tables: Where what others have filled meanwhile is taken over.

    Returns:
        Sequences and how many of their tokens.
    """
    if not prefilling:
        return []
    first, *others = prefilling
    tables.skip_known(first)
    shares: list[tuple[Sequence, int]] = []
    filled = {tables.next_page(first)}
    left = chunk_size - min(first.num_uncomputed, (chunk_size + 1) // 2)
    for seq in sorted(others, key=lambda seq: (-seq.priority, seq.num_uncomputed, seq.arrival)):
        if left == 0:
            break
        tables.skip_known(seq)
        page = tables.next_page(seq)
        num_tokens = _cut(seq, left, tables.page_size)
        # Its newest token it computes itself, so there must be more than the page to wait for.
        has_more = seq.num_uncomputed > tables.page_size
        if num_tokens == 0 or (has_more and page is not None and page in filled):
            continue
        filled.add(page)
        shares.append((seq, num_tokens))
        left -= num_tokens
    rest = chunk_size - sum(num_tokens for _, num_tokens in shares)
    return [(first, _cut(first, rest, tables.page_size) or rest), *shares]


def _cut(seq: Sequence, limit: int, page_size: int) -> int:
    """Tokens of a chunk of at most `limit`: all that are left, or up to the end of a page."""
    if seq.num_uncomputed <= limit:
        return seq.num_uncomputed
    end = seq.num_computed + limit
    return max(0, end - end % page_size - seq.num_computed)
