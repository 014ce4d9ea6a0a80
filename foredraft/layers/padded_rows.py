"""Rows with room behind them, so that a library can compute a number of rows that it is proven for
without a copy.
"""

import torch

_LEAST_STEP = 8  # minimum distance between numbers of rows that cuBLAS computes
_FEW_ROWS = 64  # up to which our own kernels compute
TIMED_ROWS = 1024  # up to which cuBLAS selects badly for some numbers, so that times decide


def proven_size(num_rows: int) -> int:
    """Rounds a number of rows up to a multiple of a sixteenth of the next power of two, and of
    at least 8.
    """
    step = max(_LEAST_STEP, (1 << (num_rows - 1).bit_length()) // 16)
    return -(-num_rows // step) * step


def timed_size(num_rows: int, device: torch.device) -> int:
    """Returns the number of rows to compute where so many are asked for: at least one, and on a GPU
    one of few numbers, since strict products of each are timed when they first come, see
    `exact_linear.Proofs`. Graphs of prompts have those from 65 to 1,024.
    """
    if num_rows <= _FEW_ROWS or device.type == "cpu":
        return max(1, num_rows)
    step = (1 << (min(num_rows, TIMED_ROWS) - 1).bit_length()) // 4
    return -(-num_rows // step) * step


def room(num_rows: int) -> int:
    """Returns the number of rows that `new_rows` makes room for on a GPU."""
    return num_rows if num_rows <= _FEW_ROWS else proven_size(num_rows)


def new_rows(like: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Returns memory for rows [num_rows, width], contiguous; on a GPU with room for more.

    Args:
        like: Tensor of the same type and device.
    """
    if num_rows <= _FEW_ROWS or like.device.type == "cpu":
        return like.new_empty((num_rows, width))
    return like.new_empty((room(num_rows), width))[:num_rows]


def with_more(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Returns contiguous rows x [n, width] as [num_rows, width], with any numbers in the rows
    beyond n; a copy where there is no room behind them.
    """
    end = x.storage_offset() + num_rows * x.shape[1]
    if end * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((num_rows, x.shape[1]), x.stride())
    padded = x.new_empty((num_rows, x.shape[1]))
    padded[: x.shape[0]] = x
    return padded
