"""How many threads a process computes with: also on machines with more cores than our kernels use,
and where it may run on some of the cores alone.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foredraft.cpu import _kernels, threads
from foredraft.cpu.threads import FEW_ROWS, num_cores, threads_for, use_threads

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


@pytest.mark.parametrize("number", [1, 2, _kernels.MOST_THREADS, _kernels.MOST_THREADS + 1, 512])
def test_any_number_of_cores_is_taken(number: int) -> None:
    use_threads(number)
    assert torch.get_num_threads() == number
    assert _kernels.get_num_threads() == min(number, _kernels.MOST_THREADS)


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores, and a system that binds processes to some",
)
def test_cores_of_others_are_not_counted() -> None:
    command = [sys.executable, "-c", ALONE]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "300000 100000"}, 3),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "5000 100000"}, 1),
        ({"cpu.max": "1600000 100000"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ({"cpu/cpu.cfs_quota_us": "150000"}, 8),
    ],
)
def test_a_containers_quota_is_kept(
    files: dict[str, str], want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert num_cores() == want


@pytest.mark.parametrize(("found", "want"), [(6, 6), (None, 1)])
def test_cores_where_no_process_is_bound_to_some(
    found: int | None, want: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    assert num_cores() == want


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
