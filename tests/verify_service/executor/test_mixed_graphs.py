"""Forwards with prompts in padded shapes against the same rows run as they are; on a GPU or in
Triton's interpreter.
"""

import numpy as np
import pytest
import torch

from foredraft.attention.cpu import CpuAttention
from foredraft.attention.paged_triton import TritonAttention
from foredraft.kvcache.paged_kv import PagedKV
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import DecoderModel
from foredraft.models.loader import fill_randomly
from foredraft.runner.batch import SequenceRows, StepRows
from foredraft.runner.model_runner import ModelRunner
from testing import eager_graphs
from testing.triton_device import DEVICE, needs_triton
from verify_service.executor.captured.mixed import MixedGraphs

pytestmark = [needs_triton, pytest.mark.gpu]

PAGE_SIZE, NUM_SLOTS, MAX_TREE, VOCAB = 4, 6, 7, 61
CAPTURE = (1, 3)


@pytest.fixture(scope="module")
def model():
    """A small Qwen3 with a window in two of three layers, weights large enough that every key
    matters.
    """
    config = ModelConfig.from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        }
    )
    model = DecoderModel(config, torch.float32, torch.device("cpu"))
    fill_randomly(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    return model


class Both:
    """The same model and keys twice: the graphs', and plain operations on the CPU."""

    def __init__(self, model, monkeypatch, max_rows):
        config = model.config
        on_device = DecoderModel(config, torch.float32, DEVICE)
        on_device.load_state_dict(model.state_dict())
        kvs = [
            PagedKV.for_model(config, 64, PAGE_SIZE, torch.float32, device, num_scratch_pages=1)
            for device in (DEVICE, torch.device("cpu"))
        ]
        self.kv, self.plain_kv = kvs
        made = MixedGraphs
        if DEVICE.type == "cpu":
            monkeypatch.setattr(torch.cuda, "Event", eager_graphs.Event)
            made = eager_graphs.EagerMixedGraphs
        self.tables = torch.zeros(NUM_SLOTS + 1, 16, dtype=torch.int32, device=DEVICE)
        self.graphs = made(
            on_device,
            self.kv,
            TritonAttention(),
            tables=self.tables,
            max_tree=MAX_TREE,
            max_rows=max_rows,
        )
        self.plain = ModelRunner(model, self.plain_kv, CpuAttention())

    def check(self, rows, pages, capture):
        """Forwards of `rows`, whose slots have these pages, agree in all that they give and
        write.
        """
        for slot, own in pages.items():
            self.tables[slot, : len(own)] = torch.tensor(own, dtype=torch.int32)
        assert self.graphs.takes(rows)
        with torch.inference_mode():
            got = self.graphs.forward(rows, capture)
        want = self.plain.forward([SequenceRows.of(one, pages[one.slot]) for one in rows], capture)
        close(got.logits, want.logits)
        close(got.hidden, want.hidden)
        if capture:
            close(got.streams, want.streams)
            for stream, wanted in zip(got.captured, want.captured, strict=True):
                close(stream, wanted)
        end = 64 * PAGE_SIZE  # behind it lies what padding writes
        close(self.kv.data[:, :, :end], self.plain_kv.data[:, :, :end])


def close(got, want):
    torch.testing.assert_close(got.cpu(), want, rtol=2e-4, atol=2e-4)


def random_tree(rng, num_nodes):
    return tuple(int(rng.integers(-1, node)) for node in range(num_nodes))


@pytest.mark.parametrize("capture", [(), CAPTURE])
@pytest.mark.parametrize("seed", range(4))
def test_any_rows(model, monkeypatch, seed, capture):
    """Step after step: prompts in chunks beside chains, trees and single rows, slots and pages in
    any order.
    """
    rng = np.random.default_rng(seed)
    both = Both(model, monkeypatch, 64)
    free = [int(page) for page in rng.permutation(64)]
    pages = {slot: [free.pop() for _ in range(10)] for slot in range(NUM_SLOTS)}
    starts = dict.fromkeys(pages, 0)
    for _ in range(4):
        rows = []
        chosen = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS + 1)]
        for slot in map(int, chosen):
            kind = rng.choice(["row", "chain", "tree", "prompt"])
            count = {"row": 1, "chain": 4, "tree": MAX_TREE, "prompt": int(rng.integers(1, 9))}[
                kind
            ]
            tokens = [int(token) for token in rng.integers(VOCAB, size=count)]
            parents = random_tree(rng, count - 1) if kind == "tree" else None
            logits = rng.choice(["last", "none"]) if kind == "prompt" else "all"
            rows.append(StepRows(slot, starts[slot], tokens, parents, logits))
            starts[slot] += count if kind == "prompt" else 1
        both.check(rows, pages, capture)


def test_sizes_and_what_is_not_taken(model, monkeypatch):
    both = Both(model, monkeypatch, 70)
    assert both.graphs.sizes == [32, 64, 96]
    prompt = StepRows(0, 0, range(96), None, "last")
    assert both.graphs.takes([prompt])
    assert not both.graphs.takes([prompt, StepRows(1, 0, (1,), None, "all")])
    assert not both.graphs.takes([StepRows(0, 0, (1,), None, "all")] * (NUM_SLOTS + 1))


def test_more_rows_of_a_small_model_are_taken_unless_they_see_many_keys(model, monkeypatch):
    monkeypatch.setattr(TritonAttention, "cuts_keys", lambda *args: False)
    both = Both(model, monkeypatch, 1100)
    assert both.graphs.sizes[-1] == 1280
    assert both.graphs.takes([StepRows(0, 3000, range(1100), None, "last")])
    assert not both.graphs.takes([StepRows(0, 7500, range(1100), None, "last")])
    assert both.graphs.takes([StepRows(0, 7500, range(1024), None, "last")])


@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_at_the_edge_of_a_size(model, monkeypatch, length):
    both = Both(model, monkeypatch, 64)
    tokens = [7 * i % VOCAB for i in range(length)]
    pages = {2: list(range(20, 30))}
    both.check([StepRows(2, 0, tokens, None, "last")], pages, CAPTURE)


def test_warm_up_captures_every_size_and_writes_nothing(model, monkeypatch):
    both = Both(model, monkeypatch, 64)
    before = both.kv.data.clone()
    both.graphs.warm_up(CAPTURE, has_branches=True)
    assert both.graphs.num_graphs == 4
    end = 64 * PAGE_SIZE
    torch.testing.assert_close(both.kv.data[:, :, :end], before[:, :, :end])
