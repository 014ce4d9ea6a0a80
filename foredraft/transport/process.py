"""Whether another process on this host is gone: memory that it may still use must not be given back before."""

import os
import select
from pathlib import Path

from foredraft.api.tensor.v1 import tensor_pb2


def own_identity() -> tensor_pb2.Process:
    """This process, as another one on the host can find it."""
    pid = os.getpid()
    return tensor_pb2.Process(
        pid=pid, start_time=start_time(pid) or 0, pid_namespace=pid_namespace()
    )


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, which tell it from a later one of the same pid; None if dead.

    Raises:
        OSError: That cannot be known; there is no descriptor left, say.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # from field 3 on, proc_pid_stat(5)
    return None if state in "ZX" else int(fields[18])


def pid_namespace() -> int:
    """Number of the namespace in which this process's pid means something."""
    return os.stat("/proc/self/ns/pid").st_ino


class Peer:
    """Watches another process by a descriptor, which no later process can be mistaken for.

    Args:
        identity: What that process said of itself; empty where it said nothing.
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
        """Watches no longer; it counts as gone then."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
