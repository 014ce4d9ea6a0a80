"""Ends a service process: on a signal, or when the supervisor that started it has gone.

Starts no process.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

import uvloop

# Set by a supervisor for its children; absent where a service runs alone.
PARENT_VARIABLE = "FOREDRAFT_SUPERVISOR_PID"
# Exit status of a service whose GPU has failed it: a fault there, or of another client of the same
# MPS server.
DEVICE_LOST = 75
_PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def child_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment for a child process that must not outlive this one; the child calls
    `exit_with_parent`.
    """
    # gRPC logs every fork that it cannot prepare for. Forks here run another program at once, or
    # never call it.
    return {"GRPC_ENABLE_FORK_SUPPORT": "0", **environ, PARENT_VARIABLE: str(os.getpid())}


def exit_with_parent() -> None:
    """Ends this process as soon as the supervisor named in the environment is gone; does nothing
    without one.

    On Linux the kernel sends SIGKILL (prctl(2), PR_SET_PDEATHSIG), which fires when the thread that
    started this process ends; a supervisor therefore starts its children from a thread that lives
    as long as they do. Elsewhere a thread looks once a second.
    """
    # Taken out, so that a process which this one starts does not look for a parent that is not its
    # own.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if not parent:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    else:
        threading.Thread(
            target=_watch_parent, args=(int(parent),), name="parent-watch", daemon=True
        ).start()
    # The parent may have died before the request to the kernel.
    if os.getppid() != int(parent):
        os._exit(1)


def run(main: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Runs a service's coroutine on uvloop until it returns and gives its exit status.

    Calls `exit_with_parent` first. SIGINT before the coroutine has a `stop_event` cancels it and
    ends the process: a thread that loads a model is not waited for.
    """
    exit_with_parent()
    try:
        return uvloop.run(main()) or 0
    except KeyboardInterrupt:
        logger.info("SIGINT: stopping")
        end_at_once(128 + signal.SIGINT)


def end_at_once(status: int) -> NoReturn:
    """Ends this process without releasing anything or waiting for a thread: releasing a failed GPU
    may hang or abort.

    Flushes the logs first.
    """
    logging.shutdown()
    os._exit(status)


def signal_name(number: int) -> str:
    """Returns `SIGKILL`, or `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stop_event() -> asyncio.Event:
    """Returns an event that SIGTERM or SIGINT sets; a second signal ends the process at once.

    Call it in the running loop.
    """
    event = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        if event.is_set():
            logger.warning("second %s: exiting at once", signal.Signals(number).name)
            os._exit(128 + number)
        logger.info("%s: stopping", signal.Signals(number).name)
        event.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    return event


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
