"""Settings of the C library's heap for forwards on a CPU."""

import ctypes
import os

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
KEPT = 1 << 30  # bytes
LARGEST_MMAP_THRESHOLD = 32 << 20  # bytes; glibc takes no more
HEAP = 64 << 20  # bytes of one heap of a thread


def keep_freed_memory() -> bool:
    """Lets the process keep up to `KEPT` bytes that forwards free, for the next forward.

    Every activation of a prompt is some megabytes that glibc gives back to the system as soon as
    they are free, and gets again as pages that have to be cleared: 60,000 of them for 1,300 prompt
    tokens of foredraft-demo, a quarter of the time of the forwards. Does nothing with another C
    library, or where the environment sets one of glibc's own variables.

    Returns:
        Whether it did so.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = (
        (M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD),
        (M_TRIM_THRESHOLD, KEPT),
        (M_TOP_PAD, HEAP),
    )
    return all(libc.mallopt(*setting) for setting in settings)
