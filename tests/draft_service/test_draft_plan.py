"""A draft step's plan and trees on the device, against plain Python: by torch, and by kernels
on a GPU or interpreted.
"""

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from draft_service.steps import hand_on, plan, uploads
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.plan import BlockRows, DraftPlan, PlanInputs
from draft_service.steps.records import STEP, DraftShape
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.sampling.columns import FLOATS, SAMPLING
from foredraft.types import SamplingParams
from testing.triton_device import DEVICE, needs_triton

BATCH, SLOTS, PAGE, MAX_PAGES, NUM_PAGES = 7, 9, 4, 300, 50
DUMP, FIRST_HIDDEN = 777, 1000
MAX_KEYS = MAX_PAGES * PAGE


class Torch:
    """The functions of plain torch."""

    fill = staticmethod(plan.fill)
    begin_block = staticmethod(plan.begin_block)
    hand_on_trees = staticmethod(hand_on.hand_on_trees)
    apply_updates = staticmethod(uploads.apply_updates)
    device = torch.device("cpu")


@pytest.fixture(params=["torch", pytest.param("triton", marks=[needs_triton, pytest.mark.gpu])])
def code(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return Torch
    from draft_service.steps import kernels

    on_device = ModuleType("kernels")
    on_device.__dict__.update(kernels.__dict__, device=DEVICE)
    return on_device


def words(tensor: Any, device: torch.device) -> torch.Tensor:
    return torch.tensor(tensor, dtype=torch.int32, device=device)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 7])
