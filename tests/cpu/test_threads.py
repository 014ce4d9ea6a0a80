"""How many threads a process computes with: also on machines with more cores than our kernels use,
and where it may run on some of the cores alone.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from foredraft.cpu import _kernels, threads
from foredraft.cpu.threads import FEW_ROWS, MOST_OWN_THREADS, threads_for, use_threads

ALONE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from foredraft.config.services import DraftConfig
from draft_service.drafters.paged import device_of
device_of(DraftConfig(device="cpu"))
import torch
print(torch.get_num_threads())
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads(), _kernels.get_num_threads()
    monkeypatch.setattr(threads, "_num_threads", None)
    yield
    torch.set_num_threads(before[0])
    _kernels.set_num_threads(before[1])


@pytest.mark.parametrize("number", [1, 2, MOST_OWN_THREADS, MOST_OWN_THREADS + 1, 512])
def test_any_number_of_cores_is_taken(number: int) -> None:
    use_threads(number)
    assert torch.get_num_threads() == number
    assert _kernels.get_num_threads() == min(number, MOST_OWN_THREADS)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_of_others_are_not_counted() -> None:
    command = [sys.executable, "-c", ALONE]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"


def test_few_rows_leave_torch_one_thread():
    use_threads(3)
    assert _kernels.get_num_threads() == torch.get_num_threads() == 3
    with threads_for(FEW_ROWS):
        assert torch.get_num_threads() == 1
        assert _kernels.get_num_threads() == 3
    assert torch.get_num_threads() == 3
    with threads_for(FEW_ROWS + 1):
        assert torch.get_num_threads() == 3


def test_an_error_gives_the_threads_back():
    use_threads(2)
    with pytest.raises(KeyError), threads_for(1):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_threads_that_nobody_set_stay():
    torch.set_num_threads(2)
    with threads_for(1):
        assert torch.get_num_threads() == 2
