"""Computes log-probabilities of a prompt's own tokens from the hidden states of its rows, some rows
at a time.
"""

from collections.abc import Callable

import torch

from foredraft.sampling.sampling import log_probs
from verify_service.outputs import TokenLogprob
from verify_service.scheduler.step_plan import PrefillChunk

# Rows whose logits are there at a time: of a whole chunk they would take gigabytes.
SCORED_AT_ONCE = 64


def prompt_logprobs(
    chunk: PrefillChunk,
    hidden: torch.Tensor,
    first_row: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> list[TokenLogprob]:
    """Returns log-probabilities of the prompt tokens that follow the requested rows of a chunk.

    The last row of a prompt has none.

    Args:
        hidden: [rows, hidden], hidden states of the whole step after the final norm.
        first_row: Index of the chunk's first row.
        logits_of: Computes logits from hidden states.
    """
    sequence = chunk.seq
    if sequence.score_from is None:
        return []
    begin = max(chunk.start, sequence.score_from)
    end = min(chunk.start + chunk.num_tokens, sequence.num_prompt - 1)
    found: list[TokenLogprob] = []
    for start in range(begin, end, SCORED_AT_ONCE):
        stop = min(start + SCORED_AT_ONCE, end)
        row = first_row + start - chunk.start
        logits = logits_of(hidden[row : row + stop - start]).float()
        tokens = torch.tensor(sequence.prompt[start + 1 : stop + 1], device=logits.device)
        found += _scored(logits, tokens, sequence.sampling.prompt_logprobs or 0)
    return found


def _scored(logits: torch.Tensor, tokens: torch.Tensor, top_n: int) -> list[TokenLogprob]:
    own, top_tokens, top_values = log_probs(logits, tokens, top_n)
    is_better = logits > logits.gather(-1, tokens[:, None])
    columns = (own, top_tokens, top_values, is_better.sum(-1) + 1)
    return [TokenLogprob(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]