@pytest.mark.parametrize(("num_steps", "topk"), [(1, 1), (3, 1), (4, 3), (2, 8)])
def test_a_plan(code: Any, num_rows: int, num_steps: int, topk: int) -> None:
    rng = random.Random(num_rows + 10 * num_steps)
    shape = DraftShape(
        num_steps=num_steps,
        topk=topk,
        num_nodes=4,
        num_rows=num_rows,
        max_slots=SLOTS,
        max_pages=MAX_PAGES,
        vocab=100,
        feature_size=0,
        shift=num_rows % 2,
    )
    kv = PagedKV(1, NUM_PAGES, PAGE, 1, 2, torch.float32, code.device)
    all_keys = [rng.randrange(MAX_KEYS - 20) for _ in range(SLOTS + 1)]
    tables = [[rng.randrange(NUM_PAGES) for _ in range(MAX_PAGES)] for _ in range(SLOTS + 1)]
    accepted = [[rng.randrange(-9, 99) for _ in range(1 + num_rows)] for _ in range(BATCH + 1)]
    for row in accepted:
        row[0] = rng.randrange(num_rows + 1)
    accepted[2][0], accepted[4][0] = 10**9, -5
    records = [
        [rng.randrange(1, 50) for _ in range(STEP.size + 2 * num_rows)] for _ in range(BATCH)
    ]
    rows = rng.sample(range(BATCH), BATCH)
    samplings = []
    for i, record in enumerate(records):
        record[STEP["slot"]] = [*range(0, 2 * BATCH, 2)][i] % SLOTS if i < BATCH - 1 else SLOTS
        record[STEP["row"]], record[STEP["valid_from"]] = rows[i], rng.randrange(60)
        record[STEP["num_rows"]] = rng.randrange(num_rows + 1) if i % 2 else -1
        record[STEP["start"]] = -1 if i % 4 == 0 else rng.randrange(MAX_KEYS - num_rows)
        sampling = SamplingParams(
            temperature=0.25 * i, top_p=0.5, min_p=0.125, top_k=i - 1, seed=rng.randrange(2**64)
        )
        packed = SAMPLING.pack([sampling]).view(np.int32).tolist()
        record[STEP["temperature"] : STEP["temperature"] + len(packed)] = packed
        samplings.append(sampling)
    records[2][STEP["start"]], records[1][STEP["num_rows"]] = MAX_KEYS - 1, 0
    nothing = torch.zeros(0)  # a plan needs no trees
    inputs = PlanInputs(
        words(tables, code.device),
        words(all_keys, code.device),
        HandedOn(words(accepted, code.device), nothing, FIRST_HIDDEN, nothing),
        DUMP,
    )
    plan = DraftPlan.empty(shape, kv, BATCH)
    code.fill(plan, shape, kv, words(records, code.device), inputs)
    per_slot = shape.scratch_pages(PAGE)
    level_slots = plan.level_slots.view(num_steps - 1, BATCH, topk).tolist()
    level_positions = plan.level_positions.view(num_steps - 1, BATCH, topk).tolist()
    for i, (record, sampling) in enumerate(zip(records, samplings, strict=True)):
        slot, row, start, count = (
            record[STEP["slot"]],
            record[STEP["row"]],
            record[STEP["start"]],
            record[STEP["num_rows"]],
        )
        if start < 0:
            start = all_keys[slot]
        tokens = record[STEP.size : STEP.size + num_rows]
        hidden_rows = record[STEP.size + num_rows :]
        if count < 0:
            count = min(max(accepted[row][0], 0), num_rows, MAX_KEYS - start)
            tokens = accepted[row][1 : 1 + count] + [0] * (num_rows - count)
            hidden_rows = list(
                range(FIRST_HIDDEN + row * num_rows, FIRST_HIDDEN + (row + 1) * num_rows)
            )
        num_keys = start + count
        pages = tables[slot][: -(-num_keys // PAGE)]
        scratch = [NUM_PAGES + slot * per_slot + page for page in range(per_slot)]

        def place(key: int, pages: list[int] = pages + scratch) -> int:
            return pages[key // PAGE] * PAGE + key % PAGE

        part = slice(i * num_rows, (i + 1) * num_rows)
        assert plan.tokens[part].tolist() == tokens
        assert plan.hidden_rows[part].tolist() == hidden_rows
        assert plan.positions[part].tolist() == list(range(start, start + num_rows))
        expected = [place(key) for key in range(start, num_keys)]
        assert plan.slots[part].tolist() == expected + [DUMP] * (num_rows - count)
        assert plan.last[i] == i * num_rows + max(count - 1, 0)
        assert (plan.start[i], plan.num_rows[i]) == (start, count)
        assert plan.prefix_start[i] == min(record[STEP["valid_from"]], start)
        table = plan.tables[i].tolist()
        assert table[: len(pages) + per_slot] == (pages + scratch)
        assert plan.num_keys[i] == inputs.num_keys[slot] == num_keys
        assert plan.num_beams[i] == (topk if count else 0)
        assert plan.valid_from[i] == min(record[STEP["valid_from"]], num_keys)
        for level in range(num_steps - 1):
            first = num_keys + level * topk
            assert plan.level_first[level, i] == first
            assert level_positions[level][i] == [num_keys + level] * topk
            assert level_slots[level][i] == [place(first + beam) for beam in range(topk)]
            tail = plan.tail_positions[i, level * topk : (level + 1) * topk].tolist()
            assert tail == [num_keys + level] * topk
        assert plan.floats[:, i].tolist() == [getattr(sampling, name) for name in FLOATS]
        assert plan.top_k[i] == sampling.top_k
        assert int(plan.seed[i]) % 2**64 == sampling.seed
        assert plan.position[i] == num_keys + shape.shift
    assert all(getattr(plan, name).is_contiguous() for name in DraftPlan.__slots__)


@pytest.mark.parametrize("has_newest", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
def test_rows_of_a_block(code: Any, num_rows: int, has_newest: bool) -> None:
    shape = DraftShape(
        num_steps=num_rows + 1,
        topk=1,
        num_nodes=4,
        num_rows=3,
        max_slots=SLOTS,
        max_pages=MAX_PAGES,
        vocab=10,
        feature_size=0,
        is_windowed=False,
    )
    kv = PagedKV(1, NUM_PAGES, PAGE, 1, 2, torch.float32, code.device)
    made = DraftPlan.empty(shape, kv, BATCH)
    generator = torch.Generator().manual_seed(num_rows)
    for tensor in (made.tokens, made.level_positions, made.level_slots):
        tensor.copy_(torch.randint(2**40, tensor.shape, generator=generator))
    last = [3 * i + i % 3 for i in range(BATCH)]
    made.last.copy_(torch.tensor(last))
    made.num_beams[2:] = 1
    rows = BlockRows.empty(BATCH, num_rows, torch.device(code.device))
    code.begin_block(made, rows, 99, has_newest)
    for i in range(BATCH):
        own = slice(i * num_rows, (i + 1) * num_rows)
        expected = [99] * num_rows
        if has_newest:
            expected[0] = int(made.tokens[last[i]])
        assert rows.tokens[own].tolist() == expected
        assert rows.positions[own].tolist() == made.level_positions[:, i].tolist()
        assert rows.slots[own].tolist() == made.level_slots[:, i].tolist()
        assert rows.num_rows[i] == (num_rows if i >= 2 else 0)
        assert rows.first_row[i] == i * num_rows
    assert rows.whole_mask.all()
    assert torch.equal(
        rows.causal_mask[-num_rows:].cpu(), torch.ones(num_rows, num_rows).tril() > 0
    )


@pytest.mark.parametrize("num_nodes", [1, 3, 8, 31])
def test_trees_go_to_their_rows(code: Any, num_nodes: int) -> None:
    rng = random.Random(num_nodes)
    rows = rng.sample(range(9), BATCH)
    records = torch.zeros(BATCH, STEP.size + 2, dtype=torch.int32, device=code.device)
    records[:, STEP["row"]] = words(rows, code.device)
    results = torch.randint(0, 99, (BATCH, 2, num_nodes), dtype=torch.int32)
    expected = [[[-7] * num_nodes] * 2 for _ in range(9)]
    for i, row in enumerate(rows):
        size = rng.randrange(num_nodes + 1)
        results[i, 0, size:] = -1
        tokens, parents = results[i].tolist()
        expected[row] = [tokens, parents[:size] + [-2] * (num_nodes - size)]
    trees = torch.full((9, 2, num_nodes), -7, dtype=torch.int32, device=code.device)
    code.hand_on_trees(records, results.to(code.device), trees)
    assert trees.tolist() == expected


def test_page_updates(code: Any) -> None:
    rng = random.Random(1)
    tables = [[0] * 20 for _ in range(SLOTS)]
    entries = rng.sample(range(SLOTS * 20), 150)
    updates = [[], [], []]  # type: ignore[var-annotated]
    for page, entry in enumerate(entries, 1):
        for column, value in zip(updates, (entry // 20, entry % 20, page), strict=True):
            column.append(value)
        tables[entry // 20][entry % 20] = page
    found = torch.zeros(SLOTS, 20, dtype=torch.int32, device=code.device)
    code.apply_updates(words(updates, code.device), found)
    assert found.tolist() == tables
