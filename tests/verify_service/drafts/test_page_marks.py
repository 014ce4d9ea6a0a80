"""Tests when a page counts as filled by the draft."""

from verify_service.drafts.page_marks import DraftMarks
from verify_service.scheduler.page_pool import PagePool


def make():
    pool = PagePool(8, 2)
    pages = pool.allocate(3)
    marks = DraftMarks(pool)
    for page in pages:
        marks.mark(page)
    return pool, pages, marks


def test_marked_pages_are_valid():
    pool, pages, marks = make()
    assert marks.valid_prefix(pages) == 3
    assert marks.valid_prefix(pages[:2]) == 2
    assert marks.valid_prefix([]) == 0
    assert DraftMarks(pool).valid_prefix(pages) == 0


def test_a_hole_ends_the_prefix():
    _, pages, marks = make()
    marks.clear(pages[1])
    assert marks.valid_prefix(pages) == 1


def test_a_page_allocated_anew_has_no_mark():
    pool, pages, marks = make()
    pool.release(pages)
    assert pool.allocate(3) == pages
    assert marks.valid_prefix(pages) == 0
