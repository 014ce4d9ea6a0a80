"""Errors of captures of CUDA graphs."""

import torch


def broken_off_capture() -> RuntimeError:
    """Returns torch's error where memory ran out inside a capture and its end fails too."""
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return error
