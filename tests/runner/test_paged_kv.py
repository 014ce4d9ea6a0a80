"""Memory of a KV cache on a CPU, which the system clears when it is first used."""

import pytest
import torch

from foredraft.kvcache.paged_kv import PagedKV
from foredraft.runner.aside import ran_out

NUM_PAGES = 4096  # of 16 slots: more than is worth a mapping


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_it_is_zeros_and_keeps_what_is_written(dtype: torch.dtype) -> None:
    kv = PagedKV(2, NUM_PAGES, 16, 1, 8, dtype, "cpu")
    assert kv.data.shape == (2, 2, 16 * NUM_PAGES, 8)
    assert kv.data.dtype == dtype
    assert not kv.data.view(torch.uint8).any()
    rows = torch.full((2, 2, 8), 3.0)
    kv.write(1, torch.tensor([5, 16 * NUM_PAGES - 1]), rows)
    assert kv.data.float().sum() == 3.0 * rows.numel()


def test_more_than_there_can_be_is_told_as_other_memory_that_ran_out() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        PagedKV(1, 1 << 50, 16, 1, 8, torch.float32, "cpu")
    assert ran_out(error.value)
