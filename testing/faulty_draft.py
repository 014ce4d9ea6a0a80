"""`draft_service` that fails once, at a point of its work that a file names.

Run it by `python -m testing.faulty_draft --listen ...`.

The file `FAULT_FILE.pid` holds a point and what shall happen there: "SIGKILL", "SIGSTOP", or
"FAULT", an access to memory that nobody has. It is taken away just before that happens. Points on
the device are tiny kernels in the draft's stream and graphs: the one that is meant stands still for
`STALL_SECONDS`, and meanwhile the process gets its signal.
"""

import contextlib
import itertools
import os
import runpy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draft_service import service, session
from draft_service.drafters import graph_drafting
from draft_service.drafters.paged_proposer import PagedProposer
from draft_service.steps import graphs
from foredraft.transport import cuda_ipc

STALL_SECONDS = 1.6  # longer than the step timeout of the tests
WAIT_SECONDS = (
    0.03  # between the device's arrival and the signal: the verifier waits for trees by then
)
NEVER = 1 << 20  # steps ahead

ATTACHING = ("asked", "mapped", "prepared", "answering")
BY_VALUE = ("value read", "value computed")
HOST = ("idle", "read", "uploaded", "waiting", "enqueued")
# In the order in which the device comes to them; levels are numbered from 1.
DEVICE = (
    "verified",
    "planned",
    "extended",
    "level 1",
    "level 2",
    "drafted",
    "handed on",
    "published",
)
POINTS = (*ATTACHING, *BY_VALUE, *HOST, *DEVICE)
FIRST = 2  # number of the first point; a 1 would be a constant of another kernel variant
POLL_SECONDS = 0.002


class FaultFile:
    """The tester's end of the file.

    Args:
        prefix: Value of `FAULT_FILE`.
        pid: Pid of the draft.
    """

    def __init__(self, prefix: Path, pid: int) -> None:
        self.path = prefix.with_name(f"{prefix.name}.{pid}")

    def arm(self, point: str, action: str) -> None:
        """Sets the next fault; returns once the draft, which may still be loading, knows of it."""
        assert point in POINTS
        seen = _seen(self.path)
        seen.unlink(missing_ok=True)
        written = self.path.with_name(f"{self.path.name}.new")
        written.write_text(f"{point}:{action}")
        written.rename(self.path)
        deadline = time.monotonic() + 120
        while not seen.exists():
            assert time.monotonic() < deadline, "the draft does not look for faults"
            time.sleep(POLL_SECONDS)

    @property
    def has_happened(self) -> bool:
        """Returns whether the fault has happened, or is about to."""
        return not self.path.exists()


def _seen(path: Path) -> Path:
    """Returns the path that a draft creates once it has read the armed fault."""
    return path.with_name(f"{path.name}.seen")


class Faults:
    """The draft's end of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._point = self._action = ""
        self._word: torch.Tensor | None = (
            None  # for the device: the armed point, the one that was reached, how to go wrong
        )
        self._words = np.zeros(4, dtype=np.int32)  # the same memory
        self._kernel: Any = None
        self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def arrive(self, point: str) -> None:
        """Notes that the host has come to a point, and fails there if armed."""
        if self._point == point:
            self._go_wrong()

    def is_meant(self, point: str) -> bool:
        """Returns whether a point is the armed one."""
        return self._point == point

    def begin_step(self) -> None:
        """Notes that the next step put into the stream may be stopped on the device."""
        if self._word is not None and self._point in DEVICE:
            self._words[2] = self._action == "FAULT"
            self._words[0] = FIRST + DEVICE.index(self._point)

    def stall(self, point: str) -> None:
        """Puts a point into the current stream."""
        if self._word is None:
            from testing.stall_kernel import stall

            self._kernel = stall
            self._word = torch.zeros(4, dtype=torch.int32).pin_memory()
            self._words = self._word.numpy()
        number = FIRST + DEVICE.index(point)
        self._kernel[(1,)](self._word, number, int(STALL_SECONDS * 1e9))

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            if not self._point:
                self._look()
            elif self._words[1]:
                time.sleep(WAIT_SECONDS)
                self._words[:2] = 0
                self._go_wrong()

    def _look(self) -> None:
        # The tester may take it away at any time.
        with contextlib.suppress(FileNotFoundError):
            point, self._action = self._path.read_text().split(":")
            self._point = point
            _seen(self._path).touch()

    def _go_wrong(self) -> None:
        action = self._action
        # First, or the other thread would read it again and look for no later fault.
        self._path.unlink(missing_ok=True)
        self._point = ""
        if action != "FAULT":
            os.kill(os.getpid(), signal.Signals[action])


def before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Inserts a call before a method."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return method(*args, **kwargs)

    setattr(owner, name, wrapped)


def after(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Inserts a call after a method, or a function."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        act(*args)
        return result

    setattr(owner, name, wrapped)


def install(faults: Faults) -> None:
    """Inserts the points into the service's code."""
    before(service, "open_arena", lambda *_: faults.arrive("asked"))
    after(service, "open_arena", lambda *_: faults.arrive("mapped"))
    after(PagedProposer, "prepare", lambda *_: faults.arrive("prepared"))
    after(service.DraftService, "_make", lambda *_: faults.arrive("answering"))
    _install_steps(faults)
    if torch.cuda.is_available():
        _install_device(faults)


def _install_steps(faults: Faults) -> None:
    step = session.Session.step

    async def stepped(self: Any, request: Any) -> Any:
        on_device = session._stays_on_device(request)
        faults.arrive("read" if on_device else "value read")
        response = await step(self, request)
        if on_device:
            faults.arrive("idle")
        elif response.proposals:
            faults.arrive("value computed")
        return response

    session.Session.step = stepped  # type: ignore[method-assign]
    before(graph_drafting.GraphDrafting, "proceed", lambda *_: faults.begin_step())


def _install_device(faults: Faults) -> None:
    exchange, wait = cuda_ipc.CudaIpcExchange, cuda_ipc.CudaIpcExchange.wait

    def waited(self: Any, step: int) -> None:
        faults.arrive("uploaded")
        if faults.is_meant("waiting"):
            wait(self, step + NEVER)
            time.sleep(WAIT_SECONDS)
            faults.arrive("waiting")
            return
        wait(self, step)
        faults.stall("verified")

    exchange.wait = waited  # type: ignore[method-assign]
    before(exchange, "publish", lambda *_: faults.stall("handed on"))
    after(exchange, "publish", lambda *_: (faults.stall("published"), faults.arrive("enqueued")))
    after(graphs.DraftGraphs, "__init__", lambda graphs, *_: _mark(graphs.step, faults))


def _mark(step: Any, faults: Faults) -> None:
    """Inserts points between the stages of one attach's steps."""
    forwards = itertools.count()

    def planned(*_: Any) -> None:
        nonlocal forwards
        forwards = itertools.count()
        faults.stall("planned")

    def forwarded(*_: Any) -> None:
        number = next(forwards)
        name = f"level {number}" if number else "extended"
        if name in DEVICE:
            faults.stall(name)

    after(step.operations, "fill", planned)
    after(step, "_forward", forwarded)

    def drafted(*_: Any) -> None:
        nonlocal forwards
        # A graph of the levels alone is captured after it has run once.
        forwards = itertools.count(1)
        faults.stall("drafted")

    before(step.operations, "hand_on_trees", drafted)


def main() -> None:
    prefix = Path(os.environ["FAULT_FILE"])
    install(Faults(FaultFile(prefix, os.getpid()).path))
    runpy.run_module("draft_service", run_name="__main__")


if __name__ == "__main__":
    main()
