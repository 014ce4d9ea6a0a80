"""Processes that start at once: forked from one that has imported torch and the services, and has
done nothing else.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import IO

from foredraft.rpc.lifetime import PARENT_VARIABLE

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

    Attributes:
        stdout: The pipe; None without one.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        has_pipe: bool = False,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        reader, writer = context().Pipe(duplex=False) if has_pipe else (None, None)
        self._process = context().Process(
            target=_run_module, args=(module, arguments, variables, writer)
        )
        with _lock:
            self._process.start()
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


def forked(command: Sequence[str], environment: Mapping[str, str]) -> ForkedModule:
    """Starts `python -m MODULE ARGUMENTS` with a pipe, in place of `Supervisor.launch`."""
    _, flag, module, *arguments = command
    assert flag == "-m"
    return ForkedModule(module, *arguments, environment=environment, has_pipe=True)


def _run_module(
    module: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    output: Connection | None,
) -> None:
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
    sys.modules.pop(f"{module}.__main__", None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
