"""A forward that returns some rows alone has the bits of one that returns all."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.attention import base
from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models import decoder
from foredraft.models.loader import load_model
from foredraft.parallel.group import Group, SingleRank
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree
from testing.checkpoints import ARCHITECTURES, make_checkpoint
from testing.drawn_rows import drawn_rows, seen

CPU = torch.device("cpu")
PAGE_SIZE = 4
PROMPTS = [
    SequenceRows.chunk([1, 2, 3], 0, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 9], "none"),
    SequenceRows.chunk([4, 5, 6], 3, [5, 3, 5, 8, 9, 7], "last"),
    SequenceRows.chunk([7, 8], 0, [9, 3, 2, 3, 8, 4], "last"),
]
TREE = SequenceRows.tree([9, 10, 11], 5, 4, DraftTree((7, 8, 9, 3), (-1, -1, 0, 1)))
BATCHES = {
    "prompts and a tree": ([TREE, *PROMPTS], 7, 29),
    "prompts": (PROMPTS, 2, 24),
    "the beginning of a prompt": (PROMPTS[:1], 0, 12),
}


class Noting(SingleRank):
    """A rank that notes the rows of each sum over the ranks, in halves or not."""

    begun: ClassVar[list[int]] = []
    are_halved = False

    def halves(self, dtype: torch.dtype) -> tuple[Group, Group] | None:
        return (self, self) if self.are_halved else None

    def begin_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.append(len(x))
        return x


class Halving(Noting):
    are_halved = True


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.mark.parametrize("group", [Noting(), Halving()])
@pytest.mark.parametrize("name", BATCHES)
def test_bits_are_those_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, path: Path, name: str, group: Noting
) -> None:
    monkeypatch.setattr(decoder, "HALVED_PRODUCTS", 1)
    monkeypatch.setattr(base, "WORTH_PICKING", 1)
    model = load_model(path, torch.float32, group=group)
    config, (rows, num_wanted, num_rows) = model.config, BATCHES[name]

    def run(**options: bool) -> tuple[decoder.ModelOutput, torch.Tensor]:
        heads = model.num_kv_heads
        kv = PagedKV.for_model(config, 16, PAGE_SIZE, torch.float32, CPU, 0, None, heads)
        kv.data.normal_(generator=torch.Generator().manual_seed(1))
        output = ModelRunner(model, kv, CpuAttention()).forward(rows, (0, 1), **options)
        return output, kv.data

    every, data = run()
    assert every.hidden.shape == (num_rows, config.hidden_size)
    group.begun.clear()
    some, same_data = run(all_hidden=False)
    assert torch.equal(some.logits, every.logits)
    assert torch.equal(same_data, data)
    assert all(map(torch.equal, some.captured, every.captured))
    index = build_batch(rows, PagedKV(1, 16, PAGE_SIZE, 1, 2, torch.float32, CPU)).logit_rows
    assert index is not None
    assert torch.equal(some.hidden, every.hidden[index])
    assert len(some.hidden) == num_wanted
    # Two sums of each layer; the last layer's are of the wanted rows, or of one for none.
    sums = 2 * (2 if group.are_halved else 1)
    assert sum(group.begun[:sums]) == 2 * num_rows
    assert 2 * num_wanted <= sum(group.begun[-sums:]) <= 2 * max(num_wanted + 1, 2)


def test_all_rows_are_computed_where_they_are_captured(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.setattr(base, "WORTH_PICKING", 1)
    model = load_model(path, torch.float32)
    kv = PagedKV.for_model(model.config, 16, PAGE_SIZE, torch.float32, CPU)
    layers = (model.config.num_layers,)
    runner = ModelRunner(model, kv, CpuAttention())
    output = runner.forward(PROMPTS, layers, all_hidden=False)
    assert len(output.captured[0]) == len(output.hidden) == 24
    runner.trial(PROMPTS, layers, all_hidden=False)()


@pytest.mark.parametrize(
    ("num_rows", "num_ends", "picks"),
    [
        (64, 1, False),
        (65, 1, True),
        (2, 64, True),
        (2, 65, True),
        (2, 1024, True),
        (2, 1025, False),
    ],
)
def test_few_rows_are_picked_where_many_are_spared(
    num_rows: int, num_ends: int, picks: bool
) -> None:
    kv = PagedKV(1, 200, PAGE_SIZE, 1, 2, torch.float32, CPU)
    rows = [SequenceRows.chunk(list(range(20)), 0, [5] * num_rows, "last") for _ in range(num_ends)]
    assert build_batch(rows, kv).wants_few is picks


@given(st.data())
def test_wanted_rows_see_what_they_saw(data: st.DataObject) -> None:
    kv = PagedKV(1, 24, PAGE_SIZE, 1, 2, torch.float32, CPU)
    batch = build_batch(drawn_rows(data), kv)
    parts = [(batch, 0)]
    if data.draw(st.booleans()) and batch.num_rows > 1:
        first, second = batch.halves(data.draw(st.integers(1, batch.num_rows - 1)))
        parts = [(first, 0), (second, first.num_rows)]
    if batch.logit_rows is None:
        return
    found: dict[int, tuple[object, ...]] = {}
    for part, begin in parts:
        if not part.spans:  # the first half ends before a tree
            continue
        assert part.logit_rows is not None
        num_wanted = len(part.logit_rows)
        least = num_wanted + data.draw(st.integers(0, 5))
        index, wanted = part.wanted(least)
        assert wanted.num_rows == len(index) == sum(span.num_rows for span in wanted.spans)
        assert torch.equal(index[:num_wanted], part.logit_rows)
        if any(span.can_be_cut for span in part.spans):
            assert len(index) == least
        own, every = seen(wanted), seen(part)
        assert own == {row: every[int(index[row])] for row in range(len(index))}
        found |= {begin + int(index[row]): own[row] for row in range(num_wanted)}
    assert found == {row: seen(batch)[row] for row in batch.logit_rows.tolist()}
