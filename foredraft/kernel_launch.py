"""What launches of Triton kernels share: how one follows another, the sizes of their blocks, and how many variants there are."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Variants(threading.local):
    """What decides in how many variants kernels are launched.

    Attributes:
        are_few: Numbers of rows, sequences and keys are to decide little.
        cut_keys: Attention may cut keys into parts all the same, for which it takes variants of their own.
    """

    are_few = False
    cut_keys = True


VARIANTS = Variants()


@contextmanager
def few_variants(cut_keys: bool) -> Iterator[None]:
    """For what this thread launches outside of graphs: there a variant that comes up late holds a step up for the most of a
    second that Triton takes to compile it, and the host takes longer to launch the kernels than the kernels take."""
    before = VARIANTS.are_few, VARIANTS.cut_keys
    VARIANTS.are_few, VARIANTS.cut_keys = True, cut_keys
    try:
        yield
    finally:
        VARIANTS.are_few, VARIANTS.cut_keys = before


@functools.cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that waits by itself for the one before it (programmatic dependent launch).

    From compute capability 9.0 on, the start of a kernel can overlap the end of the one before. A kernel launched so waits in
    every program, before its first access to anything that another kernel writes or reads, so that the end of each
    kernel still implies the end of all before it.

    Returns:
        `launch_pdl` for the launcher and the kernel's own DEPENDENT.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": able, "DEPENDENT": able}


def power_of_two(size: int) -> int:
    """The smallest power of two that is no less than `size` >= 1: a block of Triton has no other size.

    As `triton.next_power_of_2`, which takes 2 us a call and needs Triton to be there.
    """
    return 1 << (size - 1).bit_length()
