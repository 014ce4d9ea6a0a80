"""Batches of rows against the same rows run alone, and what a batch refuses."""

import pytest
import torch

from foredraft.attention.cpu import CpuAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import fill_randomly
from foredraft.runner.batch import SequenceRows, build_batch
from foredraft.runner.model_runner import ModelRunner
from foredraft.trees.draft_tree import DraftTree

CPU = torch.device("cpu")
PAGE_SIZE = 4


@pytest.fixture(scope="module")
def runner():
    """A small Qwen3 with windows, weights large enough that every key matters, and scratch
    pages.
    """
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        }
    )
    model = DecoderModel(config, torch.float32, CPU)
    fill_randomly(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    kv = PagedKV.for_model(config, 32, PAGE_SIZE, torch.float32, CPU, num_scratch_pages=8)
    return ModelRunner(model, kv, CpuAttention())


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50])
def test_number_of_rows_changes_nothing(runner, num_rows):
    """Products take different ways for different numbers of rows; each gives what single rows
    give.
    """
    tokens = [(7 * i) % 61 for i in range(num_rows)]
    pages = list(range(16))
    output = runner.forward([SequenceRows.chunk(pages, 0, tokens, "all")])
    assert output.logits.shape == (num_rows, 61)
    assert output.hidden.shape == (num_rows, 32)
    for index, token in enumerate(tokens):
        single = runner.forward([SequenceRows.chunk(list(range(16, 32)), index, [token], "all")])
        close(single.logits[0], output.logits[index])


def test_scratch_rows_behind_a_hole(runner):
    """A draft's beams: KV of two levels on scratch pages, where the last pool page is only part
    full.
    """
    prefix = [3, 9, 27, 20, 60, 58, 52, 34, 41, 1]
    pages = [4, 7, 5]
    runner.forward([SequenceRows.chunk(pages, 0, prefix, "none")])
    table = [*pages, *runner.kv.scratch_pages]
    scratch = len(pages) * PAGE_SIZE  # key index of the first scratch slot
    hole = scratch - len(prefix)
    beams, children, parents = [11, 12], [21, 22, 23], [1, 0, 1]
    mask = torch.zeros(2, hole + 2, dtype=torch.bool)
    mask[0, hole] = mask[1, hole + 1] = True
    runner.forward(
        [
            SequenceRows(
                beams,
                [10, 10],
                table,
                10,
                scratch,
                tail_mask=mask,
                tail_positions=[10] * (hole + 2),
            )
        ]
    )
    mask = torch.zeros(3, hole + 5, dtype=torch.bool)
    for row, parent in enumerate(parents):
        mask[row, hole + parent] = mask[row, hole + 2 + row] = True
    positions = [10] * (hole + 2) + [11] * 3
    output = runner.forward(
        [
            SequenceRows(
                children,
                [11] * 3,
                table,
                10,
                scratch + 2,
                tail_mask=mask,
                tail_positions=positions,
            )
        ]
    )
    for row, parent in enumerate(parents):
        alone = [*prefix, beams[parent], children[row]]
        want = runner.forward([SequenceRows.chunk(list(range(20, 30)), 0, alone, "last")])
        close(output.logits[row], want.logits[0])


def test_prefix_start_hides_what_lies_before(runner):
    tokens = [5, 6, 7, 8, 9, 10, 11, 12]
    pages = list(range(8))

    def run(first):
        runner.kv.data.zero_()
        runner.forward([SequenceRows.chunk(pages, 0, [first, 1, 2, 3], "none")])
        for index, token in enumerate(tokens):
            rows = SequenceRows([token], [4 + index], pages, 4 + index, 4 + index, prefix_start=4)
            output = runner.forward([rows])
        return output.logits

    close(run(40), run(50))


def test_logits_of_some_rows(runner):
    chunks = [
        SequenceRows.chunk(list(range(4)), 0, [1, 2, 3, 4, 5], "none"),
        SequenceRows.chunk(list(range(4, 8)), 0, [6, 7, 8], "last"),
        SequenceRows.chunk(list(range(8, 12)), 0, [9, 10], "all"),
    ]
    output = runner.forward(chunks)
    assert output.logits.shape == (3, 61)
    for chunk in chunks:
        chunk.logits = "all"
    everything = runner.forward(chunks)
    close(output.logits, everything.logits[[7, 8, 9]])
    close(output.hidden, everything.hidden)


def test_commit_paths_moves_only_what_must(runner):
    pages = [3, 8, 2]
    data = runner.kv.data
    data.normal_(generator=torch.Generator().manual_seed(0))
    before = data.clone()

    def slot(key):
        return pages[key // PAGE_SIZE] * PAGE_SIZE + key % PAGE_SIZE

    runner.commit_paths([(pages, 5, [0, 1, 2])])
    assert torch.equal(data, before)
    runner.commit_paths([(pages, 5, [0, 2, 3, 6])])
    for index, row in enumerate([0, 2, 3, 6]):
        assert torch.equal(data[:, :, slot(5 + index)], before[:, :, slot(5 + row)])
    changed = (data != before).any(3).any(1).any(0).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(slot(5 + index) for index in (1, 2, 3))


def test_tree_rows():
    tree = DraftTree((5, 6, 7), (-1, -1, 0))
    rows = SequenceRows.tree([1, 2], 3, 9, tree)
    assert list(rows.tokens) == [9, 5, 6, 7]
    assert list(rows.positions) == [3, 4, 4, 5]
    assert rows.tail_mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    plain = SequenceRows.tree([1, 2], 3, 9, DraftTree((), ()))
    assert plain.tail_mask is None
    assert list(plain.positions) == [3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (SequenceRows([1] * 5, range(5), [0], 0, 0), "1 pages of 4 do not hold 5 keys"),
        (SequenceRows([1, 2], [0], [0], 0, 0), "2 tokens with 1 positions"),
        (SequenceRows([], [], [0], 0, 0), "0 tokens"),
        (SequenceRows([1], [0], [99], 0, 0), "outside the cache"),
        (SequenceRows([1], [0], [-1], 0, 0), "outside the cache"),
        (SequenceRows([1], [2], [0], 1, 2), "need a tail_mask"),
        (SequenceRows([1], [2], [0], 3, 2), "not in order"),
        (
            SequenceRows([1], [0], [0], 0, 0, tail_mask=torch.ones(2, 1, dtype=torch.bool)),
            r"tail_mask is \(2, 1\), not \(1, 1\)",
        ),
        (
            SequenceRows(
                [1], [0], [0], 0, 0, tail_mask=torch.ones(1, 1, dtype=torch.bool), tail_positions=[]
            ),
            "0 tail_positions for 1 keys",
        ),
    ],
)
def test_rows_that_contradict_themselves(rows, message):
    with pytest.raises(ValueError, match=message):
        build_batch([rows], PagedKV(1, 32 // PAGE_SIZE, PAGE_SIZE, 1, 2, torch.float32, CPU))
