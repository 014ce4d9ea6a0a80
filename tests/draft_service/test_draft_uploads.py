"""Uploads of draft steps: blocks go round, and nothing of an earlier step is sent again."""

import random

import torch

from draft_service.steps.records import STEP, DraftShape
from draft_service.steps.uploads import PAGE_UPDATES, Uploads, apply_updates

SLOTS, MAX_PAGES, SPARE = 5, 900, 77
SHAPE = DraftShape(
    num_steps=3,
    topk=1,
    num_nodes=3,
    num_rows=4,
    max_slots=SLOTS,
    max_pages=MAX_PAGES,
    vocab=10,
    feature_size=0,
)


def made(num_blocks: int = 2) -> Uploads:
    return Uploads(SHAPE, 4, SPARE, num_blocks, torch.device("cpu"))


def test_page_updates_of_every_size() -> None:
    """Few, none, more than a block holds, and several for one entry, where the last one
    counts.
    """
    uploads, rng = made(), random.Random(3)
    tables = torch.zeros(SLOTS, MAX_PAGES, dtype=torch.int32)
    for count in (1, 0, 3, 0, 0, 40, PAGE_UPDATES, 5, 2 * PAGE_UPDATES + 9, 0, 1):
        left = count
        while left:
            size = min(left, rng.randrange(1, 60))
            slot, first = rng.randrange(SLOTS), rng.randrange(MAX_PAGES - 60)
            pages = [rng.randrange(10**6) for _ in range(size)]
            uploads.set_pages(slot, first, pages)
            tables[slot, first : first + size] = torch.tensor(pages, dtype=torch.int32)
            left -= size
        uploads.records(1, 1)
        uploads.send(1)
        apply_updates(uploads.updates, uploads.tables)
        uploads.finish()
        assert torch.equal(uploads.tables[:SLOTS], tables)


def test_pages_beyond_the_table_are_left_out() -> None:
    uploads = made()
    uploads.set_pages(1, MAX_PAGES - 1, [5, 6, 7])
    uploads.set_pages(2, MAX_PAGES + 1, [8, 9, 10])
    uploads.records(0, 1)
    uploads.send(1)
    apply_updates(uploads.updates, uploads.tables)
    assert uploads.tables[1, -1] == 5
    assert not uploads.tables[2].any()


def test_a_block_is_left_alone_while_others_are_filled() -> None:
    uploads = made(3)
    filled = []
    for value in range(1, 4):
        records = uploads.records(2, 4)
        records["start"], records["tokens"], records["hidden_rows"] = value, 10 * value, 20 * value
        filled.append(records)
        assert uploads.is_free
    for value, records in enumerate(filled, 1):
        assert (records["start"] == value).all()
        assert (records["tokens"] == 10 * value).all()
        assert (records["hidden_rows"] == 20 * value).all()


def test_padding_belongs_to_nobody() -> None:
    uploads = made()
    for count in (4, 1, 3):
        records = uploads.records(count, 4)
        assert (records["row"] == SPARE).all()
        records["slot"], records["tokens"] = 2, 9
        uploads.send(4)
        sent = uploads.on_device(4)
        assert sent[:count, STEP["slot"]].eq(2).all()
        assert sent[count:, STEP["slot"]].eq(SLOTS).all()
        assert sent[count:, STEP["row"]].eq(SPARE).all()
        assert sent[count:, 1 : STEP["row"]].eq(0).all()
        assert sent[count:, STEP.size :].eq(0).all()
