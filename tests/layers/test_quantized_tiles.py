"""Tiles of the products with quantised weights: what they need of a card's shared memory."""

import pytest
import torch

from foredraft.kernel_launch import power_of_two
from foredraft.layers.quantized_cuda import WordsMethod
from foredraft.layers.weight_scheme import WeightScheme

SCHEMES = [
    WeightScheme("packed", 4, "group", 64, has_zeros=True),
    WeightScheme("packed", 4, "group", 128, has_zeros=True),
    WeightScheme("int8", 8, "channel"),
]


@pytest.mark.parametrize("room", [232448, 166912, 101376])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_tile_needs_more_shared_memory_than_a_card_has(scheme: WeightScheme, room: int) -> None:
    """An H200, an A100 and an RTX 4090.

    An H200 refuses three stages of 64 outputs, 64 rows and units of 64 words of 4-bit numbers:
    Triton asks for 233,472 bytes.
    """
    for outputs in (4096, 28672):
        method = WordsMethod(scheme, 4096, outputs, torch.bfloat16)
        for rows in (1, 16, 17, 32, 33, 64):
            block_m = max(8, power_of_two(rows))
            block_n, _, stages = method._tile(block_m, outputs, False)
            fitting = method._fitting(stages, block_n, block_m, room)
            # A stage holds a unit of words, and of x what these words' numbers are multiplied with.
            operands = 32 // scheme.bits * block_m * 2 + block_n * 4
            assert 1 <= fitting <= stages
            assert fitting * method._unit * operands <= room
