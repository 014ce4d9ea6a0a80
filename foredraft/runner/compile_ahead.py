"""Compiles Triton kernels side by side before they are launched, which takes most of a first start
otherwise.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from foredraft.cpu.threads import num_cores
from foredraft.kernel_launch import no_collection

logger = logging.getLogger(__name__)

MOST_THREADS = 16  # more gain nothing: a part of each compilation holds Python's lock


def compile_ahead(runs: Sequence[Callable[[], object]], device: torch.device) -> int:
    """Compiles the kernels that functions would launch, without running them.

    Each function is captured in a graph that is thrown away, so the host must be able to run it
    twice. If Triton's cache has all kernels of the first function, it has those of the others too:
    they are not tried then. This uses hooks of Triton that other versions may lack; whatever is not
    compiled here is compiled when it is launched.

    Args:
        runs: Functions that can be captured; those that take the most memory first.

    Returns:
        Number of kernels that were compiled.
    """
    torch.zeros(1, 1, device=device).mm(torch.zeros(1, 1, device=device))  # makes cuBLAS's handle
    num_threads = min(MOST_THREADS, num_cores())
    compiled: list[str] = []
    try:
        with (
            _noting(compiled),
            ThreadPoolExecutor(num_threads, initializer=_use, initargs=(device,)) as threads,
        ):
            list(threads.map(_compile, _kernels_of(runs[:1])))
            if compiled:
                list(threads.map(_compile, _kernels_of(runs[1:])))
    except Exception as error:
        logger.warning("kernels are compiled one by one: %s: %s", type(error).__name__, error)
    return len(compiled)


def _kernels_of(runs: Sequence[Callable[[], object]]) -> list[tuple[Any, str]]:
    """Returns the kernels that functions would launch and that this process has not loaded:
    Triton's function of each, and how it is specialised.
    """
    from triton import knobs

    found: dict[tuple[str, str], tuple[Any, str]] = {}
    own, before = threading.get_ident(), knobs.runtime.jit_cache_hook

    def skip(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        if threading.get_ident() != own:
            return False
        found[fn.name, key] = fn.jit_function, compile["specialization_data"]
        return True  # neither compiled nor launched

    knobs.runtime.jit_cache_hook = skip
    graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in runs]  # never made executable
    pool = torch.cuda.graph_pool_handle()
    try:
        for run, graph in zip(runs, graphs, strict=True):
            with (
                no_collection(),
                torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
            ):
                run()
    finally:
        knobs.runtime.jit_cache_hook = before
        graphs.clear()
        torch.cuda.empty_cache()  # the pool's memory
    return list(found.values())


@contextmanager
def _noting(compiled: list[str]) -> Iterator[None]:
    """Notes the kernels that are compiled meanwhile, and not read from Triton's cache."""
    from triton import knobs

    before = knobs.compilation.listener

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = note
    try:
        yield
    finally:
        knobs.compilation.listener = before


def _compile(kernel: tuple[Any, str]) -> None:
    function, specialization = kernel
    function.preload(specialization)


def _use(device: torch.device) -> None:
    torch.cuda.set_device(device)
