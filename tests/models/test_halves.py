"""Forwards whose halves are computed in turns compute what one forward does."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models import decoder
from foredraft.models.loader import load_model
from foredraft.parallel.group import Group, SingleRank
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree
from testing.checkpoints import ARCHITECTURES, make_checkpoint
from testing.cpu_ranks import run_ranks
from testing.drawn_rows import drawn_rows, seen
from verify_service.executor.ranks.host_group import HostGroup

CPU = torch.device("cpu")
PAGE_SIZE = 4
PAGES = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]


class Halved(SingleRank):
    """A rank that computes all forwards in halves, and records what it began."""

    begun: ClassVar[list[int]] = []

    def halves(self, dtype: torch.dtype) -> tuple[Group, Group]:
        return self, self

    def begin_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.append(len(x))
        return x


def rows() -> list[SequenceRows]:
    """A prompt's beginning, another one's end, and a tree, in which half of the rows end."""
    tree = DraftTree((7, 8, 9, 3), (-1, -1, 0, 1))
    return [
        SequenceRows.chunk(PAGES[1], 0, [3, 1, 4, 1, 5, 9, 2], "all"),
        SequenceRows.chunk(PAGES[2], 6, [6, 5, 3, 5, 8], "all"),
        SequenceRows.tree(PAGES[0], 5, 4, tree),
    ]


def computed(path: Path, group: Group) -> list[torch.Tensor]:
    """Returns logits, hidden states, captured streams and the cache after three forwards."""
    model = load_model(path, torch.float32, group=group)
    config = model.config
    kv = PagedKV.for_model(config, 16, PAGE_SIZE, torch.float32, CPU, 0, None, model.num_kv_heads)
    runner = ModelRunner(model, kv, CpuAttention())
    before = {0: [2, 7, 1, 8, 2], 2: [4] * 6}
    runner.forward([SequenceRows.chunk(PAGES[i], 0, tokens) for i, tokens in before.items()])
    found = runner.forward(rows(), (0, 1, config.num_layers, 1))
    alone = runner.forward([SequenceRows.chunk(PAGES[1], 7, [5])])  # one row has no halves
    return [found.logits, found.hidden, *found.captured, alone.logits, kv.data]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_halves_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(decoder, "HALVED_PRODUCTS", 1)
    path = make_checkpoint(tmp_path, name)
    group = Halved()
    group.begun.clear()
    whole, halved = computed(path, SingleRank()), computed(path, group)
    torch.testing.assert_close(halved, whole, atol=1e-5, rtol=1e-5)
    # Two sums of each layer, one half after the other: of 11, 17 and 1 rows.
    layers = len(group.begun) // (2 * (2 + 2 + 1))
    assert group.begun == [8, 3] * 2 * layers + [12, 5] * 2 * layers + [1] * 2 * layers


def compute(group: HostGroup, path: str, out: str) -> None:
    decoder.HALVED_PRODUCTS = 1
    whole = computed(Path(path), group)

    class HalvedRanks(HostGroup):
        def halves(self, dtype: torch.dtype) -> tuple[Group, Group]:
            return self, self

    group.__class__ = HalvedRanks
    torch.save((whole, computed(Path(path), group)), f"{out}/{group.rank}")


def test_ranks_compute_halves(tmp_path: Path) -> None:
    path, meeting = make_checkpoint(tmp_path / "model", "LlamaForCausalLM"), tmp_path / "meeting"
    meeting.mkdir()
    run_ranks(2, meeting, compute, str(path), str(tmp_path))
    expected = computed(path, SingleRank())
    for rank in range(2):
        whole, halved = torch.load(tmp_path / str(rank))
        torch.testing.assert_close(halved, whole, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(halved[:-1], expected[:-1], atol=1e-4, rtol=1e-4)


@given(st.data())
def test_every_row_keeps_what_it_sees(data: st.DataObject) -> None:
    kv = PagedKV(1, 24, PAGE_SIZE, 1, 2, torch.float32, CPU)
    batch = build_batch(drawn_rows(data), kv)
    if batch.num_rows < 2:
        return
    wanted = data.draw(st.integers(1, batch.num_rows - 1))
    first, second = batch.halves(wanted)
    assert first.num_rows + second.num_rows == batch.num_rows
    assert sum(span.num_rows for span in first.spans) == first.num_rows
    cut = [span for span in batch.spans if span.first_row < wanted < span.first_row + span.num_rows]
    if not cut or cut[0].tail_mask is None:
        assert first.num_rows == wanted
    else:
        assert first.num_rows == cut[0].first_row
    later = {first.num_rows + row: values for row, values in seen(second).items()}
    assert seen(first) | later == seen(batch)
