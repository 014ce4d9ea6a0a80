"""The number of threads that a process computes with on a CPU."""

import torch

from foredraft.cpu import _kernels


def use_threads(number: int) -> None:
    """Sets how many threads our kernels and torch's operations use.

    Our kernels use one until this is called.
    """
    torch.set_num_threads(number)
    _kernels.set_num_threads(number)
