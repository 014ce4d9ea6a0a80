"""Rows of sequences as one batch, against what each sequence says of its own; and on a GPU, beside
work that is under way.
"""

import random

import pytest
import torch

from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.batch import SequenceRows, build_batch
from testing.triton_device import needs_gpu

PAGE_SIZE = 4


def some_rows(rng: random.Random, num_pages: int) -> list[SequenceRows]:
    """Parts of prompts of any length, with every kind of wanted logits."""
    free, rows = list(range(num_pages)), []
    rng.shuffle(free)
    for _ in range(rng.randint(1, 6)):
        start, count = rng.randint(0, 20), rng.randint(1, 9)
        pages = [free.pop() for _ in range(-(-(start + count) // PAGE_SIZE))]
        tokens = [rng.randrange(1000) for _ in range(count)]
        wanted, reach = rng.choice(["all", "last", "none"]), rng.choice([0, 0, 50])
        rows.append(SequenceRows.chunk(pages, start, tokens, wanted, reach))
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_a_batch_has_the_rows_of_all_sequences(seed: int) -> None:
    rows = some_rows(random.Random(seed), 80)
    batch = build_batch(rows, PagedKV(1, 80, PAGE_SIZE, 1, 8, torch.float32, "cpu"))
    tokens, positions, slots, wanted, reaches = [], [], [], [], []
    for one in rows:
        for i, token in enumerate(one.tokens):
            if one.logits == "all" or (one.logits == "last" and i == len(one.tokens) - 1):
                wanted.append(len(tokens))
            key = one.write_index + i
            tokens.append(token)
            reaches.append(one.reach)
            positions.append(key)
            slots.append(one.pages[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE)
    assert batch.tokens.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    asked = range(len(tokens)) if batch.logit_rows is None else batch.logit_rows.tolist()
    assert list(asked) == wanted
    assert (batch.reaches is not None) == any(reaches)
    assert batch.reaches is None or batch.reaches.tolist() == reaches
    for tensor in (batch.tokens, batch.positions, batch.slots):
        assert tensor.data_ptr() % 16 == 0  # or kernels are compiled for another variant


@pytest.mark.gpu
@needs_gpu
def test_a_batch_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda")
    kv = PagedKV(1, 80, PAGE_SIZE, 1, 8, torch.bfloat16, device)
    rows = some_rows(random.Random(1), 80)
    build_batch(rows, kv)  # pins memory
    torch.cuda.synchronize()
    torch.cuda._sleep(10**10)  # type: ignore[no-untyped-call]
    batch = build_batch(rows, kv)
    is_under_way = not torch.cuda.current_stream().query()
    found = batch.tokens.tolist()
    assert is_under_way
    assert found == [token for one in rows for token in one.tokens]
