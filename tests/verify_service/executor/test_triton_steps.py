"""The first and the last kernel of a step, against plain Python; on a GPU or interpreted."""

import random

import numpy as np
import pytest
import torch

from foredraft.sampling.columns import FLOATS, SAMPLING
from foredraft.types import SamplingParams
from testing.triton_device import DEVICE, needs_triton
from verify_service.executor.kernels.steps import (
    FILLER,
    Begun,
    Ended,
    begin_step,
    end_step,
    pretend_paths,
    pretended_path,
    sampling_rows,
)
from verify_service.executor.records import STEP

pytestmark = [needs_triton, pytest.mark.gpu]


def on_device(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("has_branches", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
def test_records_say_where_a_step_begins(num_rows, has_branches):
    rng = random.Random(num_rows)
    max_rows, nodes, slots, batch = 8, 6, 5, 4
    state = [[rng.randrange(1000), rng.randrange(1000)] for _ in range(slots)]
    trees = [
        [[rng.randrange(1000) for _ in range(nodes)], [rng.randrange(-3, 9) for _ in range(nodes)]]
        for _ in range(3)
    ]
    trees[1][1][0] = 2**31 - 1
    trees[2][1][:4] = [-1, 0, 1, 0]  # a chain of three, and a branch
    records = [[rng.randrange(50) for _ in range(STEP.size + 2 * max_rows)] for _ in range(batch)]
    for record, slot, committed, tree in zip(
        records, [3, 0, 4, 1], [-1, 17, -1, 0], [2, -1, -1, 1], strict=True
    ):
        record[STEP["slot"]], record[STEP["committed"]], record[STEP["tree"]] = (
            slot,
            committed,
            tree,
        )
    chain = STEP.size + max_rows
    records[1][chain : chain + 4] = [-1, 0, 1, 2]
    tables = [[rng.randrange(100) for _ in range(7)] for _ in range(slots)]
    set_tables = on_device(tables)
    for record, entry, page in zip(records, [0, 6, 3, 2], [8, 0, 1, 100], strict=True):
        record[STEP["entry"]], record[STEP["new_page"]] = entry, page
        if page:
            tables[record[STEP["slot"]]][entry] = page - 1
    begun = begin_step(
        on_device(records),
        max_rows,
        num_rows,
        on_device(state),
        on_device(trees),
        set_tables,
        has_branches,
    )
    assert set_tables.tolist() == tables
    for i, record in enumerate(records):
        is_ahead, tree = record[STEP["committed"]] < 0, record[STEP["tree"]]
        want = (
            state[record[STEP["slot"]]]
            if is_ahead
            else [record[STEP["committed"]], record[STEP.size]]
        )
        assert [int(begun.committed[i]), int(begun.tokens[i, 0])] == want
        assert int(begun.parents[i, 0]) == -1
        for row in range(1, num_rows):
            if tree < 0:
                token, parent = record[STEP.size + row], record[STEP.size + max_rows + row]
            elif row > nodes:
                token, parent = 0, -2
            else:
                token, parent = trees[tree][0][row - 1], trees[tree][1][row - 1]
                # Beyond the numbers there is nothing: no row has such a parent.
                parent = -2 if parent < -1 else parent + 1 if parent < 2**31 - 1 else -(2**31)
            if not has_branches and parent != row - 1:
                parent = -2
            assert [int(begun.tokens[i, row]), int(begun.parents[i, row])] == [token, parent]


@pytest.mark.parametrize(("num_rows", "max_path"), [(1, 1), (1, 4), (4, 4), (8, 4)])
def test_outcomes_are_written_for_host_draft_and_next_step(num_rows, max_path):
    rng = random.Random(num_rows)
    max_rows, batch = 8, 3
    records = [[rng.randrange(5)] * (STEP.size + 2 * max_rows) for _ in range(batch)]
    for record, slot in zip(records, [2, 0, 3], strict=True):
        record[STEP["slot"]] = slot
    lengths = [rng.randrange(1, num_rows + 1) for _ in range(batch)]
    paths = [
        [0, *sorted(rng.sample(range(1, num_rows), n - 1)), *[-1] * (num_rows - n)] for n in lengths
    ]
    emitted = [[rng.randrange(1000) for _ in range(n)] + [-1] * (num_rows - n) for n in lengths]
    tokens = [[rng.randrange(1000) for _ in range(num_rows)] for _ in range(batch)]
    parents = [[rng.randrange(-2, 5) for _ in range(num_rows)] for _ in range(batch)]
    begun = Begun(on_device(tokens), on_device(parents), on_device([7, 8, 9]))
    ended = Ended(
        on_device([[0] * (1 + 4 * max_rows)] * batch),
        on_device([[0, 0]] * 5),
        on_device([[0] * (1 + max_path)] * batch),
        on_device([0] * batch * max_path, torch.int64),
    )
    end_step(
        on_device(records),
        begun,
        on_device(paths),
        on_device(lengths),
        on_device(emitted, torch.int64),
        ended,
    )
    results, index = ended.results.tolist(), ended.index.view(batch, max_path).tolist()
    for i, slot in enumerate([2, 0, 3]):
        n, told = lengths[i], min(lengths[i], max_path)
        assert results[i][0] == n
        for part, want in enumerate((paths[i], emitted[i], tokens[i], parents[i])):
            first = 1 + part * max_rows
            assert results[i][first : first + num_rows] == want
        assert ended.state[slot].tolist() == [7 + i + n, emitted[i][n - 1]]
        assert ended.accepted[i].tolist()[: 1 + told] == [told, *emitted[i][:told]]
        assert index[i][:told] == [i * num_rows + row for row in paths[i][:told]]
        assert all(i * num_rows <= row < (i + 1) * num_rows for row in index[i])


def test_a_step_without_a_token_leaves_one_that_can_be_read():
    """The host reads that there is none; the next step and the draft compute something that nobody
    reads.
    """
    begun = Begun(on_device([[5, 6]]), on_device([[-1, 0]]), on_device([7]))
    ended = Ended(
        on_device([[0] * 9]),
        on_device([[0, 0]] * 2),
        on_device([[0] * 3]),
        on_device([0, 0], torch.int64),
    )
    emitted = on_device([[6, -1]], torch.int64)
    record = on_device([[1] * (STEP.size + 4)])
    end_step(record, begun, on_device([[0, 1]]), on_device([2]), emitted, ended)
    assert ended.results[0, 3:5].tolist() == [6, -1]
    assert ended.state[1].tolist() == [9, 0]
    assert ended.accepted.tolist() == [[2, 6, 0]]


def test_pretended_paths_replace_what_was_walked():
    records = on_device([[0] * (STEP.size + 8)] * 2)
    records[1, STEP["forced"]] = 3
    path, emitted = on_device([[0, 2, -1, -1]] * 2), on_device([[5, 6, -1, -1]] * 2, torch.int64)
    length = on_device([2, 2])
    pretend_paths(records, path, length, emitted)
    assert path.tolist() == [[0, 2, -1, -1], [0, 1, 2, -1]]
    assert emitted.tolist() == [[5, 6, -1, -1], [FILLER, FILLER, FILLER, -1]]
    assert length.tolist() == [2, 3]
    assert pretended_path(4, 3) == [0, 1, 2]


def test_pretended_paths_of_large_trees_lie_apart_behind_the_likeliest_node():
    records = on_device([[0] * (STEP.size + 8)])
    records[0, STEP["forced"]] = 5
    path, emitted = on_device([[-1] * 32]), on_device([[-1] * 32], torch.int64)
    pretend_paths(records, path, on_device([1]), emitted)
    assert path.tolist()[0][:6] == [0, 1, 3, 5, 7, -1]
    assert pretended_path(32, 5) == [0, 1, 3, 5, 7]


@pytest.mark.parametrize(("batch", "num_rows"), [(1, 1), (1, 5), (3, 1), (9, 32)])
def test_rows_get_what_their_records_ask_for(batch, num_rows):
    rng = random.Random(batch)
    asked = [
        SamplingParams(
            temperature=rng.random(),
            top_p=rng.random(),
            min_p=rng.random(),
            top_k=rng.randrange(-1, 2**31),
            seed=rng.getrandbits(64),
        )
        for _ in range(batch)
    ]
    records = torch.zeros(batch, STEP.size + 70, dtype=torch.int32)
    for record, values in zip(records, asked, strict=True):
        packed = SAMPLING.pack([values]).view(np.int32)
        record[STEP["temperature"] : STEP["temperature"] + len(packed)] = torch.from_numpy(packed)
    positions = torch.arange(7, 7 + batch * num_rows)
    got = sampling_rows(records.to(DEVICE), positions.to(DEVICE), True)
    assert got.position.tolist() == (positions + 1).tolist()
    for row in range(batch * num_rows):
        values = asked[row // num_rows]
        floats = [float(getattr(got, name)[row]) for name in FLOATS]
        assert floats == torch.tensor([getattr(values, name) for name in FLOATS]).tolist()
        assert int(got.top_k[row]) == values.top_k
        assert int(got.seed[row]) % 2**64 == values.seed
