"""The number of threads that a process computes with on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from foredraft.cpu import _kernels

FEW_ROWS = 64  # up to which our own products are about as fast as oneDNN's, or faster

CGROUP = Path("/sys/fs/cgroup")
# Files with a container's time on CPUs and the period that has it, of cgroup v2 and of v1.
_QUOTAS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))

_num_threads: int | None = None


def use_threads(number: int) -> None:
    """Sets how many threads torch's operations use, and our kernels as far as they can.

    Our kernels use one until this is called.
    """
    global _num_threads
    _num_threads = number
    torch.set_num_threads(number)
    _kernels.set_num_threads(min(number, _kernels.MOST_THREADS))


@contextmanager
def threads_for(num_rows: int) -> Iterator[None]:
    """Keeps torch to one thread in a step of few rows, and to those of `use_threads` in others.

    What torch computes in a step of few rows takes less time than to wake a thread of OpenMP (50 to
    100 us), for each of many operations; our own kernels share their threads out themselves. Does
    nothing where `use_threads` was not called.
    """
    if _num_threads is None:
        yield
        return
    torch.set_num_threads(1 if num_rows <= FEW_ROWS else _num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(_num_threads)


def num_cores() -> int:
    """Returns the number of cores that this process may use.

    These are the cores that it may run on, and no more than its container's CPU quota, rounded up.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    for files in _QUOTAS:
        try:
            quota, period = " ".join((CGROUP / file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal():  # not "max" or -1
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)
