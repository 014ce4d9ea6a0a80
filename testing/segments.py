"""Shared-memory segments of this machine, and open files of this process."""

import contextlib
import os
from pathlib import Path


def segments(pid: int | None = None) -> set[str]:
    """Returns the names of segments that a process made, by default this one."""
    return {path.name for path in Path("/dev/shm").glob(f"foredraft-{pid or os.getpid()}-*")}


def num_descriptors(of: str) -> int:
    """Returns the number of open files of this process whose name has `of`.

    Other threads may open and close other files at any time.
    """
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += of in os.readlink(path)
    return found
