"""The rule on a GPU chooses the same token for a row beside any number of others; in Triton's
interpreter too.
"""

import pytest
import torch

from foredraft.sampling.rows import SamplingRows
from foredraft.sampling.triton_sampling import choose_tokens, gumbel
from foredraft.types import SamplingParams
from testing.triton_device import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.gpu]

NUM_ROWS, VOCAB, BLOCK = 260, 8192, 1024


def test_near_ties_fall_the_same_way_beside_other_rows():
    """Two tokens of each row tie up to rounding, which depends on the best logit that is read
    beside them.
    """
    sampling = [SamplingParams(temperature=1.0, seed=seed) for seed in range(NUM_ROWS)]
    rows = SamplingRows.from_params(sampling, [7] * NUM_ROWS, DEVICE)
    noise = gumbel(rows.seed, rows.position, torch.arange(VOCAB, device=DEVICE))
    logits = torch.full((NUM_ROWS, VOCAB), -60.0, device=DEVICE)
    every = torch.arange(NUM_ROWS, device=DEVICE)
    one = noise[:, :BLOCK].argmax(1)
    other = BLOCK + noise[:, BLOCK : 2 * BLOCK].argmax(1)
    low = 7 * BLOCK + noise[:, 7 * BLOCK :].argmin(1)
    # The largest logit has the least noise, and is far from the others.
    logits[every, one] = -3.0
    logits[every, other] = -3.0 + noise[every, one] - noise[every, other]
    logits[every, low] = 2.0
    together = choose_tokens(logits, rows)
    ties = (together == one) | (together == other)
    assert int(ties.sum()) > NUM_ROWS // 2
    alone = [
        choose_tokens(logits[row : row + 1], rows.take(slice(row, row + 1)))
        for row in range(NUM_ROWS)
    ]
    assert torch.equal(torch.cat(alone), together)
