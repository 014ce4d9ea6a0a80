"""Captured steps of two ranks, without graphs and on a CPU, in Triton's interpreter: the engine's
tokens are one rank's.
"""

import json
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from foredraft.config.services import VerifyConfig
from foredraft.parallel.group import Group
from foredraft.types import SamplingParams
from testing.checkpoints import make_checkpoint
from testing.cpu_ranks import run_ranks
from testing.engines import Job, running_engine
from testing.triton_device import INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")]
ASKED = (
    {"temperature": 0.0},
    {"top_p": 0.7},
    {"repetition_penalty": 1.5, "logprobs": 2},
)
FLAGS = {"page_size": 8, "max_total_tokens": 512, "max_running_requests": 3}


class QueueBoard:
    """Messages to one other rank."""

    def __init__(self, queue: "SimpleQueue[bytes]") -> None:
        self.write, self.read = queue.put, queue.get


def jobs() -> list[Job]:
    return [
        Job([5, 6, 7, 98, 99] * 2 + [40 + i], SamplingParams(max_new_tokens=6, seed=i, **asked))
        for i, asked in enumerate(ASKED)
    ]


def tokens(path: Path, algorithm: str) -> list[list[int]]:
    flags = {"speculative_num_draft_tokens": 3} if algorithm == "NGRAM" else {}
    with running_engine(path, algorithm, **FLAGS, **flags) as harness:
        harness.engine.draft_everything()
        results = harness.run(jobs(), timeout=300)
        harness.check_nothing_left()
    if algorithm == "NGRAM":
        assert sum(one.finish.drafted_tokens for one in results if one.finish) > 3
    return [result.tokens for result in results]


def compute(group: Group, path: str, algorithm: str, queue: "SimpleQueue[bytes]", out: str) -> None:
    """Runs a rank."""
    from testing.eager_graphs import use_eager_rank_0, use_eager_worker  # need Triton

    patches, board = pytest.MonkeyPatch(), QueueBoard(queue)
    if group.rank == 0:
        watchdog = SimpleNamespace(watch_steps=lambda: None)
        stop = lambda: board.write(messages.stop())  # noqa: E731
        ranks = SimpleNamespace(board=board, group=group, watchdog=watchdog, close=stop)
        from verify_service.executor.ranks import messages

        use_eager_rank_0(patches, ranks)
        Path(out).write_text(json.dumps(tokens(Path(path), algorithm)))
        return
    from verify_service import rank
    from verify_service.target import load_share

    use_eager_worker(patches)
    config = VerifyConfig(model_path=path, device="cpu", num_threads=1)
    join: Any = SimpleNamespace(config=config, rank=group.rank, parent=0)
    rank.Worker(join, load_share(config, group), board, group).run()  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["NONE", "NGRAM"])
def test_two_ranks_take_the_same_steps(algorithm: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=1)
    want = tokens(path, "NONE")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    queue: SimpleQueue[bytes] = mp.get_context("spawn").SimpleQueue()
    run_ranks(2, meeting, compute, str(path), algorithm, queue, str(tmp_path / "out"))
    assert json.loads((tmp_path / "out").read_text()) == want
