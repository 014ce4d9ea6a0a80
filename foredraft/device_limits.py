"""What a kernel may use of a GPU: compute units, and shared memory."""

import functools

import torch

# Compute units assumed where there is no GPU, which is where Triton's interpreter runs the kernels.
INTERPRETED_UNITS = 16


def compute_units(device: torch.device) -> int:
    """Returns the number of compute units (multiprocessors) of a device."""
    return _units_of_gpu(device) if device.type == "cuda" else INTERPRETED_UNITS


@functools.cache
def _units_of_gpu(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_room(device: torch.device) -> bool:
    """Returns whether a program may use 128 KiB of shared memory.

    sm_86, sm_89 and sm_120 have 99.
    """
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return (9, 0) <= capability < (12, 0) or capability in ((8, 0), (8, 7))
