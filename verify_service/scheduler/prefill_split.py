"""Distributes a chunk of prompt tokens to the sequences that have prompts to compute."""

from verify_service.scheduler.page_tables import PageTables
from verify_service.scheduler.request import Sequence


def split_chunk(
    prefilling: list[Sequence], chunk_size: int, tables: PageTables
) -> list[tuple[Sequence, int]]:
    """Splits the chunk: at least half of it to the best-ranked sequence, the rest to the
    shortest.

    So a short prompt does not wait behind a long one, a long one is slowed to half at most, and
    none starves: a sequence that stays long enough becomes the best-ranked. The best-ranked also
    gets what the others leave. Sequences about to fill the same page wait for the first of them.

    Args:
        prefilling: Sequences with prompts to compute, best rank first.
        chunk_size: Number of prompt tokens of the step.
        tables: Page tables; sequences take over pages that others have filled meanwhile.

    Returns:
        Sequences and the number of their tokens to compute.
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
    """Returns the number of tokens of a chunk of at most `limit`: all that are left, or up to
    the end of a page.
    """
    if seq.num_uncomputed <= limit:
        return seq.num_uncomputed
    end = seq.num_computed + limit
    return max(0, end - end % page_size - seq.num_computed)
