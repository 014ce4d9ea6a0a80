"""What the stages of a step take on one GPU: the graphs of target and draft by the GPU's clock, the hosts of both by theirs.

As a program it is `draft_service` that answers questions at the socket `STAGES_SOCKET`: `python -m benchmarks.gpu.stages --listen ...`.
"""

# mypy: ignore-errors
import contextlib
import itertools
import os
import runpy
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path

import numpy as np

from benchmarks.gpu.runs import watched_waits
from benchmarks.gpu.stamps import Stamps
from tests.support.drafts import DraftProcess
from verify_service.draft_wire import DraftWire


class StagedDraft:
    """A draft service that can be asked. Its graphs are stamped only between `start` and `take`.

    Args:
        socket: Path for the questions.
        flags: Of the service.
    """

    def __init__(self, socket: Path, *flags: str) -> None:
        self._socket = str(socket)
        self.process = DraftProcess(*flags)
        self.process.module = "benchmarks.gpu.stages"
        os.environ["STAGES_SOCKET"] = self._socket
        self.process.start(ready=False)

    def start(self) -> None:
        """Stamps the graphs from now on."""
        self._ask("start")

    def take(self) -> dict[str, list[tuple[float, float]]]:
        """Stamps no more. Gives what was seen since the last call: spans of the graphs, and the steps on the device as numbers
        with the times at which the host had put each into the stream."""
        return self._ask("take")

    def _ask(self, what: str):
        with Client(self._socket, "AF_UNIX") as line:
            line.send(what)
            return line.recv()


class Stages:
    """Measures engines of this process, one at a time."""

    def __init__(self) -> None:
        self._stamps = Stamps()

    def of(self, run: Callable[[], object], draft: StagedDraft | None = None) -> dict[str, float]:
        """The stages of a step, in milliseconds.

        Args:
            run: Decodes a few hundred steps, one sequence at a time; is called twice, without stamps and with them.
            draft: A StagedDraft whose steps stay on the device, if there is one.

        Returns:
            target, draft: Of their graphs. idle: The shortest hand-overs there and back. host: The verifier's, between two
            waits for the GPU. ask: From an outcome to the message for the draft's step after the next. answer: From that
            message until the draft's host has put the step into its stream.
        """
        with watched_waits() as waits, _watched_sends() as sends:
            run()
        found = _hosts(waits, sends, dict(draft.take()["steps"]) if draft else {})
        self._stamps.start()
        if draft:
            draft.start()
        run()
        spans = self._stamps.spans()
        self._stamps.stop()
        self._stamps.clear()
        return found | _graphs(spans, draft.take()["spans"] if draft else [])


@contextlib.contextmanager
def _watched_sends():
    """Number and time of each message for a step on the device, while it lasts."""
    sends, send = [], DraftWire.send

    def timed(self, is_on_device=False):
        send(self, is_on_device)
        if is_on_device:
            sends.append((self.step, time.perf_counter()))

    DraftWire.send = timed
    try:
        yield sends
    finally:
        DraftWire.send = send


def _hosts(waits, sends, done):
    """Medians of the hosts' stages."""
    ends = [end for _, end in waits]
    host = [begin - end for (_, end), (begin, _) in itertools.pairwise(waits)]
    ask = [at - ends[i - 1] for _, at in sends if (i := np.searchsorted(ends, at))]
    answer = [done[step] - at for step, at in sends if step in done]
    return {"host": _median(host), "ask": _median(ask), "answer": _median(answer)}


def _graphs(target, draft):
    """Medians of the graphs' times, and the shortest hand-overs; `target` and `draft` in microseconds, in order."""
    drafting, there, back = [], [], []
    for (_, end), (following, _) in itertools.pairwise(target):
        own = [span for span in draft if end <= span[0] < following]
        if len(own) == 2:  # extended once and drafted: no prompt was read
            drafting.append(sum(b - a for a, b in own))
            there.append(own[0][0] - end)
            back.append(following - own[-1][1])
    idle = min(there) + min(back) if there else 0.0
    if not draft:
        idle = min((b[0] - a[1] for a, b in itertools.pairwise(target)), default=0.0)
    return {
        "target": _median([b - a for a, b in target], 1e-3),
        "draft": _median(drafting, 1e-3),
        "idle": idle * 1e-3,
    }


def _median(times, to_ms=1e3):
    return float(np.median(times)) * to_ms if len(times) else 0.0


def main() -> None:
    from draft_service.drafters.graph_drafting import GraphDrafting

    stamps, steps = Stamps(), []
    proceed = GraphDrafting.proceed

    def timed(self, step, continuations):
        proceed(self, step, continuations)
        steps.append((step, time.perf_counter()))

    GraphDrafting.proceed = timed

    def answer():
        with Listener(os.environ["STAGES_SOCKET"], "AF_UNIX") as listener:
            while True:
                with listener.accept() as line:
                    if line.recv() == "start":
                        stamps.start()
                        line.send(None)
                        continue
                    stamps.stop()
                    line.send({"spans": stamps.spans(), "steps": list(steps)})
                    stamps.clear()
                    steps.clear()

    threading.Thread(target=answer, daemon=True).start()
    runpy.run_module("draft_service", run_name="__main__")


if __name__ == "__main__":
    main()
