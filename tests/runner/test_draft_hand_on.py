"""Records and trees that are completed on the device, against plain Python: by torch, and by kernels on a GPU or interpreted."""

import random
from collections.abc import Callable

import pytest
import torch

from foredraft.runner import draft_hand_on
from foredraft.runner.draft_batches import HEADER, NUM_ROWS, POSITION, ROW, SLOT, START, DraftShape
from foredraft.runner.draft_hand_on import HandedOn
from tests.support.triton_device import DEVICE, needs_triton

Pair = tuple[Callable[..., None], Callable[..., None], torch.device]
BATCH, SLOTS, MAX_KEYS = 7, 9, 64


@pytest.fixture(params=["torch", pytest.param("triton", marks=[needs_triton, pytest.mark.gpu])])
def code(request: pytest.FixtureRequest) -> Pair:
    if request.param == "torch":
        return draft_hand_on.resolve, draft_hand_on.hand_on_trees, torch.device("cpu")
    from foredraft.runner import draft_kernels

    return draft_kernels.resolve, draft_kernels.hand_on_trees, torch.device(DEVICE)


def shape_of(num_rows: int, num_nodes: int, shift: int) -> DraftShape:
    return DraftShape(
        num_steps=num_rows - 1,
        topk=2,
        num_nodes=num_nodes,
        num_rows=num_rows,
        max_slots=SLOTS,
        max_pages=16,
        vocab=100,
        feature_size=0,
        shift=shift,
    )


@pytest.mark.parametrize("num_rows", [1, 2, 4, 7])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_the_host_did_not_know(code: Pair, num_rows: int, shift: int) -> None:
    resolve, _, device = code
    rng = random.Random(num_rows)
    shape = shape_of(num_rows, 4, shift)
    num_keys = [rng.randrange(MAX_KEYS) for _ in range(SLOTS + 1)]
    accepted = [[rng.randrange(-9, 99) for _ in range(1 + num_rows)] for _ in range(BATCH + 1)]
    for row in accepted:
        row[0] = rng.randrange(num_rows + 1)
    accepted[2][0], accepted[3][0] = 10**9, -5
    width = HEADER + 2 * num_rows
    records = [[rng.randrange(1, 50) for _ in range(width)] for _ in range(BATCH)]
    slots = rng.sample(range(SLOTS), BATCH - 1)
    for i, record in enumerate(records):
        record[SLOT] = [*slots, SLOTS][i]
        record[ROW] = rng.sample(range(BATCH), BATCH)[i] if i % 3 else i
        record[NUM_ROWS] = rng.randrange(num_rows + 1) if i % 2 else -1
        record[START] = -1 if i % 4 == 0 else rng.randrange(MAX_KEYS - num_rows)
    records[0][START] = MAX_KEYS - 1
    found, keys = torch.tensor(records, device=device), torch.tensor(num_keys, device=device)
    handed_on = HandedOn(
        torch.tensor(accepted, dtype=torch.int32, device=device),
        torch.zeros(BATCH + 1, 2, 4, dtype=torch.int32, device=device),
        first_place=1000,
    )
    found, keys = found.to(torch.int32), keys.to(torch.int32)
    resolve(shape, found, keys, handed_on, MAX_KEYS)
    for record in records:
        slot, row = record[SLOT], record[ROW]
        if record[START] < 0:
            record[START] = num_keys[slot]
        if record[NUM_ROWS] < 0:
            count = min(max(accepted[row][0], 0), num_rows, MAX_KEYS - record[START])
            record[NUM_ROWS] = count
            words = accepted[row][1 : 1 + count] + [0] * (num_rows - count)
            record[HEADER : HEADER + num_rows] = words
            first = 1000 + row * num_rows
            record[HEADER + num_rows :] = range(first, first + num_rows)
        record[POSITION] = record[START] + record[NUM_ROWS] + shift
        num_keys[slot] = record[START] + record[NUM_ROWS]
    assert found.tolist() == records
    assert keys.tolist() == num_keys


@pytest.mark.parametrize("num_nodes", [1, 3, 8, 31])
def test_trees_go_to_their_rows(code: Pair, num_nodes: int) -> None:
    _, hand_on_trees, device = code
    rng = random.Random(num_nodes)
    rows = rng.sample(range(9), BATCH)
    records = torch.zeros(BATCH, HEADER + 2, dtype=torch.int32, device=device)
    records[:, ROW] = torch.tensor(rows, dtype=torch.int32)
    results = torch.randint(0, 99, (BATCH, 2, num_nodes), dtype=torch.int32)
    expected = [[[-7] * num_nodes] * 2 for _ in range(9)]
    for i, row in enumerate(rows):
        size = rng.randrange(num_nodes + 1)
        results[i, 0, size:] = -1
        tokens, parents = results[i].tolist()
        expected[row] = [tokens, parents[:size] + [-2] * (num_nodes - size)]
    trees = torch.full((9, 2, num_nodes), -7, dtype=torch.int32, device=device)
    hand_on_trees(records, results.to(device), trees)
    assert trees.tolist() == expected
