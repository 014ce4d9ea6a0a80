"""Processes that start at once: forked from one that has imported torch and the services, and has
done nothing else.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext

_IMPORTED = (
    "testing.forked",
    "testing.checkpoints",
    "draft_service.__main__",
    "draft_service.drafters.heads",
    "draft_service.drafters.ngram",
    "draft_service.drafters.standalone",
    "verify_service.executor.ranks.group",
)


def context() -> ForkServerContext:
    """Returns the context of multiprocessing that starts them."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(_IMPORTED))
    return made


class ForkedModule:
    """`python -m MODULE ARGUMENTS`, with what tests use of subprocess.Popen."""

    def __init__(self, module: str, *arguments: str) -> None:
        values = module, arguments, dict(os.environ)
        self._process = context().Process(target=_run_module, args=values)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._process.kill()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._process.terminate()

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status once the process has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def _run_module(module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
