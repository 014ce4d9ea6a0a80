"""GPU memory left for KV, and the error when none is left."""

import pytest
import torch

from foredraft.errors import ConfigError
from testing.broken_captures import broken_off_capture
from verify_service.memory import GpuBudget, explained, num_pages

GIB = 1 << 30


def test_what_is_left_is_what_nobody_else_needs():
    budget = GpuBudget(
        total=80 * GIB,
        used=17 * GIB,
        kept_free=12 * GIB,
        workspace=2 * GIB,
        arena=GIB,
        projection=GIB // 2,
        draft=GIB // 2,
    )
    assert budget.kv == 47 * GIB
    assert f"workspace 2048, arena 1024, projection 512, draft 512, kv {47 * 1024}" in str(budget)


def test_a_card_that_is_too_small_is_refused_with_the_flags_that_help():
    with pytest.raises(ConfigError, match=r"--mem-fraction-static.*--cuda-graph-max-bs"):
        num_pages(
            page_size=16,
            bytes_per_page=1 << 20,
            budget_bytes=-5,
            max_total_tokens=None,
            max_useful_tokens=1000,
        )


@pytest.mark.parametrize(
    ("given", "pages"),
    [
        ({"budget_bytes": 999}, 9),
        ({"budget_bytes": 1000}, 10),
        # More than running requests can fill is never made; the last page may be filled in part.
        ({"max_useful_tokens": 64}, 4),
        ({"max_useful_tokens": 65}, 5),
        ({"max_total_tokens": 95}, 5),
        ({"max_total_tokens": 16, "budget_bytes": 0}, 1),
    ],
)
def test_pages_fill_the_budget_and_no_more_than_is_of_use(given, pages):
    usual = {"budget_bytes": 10_000, "max_total_tokens": None, "max_useful_tokens": 10_000}
    assert num_pages(page_size=16, bytes_per_page=100, **{**usual, **given}) == pages


def test_less_than_a_page_of_tokens_is_refused():
    with pytest.raises(ConfigError, match="--max-total-tokens must be at least one page of 16"):
        num_pages(
            page_size=16,
            bytes_per_page=100,
            budget_bytes=10_000,
            max_total_tokens=15,
            max_useful_tokens=1000,
        )


def test_more_tokens_than_memory_are_refused():
    def pages(tokens: int) -> int:
        return num_pages(
            page_size=16,
            bytes_per_page=2**20,
            budget_bytes=0,
            max_total_tokens=tokens,
            max_useful_tokens=1000,
            available_bytes=3 * 2**20,
        )

    assert pages(48) == 3
    message = "--max-total-tokens 64 takes 4 MiB, and 3 MiB are free"
    with pytest.raises(ConfigError, match=message):
        pages(64)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the manual"),
        broken_off_capture(),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 12 bytes"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ],
)
def test_running_out_of_memory_names_the_flags_that_help(error):
    message = r"for the graphs: lower --this or --that \([^\n]*\)$"
    with pytest.raises(ConfigError, match=message), explained("the graphs", "--this or --that"):
        raise error


def test_other_errors_stay_as_they_are():
    with pytest.raises(RuntimeError, match="illegal"), explained("the graphs", "--this"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
