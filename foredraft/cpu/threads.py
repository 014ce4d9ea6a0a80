"""The number of threads that a process computes with on a CPU."""

import os

import torch

from foredraft.cpu import _kernels

MOST_OWN_THREADS = 256  # that `_pool.c` keeps


def use_threads(number: int) -> None:
    """Sets how many threads torch's operations use, and our kernels as far as they can.

    Our kernels use one until this is called.
    """
    torch.set_num_threads(number)
    _kernels.set_num_threads(min(number, MOST_OWN_THREADS))


def num_cores() -> int:
    """Returns the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))
