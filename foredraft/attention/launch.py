"""How Triton kernels of a forward are launched one after another."""

import functools

import torch


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
