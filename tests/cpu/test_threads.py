"""How many threads a process computes with: also on machines with more cores than our kernels use,
and where it may run on some of the cores alone.
"""

import os
import subprocess
import sys

import pytest
import torch

from foredraft.cpu import _kernels
from foredraft.cpu.threads import MOST_OWN_THREADS, use_threads

ALONE = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from foredraft.config.services import DraftConfig
from draft_service.drafters.paged import device_of
device_of(DraftConfig(device="cpu"))
import torch
print(torch.get_num_threads())
"""


@pytest.mark.parametrize("number", [1, 2, MOST_OWN_THREADS, MOST_OWN_THREADS + 1, 512])
def test_any_number_of_cores_is_taken(number: int) -> None:
    before = torch.get_num_threads(), _kernels.get_num_threads()
    try:
        use_threads(number)
        assert torch.get_num_threads() == number
        assert _kernels.get_num_threads() == min(number, MOST_OWN_THREADS)
    finally:
        torch.set_num_threads(before[0])
        _kernels.set_num_threads(before[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_of_others_are_not_counted() -> None:
    command = [sys.executable, "-c", ALONE]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"
