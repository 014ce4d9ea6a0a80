"""Tiles of the products with quantised weights: what they need of a card's shared memory."""

import pytest
import torch

from foredraft.layers.weight_scheme import WeightScheme
from foredraft.layers.words_cuda import MOST_ROWS, WordsMethod

SCHEMES = [
    WeightScheme("packed", 4, "group", 64, has_zeros=True),
    WeightScheme("packed", 4, "group", 128, has_zeros=True),
    WeightScheme("int8", 8, "channel"),
]


@pytest.mark.parametrize("room", [232448, 166912, 101376])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_no_tile_needs_more_shared_memory_than_a_card_has(scheme: WeightScheme, room: int) -> None:
    """An H200, an A100 and an RTX 4090."""
    for outputs in (4096, 28672):
        method = WordsMethod(scheme, 4096, outputs, torch.bfloat16)
        for rows in (1, 16, 17, 32, 33, 64, 65, 256, MOST_ROWS):
            for is_gated in (False, True):
                tile = method._tile(rows, outputs, is_gated)
                lines = 2 * tile.outputs if is_gated else tile.outputs
                fitting = method._fitting(tile, is_gated, room)
                # A stage holds a unit of words, and of x what these words' numbers are multiplied
                # with; where each warp has its own part, one of each. One is not under way.
                operands = 32 // scheme.bits * tile.rows * 2 + lines * 4
                units = method._unit * (tile.warps if tile.parts_by == "warps" else 1)
                assert 1 <= fitting <= tile.stages
                assert (fitting - 1) * units * operands <= room
