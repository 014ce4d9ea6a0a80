"""A draft service as a process, and the verifier's end of its stream."""

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from foredraft.api.draft.v1 import draft_pb2, draft_pb2_grpc
from foredraft.rpc.channel import channel
from foredraft.rpc.protocol import DRAFT_PROTOCOL
from testing.forked import ForkedModule
from testing.ready import wait_ready

ROOT = Path(__file__).parents[1]
STREAM_SECONDS = 150  # maximum duration of a stream, even on a busy machine


def card_variables(number: int) -> dict[str, str]:
    """Returns the environment variable that shows a process one of the GPUs that this one sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[number] if visible else str(number)}


class DraftProcess:
    """Runs `python -m draft_service` on a Unix socket of its own; may be killed and started
    again.

    Attributes:
        module: Module to run; benchmarks wrap the service.
        variables: Environment variables of the process that differ from this one's.
        flags: Flags of the next start.
    """

    module = "draft_service"
    variables: Mapping[str, str] = {}

    def __init__(self, *flags: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="draft-")
        self.flags = flags
        self.target = f"unix:{self._folder}/draft.sock"
        self.process: subprocess.Popen[bytes] | ForkedModule | None = None

    def __enter__(self) -> "DraftProcess":
        try:
            self.start()
        except BaseException:  # nothing else would end it
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()
        shutil.rmtree(self._folder)

    def start(self, ready: bool = True) -> None:
        self.process = self._launch("--listen", self.target, *self.flags)
        if ready:
            self.wait_ready()

    def _launch(self, *arguments: str) -> subprocess.Popen[bytes] | ForkedModule:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **self.variables,
        }
        command = [sys.executable, "-m", self.module, *arguments]
        return subprocess.Popen(command, cwd=ROOT, env=environment)

    def wait_ready(self, timeout: float = 120.0) -> None:
        wait_ready(self.target, timeout)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def num_threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def resident(self) -> int:
        """Bytes of memory in use."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedDraft(DraftProcess):
    """The same, forked from a process that has imported all of it: torch alone takes seconds.

    For tests of what a verifier and its drafts do together.
    """

    def _launch(self, *arguments: str) -> ForkedModule:
        return ForkedModule(self.module, *arguments)


class DraftStream:
    """An attached stream, one message at a time; errors come as grpc.RpcError."""

    def __init__(
        self, target: str, attach: draft_pb2.AttachRequest, timeout: float = STREAM_SECONDS
    ) -> None:
        self._channel = channel(target)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)
        self._call = stub.Speculate(iter(self._requests.get, None), timeout=timeout)
        self._num_steps = 0
        try:
            self.attached = self.exchange(draft_pb2.SpeculateRequest(attach=attach)).attach
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "DraftStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, message: draft_pb2.SpeculateRequest) -> None:
        self._requests.put(message)

    def exchange(self, message: draft_pb2.SpeculateRequest) -> draft_pb2.SpeculateResponse:
        self.send(message)
        return next(self._call)

    def step(
        self, *sequences: draft_pb2.SequenceStep, released: tuple[int, ...] = ()
    ) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Sends one step; returns the proposals' tokens and parents by slot."""
        self._num_steps += 1
        request = draft_pb2.StepRequest(
            step=self._num_steps, sequences=sequences, released_slots=released
        )
        answer = self.exchange(draft_pb2.SpeculateRequest(step=request)).step
        assert answer.step == self._num_steps
        return {p.slot: (tuple(p.tokens), tuple(p.parents)) for p in answer.proposals}

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._channel.close()


def open_stream(target: str, attach: draft_pb2.AttachRequest) -> DraftStream:
    """Attaches to a draft, which serves one verifier at a time: the previous one may still be
    leaving.
    """
    deadline = time.monotonic() + 120
    while True:
        try:
            return DraftStream(target, attach)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def attach_request(**changes: Any) -> draft_pb2.AttachRequest:
    """Returns an attach that fits the checkpoints of `testing.checkpoints`."""
    limits = draft_pb2.TreeLimits(num_steps=3, topk=2, num_draft_tokens=8)
    values = {
        "epoch": 1,
        "protocol": DRAFT_PROTOCOL,
        "vocab_size": 128,
        "page_size": 4,
        "num_pages": 64,
        "max_batch": 8,
        "max_context": 200,
        "limits": limits,
        "draft_sampling": "topk",
    }
    return draft_pb2.AttachRequest(**{**values, **changes})
