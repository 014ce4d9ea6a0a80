"""Processes that start at once: forked from one that has imported torch and the services, and has
done nothing else.
"""

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.reduction
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import IO, TYPE_CHECKING, Any

from foredraft.rpc.lifetime import PARENT_VARIABLE

if TYPE_CHECKING:  # brings torch
    from verify_service.executor.ranks.workers import Workers

_IMPORTED = (
    "testing.forked",
    "testing.checkpoints",
    "draft_service.__main__",
    "draft_service.drafters.heads",
    "draft_service.drafters.ngram",
    "draft_service.drafters.standalone",
    "gateway.__main__",
    "verify_service.__main__",
    "verify_service.executor.ranks.group",
)
# Set where a verifier that is forked forks the processes of its ranks, too.
RANKS_VARIABLE = "FOREDRAFT_TESTS_FORK_RANKS"
_server = multiprocessing.forkserver._forkserver
# multiprocessing lets one thread at a time start processes, and look whether they have ended.
_lock = threading.Lock()


def context() -> ForkServerContext:
    """Returns the context of multiprocessing that starts them."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(_IMPORTED))
    return made


class ForkedModule:
    """`python -m MODULE ARGUMENTS`, with what tests use of subprocess.Popen.

    Args:
        module: The module.
        arguments: Its arguments.
        environment: Environment variables; by default this process's.
        has_pipe: Whether its output is a pipe, and it has a process group of its own.
        descriptors: Descriptors of this process that it has under the same numbers; with them its
            input is a pipe, too.

    Attributes:
        stdout, stdin: The pipes; None without one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        has_pipe: bool = False,
        descriptors: Sequence[int] | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        made = context()
        reader, writer = made.Pipe(duplex=False) if has_pipe else (None, None)
        self.stdin: IO[bytes] | None = None
        given = {number: _Descriptor(number) for number in descriptors or ()}
        if descriptors is not None:
            own, its = os.pipe()
            given[0] = _Descriptor(own)
            self.stdin = open(its, "wb")  # noqa: SIM115
        with _lock:
            _server.ensure_running()
            server = _server._forkserver_address  # type: ignore[attr-defined]
            self._process = made.Process(
                target=_run_module, args=(module, arguments, variables, writer, given, server)
            )
            self._process.start()
        if descriptors is not None:
            os.close(own)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout: IO[bytes] | None = None
        if reader is not None and writer is not None:
            writer.close()
            self.stdout = open(os.dup(reader.fileno()), "rb")  # noqa: SIM115
            reader.close()

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Returns the exit status; None while the process runs."""
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status once the process has ended."""
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return status


class _Descriptor:
    """A descriptor that goes to a new process, where it may have another number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return multiprocessing.reduction.DupFd(self.number)

    def __setstate__(self, sent: Any) -> None:
        self.number = sent.detach()


def forked(command: Sequence[str], environment: Mapping[str, str]) -> ForkedModule:
    """Starts `python -m MODULE ARGUMENTS` with a pipe, in place of `Supervisor.launch`."""
    _, flag, module, *arguments = command
    assert flag == "-m"
    return ForkedModule(module, *arguments, environment=environment, has_pipe=True)


def forked_rank(workers: "Workers", descriptors: Sequence[int]) -> ForkedModule:
    """Starts a rank's process, in place of `Workers.launch`."""
    return ForkedModule(workers.module, descriptors=descriptors)


def _run_module(
    module: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    output: Connection | None,
    given: Mapping[int, _Descriptor],
    server: str,
) -> None:
    # What this process forks comes from the same server: another one would import everything anew.
    _server._forkserver_address = server  # type: ignore[attr-defined]
    _server.ensure_running = lambda: None  # type: ignore[method-assign]
    if RANKS_VARIABLE in environment and module == "verify_service":
        from verify_service.executor.ranks.workers import Workers

        Workers.launch = forked_rank  # type: ignore[assignment, method-assign]
    os.environ.clear()
    os.environ.update(environment)
    if PARENT_VARIABLE in environment:  # the process that forks these ends with the tests
        os.environ[PARENT_VARIABLE] = str(os.getppid())
    if output is not None:
        os.setpgid(0, 0)
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        output.close()
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # First all of them to numbers that nobody has, since one may have another's.
    moved = {number: fcntl.fcntl(one.number, fcntl.F_DUPFD, 1000) for number, one in given.items()}
    for number, one in moved.items():
        os.dup2(one, number)
    if 0 in given:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.modules.pop(f"{module}.__main__", None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
