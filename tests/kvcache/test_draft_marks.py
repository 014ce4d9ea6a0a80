"""When a page counts as a draft hit."""

from foredraft.kvcache.draft_marks import DraftMarks
from foredraft.kvcache.page_pool import PagePool

TOKENS = [1, 2, 3, 4, 5, 6, 7]


def make(depends_on_next_token=True):
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    marks = DraftMarks(pool, depends_on_next_token)
    for i, page in enumerate(pages):
        marks.mark(page, epoch=1, next_token=TOKENS[2 * i + 2])
    return pool, pages, marks


def test_valid_under_the_same_tokens_and_epoch():
    _, pages, marks = make()
    assert marks.valid_prefix(pages, TOKENS, epoch=1) == 6
    assert marks.valid_prefix(pages[:2], TOKENS, epoch=1) == 4
    assert marks.valid_prefix(pages, TOKENS, epoch=2) == 0
    assert marks.valid_prefix([], TOKENS, epoch=1) == 0


def test_another_next_token_ends_the_match_one_page_earlier():
    _, pages, marks = make()
    assert marks.valid_prefix(pages, [1, 2, 3, 4, 9], epoch=1) == 2
    assert marks.valid_prefix(pages, [1, 2, 3, 4], epoch=1) == 2  # not known yet
    assert not marks.is_valid(pages[0], 1, None)


def test_some_drafts_do_not_care_for_the_next_token():
    _, pages, marks = make(depends_on_next_token=False)
    assert marks.valid_prefix(pages, [1, 2, 3, 4, 9], epoch=1) == 4
    assert marks.valid_prefix(pages, [1, 2, 3, 4], epoch=1) == 4


def test_a_hole_ends_the_prefix():
    _, pages, marks = make()
    marks.clear(pages[1])
    assert marks.valid_prefix(pages, TOKENS, epoch=1) == 2


def test_a_page_allocated_anew_has_no_mark():
    pool, pages, marks = make()
    pool.release(pages)
    assert pool.allocate(3) == pages
    assert marks.valid_prefix(pages, TOKENS, epoch=1) == 0
