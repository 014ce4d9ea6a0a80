"""Measures the stages of a step on one GPU: the graphs of target and draft by the GPU's clock, both
hosts by theirs.

As a program it is `draft_service` that answers questions at the socket `STAGES_SOCKET`: `python -m
benchmarks.gpu.stages --listen ...`.
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
import torch

from benchmarks.gpu.runs import watched_waits
from benchmarks.gpu.stamps import Stamps
from testing.drafts import DraftProcess
from verify_service.drafts.wire import DraftWire
from verify_service.engine.engine import Engine


class StagedDraft:
    """A draft service that can be asked for times.

    Its graphs are stamped only between `start` and `take`.

    Args:
        socket: Path for the questions.
        flags: Flags of the service.
    """

    def __init__(self, socket: Path, *flags: str) -> None:
        self._socket = str(socket)
        self.process = DraftProcess(*flags)
        self.process.module = "benchmarks.gpu.stages"
        os.environ["STAGES_SOCKET"] = self._socket
        self.process.start(ready=False)

    def start(self) -> None:
        """Starts stamping the graphs."""
        self._ask("start")

    def take(self) -> dict[str, list[tuple[float, float]]]:
        """Stops stamping and returns the times.

        Gives what was seen since the last call: spans of the graphs, and of the steps on the device
        their numbers and when the host had put the first and the last graph of each into the
        stream.
        """
        return self._ask("take")

    def _ask(self, what: str):
        with Client(self._socket, "AF_UNIX") as line:
            line.send(what)
            return line.recv()


class Stages:
    """Measures engines of this process, one at a time."""

    def __init__(self) -> None:
        self._stamps = Stamps()

    def hosts(
        self, run: Callable[[], object], draft: StagedDraft | None = None
    ) -> list[tuple[float, float, float, float]]:
        """Measures the hosts' work for each step, in milliseconds.

        Args:
            run: Decodes some hundred steps, one sequence at a time.
            draft: Draft whose steps stay on the device; None without one.

        Returns:
            (host, ask, answer, rest) of each step. host: The verifier's work between two waits for
            the GPU. ask: Its part from an outcome to the message for the draft's step after the
            next; without a draft on the GPU, to the target's graph in its stream. answer: From that
            message until the draft's host has put the step's first graph into its stream. rest:
            From then until it has put in the last.
        """
        with (
            watched_waits() as waits,
            _watched_sends() as sends,
            _watched_prompts() as prompts,
            _watched_replays() as replays,
        ):
            run()
        if draft is None:
            return _hosts(waits, [(at, at, at) for at in replays], prompts)
        done = {step: times for step, *times in draft.take()["steps"]}
        return _hosts(waits, [(at, *done[step]) for step, at in sends if step in done], prompts)

    def graphs(
        self, run: Callable[[], object], draft: StagedDraft | None = None
    ) -> dict[str, float]:
        """Measures milliseconds of the GPU. Stamps around every graph make the hosts slower.

        Returns:
            target, extend, draft: Medians of their graphs. idle: The shortest hand-overs there and
            back. lag: From the end of a step on the GPU until the verifier's host, which waits for
            it, knows.
        """
        self._stamps.start()
        if draft:
            draft.start()
        with watched_waits() as waits:
            run()
        spans = self._stamps.spans()
        self._stamps.stop()
        offset = self._stamps.host_offset()
        found = _graphs(spans, draft.take()["spans"] if draft else [])
        return found | {"lag": _lag(spans, waits, offset)}


@contextlib.contextmanager
def _watched_sends():
    """Records number and time of each message for a step on the device."""
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


@contextlib.contextmanager
def _watched_replays():
    """Records when each graph of this process was put into its stream."""
    ends, replay = [], torch.cuda.CUDAGraph.replay

    def timed(graph):
        replay(graph)
        ends.append(time.perf_counter())

    torch.cuda.CUDAGraph.replay = timed
    try:
        yield ends
    finally:
        torch.cuda.CUDAGraph.replay = replay


@contextlib.contextmanager
def _watched_prompts():
    """Records when steps with prompts began, which are not started ahead."""
    begun, execute = [], Engine._execute

    def noted(self, step):
        begun.append(time.perf_counter())
        return execute(self, step)

    Engine._execute = noted
    try:
        yield begun
    finally:
        Engine._execute = execute


def _hosts(waits, asked, prompts):
    """Returns a row for each wait that followed another without a prompt between them, and in
    which the draft was asked.

    Args:
        waits: Begin and end of each wait, in seconds as all times.
        asked: Times at which a request was sent, and its first and its last graph were put into
            their stream.
        prompts: Times at which steps with prompts began.
    """
    found = []
    for (_, before), (after, _) in itertools.pairwise(waits):
        if np.searchsorted(prompts, before) < np.searchsorted(prompts, after):
            continue
        own = [one for one in asked if before < one[0] < after]
        times = [(after - before, at - before, first - at, last - first) for at, first, last in own]
        found += [tuple(1e3 * part for part in one) for one in times]
    return found


def _graphs(target, draft):
    """Returns medians of the graphs' times, and the shortest hand-overs; `target` and `draft`
    in microseconds, in order.
    """
    extending, drafting, there, back = [], [], [], []
    for (_, end), (following, _) in itertools.pairwise(target):
        own = [span for span in draft if end <= span[0] < following]
        if len(own) == 2:  # extended once and drafted: no prompt was read
            for times, (begin, stop) in zip((extending, drafting), own, strict=True):
                times.append(stop - begin)
            there.append(own[0][0] - end)
            back.append(following - own[-1][1])
    idle = min(there) + min(back) if there else 0.0
    if not draft:
        idle = min((b[0] - a[1] for a, b in itertools.pairwise(target)), default=0.0)
    found = {"target": [b - a for a, b in target], "extend": extending, "draft": drafting}
    medians = {name: float(np.median(one)) * 1e-3 if one else 0.0 for name, one in found.items()}
    return medians | {"idle": idle * 1e-3}


def _lag(target, waits, offset):
    """Returns the median over waits that the end of a graph ended; microseconds of the GPU's
    clock and seconds of the host's.
    """
    ends = np.array([end + offset for _, end in target])
    lags = []
    for begin, end in waits:
        i = int(np.searchsorted(ends, end * 1e6)) - 1
        if i >= 0 and ends[i] > begin * 1e6:
            lags.append(end * 1e3 - ends[i] * 1e-3)
    return float(np.median(lags)) if lags else 0.0


def _answer_questions(socket: str) -> None:
    from draft_service.drafters.graph_drafting import GraphDrafting
    from draft_service.steps.graphs import DraftGraphs

    stamps, steps, launched = Stamps(), [], []
    proceed = GraphDrafting.proceed

    def timed(self, step, continuations):
        launched.clear()
        proceed(self, step, continuations)
        steps.append((step, launched[0], launched[-1]))

    GraphDrafting.proceed = timed
    for name in ("extend", "draft"):
        _note_ends(DraftGraphs, name, launched)

    def answer():
        with Listener(socket, "AF_UNIX") as listener:
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


def _note_ends(owner, name, ends):
    """Appends the end of each call of a method to `ends`."""
    method = getattr(owner, name)

    def noted(self, *args):
        method(self, *args)
        ends.append(time.perf_counter())

    setattr(owner, name, noted)


def main() -> None:
    if "STAGES_SOCKET" in os.environ:
        _answer_questions(os.environ["STAGES_SOCKET"])
    runpy.run_module("draft_service", run_name="__main__")


if __name__ == "__main__":
    main()
