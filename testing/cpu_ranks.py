"""Several real ranks of one model on this machine's CPU."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from testing import forked
from verify_service.executor.ranks.group import ProcessGroup
from verify_service.executor.ranks.host_group import HostGroup
from verify_service.executor.ranks.host_memory import num_bytes

Way = Literal["memory", "gloo"]


class NoLog:
    """Nobody watches the collectives."""

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


def _run(
    rank: int, size: int, meeting: Path, way: Way, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if way == "memory":
        with meeting.open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        work(HostGroup(rank, size, memory, NoLog()), *args)
        return
    store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
    work(ProcessGroup.join(rank, size, size, store, NoLog()), *args)


def run_ranks(
    size: int, directory: Path, work: Callable[..., Any], *args: Any, way: Way = "memory"
) -> None:
    """Calls `work(group, *args)` in `size` processes; raises an error that one of them raised.

    Args:
        directory: Empty directory for the file in which they meet.
        work: A module's function, so that a process can import it.
        way: How they exchange tensors.
    """
    meeting = directory / "meeting"
    if way == "memory":
        with meeting.open("wb") as file:
            file.truncate(num_bytes(size))
    method = forked.context().get_start_method()
    arguments = size, meeting, way, work, args
    mp.start_processes(_run, arguments, nprocs=size, start_method=method)  # type: ignore[attr-defined]
