"""When a page counts as a draft hit."""

from verify_service.drafts.page_marks import DraftMarks
from verify_service.scheduler.page_pool import PagePool


def make():
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    marks = DraftMarks(pool)
    for page in pages:
        marks.mark(page, epoch=1)
    return pool, pages, marks


def test_valid_under_the_same_epoch():
    _, pages, marks = make()
    assert marks.valid_prefix(pages, epoch=1) == 3
    assert marks.valid_prefix(pages[:2], epoch=1) == 2
    assert marks.valid_prefix(pages, epoch=2) == 0
    assert marks.valid_prefix([], epoch=1) == 0


def test_a_hole_ends_the_prefix():
    _, pages, marks = make()
    marks.clear(pages[1])
    assert marks.valid_prefix(pages, epoch=1) == 1


def test_a_page_allocated_anew_has_no_mark():
    pool, pages, marks = make()
    pool.release(pages)
    assert pool.allocate(3) == pages
    assert marks.valid_prefix(pages, epoch=1) == 0
