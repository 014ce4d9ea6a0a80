"""A private daemon of NVIDIA's Multi-Process Service: with it two processes on one GPU hand over
without a time slice.

Measured on an H200, a hand-over costs about 160 microseconds more without it. The daemon changes no
setting of the card.
"""

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from foredraft.cli.leftovers import of_the_dead

CONTROL = "nvidia-cuda-mps-control"
_PREFIX = "foredraft-mps-"
SECONDS = 30.0
CLIENT_SECONDS = 5  # time for clients to end before they are disconnected

logger = logging.getLogger(__name__)


class Mps:
    """A daemon, and the directory that it and its clients meet in.

    Args:
        directory: Directory of a running daemon; empty where none runs yet.

    Attributes:
        variables: Variables for the environment of its clients; empty without a daemon.
    """

    def __init__(self, directory: str = "") -> None:
        self.variables: dict[str, str] = {}
        self._directory = ""
        if directory:
            self._use(directory)

    def start(self) -> bool:
        """Starts the daemon.

        Returns False, with a warning about the cost, where this machine has no MPS.

        Ends daemons whose process was killed: a daemon is no child and would run for ever.
        """
        if shutil.which(CONTROL) is None:
            logger.warning(
                "--mps: there is no %s here; every hand-over between verifier and draft costs about"
                " 0.16 ms more",
                CONTROL,
            )
            return False
        for old in of_the_dead(Path(tempfile.gettempdir()), _PREFIX):
            Mps(str(old)).stop()
        self._use(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        try:
            done = self._control("-d")
        except subprocess.TimeoutExpired:
            reason = f"nothing after {SECONDS:g} s"
        else:
            if done.returncode == 0:
                # While the services import what they need; it would else start with the first.
                threading.Thread(target=self._start_server, daemon=True).start()
                return True
            reason = (done.stderr or done.stdout).strip()
        logger.warning("--mps: %s did not start: %s", CONTROL, reason)
        self._remove()
        return False

    def stop(self) -> None:
        """Ends the daemon and its server. May be called twice; its clients should have ended."""
        if not self.variables:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._control(words=f"quit -t {CLIENT_SECONDS}\n")
        self._remove()

    def _start_server(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._control(words=f"start_server -uid {os.getuid()}\n")

    def _use(self, directory: str) -> None:
        self._directory = directory
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": directory,
            "CUDA_MPS_LOG_DIRECTORY": directory,
        }
        # The daemon sees the cards that it may and numbers them anew; its clients must name them by
        # those numbers.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if visible:
            numbers = range(len(visible.split(",")))
            self.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, numbers))

    def _control(self, *flags: str, words: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [CONTROL, *flags],
            input=words,
            env={
                **os.environ,
                "CUDA_MPS_PIPE_DIRECTORY": self._directory,
                "CUDA_MPS_LOG_DIRECTORY": self._directory,
            },
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )

    def _remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        self.variables = {}


@contextlib.contextmanager
def running(enabled: bool) -> Iterator[dict[str, str]]:
    """Runs a daemon while the block runs, if asked to and possible; gives the variables for its
    clients.
    """
    mps = Mps()
    try:
        if enabled:
            mps.start()
        yield mps.variables
    finally:
        mps.stop()
