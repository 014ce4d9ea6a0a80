"""Looking for what was committed among prepared outcomes, against plain Python: by torch, and by
the kernel on a GPU or interpreted.
"""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_service.steps import outcomes as by_torch
from draft_service.steps.hand_on import HandedOn
from draft_service.steps.outcomes import ALTERNATIVES, Outcomes
from draft_service.steps.records import STEP
from testing.triton_device import DEVICE, needs_triton

SLOTS, VOCAB, ROWS_OF_TREES = 6, 5, 9
SPARE = ROWS_OF_TREES - 1


@pytest.fixture(params=["torch", pytest.param("triton", marks=[needs_triton, pytest.mark.gpu])])
def code(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        return SimpleNamespace(select=by_torch.select, device=torch.device("cpu"))
    from draft_service.steps import outcome_kernels

    return SimpleNamespace(select=outcome_kernels.select, device=DEVICE)


def expected_chain(
    prepared: dict[str, Any], slot: int, start: int, committed: Sequence[int]
) -> list[int] | None:
    """Returns the chain prepared for what was committed; None where there is none."""
    if prepared["num_keys"][slot] != start or not committed:
        return None
    *accepted, end = committed
    chain = prepared["verified"][slot]
    for outcome, last in enumerate(prepared["ends"][slot]):
        count = outcome // ALTERNATIVES
        if accepted == chain[:count] and end == last:
            found: list[int] = prepared["chains"][slot][outcome]
            return found
    return None


@pytest.mark.parametrize("length", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 2])
def test_what_was_committed_is_found(code: Any, batch: int, length: int) -> None:
    rng, rows, device = random.Random(length + 7 * batch), length + 1, code.device
    num_outcomes = (length + 1) * ALTERNATIVES
    seen = {"hit": 0, "miss": 0, "part": 0, "none": 0}

    def draw(*shape: int) -> Any:
        if len(shape) > 1:
            return [draw(*shape[1:]) for _ in range(shape[0])]
        return [rng.randrange(VOCAB) for _ in range(shape[0])]

    def words(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    for _ in range(60):
        prepared = {
            "num_keys": [rng.choice([-1, 8, 8, 8]) for _ in range(SLOTS + 1)],
            "verified": draw(SLOTS + 1, length),
            "ends": draw(SLOTS + 1, num_outcomes),
            "chains": draw(SLOTS + 1, num_outcomes, length),
        }
        outcomes = Outcomes.empty(SLOTS + 1, batch, length, device)
        for name, values in prepared.items():
            getattr(outcomes, name).copy_(words(values))
        num_sequences = rng.randint(1, batch)
        slots = [*rng.sample(range(SLOTS), num_sequences), *[SLOTS] * (batch - num_sequences)]
        trees_of = [*rng.sample(range(SPARE), num_sequences), *[SPARE] * (batch - num_sequences)]
        has_no_step = rng.random() < 0.1
        committed = [
            [
                *prepared["verified"][slot][: (count := rng.randrange(rows))],
                rng.choice(prepared["ends"][slot][count * ALTERNATIVES :][:ALTERNATIVES]),
            ]
            if rng.random() < 0.7
            else draw(rng.randrange(rows + 1))
            for slot in slots
        ]
        records = torch.zeros(batch, STEP.size + 2 * rows, dtype=torch.int32)
        records[:, STEP["slot"]] = torch.tensor(slots)
        records[:, STEP["row"]] = torch.tensor(trees_of)
        records[:num_sequences, STEP["step"]] = 0 if has_no_step else 33
        for index in range(num_sequences, batch):
            committed[index] = []
        padded = [[*tokens, *[-9] * (rows - len(tokens))] for tokens in committed]
        plan: Any = SimpleNamespace(
            tokens=words(padded, torch.int64).flatten(),
            start=words([8] * batch),
            num_rows=words([len(tokens) for tokens in committed]),
        )
        before = torch.full((ROWS_OF_TREES, 2, length), -7, dtype=torch.int32, device=device)
        handed_on = HandedOn(words([0]), before.clone(), 0, words([32]))
        code.select(records.to(device), plan, handed_on, outcomes)

        chains = [
            None if has_no_step else expected_chain(prepared, *each)
            for each in zip(slots, [8] * batch, committed, strict=True)
        ][:num_sequences]
        trees = before.clone()
        for row, chain in zip(trees_of, chains, strict=False):
            if chain is not None:
                trees[row] = words([chain, list(range(-1, length - 1))])
        assert torch.equal(handed_on.trees[:SPARE], trees[:SPARE])
        assert outcomes.is_hit[:num_sequences].tolist() == [chain is not None for chain in chains]
        for index, chain in enumerate(chains):
            assert chain is None or outcomes.found[index].tolist() == chain
        are_prepared = not has_no_step and all(
            prepared["num_keys"][slot] == 8 for slot in slots[:num_sequences]
        )
        is_over = are_prepared and None not in chains
        assert handed_on.drafted.tolist() == [33 if is_over else 32]
        step = 0 if has_no_step else 33 if is_over else -33
        counts = [int(is_over), int(are_prepared and not is_over)]
        assert outcomes.report.tolist() == [*counts, step]
        num_hits = sum(chain is not None for chain in chains)
        seen["hit" if is_over else "part" if num_hits else "miss" if are_prepared else "none"] += 1
    assert min(seen["hit"], seen["miss"], seen["none"]) > 3
    assert batch == 1 or seen["part"] > 3


def test_padding_alone_is_no_step(code: Any) -> None:
    outcomes = Outcomes.empty(3, 1, 2, code.device)
    outcomes.num_keys.fill_(0)
    records = torch.zeros(1, STEP.size + 6, dtype=torch.int32, device=code.device)
    records[:, STEP["slot"]] = 2
    zeros = [torch.zeros(n, dtype=torch.int32, device=code.device) for n in (3, 1, 1)]
    plan: Any = SimpleNamespace(tokens=zeros[0].long(), start=zeros[1], num_rows=zeros[2])
    trees = torch.zeros(2, 2, 2, dtype=torch.int32, device=code.device)
    drafted = torch.ones(1, dtype=torch.int32, device=code.device)
    handed_on = HandedOn(zeros[0], trees, 0, drafted)
    code.select(records, plan, handed_on, outcomes)
    assert outcomes.report.tolist() == [0, 0, 0]
    assert drafted.tolist() == [1]
