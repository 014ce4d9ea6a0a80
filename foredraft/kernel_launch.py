"""Launch options of Triton kernels: overlap with the kernel before, block sizes, number of
variants; what must not happen while they are captured; and how long kernels take.
"""

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Variants(threading.local):
    """Decides how many variants of a kernel this thread compiles.

    Attributes:
        are_few: Whether numbers of rows, sequences and keys select as few variants as possible.
        cut_keys: Whether attention may still cut keys into parts, which takes variants of its own.
    """

    are_few = False
    cut_keys = True


VARIANTS = Variants()


@contextmanager
def few_variants(cut_keys: bool) -> Iterator[None]:
    """Limits the number of kernel variants for launches of this thread outside of graphs.

    There a new variant delays a step for most of the second that Triton takes to compile it, and
    the host takes longer to launch the kernels than the kernels take to run.

    Args:
        cut_keys: Whether attention may cut keys into parts; worth it for long contexts.
    """
    before = VARIANTS.are_few, VARIANTS.cut_keys
    VARIANTS.are_few, VARIANTS.cut_keys = True, cut_keys
    try:
        yield
    finally:
        VARIANTS.are_few, VARIANTS.cut_keys = before


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps Python's collector of cycles off while a CUDA graph is captured.

    It may free other graphs in this thread, for example after a draft has left, and that would end
    the capture with an error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """Returns launch options of a kernel that itself waits for the one before it (programmatic
    dependent launch).

    From compute capability 9.0 on, the start of a kernel can overlap the end of the one before. A
    kernel launched so waits in every program, before its first access to anything that another
    kernel writes or reads, so that the end of each kernel still implies the end of all before it.
    It lets the next one start once it has waited, or before where that one loads weights first.

    Returns:
        `launch_pdl` for the launcher and the kernel's own DEPENDENT.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"launch_pdl": able, "DEPENDENT": able}


def power_of_two(size: int) -> int:
    """Returns the smallest power of two >= `size` (>= 1), the only sizes of Triton blocks.

    Equals `triton.next_power_of_2`, which takes 2 us a call and needs Triton to be installed.
    """
    return 1 << (size - 1).bit_length()


def times_on_gpu(run: Callable[[], object], count: int) -> list[float]:
    """Returns the milliseconds that the current stream's GPU takes for `count` calls of a function
    that launches kernels, one after the other.
    """
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return times
