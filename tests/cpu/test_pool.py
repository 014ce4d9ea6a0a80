"""Threads of the kernels: many short jobs, several callers, processes that fork, and sleep."""

import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from foredraft.cpu import _kernels
from foredraft.cpu.products import multiply

X, WEIGHT = torch.randn(3, 64), torch.randn(1200, 64)
WANT = multiply(X, WEIGHT, None, 1)


needs_fork = pytest.mark.skipif(
    not (hasattr(os, "fork") and os.path.exists("/proc/self/task")), reason="forks, and reads /proc"
)


def is_right(num_threads: int) -> bool:
    return torch.equal(multiply(X, WEIGHT, None, num_threads), WANT)


def num_own_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_many_short_jobs():
    for num_threads in (2, 3, 4):
        assert all(is_right(num_threads) for _ in range(3000))


def test_jobs_after_sleep():
    for _ in range(20):
        time.sleep(0.002)
        assert is_right(3)


def test_several_callers_at_once():
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(is_right, [1, 2, 3, 4] * 500))


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_has_threads_of_its_own():
    assert is_right(3)
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            is_right(2)

    other = threading.Thread(target=keep_busy)
    other.start()
    try:
        for _ in range(10):
            child = os.fork()  # where other libraries may start threads of their own
            if child == 0:
                good = all(is_right(3) for _ in range(200))
                os._exit(0 if good and num_own_threads() >= 3 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        other.join()
    assert is_right(3)


@needs_fork
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jobs_where_the_system_gives_no_threads():
    """In a child without memory for more stacks than those of its parent's threads."""
    assert is_right(3)
    child = os.fork()
    if child == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), most))
        good = all(is_right(200) for _ in range(200))
        os._exit(0 if good and num_own_threads() < 200 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_threads_sleep_between_steps():
    assert is_right(3)
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.1  # one that spins takes 0.2 s


def test_the_number_of_threads_is_checked():
    before = _kernels.get_num_threads()
    try:
        _kernels.set_num_threads(2)
        assert _kernels.get_num_threads() == 2
        for wrong in (0, -1, 100_000):
            with pytest.raises(ValueError, match="threads"):
                _kernels.set_num_threads(wrong)
        assert _kernels.get_num_threads() == 2
    finally:
        _kernels.set_num_threads(before)
