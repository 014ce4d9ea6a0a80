"""Detects whether another process on this host is gone: memory that it may still use must not be
freed before.
"""

import os
import select
from pathlib import Path

from foredraft.api.tensor.v1 import tensor_pb2


def own_identity() -> tensor_pb2.Process:
    """Returns this process's identity, which other processes on the host find it with."""
    pid = os.getpid()
    return tensor_pb2.Process(
        pid=pid, start_time=start_time(pid) or 0, pid_namespace=pid_namespace()
    )


def start_time(pid: int) -> int | None:
    """Returns the clock ticks from boot to the start of a process; None for a dead process.

    They tell the process from a later one of the same pid.

    Raises:
        OSError: The time cannot be read, for example for lack of a file descriptor.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The fields from the third on, see proc_pid_stat(5)
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def pid_namespace() -> int:
    """Returns the number of the namespace in which this process's pid is valid."""
    return os.stat("/proc/self/ns/pid").st_ino


class Peer:
    """Watches another process by a descriptor, which stays valid when its pid is reused.

    Args:
        identity: Identity that the process has sent; empty where it sent none.
    """

    def __init__(self, identity: tensor_pb2.Process) -> None:
        self.identity = identity
        self._descriptor: int | None = None
        self._was_found = bool(identity.pid) and identity.pid_namespace == pid_namespace()
        if not self._was_found:
            return
        try:
            self._descriptor = os.pidfd_open(identity.pid)
            if start_time(identity.pid) != identity.start_time:
                self.close()
        except ProcessLookupError:
            return  # dead already
        except (OSError, OverflowError):
            # Without a descriptor, or of no possible number, nothing is known.
            self.close()
            self._was_found = False

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended for sure; False where that cannot be known."""
        if self._descriptor is None:
            return self._was_found
        # Not select(), which takes no descriptor above 1023.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stops watching; the process counts as gone then."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
