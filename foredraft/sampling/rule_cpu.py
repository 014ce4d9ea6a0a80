"""The sampling rule on a CPU, in C (`foredraft/cpu/_sampling.c`): the tokens and scores of whole
rows, without the noise of every token.
"""

import torch

from foredraft.cpu import _kernels
from foredraft.sampling.filters import log_min_p
from foredraft.sampling.rows import SamplingRows


def choose(logits: torch.Tensor, rows: SamplingRows, kernel: int = 0) -> torch.Tensor:
    """See `sampling.choose`.

    Args:
        kernel: Instruction set, an index into `_kernels.KERNELS`.
    """
    return _best(logits, rows, 1, None, None, True, kernel)[0][:, 0]


def greedy(logits: torch.Tensor, kernel: int = 0) -> torch.Tensor:
    """Returns the lowest id among the largest logits of each row, int64 [R].

    A row with a NaN or plus infinity gets NO_TOKEN.

    Args:
        logits: [R, V].
        kernel: See `choose`.
    """
    logits = _readable(logits)
    num_rows, vocab = logits.shape
    columns, scores = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows)
    _kernels.choose(
        logits.data_ptr(), 0, 0, 0, 0, 0, 0, 0, 0, columns.data_ptr(), scores.data_ptr(),
        num_rows, vocab, logits.stride(0), 1, 1, kernel,
    )  # fmt: skip
    return columns


def perturbed_top(
    logits: torch.Tensor,
    rows: SamplingRows,
    k: int,
    token_map: torch.Tensor | None = None,
    best: torch.Tensor | None = None,
    kernel: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sampling.perturbed_top`, and `choose` for `kernel`."""
    return _best(logits, rows, k, token_map, best, False, kernel)


def _best(
    logits: torch.Tensor,
    rows: SamplingRows,
    k: int,
    token_map: torch.Tensor | None,
    best: torch.Tensor | None,
    is_choice: bool,
    kernel: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k best tokens of each row and their scores.

    Args:
        is_choice: Whether rows of temperature 0 are chosen greedily, and rows with a NaN or plus
            infinity get NO_TOKEN.
    """
    logits = _readable(logits)
    num_rows, vocab = logits.shape
    columns = torch.empty((num_rows, k), dtype=torch.int64)
    scores = torch.empty((num_rows, k))
    # Each stays alive until the call is over.
    temperature, top_p, floor = (
        _checked(one, num_rows, torch.float32)
        for one in (rows.temperature, rows.top_p, log_min_p(rows))
    )
    top_k, seed, position = (
        _checked(one, num_rows, torch.int64) for one in (rows.top_k, rows.seed, rows.position)
    )
    best = None if best is None else _checked(best, num_rows, torch.float32)
    tokens = None if token_map is None else _checked(token_map, vocab, torch.int32)
    _kernels.choose(
        logits.data_ptr(),
        temperature.data_ptr(),
        top_p.data_ptr(),
        floor.data_ptr(),
        0 if best is None else best.data_ptr(),
        top_k.data_ptr(),
        seed.data_ptr(),
        position.data_ptr(),
        0 if tokens is None else tokens.data_ptr(),
        columns.data_ptr(),
        scores.data_ptr(),
        num_rows,
        vocab,
        logits.stride(0),
        k,
        int(is_choice),
        kernel,
    )
    return columns, scores


def _readable(logits: torch.Tensor) -> torch.Tensor:
    """Returns logits [R, V] as float32 rows in one piece."""
    if not logits.is_cpu:
        raise ValueError(f"logits on {logits.device}")
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        logits = logits.float().contiguous()
    return logits


def _checked(values: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    if values.shape != (count,) or not values.is_cpu:
        raise ValueError(f"{tuple(values.shape)} numbers on {values.device} for {count}")
    return values.to(dtype).contiguous()
