"""Several real ranks of one model on this machine's CPU, over gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from testing import forked
from verify_service.executor.ranks.group import ProcessGroup


class NoLog:
    """Nobody watches the collectives."""

    def begin(self) -> None:
        pass

    def end(self) -> None:
        pass


def _run(
    rank: int, size: int, meeting: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
    work(ProcessGroup.join(rank, size, size, store, NoLog()), *args)


def run_ranks(size: int, directory: Path, work: Callable[..., Any], *args: Any) -> None:
    """Calls `work(group, *args)` in `size` processes; raises an error that one of them raised.

    Args:
        directory: Empty directory for the rendezvous file.
        work: A module's function, so that a process can import it.
    """
    method = forked.context().get_start_method()
    arguments = size, str(directory / "meeting"), work, args
    mp.start_processes(_run, arguments, nprocs=size, start_method=method)  # type: ignore[attr-defined]
