"""The choice by ranks that have parts of the vocabulary: bit for bit what one rank chooses by whole
rows, ties included.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foredraft.layers.embedding import LMHead
from foredraft.parallel.group import Group
from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.sampling import choose
from foredraft.types import NO_TOKEN, SamplingParams
from testing.cpu_ranks import run_ranks
from verify_service.executor.ranks import messages
from verify_service.executor.ranks.choice import LocalLogits

ASKED = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3, "min_p": 0.1},
    {"temperature": 2.5},
    {"temperature": 0.0, "top_p": 0.5},
)


def whole_logits(vocab_size: int) -> torch.Tensor:
    """Rows with planted ties of the best between and within ranks, and broken rows."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(60, vocab_size, generator=generator)
    for row in range(40):
        equal = torch.randint(vocab_size, (5,), generator=generator)
        logits[row, equal] = 9.0
    logits[50, vocab_size // 2] = math.nan
    logits[51, -1] = math.inf
    logits[52] = -math.inf
    logits[53] = 1.5
    logits[54, : vocab_size - 1] = -math.inf
    return logits


def asked_rows(count: int, is_greedy: bool) -> SamplingRows:
    params = [
        SamplingParams(seed=7 * i, **ASKED[0 if is_greedy else i % len(ASKED)])
        for i in range(count)
    ]
    return SamplingRows.from_params(params, [100 + i for i in range(count)])


def choose_locally(group: Group, vocab_size: int, out: str) -> None:
    """Runs a rank; a message brings it the parameters."""
    whole = whole_logits(vocab_size)
    head = LMHead(4, vocab_size, None, None, torch.float32, torch.device("cpu"), group)
    head.gathers = False
    local, share = LocalLogits(head), head.share
    local.logits = torch.full((len(whole), share.size), -math.inf)
    local.logits[:, : share.count] = whole[:, share.first : share.first + share.count]
    index = list(range(len(whole) - 1, -1, -1))
    found = {"gathered": local.gather([3, 1, 59])}
    for name, is_greedy in (("greedy", True), ("mixed", False)):
        rows = asked_rows(len(whole), is_greedy)
        found[name] = local.choose(*messages.read_choice(messages.choice(index, rows)))
    save_file(found, f"{out}/{group.rank}.safetensors")


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 101), (4, 5), (3, 9000)])
def test_ranks_choose_what_one_rank_chooses(tmp_path: Path, size: int, vocab_size: int) -> None:
    """Also where the last rank has no token, and by the rule's shortcut for large vocabularies."""
    run_ranks(size, tmp_path, choose_locally, vocab_size, str(tmp_path))
    whole = whole_logits(vocab_size)
    reverse = torch.arange(len(whole) - 1, -1, -1)
    for rank in range(size):
        found = load_file(tmp_path / f"{rank}.safetensors")
        assert torch.equal(found["gathered"], whole[[3, 1, 59]])
        for name, is_greedy in (("greedy", True), ("mixed", False)):
            want = choose(whole[reverse].clone(), asked_rows(len(whole), is_greedy))
            assert torch.equal(found[name], want), name
        at = {row: found["greedy"][len(whole) - 1 - row].item() for row in (50, 51, 52, 53)}
        assert at == {50: NO_TOKEN, 51: NO_TOKEN, 52: 0, 53: 0}
