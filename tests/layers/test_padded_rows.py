"""Numbers of rows that products are computed at."""

import pytest
import torch

from foredraft.layers.padded_rows import TIMED_ROWS, timed_size
from verify_service.executor.captured.mixed import _ROW_SIZES

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_rows_are_filled_up_to_numbers_that_graphs_of_prompts_have() -> None:
    for num_rows in range(65, TIMED_ROWS + 1):
        size = timed_size(num_rows, GPU)
        assert num_rows <= size < 1.5 * num_rows
        assert size in _ROW_SIZES


@pytest.mark.parametrize(
    ("num_rows", "device", "size"),
    [(0, GPU, 1), (1, GPU, 1), (64, GPU, 64), (1025, GPU, 1280), (0, CPU, 1), (70, CPU, 70)],
)
def test_few_rows_and_those_of_a_cpu_stay_as_many(
    num_rows: int, device: torch.device, size: int
) -> None:
    assert timed_size(num_rows, device) == size
