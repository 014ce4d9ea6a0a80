"""What requests ask of logits beside the rule, on a GPU: penalties, biases, held back ends (`penalties`), and masks.

What a sequence holds is kept by slot, a word for each token of the vocabulary: how often its output has the token, and two
flags. The device counts what it chooses, so nothing of this needs the host from one step to the next; only a mask, which is
a function of the tokens before, has to come from there. The kernels are imported on first use.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from foredraft.kernel_launch import power_of_two
from foredraft.types import SamplingParams
from verify_service.executor.triton_steps import (
    ADJUSTED,
    FREQUENCY,
    LEAST,
    MASK,
    PRESENCE,
    REPETITION,
    SLOT,
    Begun,
)

# Bits of the column ADJUSTED: whether the slot's words are read, and its biases.
HISTORY, BIASED = 1, 2
# Bits of a word, above its count.
IN_PROMPT, IS_END = 1 << 29, 1 << 30
_BLOCK = 1024


def kinds(params: SamplingParams) -> int:
    """What a request's record says in the column ADJUSTED."""
    has_history = (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.min_new_tokens > 0
    )
    return has_history * HISTORY + bool(params.logit_bias) * BIASED


def words(
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Iterable[int],
    vocab_size: int,
) -> npt.NDArray[np.int32]:
    """A sequence's words, int32 [V]; see `PenaltyState` for what is meant."""
    made = np.bincount(_known(output, vocab_size), minlength=vocab_size).astype(np.int32)
    if params.repetition_penalty != 1.0:
        made[_known(prompt, vocab_size)] |= IN_PROMPT
    made[_known([*params.stop_token_ids, *eos_token_ids], vocab_size)] |= IS_END
    return made


def biases(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.float32]:
    """What is added to a sequence's logits, float32 [V]."""
    made = np.zeros(vocab_size, np.float32)
    for token, bias in params.logit_bias.items():
        if 0 <= token < vocab_size:
            made[token] = bias
    return made


def adjust_logits(
    logits: torch.Tensor,
    records: torch.Tensor,
    begun: Begun,
    positions: torch.Tensor,
    words: torch.Tensor,
    biases: torch.Tensor,
    masks: torch.Tensor,
) -> torch.Tensor:
    """The logits after what the records ask for.

    Args:
        logits: Any float type [B * R, V], the last dimension contiguous.
        records: int32, as in `begin_step`.
        positions: int64 [B * R], of the rows' own tokens.
        words: int32 [slots, V].
        biases: float32 [slots, V].
        masks: int32 [n, V / 32]; bit v % 32 of word v // 32 allows token v. A sequence whose column MASK is m > 0 has those
            from m - 1 on, one for each of its rows.

    Returns:
        float32 [B * R, V].
    """
    from verify_service.executor import adjust_kernels

    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    adjust_kernels.adjust[(num_rows, -(-vocab // _BLOCK))](
        logits, records, begun.tokens, begun.parents, positions, words, biases, masks, out,
        vocab, begun.tokens.shape[1], logits.stride(0), records.stride(0), masks.stride(0),
        SLOT=SLOT, ADJUSTED=ADJUSTED, MASK=MASK, LEAST=LEAST,
        REPETITION=REPETITION, FREQUENCY=FREQUENCY, PRESENCE=PRESENCE,
        HISTORY=HISTORY, BIASED=BIASED, IN_PROMPT=IN_PROMPT, IS_END=IS_END,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def count_tokens(
    records: torch.Tensor, length: torch.Tensor, emitted: torch.Tensor, words: torch.Tensor
) -> None:
    """Adds an outcome of `walk_trees` to the words of the sequences that have some."""
    from verify_service.executor import adjust_kernels

    batch, rows = emitted.shape
    adjust_kernels.count[(batch,)](
        records, emitted, length, words, words.shape[1], rows, records.stride(0),
        SLOT=SLOT, ADJUSTED=ADJUSTED, HISTORY=HISTORY,
        ROWS=power_of_two(rows), num_warps=1,
    )  # fmt: skip


def _known(tokens: Sequence[int], vocab_size: int) -> npt.NDArray[np.int64]:
    ids = np.asarray(tokens, np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]
