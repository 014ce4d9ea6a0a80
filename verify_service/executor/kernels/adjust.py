"""Adjusts logits on a GPU beside the sampling rule: penalties, biases, held-back ends, and masks.

`penalties` defines the arithmetic. Tables by slot hold one word for each token of the vocabulary:
how often the output has the token, and two flags. The device counts the tokens that it chooses, so
the host takes no part from one step to the next. Only masks, which are functions of earlier
tokens, come from the host. The kernels are imported on first use.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.kernel_launch import power_of_two
from foredraft.types import SamplingParams
from verify_service.executor.kernels.steps import Begun
from verify_service.executor.records import ADJUSTMENT, STEP
from verify_service.scheduler.token_limits import is_biased

# Bits of the column `adjusted`: whether the slot's history is read, and its biases.
HISTORY, BIASED = 1, 2
# Bits of a token in a history, above its count.
IN_PROMPT, IS_END = 1 << 29, 1 << 30
_BLOCK = 1024


def kinds(params: SamplingParams) -> int:
    """Returns a request's value of the column `adjusted`: flags of its adjustments."""
    has_history = params.has_penalties or params.min_new_tokens > 0
    return has_history * HISTORY + is_biased(params) * BIASED


def history(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Iterable[int],
    vocab_size: int,
) -> npt.NDArray[np.int32]:
    """Returns a sequence's history, int32 [V]: how often each token is in the output, and whether
    it is in the prompt or an end; see `PenaltyState` for the parameters.
    """
    made = np.bincount(_known(output, vocab_size), minlength=vocab_size).astype(np.int32)
    if params.repetition_penalty != 1.0:
        made[_known(prompt, vocab_size)] |= IN_PROMPT
    made[_known([*params.stop_token_ids, *eos_token_ids], vocab_size)] |= IS_END
    return made


def adjust_logits(
    logits: torch.Tensor,
    records: torch.Tensor,
    begun: Begun,
    positions: torch.Tensor,
    histories: torch.Tensor,
    biases: torch.Tensor,
    masks: torch.Tensor,
) -> torch.Tensor:
    """Applies the adjustments that the records ask for.

    Args:
        logits: Any float type [B * R, V], the last dimension contiguous.
        records: int32, as in `begin_step`.
        positions: int64 [B * R], positions of the rows' own tokens.
        histories: int32 [slots, V], see `history`.
        biases: float32 [slots, V].
        masks: int32 [n, V / 32]; bit v % 32 of word v // 32 allows token v. A sequence whose column
            `mask` is m > 0 uses the masks from m - 1 on, one for each of its rows.

    Returns:
        float32 [B * R, V].
    """
    from verify_service.executor.kernels import adjust_kernels

    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    adjust_kernels.adjust[(num_rows, -(-vocab // _BLOCK))](
        logits, records, begun.tokens, begun.parents, positions, histories, biases, masks, out,
        vocab, begun.tokens.shape[1], logits.stride(0), records.stride(0), masks.stride(0),
        **STEP.constants("slot", "mask", *ADJUSTMENT.names),
        HISTORY=HISTORY, BIASED=BIASED, IN_PROMPT=IN_PROMPT, IS_END=IS_END,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def count_tokens(
    records: torch.Tensor, length: torch.Tensor, emitted: torch.Tensor, histories: torch.Tensor
) -> None:
    """Adds the tokens that `walk_trees` emitted to the histories of sequences with penalties."""
    from verify_service.executor.kernels import adjust_kernels

    batch, rows = emitted.shape
    adjust_kernels.count[(batch,)](
        records, emitted, length, histories, histories.shape[1], rows, records.stride(0),
        **STEP.constants("slot", "adjusted"), HISTORY=HISTORY,
        ROWS=power_of_two(rows), num_warps=1,
    )  # fmt: skip


def _known(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(tokens, np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
