"""The engine without memory to capture graphs: it runs steps operation by operation, in Triton's
interpreter here.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foredraft.types import SamplingParams
from testing.broken_captures import broken_off_capture
from testing.checkpoints import make_checkpoint
from testing.engines import Job, Result, running_engine
from testing.triton_device import INTERPRETED, needs_triton
from verify_service.executor.captured.graph_store import GraphStore
from verify_service.executor.captured.mixed import MixedKind

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="is for the interpreter")]
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.7},
    {"repetition_penalty": 1.5, "logprobs": 2},
    {"bad_words": tuple((i,) for i in range(20, 60)), "temperature": 0.0},
)
PLAIN: dict[str, Any] = {}
DRAFTED = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 3}
LOSSY = {**DRAFTED, "speculative_accept_threshold_single": 0.5}


def run(path: Path, flags: dict[str, Any], after: Callable[[], object] = int) -> list[Result]:
    """Runs requests of all kinds, once `after` has returned."""
    work = [
        Job(
            [5, 6, 7, 98, 99] * 2 + [40 + i],
            SamplingParams(max_new_tokens=6 if i else 24, ignore_eos=True, seed=i, **asked),
        )
        for i, asked in enumerate(ASKED)
    ]
    sizes = {"page_size": 8, "max_total_tokens": 512, "max_running_requests": 3}
    algorithm = flags.get("speculative_algorithm", "NONE")
    others = {name: value for name, value in flags.items() if name != "speculative_algorithm"}
    with running_engine(path, algorithm, **sizes, **others) as harness:
        after()
        harness.engine.draft_everything()
        return harness.run(work, timeout=300)


def same(results: list[Result], others: list[Result]) -> bool:
    """Returns whether tokens and numbers of log-probabilities are the same."""
    return [(one.tokens, len(one.logprobs)) for one in results] == [
        (one.tokens, len(one.logprobs)) for one in others
    ]


@pytest.mark.parametrize("flags", [PLAIN, DRAFTED, LOSSY], ids=["plain", "drafted", "lossy"])
def test_steps_run_without_graphs(
    flags: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No graph can be captured: neither of decode steps, of whatever kind, nor with prompts."""
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    want = run(path, flags)
    from testing.eager_graphs import EagerGraphCapturer, EagerMixedGraphs, use_eager_graphs

    def fail(self: Any, run: Any) -> Any:
        raise broken_off_capture()

    def noted(self: Any, kind: Any, capture: Callable[[], Any]) -> None:
        kinds.add("prompts" if isinstance(kind, MixedKind) else kind.is_two_phase)
        add(self, kind, capture)

    kinds: set[str | bool] = set()
    add = GraphStore.add
    monkeypatch.setattr(GraphStore, "add", noted)
    monkeypatch.setattr(EagerGraphCapturer, "capture", fail)
    monkeypatch.setattr(EagerMixedGraphs, "_capture", fail)
    use_eager_graphs(monkeypatch)
    assert same(run(path, flags), want)
    # The sampler chooses for lossy acceptance.
    assert kinds == ({"prompts", False} if flags == LOSSY else {"prompts", False, True})
    assert len([one for one in caplog.records if "no memory" in one.getMessage()]) == 1


def test_memory_that_runs_out_while_the_engine_idles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, num_hidden_layers=1)
    want = run(path, PLAIN)
    from testing.eager_graphs import (  # needs Triton
        EagerGraphCapturer,
        EagerGraphs,
        use_eager_graphs,
    )

    capture, capture_next = EagerGraphCapturer.capture, EagerGraphs.capture_next
    is_short, ended = threading.Event(), threading.Event()

    def short(self: Any, run: Callable[[], Any]) -> Any:
        if is_short.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return capture(self, run)

    def ahead(self: Any) -> bool:
        is_short.set()
        made = capture_next(self)
        if not made:
            ended.set()
        return made

    monkeypatch.setattr(EagerGraphCapturer, "capture", short)
    monkeypatch.setattr(EagerGraphs, "capture_next", ahead)
    use_eager_graphs(monkeypatch, captures_first=True)
    assert same(run(path, PLAIN, lambda: ended.wait(60)), want)
    assert len([one for one in caplog.records if "no memory" in one.getMessage()]) == 1
